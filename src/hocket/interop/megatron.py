"""Megatron-LM's pipeline layouts and interleaved settings, in and out.

A layout such as `Et*3|(tt|)*29,m|L` says what each stage holds: E the embedding, t a transformer
layer, m a layer of multi-token prediction, L the loss (with the head).

Source: Megatron-LM, `--pipeline-model-parallel-layout` and
`--microbatch-group-size-per-virtual-pipeline-stage`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hocket.costs import Costs, Number
from hocket.errors import TextError, UsageError
from hocket.ir import Schedule
from hocket.schedules import build
from hocket.text import number_up_to

LETTERS = "EtmL"
_MOST = 10_000  # letters and bars of a layout, written out


@dataclass(frozen=True)
class Weights:
    """What each part takes, in units of a transformer layer."""

    embedding: Number = 0
    layer: Number = 1
    mtp: Number = 1
    loss: Number = 1

    def of(self, stage: str) -> Number:
        """What a stage takes."""
        each = {"E": self.embedding, "t": self.layer, "m": self.mtp, "L": self.loss}
        return sum(each[letter] for letter in stage)


@dataclass(frozen=True)
class Settings:
    """What Megatron is started with; stage k is on rank k mod p, in its virtual stage k // p."""

    stages: tuple[str, ...]
    p: int
    m: int
    group: int | None = None

    @property
    def v(self) -> int:
        """Virtual stages per rank."""
        return len(self.stages) // self.p

    @property
    def n_layers(self) -> int:
        """Transformer layers of the model."""
        return sum(stage.count("t") for stage in self.stages)


@dataclass(frozen=True)
class MegatronRun:
    """A schedule with its costs, and what Megatron refuses or does otherwise."""

    schedule: Schedule
    costs: Costs
    settings: Settings
    warnings: tuple[str, ...]


# --- the text -----------------------------------------------------------------------------------


def read_layout(text: str, source: str = "<layout>") -> tuple[str, ...]:
    """What each stage holds, `("Ettt", "tt", ...)`.

    `|` parts stages, `x*3` repeats a letter, `(...)*3` what stands in brackets, which do not
    nest; commas mean nothing; a stage may be empty.

    Raises: TextError, with the place.
    """
    out: list[str] = []
    size = at = 0
    plain = text.replace(" ", "")
    for match in _TOKEN.finditer(plain):
        if match.start() != at:
            break
        at = match.end()
        group, letter = match["group"], match["letter"]
        part = letter if group is None else _letters_of(group, source)
        times = number_up_to(match["times"] or "1", _MOST)
        size += _MOST if times is None else len(part) * times
        if times is None or size > _MOST:
            raise _fault(plain, match.start(), source, f"it has more than {_MOST} letters")
        out.append(part * times)
    if at < len(plain):
        raise _fault(plain, at, source, _expected(plain[at:]))
    return tuple("".join(out).replace(",", "").split("|"))


_TOKEN = re.compile(
    rf"(?:\((?P<group>[^()]+)\)(?=\*)|(?P<letter>[{LETTERS}|,]))(?:\*(?P<times>[0-9]+))?"
)


def _letters_of(group: str, source: str) -> str:
    """What stands in brackets, without stars."""
    return "|".join(read_layout(group, source))


def _expected(rest: str) -> str:
    """What is wrong with the rest of a layout, at its beginning."""
    if rest[0] == ")":
        return "this bracket closes nothing"
    if rest[0] == "(":
        inside, closes, _ = rest[1:].partition(")")
        if not closes:
            return "a bracket is not closed"
        if "(" in inside:
            return "brackets do not nest in Megatron's layouts"
        return "brackets need something in them, and a repetition such as *3"
    if rest[0] == "*":
        return "expected a letter before * and a number after it"
    return f"expected one of {' '.join(LETTERS)} | ( ) * and numbers"


def _fault(text: str, at: int, source: str, what: str) -> TextError:
    shown = f"{text[max(0, at - _SHOWN) : at]}>{text[at : at + _SHOWN]}"
    return TextError(source, [(1, f"layout {shown!r}: {what}")])


_SHOWN = 200  # letters before and after a fault


def write_layout(stages: Sequence[str]) -> str:
    """A layout for these stages; `read_layout` gives them back."""
    shown = [_letters(stage) for stage in stages]
    parts: list[str] = []
    at = 0
    while at < len(shown):
        alike = next((i for i in range(at, len(shown)) if shown[i] != shown[at]), len(shown)) - at
        last = at + alike == len(shown)
        repeated = alike - 1 if last else alike
        if repeated > 2:
            parts.append(f"({shown[at]}|)*{repeated}")
            parts += [shown[at]] if last else []
        else:
            parts.append("|".join(shown[at : at + alike]) + ("" if last else "|"))
        at += alike
    return "".join(parts)


def _letters(stage: str) -> str:
    runs = [(letter, len(list(same))) for letter, same in groupby(stage)]
    return "".join(x if n == 1 else x * n if n == 2 else f"{x}*{n}" for x, n in runs)


# --- what Megatron takes ------------------------------------------------------------------------


def refusals(settings: Settings) -> list[str]:
    """Why Megatron does not start with these settings; empty where it does.

    Source: megatron-core 0.16, `PipelineParallelLayerLayout.validate_layer_layout`, and
    `arguments.py` for the group.
    """
    stages, p, m, v = settings.stages, settings.p, settings.m, settings.v
    if p < 1 or m < 1:
        return [f"{p} ranks and {m} microbatches: there must be at least one of each"]
    if len(stages) % p:
        return [f"{len(stages)} stages do not divide over {p} ranks: give a multiple of {p}"]
    out = _misplaced("".join(stages))
    with_mtp = [k for k, stage in enumerate(stages) if "m" in stage]
    if any(k // p != v - 1 for k in with_mtp):
        out.append("multi-token prediction m must be in the last virtual stage of its rank")
    if len(with_mtp) > 1:
        out.append(
            "all of multi-token prediction m must be in one stage, not in stages "
            f"{' and '.join(map(str, with_mtp))}"
        )
    group = p if settings.group is None else settings.group
    if v > 1 and not p <= group <= max(p, m):
        out.append(f"the microbatch group is {group}; it must be from {p} (ranks) to {m}")
    if v > 1 and group > 0 and m % group and m % group < p:
        out.append(
            f"{m} microbatches in groups of {group} leave {m % group} for the last; that must be "
            f"0 or at least {p}"
        )
    if v > 1 and p == 1:
        out.append("virtual stages need more than one rank")
    return out


def _misplaced(layers: str) -> list[str]:
    """What is wrong with the layers of all stages, one after the other."""
    out = []
    if layers.count("E") != 1 or not layers.startswith("E"):
        out.append("the embedding E must appear once, before all layers")
    if layers.count("L") != 1 or not layers.endswith("L"):
        out.append("the loss L must appear once, after all layers")
    if "t" not in layers:
        out.append("there is no transformer layer t")
    if "t" in layers and "m" in layers and layers.index("m") < layers.rindex("t"):
        out.append("multi-token prediction m must come after all layers")
    return out


def remarks(settings: Settings) -> list[str]:
    """What starts, and surprises; and how many layers it takes."""
    stages, p = settings.stages, settings.p
    layers, mtp = settings.n_layers, sum(stage.count("m") for stage in stages)
    more = f" and --mtp-num-layers {mtp}" if mtp else ""
    out = [f"the layout has {layers} layers: Megatron demands --num-layers {layers}{more}"]
    if settings.v > 1 and p == 2:
        out.append(
            "with two ranks both neighbours are the same process; Megatron interleaves there only "
            "with --overlap-p2p-communication"
        )
    if settings.v == 1 and settings.group is not None:
        out.append("the microbatch group means nothing without virtual stages")
    out += [_empty(stages, k, p) for k, stage in enumerate(stages) if not stage][:_FEW]
    if stages.count("") > _FEW:
        out.append(f"{stages.count('')} stages are empty, not only these {_FEW}")
    out.append(
        "--pipeline-model-parallel-layout excludes --account-for-embedding-in-pipeline-split, "
        "--account-for-loss-in-pipeline-split, --num-layers-per-virtual-pipeline-stage and "
        "--decoder-first/last-pipeline-num-layers"
    )
    return out


_FEW = 4


def _empty(stages: Sequence[str], k: int, p: int) -> str:
    virtual = f", virtual stage {k // p}" if len(stages) > p else ""
    return f"stage {k} (rank {k % p}{virtual}) is empty: it only passes messages on"


def megatron_run(
    layout: str | Sequence[str],
    *,
    p: int,
    m: int,
    group: int | None = None,
    layers: int | None = None,
    weights: Weights | None = None,
    layer: Costs | None = None,
) -> MegatronRun:
    """The schedule that Megatron runs for a layout, with costs per stage.

    group: microbatches that run through one virtual stage before the next
    (`--microbatch-group-size-per-virtual-pipeline-stage`, left out: p). layers: of the model
    (`--num-layers`), where the layout is to be compared with it. weights: of embedding,
    prediction and loss in layers. layer: the costs of one transformer layer, left out 1 each.

    Raises: TextError for a layout that cannot be read, UsageError with all that Megatron refuses.
    """
    stages = read_layout(layout) if isinstance(layout, str) else tuple(layout)
    settings = Settings(stages, p, m, group)
    refused = refusals(settings)
    if layers is not None and settings.n_layers != layers:
        refused.append(f"the layout has {settings.n_layers} layers, the model {layers}")
    if refused:
        raise UsageError("Megatron refuses this: " + "; ".join(refused))
    if settings.v > 1:
        schedule = build("interleaved", p=p, m=m, v=settings.v, group=group or p)
    else:
        schedule = build("1f1b", p=p, m=m)
    costs = _costs(stages, weights or Weights(), layer or Costs())
    return MegatronRun(schedule, costs, settings, tuple(remarks(settings)))


def _costs(stages: Sequence[str], weights: Weights, layer: Costs) -> Costs:
    """The costs of one layer, times what each stage holds."""
    share = [weights.of(stage) for stage in stages]

    def each(name: str) -> tuple[Number, ...]:
        value = getattr(layer, name)
        if isinstance(value, tuple):
            raise UsageError(f"{name} of one layer is a number, not a list of stages")
        return tuple(x * value for x in share)

    return replace(
        layer, F=each("F"), I=each("I"), W=each("W"), B=None if layer.B is None else each("B")
    )


def balanced(n_layers: int, n_stages: int, weights: Weights | None = None) -> tuple[str, ...]:
    """The layout of a model whose fullest stage holds least; earlier stages take what is over."""
    weights = weights or Weights()
    most = _least_fullest(n_layers, n_stages, weights)
    rooms = _rooms(most, n_stages, weights)
    counts: list[int] = []
    left = n_layers
    for k, room in enumerate(rooms):
        even = -(-left // (n_stages - k))
        counts.append(max(min(room, even), left - sum(rooms[k + 1 :])))
        left -= counts[-1]
    stages = ["t" * n for n in counts]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return tuple(stages)


def _least_fullest(n_layers: int, n_stages: int, weights: Weights) -> Number:
    """The least that the fullest stage can hold."""
    if not weights.layer:
        raise UsageError("a transformer layer must take some time")
    candidates = sorted(
        {k * weights.layer + extra
         for k in range(n_layers + 1)
         for extra in (0, weights.embedding, weights.loss, weights.embedding + weights.loss)},
        key=float,
    )  # fmt: skip
    for most in candidates:
        rooms = _rooms(most, n_stages, weights)
        if min(rooms) >= 0 and sum(rooms) >= n_layers:
            return most
    raise AssertionError("all layers fit into one stage")


def _rooms(most: Number, n_stages: int, weights: Weights) -> list[int]:
    """How many layers each stage may hold; below 0 where its other parts are too many."""
    rooms = [most] * n_stages
    rooms[0] -= weights.embedding
    rooms[-1] -= weights.loss
    return [int(room // weights.layer) for room in rooms]


# --- from a schedule ----------------------------------------------------------------------------


def settings_of(schedule: Schedule, stages: Sequence[str] | None = None) -> Settings:
    """The settings under which Megatron runs just this order.

    stages: what each holds; left out, one layer each.

    Raises: UsageError where Megatron has no such schedule.
    """
    placement, p, m = schedule.placement, schedule.p, schedule.m
    ranks = [queue.rank for queue in placement.paths[0]]
    n = placement.n_stages
    if len(placement.paths) > 1 or ranks != [s % p for s in range(n)]:
        raise UsageError(
            f"{schedule.name} places its stages {' '.join(map(str, ranks))}; Megatron places stage "
            f"k on rank k mod {p}, and knows no other placement"
        )
    held = tuple(stages) if stages is not None else balanced(n, n, Weights(loss=0))
    if len(held) != n:
        raise UsageError(f"the layout has {len(held)} stages, but {schedule.name} has {n}")
    if n == p:
        if schedule.order == build("1f1b", p=p, m=m).order:
            return Settings(held, p, m)
    else:
        for group in range(p, max(p, m) + 1):
            settings = Settings(held, p, m, group)
            if refusals(Settings(held, p, m, group)):
                continue
            if schedule.order == build("interleaved", p=p, m=m, v=n // p, group=group).order:
                return settings
    raise UsageError(
        f"{schedule.name} is an order that Megatron does not have: it runs 1F1B, and with virtual "
        "stages interleaved 1F1B; run this one with hocket or with torch (--to torch-csv)"
    )


def flags(settings: Settings) -> list[str]:
    """The command-line flags of Megatron for these settings."""
    out = [
        f"--pipeline-model-parallel-size {settings.p}",
        f'--pipeline-model-parallel-layout "{write_layout(settings.stages)}"',
    ]
    if settings.v > 1 and settings.group is not None:
        out.append(f"--microbatch-group-size-per-virtual-pipeline-stage {settings.group}")
    out.append(f"# global batch = {settings.m} x micro batch x data parallel size")
    empty = [k for k, stage in enumerate(settings.stages) if not stage]
    return out + [f"# {_empty(settings.stages, k, settings.p)}" for k in empty]
