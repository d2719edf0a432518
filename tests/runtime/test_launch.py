"""The local launcher: results, failures, ends. Rank functions run in processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hocket.errors import RunError, UsageError
from hocket.train import launch as module
from hocket.train.launch import launch

pytestmark = pytest.mark.runtime

LONG = 200.0  # seconds that a message may take; what must end at once ends long before


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def all_gone(pids: list[int], seconds: float = LONG / 4) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if all(map(is_gone, pids)):
            return True
        time.sleep(0.05)
    return False


# --- what ranks do ---------------------------------------------------------------------------


def add_ranks(tell, factor):
    import torch
    from torch import distributed

    total = torch.ones(1) * distributed.get_rank()
    distributed.all_reduce(total)
    tell(os.getpid())
    return distributed.get_rank() * factor + float(total)


def sleepers(tell, bad, how, after):
    """Steps of sleeping stages; in the forward number `after` of the bad rank something happens."""
    import torch
    from torch import nn

    import hocket
    from hocket.demo import sleep
    from hocket.runtime import Pipeline

    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.left = sleep.build(0, 1, f=0.005, i=0.005, w=0.005), after

        def forward(self, x):
            self.left -= 1
            if self.left == 0 and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.left == 0 and how == "raise":
                raise ValueError("the stage is broken")
            if self.left == 0 and how == "leave":
                os._exit(3)
            return self.inner(x)

    rank = torch.distributed.get_rank()
    tell(os.getpid())
    schedule = hocket.build("1f1b", p=4, m=8)
    stage = Bad() if rank == bad else sleep.build(rank, 4, f=0.005, i=0.005, w=0.005)
    pipeline = Pipeline(schedule, {rank: stage}, sleep.loss, timeout=LONG)
    for step in range(4):
        pipeline.step(*sleep.batch(step, 8))


def one_never_ends():
    from torch import distributed

    distributed.barrier()  # a rank that ends before all are connected fails the others' start
    if distributed.get_rank() == 0:
        time.sleep(100)
    raise ValueError("no")


def wrong_use():
    raise UsageError("that cannot be")


# --- the tests -------------------------------------------------------------------------------


def test_results_come_by_rank_and_what_ranks_tell_is_heard():
    heard = []
    assert launch(add_ranks, 3, (10,), LONG, listen=heard.append) == [3.0, 13.0, 23.0]
    assert len(set(heard)) == 3
    assert all_gone(heard)


@pytest.mark.parametrize(("bad", "after"), [(0, 9), (2, 12), (3, 20)])
def test_a_rank_killed_in_mid_step_ends_all_and_is_named(bad, after):
    check_killed(bad, after)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("run", range(20))
def test_twenty_kills_leave_no_orphan(run):
    check_killed(bad=run % 4, after=3 + run)


def check_killed(bad: int, after: int) -> None:
    pids = []
    start = time.monotonic()
    with pytest.raises(RunError) as caught:
        launch(sleepers, 4, (bad, "kill", after), LONG, listen=pids.append)
    assert time.monotonic() - start < LONG / 2  # not when the messages time out
    assert caught.value.rank == bad
    first = str(caught.value).splitlines()[0]
    how = rf"rank {bad} was killed by SIGKILL( before its {bad}SEND_[FB]\d was done)?; perhaps it "
    assert re.fullmatch(how + "ran out of memory", first), first
    assert len(pids) == 4
    assert all_gone(pids)


def test_a_rank_that_raises_is_named_with_action_error_and_place():
    pids = []
    with pytest.raises(RunError) as caught:
        launch(sleepers, 4, (1, "raise", 11), LONG, listen=pids.append)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 failed in 1F2: ValueError: the stage is broken"
    assert (caught.value.rank, caught.value.action) == (1, "1F2")
    assert any(line.startswith("  rank 0 was in 0") for line in lines)
    assert any("test_launch.py" in line for line in lines)
    assert all_gone(pids)


def test_a_rank_that_leaves_without_a_word_is_named():
    with pytest.raises(
        RunError,
        match=r"^rank 1 ended( before its 1SEND_\S+ was done)? with exit code 3 and no message",
    ):
        launch(sleepers, 4, (1, "leave", 11), LONG, listen=lambda _: None)


def test_a_rank_that_does_not_end_by_itself_is_killed(monkeypatch):
    monkeypatch.setattr(module, "GRACE", 1.0)
    with pytest.raises(RunError) as caught:
        launch(one_never_ends, 2, (), LONG)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 failed: ValueError: no"
    assert lines[1] == "  rank 0 did not end by itself in 1 s and was killed"


def test_wrong_use_found_on_a_rank_stays_wrong_use():
    with pytest.raises(UsageError, match=r"^that cannot be$"):
        launch(wrong_use, 2, (), LONG)


def test_ranks_end_when_the_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import time, os\n"
        "from pathlib import Path\n"
        "from hocket.train.launch import launch\n"
        "def work():\n"
        "    Path(f'{os.getpid()}.pid').touch()\n"
        "    time.sleep(100)\n"
        "if __name__ == '__main__':\n"
        "    launch(work, 2)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path)
    until = time.monotonic() + LONG
    while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    assert all_gone(pids)
