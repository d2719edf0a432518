"""Orders of the authors' own code with recomputation and offload, reproduced action by action."""

import json

import pytest

from common import DATA
from hocket import Bytes, Costs, UsageError, build, check, loads, simulate
from hocket.errors import ScheduleError
from hocket.ir import Kind, Queue
from hocket.lower import offload

RECORDS = [json.loads(line) for line in (DATA / "kind_orders.jsonl").read_text().splitlines()]
PAIRS = Bytes(activation=1, held=1, message=0)  # bytes count pairs of a stage and a microbatch


def of(group):
    mine = [r for r in RECORDS if r["id"].startswith(group)]
    return pytest.mark.parametrize("record", mine, ids=[r["id"] for r in mine])


def settings(record, *names):
    return {name: record[name] for name in ("p", "m", *names)}


def words(schedule):
    return {
        str(queue): " ".join(str(a) for slot in line for a in slot)
        for queue, line in schedule.order.items()
    }


def peaks(timeline):
    return [rank.peak_bytes for rank in timeline.ranks]


@of("pipeoffload")
def test_pipeoffload_has_the_copies_of_the_authors_timetable(record):
    s = build("pipeoffload", **settings(record, "v", "group", "chunks", "ratio"))
    assert check(s).ok
    assert words(s) == record["order"]
    copy = record["copy"]
    t = simulate(s, Costs(F=1, I=1, W=1, D=copy, U=copy, bytes=PAIRS))
    # Their compute stream waits for the end of some copies out, where ours never does.
    assert t.makespan <= record["makespan"]
    assert all(ours <= theirs for ours, theirs in zip(peaks(t), record["peaks"], strict=True))
    if max(record["peaks"]) < 5:
        assert (t.makespan, peaks(t)) == (record["makespan"], record["peaks"])


def test_half_of_the_pairs_leave_and_the_peak_falls_below_half():
    s, copies = build("pipeoffload", p=4, m=8, group=4), Costs(D=0.75, U=0.75, bytes=PAIRS)
    plain = simulate(build("group-interleaved", p=4, m=8, group=4), copies)
    t = simulate(s, copies)
    assert t.makespan == plain.makespan
    assert (peaks(plain), peaks(t)) == ([8, 7, 6, 5], [4, 3, 3, 3])


@pytest.mark.parametrize("ratio", [1, 100, 500])
@pytest.mark.parametrize(("p", "m", "v"), [(1, 4, 3), (2, 1, 1), (3, 5, 2), (5, 8, 3), (8, 3, 4)])
def test_pipeoffload_can_run_at_any_size(p, m, v, ratio):
    s = build("pipeoffload", p=p, m=m, v=v, ratio=ratio, chunks=v)
    assert check(s).ok
    assert (Kind.A in s.kinds) == (Kind.D in s.kinds) == (Kind.U in s.kinds)


def test_what_does_not_fit_the_timetable_stays_on_the_device():
    assert Kind.D not in build("pipeoffload", p=4, m=8, ratio=500).kinds
    assert Kind.D not in build("pipeoffload", p=4, m=8, chunks=0).kinds
    with pytest.raises(UsageError, match="pipeoffload needs chunks of 0 to v"):
        build("pipeoffload", p=4, m=8, chunks=3)


@of("gis-recompute")
def test_group_interleaved_recomputes_as_the_authors_code_does(record):
    s = build("group-interleaved", **settings(record, "v", "group", "recompute"))
    assert words(s) == record["order"]
    t = simulate(s, Costs(bytes=PAIRS))
    assert (t.makespan, max(peaks(t))) == (record["makespan"], record["peak"])


@of("primus")
def test_offload_of_the_first_leg_has_the_peaks_of_primus(record):
    p = record["p"]
    path = " ".join(map(str, [*range(p), *reversed(range(p))]))
    lines = "".join(f"{rank}: {line}\n" for rank, line in record["order"].items())
    s = loads(f"# hocket 1\nname v\npath 0: {path}\n{lines}")
    t = simulate(offload(s, range(p)), Costs(bytes=PAIRS))
    assert (peaks(simulate(s, Costs(bytes=PAIRS))), peaks(t)) == (record["plain"], record["peaks"])


@of("merak")
def test_merak_has_the_order_of_its_own_code(record):
    s = build("merak", **settings(record, "variant"))
    # Theirs writes f where an R of its own follows; a B with its R inside is one slot here.
    ours = {str(queue): " ".join(str(slot[-1]) for slot in line) for queue, line in s.order.items()}
    assert ours == {rank: line.replace("f", "F") for rank, line in record["order"].items()}
    assert simulate(s, Costs(F=1, B=2, R=1)).makespan == record["makespan"]


# Proven optima with R anywhere between F and B: p, m, and the makespans at F = R = 1, B = 2 where
# every stage recomputes, where the last one keeps its activations, and where a rank has room for
# two full activations besides.
@pytest.mark.parametrize(
    ("p", "m", "optima"),
    [(2, 4, (19, 17, 16)), (3, 4, (22, 20, 19)), (3, 6, (30, 28, 27)), (4, 6, (33, 31, 30)),
     (4, 8, (41, 39, 38))],
)  # fmt: skip
def test_merak_reaches_the_proven_optima(p, m, optima):
    variants = ("pre-recompute", "last-no-recompute", "shifted")
    costs = Costs(F=1, B=2, R=1)
    found = [simulate(build("merak", p=p, m=m, variant=x), costs).makespan for x in variants]
    assert tuple(found) == optima


# --- allocation, and the pass ---------------------------------------------------------------------


@pytest.mark.parametrize(("room", "held"), [("0A0 ", 10), ("", 20)])
def test_a_reload_waits_for_its_allocation_and_finds_its_memory_taken(room, held):
    line = f"0: 0F0 0F1 0B1 {room}0F2 0B2 0B0\n0/host: 0D0 0U0"
    s = loads(f"# hocket 1\nname x\npath 0: 0\n{line}\n")
    t = simulate(s, Costs(F=1, B=2, D=0.5, U=0.5, bytes=Bytes(activation=10)))
    # F0 to 1, D0 to 1.5, F1 to 2, B1 to 4; U0 starts at 4 or, without an A, at 1.5
    assert t.makespan == 9
    times, levels = t.levels("bytes")[0]
    assert levels[[i for i, time in enumerate(times) if time <= 3][-1]] == held
    assert t.ranks[0].peak_bytes == 20


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ("0: 0F0 0A0 0B0", "0D0 is missing, but 0A0 needs it"),
        ("0: 0F0 0A0 0B0\n0/host: 0D0", "0A0 is of no use: no action needs it"),
        ("0: 0A0 0F0 0B0\n0/host: 0D0 0U0", "0A0"),
    ],
)
def test_what_is_wrong_with_an_allocation_is_reported(lines, what):
    report = check(loads(f"# hocket 1\nname x\npath 0: 0\n{lines}\n"))
    assert what in str(report)


def test_offload_moves_what_lives_long_enough():
    s = offload(build("1f1b", p=2, m=3))
    assert words(s) == {
        "0": "0F0 0F1 0B0 0A1 0F2 0B1 0B2",
        "0/host": "0D1 0U1",
        "1": "1F0 1B0 1F1 1B1 1F2 1B2",
    }
    assert offload(s, []) == s
    with pytest.raises(ScheduleError, match="1f1b has no stage 2; its stages are 0 to 1"):
        offload(s, [2])


def test_offload_adds_to_the_copies_that_are_there():
    s = build("pipeoffload", p=2, m=4)
    more = offload(s)
    assert check(more).ok
    assert set(s.line(Queue(0, "host"))) < set(more.line(Queue(0, "host")))
