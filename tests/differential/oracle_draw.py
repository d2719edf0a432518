"""Placements, orders and costs by chance, valid ones and broken ones."""

from fractions import Fraction

from oracle_text import WORK, Action, Order, needs, rank_of

MESSAGE = {
    "F": ("SEND_F", "RECV_F", 1),
    "B": ("SEND_B", "RECV_B", -1),
    "I": ("SEND_B", "RECV_B", -1),
}


# --- placements ----------------------------------------------------------------------------------


def placement(rng, *, most_ranks=4, most_microbatches=5):
    """Lines, loops, Vs, waves, paths in two and four directions, extra streams, slices."""
    p = rng.randint(1, most_ranks)
    line = [str(r) for r in range(p)]
    shapes = {
        "line": [line],
        "loop": [line * rng.randint(2, 3)],
        "V": [line + line[::-1]],
        "wave": [(line + line[::-1]) * 2],
        "two directions": [line, line[::-1]],
        "four directions": [line, line[::-1], line[1:] + line[:1], line[::-1][1:] + line[::-1][:1]],
        "two Vs": [line + line[::-1], line[::-1] + line],
        "streams": [[q for r in line for q in (r, f"{r}/comm") * rng.randint(1, 2)]],
        "uneven": [line, line[::-1][: rng.randint(1, p)]],
        "scattered": [_scattered(rng, p) for _ in range(rng.randint(1, 2))],
    }
    paths = shapes[rng.choice(sorted(shapes))]
    m = rng.randint(1, most_microbatches)
    slices = rng.choice((1, 1, 1, 2, 3))
    path_of = [k for k in (rng.randrange(len(paths)) for _ in range(m)) for _ in range(slices)]
    return Order(paths, path_of, slices)


def _scattered(rng, p):
    """Every rank has a stage, in any order, some of them more."""
    path = [str(r) for r in range(p)] + [str(rng.randrange(p)) for _ in range(rng.randint(0, p))]
    rng.shuffle(path)
    return path


# --- orders --------------------------------------------------------------------------------------

MESSAGES = ("implied", "implied", "in line", "in streams")
BACKWARDS = ("whole", "split", "mixed", "by stage", "none")


def order(rng, placed, *, within=0.1):
    """A valid order: in every step some queue takes actions that can run by then.

    within: share of the results that stay on their rank, and travel as messages all the same.
    """
    home = _work(rng, placed, rng.choice(BACKWARDS))
    messages = rng.choice(MESSAGES)
    if messages != "implied":
        home |= _messages(rng, placed, home, within, in_streams=messages == "in streams")
    fuse = rng.choice((0, 0, 0.1, 0.5))
    weight = {kind: 10 ** rng.uniform(-1.5, 1.5) for kind in WORK}
    eager = 10 ** rng.choice((0, 4))  # messages at once, or any time before they are needed
    out = Order(placed.paths, placed.path_of, placed.slices)
    out.queues = {
        q: [] for q in sorted({*home.values(), *(q for path in placed.paths for q in path)})
    }
    todo, done = sorted(home), set()
    wants = {a: needs(placed, a, home) for a in home}

    def can_run(a, slot=()):
        return all(n in done or n in slot for n in wants[a])

    while todo:
        ready = [a for a in todo if can_run(a)]
        weights = [weight.get(a.kind, eager) / (1 + a.mb) for a in ready]
        slot = rng.choices(ready, weights)
        queue, is_work = home[slot[0]], slot[0].kind in WORK
        alike = [a for a in todo if home[a] == queue and (a.kind in WORK) == is_work]
        while rng.random() < fuse:
            more = [a for a in alike if a not in slot and can_run(a, slot)]
            if not more:
                break
            slot.append(rng.choice(more))
        slot.sort(key=lambda a: a.kind.startswith("RECV"))
        out.queues[queue].append(tuple(slot))
        done.update(slot)
        todo = [a for a in todo if a not in done]
    return out


def _work(rng, placed, backward):
    """The queue of every piece of work, with backwards whole or split as asked."""
    home = {}
    split_of_stage = [rng.random() < 0.5 for _ in range(max(map(len, placed.paths)))]
    again = rng.choice((0, 0, 0.3, 1))  # the share that recomputes, or goes to the host
    extras = rng.choice((("R",), ("R", "DU", "DUA"), ("DUA",)))
    for mb in range(placed.m):
        for stage, queue in enumerate(placed.path(mb)):
            split = {"whole": False, "split": True, "by stage": split_of_stage[stage]}.get(
                backward, rng.random() < 0.5
            )
            kinds = "F" if backward == "none" else "FIW" if split else "FB"
            extra = "" if kinds == "F" or rng.random() >= again else rng.choice(extras)
            home |= {Action(stage, kind, mb): queue for kind in kinds + extra}
            if "D" in extra and rng.random() < 0.7:
                host = f"{rank_of(queue)}/host"
                home |= {Action(stage, kind, mb): host for kind in "DU"}
    return home


def _messages(rng, placed, home, within, *, in_streams):
    """A send and a receive for each result that another rank needs, on any queue of their ranks."""
    out = {}
    for a in home:
        if a.kind not in MESSAGE:
            continue
        send, receive, step = MESSAGE[a.kind]
        there = Action(a.stage + step, receive, a.mb)
        if not placed.exists(there):
            continue
        own, other = home[a], placed.home(there)
        if rank_of(own) == rank_of(other) and rng.random() >= within:
            continue
        if in_streams:
            own, other = (rng.choice((q, f"{rank_of(q)}/net")) for q in (own, other))
        out |= {Action(a.stage, send, a.mb): own, there: other}
    return out


def broken(rng, right):
    """The order with one to three changes; it may still be valid."""
    out = Order(
        right.paths, right.path_of, right.slices, {q: list(s) for q, s in right.queues.items()}
    )
    for _ in range(rng.randint(1, 3)):
        queue = rng.choice(sorted(out.queues))
        if out.queues[queue]:
            rng.choice(CHANGES)(rng, out, queue, rng.randrange(len(out.queues[queue])))
    return out


def _swap(rng, out, queue, i):
    line = out.queues[queue]
    j = rng.randrange(len(line))
    line[i], line[j] = line[j], line[i]


def _move(rng, out, queue, i):
    line = out.queues[queue]
    line.insert(rng.randrange(len(line)), line.pop(i))


def _drop(rng, out, queue, i):
    slot = list(out.queues[queue].pop(i))
    slot.pop(rng.randrange(len(slot)))
    if slot:
        out.queues[queue].insert(i, tuple(slot))


def _double(rng, out, queue, i):
    line = out.queues[queue]
    line.insert(rng.randrange(len(line) + 1), line[i])


def _elsewhere(rng, out, queue, i):
    other = out.queues[rng.choice(sorted(out.queues))]
    slot = out.queues[queue].pop(i)
    other.insert(rng.randrange(len(other) + 1), slot)


def _join(rng, out, queue, i):
    line = out.queues[queue]
    if i + 1 < len(line):
        line[i : i + 2] = [line[i] + line[i + 1]]


def _part(rng, out, queue, i):
    line = out.queues[queue]
    line[i : i + 1] = [(a,) for a in line[i]]


def _rename(rng, out, queue, i):
    slot = list(out.queues[queue][i])
    k = rng.randrange(len(slot))
    kind = rng.choice((*WORK, "SEND_F", "RECV_F", "SEND_B", "RECV_B"))
    change = {"stage": max(0, slot[k].stage + rng.choice((-1, 1))), "kind": kind,
              "mb": max(0, slot[k].mb + rng.choice((-1, 1)))}  # fmt: skip
    name = rng.choice(sorted(change))
    slot[k] = slot[k]._replace(**{name: change[name]})
    out.queues[queue][i] = tuple(slot)


CHANGES = (
    _swap, _swap, _swap, _move, _move, _move, _join, _part, _drop, _double, _elsewhere, _rename,
)  # fmt: skip


# --- costs ---------------------------------------------------------------------------------------


def costs(rng, placed):
    """The plain data of a `costs.toml`; "fractions" are what no file writes but Python gives."""
    number = rng.choice((_whole, _whole, _fraction, _float))
    n = max(map(len, placed.paths))
    streams = any("/" in q for path in placed.paths for q in path)

    def value(least=0):
        one = [max(number(rng), least) for _ in range(n)]
        return rng.choice((one[0], one, {"cycle": one[: rng.randint(1, n)]}))

    out = {kind: value(1 if streams else 0) for kind in "FIW"}
    for kind in "RDU":
        if rng.random() < 0.3:
            out[kind] = value(1 if streams else 0)
    i, w = out["I"], out["W"]
    if rng.random() < 0.5 or (isinstance(i, dict) and isinstance(w, dict)):
        out["B"] = value(1 if streams else 0)
    rule = rng.choice(("sum", "max", "number", "scale"))
    out["FB"] = {"number": number(rng) + 1, "scale": {"scale": number(rng) + 1}}.get(rule, rule)
    if rng.random() < 0.5:
        out["latency"] = number(rng)
    if rng.random() < 0.3:
        out["p2p_overhead"] = {"recv": number(rng), "send": number(rng)}
    if rng.random() < 0.3:
        out["bandwidth"] = number(rng) + 1
    if placed.slices > 1 and rng.random() < 0.7:
        out["slice"] = [number(rng) + 1 for _ in range(placed.slices)]
    if out["FB"] in ("sum", "max") or isinstance(out["FB"], dict):
        if rng.random() < 0.3:
            out["microbatch"] = [number(rng) for _ in range(placed.m // placed.slices)]
        if rng.random() < 0.3:
            out["speed"] = [number(rng) + 1 for _ in range(placed.p)]
    names = ("static", "activation", "held_between_I_and_W", "gradient", "message")
    out["bytes"] = {name: value() for name in names if rng.random() < 0.6}
    return out


def costs_of_stages(rng, n):
    """Times of n stages, each a number or a list, as a planner is asked; no work is free."""
    number = rng.choice((_whole, _whole, _fraction, _float))

    def value():
        one = [number(rng) + 1 for _ in range(n)]
        return one if alike < 0.5 else one[:1] * n

    alike = rng.random()
    out = {kind: value() for kind in "FIW"}
    if rng.random() < 0.6:  # mostly less than I and W together
        share = Fraction(rng.choice((3, 4, 5)), 5)
        out["B"] = [(i + w) * share for i, w in zip(out["I"], out["W"], strict=True)]
    if rng.random() < 0.4:
        out["latency"] = number(rng)
    if rng.random() < 0.2:
        out["p2p_overhead"] = {"recv": number(rng), "send": number(rng)}
    if rng.random() < 0.2:
        out |= {"bandwidth": number(rng) + 1, "bytes": {"message": [number(rng) for _ in range(n)]}}
    return out


def _whole(rng):
    return rng.choice((0, 1, 1, 2, 3, 7, 20))


def _fraction(rng):
    return Fraction(rng.randint(0, 12), rng.choice((1, 2, 3, 7)))


def _float(rng):
    return rng.choice((0.0, 0.1, 0.3, 1.0, rng.uniform(0, 10)))
