"""Compiled and plain loops give the same bits; samples and changes give what simulate gives."""

import pickle
import random
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hocket import Costs, build, check, loads, simulate
from hocket import compiled as chooser
from hocket.costs import Bytes, CostTable
from hocket.engine import longest_path
from hocket.errors import CostError, UsageError
from hocket.formats import write_trace
from hocket.graph import graph
from hocket.ir import Schedule
from hocket.lower import insert_communication
from hocket.schedules import entries
from hocket.simulator.samples import simulate_jitter, simulate_many, simulate_samples

NAMES = [e.name for e in entries()]
# those that search for their order take too long to be made a thousand times
QUICK = [n for n in NAMES if n not in {"v-1f1b", "v-auto", "v-half", "v-min", "zb-auto"}]
needs_numba = pytest.mark.skipif(
    not chooser.is_compiled(), reason="numba is not installed: nothing to compare with"
)


def plain():
    return chooser.forced(False)


def compiled():
    return chooser.forced(True)


def a_schedule(rnd, names=QUICK, p=(1, 4), m=(1, 8)):
    """A registered schedule of a random size that it allows."""
    while True:
        name = rnd.choice(names)
        entry = next(e for e in entries() if e.name == name)
        v = rnd.randint(1, 3) if entry.takes_v else None
        try:
            return build(name, p=rnd.randint(*p), m=rnd.randint(*m), v=v)
        except UsageError:
            continue


def some_costs(rnd, n):
    exact = rnd.random() < 0.7
    if not exact:
        f, i, w = ([round(rnd.uniform(0, 5), 3) for _ in range(n)] for _ in range(3))
    else:
        f, i, w = ([rnd.randint(0, 30) for _ in range(n)] for _ in range(3))
    size = tuple(rnd.randint(0, 9) for _ in range(n))
    return Costs(
        F=tuple(f), I=tuple(i), W=tuple(w), FB=rnd.choice(["sum", "max", 7, {"scale": 2}]),
        latency=rnd.choice([0, 0, 2]) if exact else 0.3, bandwidth=rnd.choice([None, 3]),
        p2p_overhead=rnd.choice([None, (1, 2)]) if exact else None,
        bytes=Bytes(activation=size, held=3, gradient=0.1, message=2, static=5),
    )  # fmt: skip


def seen(s, costs):
    """All that check, simulate, the metrics and the lowering say, as plain data."""
    s = build_again(s)
    reports = [check(s, t).problems for t in ("tagged", "ordered", "rendezvous")]
    t = simulate(s, costs)
    lowered = s if s.has_communication else insert_communication(s)
    low = simulate(lowered, costs)
    return [
        reports, t.start.tobytes(), t.end.tobytes(), t.start.dtype, t.ranks, repr(t.ranks),
        low.start.tobytes(), low.end.tobytes(), repr(low.ranks),
        lowered.codes.tobytes(), lowered.slots.tobytes(), lowered.starts.tobytes(),
        [list(x.gaps(q)) for x in (t, low) for q in s.queues], t.critical_path(),
    ]  # fmt: skip


def build_again(s):
    """The same schedule without what was derived from it."""
    return s.renamed(s.name)


@needs_numba
@pytest.mark.parametrize("name", NAMES)
def test_plain_and_compiled_are_equal_on(name):
    rnd = random.Random(name)
    for _ in range(4 if name in QUICK else 1):
        s = a_schedule(rnd, [name], p=(1, 8 if name in QUICK else 4), m=(1, 24))
        costs = some_costs(rnd, s.placement.n_stages)
        with plain():
            expected = seen(s, costs)
        with compiled():
            assert seen(s, costs) == expected


def shuffled(s, rnd):
    """The schedule with up to three swaps within queues that leave it free of deadlock."""
    for _ in range(3):
        order = {q: list(line) for q, line in s.order.items()}
        line = rnd.choice(list(order.values()))
        i, j = rnd.randrange(len(line)), rnd.randrange(len(line))
        line[i], line[j] = line[j], line[i]
        other = Schedule.from_order(s.name, s.placement, order)
        if check(other).ok:
            s = other
    return s


@needs_numba
def test_plain_and_compiled_are_equal_on_1000_random_orders():
    rnd = random.Random(5)
    for _ in range(1000):
        s = a_schedule(rnd)
        costs = some_costs(rnd, s.placement.n_stages)
        with plain():
            s = shuffled(s, rnd)
            a = check(s).problems, simulate(s, costs)
        with compiled():
            again = build_again(s)
            b = check(again).problems, simulate(again, costs)
        assert a[0] == b[0]
        assert a[1].start.tobytes() == b[1].start.tobytes()
        assert a[1].end.tobytes() == b[1].end.tobytes()
        assert repr(a[1].ranks) == repr(b[1].ranks)


@needs_numba
def test_faulty_orders_are_told_in_the_same_words():
    rnd = random.Random(7)
    for _ in range(100):
        s = a_schedule(rnd)
        order = {q: list(line) for q, line in s.order.items()}
        for _ in range(rnd.randint(1, 3)):
            line = order[rnd.choice(list(order))]
            if line:
                i, j = rnd.randrange(len(line)), rnd.randrange(len(line))
                line[i], line[j] = line[j], line[rnd.choice((i, j))]
        bad = type(s).from_order(s.name, s.placement, order)
        with plain():
            a = check(build_again(bad), "rendezvous").problems
        with compiled():
            assert check(build_again(bad), "rendezvous").problems == a


@needs_numba
def test_trace_files_are_equal_byte_for_byte(tmp_path):
    for name in ("1f1b", "dualpipe", "zb-h1"):
        s = build(name, p=4, m=12)
        t = simulate(s, Costs(latency=1, bytes=Bytes(activation=0.5)))
        for how, context in (("plain", plain()), ("compiled", compiled())):
            with context:
                write_trace(t, tmp_path / f"{how}.pftrace")
        files = [(tmp_path / f"{how}.pftrace").read_bytes() for how in ("plain", "compiled")]
        assert files[0] == files[1]


@pytest.mark.parametrize("context", [plain, nullcontext])
def test_one_pass_without_a_graph_gives_what_the_graph_gives(context):
    rnd = random.Random(3)
    with context():
        for _ in range(150):
            s = a_schedule(rnd)
            costs = some_costs(rnd, s.placement.n_stages)
            t, table = simulate(s, costs), CostTable(costs, s)
            g = graph(s)
            work = table.occupied()[s.slot_of_action[g.first_action]]
            times = longest_path(g, work, table.delays(g.source, g.crosses))
            assert (t.slot_start - t.before).tolist() == times.start.tolist()
            assert (t.slot_end + t.after).tolist() == times.end.tolist()
            assert replace(t, held=None).ranks == t.ranks


def test_a_timeline_goes_to_another_process_and_can_still_be_asked_for_its_graph():
    t = simulate(build("zb-h1", p=3, m=4), Costs(latency=1))
    there = pickle.loads(pickle.dumps(t))
    assert (there.ranks, there.critical_path()) == (t.ranks, t.critical_path())


@pytest.mark.parametrize(
    ("name", "p", "m", "parts"),
    [("gems", 64, 64, "all"), ("1f1b", 3, 1, "all"), ("1f1b", 3, 1, "F"), ("zb-v", 4, 8, "all")],
)
def test_times_that_integers_cannot_hold_are_floats_and_never_wrap(name, p, m, parts):
    s = build(name, p=p, m=m)
    for power in range(50, 63):
        cost = int(2**power / 1.0001)
        many = (cost, cost) if parts == "all" else None
        some = dict.fromkeys(("I", "W", "B", "latency"), cost) if parts == "all" else {}
        ones = {key: 1 for key in some}
        t = simulate(s, Costs(F=cost, p2p_overhead=many, **some))
        one = simulate(s, Costs(F=1, p2p_overhead=many and (1, 1), **ones))
        if parts == "all":
            assert t.makespan == pytest.approx(one.makespan * cost, rel=1e-12)
        for rank in t.ranks:
            assert min(rank.busy, rank.idle, rank.transfer, *rank.waits.values()) >= 0


def test_a_slot_whose_parts_need_each_other_starts_when_what_it_needs_from_outside_is_there():
    s = loads("# hocket 1\nname turn\npath 0: 0 1 1 0\n0: 0F0 3F0+3B0 0B0\n1: 1F0+2F0 2B0+1B0\n")
    assert check(s).ok
    t = simulate(s, Costs(F=1, B=2, latency=3))
    assert t.slot_start.tolist() == [0, 9, 22, 4, 15]
    assert t.makespan == 24


# --- samples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [plain, nullcontext])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "zb-h1", "interleaved", "chimera"])
def test_samples_are_what_simulate_gives_for_each(name, context):
    s = build(name, p=4, m=8)
    many = [
        Costs(F=f, I=i, W=2, latency=x, FB="max") for f in (1, 3) for i in (1, 2) for x in (0, 2)
    ] * 5
    lanes = [Costs(F=f, p2p_overhead=(1, 2)) for f in (1, 2, 3)]
    with context():
        for order in (s, insert_communication(s)):
            for costs in (many, lanes):
                found = simulate_samples(order, costs)
                timelines = [simulate(order, c) for c in costs]
                assert found.makespan.tolist() == [t.makespan for t in timelines]
                assert found.makespan.dtype == np.int64
                ends = [[r.end for r in t.ranks] for t in timelines]
                assert found.ends.tolist() == ends


def test_samples_of_floats_are_equal_to_the_last_bit():
    s = build("zb-h1", p=4, m=8)
    costs = [Costs(F=1.1 + i / 7, I=0.9, W=1 / 3, latency=0.01 * i) for i in range(40)]
    assert simulate_samples(s, costs).makespan.tolist() == [simulate(s, c).makespan for c in costs]


def test_samples_of_durations_by_action():
    s = build("1f1b", p=3, m=4)
    durations = np.array([[1] * len(s.codes), [2] * len(s.codes)])
    assert simulate_samples(s, durations).makespan.tolist() == [12, 24]
    with pytest.raises(CostError, match="durations are given for 3 actions, but the schedule has"):
        simulate_samples(s, durations[:, :3])


def test_jitter_of_no_spread_is_the_makespan_and_a_seed_gives_the_same_again():
    s = build("1f1b", p=4, m=8)
    assert simulate_jitter(s, samples=3, spread=0).makespan.tolist() == [33.0] * 3
    a, b = (simulate_jitter(s, samples=100, spread=0.1, seed=1).makespan for _ in range(2))
    assert a.tolist() == b.tolist()
    assert 33 < a.mean() < 40  # a rank that waits for the slower of two waits longer


def test_many_orders_in_one_and_in_two_processes():
    schedules = [build("1f1b", p=p, m=8) for p in (2, 3, 4)]
    one = simulate_many(schedules)
    assert [x.makespan for x in one] == [27, 30, 33]
    assert one[2].peaks_in_flight == (4, 3, 2, 1)
    assert simulate_many(schedules, processes=2) == one


# --- when numba is loaded -----------------------------------------------------------------------


def _loads_numba(code):
    code += "\nimport sys; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def test_small_schedules_never_load_numba():
    assert not _loads_numba(
        "import hocket\ns = hocket.build('zb-h1', p=8, m=32)\n"
        "assert hocket.check(s, 'rendezvous').ok\nhocket.simulate(s).ranks"
    )


SESSION = """
from hocket import build, check, compiled, simulate
def session(n, p, m):
    for i in range(n):
        s = build("1f1b", p=p, m=m)
        assert check(s).ok
        assert simulate(s).ranks
"""


def test_200_small_calls_never_load_numba():
    assert not _loads_numba(SESSION + "session(200, 8, 64)")


@needs_numba
def test_calls_of_middle_size_load_numba_in_a_long_session_only():
    assert not _loads_numba(SESSION + "session(4, 16, 256)")
    assert _loads_numba(SESSION + "compiled.LONG = 10 * 8192\nsession(4, 16, 256)")


@needs_numba
def test_large_schedules_load_numba_once_it_pays():
    assert _loads_numba("import hocket\nhocket.check(hocket.build('1f1b', p=64, m=1024))")


def test_without_numba_all_runs_plain():
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from hocket import build, check, compiled, simulate\n"
        "s = build('1f1b', p=64, m=1024)\nassert check(s).ok\n"
        "assert simulate(s).makespan == 3 * (1024 + 63)\nassert not compiled.is_compiled()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- work, not seconds --------------------------------------------------------------------------


def test_the_loops_go_over_as_much_as_recorded():
    folder = Path(__file__).parents[1] / "benchmarks"
    done = subprocess.run(
        [sys.executable, str(folder / "speed.py"), "--counts"], capture_output=True, text=True
    )
    assert done.stdout == (folder / "counts.json").read_text(), (
        "the loops' work has changed; if that is meant: benchmarks/speed.py --counts --save"
    )


def _python_calls(m):
    """Calls of Python and C functions from name to metrics, warm."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    for counted in (False, True):
        sys.setprofile(count if counted else None)
        s = build("1f1b", p=8, m=m)
        problems = check(s, "rendezvous").problems
        t = simulate(s)
        metrics = t.ranks, t.makespan, t.span, t.bubble_ratio
        sys.setprofile(None)
        assert not problems
        assert metrics
    return calls


@needs_numba
def test_no_python_runs_per_action():
    with compiled():
        few, many = _python_calls(64), _python_calls(4096)
    assert abs(many - few) < 100, "something walks over actions in Python"
