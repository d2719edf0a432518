"""What makes a run slow, told from noise by the spread over actions and steps.

The logarithm of a slot's time over the median of its kind of work is taken as a sum: an effect of
its microbatch in this step, one of its rank in this step, one of its rank or stage in all steps,
and noise. An effect counts where it exceeds `SURE` standard errors and is large enough to matter.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from hocket.diagnosis.steps import Steps, sigma
from hocket.ir import Array

SURE = 4.5  # standard errors
LEAST = 0.03  # of a rank, a stage or a link: the smallest effect worth a word
LEAST_STEP = 0.05  # of a rank in one step
LEAST_MICROBATCH = 0.2
LEAST_PAUSE = 0.3  # of an action's time
TINY = 1e-12  # above 0, where logarithms and quotients need that
MEDIAN_ERROR = 1.25  # standard error of a median over that of a mean


class Cause(StrEnum):
    """What takes time from a step."""

    PAUSE = "pauses"
    MICROBATCH = "slow microbatches"
    NOW_AND_THEN = "slow rank in some steps"
    LINK = "slow link"
    RANK = "slow rank"
    STAGES = "unequal stages"


class Effect(NamedTuple):
    """One thing that makes a run slow, and the run without it.

    ranks: one or several, the two of a link, none for microbatches. steps: those in which it was
    seen. factor: of the time of the work or of the messages. sigma: the effect in standard errors.
    detail: stages, microbatches, or a count of pauses. sure: False where these times do not tell a
    slow rank from a stage with more work.
    """

    cause: Cause
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    factor: float
    sigma: float
    without: Callable[[Steps], Steps]
    detail: tuple[int, ...] = ()
    sure: bool = True


class _Noise(NamedTuple):
    """Logarithms of times over what is usual: by slot, `[step, slot]`; by rank, `[step, rank]`.

    usual: the median time of each slot's group. sigma: of one slot; error: of a rank in a step.
    """

    usual: Array
    by_slot: Array
    by_rank: Array
    sigma: float
    error: Array


def effects(steps: Steps, expected: Array | None = None) -> list[Effect]:
    """Every effect that exceeds the noise. expected: the time of each slot, where it is known."""
    usual = _usual(steps.group, steps.work)
    logs = np.log(np.maximum(steps.work, TINY) / np.maximum(usual, TINY))
    own = logs - _medians(steps.rank, logs)
    mbs, kept = _microbatches(steps, own)
    logs = logs - kept
    noise = _noise(steps, usual, logs)
    found = [*mbs, *_pauses(steps, noise), *_now_and_then(steps, noise)]
    for one in found:
        steps = one.without(steps)
    noise = noise._replace(usual=_usual(steps.group, steps.work))
    return [*found, *_links(steps), *_steady(steps, noise, expected)]


def _usual(group: Array, values: Array) -> Array:
    """For each slot the median of its group in all steps, `[slot]`."""
    out = np.empty(len(group))
    for one in range(group.max() + 1):
        out[group == one] = np.median(values[:, group == one])
    return out


def _medians(key: Array, values: Array) -> Array:
    """For each slot the median of its step over the slots with the same key, `[step, slot]`."""
    out = np.empty_like(values)
    for one in np.unique(key):
        out[:, key == one] = np.median(values[:, key == one], axis=1, keepdims=True)
    return out


def _lower_median(values: Array) -> float:
    """The median; of an even number the lower one, so that one of two that is slow is seen."""
    return float(np.sort(values)[(len(values) - 1) // 2])


def _noise(steps: Steps, usual: Array, logs: Array) -> _Noise:
    s = steps.schedule
    center = _medians(steps.rank, logs)
    one = sigma(logs - center)
    clipped = np.clip(logs - center, -3 * one, 3 * one) + center
    by_rank = np.stack([clipped[:, steps.rank == r].mean(axis=1) for r in range(s.p)], axis=1)
    by_rank -= np.median(by_rank, axis=0)
    first, second = np.triu_indices(s.p, 1)  # what all ranks share in a step is no noise of one
    between = sigma(by_rank[:, first] - by_rank[:, second]) / np.sqrt(2)
    by_rank -= np.array([_lower_median(row) for row in by_rank])[:, None]
    error = np.maximum(one / np.sqrt(np.bincount(steps.rank, minlength=s.p)), between)
    return _Noise(usual, logs, by_rank, one, error)


def _microbatches(steps: Steps, logs: Array) -> tuple[list[Effect], Array]:
    """Microbatches that take longer on every rank; and by how much, `[step, slot]`."""
    typical = _medians(steps.mb, logs)
    error = MEDIAN_ERROR * sigma(logs - typical) / np.sqrt(np.bincount(steps.mb)[steps.mb])
    least = np.maximum(LEAST_MICROBATCH, SURE * error)
    slow = typical > least
    for mb in np.unique(steps.mb[slow.any(axis=0)]):  # on all ranks but a few, else it is a rank
        own = steps.mb == mb
        part = (logs[:, own] > typical[:, own] / 2).mean(axis=1)
        slow[:, own] &= (part >= 0.75)[:, None]
    kept = np.where(slow, typical, 0.0)
    if not slow.any():
        return [], kept
    where, slots = np.nonzero(slow)
    mean = float(kept[slow].mean())
    effect = Effect(
        Cause.MICROBATCH, (), tuple(np.unique(where).tolist()), float(np.exp(mean)),
        mean / max(float(error[slots].mean()), TINY),
        lambda x: x.but(work=x.work * np.exp(-kept)), tuple(np.unique(steps.mb[slots]).tolist()),
    )  # fmt: skip
    return [effect], kept


def _pauses(steps: Steps, noise: _Noise) -> list[Effect]:
    """Stretches in which a rank did nothing, or one action took far longer than it does."""
    least = max(LEAST_PAUSE, 2 * SURE * noise.sigma)
    more = noise.by_slot - _medians(steps.rank, noise.by_slot)
    spikes = np.where(more > least, steps.work * (1 - np.exp(-more)), 0.0)
    usual = np.stack([np.median(steps.pause[:, steps.rank == r]) for r in range(steps.schedule.p)])
    usual = usual[steps.rank]
    idle = np.where(steps.pause - usual > least * noise.usual, steps.pause - usual, 0.0)
    out = []
    for rank in range(steps.schedule.p):
        own = (spikes + idle > 0) & (steps.rank == rank)
        if own.any():
            work, pause = np.where(own, spikes, 0.0), np.where(own, idle, 0.0)
            out.append(Effect(
                Cause.PAUSE, (rank,), tuple(np.flatnonzero(own.any(axis=1)).tolist()),
                float((spikes + idle)[own].mean()), 2 * SURE,
                lambda x, work=work, pause=pause: x.but(work=x.work - work, pause=x.pause - pause),
                (int(own.sum()),),
            ))  # fmt: skip
    return out


def _now_and_then(steps: Steps, noise: _Noise) -> list[Effect]:
    """Ranks that are slower in some steps than in most."""
    slow = noise.by_rank > np.maximum(LEAST_STEP, SURE * noise.error)
    alike = noise.by_rank > np.maximum(LEAST, SURE / 2 * noise.error)
    slow |= alike & slow.any(axis=0)  # once a rank is known to be slow, less is needed to see it
    out = []
    for rank in np.flatnonzero(slow.any(axis=0)).tolist():
        at = slow[:, rank]
        by = np.where(at, noise.by_rank[:, rank], 0.0)[:, None] * (steps.rank == rank)
        mean = float(noise.by_rank[at, rank].mean())
        out.append(Effect(
            Cause.NOW_AND_THEN, (rank,), tuple(np.flatnonzero(at).tolist()), float(np.exp(mean)),
            mean / max(float(noise.error[rank]), TINY),
            lambda x, by=by: x.but(work=x.work * np.exp(-by)),
        ))  # fmt: skip
    return out


class _Over(NamedTuple):
    """How much longer work takes than on other ranks, in logarithms, and its standard error."""

    by: float
    error: float

    @property
    def counts(self) -> bool:
        """Whether it is more than noise."""
        return self.by > max(LEAST, SURE * self.error)


def _over(steps: Steps, noise: _Noise, expected: Array | None) -> list[dict[tuple, _Over]]:
    """Of each rank, how much longer the work of its stages takes, by stage; of several in a slot
    by these."""
    firsts = np.unique(steps.group, return_index=True)[1]
    over = np.log(np.maximum(noise.usual[firsts], TINY))
    if expected is not None:
        over = over - np.log(np.maximum(expected[firsts], TINY))
    kinds = np.array(["+".join(kinds) for kinds, _, _ in steps.groups])
    for kind in np.unique(kinds):
        over[kinds == kind] -= _lower_median(over[kinds == kind])
    count, n = np.bincount(steps.group), len(steps.work)
    weight = np.maximum(noise.usual[firsts] * count, TINY)
    places: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for g, (_, stages, rank) in enumerate(steps.groups):
        places.setdefault((rank, stages), []).append(g)
    out: list[dict[tuple, _Over]] = [{} for _ in range(steps.schedule.p)]
    for (rank, stages), own in places.items():
        error = max(noise.sigma / np.sqrt(count[own].sum()), noise.error[rank]) / np.sqrt(n)
        by = float(np.average(over[own], weights=weight[own]))
        out[rank][stages] = _Over(by, MEDIAN_ERROR * float(error))
    return out


def _steady(steps: Steps, noise: _Noise, expected: Array | None) -> list[Effect]:
    """Ranks that are slower than the others in all steps, and stages with more work.

    A rank is slow where all its stages are. With one stage per rank and no costs the two cannot be
    told apart: one such rank is called slow, several are stages with more work.
    """
    slow: dict[int, _Over] = {}
    sure: set[int] = set()
    heavy: dict[int, _Over] = {}
    for rank, stages in enumerate(_over(steps, noise, expected)):
        mean = _Over(
            float(np.mean([x.by for x in stages.values()])),
            min(x.error for x in stages.values()),
        )
        if mean.counts and all(x.by > mean.by / 2 for x in stages.values()):
            slow[rank] = mean
            if len(stages) > 1 or expected is not None:
                sure.add(rank)
        else:
            heavy |= {s: x for key, x in stages.items() if x.counts for s in key}
    doubtful = slow.keys() - sure
    if len(doubtful) > 1 or (doubtful and heavy):
        owned = {stages[0]: rank for _, stages, rank in steps.groups if rank in doubtful}
        heavy |= {stage: slow[rank] for stage, rank in owned.items()}
        slow = {rank: slow[rank] for rank in sure}
    out = [
        Effect(
            Cause.RANK, (rank,), tuple(range(len(steps.work))), float(np.exp(over.by)),
            over.by / max(over.error, TINY),
            lambda x, own=steps.rank == rank, by=over.by: x.but(
                work=x.work * np.where(own, np.exp(-by), 1.0)
            ), sure=rank in sure,
        )
        for rank, over in slow.items()
    ]  # fmt: skip
    return out + ([_unequal(steps, heavy)] if heavy else [])


def _unequal(steps: Steps, heavy: dict[int, _Over]) -> Effect:
    """The stages that have more work than most."""
    worst = max(heavy.values())
    ranks = {rank for _, stages, rank in steps.groups if heavy.keys() & set(stages)}
    return Effect(
        Cause.STAGES, tuple(sorted(ranks)), tuple(range(len(steps.work))),
        float(np.exp(worst.by)), worst.by / max(worst.error, TINY), balanced, tuple(sorted(heavy)),
    )  # fmt: skip


def balanced(steps: Steps) -> Steps:
    """The same work in all, shared equally by the stages."""
    usual = _usual(steps.group, steps.work)
    kinds = np.array(["+".join(steps.groups[g][0]) for g in steps.group.tolist()])
    mean = np.empty(len(usual))
    for kind in np.unique(kinds):
        mean[kinds == kind] = usual[kinds == kind].mean()
    return steps.but(work=steps.work * (mean / np.maximum(usual, TINY)))


def smooth(steps: Steps) -> Steps:
    """Every action, pause and message as long as is usual for it."""
    n = len(steps.work)
    pause = _usual(steps.rank, steps.pause)
    delay = np.array(steps.delay)
    for pair in np.unique(steps.link, axis=0):
        own = (steps.link == pair).all(axis=1)
        delay[:, own] = np.median(delay[:, own])
    work = _usual(steps.group, steps.work)
    return steps.but(work=np.tile(work, (n, 1)), pause=np.tile(pause, (n, 1)), delay=delay)


def _links(steps: Steps) -> list[Effect]:
    """Links whose messages take longer than those of most."""
    seen = {}
    for pair in np.unique(np.sort(steps.link, axis=1), axis=0).tolist():
        own = (np.sort(steps.link, axis=1) == pair).all(axis=1)
        times = steps.delay[:, own][steps.waited[:, own]]
        if len(times) > 2:
            seen[tuple(pair)] = (own, times)
    if len(seen) < 2:
        return []
    usual = {pair: float(np.median(times)) for pair, (_, times) in seen.items()}
    reference = _lower_median(np.array([*usual.values()]))
    out = []
    for pair, (own, times) in seen.items():
        excess = usual[pair] - reference
        error = MEDIAN_ERROR * sigma(times) / np.sqrt(len(times))
        if excess <= max(LEAST * float(np.median(steps.work)), SURE * error):
            continue
        out.append(Effect(
            Cause.LINK, pair, tuple(range(len(steps.work))),
            usual[pair] / reference if reference else np.inf,
            excess / error if error else np.inf,
            lambda x, own=own, excess=excess: x.but(
                delay=np.where(own, np.maximum(x.delay - excess, 0.0), x.delay)
            ),
        ))  # fmt: skip
    return out
