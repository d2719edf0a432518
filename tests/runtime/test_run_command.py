"""`hocket run` and `hocket profile` as a user calls them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

import hocket
from hocket.cli import main
from hocket.train.settings import DEMO, SLEEP
from hocket.train.work import costs_of_file

pytestmark = pytest.mark.runtime

SMALL = ["--layers", "2", "--width", "16", "--seq", "16"]

MODEL = """
from torch import nn
from hocket.demo.sleep import batch, loss

def build(stage, n_stages, *, scale=1):
    assert scale == 3
    return nn.Linear(8, 8)
"""


def test_run_trains_compares_and_writes_a_trace(tmp_path, capsys):
    trace = tmp_path / "out.json"
    words = ["run", "zb-h1", "-p", "2", "-m", "4", "--steps", "6", "--lr", "0.02", "--json"]
    assert main([*words, *SMALL, "--verify", "--trace", str(trace)]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert captured.err == ""
    assert len(found["losses"]) == len(found["seconds"]) == 6
    assert found["losses"][-1] < found["losses"][0]
    assert (found["schedule"], found["p"], found["m"], found["unit"]) == ("zb-h1", 2, 4, "ms")
    assert found["measured"] > 0 and found["predicted"] > 0
    for row in found["ranks"]:
        for side in ("predicted", "measured"):
            parts = row[side]
            total = parts["work"] + parts["waiting"] + parts["transfers"]
            assert total == pytest.approx(parts["end"], rel=1e-6)
    written = trace.read_text()
    assert "predicted" in written and "measured" in written


def test_run_prints_a_line_a_step_and_the_table(capsys):
    words = ["run", "dualpipe", "-p", "2", "-m", "4", "--steps", "2", "--dispatch", "gate"]
    assert main([*words, *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1/2  loss 5.")
    assert lines[1].startswith("step 2/2  loss 5.")
    head = next(line for line in lines if line.startswith("rank "))
    assert head.split() == ["rank", "ms", "work", "waiting", "transfers", "end"]
    assert sum("difference" in line for line in lines) == 2
    assert [line.partition(":")[0] for line in lines if line.startswith("rank ")][1:] == [
        "rank 0", "rank 1",
    ]  # fmt: skip


def test_run_takes_a_file_s_order_and_a_user_s_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.sched").write_text(hocket.dumps(hocket.build("1f1b", p=2, m=3)))
    (tmp_path / "own_model.py").write_text(MODEL)
    words = ["run", "mine.sched", "--steps", "2", "--model", "own_model:build", "--json"]
    assert main([*words, "-O", "scale=3"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "own_model:build"


def test_profile_writes_costs_that_simulate_reads(tmp_path, capsys):
    file = tmp_path / "costs.toml"
    words = ["profile", "zb-h1", "-p", "2", "-m", "4", "--steps", "4", "--output", str(file)]
    assert main([*words, *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "F of stage 0" in shown
    assert "0 - 1" in shown[shown.index("link ") :]
    costs = hocket.load_costs(str(file))
    assert costs.bandwidth > 0
    assert all(x > 0 for values in (costs.F, costs.I, costs.W, costs.B) for x in values)
    assert tuple(i + w for i, w in zip(costs.I, costs.W, strict=True)) != costs.B
    sizes = costs.bytes
    assert sizes.message == (16 * 2 * 16 * 4, 256 * 2 * 16 * 4)
    assert all(held > 0 for held in sizes.held)
    assert main(["simulate", "zb-h1", "-p", "2", "-m", "4", "--costs", str(file)]) == 0


def test_profile_of_the_order_as_it_is_halves_a_whole_backward(tmp_path, capsys):
    file = tmp_path / "costs.toml"
    words = ["profile", "1f1b", "-p", "2", "-m", "4", "--steps", "2", "--output", str(file)]
    assert main([*words, *SMALL, "--backward", "own", "--json"]) == 0
    costs = hocket.load_costs(str(file))
    assert costs.I == costs.W
    assert pytest.approx([2 * x for x in costs.I], rel=1e-4) == costs.B


def test_profile_of_fused_slots_tells_what_they_take_and_nothing_is_held_after_w(tmp_path, capsys):
    file = tmp_path / "costs.toml"
    words = ["profile", "dualpipev", "-p", "2", "-m", "6", "--steps", "2", "--output", str(file)]
    assert main([*words, *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fused"]["median"] >= 1
    assert found["left_after_W"] == [0, 0, 0, 0]
    assert [link["ranks"] for link in found["links"]] == [[0, 1]]
    assert hocket.load_costs(str(file)).FB == "sum"


def test_one_rank_has_no_links_and_its_file_says_so(tmp_path, capsys):
    file = tmp_path / "costs.toml"
    words = ["profile", "1f1b", "-p", "1", "-m", "2", "--steps", "2", "--output", str(file)]
    assert main([*words, *SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["links"] == []
    assert hocket.load_costs(str(file)).bandwidth is None
    assert "# one rank: no messages" in file.read_text()


def test_a_profile_with_a_stage_a_layer_is_what_plan_takes_as_layers(tmp_path, capsys):
    file = tmp_path / "layers.toml"
    words = ["profile", "interleaved", "-p", "2", "-v", "3", "-m", "2", "--steps", "2"]
    assert main([*words, *SMALL, "--output", str(file)]) == 0  # 2 parts a layer, and 2 more
    assert len(hocket.load_costs(str(file)).F) == 6
    words = ["plan", "-p", "2", "-m", "4", "--layers", str(file), "--no-search"]
    capsys.readouterr()
    assert main(words) == 0
    assert "layers of each stage: " in capsys.readouterr().out


def test_messages_of_stages_that_sleep_are_small_whatever_the_costs_say_of_a_model_s(tmp_path):
    file = tmp_path / "costs.toml"
    file.write_text('unit = "ms"\nF = [4, 5]\nbandwidth = 10\ncores = 2\n[bytes]\nmessage = 99\n')
    schedule = hocket.build("1f1b", p=2, m=2)
    settings = Namespace(costs=str(file), model=SLEEP, schedule=schedule)
    costs, _ = costs_of_file(settings, schedule)
    assert (costs.bandwidth, costs.cores) == (None, None)
    settings.model = DEMO
    assert costs_of_file(settings, schedule)[0].bandwidth == 10


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nproc", "3"], "--nproc is 3, but the schedule has 2 ranks; give a multiple of 2 or "
                           "leave it out"),
        (["--steps", "0"], "--steps is 0; it must be 1 or more"),
        (["--batch", "3"], "--batch is 3, but the schedule has 4 microbatches; give 4 or more"),
        (["--model", "nowhere:build"], "--model nowhere:build: there is no module 'nowhere'"),
        (["--model", "hocket.demo.gpt:made"],
         "--model hocket.demo.gpt:made: hocket.demo.gpt has no function 'made'"),
        (["-O", "hats=3"], "hocket.demo.gpt:build has no option 'hats'; its options: data, "
                           "dropout, dtype, heads, layers, parts, seed, seq, width"),
        (["-O", "hats"], "-O: expected key=value, found 'hats'"),
        (["-O", "dtype=float3"], "dtype 'float3' is not one of torch's, such as float64"),
        (["--width", "9"], "--width 9 must be a multiple of the 4 heads"),
        (["--costs", "/nowhere.toml"], "/nowhere.toml: cannot be read: No such file or directory"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_sentence_and_exit_2(words, text, capsys):
    assert main(["run", "1f1b", "-p", "2", "-m", "4", *words]) == 2
    assert capsys.readouterr().err == f"hocket: {text}\n"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "hocket", *words]


def test_ctrl_c_ends_all_with_130_and_no_traceback(tmp_path):
    run = subprocess.Popen(
        command("run", "1f1b", "-p", "2", "-m", "4", "--steps", "100000", *SMALL),
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert run.stdout is not None
    assert run.stdout.readline().startswith("step ")
    group = run.pid
    os.killpg(group, signal.SIGINT)  # what a terminal does
    _, err = run.communicate()
    assert run.returncode == 130
    assert err == "hocket: stopped; all ranks have ended\n"
    until = time.monotonic() + 240
    while in_group(group) and time.monotonic() < until:
        time.sleep(0.05)
    assert in_group(group) == []


def in_group(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
def test_run_uses_the_processes_that_another_launcher_started():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    contract = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            command("run", "1f1b", "-p", "2", "-m", "4", "--steps", "3", "--beside", "zb-h1",
                    "--json", *SMALL),
            env={**os.environ, **contract, "RANK": str(rank)},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    found = json.loads(outputs[0])
    assert len(found["losses"]) == 3
    assert found["beside"]["losses_differ"] < 1e-4
    assert outputs[1] == ""
