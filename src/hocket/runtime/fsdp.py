"""FSDP2 under split backwards: gradients stay whole until the last W of a step, then are reduced.

FSDP reduces in the backward that it sees, which is I, where the gradients put off to W are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hocket.errors import RunError


class Shards:
    """The modules of one stage on which `fully_shard` was called; there may be none."""

    def __init__(self, module: nn.Module) -> None:
        self.modules: list[Any] = [m for m in module.modules() if isinstance(m, _fsdp_module())]

    @contextmanager
    def whole(self) -> Generator[None]:
        """Inside, the modules have the parameters that forwards use; collective."""
        for module in self.modules:  # Those around others first, as FSDP wants it.
            module.unshard()
        yield
        for module in self.modules:
            module.reshard()

    def hold(self) -> None:
        """From now on backwards reduce nothing."""
        self._set_sync(False)

    def fold(self) -> None:
        """Adds what W left in the gradients to the sums, which may have a wider type."""
        for p in self._parameters():
            p.accumulate_unsharded_grad_if_needed()
            p.to_accumulated_grad_if_needed()

    def reduce(self) -> None:
        """Reduces the gradients of the whole step, as after any backward; collective.

        Raises: RunError where a gradient is left over.
        """
        self._set_sync(True)
        for module in self.modules:
            state = module._get_fsdp_state()
            if state._is_root:
                state._root_post_backward_final_callback()
        for p in self._parameters():
            if p._unsharded_param.grad is not None or p.unsharded_accumulated_grad is not None:
                raise RunError(f"FSDP did not reduce the gradient of {p._param_fqn}")

    def _set_sync(self, sync: bool) -> None:
        for module in self.modules:
            module.set_requires_gradient_sync(sync, recurse=False)

    def _parameters(self) -> Generator[Any]:
        """What FSDP keeps of each parameter that a forward or `whole` has gathered."""
        for module in self.modules:
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from (p for p in group.fsdp_params if hasattr(p, "_unsharded_param"))


def kind_of(module: nn.Module) -> type:
    """The class of a module; of one that FSDP made its own, the class that it was before."""
    kind = type(module)
    return kind.__mro__[2] if isinstance(module, _fsdp_module()) else kind


def _fsdp_module() -> Any:
    """FSDP's class; none where nothing has imported it, which would take a second."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
