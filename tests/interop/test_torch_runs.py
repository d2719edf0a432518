"""Exported schedules run by torch's own runtime train as one process does."""

import os
import pickle
from statistics import median

import pytest
from torch_cases import cases
from torch_ranks import WORK, Case, Profiled, on_four_ranks, order_of

from hocket import build, check, dumps, loads, simulate
from hocket.interop.torch.check import check_torch
from hocket.interop.torch.csv import import_csv, unrolled
from hocket.interop.torch.lowering import lower_as_torch
from hocket.interop.torch.text import dump_rows, read_rows
from hocket.interop.traces.kineto import rank_trace, recording
from hocket.lower import strip_communication
from hocket.measured.readings import readings

pytestmark = [pytest.mark.runtime, pytest.mark.processor_time(300)]
CASES = cases()
EXACT = 1e-12


# What torch's own schedules make of `defer_pp_recv=True`: whether they train right.
DEFERRED = {
    ("ZBVZeroBubble", 2, 4): False,
    ("ZBVZeroBubble", 2, 8): False,
    ("ZBVZeroBubble", 4, 8): False,
    ("DualPipeV", 2, 4): True,
    ("DualPipeV", 3, 6): False,
    ("DualPipeV", 4, 8): False,
    ("InterleavedZeroBubble", 2, 4): False,
    ("InterleavedZeroBubble", 2, 8): False,
    ("InterleavedZeroBubble", 4, 8): True,
    ("Interleaved1F1B", 2, 4): True,
    ("Interleaved1F1B", 4, 8): True,
    ("LoopedBFS", 2, 4): True,
}

PROFILED = [
    Profiled(dumps(build(name, p=p, m=m)), by)
    for name, p, m, by in (
        ("1f1b", 2, 4, "torch"), ("zb-v", 2, 4, "hocket"), ("1f1b", 4, 8, "torch"),
        ("zb-h1", 4, 8, "hocket"),
    )
]  # fmt: skip

PADDED = [
    Case(f"{name} by columns", dumps(build(name, p=p, m=m, v=v)), "multi")
    for name, p, m, v in (("1f1b", 2, 4, None), ("interleaved", 2, 4, 2), ("zb-h1", 4, 8, None))
]
SHARDED = [(dumps(build(name, p=2, m=4, v=v)),) for name, v in (("zb-v", None), ("interleaved", 3))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Everything in one launch, also where two workers share the tests."""
    from filelock import FileLock

    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "torch-runs.pickle"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            jobs = {
                "run_cases": [*CASES, *PADDED],
                "run_deferred": list(DEFERRED),
                "run_profiled": PROFILED,
                "run_sharded": SHARDED,
            }
            shared.write_bytes(pickle.dumps(on_four_ranks(jobs)))
        return pickle.loads(shared.read_bytes())


def _seen(runs, job, number):
    return [rank[number] for rank in runs[job] if number in rank]


def test_forty_schedules_are_run():
    assert len(CASES) >= 40
    assert {case.how for case in CASES} == {"csv", "messages", "schedule"}


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_gradients_equal_those_of_one_process(runs, number):
    seen = _seen(runs, "run_cases", number)
    assert len(seen) == order_of(CASES[number]).schedule.p
    assert max(outcome.error for outcome in seen) <= EXACT
    assert max(outcome.largest for outcome in seen) > 1e-3


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_torchs_own_dump_gives_the_same_schedule_back(runs, number):
    case, order = CASES[number], order_of(CASES[number])
    outcome = _seen(runs, "run_cases", number)[0]
    want = order.schedule if case.overlap else unrolled(order.schedule)
    messages = import_csv(outcome.messages, name=want.name).schedule
    assert strip_communication(messages) == want
    check(messages, "ordered").raise_if_bad()
    assert check_torch(read_rows(outcome.messages)).ok
    if case.how != "messages":  # torch keeps no computation of a file with messages
        assert import_csv(outcome.compute, name=want.name).schedule == want
    if case.how == "csv":
        assert dump_rows(lower_as_torch(order.rows)) == outcome.messages


@pytest.mark.parametrize("number", range(len(DEFERRED)), ids=map(str, DEFERRED))
def test_the_verdict_on_defer_pp_recv_is_what_a_run_shows(runs, number):
    (name, p, m), right = list(DEFERRED.items())[number]
    seen = _seen(runs, "run_deferred", number)
    assert (max(error for error, _, _ in seen) <= EXACT) == right
    report = check_torch(read_rows(seen[0][2], f"{name}.csv"), p=p, m=m, defer=True)
    assert report.deferred is not None
    assert report.deferred.ok == right, str(report)
    assert not report.problems


@pytest.mark.parametrize("number", range(len(DEFERRED)), ids=map(str, DEFERRED))
def test_our_late_receives_train_right_where_torchs_do_not(runs, number):
    assert max(safe for _, safe, _ in _seen(runs, "run_deferred", number)) <= EXACT


@pytest.mark.parametrize("number", range(len(PROFILED)), ids=["torch2", "own2", "torch4", "own4"])
def test_a_recorded_trace_gives_the_order_the_time_and_the_costs_of_the_run(runs, number):
    """Makespan within 1 % of the run's own clock; what the costs predict within 5 % of it.

    What the machine adds to a step is the same for longer stages, so these come next, should it
    be too much.
    """
    s = loads(PROFILED[number].sched)
    far = [_recorded(s, _seen(runs, "run_profiled", number))]
    if not _near(*far):
        longer = [PROFILED[number]._replace(work=times * WORK) for times in (3, 9)]
        again = on_four_ranks({"run_profiled": longer})
        far += [_recorded(s, _seen(again, "run_profiled", i)) for i in range(len(longer))]
    assert any(map(_near, far)), far


def _near(off):
    """off: how far from the run's own clock, and from the prediction."""
    return off[0] <= 0.01 and off[1] <= 0.05


def _recorded(s, seen):
    """How far a recorded run is off its own clock, and off what its costs predict."""
    run = recording([rank_trace(text.encode(), f"rank{r}") for r, (text, _) in enumerate(seen)])
    assert len(run.timelines) == len(seen[0][1])
    off = []
    for step, clock in zip(run.timelines, seen[0][1], strict=True):
        assert strip_communication(step.schedule).order == s.order
        assert (step.delays[step.graph.crosses] >= -1e-3).all()
        off.append(abs(float(step.makespan) / clock - 1))
    predicted = [
        float(simulate(s, readings([step]).costs()).makespan) / float(step.makespan) - 1
        for step in run.timelines
    ]
    assert [str(gap) for queue in run.typical.schedule.queues for gap in run.typical.gaps(queue)]
    assert run.typical.critical_path()
    return median(off), median(map(abs, predicted))


def test_stages_sharded_by_fsdp_get_the_gradients_of_one_process(runs):
    for number in range(len(SHARDED)):
        assert max(rank[number] for rank in runs["run_sharded"]) <= EXACT


def test_padded_files_are_right_in_the_runtime_that_goes_by_columns(runs):
    for number, case in enumerate(PADDED, len(CASES)):
        assert max(outcome.error for outcome in _seen(runs, "run_cases", number)) <= EXACT
        file = read_rows(order_of(case).text)
        assert check_torch(file, runtime="multi").ok
        assert import_csv(order_of(case).text, name=loads(case.sched).name).schedule == loads(
            case.sched
        )
