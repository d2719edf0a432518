"""The model of a Hugging Face folder, split into any number of stages. The model of `--hf`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from hocket.cluster import layer_flops, load_model
from hocket.costs import load_costs, per_stage
from hocket.demo.data import text, windows
from hocket.demo.gpt import given, loss
from hocket.errors import UsageError
from hocket.runtime.huggingface import load_stage, read_config

__all__ = ["batch", "build", "loss"]


def build(
    stage: int,
    n_stages: int,
    *,
    hf: str,
    parts: str = "",
    costs: str = "",
    seq: int = 128,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    slices: int = 1,
) -> nn.Module:
    """Stage `stage` of `n_stages` of the model in the folder `hf`.

    parts: how many of each stage, of the embedding, the layers, and norm and head as one, such as
    5,4,4,5. costs: a file with the costs of each part. Without either, stages are as even as can be
    by the products that hocket counts; layers are, where it does not know the architecture.

    Raises: UsageError for a model that cannot be split so.
    """
    n = read_config(hf).num_hidden_layers + 2
    sizes: int | list[int] = n_stages
    if parts:
        sizes = [last - first for first, last in given(parts, n, n_stages)]
    loads = _measured(costs, n) if costs else _counted(hf, seq)
    made = load_stage(hf, stage, sizes, loads=loads, dtype=dtype, seed=seed)
    made.carries = slices > 1 or None
    return made


def _measured(path: str, n: int) -> list[float]:
    """The time of each part in a file of costs.

    Raises: CostError for a file with other stages than the model has parts.
    """
    costs = load_costs(path)
    both = zip(per_stage("F", costs.F, n), per_stage("B", costs.full_backward, n), strict=True)
    return [float(forward + backward) for forward, backward in both]


def _counted(folder: str, seq: int) -> list[float] | None:
    """The operations of each part; None for an architecture that hocket does not know."""
    try:
        return layer_flops(load_model(str(Path(folder, "config.json"))), seq)
    except UsageError:
        return None


@cache
def _tokens(folder: str, data: str | None) -> Tensor:
    """The text as the tokens of the folder's tokenizer, or without one as bytes."""
    n = read_config(folder).vocab_size
    raw = text(data)
    if Path(folder, "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        words = bytes(raw.tolist()).decode(errors="replace")
        return torch.tensor(AutoTokenizer.from_pretrained(folder).encode(words))
    if n < 256:
        raise UsageError(
            f"{folder} has no tokenizer.json, and a vocabulary of {n} has no room for bytes; it "
            "needs 256"
        )
    return raw


def batch(
    step: int, size: int, *, hf: str, seq: int = 128, seed: int = 0, data: str | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step, int64 `[sequence, position]` both: tokens, the next ones."""
    return windows(_tokens(hf, data), step, size, seq, seed)
