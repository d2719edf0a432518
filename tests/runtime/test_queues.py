"""The queues of a rank side by side, a thread each."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from runtime_ranks import (
    LONG,
    SHORT,
    Gloo,
    assert_like_whole,
    batch,
    blocks,
    held,
    mean_square,
    on_ranks,
)
from torch import nn

from hocket.errors import RunError
from hocket.lower.phases import ORDERS, phases
from hocket.runtime import Pipeline, dispatch
from hocket.runtime.failure import Board, Place, failure
from hocket.runtime.queues import side_by_side
from hocket.schedules import build
from hocket.text import loads
from hocket.train import settings

pytestmark = pytest.mark.runtime

OWN_QUEUE = """# hocket 1
name messages-on-a-queue-of-their-own
path 0: 0 1
0: 0F0 0F1 0F2 0B0 0B1 0B2
0/comm: 0SEND_F0 0SEND_F1 0RECV_B0 0SEND_F2 0RECV_B1 0RECV_B2
1: 1F0 1B0 1F1 1B1 1F2 1B2
1/comm: 1RECV_F0 1RECV_F1 1SEND_B0 1RECV_F2 1SEND_B1 1SEND_B2
"""
IN_AND_OUT = """# hocket 1
name a-queue-for-each-direction
path 0: 0 1
0: 0F0 0F1 0B0 0B1
0/in: 0RECV_B0 0RECV_B1
0/out: 0SEND_F0 0SEND_F1
1: 1F0 1F1 1B0 1B1
1/in: 1RECV_F0 1RECV_F1
1/out: 1SEND_B0 1SEND_B1
"""
CROSSWISE = """# hocket 1
name two-pipelines-crosswise
path 0: 0 1 | 0
path 1: 1/b 0/b | 1
0: 0F0 0B0
0/b: 1F1 1B1
1: 1F0 1B0
1/b: 0F1 0B1
"""
ONE_RANK = """# hocket 1
name two-queues
path 0: 0 0/comm
0: 0F0 0F1 0B0 0B1
0/comm: 1F0 1F1 1B0 1B1
"""
BOTH_PATHS = """# hocket 1
name a-stage-on-two-queues
path 0: 0 0/comm | 0
path 1: 0/comm 0 | 1
0: 0F0 1F1 1B1 0B0
0/comm: 0F1 1F0 1B0 0B1
"""


def _queue_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("hocket-queue")]


# --- right -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_phases_trains_like_the_unpipelined_model_on_two_ranks(order):
    schedule = build("moe-pair", p=2, m=4, order=order)
    assert side_by_side(schedule)
    assert_like_whole(schedule, blocks(schedule.placement.n_stages), *batch(9), steps=2)


@pytest.mark.parametrize("coarse", ["1f1b", "zb-h1", "dualpipe", "interleaved"])
def test_phases_of_other_schedules_train_like_the_unpipelined_model(coarse):
    schedule = phases(build(coarse, p=2, m=4))
    assert_like_whole(schedule, blocks(schedule.placement.n_stages), *batch(9), verify=True)


@pytest.mark.parametrize("text", [OWN_QUEUE, IN_AND_OUT])
def test_messages_may_stand_on_queues_of_their_own(text):
    schedule = loads(text)
    assert side_by_side(schedule)
    assert_like_whole(schedule, blocks(2), *batch(7), steps=3)


def test_evaluation_on_two_queues_gives_the_loss_of_the_training_step():
    schedule = build("moe-pair", p=2, m=7)

    def rank(r, g):
        stages = held(schedule, r, blocks(schedule.placement.n_stages))
        pipe = Pipeline(schedule, stages, mean_square, group=g.group, timeout=LONG)
        return float(pipe.eval(*batch(14))), float(pipe.step(*batch(14)))

    for evaluated, trained in on_ranks(2, rank):
        assert evaluated == pytest.approx(trained, rel=1e-12)


def test_a_stage_on_two_queues_of_its_rank_runs_in_one_thread():
    schedule = loads(BOTH_PATHS)
    assert not side_by_side(schedule)
    assert Pipeline(schedule, dict(enumerate(blocks(2))), mean_square).dispatch == "receive"
    words = (
        "stage 0 of rank 0 is on the queues 0 and 0/comm, and a stage runs in one thread; "
        'give dispatch="receive"'
    )
    with pytest.raises(RunError, match=f"^{words}$"):
        Pipeline(schedule, dict(enumerate(blocks(2))), mean_square, dispatch="queues")


def test_the_command_line_offers_every_way_to_dispatch():
    assert tuple(dispatch.DISPATCH) == settings.DISPATCH


def test_ranks_that_dispatch_differently_are_told_before_the_first_step():
    schedule = build("moe-pair", p=2, m=2)

    def rank(r, g):
        stages = held(schedule, r, blocks(schedule.placement.n_stages))
        how = ("queues", "receive")[r]
        Pipeline(schedule, stages, mean_square, group=g.group, dispatch=how)

    for error in on_ranks(2, rank, raises=False):
        assert str(error) == (
            'the ranks disagree on dispatch: "queues" on rank 0, "receive" on rank 1'
        )


# --- side by side ------------------------------------------------------------------------------


class _Meeting(nn.Module):
    """Comes back from forward `turn` only once the other one is in its own."""

    def __init__(self, turn, mine, other, patience):
        super().__init__()
        self.turn, self.mine, self.other, self.calls = turn, mine, other, 0
        self.patience = patience
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x):
        if self.calls == self.turn:
            self.mine.set()
            assert self.other.wait(self.patience), "the other queue does not run meanwhile"
        self.calls += 1
        return self.linear(x)


def _meeting(patience):
    """Stages whose 0F1 and 1F0 must run at the same time."""
    first, second = threading.Event(), threading.Event()
    return {0: _Meeting(1, first, second, patience), 1: _Meeting(0, second, first, patience)}


def test_two_queues_overlap_in_the_measured_timeline():
    pipe = Pipeline(loads(ONE_RANK), _meeting(LONG), mean_square)
    pipe.step(*batch(4))
    t = pipe.gather_timeline()
    at = {
        str(t.schedule.slot(i)): (t.slot_start[i], t.slot_end[i]) for i in range(t.schedule.n_slots)
    }
    assert at["1F0"][0] < at["0F1"][1] and at["0F1"][0] < at["1F0"][1]
    assert at["0F0"][1] <= at["1F0"][0]  # what a queue needs from the other is there
    assert at["1B1"][1] <= at["0B1"][0]
    for queue in ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"):
        times = [time for action in queue.split() for time in at[action]]
        assert times == sorted(times)


def test_one_after_the_other_they_would_never_meet():
    pipe = Pipeline(loads(ONE_RANK), _meeting(0.2), mean_square, dispatch="receive")
    with pytest.raises(RunError, match=r"failed in .F.: .*the other queue does not run meanwhile"):
        pipe.step(*batch(4))


class _Slow(torch.autograd.Function):
    """Counts how many of its backwards run at the same time."""

    @staticmethod
    def forward(ctx, x, now):
        ctx.now = now
        return x * 1

    @staticmethod
    def backward(ctx, *grads):
        ctx.now["running"] += 1
        ctx.now["most"] = max(ctx.now["most"], ctx.now["running"])
        time.sleep(0.1)
        ctx.now["running"] -= 1
        return grads[0], None


@pytest.mark.parametrize("same", [False, True])
def test_backwards_of_two_queues_take_turns_where_they_hold_the_same_parameter(same):
    class Counting(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return _Slow.apply(self.linear(x), now)

    now = {"running": 0, "most": 0}
    one, other = blocks(2)
    stages = {0: Counting(one), 1: Counting(one if same else other)}
    pipe = Pipeline(loads(ONE_RANK), stages, mean_square)
    pipe.step(*batch(4))  # 0B0 beside 1B1
    assert now["most"] == (1 if same else 2)


class _Modes(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.seen, self.linear = seen, nn.Linear(3, 3)

    def forward(self, x):
        out = self.linear(x)
        self.seen.append((torch.is_grad_enabled(), out.dtype))
        return out.float()


@pytest.mark.parametrize("cast", [False, True])
def test_threads_have_the_modes_of_the_caller(cast):
    seen = []
    schedule = loads(ONE_RANK)
    pipe = Pipeline(schedule, {s: _Modes(seen) for s in range(2)}, mean_square)
    data = [x.float() for x in batch(4)]
    with torch.autocast("cpu", torch.bfloat16) if cast else nullcontext():
        pipe.step(*data)
        pipe.eval(*data)
    dtype = torch.bfloat16 if cast else torch.float32
    assert seen == [(True, dtype)] * 4 + [(False, dtype)] * 4


# --- random numbers ----------------------------------------------------------------------------


class _Dropping(nn.Module):
    def __init__(self, seed, draws=True):
        super().__init__()
        self.inner, self.draws = blocks(seed + 1)[seed], draws

    def forward(self, x):
        y = self.inner(x)
        return nn.functional.dropout(y, 0.5) if self.draws else y


def _dropped(dispatch, draws):
    stages = {s: _Dropping(s, draws[s]) for s in range(2)}
    pipe = Pipeline(loads(ONE_RANK), stages, mean_square, seed=3, dispatch=dispatch)
    return [float(pipe.step(*batch(4))) for _ in range(3)]


def test_dropout_on_one_queue_is_the_same_side_by_side():
    draws = (True, False)
    assert _dropped("queues", draws) == _dropped("receive", draws)
    assert len(set(_dropped("queues", draws))) == 3


def test_stages_on_two_queues_that_both_draw_take_turns_and_are_told():
    words = (
        "stage 0 on queue 0 and stage 1 on queue 0/comm may both draw random numbers, from one "
        "generator, so they take turns; a module that draws none says draws = False"
    )
    with pytest.warns(UserWarning, match=f"^{words}$"):
        found = _dropped("queues", (True, True))
    assert found == _dropped("receive", (True, True))


# --- failure -----------------------------------------------------------------------------------


class _Broken(nn.Module):
    def forward(self, *values):
        raise ValueError("a bad day")


class Exchanging(nn.Module):
    """Waits for the other replica, as an all-to-all does."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, x):
        there = torch.ones(2)
        self.group.alltoall_base(torch.empty(2), there, [1, 1], [1, 1]).wait()
        return x * 1


@pytest.mark.parametrize("stage", range(8))
def test_a_failure_in_any_thread_ends_all_ranks_with_one_error(stage):
    schedule = build("moe-pair", p=2, m=4)

    def rank(r, g):
        stages = held(schedule, r, blocks(schedule.placement.n_stages))
        if stage in stages:
            stages[stage] = _Broken()
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        return pipe.step(*batch(8))

    start = time.monotonic()
    errors = on_ranks(2, rank, raises=False)
    assert time.monotonic() - start < LONG / 2  # not when the messages time out
    culprit = stage // 4
    for error in errors:
        assert isinstance(error, RunError)
        assert (error.rank, error.action) == (culprit, f"{stage}F0")
        assert str(error).startswith(f"rank {culprit} failed in {stage}F0: ValueError: a bad day")
    assert _queue_threads() == []


def test_no_thread_is_left_when_the_error_comes_out():
    class Long(nn.Module):
        def forward(self, x):
            started.set()
            time.sleep(0.5)
            return x * 1

    class Breaks(nn.Module):
        def forward(self, x):
            if started.is_set() or begun:
                started.wait(LONG)
                raise ValueError("a bad day")
            begun.append(1)
            return x * 1

    started, begun = threading.Event(), []
    pipe = Pipeline(loads(ONE_RANK), {0: Breaks(), 1: Long()}, mean_square)
    with pytest.raises(RunError, match=r"^rank 0 failed in 0F1: ValueError: a bad day$"):
        pipe.step(*batch(4))
    assert _queue_threads() == []


def test_a_rank_that_hangs_and_waits_is_named_for_what_it_does():
    schedule = loads(CROSSWISE)
    release = threading.Event()

    class Stuck(nn.Module):
        def forward(self, x):
            release.wait(LONG)
            return x

    def rank(r, g):
        stages = {0: Stuck(), 1: blocks(2)[1]}
        pipe = Pipeline(schedule, stages, mean_square, group=g.group, timeout=SHORT)
        try:
            return pipe.step(*batch(4))
        finally:
            release.set()

    for error in on_ranks(2, rank, raises=False):
        assert isinstance(error, RunError)
        assert (error.rank, error.action) in [(0, "0F0"), (1, "0F1")]
        assert f"rank {error.rank} has been in {error.action} for" in str(error)


def test_a_stage_whose_own_messages_broke_leaves_the_word_to_who_knows_more():
    board = Board(dist.HashStore(), "here")
    known = {"rank": 3, "action": "4F0", "text": "rank 3 is gone", "told_by": 2}
    threading.Timer(0.2, lambda: board.first(known)).start()
    cut = RuntimeError("Connection closed by peer [127.0.0.1]:2345")
    error = failure(cut, 1, Place("1F0"), False, board, lambda: None)
    assert str(error) == "rank 3 is gone\n  rank 1 was in 1F0"
    assert (error.rank, error.action) == (3, "4F0")


def cut_off(board, rank, *place):
    error = RuntimeError("Connection closed by peer [127.0.0.1]:2345")
    return failure(error, rank, Place(*place), True, board, lambda: None)


def test_a_rank_that_had_lost_another_before_it_was_lost_is_not_the_cause():
    store = dist.HashStore()
    board = Board(store, "here", ranks=range(4))
    board.lose({"rank": 0, "action": "0SEND_F5", "at": "in 1F5", "told_by": 1})  # and was ended
    error = cut_off(board, 2, "2F5", (1, "1SEND_F5"), 1)
    assert (error.rank, error.action) == (0, "0SEND_F5")
    assert str(error) == (
        "rank 0 is gone (killed?): rank 1 was in 1F5, when the connection broke\n  rank 2 was in "
        "2F5, waiting for 1SEND_F5 of rank 1"
    )


def test_in_a_collective_the_only_rank_without_a_word_is_gone():
    board = Board(dist.HashStore(), "here", ranks=range(3))
    threading.Timer(
        0.2, lambda: board.lose({"rank": None, "action": "a", "at": "in a", "told_by": 2})
    ).start()
    error = cut_off(board, 0, "the sum of the losses")
    assert error.rank == 1
    assert str(error).startswith("rank 1 is gone (killed?): rank 0 was in the sum of the losses, ")


def test_a_collective_in_which_two_ranks_are_silent_names_neither(monkeypatch):
    monkeypatch.setattr("hocket.runtime.failure.LONG_GRACE", 0.1)
    board = Board(dist.HashStore(), "here", ranks=range(3))
    assert cut_off(board, 0, "the sum of the losses").rank is None


def test_a_replica_that_hangs_is_named_by_the_one_whose_all_to_all_waits_for_it():
    schedule = build("moe-pair", p=1, m=2)
    release = threading.Event()

    class Stuck(nn.Module):
        def forward(self, x):
            release.wait(LONG)
            return x

    def rank(r, g):
        group = Gloo("experts", g.store, r, 2, SHORT)
        own = Gloo(f"own{r}", g.store, 0, 1, SHORT)
        stages = dict(enumerate(blocks(4)))
        stages[1] = Exchanging(group)
        if r == 1:
            stages[0] = Stuck()
        pipe = Pipeline(
            schedule,
            stages,
            mean_square,
            group=own,
            data_parallel=group,
            timeout=SHORT,
        )
        try:
            pipe.step(*batch(4))
        finally:
            release.set()

    first = on_ranks(2, rank, raises=False)[0]
    assert isinstance(first, RunError)
    assert (first.rank, first.action) == (1, "0F0")
    assert str(first).startswith("rank 1 does not answer in 0F0:\n  rank 0 was in 1F0, waiting for "
                                 "0F0 of rank 1\n  rank 1 has been in 0F0 for ")  # fmt: skip


def test_a_silent_queue_is_named_by_the_others():
    schedule = build("moe-pair", p=2, m=2)
    release = threading.Event()

    class Stuck(nn.Module):
        def forward(self, x):
            release.wait(LONG)
            return x

    def rank(r, g):
        stages = held(schedule, r, blocks(schedule.placement.n_stages))
        if r == 1:
            stages[5] = Stuck()
        pipe = Pipeline(schedule, stages, mean_square, group=g.group, timeout=SHORT)
        try:
            return pipe.step(*batch(8))
        finally:
            release.set()

    first = on_ranks(2, rank, raises=False)[0]
    assert isinstance(first, RunError)
    assert (first.rank, first.action) == (1, "5F0")
    assert str(first).startswith("rank 1 does not answer in 5F0:\n")


def test_failure_of_a_replica_is_named_by_its_number_among_all_processes():
    schedule = build("moe-pair", p=1, m=2)

    def rank(r, g):
        stages = dict(enumerate(blocks(4)))
        stages[1] = Exchanging(g.group)
        if r == 1:
            stages[2] = _Broken()
        own = Gloo(f"own{r}", g.store, 0, 1)
        pipe = Pipeline(schedule, stages, mean_square, group=own, data_parallel=g.group)
        pipe.step(*batch(4))

    start = time.monotonic()
    for error in on_ranks(2, rank, raises=False):
        assert (error.rank, error.action) == (1, "2F0")
        assert str(error).startswith("rank 1 failed in 2F0: ValueError: a bad day")
    assert time.monotonic() - start < LONG / 2  # not when the messages time out
