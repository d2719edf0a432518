"""Every example runs and shows what it says; the notebook holds what its cells print."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import notebook
import pytest

from hocket import build, check, loads, simulate
from hocket.costs import Costs

FOLDER = notebook.NOTEBOOK.parent
SCRIPTS = sorted(FOLDER.glob("*.py"))


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs a script in an empty folder, with these words after its name; returns what it prints."""

    def running(name, *words):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return running


def test_the_readme_of_the_examples_lists_all_of_them_and_each_is_short():
    table = re.findall(r"^\| \[(\S+)\]\((\S+)\)", (FOLDER / "README.md").read_text(), re.M)
    files = [path.name for path in SCRIPTS] + [notebook.NOTEBOOK.name]
    assert sorted(name for name, _ in table) == sorted(files)
    assert all(name == link for name, link in table)
    for path in SCRIPTS:
        assert len(path.read_text().splitlines()) < 40, path.name


def test_draw_prints_a_grid_and_saves_a_picture(run):
    assert run("draw.py").startswith("zb-h1  p=4 m=8  makespan 27  span 27")
    assert Path("zb-h1.svg").read_text().startswith("<svg")


def test_check_finds_the_deadlock(run):
    out = run("check.py")
    assert out.startswith("mine: 8 actions on 2 ranks, complete, no deadlock (tagged)\n")
    assert "first action of the cycle: 0B0 on rank 0, slot 1" in out


def test_simulate_compares_three_schedules(run):
    rows = [line.split() for line in run("simulate.py").splitlines()]
    assert [row[0] for row in rows] == ["gpipe", "1f1b", "zb-h1"]
    assert float(rows[2][1]) < float(rows[1][1]) == float(rows[0][1])
    assert rows[0][-2:] == ["8.4", "GB"] and rows[1][-2:] == ["3.6", "GB"]


@pytest.mark.slow
def test_plan_saves_an_order_that_fits_and_is_faster(run):
    out = run("plan.py")
    schedule, costs = loads(Path("plan.sched").read_text()), Costs(F=10, I=12, W=7, latency=1)
    assert check(schedule).ok
    before, after = map(int, re.findall(r"takes (\d+)", out.splitlines()[0]))
    assert before == simulate(build("1f1b", p=4, m=8), costs).makespan > after


def test_trace_reads_its_own_and_those_of_other_runs(run):
    assert run("trace.py").startswith("zb-h1: measured 315.0 us\npredicted from the costs read "
                                      "back: 315.0 us\n")  # fmt: skip
    assert len(run("trace.py").splitlines()) == 6


@pytest.mark.runtime
def test_train_prints_a_falling_loss():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(FOLDER / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"^step \d+  loss (\S+)$", done.stdout, re.M)]
    assert len(losses) == 10 and losses[-1] < losses[0] / 2


def test_the_notebook_holds_what_its_cells_print():
    stored = notebook.read()
    assert notebook.with_outputs(stored) == stored, (
        "run python tests/examples/notebook.py to write the outputs anew"
    )
