"""A counter of memory: what each rank holds at its fullest, in pairs in flight and in bytes.

A forward takes its activation when it starts; a full backward or an I gives it back when it
ends, an I keeps what is held until its W ends; a running backward has its gradient buffers.
What runs in one slot takes together and gives back together. Between the queues of a rank, what
ends at a time is given back before what starts then takes.
"""

from fractions import Fraction

from oracle_text import rank_of


def changes(order, costs):
    """What each kind takes at its start and gives back at its end: (pairs, bytes) by stage."""
    sizes = costs.get("bytes", {})
    trains = any(a.kind in "BIW" for a in order.actions())

    def of(name, stage):
        value = sizes.get(name, 0)
        if isinstance(value, dict):
            return Fraction(value["cycle"][stage % len(value["cycle"])])
        return Fraction(value[stage] if isinstance(value, list) else value)

    def change(a):
        activation, gradient = of("activation", a.stage), of("gradient", a.stage)
        name = "held_between_I_and_W"
        held = of(name, a.stage) if name in sizes else activation
        if a.kind == "F":
            return (1, activation), (0, 0) if trains else (1, activation)
        return {
            "B": ((0, gradient), (1, activation + gradient)),
            "I": ((0, gradient), (0, activation + gradient - held)),
            "W": ((0, 0), (1, held)),
        }.get(a.kind, ((0, 0), (0, 0)))

    return change, of


def peaks(run, costs):
    """(pairs in flight, bytes) of each rank at its fullest, static memory in the bytes."""
    order = run.order
    change, of = changes(order, costs)
    out = []
    for rank in range(order.p):
        queues = [q for q in order.queues if rank_of(q) == rank]
        moves = []
        for q in queues:
            for slot in order.queues[q]:
                start, end = run.times[slot[0]]
                took, freed = (
                    [sum(change(a)[way][i] for a in slot) for i in (0, 1)] for way in (0, 1)
                )
                if any(took) or any(freed):
                    moves.append((start, 1, took))
                    moves.append((end, 0, [-x for x in freed]))
        if len(queues) > 1:
            moves.sort(key=lambda move: move[:2])
        level, top = [0, 0], [0, 0]
        for _, _, delta in moves:
            level = [a + b for a, b in zip(level, delta, strict=True)]
            top = [max(a, b) for a, b in zip(level, top, strict=True)]
        stages = {s for path in order.paths for s, q in enumerate(path) if rank_of(q) == rank}
        out.append((top[0], top[1] + sum(of("static", s) for s in stages)))
    return out
