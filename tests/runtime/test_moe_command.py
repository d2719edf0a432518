"""`hocket run moe-pair` as a user calls it."""

from __future__ import annotations

import json

import pytest

from hocket.cli import main

pytestmark = pytest.mark.runtime

BROKEN = """
from hocket.demo import moe
from hocket.demo.moe import batch, loss

def build(stage, n_stages, *, group=None):
    module = moe.build(stage, n_stages, group=group)
    if stage == 5 and group.rank() == 1:
        module.wire.exchange = None
    return module
"""


def _run(capsys, *words):
    assert main(["run", "moe-pair", "--steps", "2", "--json", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_moe_pair_runs_two_replicas_of_the_moe_demo_with_both_queues_in_the_trace(
    tmp_path, capsys
):  # fmt: skip
    trace = tmp_path / "out.json"
    words = ["-p", "2", "-m", "3", "--verify", "--dropout", "0.1", "--trace", str(trace)]
    found = _run(capsys, *words)
    assert (found["model"], found["replicas"]) == ("hocket.demo.moe:build", 2)
    assert (found["queues"], found["dispatch"]) == (4, "queues")
    assert found["predicted"] > 0 and found["measured"] > 0 and len(found["ranks"]) == 2
    text = trace.read_text()
    assert "measured" in text and "comm" in text


def test_moe_pair_side_by_side_loses_what_the_serial_order_loses_on_one_thread(capsys):
    words = ["-p", "1", "-m", "3", "--float64", "-o", "layers=2"]
    overlapped = _run(capsys, *words, "-o", "order=ring")
    serial = _run(capsys, *words, "-o", "order=serial", "--dispatch", "receive")
    assert (overlapped["dispatch"], serial["dispatch"]) == ("queues", "receive")
    assert overlapped["losses"] == pytest.approx(serial["losses"], rel=1e-12)
    assert overlapped["losses"][0] != overlapped["losses"][1]


def test_profile_of_moe_pair_names_its_file_with_o(tmp_path, capsys):
    file = tmp_path / "costs.toml"
    words = ["moe-pair", "-p", "1", "-m", "2"]
    assert main(["profile", *words, "--steps", "2", "-o", "layers=1", "-o", str(file)]) == 0
    assert f"written: {file}; use it with --costs {file}" in capsys.readouterr().out
    assert main(["simulate", *words, "--costs", str(file)]) == 0


def test_a_failure_in_one_replica_is_told_once_with_its_number(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_experts.py").write_text(BROKEN)
    words = ["-p", "2", "-m", "2", "--nproc", "4", "--model", "broken_experts:build"]
    assert main(["run", "moe-pair", "--steps", "2", *words]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "hocket: rank 3 failed in 5F0: TypeError: 'NoneType' object is not callable"
    assert sum("failed" in line for line in lines) == 1
