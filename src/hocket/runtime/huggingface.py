"""Hugging Face causal language models as stages: their own modules and forwards, by layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hocket.costs.partition import partition
from hocket.errors import RunError, UsageError
from hocket.runtime.rng import key
from hocket.runtime.values import tensors_of


class _Elsewhere(nn.Identity):
    """In the place of a part that another stage has: returns its input."""

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        return input


class _Nothing(nn.Identity):
    """In the place of a part whose output is added: `x + out` is x itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __radd__(self, x: Any) -> Any:
        return x


class Names(NamedTuple):
    """What the parts of a model are called; all but `head` are children of its `base_model`.

    first: the parts before the layers, and what is in their place in the other stages.
    """

    first: Mapping[str, type[nn.Module]]
    layers: str
    norm: str
    head: str = "lm_head"


NAMES = (
    Names({"embed_tokens": _Elsewhere}, "layers", "norm"),
    Names({"wte": _Elsewhere, "wpe": _Nothing, "drop": _Elsewhere}, "h", "ln_f"),
    Names({"embed_in": _Elsewhere, "emb_dropout": _Elsewhere}, "layers", "final_layer_norm"),
)
"""A new family is one row here."""


class CausalStage(nn.Module):
    """Some consecutive parts of a causal language model, with the forward of the whole.

    The first stage takes tokens `[sequence, position]`, the others what the one before returns,
    `[sequence, position, hidden]`; the last returns scores `[sequence, position, token]`.
    attention_mask, position_ids: as the model takes them, the same for every stage. parts: the
    numbers of its parts among all. With `carries = True` it takes slices of sequences, and carries
    keys and values from one to the next.
    """

    carries: bool | None = None

    def __init__(self, part: Any, names: Names, parts: range, n: int) -> None:
        super().__init__()
        self.part, self.names, self.parts = part, names, parts
        self.first, self.last = 0 in parts, n - 1 in parts
        self.tied_parameters: list[list[tuple[int, str]]] = []
        self._checked = [False, False]  # without gradients, with them

    def forward(
        self, x: Tensor, attention_mask: Any = None, position_ids: Any = None, carried: Any = None
    ) -> Any:
        """Scores of the last stage, vectors of the others; with `carries` a pair, as `carried`."""
        more = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}
        if not self.carries:
            return self._called(x, more)
        kept = _Kept(0, None, ()) if carried is None else _Kept(*carried)
        cache = kept.fill(
            more, x, self.parts, len(getattr(self.part.base_model, self.names.layers))
        )
        return self._called(x, more), kept.after(more, x, cache)

    def _called(self, x: Tensor, more: dict[str, Any]) -> Tensor:
        done = self._checked[torch.is_grad_enabled()]
        return self._call(x, more) if done else self._check(x, more)

    @torch.compiler.disable
    def _check(self, x: Tensor, more: dict[str, Any]) -> Tensor:
        """The output of a forward, which is checked for all after it."""
        chain = _Chain(None if self.first else x)
        base = self.part.base_model
        parts = [*getattr(base, self.names.layers), getattr(base, self.names.norm)]
        hooks = [h for part in parts for h in chain.attach(part)]
        try:
            out = self._call(x, more)
        finally:
            for hook in hooks:
                hook.remove()
        if not self.last:
            chain.check(out)
        self._checked[torch.is_grad_enabled()] = True
        return out

    def _call(self, x: Tensor, more: dict[str, Any]) -> Tensor:
        inputs = {"input_ids" if self.first else "inputs_embeds": x, **more}
        if self.last:
            return self.part(**inputs).logits
        return self.part.base_model(**inputs).last_hidden_state

    def whole_name(self, name: str) -> str:
        """The name of a weight in the whole model."""
        return name.removeprefix("part.")


class _Kept(NamedTuple):
    """What a stage carries: how many positions were before, their mask, each layer's pair."""

    seen: int
    mask: Tensor | None
    pairs: Sequence[tuple[Tensor, Tensor]]

    def fill(self, more: dict[str, Any], x: Tensor, parts: range, n: int) -> list[Any]:
        """The caches of a stage's layers, put into the model's arguments with all before."""
        from transformers.cache_utils import DynamicCache, DynamicLayer

        layers = [DynamicLayer() for i in range(n) if i + 1 in parts]
        for layer, (keys, values) in zip(layers, self.pairs, strict=False):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        # The model asks the first layer of all how many positions there were.
        cache = DynamicCache()
        cache.layers = [*layers[:1] * max(0, parts.start - 1), *layers]
        if more["position_ids"] is None:
            positions = torch.arange(self.seen, self.seen + x.shape[1], device=x.device)
            more["position_ids"] = positions.unsqueeze(0)
        if self.mask is not None:
            more["attention_mask"] = torch.cat([self.mask, more["attention_mask"]], dim=1)
        more |= {"use_cache": True, "cache": cache}
        return layers

    def after(self, more: dict[str, Any], x: Tensor, layers: Sequence[Any]) -> tuple[Any, ...]:
        """What is carried on."""
        pairs = tuple((layer.keys, layer.values) for layer in layers)
        return self.seen + x.shape[1], more["attention_mask"], pairs


class _Chain:
    """What goes from layer to layer: one tensor that nothing else in the model changes.

    Otherwise stages would compute something else than the model, such as scaling twice.
    """

    def __init__(self, start: Tensor | None) -> None:
        self._now = None if start is None else (start, start._version)

    def attach(self, part: nn.Module) -> list[Any]:
        """Hooks of a layer."""
        return [
            part.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            part.register_forward_hook(self._after),
        ]

    def check(self, x: Any) -> None:
        """Raises RunError where this is not what the last layer returned."""
        if self._now is not None:
            before, version = self._now
            same = isinstance(x, Tensor) and x.shape == before.shape and x._version == version
            if not same or x.data_ptr() != before.data_ptr():
                raise RunError(f"the model changes the hidden state between its layers; {_REFUSED}")

    def _before(self, part: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        hidden, *others = [*args, *kwargs.values()]
        self.check(hidden)
        if any(t.requires_grad for t in tensors_of(others)):
            raise RunError(f"the layers get more values with gradients than one; {_REFUSED}")

    def _after(self, part: nn.Module, args: Any, out: Any) -> None:
        if not isinstance(out, Tensor):
            raise RunError(f"the layers return a {type(out).__name__}; {_REFUSED}")
        self._now = out, out._version


_REFUSED = "such a model cannot be split by layers"


def split_model(
    model: Any, stages: int | Sequence[int], *, loads: Sequence[float] | None = None
) -> list[CausalStage]:
    """The stages of a Hugging Face causal language model, which share its modules and weights.

    stages: how many, with as many layers each as can be; or how many parts each has. The parts are
    the embedding, every layer, and norm and head together. loads: of every part; the heaviest stage
    is then as light as can be. Weights that stages share are tied by `Pipeline` itself.

    Raises: UsageError for an architecture that does not fit, or parts that do not.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = _names_of(model)
    n = len(getattr(model.base_model, names.layers)) + 2
    made = []
    for parts in _parts(n, stages, loads):
        made.append(CausalStage(_keep(_copied(model), names, parts), names, parts, n))
    held: dict[int, list[tuple[int, str]]] = {}
    for s, stage in enumerate(made):
        for name, p in stage.named_parameters():
            held.setdefault(id(p), []).append((s, name))
    for stage in made:
        stage.tied_parameters = [group for group in held.values() if len(group) > 1]
    return made


def _parts(n: int, stages: int | Sequence[int], loads: Sequence[float] | None) -> list[range]:
    """Which of n parts each stage has."""
    every = f"{n} parts (the embedding, {n - 2} layers, and norm and head as one)"
    if isinstance(stages, int):
        loads = loads or [0.0, *[1.0] * (n - 2), 0.0]
        if not 1 <= stages <= n:
            raise UsageError(f"the model has {every}, which do not make {stages} stages")
        if len(loads) != n:
            raise UsageError(f"there are {len(loads)} loads, but the model has {every}")
        stages = partition(loads, stages)
    if sum(stages) != n or min(stages) < 1:
        raise UsageError(
            f"the stages have {list(stages)} parts; it must be 1 or more each, and the model has "
            f"{every}"
        )
    return [range(first, last) for first, last in pairwise((0, *accumulate(stages)))]


def _names_of(model: Any) -> Names:
    """The row of NAMES that a model fits.

    Raises: UsageError where there is none, saying what is in the way.
    """
    base, kind = model.base_model, type(model).__name__
    children = dict(base.named_children())
    for names in NAMES:
        if {*names.first, names.layers, names.norm} <= children.keys():
            break
    else:
        known = "; ".join(", ".join([*x.first, x.layers, x.norm]) for x in NAMES)
        raise UsageError(f"{kind} has the parts {', '.join(children)}, but a split needs {known}")
    ours = {*names.first, names.layers, names.norm}
    inside = [name for name in children if name not in ours and [*children[name].parameters()]]
    own = [name for name, _ in base.named_parameters(recurse=False)]
    beside = [name for name, _ in model.named_children()]
    beside = [name for name in beside if name not in (model.base_model_prefix, names.head)]
    if odd := inside + own + beside:
        raise UsageError(f"{kind} has {odd[0]} beside its layers, which no stage would know")
    if getattr(model.config, "output_router_logits", False):
        raise UsageError(
            f"{kind} adds a loss of the routers of all layers together; split it with "
            "output_router_logits = False in its config"
        )
    return names


def _copied(module: Any) -> Any:
    """A copy that has the same parts and weights, but may get others."""
    new = copy.copy(module)
    for kind in ("_modules", "_parameters", "_buffers"):
        new.__dict__[kind] = dict(module.__dict__[kind])
    return new


def _keep(model: Any, names: Names, parts: range) -> Any:
    """The model, with nothing in the place of all parts but these."""
    base = _copied(model.base_model)
    model._modules[model.base_model_prefix] = base
    layers = getattr(base, names.layers)
    base._modules[names.layers] = nn.ModuleList(
        layer if i in parts else _Elsewhere() for i, layer in enumerate(layers, 1)
    )
    if 0 not in parts:
        base._modules.update({name: put() for name, put in names.first.items()})
    if len(layers) + 1 not in parts:
        base._modules[names.norm] = model._modules[names.head] = _Elsewhere()
    for name, child in base.named_children():
        if name not in (*names.first, names.layers, names.norm):
            child.draws = False  # it is in every stage, so it has no place among the layers
    return model


def load_stage(
    folder: str | Path, stage: int, stages: int | Sequence[int], *,
    loads: Sequence[float] | None = None, dtype: torch.dtype = torch.float32, seed: int = 0,
) -> CausalStage:  # fmt: skip
    """One of the stages of `split_model`, of a model in a folder; only this one takes memory.

    Its weights are those of the safetensors there. Without any they are drawn as the model does it,
    and depend on the seed alone, not on the split.

    Raises: UsageError for a folder without a model, or with one that cannot be split.
    """
    config = read_config(folder)
    with torch.device("meta"):
        whole = _transformers().AutoModelForCausalLM.from_config(config, dtype=dtype)
    made, kind = split_model(whole, stages, loads=loads)[stage], type(whole)
    drawn = not any(file.suffix in (".safetensors", ".bin") for file in Path(folder).iterdir())
    skeleton = type(kind.__name__, (kind,), _skeleton(kind, made, seed))
    try:
        part, said = skeleton.from_pretrained(
            None if drawn else folder, config=config, state_dict={} if drawn else None, dtype=dtype,
            output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # of the files: each library has errors of its own
        raise UsageError(f"{folder}: {str(error).strip().splitlines()[0]}") from error
    if said["missing_keys"] and not drawn:
        raise UsageError(f"{folder} has no weights for {min(said['missing_keys'])}")
    part.__class__ = kind
    del part.base_model._initialize_weights
    made.part = _keep(part, made.names, made.parts)
    return made.train()


def _skeleton(kind: Any, stage: CausalStage, seed: int) -> dict[str, Any]:
    """What a class of model does otherwise that has a stage's parts only.

    It keeps both ends where they are tied, since a file has such a weight once.
    """

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        ends = self.get_input_embeddings(), self.get_output_embeddings()
        _keep(self, stage.names, stage.parts)
        if self.all_tied_weights_keys:
            self.set_input_embeddings(ends[0])
            self.set_output_embeddings(ends[1])
        self.base_model._initialize_weights = self._initialize_weights

    def initialize(self: Any, module: nn.Module, *args: Any) -> None:
        name = next(name for name, part in self.named_modules() if part is module)
        torch.manual_seed(key(seed, name))
        kind._initialize_weights(self, module, *args)

    return {
        "__module__": kind.__module__, "__init__": start, "_initialize_weights": initialize
    }  # fmt: skip


def read_config(folder: str | Path) -> Any:
    """The configuration of the model in a folder.

    Raises: UsageError for a folder without one, and where transformers is missing.
    """
    if not Path(folder, "config.json").is_file():
        raise UsageError(f"{folder} has no config.json")
    try:
        return _transformers().AutoConfig.from_pretrained(folder)
    except (ValueError, OSError) as error:
        raise UsageError(f"{folder}: {str(error).splitlines()[0]}") from None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UsageError(
            "Hugging Face models need transformers: pip install 'hocket[hf]'"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
