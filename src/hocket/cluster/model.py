"""What a model is: its sizes, read from the catalogue or from a TOML file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hocket.cluster.tables import catalogue_entry, hashed_once, known_keys, load_toml, required
from hocket.errors import UsageError


@dataclass(frozen=True)
class Mla:
    """Sizes of multi-head latent attention: ranks of the compressions, sizes per head.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1. `q_rank` 0: queries are not compressed.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Moe:
    """Sizes of a mixture of experts: each token goes to `top_k` of `experts`.

    ffn: width of one expert. shared_ffn: width of all shared experts together. dense_layers:
    the first layers have one dense network instead. every: each how-manieth layer has experts.
    """

    experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    every: int = 1


@hashed_once
@dataclass(frozen=True)
class Model:
    """A decoder-only transformer, as its sizes.

    ffn: width of the dense network (0 where every layer has experts). gated: three matrices with
    a gate (SwiGLU, GeGLU) instead of two. biases: the linear layers have biases. positions:
    learned position embeddings (0: none). dropout: trained with dropout. tied: embedding and head
    share one matrix. window: tokens that an attention layer with a sliding window sees (0: none),
    in `window_layers` of the layers. norms: normalisations per layer. mtp: layers that predict
    further tokens, each with the head once more.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    gated: bool = True
    biases: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    layer_norm: bool = False
    norms: int = 2
    positions: int = 0
    dropout: bool = False
    tied: bool = False
    window: int = 0
    window_layers: int = 0
    mtp: int = 0
    mla: Mla | None = None
    moe: Moe | None = None
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Fills in what other sizes imply. Raises: UsageError for sizes that cannot be."""
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "ffn", self.ffn or (0 if self.moe else 4 * self.hidden))
        if not self.head_dim and self.mla is None:
            if self.hidden % self.heads:
                raise UsageError(
                    f"{self.name}: hidden is {self.hidden} and heads is {self.heads}; hidden must "
                    "be a multiple of heads, or head_dim must be set"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        self._check()

    def _check(self) -> None:
        for part in (self, self.mla, self.moe):
            for f in fields(part) if part is not None else ():
                value = getattr(part, f.name)
                if isinstance(value, int) and not 0 <= value <= 10**8:
                    raise UsageError(
                        f"{self.name}: {f.name} is {value}; it must be from 0 to 100,000,000"
                    )
        for name in ("layers", "hidden", "heads", "vocab"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"{self.name}: {name} is {getattr(self, name)}; it must be 1 or more"
                )
        if self.heads % self.kv_heads:
            raise UsageError(
                f"{self.name}: heads is {self.heads} and kv_heads is {self.kv_heads}; heads "
                "must be a multiple of kv_heads"
            )
        if self.moe is not None and not 1 <= self.moe.top_k <= self.moe.experts:
            raise UsageError(
                f"{self.name}: top_k is {self.moe.top_k} and experts is {self.moe.experts}; top_k "
                "must be from 1 to experts"
            )
        needs_ffn = self.moe is None or self.moe.dense_layers or self.moe.every > 1
        if needs_ffn and not self.ffn:
            raise UsageError(f"{self.name}: ffn is missing; the dense layers need it")

    def has_experts(self, layer: int) -> bool:
        """Whether a layer (from 0) has experts."""
        moe = self.moe
        if moe is None or layer < moe.dense_layers:
            return False
        return (layer + 1) % moe.every == 0

    def mean_context(self, seq: int, *, causal: bool = True) -> tuple[float, float]:
        """How many tokens a token attends to on average: in a full layer, in a windowed one."""
        full = seq / 2 if causal else float(seq)
        if not self.window or self.window >= seq:
            return full, full
        w = self.window
        return full, w - w * w / (2 * seq) if causal else float(min(2 * w, seq))


_NESTED: dict[str, type] = {"mla": Mla, "moe": Moe}


def model_from(entry: Mapping[str, Any], where: str) -> Model:
    """The model that a table of sizes describes.

    Raises: UsageError for a missing size, an unknown key or a value of the wrong type, naming it.
    """
    known_keys(entry, Model, where)
    values: dict[str, Any] = dict(entry)
    for name, kind in _NESTED.items():
        if name in values:
            if not isinstance(values[name], Mapping):
                raise UsageError(
                    f"{where}: {name} is {values[name]!r}; it must be a table of sizes"
                )
            known_keys(values[name], kind, f"{where}: {name}")
            values[name] = kind(**required(values[name], kind, f"{where}: {name}"))
    return Model(**required(values, Model, where))


def load_model(name: str) -> Model:
    """The model of a name in the catalogue, a TOML file of sizes, or a Hugging Face `config.json`.

    Raises: UsageError for a name that is unknown, a size that is missing, a key that is unknown.
    """
    if name.endswith(".json"):
        from hocket.cluster.readers import model_from_huggingface

        return model_from_huggingface(name)
    if name.endswith(".toml"):
        return model_from(load_toml(name), name)
    return model_from(catalogue_entry("models", name, "model"), name)


def padded_vocab(model: Model, tp: int, multiple: int = 128) -> int:
    """The vocabulary as Megatron pads it, to a multiple of 128 tp."""
    step = multiple * tp
    return math.ceil(model.vocab / step) * step
