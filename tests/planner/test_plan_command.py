"""`hocket plan`: the files it writes can be used, and what it is given is used or refused."""

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from hocket import build, load_costs, simulate, write_trace
from hocket.cli import main, parser
from hocket.cli.plan import VERB, request_of
from hocket.planner import Request, planning, sensitivity, variants
from hocket.planner.report import FUSED
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
    told = json.loads(out)
    assert status == 0 and timeline.makespan == told["planned"] == told["plan"]["makespan"]
    assert {"1f1b", "gpipe"} <= {row["name"] for row in told["plan"]["competitors"]}
    assert max(rank.peak_in_flight for rank in timeline.ranks) == 1
    _, out, _ = _run(capsys, "plan", "--from", trace, "--in-flight", 1, "--no-search")
    assert "it would take " in out and "% longer; nothing in this placement" in out
    assert "why not" in out and "no order of this placement is below" in out


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


# --- what the command line can say -----------------------------------------------------------

EVERY = [
    "-p", "2,4", "-m", "6", "-v", "2", "--memory", "9,8", "--in-flight",
    "3", "--shapes", "v", "--copies", "2", "--slices", "2", "--backward", "split", "--recompute",
    "full", "--buffers", "in-flight", "--layers", "costs.toml", "--objective", "span",
    "--margin", "0.1", "--time", "5", "--patience", "2", "--rounds", "3", "--seed", "4",
    "--threads", "1", "--no-named", "--solver", "--solver-time", "7",
]  # fmt: skip


def _parsed(words):
    return VERB.read(parser().read(["plan", *words]))


def test_every_field_of_a_request_can_be_said_on_the_command_line(here):
    asked, plain = request_of(_parsed(EVERY)), Request(p=1, m=1)
    same = [f.name for f in fields(Request) if getattr(asked, f.name) == getattr(plain, f.name)]
    assert same == ["search"]
    assert not request_of(_parsed(["-p", "2", "-m", "4", "--no-search"])).search


def test_every_option_of_plan_stands_in_its_page():
    own = argparse.ArgumentParser()
    VERB.add_to(own)
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    options = [o for a in own._actions for o in a.option_strings if o.startswith("--")]
    assert [o for o in options if o not in ("--help", "--json") and f"`{o}" not in page] == []


def test_buffers_for_each_microbatch_make_what_fitted_not_fit(here, capsys):
    (here / "bytes.toml").write_text("per = 'rank'\n[bytes]\nactivation = 4\nmessage = 1\n")
    words = ["-p", 2, "-m", 8, "--costs", "bytes.toml", "--memory", 8, "--shapes", "linear"]
    words += ["--no-named", *QUICK]
    times = {}
    for buffers in ("none", "in-flight", "each"):
        status, out, err = _run(capsys, "plan", *words, "--buffers", buffers)
        times[buffers] = json.loads(out)["value"] if status == 0 else err
    assert times["none"] < times["in-flight"]  # of two microbatches in flight one is left
    assert times["each"].startswith("hocket: nothing fits p=2 m=8 under the limits\n  nearest: ")


def test_slots_of_two_that_a_lane_makes_cheaper_are_told_not_to_be_searched_for(here, capsys):
    (here / "fused.toml").write_text("p2p_overhead = { recv = 1, send = 1 }\n")
    words = ["-p", 2, "-m", 4, "--shapes", "linear", "--no-search", "--no-named"]
    assert FUSED in _run(capsys, "plan", *words, "--costs", "fused.toml")[1]
    assert "cheaper here" not in _run(capsys, "plan", *words)[1]


def test_jitter_with_shared_cores_is_refused_before_the_search(here, capsys):
    (here / "shared.toml").write_text("cores = 2\n")
    words = ["-p", 4, "-m", 8, "--costs", "shared.toml", "--jitter", "0.1"]
    status, _, error = _run(capsys, "plan", *words)
    assert status == 2
    assert "leave out cores in the costs" in error


def test_a_plan_for_shared_cores_says_so(here, capsys):
    (here / "shared.toml").write_text("cores = 2\n")
    words = ["-p", 4, "-m", 8, "--costs", "shared.toml", "--no-search", "--no-named"]
    _, out, _ = _run(capsys, "plan", *words, "-v", 1)
    assert "4 ranks share 2 cores" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory", "inf"], "--memory: expected a number or a comma-separated list, found 'inf'"),
        (["--in-flight", "1e400"],
         "--in-flight: expected a number or a comma-separated list, found '1e400'"),
        (["--seed", "-5"], "seed is -5; it must be a whole number, 0 or more"),
        (["--copies", 0], "copies is 0; it must be a whole number, 1 or more"),
        (["--slices", -2], "slices is -2; it must be a whole number, 1 or more"),
        (["--rounds", 0], "rounds is 0; it must be a whole number, 1 or more"),
        (["-v", "4-2"], "-v: 4-2 has no numbers; give the smaller one first"),
        (["--memory", 1], "memory is a limit in bytes, but the costs have none; give [bytes] in "
                          "them, or a limit in microbatches (in_flight)"),
        (["--layers", "costs.toml", "--costs", "costs.toml"],
         "--costs and --layers both give the costs; leave one of them out"),
        (["--jitter", -1], "--jitter is -1; it must be above 0, such as 0.05 for 5 %"),
        (["--jitter", "inf"], "--jitter: expected a number, found 'inf'"),
        (["--jitter", 0.1, "--objective", "span"],
         "--jitter compares makespans; leave out --objective span"),
        (["--output", "a.svg"], "--output a.svg: it is written as .sched; name it so; `hocket show "
                                "FILE.sched -o FILE.svg` draws it"),
        (["--stage-costs", "a.json"], "--stage-costs a.json: it is written as .toml; name it so"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_told_in_one_sentence(here, capsys, words, said):
    quick = () if "--rounds" in words else ("--no-search",)
    status, _, error = _run(capsys, "plan", "-p", 2, "-m", 4, *quick, *words)
    assert (status, error) == (2, f"hocket: {said}\n")
    assert not (here / "a.svg").exists()


def test_an_order_that_is_best_under_jitter_is_named_where_it_is_written(here, capsys, monkeypatch):
    other, jittered = build("1f1b", p=2, m=4), sensitivity.jittered

    def swapped(found, spread):
        return replace(jittered(found, spread), best=other)

    monkeypatch.setattr(sensitivity, "jittered", swapped)
    words = ["-p", 2, "-m", 4, "--no-search", "--jitter", 0.1, "--output", "a.sched"]
    _, out, _ = _run(capsys, "plan", *words)
    assert "written: a.sched (1f1b, the best when times vary)" in out
    assert load("a.sched") == other


def test_an_interrupt_after_the_search_leaves_the_plan(here, capsys, monkeypatch):
    def stopped(found):
        raise KeyboardInterrupt

    monkeypatch.setattr(sensitivity, "sensitivity", stopped)
    words = ["-p", 2, "-m", 4, *QUICK, "--sensitivity", "--output", "a.sched"]
    status, out, error = _run(capsys, "plan", *words)
    assert status == 0 and "sensitivity" not in json.loads(out)
    assert "without all that was asked" in error
    assert load("a.sched").p == 2


def test_an_interrupt_of_the_search_is_not_followed_by_plans_of_other_settings(
    here, capsys, monkeypatch
):
    ended = planning.plan
    monkeypatch.setattr(
        planning, "plan", lambda *args, **more: replace(ended(*args, **more), interrupted=True)
    )
    monkeypatch.setattr(sensitivity, "sensitivity", lambda found: pytest.fail("it goes on"))
    status, out, error = _run(capsys, "plan", "-p", 2, "-m", 4, *QUICK, "--sensitivity")
    assert status == 0 and json.loads(out)["interrupted"]
    assert "without all that was asked" in error


def test_several_numbers_of_ranks_are_of_one_model(here, capsys):
    """Costs are of the first p: at twice the ranks a rank has half of it."""
    words = ["-m", 8, "--shapes", "linear", "-v", 1, "--no-named", *QUICK]
    _, out, _ = _run(capsys, "plan", "-p", "4,8", *words)
    assert json.loads(out)["p"] == 8
    (here / "half.toml").write_text("F = 0.5\nI = 0.5\nW = 0.5\n")
    _, alone, _ = _run(capsys, "plan", "-p", 8, *words, "--costs", "half.toml")
    assert json.loads(alone)["value"] == json.loads(out)["value"]
    found = []
    for ranks in ("2,4", "4,2"):
        _, out, _ = _run(capsys, "plan", "-p", ranks, *words, "--costs", "costs.toml")
        found.append(json.loads(out)["value"])
    assert found[0] == found[1]  # lists of two are those of the model's halves


def test_a_schedule_with_another_placement_is_not_even_built(here, capsys, monkeypatch):
    built = []
    make = variants.build
    monkeypatch.setattr(variants, "build", lambda name, **x: built.append((name, x["p"])) or
                        make(name, **x))  # fmt: skip
    words = ["-p", 6, "-m", 6, "--shapes", "linear", "-v", 1, *QUICK]
    _, out, _ = _run(capsys, "plan", *words)
    assert ("v-auto", 6) not in built and ("1f1b", 6) in built
    why = {row["name"]: row["why"] for row in json.loads(out)["competitors"]}
    assert why["v-auto"] == "its placement is not among those asked for"
    assert why["dualpipe"] == "needs 2 copies of the weights; allowed: 1"
