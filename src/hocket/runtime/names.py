"""The names that the weights of a stage have in the whole model: no partition changes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and of checkpoints


def parts(modules: Mapping[int, nn.Module]) -> dict[str, int]:
    """How many parts of the model each stage is: those of a sequence, else one."""
    return {str(s): len(_children(module)) for s, module in modules.items()}


def renamings(
    modules: Mapping[int, nn.Module], said: Sequence[Mapping[str, int]], n_stages: int
) -> dict[int, Callable[[str], str]]:
    """For each stage, what a name in it is in the whole model.

    A part of the model is known by its number: `7.linear.weight` is in the part that seven others
    come before, whichever stage that is. Those of a loss begin with `loss.`; a module that has a
    method `whole_name(name)` is asked. said: the `parts` of every rank.
    """
    counts = {int(s): n for own in said for s, n in own.items()}
    return {
        s: _renaming(module, s == n_stages, sum(counts[i] for i in range(s)))
        for s, module in modules.items()
    }


def _renaming(module: nn.Module, is_loss: bool, first: int) -> Callable[[str], str]:
    own: Any = getattr(module, "whole_name", None)
    children = _children(module)

    def rename(name: str) -> str:
        for prefix in WRAPPERS:
            name = name.replace(prefix, "")
        if own is not None:
            return own(name)
        if is_loss or children == [""]:
            return f"loss.{name}" if is_loss else f"{first}.{name}"
        child, _, rest = name.partition(".")
        return f"{first + children.index(child)}.{rest}"

    return rename


def _children(module: nn.Module) -> list[str]:
    """The names of a sequence's parts in their order; of another module the empty one of itself."""
    inner = getattr(module, "_orig_mod", module)
    in_order = isinstance(inner, nn.Sequential | nn.ModuleList)
    return list(inner._modules) if in_order else [""]
