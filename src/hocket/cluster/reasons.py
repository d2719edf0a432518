"""Why a configuration lost, what is possible near an impossible one, what would help one most."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from typing import Any, NamedTuple

from hocket.cluster.estimate import Estimate, estimate, schedule_for, usual_stages
from hocket.cluster.hardware import Cluster
from hocket.cluster.model import Model
from hocket.cluster.run import Run, faults
from hocket.cluster.search import Fate, Found, Outcome
from hocket.errors import HocketError
from hocket.tables import format_bytes, format_time

PARTS = {
    "compute": "computation", "messages": "exposed TP, CP, EP", "gradients": "exposed DP",
    "update": "optimizer", "imbalance": "imbalance", "bubble": "bubble",
}  # the fields of Breakdown  # fmt: skip


def percent(share: float) -> str:
    """A share as text: 4.1 %."""
    return f"{100 * share:.1f} %"


def layers_text(n: int | tuple[int, ...]) -> str:
    """Numbers of layers as an option: `3`, or `3,2,1`."""
    return ",".join(map(str, n)) if isinstance(n, tuple) else str(n)


def estimate_words(run: Run) -> str:
    """The options of `hocket estimate` that describe the layout of a run."""
    words = [f"--{k} {n}" for k in ("tp", "cp", "ep", "pp") if (n := getattr(run, k)) > 1]
    words += [f"--schedule {run.schedule}"] if run.pp > 1 else []
    words += [f"-v {run.v}"] if run.v > 1 else []
    words += [f"--micro-batch {run.micro_batch}"]
    words += [f"--recompute {','.join(run.recompute)}"] if run.recompute else []
    if run.recompute and run.recompute_layers is not None:
        words += [f"--recompute-layers {layers_text(run.recompute_layers)}"]
    words += [f"--lighter {run.lighter[0]},{run.lighter[1]}"] if any(run.lighter) else []
    words += [f"--sharding {run.sharding}"] if run.sharding != 1 else []
    return " ".join(words)


# --- why a configuration lost ------------------------------------------------------------------


def reason(outcome: Outcome, found: Found) -> str:
    """Why a configuration is not the answer of a search, one sentence."""
    return _REASONS[outcome.fate](outcome, found)


def _rule(outcome: Outcome, found: Found) -> str:
    broken = faults(found.model, found.cluster, outcome.run)
    if broken:
        return "; ".join(fault.text for fault in broken)
    try:
        schedule_for(outcome.run, found.cluster)
    except HocketError as error:
        return str(error)
    return "its schedule cannot be simulated"


def _too_large(outcome: Outcome, found: Found) -> str:
    need = outcome.n_bytes or 0.0
    what = "with one microbatch in flight" if outcome.fate is Fate.STATES else "on its fullest rank"
    over = format_bytes(need - found.cluster.memory)
    return f"needs {format_bytes(need)} {what}: {over} more than the limit"


def _slower(outcome: Outcome, found: Found) -> str:
    seconds, best = outcome.seconds or 0.0, found.fastest
    if best is None or outcome.parts is None:
        return f"takes at least {format_time(seconds, 's')} in any order" + (
            f", {percent(seconds / best.step - 1)} longer than the fastest" if best else ""
        )
    share = seconds / best.step - 1
    if share <= 0:
        return "is the fastest" if share == 0 else f"is {percent(-share)} faster than the answer"
    more = {k: x - getattr(best.breakdown, k) for k, x in asdict(outcome.parts).items()}
    worst = sorted(more, key=lambda k: -more[k])[:2]
    shown = [k for k in worst if more[k] > 0.2 * more[worst[0]]]
    where = " and ".join(f"{format_time(more[k], 's')} more {PARTS[k]}" for k in shown)
    return f"is {percent(share)} slower: {where}"


_REASONS: Mapping[Fate, Callable[[Outcome, Found], str]] = {
    Fate.RULE: _rule, Fate.STATES: _too_large, Fate.MEMORY: _too_large,
    Fate.BOUND: _slower, Fate.SLOWER: _slower, Fate.KEPT: _slower,
}  # fmt: skip


def nothing_fits(found: Found) -> str:
    """Why a search found nothing, and what came nearest, one sentence each."""
    counts = ", ".join(f"{n:,} {fate}" for fate, n in found.counts.items() if n)
    lines = [f"no configuration fits: {counts or 'there is none to try'}"]
    large = [x for x in found.outcomes if x.n_bytes]
    if large:
        least = min(large, key=lambda x: x.n_bytes or 0.0)
        lines.append(
            f"the smallest, {estimate_words(least.run)}, {reason(least, found)}; "
            "try more --gpus or a larger --memory"
        )
    elif found.outcomes:
        plain = min(found.outcomes, key=lambda x: x.run.pp * x.run.tp * x.run.cp)
        lines.append(f"{estimate_words(plain.run)}: {reason(plain, found)}")
        lines += nearest_text(found.model, found.cluster, plain.run)
    return "\n".join(lines)


# --- what is possible nearby -------------------------------------------------------------------


class Near(NamedTuple):
    """A possible configuration near an impossible one, and what was changed."""

    run: Run
    gpus: int
    changes: Mapping[str, Any]

    @property
    def options(self) -> str:
        """What was changed, as options of the command line."""
        return " ".join(
            f"{'-v' if k == 'v' else '--' + k.replace('_', '-')} {x}"
            for k, x in self.changes.items()
        )


def nearest_text(model: Model, cluster: Cluster, run: Run) -> list[str]:
    """The nearest possible configurations as a sentence; none where nothing is near."""
    near = [one.options for one in nearest(model, cluster, run)]
    return [f"nearest possible: {'; '.join(near)}"] if near else []


_FAR = 4  # times as much or as little
_TRIED = 20_000
_SHOWN = 3


def nearest(model: Model, cluster: Cluster, run: Run) -> tuple[Near, ...]:
    """Up to three configurations that break no rule, the least changed first.

    Only what the broken rules are about is changed; where that is not enough, the batch, then the
    number of GPUs too.
    """
    broken = faults(model, cluster, run)
    names = {name for fault in broken for name in fault.fields} & set(_STEPS)
    for more in ((), ("global_batch",), ("gpus",)):
        names |= set(more)
        found = sorted(_near(model, cluster, run, sorted(names)), key=lambda x: x[0])
        if found:
            return tuple(near for _, near in found[:_SHOWN])
    return ()


def _near(
    model: Model, cluster: Cluster, run: Run, names: list[str]
) -> Iterator[tuple[float, Near]]:
    now = {name: cluster.gpus if name == "gpus" else getattr(run, name) for name in names}
    copies = cluster.gpus // max(1, run.tp * run.cp * run.pp)
    choices = [sorted(set(_STEPS[name](model, now[name], run, copies))) for name in names]
    for values in islice(product(*choices), _TRIED):
        changes = {n: x for n, x in zip(names, values, strict=True) if x != now[n]}
        gpus = changes.get("gpus", cluster.gpus)
        there = replace(cluster, gpus=gpus)
        tried = replace(run, **{n: x for n, x in changes.items() if n != "gpus"})
        if faults(model, there, tried):
            continue
        far = sum(1 + abs(math.log2(x / max(1, now[n]))) for n, x in changes.items())
        yield far, Near(tried, gpus, changes)


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, min(n, 4096) + 1) if n % k == 0]


def _around(now: int, most: int) -> list[int]:
    now = max(1, min(now, most))
    return list(range(max(1, now // 2), min(2 * now, most) + 1))


def _batches(model: Model, now: int, run: Run, dp: int) -> list[int]:
    """Numbers near this one that many layouts divide, or that this one's replicas do."""
    powers = [*(1 << i for i in range(15)), max(1, dp * run.micro_batch)]
    near = {k * (now // k) for k in powers} | {k * -(-now // k) for k in powers}
    return [x for x in near if x and now / _FAR <= x <= now * _FAR]


_STEPS: Mapping[str, Callable[[Model, int, Run, int], list[int]]] = {
    "tp": lambda model, now, run, dp: _divisors(math.gcd(model.heads, 64)),
    "cp": lambda model, now, run, dp: [1 << i for i in range(8)],
    "ep": lambda model, now, run, dp: _divisors(model.moe.experts) if model.moe else [1],
    "etp": lambda model, now, run, dp: [1, 2, 4, 8],
    "pp": lambda model, now, run, dp: _around(now, model.layers + 2),
    "v": lambda model, now, run, dp: [1, *_around(now, model.layers + 2)] if run.pp > 1 else [1],
    "micro_batch": lambda model, now, run, dp: _divisors(run.global_batch)[:12],
    "global_batch": _batches,
    "gpus": _batches,
}


# --- what would help most ----------------------------------------------------------------------


@dataclass(frozen=True)
class Help:
    """A change, and the share by which it raises the tokens per second."""

    text: str
    gain: float


def _levels(cluster: Cluster, first: bool) -> Cluster:
    """The cluster with the innermost level, or all others, twice as fast."""
    return replace(cluster, levels=tuple(
        replace(x, bandwidth=x.bandwidth * (2 if (i == 0) is first else 1))
        for i, x in enumerate(cluster.levels)
    ))  # fmt: skip


def _half(run: Run, name: str) -> Run | None:
    n = getattr(run, name)
    return None if n == 1 else replace(run, **{name: n // 2}, sp=run.sp and (name != "tp" or n > 2))


def _with(run: Run, name: str) -> Run | None:
    """The run with another schedule, with as many stages as that usually has."""
    if run.pp == 1 or run.schedule == name:
        return None
    return replace(run, schedule=name, v=usual_stages(name, run.pp), options=(), split=None)


def _recomputing(run: Run, parts: tuple[str, ...]) -> Run:
    return replace(run, recompute=parts, recompute_layers=None)


_CHANGES: Mapping[str, Callable[[Run], Run | None]] = {
    "recompute nothing": lambda x: replace(x, recompute=(), recompute_layers=None),
    "half of --tp": lambda x: _half(x, "tp"),
    "half of --cp": lambda x: _half(x, "cp"),
    "half of --ep": lambda x: _half(x, "ep"),
    "half of --pp": lambda x: _half(x, "pp"),
    "half of --micro-batch": lambda x: _half(x, "micro_batch"),
    "twice the --micro-batch": lambda x: replace(x, micro_batch=2 * x.micro_batch),
    "twice the --global-batch": lambda x: replace(x, global_batch=2 * x.global_batch),
    "twice the -v": lambda x: replace(x, v=2 * x.v) if x.v > 1 else None,
    "--schedule interleaved": lambda x: _with(x, "interleaved"),
    "--schedule zb-h1": lambda x: _with(x, "zb-h1"),
    "--schedule zb-v": lambda x: _with(x, "zb-v"),
    "--recompute norm,activation": lambda x: _recomputing(x, ("norm", "activation")),
    "--recompute full": lambda x: _recomputing(x, ("full",)),
    "twice the --pp": lambda x: replace(x, pp=2 * x.pp, split=None),
    "twice the --tp": lambda x: replace(x, tp=2 * x.tp, sp=True),
    "--sharding 1": lambda x: replace(x, sharding=1) if x.sharding < 1 else None,
    "--sharding 2": lambda x: replace(x, sharding=2) if x.sharding < 2 else None,
    "--sharding 3": lambda x: replace(x, sharding=3) if x.sharding < 3 else None,
    "--lighter 1,1": lambda x: replace(x, lighter=(1, 1)) if x.pp > 1 and not x.split else None,
    "overlapped gradients": lambda x: replace(x, grad_overlap=True),
}
_MACHINES: Mapping[str, Callable[[Cluster], Cluster]] = {
    "a network twice as fast": lambda x: _levels(x, first=False),
    "links within a node twice as fast": lambda x: _levels(x, first=True),
}
_LEAST = 0.005


def helps(found: Estimate) -> tuple[Help, ...]:
    """What would raise the tokens per second most, one change at a time, the largest gain first.

    Every change is simulated; those that break a rule or do not fit in memory are left out. Where
    the configuration itself does not fit, all that make it fit are in.
    """
    gains = []
    changed = [(text, make(found.run), found.cluster) for text, make in _CHANGES.items()]
    changed += [(text, found.run, make(found.cluster)) for text, make in _MACHINES.items()]
    for text, run, cluster in changed:
        if run is None or (run, cluster) == (found.run, found.cluster):
            continue
        if faults(found.model, cluster, run):
            continue
        try:
            other = estimate(found.model, cluster, found.stack, run)
        except HocketError:
            continue
        gain = other.tokens_per_second / found.tokens_per_second - 1
        if other.fits and (gain > _LEAST or not found.fits):
            gains.append(Help(text, gain))
    return tuple(sorted(gains, key=lambda x: -x.gain))
