"""Exported schedules run by torch's own runtime train as one process does."""

import os
import pickle

import pytest
from torch_cases import cases
from torch_ranks import on_four_ranks, order_of

from hocket import check
from hocket.interop.torch_check import check_torch
from hocket.interop.torch_csv import import_csv, unrolled
from hocket.interop.torch_lowering import lower_as_torch
from hocket.interop.torch_text import dump_rows, read_rows
from hocket.lower import strip_communication

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(300)]
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Everything in one launch, also where two workers share the tests."""
    from filelock import FileLock

    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "torch-runs.pickle"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            jobs = {"run_cases": CASES, "run_deferred": list(DEFERRED)}
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
