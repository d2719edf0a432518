"""The command line: what it prints, its JSON, its exit status."""

import json
from pathlib import Path

import pytest

from hocket import build, dumps, words
from hocket.cli import VERBS, load, main, parser
from hocket.cli.arguments import _arguments
from hocket.errors import UsageError

DEADLOCK = "# hocket 1\nname d\npath 0: 0 1\n0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1\n"


def _run(capsys, *args):
    status = main([str(w) for w in args])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_list_names_every_schedule_with_needs_weights_and_source(capsys):
    status, out, _ = _run(capsys, "list", "--json")
    rows = {r["name"]: r for r in json.loads(out)["schedules"]}
    assert status == 0
    assert {"gpipe", "1f1b", "eager-1f1b", "interleaved", "chimera", "zb-h1", "zb-h2", "dualpipe",
            "dualpipev"} <= set(rows)  # fmt: skip
    assert rows["dualpipe"]["needs"] == ["p even", "m even", "m >= 2p"]
    assert all(r["source"] and r["summary"] and r["weights"] for r in rows.values())
    assert "dualpipe" in _run(capsys, "list")[1]


def test_show_prints_a_text_that_can_be_checked_and_simulated(capsys, tmp_path):
    path = tmp_path / "s.sched"
    assert (
        _run(capsys, "show", "zb-h1", "-p", 4, "-m", 8, "--format", "sched", "--output", path)[0]
        == 0
    )
    assert _run(capsys, "check", path, "--transport", "ordered") == (
        0,
        "zb-h1: 96 actions on 4 ranks, complete, no deadlock (ordered)\n"
        "note: messages are where insert_communication places them\n",
        "",
    )
    status, out, _ = _run(capsys, "simulate", path, "--json")
    assert (status, json.loads(out)["makespan"]) == (0, 27)


def test_show_draws_a_grid_an_svg_and_json(capsys):
    assert "F0" in _run(capsys, "show", "1f1b", "-p", 4, "-m", 4, "--width", 100)[1]
    assert _run(capsys, "show", "1f1b", "-p", 4, "-m", 4, "--format", "svg")[1].startswith("<svg")
    assert json.loads(_run(capsys, "show", "1f1b", "-p", 2, "-m", 2, "--json")[1])["order"] == {
        "0": ["0F0", "0F1", "0B0", "0B1"], "1": ["1F0", "1B0", "1F1", "1B1"],
    }  # fmt: skip


def test_simulate_json_keeps_its_contract(capsys, tmp_path):
    costs = tmp_path / "costs.toml"
    costs.write_text('unit = "us"\nF = 1\nB = 2\n[bytes]\nactivation = 3\n')
    _, out, _ = _run(capsys, "simulate", "1f1b", "-p", 4, "-m", 8, "--costs", costs, "--json")
    data = json.loads(out)
    assert {k: data[k] for k in ("schedule", "p", "m", "unit", "makespan", "span")} == {
        "schedule": "1f1b", "p": 4, "m": 8, "unit": "us", "makespan": 33, "span": 33,
    }  # fmt: skip
    assert data["bubble_ratio"] == pytest.approx(9 / 33)
    assert {"rank", "start", "end", "busy", "idle", "peak_in_flight", "peak_bytes"} <= set(
        data["ranks"][0]
    )
    assert data["ranks"][0]["peak_bytes"] == 12
    assert data["critical_path"][0]["slot"] == "0F0"


def test_simulate_says_why_every_gap_is_there(capsys):
    out = _run(capsys, "simulate", "1f1b", "-p", 2, "-m", 2, "--why")[1]
    assert "rank 1, 0 to 1, warm-up: 1F0 on 1 waits for 0F0, which runs on 0" in out
    assert "makespan 9, span 9, bubble 33.3%" in out


@pytest.mark.parametrize("ending", ["pftrace", "json"])
def test_simulate_writes_a_trace(capsys, tmp_path, ending):
    path = tmp_path / f"t.{ending}"
    status, out, _ = _run(capsys, "simulate", "dualpipe", "-p", 4, "-m", 8, "--trace", path)
    assert status == 0 and path.stat().st_size > 1000
    assert str(path) in out


def test_compare_ranks_every_schedule_that_fits_and_says_what_does_not(capsys):
    _, out, _ = _run(capsys, "compare", "-p", 4, "-m", 6, "--json")
    data = json.loads(out)
    makespans = [r["makespan"] for r in data["rows"]]
    assert makespans == sorted(makespans)
    assert {r["schedule"] for r in data["left_out"]} >= {"dualpipe", "dualpipev"}
    out = _run(capsys, "compare", "-p", 4, "-m", 6)[1]
    assert "left out: dualpipe needs m >= 2p" in out


def test_compare_takes_names_with_options(capsys):
    _, out, _ = _run(capsys, "compare", "-p", 8, "-m", 24, "interleaved:v=4", "dualpipe", "--json")
    assert [(r["schedule"], r["makespan"]) for r in json.loads(out)["rows"]] == [
        ("interleaved:v=4", 77.25), ("dualpipe", 78),
    ]  # fmt: skip


def test_names_compared_with_a_file_take_its_size(capsys, tmp_path):
    path = tmp_path / "own.sched"
    path.write_text(dumps(build("1f1b", p=2, m=5)))
    _, out, _ = _run(capsys, "compare", path, "zb-h1", "--json")
    assert {(r["schedule"], r["makespan"]) for r in json.loads(out)["rows"]} == {
        ("zb-h1", 16), (str(path), 18),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["show", "looped-bsf", "-p", 4, "-m", 4], 2,
         "there is no schedule 'looped-bsf'; did you mean looped-bfs?"),
        (["show", "1f1b", "-p", 4], 2, "1f1b needs the number of microbatches: give -m"),
        (["show", "dualpip"], 2, "there is no schedule 'dualpip'; did you mean dualpipe or "
         "dualpipev?"),
        (["show", "1f1b", "-p", 0, "-m", 4], 2, "p is 0; it must be 1 or more"),
        (["show", "1f1b", "-p", 4, "-m", 4, "-v", 2], 2,
         "1f1b has 1 stage(s) per rank; v=2 is not possible"),
        (["show", "1f1b", "-p", 4, "-m", 4, "-o", "x=1"], 2,
         "1f1b has no option 'x'; its options: none"),
        (["show", "1f1b", "-p", 4, "-m", 4, "-o", "x"], 2,
         "expected key=value, found 'x' (a file is named with --output)"),
        (["show", "chimera", "-p", 4, "-m", 4, "-o", "pipes=two"], 2,
         "pipes is 'two'; it must be a whole number"),
        (["show", "none.sched"], 2, "none.sched: cannot be read: No such file or directory"),
        (["check", "1f1b", "-p", 4, "-m", 4, "--transport", "pigeon"], 2,
         "there is no transport 'pigeon'; choose from tagged, ordered, rendezvous"),
        (["show", "chimera:pipes=0", "-p", 4, "-m", 8], 2, None),
        (["show", "1f1b", "-p", 4, "-m", 4, "--width", -5], 2,
         "--width is -5; it must be 20 or more"),
        (["show", "interleaved", "-p", 4, "-m", 8, "-o", "p=2"], 2,
         "p is given twice: -p 4 and p=2"),
        (["show", "interleaved", "-p", 4, "-m", 8, "-o", "group=4", "-o", "group=8"], 2,
         "group is given twice: 4 and 8"),
        (["simulate", "1f1b", "-p", 2, "-m", 2, "--trace", "x.json", "--ranks", "0-999999999999"],
         2, "there are no ranks 0-999999999999 (they are 0 to 1, rising)"),
        (["show", "dualpipe", "-p", 3, "-m", 7], 2,
         "dualpipe needs p even and m even; given p=3 m=7; nearest that fit: p=2 m=6"),
        (["run", "1f1b", "-p", 2, "-m", 2, "--trace", "/none/x.json"], 2,
         "/none/x.json: cannot be written there"),
        (["compare"], 2, "compare needs -p and -m"),
        (["simulate", "1f1b", "-p", 2, "-m", 2, "--costs", "none.toml"], 2,
         "none.toml: cannot be read: No such file or directory"),
        (["show", "1f1b", "-p", 2, "-m", 2, "--output", "/none/x"], 2,
         "/none/x: cannot be written: No such file or directory"),
        (["simulate", "1f1b", "-p", 2, "-m", 2, "--trace", "/none/x.pftrace"], 2, None),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_no_traceback(capsys, words, status, message):
    got, out, err = _run(capsys, *words)
    assert got == status
    assert out == ""
    if message is not None:
        assert err == f"hocket: {message}\n"
    assert err.count("\n") == 1


def test_a_schedule_that_cannot_run_exits_1_with_every_problem(capsys, tmp_path):
    path = tmp_path / "d.sched"
    path.write_text(DEADLOCK)
    status, out, _ = _run(capsys, "check", path)
    assert status == 1 and out.startswith("deadlock: circular wait:")
    status, out, err = _run(capsys, "simulate", path)
    assert (status, out) == (1, "") and "deadlock" in err
    _, out, _ = _run(capsys, "check", path, "--json")
    assert json.loads(out)["ok"] is False
    problem = json.loads(out)["problems"][0]
    assert (problem["code"], problem["action"]) == ("HK101", "0B0")
    status, out, err = _run(capsys, "simulate", path, "--json")
    assert status == 1 and json.loads(out)["problems"] == [problem]
    assert err == f"hocket: {problem['text']}\n"


@pytest.mark.parametrize(
    ("words", "text", "code"),
    [
        (["show", "none"], None, "HK200"),
        (["show", "bad.sched"], "name 1f1b\n", "HK300"),
        (["simulate", "1f1b", "-p", 2, "-m", 2, "--costs", "bad.toml"], "F = -1\n", "HK400"),
        (["plan", "-p", 2, "-m", 2, "--in-flight", "0.01", "--no-search"], None, "HK500"),
    ],
)
def test_an_error_has_its_code_where_json_is_asked_for(
    capsys, tmp_path, monkeypatch, words, text, code
):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / str(words[-1])).write_text(text)
    status, out, err = _run(capsys, *words, "--json")
    assert status == (1 if code == "HK500" else 2)
    assert err.startswith("hocket: ")
    assert {problem["code"] for problem in json.loads(out)["problems"]} == {code}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shwo"], "there is no command 'shwo'; did you mean show?"),
        (["show", "ZB-V", "-p", 2, "-m", 4], "there is no schedule 'ZB-V'; did you mean zb-v?"),
        (["show", "1f1b", "--fromat", "svg"],
         "hocket show has no option --fromat; did you mean --format?"),
        (["show", "1f1b", "--format", "svgg"],
         "--format: 'svgg' is none of these; did you mean svg?"),
        (["export", "1f1b", "--to", "torch"],
         "--to: 'torch' is none of these; did you mean torch-csv?"),
        (["show", "1f1b", "-p", "two"], "-p: expected a whole number, found 'two'"),
        (["show", "1f1b", "-p"], "-p: expected one argument"),
        (["show"], "the following arguments are required: SCHEDULE (hocket show --help)"),
        (["show", "1f1b", "2"], "hocket show has no use for '2' (hocket show --help)"),
        (["show", "a.csv"],
         "a.csv is no .sched file; `hocket import a.csv` reads it, `hocket check a.csv --for "
         "torch` checks it"),
        (["simulate", "a.pftrace"],
         "a.pftrace is no .sched file; `hocket import a.pftrace` reads it"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_one_sentence_with_the_nearest_right_one(
    capsys, tmp_path, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "a.pftrace"):
        (tmp_path / name).write_text("0F0,0B0\n")
    assert _run(capsys, *words) == (2, "", f"hocket: {message}\n")


def test_every_command_takes_json():
    options = vars(parser())["_subparsers"]._group_actions[0].choices
    assert set(options) == set(VERBS) >= {"demo", "list", "run", "view"}
    assert all("--json" in one._option_string_actions for one in options.values())


def test_sizes_are_read_with_their_units():
    assert [words.size(text) for text in ("80GB", "80 GiB", "80e9", "1.5kB", "512")] == [
        80_000_000_000, 85_899_345_920, 80_000_000_000, 1500, 512,
    ]  # fmt: skip
    for text in ("80QB", "GB", "inf", "nan"):
        with pytest.raises(UsageError):
            words.size(text)


def test_a_file_with_faults_exits_2_and_names_every_line(capsys, tmp_path):
    path = tmp_path / "bad.sched"
    path.write_text(DEADLOCK.replace("0F1", "0Z1").replace("name d", "name"))
    status, _, err = _run(capsys, "show", path)
    assert status == 2
    assert f"{path}:2:" in err and f"{path}:4:" in err


def test_sizes_that_contradict_the_file_are_refused(capsys, tmp_path):
    path = tmp_path / "d.sched"
    path.write_text(DEADLOCK)
    assert _run(capsys, "check", path, "-p", 4)[2] == (
        f"hocket: {path} has p=2, not 4; leave out -p\n"
    )


def test_no_command_prints_help_and_exits_2(capsys):
    status, out, _ = _run(capsys)
    assert status == 2 and "simulate" in out


def test_the_name_of_a_file_without_its_ending_is_told_to_be_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.sched").write_text("# hocket 1\n")
    assert _run(capsys, "check", "mine")[2] == (
        "hocket: there is no schedule 'mine'; did you mean mine.sched?\n"
    )


def test_a_function_of_ones_own_is_a_schedule(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine_for_test.py").write_text(
        "import hocket\ndef mine(p, m, *, k=1):\n    return hocket.build('gpipe', p=p, m=m)\n"
        "def wrong(p, m):\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    name = "mine_for_test:mine"
    assert _run(capsys, "check", name, "-p", 2, "-m", 3)[0] == 0
    assert _run(capsys, "compare", "-p", 2, "-m", 3, f"{name}:k=2", "1f1b")[0] == 0
    for word, message in [
        ("mine_for_test:none", "module 'mine_for_test' has no function 'none'"),
        ("no_such_mod:x", "there is no module 'no_such_mod' here"),
        ("mine_for_test:wrong", "returned int; it must return a Schedule"),
        (f"{name}:q=1", "has no option 'q'; its options: k"),
    ]:
        status, _, err = _run(capsys, "check", word, "-p", 2, "-m", 3)
        assert status == 2 and message in err


def test_a_mistake_in_ones_own_function_is_one_sentence_with_its_line(
    capsys, tmp_path, monkeypatch
):
    (tmp_path / "boom_for_test.py").write_text(
        "def boom(p, m):\n    raise ValueError('my own mistake')\n\ndef other(x):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    status, _, err = _run(capsys, "check", "boom_for_test:boom", "-p", 2, "-m", 3)
    assert status == 2
    assert err.startswith("hocket: boom_for_test:boom failed: ValueError: my own mistake (")
    assert err.endswith("boom_for_test.py:2)\n")
    status, _, err = _run(capsys, "check", "boom_for_test:other", "-p", 2, "-m", 3)
    assert (status, err) == (
        2, "hocket: boom_for_test:other: a generator is called as other(p, m, *, options)\n"
    )  # fmt: skip


def test_a_terminal_without_the_characters_gets_plain_ones(tmp_path):
    import os
    import subprocess
    import sys

    words = [sys.executable, "-m", "hocket", "show", "zb-h1", "-p", "4", "-m", "4"]
    done = subprocess.run(
        words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=True
    )
    assert b"F0" in done.stdout and b"?" not in done.stdout
    closed = subprocess.run(f"{' '.join(words)} >&-", shell=True, capture_output=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, b"")
    full = subprocess.run(
        f"{' '.join(words)} >/dev/full", shell=True, capture_output=True, check=False
    )
    assert full.returncode == 1
    assert full.stderr == b"hocket: cannot write: No space left on device\n"


def test_two_schedules_are_compared_with_limits_for_ci(capsys):
    size = ["-p", 4, "-m", 8]
    status, out, err = _run(capsys, "compare", *size, "zb-h1", "1f1b", "--max-makespan", 30)
    assert (status, err) == (1, "hocket: makespan is 33, the limit 30\n")
    assert "makespan: 27 -> 33" in out
    assert _run(capsys, "compare", *size, "1f1b", "zb-h1", "--max-makespan", 30)[0] == 0
    status, out, _ = _run(capsys, "compare", *size, "1f1b", "zb-h1", "--json")
    assert json.loads(out)["change"]["makespan"] == {"before": 33, "after": 27}


def test_a_file_is_recognised_whatever_it_is_called(capsys, tmp_path):
    path = tmp_path / "x.sched"
    text = _run(capsys, "show", "eager-1f1b", "-p", 3, "-m", 6, "--format", "sched")[1]
    path.write_text(text.replace("name eager-1f1b", "name mine"))
    assert _run(capsys, "show", path)[1].endswith("this is eager-1f1b -p 3 -m 6\n")


SMALL = ["1f1b", "-p", "2", "-m", "2"]
NO_EFFECT = {
    ("export", *SMALL, "--to", "torch-csv", "--layers", "8"): "--layers is for megatron, not for "
    "torch-csv; leave it out",
    ("export", *SMALL, "--to", "torch-csv", "--layout", "Et|tL"): "--layout is for megatron",
    ("export", *SMALL, "--to", "megatron", "--comms"): "--comms is for torch-csv, not for megatron",
    ("export", *SMALL, "--to", "megatron", "--receives", "late"): "--receives is for torch-csv",
    ("export", *SMALL, "--to", "megatron", "--layers", "8", "--layout", "Et|tL"): "--layers has no "
    "effect with --layout; leave one of them out",
    ("export", *SMALL, "--to", "megatron", "--loss-weight", "2"): "--loss-weight has no effect "
    "without --layers; add --layers, or leave it out",
    ("export", *SMALL, "--to", "torch-csv", "--padded", "--overlap"): "--overlap has no effect "
    "with --padded",
    ("import", "a.csv", "-p", "2"): "-p has no effect without --layout",
    ("import", "a.csv", "--mtp-weight", "2"): "--mtp-weight has no effect without --layout",
    ("import", "--layout", "Et|tL", "-p", "2", "-m", "2", "--step", "1"): "--step has no effect "
    "with --layout",
    ("import", "a.csv", "--step", "1"): "a.csv holds one step",
    ("import", "a.csv", "--why"): "there are no times, so no gaps",
    ("check", *SMALL, "--defer-recv"): "--defer-recv has no effect without --for",
    ("check", *SMALL, "--runtime", "multi"): "--runtime has no effect without --for",
    ("check", *SMALL, "--for", "torch", "--transport", "ordered"): "--transport has no effect with "
    "--for",
    ("check", "a.csv", "--for", "torch", "-v", "2"): "a.csv is a file: -v and -o are for named",
    ("simulate", *SMALL, "--ranks", "0"): "--ranks has no effect without --trace",
    ("simulate", *SMALL, "--blocking-receive"): "1f1b has no RECV in its order",
    ("show", *SMALL, "--format", "svg", "--width", "80"): "--width is for grid, not for svg",
    ("show", *SMALL, "--format", "sched", "--costs", "a.toml"): "sched holds no times",
    ("show", *SMALL, "--format", "svg", "--json"): "--format has no effect with --json",
    ("show", *SMALL, "--format", "svg", "-o", "a.pdf"): "a.pdf is the name of a file of pdf, but "
    "svg is asked for",
    ("compare", *SMALL, "--chart", "--json"): "--json prints no chart; give --output FILE",
    ("compare", "1f1b", "gpipe", "-p", "2", "-m", "2", "-v", "2"): "-v is for schedules that "
    "take it, and 1f1b and gpipe do not",
    ("explain", *SMALL, "--memory", "8", "--alone"): "--memory has no effect with --alone",
    ("view", *SMALL, "-o", "a.html", "--no-open"): "--port and --no-open are for the served page",
    ("view", "a.csv", "--step", "1", "--output", "a.html"): "a.csv holds one step",
    ("plan", "-p", "2", "-m", "2", "--points", "3"): "--points has no effect without --curve",
    ("plan", "-p", "2", "-m", "2", "--curve", "in-flight=1,2", "--points", "3"): "--points is for "
    "limits from-to",
    ("plan", "-p", "2", "-m", "2", "--curve", "in-flight=1-2", "--patience", "3"): "--patience has "
    "no effect with --curve",
    ("plan", "-p", "2", "-m", "2", "--no-search", "--rounds", "3"): "--rounds has no effect with "
    "--no-search",
    ("plan", "-p", "2", "-m", "2", "--solver-time", "3"): "--solver-time has no effect without",
    ("plan", "-p", "2", "-m", "2", "--recompute", "full"): "--recompute has no effect without a "
    "limit in bytes; add --memory",
    ("run", *SMALL, "--seq", "8", "-O", "seq=16"): "seq is given twice: 8, and 16 by -O",
}  # fmt: skip


@pytest.mark.parametrize("words", NO_EFFECT, ids=" ".join)
def test_an_option_that_would_have_no_effect_is_refused(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("0F0,0B0\n")
    assert main(words) == 2
    out = capsys.readouterr()
    assert out.err.startswith(f"hocket: {NO_EFFECT[words]}")
    assert "Traceback" not in out.err
    assert not Path("a.pdf").exists()


def test_every_named_requirement_of_an_option_is_an_option_of_the_same_command():
    for verb in map(load, VERBS):
        options = list(_arguments(verb.options))
        known = {"--json", *(name for one in options for name in one.metadata["names"])}
        for one in options:
            others = one.metadata["needs"].split() + one.metadata["without"].split()
            assert set(others) <= known, (verb.name, one.name)


def test_why_lists_the_gaps_in_json_too(capsys):
    assert main(["simulate", *SMALL, "--json", "--why"]) == 0
    gaps = json.loads(capsys.readouterr().out)["gaps"]
    assert gaps[0] == {
        "queue": "0", "start": 2, "end": 4, "cause": "dependency", "phase": "warm-up",
        "before": "0B0", "waits_for": "1B0", "waits_on": "1",
        "why": "0B0 on 0 waits for 1B0, which runs on 1",
    }  # fmt: skip
    assert main(["simulate", *SMALL, "--json"]) == 0
    assert "gaps" not in json.loads(capsys.readouterr().out)
