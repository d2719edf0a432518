"""`hocket plan`: the files it writes can be used, and what it is given is used or refused."""

import json

import pytest

from hocket import build, load_costs, simulate, write_trace
from hocket.cli import main
from hocket.text import load

COSTS = "F = [10, 14]\nI = [10, 14]\nW = 8\nlatency = 2\n"
QUICK = ["--no-search", "--json"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "costs.toml").write_text(COSTS)
    return tmp_path


def _run(capsys, *words):
    status = main([str(w) for w in words])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_a_plan_of_several_stages_a_rank_is_simulated_with_the_costs_that_it_writes(here, capsys):
    words = ["-p", 2, "-m", 4, "--costs", "costs.toml", "-v", 2, "--shapes", "v", *QUICK]
    status, out, _ = _run(capsys, "plan", *words, "--output", "a.sched", "--stage-costs", "a.toml")
    assert status == 0
    schedule, costs = load("a.sched"), load_costs("a.toml")
    assert schedule.placement.n_stages == 4 and len(costs.F) == 4
    assert simulate(schedule, costs).makespan == json.loads(out)["makespan"]


@pytest.fixture
def trace(here):
    write_trace(simulate(build("1f1b", p=2, m=4), load_costs("costs.toml")), "run.json")
    return "run.json"


def test_a_plan_from_a_trace_keeps_the_limit_given_and_writes_its_files(trace, capsys):
    words = ["--from", trace, "--in-flight", 1, "--output", "b.sched", "--stage-costs", "b.toml"]
    status, out, _ = _run(capsys, "plan", *words, *QUICK)
    timeline = simulate(load("b.sched"), load_costs("b.toml"))
    assert status == 0 and timeline.makespan == json.loads(out)["planned"]
    assert max(rank.peak_in_flight for rank in timeline.ranks) == 1
    _, out, _ = _run(capsys, "plan", "--from", trace, "--in-flight", 1, "--no-search")
    assert "it would take " in out and "% longer; nothing in this placement" in out


def test_a_plan_from_a_trace_refuses_what_the_trace_says(trace, capsys):
    for words in (["-p", 2], ["-m", 4], ["--costs", "costs.toml"], ["--layers", "costs.toml"]):
        status, _, err = _run(capsys, "plan", "--from", trace, *words)
        assert (status, err) == (
            2,
            "hocket: --from takes sizes and costs from the run; leave out " + words[0] + "\n",
        )


def test_a_file_that_cannot_be_written_is_told_before_the_search(here, capsys):
    for word in ("--output", "--stage-costs"):
        status, _, err = _run(capsys, "plan", "-p", 64, "-m", 512, word, "/none/a.toml")
        assert (status, err) == (2, "hocket: /none/a.toml: cannot be written there\n")
