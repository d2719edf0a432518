"""A counter of memory: what each rank holds at its fullest, in pairs in flight and in bytes.

A forward takes its activation when it starts; a full backward or an I gives it back when it
ends, an I keeps what is held until its W ends; a running backward has its gradient buffers.
With an R, the forward keeps only its input, as large as the message of the stage before (at stage
0 as its own, and no larger than the activation), and the R takes the rest when it starts. A D gives
the activation back when it ends, and its U takes it again, or its A where there is one.
What runs in one slot takes together and gives back together. What ends at a time is given back
before what starts then takes.
"""

from fractions import Fraction
from itertools import accumulate, pairwise

from oracle_text import rank_of


def changes(order, costs):
    """What each kind takes at its start and gives back at its end: (pairs, bytes) by stage."""
    sizes = costs.get("bytes", {})
    trains = any(a.kind in "BIW" for a in order.actions())
    again = {a for a in order.actions() if a.kind in "RA"}

    def of(name, stage):
        value = sizes.get(name, 0)
        if isinstance(value, dict):
            return Fraction(value["cycle"][stage % len(value["cycle"])])
        return Fraction(value[stage] if isinstance(value, list) else value)

    def change(a):
        activation, gradient = of("activation", a.stage), of("gradient", a.stage)
        name = "held_between_I_and_W"
        held = of(name, a.stage) if name in sizes else activation
        kept = min(activation, of("message", max(0, a.stage - 1)))
        if a.kind == "F" and (a.stage, "R", a.mb) in again:
            return (1, activation), (0, activation - kept)
        if a.kind == "F":
            return (1, activation), (0, 0) if trains else (1, activation)
        return {
            "R": ((0, activation - kept), (0, 0)),
            "D": ((0, 0), (0, activation)),
            "A": ((0, activation), (0, 0)),
            "U": ((0, 0 if (a.stage, "A", a.mb) in again else activation), (0, 0)),
            "B": ((0, gradient), (1, activation + gradient)),
            "I": ((0, gradient), (0, activation + gradient - held)),
            "W": ((0, 0), (1, held)),
        }.get(a.kind, ((0, 0), (0, 0)))

    return change, of


def moves_of(run, costs, rank):
    """What the queues of a rank take and give back: (time, queue, whether it is later, change).

    Later: than what was held before this time and is given back now.
    """
    change, _ = changes(run.order, costs)
    out = []
    for q, slots in run.order.queues.items():
        for slot in slots if rank_of(q) == rank else ():
            start, end = run.times[slot[0]]
            took, freed = ([sum(change(a)[way][i] for a in slot) for i in (0, 1)] for way in (0, 1))
            if any(took) or any(freed):
                out += [(start, q, True, took), (end, q, start == end, [-x for x in freed])]
    return out


def static(run, costs, rank):
    _, of = changes(run.order, costs)
    paths = run.order.paths
    stages = {s for path in paths for s, q in enumerate(path) if rank_of(q) == rank}
    return sum(of("static", s) for s in stages)


def peaks(run, costs):
    """(pairs in flight, bytes) of each rank at its fullest, static memory in the bytes."""
    out = []
    for rank in range(run.order.p):
        moves = sorted(moves_of(run, costs, rank), key=lambda move: (move[0], move[2]))
        level, top = [0, 0], [0, 0]
        for *_, delta in moves:
            level = [a + b for a, b in zip(level, delta, strict=True)]
            top = [max(a, b) for a, b in zip(level, top, strict=True)]
        out.append((top[0], top[1] + static(run, costs, rank)))
    return out


def possible_peaks(run, costs, near):
    """The least and the largest peak of each rank, of pairs and of bytes: ((least, largest), ...).

    Times that lie within `near` of the one before count as one, at which the queues of a rank may
    come in any order, each in its own.
    """
    out = []
    for rank in range(run.order.p):
        moves = sorted(moves_of(run, costs, rank), key=lambda move: move[0])
        starts = [i for i in range(len(moves)) if not i or moves[i][0] > moves[i - 1][0] + near]
        both = [_range([[(q, delta[i]) for _, q, _, delta in moves[a:b]]
                        for a, b in pairwise([*starts, len(moves)])]) for i in (0, 1)]  # fmt: skip
        always = static(run, costs, rank)
        out.append((both[0], tuple(x + always for x in both[1])))
    return out


def _range(moments):
    """The least and the largest peak of levels that change in these moments, (queue, change)s."""
    level = least = largest = 0
    for moment in moments:
        highest = level
        for queue in {q for q, _ in moment}:
            highest += max(accumulate((x for q, x in moment if q == queue), initial=0))
        level += sum(x for _, x in moment)
        least, largest = max(least, level), max(largest, highest)
    return least, largest
