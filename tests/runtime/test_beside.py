"""Several orders in one run, step by step in turn: `hocket run ... --beside`."""

from __future__ import annotations

import json
import re
from argparse import Namespace

import pytest

import hocket
from hocket.cli import main
from hocket.cli.run import sharing_text
from hocket.costs import Costs
from hocket.demo import sleep
from hocket.errors import CostError, UsageError
from hocket.train import work
from hocket.train.ab_compare import Arm, beside, beside_text, turns
from hocket.train.report import one_by_one
from hocket.train.settings import SLEEP

pytestmark = pytest.mark.runtime

SMALL = ["--layers", "2", "--width", "16", "--seq", "16"]
NAPS = 'unit = "us"\nF = [400, 600]\nI = 500\nW = [300, 200]\n'

UNSEEDED = """
from torch import nn
from hocket.demo.sleep import batch, loss

def build(stage, n_stages):
    return nn.Linear(8, 8)
"""


def ran(capsys, *words):
    """What `hocket run --json` says."""
    assert main(["run", *words, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


# --- whose turn it is ------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_order_has_a_turn_in_each_step_and_begins_as_often_as_any_other(n):
    steps = [turns(step, n) for step in range(2 * n)]
    assert all(sorted(step) == list(range(n)) for step in steps)
    assert sorted(step[0] for step in steps) == sorted([*range(n)] * 2)


def test_steps_of_two_orders_alternate_and_so_does_who_begins():
    from hocket.train.training import run

    calls, told = [], []

    def trainer(name, loss):
        def step(index):
            calls.append(f"{name}{index}")
            return loss + index, 0.25, 0.0

        return Namespace(settings=Namespace(steps=4), step=step)

    runs = run([trainer("a", 1.0), trainer("b", 2.0)], lambda *news: told.append(news), kept=0)
    assert calls == ["a0", "b0", "b1", "a1", "a2", "b2", "b3", "a3"]
    assert [one.losses for one in runs] == [[1, 2, 3, 4], [2, 3, 4, 5]]
    assert [one.inside for one in runs] == [[0.25] * 4] * 2
    assert [news[:2] for news in told] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [news[2:] for news in told] == list(
        zip(*(one.seconds for one in runs), strict=True)
    )  # the seconds of both


# --- the table -------------------------------------------------------------------------------

ARMS = [
    Arm("1f1b", [0.2, 0.4, 0.3], [4.0, 2.0], 250.0),
    Arm("best.sched", [0.1, 0.3, 0.3], [4.0, 2.00001], 240.0),
    Arm("zb-v", [0.2, 0.2, 0.2], [4.0, 2.0], None, "c.toml is for 4 stages, and it has 6"),
]


def test_ratios_are_those_of_the_same_step():
    data = beside(ARMS)
    assert (data["unit"], data["steps"]) == ("ms", 3)
    assert data["losses_differ"] == pytest.approx(5e-6)
    first, second, third = data["orders"]
    assert first["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert second["median"] == pytest.approx(300.0)
    assert second["ratio"]["median"] == pytest.approx(0.75)  # of 0.5, 0.75 and 1
    assert second["difference"] == pytest.approx(0.25)
    assert (third["predicted"], third["difference"]) == (None, None)


def test_the_table_of_the_orders():
    assert beside_text(beside(ARMS)) == (
        "in turn, 3 steps of each, in ms; to 1f1b: the ratio step by step\n\n"
        "schedule       ms  middle half     predicted  difference  to 1f1b  middle half\n"
        "1f1b        300.0  250.0 to 350.0      250.0  +20.0%        1.000  1.000 to 1.000\n"
        "best.sched  300.0  200.0 to 300.0      240.0  +25.0%        0.750  0.625 to 0.875\n"
        "zb-v        200.0  200.0 to 200.0          -  -             0.667  0.583 to 0.833\n\n"
        "the losses are the same (largest relative difference 5e-06)\n"
        "zb-v: not predicted: c.toml is for 4 stages, and it has 6"
    )


def test_losses_that_differ_are_told():
    arms = [ARMS[0], ARMS[0]._replace(losses=[4.0, 2.5])]
    assert beside_text(beside(arms)).splitlines()[-1] == (
        "the losses differ, by up to 0.2 of them: the orders do not train the same; build must "
        "make the same weights for any number of stages, and batch the same for a step"
    )


# --- runs ------------------------------------------------------------------------------------


def test_orders_train_the_same_and_the_trace_holds_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.sched").write_text(hocket.dumps(hocket.build("gpipe", p=2, m=4)))
    words = ["1f1b", "-p", "2", "-m", "4", "--steps", "5", "--float64", "--dropout", "0.1", *SMALL]
    others = ["--beside", "mine.sched", "--beside", "interleaved:v=2", "--beside", "1f1b"]
    found = ran(capsys, *words, *others, "--trace", "out.json")
    data = found["beside"]
    names = [row["schedule"] for row in data["orders"]]
    assert names == ["1f1b", "mine.sched", "interleaved:v=2", "1f1b (2)"]
    assert data["steps"] == 3  # two to warm up
    assert data["losses_differ"] < 1e-9
    assert (found["schedule"], len(found["losses"]), len(found["seconds"])) == ("1f1b", 5, 5)
    for row in data["orders"]:
        assert len(row["times"]) == 3
        assert len(row["losses"]) == 5
        assert row["low"] <= row["median"] <= row["high"]
        assert row["predicted"] > 0
        assert row["why"] == ""
    assert data["orders"][0]["predicted"] == found["predicted"]
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    shown = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    sides = ("predicted", "measured")
    assert shown == {*sides, *(f"{name} {side}" for name in names[1:] for side in sides)}
    assert main(["import", "out.json"]) == 0
    assert "several timelines measured is taken" in capsys.readouterr().out  # that of the first


def test_replicas_train_side_by_side_too(capsys):
    words = ["1f1b", "-p", "2", "-m", "2", "--nproc", "4", "--steps", "2", *SMALL]
    assert ran(capsys, *words, "--beside", "zb-h1")["beside"]["losses_differ"] < 1e-4


def test_weights_drawn_without_the_seed_are_the_same_for_every_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unseeded.py").write_text(UNSEEDED)
    words = ["1f1b", "-p", "2", "-m", "4", "--steps", "2", "--model", "unseeded:build"]
    data = ran(capsys, *words, "--beside", "zb-h1", "--beside", "interleaved:v=2")["beside"]
    first, same, deeper = (row["losses"] for row in data["orders"])
    assert same == pytest.approx(first, rel=1e-6)
    assert data["losses_differ"] > 1e-3  # a model of four layers
    assert deeper != pytest.approx(first, rel=1e-3)


def test_costs_of_the_first_order_s_stages_predict_the_others_where_cuts_nest(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "naps.toml").write_text(NAPS)
    (tmp_path / "costs.toml").write_text('unit = "ms"\nF = [2, 2, 4, 4]\nI = 2\nW = 1\n')
    words = ["interleaved", "-v", "2", "-p", "2", "-m", "4", "--steps", "2"]
    words += ["--model", SLEEP, "-O", "costs=naps.toml", "--costs", "costs.toml"]
    others = ["--beside", "1f1b", "--beside", "interleaved:v=3", "--beside", "interleaved"]
    rows = ran(capsys, *words, *others)["beside"]["orders"]
    whole = Costs(F=(4, 8), I=4, W=2, unit="ms")
    makespan = hocket.simulate(one_by_one(hocket.build("1f1b", p=2, m=4)), whole).makespan
    assert rows[1]["predicted"] == makespan
    assert rows[2]["predicted"] is None
    assert rows[2]["why"] == (
        "costs.toml: costs of 4 stages do not fit 6: neither divides the other"
    )
    assert rows[3]["predicted"] == rows[0]["predicted"]  # -v is for it too


def test_a_line_a_step_has_the_seconds_of_each_order_and_the_table_follows(capsys):
    words = ["run", "1f1b", "-p", "2", "-m", "4", "--steps", "2", "--beside", "zb-h1", *SMALL]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step 1/2  loss 5\.\d+(  \d+\.\d+ s){2}", lines[0])
    (head,) = (i for i, line in enumerate(lines) if line.startswith("schedule "))
    assert [line.split()[0] for line in lines[head + 1 : head + 3]] == ["1f1b", "zb-h1"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["zbh1"], "there is no schedule 'zbh1'; did you mean zb-h1 or zb-h2?"),
        (["no.sched"], "no.sched: cannot be read: No such file or directory"),
        (["zb-h1:m=6"], "--beside zb-h1:m=6: the number of microbatches (-m) is 6, but 1f1b has "
                        "4; it must be the same"),
        (["1f1b", "--beside", "three.sched"], "--beside three.sched: the number of ranks (-p) is "
                                              "3, but 1f1b has 2; it must be the same"),
        (["seq1f1b:slices=2"], "--beside seq1f1b:slices=2: the number of slices of a sequence is "
                               "2, but 1f1b has 1; it must be the same"),
        (["moe-pair"], "--beside moe-pair: one of 1f1b and moe-pair cuts stages into phases and "
                       "the other does not, so no model fits both"),
        (["interleaved:v=2", "--model", SLEEP],
         "--beside interleaved:v=2: it has 4 stages, but 1f1b has 2, and each sleeps as long; "
         "give -O costs=FILE, which is divided among the stages"),
    ],
)  # fmt: skip
def test_what_cannot_stand_beside_is_one_sentence_and_exit_2(
    words, text, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "three.sched").write_text(hocket.dumps(hocket.build("1f1b", p=3, m=4)))
    assert main(["run", "1f1b", "-p", "2", "-m", "4", "--beside", *words]) == 2
    assert capsys.readouterr().err == f"hocket: {text}\n"


# --- stages that sleep by a file --------------------------------------------------------------


def test_times_of_a_file_are_divided_among_the_stages(tmp_path):
    file = tmp_path / "naps.toml"
    file.write_text(NAPS)
    assert sleep.build(1, 2, costs=str(file)).i == pytest.approx(5e-4)
    stages = [sleep.build(s, 4, costs=str(file)) for s in range(4)]
    assert [stage.f for stage in stages] == pytest.approx([2e-4, 2e-4, 3e-4, 3e-4])
    assert [stage.i for stage in stages] == pytest.approx([2.5e-4] * 4)
    with pytest.raises(CostError, match="costs of 2 stages do not fit 3: neither divides"):
        sleep.build(0, 3, costs=str(file))


@pytest.mark.parametrize("text", ['unit = "ms"\nF = 3', "F = [1, 2]"])
def test_a_file_without_lists_or_unit_does_not_tell_how_long_to_sleep(text, tmp_path):
    file = tmp_path / "naps.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match="F, I or W must be a list, one value per stage, and unit"):
        sleep.build(0, 2, costs=str(file))


# --- ranks that share cores -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "environment", "shared"),
    [
        ({}, {}, 2),
        ({"nproc": 2}, {}, None),
        ({"device": "cuda"}, {}, None),
        ({"model": SLEEP}, {}, None),
        ({}, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 2),
        ({}, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, None),
        ({}, {"WORLD_SIZE": "4"}, None),
    ],
)
def test_ranks_share_the_cores_where_all_of_them_compute_on_one_machine(
    given, environment, shared, monkeypatch
):
    monkeypatch.setattr(work, "cores", lambda: 2)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = Namespace(nproc=4, device="cpu", model="m:build", replicas=1)
    vars(settings).update(given)
    assert work.shared_cores(settings) == shared
    settings.replicas = 2
    assert work.counted_cores(settings) is None


@pytest.mark.parametrize(
    ("counted", "told"),
    [
        (2, ", and the prediction counts on that."),
        (None, ": actions take longer while others run, and the prediction does not know that."),
        (3, ", but the prediction counts on the 3 that c.toml names."),
    ],
)
def test_it_is_told_whether_the_prediction_counts_on_shared_cores(counted, told):
    result = {"p": 4, "replicas": 1, "shared_cores": 2, "predicted_cores": counted}
    assert sharing_text(result | {"costs": "c.toml"}) == (
        f"4 ranks share 2 cores here{told} For the schedule alone: --model {SLEEP}"
    )
