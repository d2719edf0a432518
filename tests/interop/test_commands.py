"""hocket export, import and check --for torch, as functions that take arguments."""

import argparse
import json
import subprocess
import sys

import pytest

from hocket import Costs, build, load_costs, loads, simulate, write_trace
from hocket.cli import interop as command
from hocket.cli import interop_options as options
from hocket.errors import UsageError


def export(schedule, *words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    options.add_export_arguments(parser)
    args = parser.parse_args(words)
    args.schedule = schedule
    return command.export_command(args)


def imported(*words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    options.add_import_arguments(parser)
    return command.import_command(parser.parse_args(list(map(str, words))))


def checked(schedule, *words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-p", type=int)
    parser.add_argument("-m", type=int)
    options.add_check_arguments(parser)
    args = parser.parse_args([*map(str, words), "--for", "torch"])
    args.schedule = schedule
    given = None if isinstance(schedule, str) else schedule
    return command.check_foreign(args, given)


def test_a_schedule_goes_out_and_comes_back(tmp_path, capsys):
    s, file = build("zb-v", p=2, m=4), tmp_path / "zb-v.csv"
    assert export(s, "--to", "torch-csv", "--output", str(file)) == 0
    assert "in torchtitan start it under the name ZBVZeroBubble" in capsys.readouterr().out
    assert imported(file) == 0
    out = capsys.readouterr()
    assert loads(out.out) == s
    assert imported(file, "--output", tmp_path / "own.sched", "--name", "own") == 0
    assert loads((tmp_path / "own.sched").read_text()) == s.renamed("own")


def test_on_standard_output_the_csv_stands_alone(capsys):
    assert export(build("gpipe", p=2, m=2), "--to", "torch-csv") == 0
    out = capsys.readouterr()
    assert out.out == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    assert out.err.startswith("note: 2 microbatches; the stages: rank 0: 0, rank 1: 1")
    assert export(build("gpipe", p=2, m=2), "--to", "torch-csv", "--comms", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["microbatches"] == [0, 1]
    assert "0REDUCE_GRAD" in data["text"]


def test_check_for_torch_tells_faults_and_the_verdict_on_defer_pp_recv(tmp_path, capsys):
    file = tmp_path / "bad.csv"
    file.write_text("0F0,0F1,0B1,0B0\n1F1,1F0,1B1,1B0\n")
    assert checked(str(file)) == 1
    assert "rank 1 cell 1: 1F0 comes after 1F1" in capsys.readouterr().out
    assert checked(build("interleaved", p=4, m=8, v=2), "--defer-recv") == 0
    assert "every receive meets its own send" in capsys.readouterr().out
    assert checked(build("zb-v", p=2, m=4), "--defer-recv", "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["problems"] == []
    assert data["defer_pp_recv"]["ok"] is False
    assert "0RECV_B0" in data["defer_pp_recv"]["safe"]


def test_a_trace_is_told_with_its_costs_and_what_they_predict(tmp_path, capsys):
    s, costs = build("1f1b", p=2, m=4), Costs(F=2, I=3, W=1, latency=1, unit="us")
    trace, toml = tmp_path / "run.json", tmp_path / "costs.toml"
    write_trace(simulate(s, costs), trace)
    assert imported(trace, "--costs", toml, "--trace", tmp_path / "again.pftrace", "--why") == 0
    out = capsys.readouterr().out
    assert "1f1b: p=2 m=4" in out or "run: p=2 m=4" in out
    assert "the costs read back predict" in out
    assert "(+0.0%)" in out
    read = load_costs(toml)
    assert (read.F, read.full_backward, read.latency) == ((2, 2), (4, 4), 1)
    assert (tmp_path / "again.pftrace").exists()
    assert imported(trace, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["measured"]["makespan"] == data["predicted"]


def test_layouts_of_megatron_both_ways(capsys, tmp_path):
    assert imported("--layout", "Et|t|t|tL", "-p", 2, "-m", 4, "--costs", tmp_path / "c.toml") == 0
    out = capsys.readouterr()
    assert loads(out.out) == build("interleaved", p=2, m=4, v=2, group=2)
    assert "with two ranks both neighbours" in out.err
    assert load_costs(tmp_path / "c.toml").F == (1, 1, 1, 2)
    s = build("interleaved", p=4, m=8, v=2)
    assert export(s, "--to", "megatron", "--layers", "16") == 0
    assert '--pipeline-model-parallel-layout "' in capsys.readouterr().out


def test_what_cannot_be_done_is_said(tmp_path):
    with pytest.raises(UsageError, match="there is nothing to read"):
        imported()
    with pytest.raises(UsageError, match="--layout needs -p and -m"):
        imported("--layout", "Et|tL")
    (tmp_path / "a.csv").write_text("0F0,0B0\n")
    with pytest.raises(UsageError, match="there are no times to draw"):
        imported(tmp_path / "a.csv", "--trace", tmp_path / "x.json")
    with pytest.raises(UsageError, match=r"cannot be read"):
        imported(tmp_path / "none.csv")
    with pytest.raises(UsageError, match="receives and unshard are for files with messages"):
        export(build("gpipe", p=2, m=2), "--to", "torch-csv", "--receives", "late")


def test_options_and_commands_load_nothing_heavy():
    code = (
        "import hocket.cli.interop_options, hocket.cli.interop, sys;"
        "print([n for n in ('numpy', 'torch', 'msgspec') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
