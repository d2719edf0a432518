"""One rank raises, dies, hangs or disagrees: all end, and all name the first cause."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time

import pytest
from runtime_ranks import LONG, SHORT, Block, batch, blocks, held, mean_square, on_ranks
from torch import nn

from hocket.errors import RunError
from hocket.runtime import Pipeline
from hocket.schedules import build

pytestmark = pytest.mark.runtime


class Fails(nn.Module):
    """Raises in the forward or the backward of one call."""

    def __init__(self, call: int, backward: bool = False) -> None:
        super().__init__()
        self.block, self.call, self.backward, self.calls = Block(0), call, backward, 0

    def forward(self, x):
        self.calls += 1
        now = self.calls - 1 == self.call
        if now and not self.backward:
            raise ValueError("bad row")
        out = self.block(x)
        if now:
            out.register_hook(self._raise)
        return out

    def _raise(self, grad):
        raise ValueError("bad row")


@pytest.mark.parametrize(("call", "backward", "action"), [(0, False, "1F0"), (2, True, "1B2")])
def test_all_ranks_name_the_rank_that_raised_and_its_action(call, backward, action) -> None:
    schedule = build("1f1b", p=3, m=4)

    def rank(r, g):
        module = Fails(call, backward) if r == 1 else Block(r)
        pipe = Pipeline(schedule, {r: module}, mean_square, group=g.group, timeout=LONG)
        with pytest.raises(RunError) as caught:
            pipe.step(*batch(8))
        with pytest.raises(RunError, match=r"^this pipeline has ended: rank 1 failed in"):
            pipe.step(*batch(8))
        return caught.value

    start = time.monotonic()
    for r, error in enumerate(on_ranks(3, rank, raises=False)):
        assert (error.rank, error.action) == (1, action)
        first, *rest = str(error).splitlines()
        assert first == f"rank 1 failed in {action}: ValueError: bad row"
        if r != 1:
            assert rest[0].startswith(f"  rank {r} was in ")
    assert time.monotonic() - start < LONG / 2  # at once, not when the messages time out


def test_missing_inputs_of_one_rank_end_all() -> None:
    schedule, modules = build("1f1b", p=2, m=2), blocks(2)

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, mean_square, group=g.group)
        pipe.step(None, batch(4)[1])

    for error in on_ranks(2, rank, raises=False):
        assert str(error).startswith(
            "rank 0 failed in the start of the step: rank 0 runs stage 0, so it needs inputs"
        )


def test_ranks_that_disagree_are_told_before_the_first_message() -> None:
    def rank(r, g):
        schedule = build("1f1b", p=2, m=4 if r == 0 else 8)
        Pipeline(schedule, {r: Block(r)}, mean_square, group=g.group)

    for error in on_ranks(2, rank, raises=False):
        assert isinstance(error, RunError)
        assert "the ranks disagree on m: 4 on rank 0, 8 on rank 1\n" in str(error)

    def other(r, g):
        schedule = build("1f1b" if r else "gpipe", p=3, m=4)
        Pipeline(schedule, {r: Block(r)}, mean_square, group=g.group)

    for error in on_ranks(3, other, raises=False):
        assert "disagree on order: gpipe" in str(error) and "on ranks 1, 2" in str(error)


def test_a_rank_with_the_wrong_stages_is_told_on_all_ranks() -> None:
    schedule = build("1f1b", p=2, m=4)

    def rank(r, g):
        Pipeline(schedule, {1: Block(1)}, mean_square, group=g.group)

    for error in on_ranks(2, rank, raises=False):
        assert str(error) == "rank 0: it holds the stages [0], but was given modules for [1]"


class Hangs(nn.Module):
    def __init__(self, release: threading.Event) -> None:
        super().__init__()
        self.block, self.release = Block(0), release

    def forward(self, x):
        self.release.wait(LONG)
        return self.block(x)


def test_a_rank_that_hangs_is_named_with_who_waits_for_whom() -> None:
    schedule = build("1f1b", p=3, m=4)
    release, told = threading.Event(), threading.Barrier(2, action=lambda: release.set())

    def rank(r, g):
        module = Hangs(release) if r == 0 else Block(r)
        pipe = Pipeline(schedule, {r: module}, mean_square, group=g.group, timeout=SHORT)
        try:
            pipe.step(*batch(8))
        except RunError as error:
            if r:
                told.wait(LONG)  # both have their error while rank 0 still hangs
            return error

    first, *others = on_ranks(3, rank, raises=False)
    for error in others:
        assert error.rank == 0 and error.action == "0F0"
        assert "rank 0 does not answer in 0F0" in str(error)
        assert "rank 0 has been in 0F0 for" in str(error)
    assert first.rank == 0


_KILLED = """
import json, os, signal, sys, tempfile
from datetime import timedelta
import torch
import torch.distributed as dist
from hocket.errors import RunError
from hocket.runtime import Pipeline
from hocket.schedules import build

torch.set_num_threads(1)
LONG = float(sys.argv[1])
schedule = build("1f1b", p=3, m=4)


def say(words):
    os.write(1, (json.dumps(words) + chr(10)).encode())


class Gloo(dist.ProcessGroupGloo):
    store = None


class Stage(torch.nn.Linear):
    def forward(self, x):
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


for victim in (0, 1):
    folder = tempfile.mkdtemp()
    pids = []
    for r in range(3):
        pid = os.fork()
        if pid == 0:
            dies = r == victim
            store = dist.FileStore(folder + "/store", 3)
            group = Gloo(store, r, 3, timedelta(seconds=LONG))
            group.store = store
            stages = {r: Stage(3, 3)}
            pipe = Pipeline(
                schedule, stages, lambda o, t: o.sum(), group=group, timeout=LONG
            )
            try:
                pipe.step(torch.ones(8, 3), torch.ones(8))
            except RunError as error:
                say([victim, r, error.rank, str(error)])
            os._exit(1)
        pids.append(pid)
    status = [os.waitpid(pid, 0)[1] for pid in pids]
    say([victim, victim, status[victim], ""])
"""


def test_a_killed_rank_is_named_by_all_others() -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(LONG)], capture_output=True, text=True, check=True
    )
    assert time.monotonic() - start < LONG / 2  # not when the messages time out
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 6
    for victim, r, rank, text in lines:
        if r == victim:
            assert rank == signal.SIGKILL
            continue
        assert rank == victim and text.startswith(f"rank {victim} is gone (killed?): rank")
