"""hocket export, import and check --for torch, as a user calls them."""

import json

import pytest

from hocket import Costs, build, load_costs, loads, simulate, write_trace
from hocket.cli import main

ZB_V = ["zb-v", "-p", 2, "-m", 4]
GPIPE = ["gpipe", "-p", 2, "-m", 2]


def run(*words):
    return main([str(word) for word in words])


def test_a_schedule_goes_out_and_comes_back(tmp_path, capsys):
    file, own = tmp_path / "zb-v.csv", tmp_path / "own.sched"
    s = build("zb-v", p=2, m=4)
    assert run("export", *ZB_V, "--to", "torch-csv", "--output", file) == 0
    assert "in torchtitan start it under the name ZBVZeroBubble" in capsys.readouterr().out
    assert run("import", file) == 0
    out = capsys.readouterr()
    assert loads(out.out) == s
    assert run("import", file, "--output", own, "--name", "own") == 0
    assert loads(own.read_text()) == s.renamed("own")


def test_on_standard_output_the_csv_stands_alone(capsys):
    assert run("export", *GPIPE, "--to", "torch-csv") == 0
    out = capsys.readouterr()
    assert out.out == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    assert out.err.startswith("note: 2 microbatches; the stages: rank 0: 0, rank 1: 1")
    assert run("export", *GPIPE, "--to", "torch-csv", "--comms", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["microbatches"] == [0, 1]
    assert "0REDUCE_GRAD" in data["text"]


def test_check_for_torch_tells_faults_and_the_verdict_on_defer_pp_recv(tmp_path, capsys):
    file = tmp_path / "bad.csv"
    file.write_text("0F0,0F1,0B1,0B0\n1F1,1F0,1B1,1B0\n")
    torch = ["--for", "torch"]
    assert run("check", file, *torch) == 1
    assert "rank 1 cell 1: 1F0 comes after 1F1" in capsys.readouterr().out
    looped = ["interleaved", "-p", 4, "-m", 8, "-v", 2]
    assert run("check", *looped, *torch, "--defer-recv") == 0
    assert "every receive meets its own send" in capsys.readouterr().out
    assert run("check", *ZB_V, *torch, "--defer-recv", "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["problems"] == []
    assert data["defer_pp_recv"]["ok"] is False
    assert "0RECV_B0" in data["defer_pp_recv"]["safe"]


def test_a_trace_is_told_with_its_costs_and_what_they_predict(tmp_path, capsys):
    s, costs = build("1f1b", p=2, m=4), Costs(F=2, I=3, W=1, latency=1, unit="us")
    trace, toml = tmp_path / "run.json", tmp_path / "costs.toml"
    write_trace(simulate(s, costs), trace)
    again = tmp_path / "again.pftrace"
    assert run("import", trace, "--costs", toml, "--trace", again, "--why") == 0
    out = capsys.readouterr().out
    assert "1f1b: p=2 m=4" in out or "run: p=2 m=4" in out
    assert "the costs read back predict" in out
    assert "(+0.0%)" in out
    read = load_costs(toml)
    assert (read.F, read.full_backward, read.latency) == ((2, 2), (4, 4), 1)
    assert again.exists()
    assert run("import", trace, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["measured"]["makespan"] == data["predicted"]


def test_layouts_of_megatron_both_ways(capsys, tmp_path):
    toml = tmp_path / "c.toml"
    assert run("import", "--layout", "Et|t|t|tL", "-p", 2, "-m", 4, "--costs", toml) == 0
    out = capsys.readouterr()
    assert loads(out.out) == build("interleaved", p=2, m=4, v=2, group=2)
    assert "with two ranks both neighbours" in out.err
    assert load_costs(toml).F == (1, 1, 1, 2)
    looped = ["interleaved", "-p", 4, "-m", 8, "-v", 2]
    assert run("export", *looped, "--to", "megatron", "--layers", "16") == 0
    assert '--pipeline-model-parallel-layout "' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import"], "there is nothing to read"),
        (["import", "--layout", "Et|tL"], "--layout needs -p and -m"),
        (["import", "a.csv", "--trace", "x.json"], "there are no times to draw"),
        (["import", "none.csv"], "cannot be read"),
        (["export", *GPIPE, "--to", "torch-csv", "--receives", "late"],
         "receives and unshard are for files with messages"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("0F0,0B0\n")
    assert run(*words) == 2
    assert message in capsys.readouterr().err


def test_a_layout_of_59_layers_for_a_model_of_61_is_refused():
    words = ("import", "--layout", "Et*29|t*30L", "-p", "2", "-m", "4", "--layers")
    assert main([*words, "59"]) == 0
    assert main([*words, "61"]) == 2
