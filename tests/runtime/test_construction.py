"""What goes wrong before the first step: ranks that do not come, groups that ended before."""

from __future__ import annotations

import re
import socket
import sys
import threading
import types

import pytest
import torch
from runtime_ranks import LONG, SHORT, Block, batch, mean_square, on_ranks
from torch import nn

from hocket.errors import RunError
from hocket.runtime import Pipeline
from hocket.runtime.failure import compiling
from hocket.schedules import build
from hocket.train.launch import join_group

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize("late", [True, False])
def test_a_rank_that_does_not_come_to_build_the_pipeline_is_named(late):
    schedule, gave_up = build("1f1b", p=3, m=4), threading.Barrier(2 + late)

    def rank(r, g):
        if r == 1:
            return gave_up.wait(LONG) if late else None  # without its group, it is gone
        try:
            timeout = SHORT if late else LONG
            Pipeline(schedule, {r: Block(r)}, mean_square, group=g.group, timeout=timeout)
        finally:
            gave_up.wait(LONG)  # a rank that goes breaks the connections of the others

    first, _, third = on_ranks(3, rank, raises=False)
    how = "did not come in 4 s" if late else "died before"
    for r, error in ((0, first), (2, third)):
        assert isinstance(error, RunError) and error.rank == 1
        text = f"rank 1 {how}, when the pipeline was built"
        assert str(error) == f"{text}\n  rank {r} was waiting for it"


def test_a_second_pipeline_on_a_group_that_a_failure_ended_says_so():
    schedule = build("1f1b", p=2, m=2)

    class Bad(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    def rank(r, g):
        def pipe():
            module = Bad() if r else Block(0)
            return Pipeline(schedule, {r: module}, mean_square, group=g.group)

        with pytest.raises(RunError, match="rank 1 failed in 1F0: ValueError: no"):
            pipe().step(*batch(4))
        pipe()

    for error in on_ranks(2, rank, raises=False):
        assert isinstance(error, RunError)
        assert re.match(
            r"the process group has ended with an earlier pipeline on it; make a new one with "
            r"torch\.distributed\.new_group\. That pipeline ended so: rank 1 failed in 1F0",
            str(error),
        )


def test_a_taken_port_is_one_sentence(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(RunError) as caught:
            join_group(0, 2, "env://", 5.0, "cpu")
    assert str(caught.value).startswith(f"rank 0 cannot meet the others at 127.0.0.1:{port}: ")
    assert "\n" not in str(caught.value) and "in use" in str(caught.value)


def _as_in(path, call):
    """Calls from a file of this name."""
    module = types.ModuleType("module")
    exec(compile("def run(call):\n    return call()\n", path, "exec"), vars(module))
    return module.run(call)


def test_a_rank_that_compiles_is_told_from_one_that_hangs():
    assert not compiling()
    assert _as_in("/x/torch/_dynamo/convert_frame.py", compiling)
    assert not _as_in("/x/torch/_dynamo/eval_frame.py", compiling)
    files = [name for name in sys.modules if name.startswith("torch._dynamo")]
    assert not files or torch._dynamo.convert_frame.__file__.endswith("_dynamo/convert_frame.py")


def test_a_compilation_longer_than_the_timeout_is_named_as_one():
    schedule, release = build("1f1b", p=2, m=2), threading.Event()

    class Compiles(Block):
        def forward(self, x):
            _as_in("/x/torch/_dynamo/convert_frame.py", lambda: release.wait(LONG))
            return super().forward(x)

    def rank(r, g):
        module = Block(1) if r else Compiles(0)
        pipe = Pipeline(schedule, {r: module}, mean_square, group=g.group, timeout=SHORT)
        try:
            pipe.step(*batch(4))
        finally:
            release.set()

    _, error = on_ranks(2, rank, raises=False)
    first, *rest = str(error).splitlines()
    assert first == "rank 0 takes longer to compile 0F0 than a message may (give timeout= more):"
    assert re.match(r"  rank 0 has been compiling in 0F0 for \d+ s", rest[1])
