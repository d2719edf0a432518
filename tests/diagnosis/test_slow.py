"""Why steps are slow: the right culprit by name, and none where nothing is wrong."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import hocket
from hocket.cli import main
from hocket.costs import Costs
from hocket.diagnosis.effects import Cause
from hocket.diagnosis.slow import diagnose_steps, findings
from hocket.diagnosis.steps import steps_of
from hocket.errors import UsageError
from hocket.interop.traces.load import load_foreign
from hocket.interop.traces.rows import write_rows

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/diagnose"))

from steps import run_of

EIGHT = ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "dualpipe", "dualpipev", "chimera")
ALWAYS = tuple(range(8))


def effects_of(timelines, expected=None):
    return [one.effect for one in findings(steps_of(timelines), expected)]


@pytest.mark.parametrize("name", EIGHT)
def test_replayed_steps_take_the_time_that_was_measured(name):
    run = run_of(hocket.build(name, p=4, m=8), np.random.default_rng(1), pause=(2, (1,), 3000))
    steps = steps_of(run)
    assert steps.replayed() == pytest.approx([float(t.makespan) for t in run])


def test_fifty_clean_runs_of_eight_schedules_raise_no_alarm():
    rng, alarms = np.random.default_rng(2), []
    for k in range(50):
        schedule = hocket.build(EIGHT[k % 8], p=4, m=8)
        alarms += effects_of(run_of(schedule, rng, jitter=rng.choice([0.01, 0.02, 0.04])))
    assert alarms == []


def test_a_rank_10_percent_slower_is_named_with_its_steps_in_95_of_100_runs():
    rng, right = np.random.default_rng(3), 0
    for k in range(100):
        culprit, some = int(rng.integers(4)), rng.choice(8, int(rng.integers(1, 4)), replace=False)
        steps = ALWAYS if k % 2 else tuple(sorted(some.tolist()))
        cause = Cause.RANK if k % 2 else Cause.NOW_AND_THEN
        schedule = hocket.build(EIGHT[k // 2 % 8], p=4, m=8)
        jitter = rng.choice([0.01, 0.02, 0.04])
        seen = effects_of(run_of(schedule, rng, jitter=jitter, rank=(culprit, steps, 1.1)))
        right += [(x.cause, x.ranks, x.steps) for x in seen] == [(cause, (culprit,), steps)]
    assert right >= 95


@pytest.mark.parametrize(
    ("fault", "cause", "ranks", "steps", "factor", "detail"),
    [
        ({"link": ((1, 2), 5.0)}, Cause.LINK, (1, 2), ALWAYS, 4.0, ()),
        ({"mb": (3, (4,), 1.5)}, Cause.MICROBATCH, (), (4,), 1.5, (3,)),
        ({"pause": (2, (1, 6), 3000.0)}, Cause.PAUSE, (2,), (1, 6), 3000, (2,)),
        (
            {"costs": Costs(F=(1e3, 1.3e3, 1e3, 1.3e3), B=(2e3, 2.6e3, 2e3, 2.6e3))},
            Cause.STAGES, (1, 3), ALWAYS, 1.3, (1, 3),
        ),
    ],
)  # fmt: skip
def test_other_faults_are_named(fault, cause, ranks, steps, factor, detail):
    (seen,) = effects_of(run_of(hocket.build("1f1b", p=4, m=8), np.random.default_rng(4), **fault))
    assert (seen.cause, seen.ranks, seen.steps, seen.detail) == (cause, ranks, steps, detail)
    assert seen.factor == pytest.approx(factor, rel=0.15)


def test_costs_and_several_stages_tell_a_slow_rank_from_a_stage_with_more_work():
    rng = np.random.default_rng(5)
    heavy = Costs(F=(1e3, 1e3, 1.2e3, 1e3), B=(2e3, 2e3, 2.4e3, 2e3))
    one = hocket.build("1f1b", p=4, m=8)
    heavy_run, slow_run = run_of(one, rng, costs=heavy), run_of(one, rng, rank=(2, ALWAYS, 1.2))
    for run in (heavy_run, slow_run):
        (doubtful,) = findings(steps_of(run))
        assert (doubtful.effect.ranks, doubtful.effect.sure) == ((2,), False)
    assert diagnose_steps(heavy_run, heavy).findings == ()
    (sure,) = diagnose_steps(slow_run, Costs(F=1, B=2)).findings
    assert (sure.effect.cause, sure.effect.ranks, sure.effect.sure) == (Cause.RANK, (2,), True)
    two = hocket.build("interleaved", p=4, m=8)
    (sure,) = findings(steps_of(run_of(two, rng, rank=(1, ALWAYS, 1.1))))
    assert (sure.effect.cause, sure.effect.sure) == (Cause.RANK, True)
    heavy = Costs(F=(1e3,) * 5 + (2e3,) + (1e3,) * 2, B=(2e3,) * 5 + (4e3,) + (2e3,) * 2)
    (stage,) = findings(steps_of(run_of(two, rng, costs=heavy)))
    assert (stage.effect.cause, stage.effect.detail) == (Cause.STAGES, (5,))


def test_the_lost_time_adds_up_and_the_gain_is_what_the_run_without_the_fault_takes():
    schedule = hocket.build("1f1b", p=4, m=8)
    slow, clean = (
        run_of(schedule, np.random.default_rng(6), rank=(1, steps, 1.2)) for steps in (ALWAYS, ())
    )
    answer = diagnose_steps(slow)
    assert sum(answer.lost.values()) == pytest.approx(answer.steps.makespans)
    gained = np.mean([float(a.makespan - b.makespan) for a, b in zip(slow, clean, strict=True)])
    assert answer.findings[0].gain == pytest.approx(gained, rel=0.1)
    assert answer.changes[0].gain >= answer.changes[-1].gain > 0
    assert answer.verdict.startswith("Rank 1 is slow: its work takes 1.20 times as long in every")


def test_clocks_that_differ_are_moved_so_that_no_message_arrives_before_it_was_sent():
    run = run_of(hocket.build("1f1b", p=4, m=8), np.random.default_rng(7))
    for timeline in run:
        own = timeline.schedule.rank_of_queue[timeline.schedule.queue_of_slot] == 2
        timeline.start[own] -= 5000
        timeline.end[own] -= 5000
    answer = diagnose_steps(run)
    assert answer.findings == () and set(answer.steps.moved) == {2}
    assert answer.steps.moved[2] == pytest.approx(5000, rel=0.02)
    assert "the clock of rank 2 was moved by" in str(answer)


def test_steps_of_two_orders_are_refused():
    runs = [run_of(hocket.build(n, p=2, m=4), np.random.default_rng(8)) for n in ("1f1b", "gpipe")]
    with pytest.raises(UsageError, match="step 1 ran another order than step 0"):
        steps_of([runs[0][0], runs[1][0]])


def test_lines_of_json_are_read_as_they_were_written(tmp_path):
    run = run_of(hocket.build("dualpipe", p=4, m=8), np.random.default_rng(9), steps=3)
    write_rows(run, tmp_path / "run.jsonl")
    loaded = load_foreign([tmp_path / "run.jsonl"])
    assert len(loaded.steps) == 3
    for read, written in zip(loaded.steps, run, strict=True):
        assert float(read.makespan) == pytest.approx(float(written.makespan), abs=0.01)
        assert [*map(list, read.schedule.order.values())] == [
            *map(list, written.schedule.order.values())
        ]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"rank": 0}', "not a line with rank, action, start and end: Object missing"),
        ('{"rank": 0, "action": "F0", "start": 0, "end": 1}', "found 'F0'"),
        ('{"rank": 0, "action": "0F0", "start": 2, "end": 1}', "it starts at 2 and ends at 1"),
        (
            '{"rank": 0, "action": "0SEND_F0", "start": 0, "end": 1}',
            "not computation; leave out",
        ),
        ('{"rank": 0, "action": "0F0", "start": 0, "end": 1, "unit": "h"}', "the unit is one of"),
    ],
)
def test_a_line_that_is_none_is_named(line, sentence, tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text(f"\n{line}\n")
    assert main(["diagnose", str(tmp_path / "x.jsonl")]) == 2
    error = capsys.readouterr().err
    assert "x.jsonl:2: " in error and sentence in error


def test_the_command_reads_a_folder_and_prints_the_verdict_first(tmp_path, capsys):
    run = run_of(hocket.build("zb-h1", p=4, m=8), np.random.default_rng(10), rank=(3, (2,), 1.3))
    write_rows(run, tmp_path / "run.jsonl")
    assert main(["diagnose", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Rank 3 is slow: its work takes 1.3")
    assert "in step 2 of 8" in text and "zb-h1: p=4 m=8, 8 steps" in text
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (found,) = data["findings"]
    assert (found["cause"], found["ranks"], found["steps"]) == ("slow rank in some steps", [3], [2])
    assert sum(v for k, v in data["steps"][2].items() if k not in ("step", "makespan")) == (
        pytest.approx(data["steps"][2]["makespan"])
    )


def test_what_has_no_times_is_refused(tmp_path, capsys):
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "there is nothing to read" in capsys.readouterr().err
    words = ["export", "1f1b", "-p", "2", "-m", "4", "--to", "torch-csv"]
    main([*words, "--output", str(tmp_path / "a.csv")])
    assert main(["diagnose", str(tmp_path / "a.csv")]) == 2
    assert "has no times; give the traces of a run" in capsys.readouterr().err


def test_the_slow_rank_of_a_real_run_with_sleeping_stages_is_named(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    row = "[0.01, 0.01, 0.018, 0.01]"
    Path("naps.toml").write_text(f'unit = "s"\nper = "stage"\nF = {row}\nI = {row}\nW = {row}\n')
    Path("plan.toml").write_text('unit = "s"\nper = "stage"\nF = 0.01\nI = 0.01\nW = 0.01\n')
    words = ["--model", "hocket.demo.sleep:build", "-O", "costs=naps.toml", "--trace", "run.jsonl"]
    assert main(["run", "1f1b", "-p", "4", "-m", "4", "--steps", "6", *words]) == 0
    assert "run `hocket diagnose run.jsonl`" in capsys.readouterr().out
    assert main(["diagnose", "run.jsonl", "--costs", "plan.toml", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    first = data["findings"][0]
    assert (first["cause"], first["ranks"], first["sure"]) == ("slow rank", [2], True)
    assert first["factor"] == pytest.approx(1.8, rel=0.2)
