"""Why a job hangs: the gallery's verdicts with all dumps and with some; files that are refused."""

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hocket
from hocket.cli import main
from hocket.diagnosis.hang import diagnose_hang
from hocket.interop.dumps import read_dumps

GALLERY = Path(__file__).parents[2] / "examples/diagnose"
VERDICTS = json.loads((GALLERY / "verdicts.json").read_text())
HANGS = [name for name, x in VERDICTS.items() if x["words"]]


def dumps_and_schedule(name):
    words = VERDICTS[name]["words"]
    schedule = hocket.build(words[1], p=int(words[3]), m=int(words[5]))
    files = [path for path in sorted((GALLERY / name).iterdir())]
    return {one.rank: one for one in read_dumps(files)}, schedule


@pytest.mark.parametrize("name", VERDICTS)
def test_the_gallery_s_faults_are_found(name, capsys):
    case = VERDICTS[name]
    assert main(["diagnose", str(GALLERY / name), *case["words"], "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    if case["words"]:
        found = data["fault"], data["ranks"], data["action"] or case["what"]
    else:
        (one,) = data["findings"]
        found = one["cause"], one["ranks"], one["detail"]
    assert found == (case["fault"], case["ranks"], case["what"])


@pytest.mark.parametrize("name", [x for x in HANGS if x not in ("killed-rank", "stuck-replica")])
def test_the_verdict_is_the_same_without_the_dumps_of_any_three_other_ranks(name):
    dumps, schedule = dumps_and_schedule(name)
    (culprit,) = VERDICTS[name]["ranks"]
    for gone in itertools.combinations(set(dumps) - {culprit}, 3):
        hang = diagnose_hang([d for r, d in dumps.items() if r not in gone], schedule)
        assert (str(hang.fault), hang.culprits) == (VERDICTS[name]["fault"], (culprit,)), gone


def test_a_killed_rank_is_among_those_that_are_named_whichever_three_dumps_are_missing():
    dumps, schedule = dumps_and_schedule("killed-rank")
    alone = 0
    for gone in itertools.combinations(set(dumps), 2):
        hang = diagnose_hang([d for r, d in dumps.items() if r not in gone], schedule)
        assert 3 in hang.culprits and "left no dump" in hang.verdict
        alone += hang.culprits == (3,)
    assert alone >= 5


def test_the_states_are_in_terms_of_the_schedule(capsys):
    words = VERDICTS["killed-rank"]["words"]
    assert main(["diagnose", str(GALLERY / "killed-rank"), *words]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "Rank 3 left no dump and does not answer: it is gone or stuck before 3F3"
    )
    assert "Ranks 0-2,4-5 only wait behind that." in text
    assert "4F3, waiting for the output of microbatch 3 from rank 3" in text
    assert "2B1, waiting for the gradient of microbatch 1 from rank 3" in text


def test_without_the_schedule_the_waits_are_followed_all_the_same():
    for name, fault, culprits in (
        ("killed-rank", "rank gone", (3,)), ("missing-send", "cycle of waits", (0, 1, 2)),
        ("data-loader", "rank stuck outside of messages", (0,)),
    ):  # fmt: skip
        dumps, _ = dumps_and_schedule(name)
        hang = diagnose_hang([*dumps.values()])
        assert (str(hang.fault), hang.culprits) == (fault, culprits)


class _Runs:
    def __reduce__(self):
        return os.system, ("touch pwned",)


HOSTILE = {
    "runs code": (pickle.dumps({"entries": [_Runs()]}), "a pickle that would run code"),
    "a class": (pickle.dumps(Path("x")), "a pickle that would run code"),
    "memo": (b"\x80\x02Nr\xff\xff\xff\x7f.", "it numbers 2147483647 values, but has only"),
    "cut off": (pickle.dumps({"entries": [1] * 100})[:50], "not a dump of a flight recorder"),
    "no entries": (pickle.dumps({"version": "2.10"}), "missing required field"),
    "a name": (
        pickle.dumps({"entries": [{"profiling_name": "x", "process_group": ("0", "")}]}),
        "entry 0 is 'x'",
    ),
    "a group": (
        pickle.dumps({"entries": [], "pg_config": {"0": {"ranks": "__import__('os')"}}}),
        "the ranks of group '0' are",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_or_damaged_dump_is_refused_in_a_sentence(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data, sentence = HOSTILE[name]
    (tmp_path / "nccl_trace_rank_0").write_bytes(data)
    assert main(["diagnose", "nccl_trace_rank_0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hocket: nccl_trace_rank_0:1: ") and sentence in error
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["missing-send", "--costs", "unit"], "--costs is for traces"),
        (["missing-send", "-p", "6"], "-p, -m and -v have no effect without --schedule"),
        (["missing-send", "--schedule", "1f1b", "-p", "4", "-m", "8"], "1f1b has 4 ranks, but the"),
        (["slow-rank", "--schedule", "1f1b"], "--schedule, -p, -m and -v are for dumps"),
        (["nothing-there"], "cannot be read"),
    ],
)
def test_wrong_use_is_refused(words, sentence, capsys):
    assert main(["diagnose", str(GALLERY / words[0]), *words[1:]]) == 2
    assert sentence in capsys.readouterr().err


RANKS = """
import pickle, sys, time
import torch, torch.distributed as dist
from hocket.runtime.recorder import record

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
record(f"{folder}/own", after=2.0)
x = torch.ones(4)
dist.all_reduce(x)
core = torch._C._distributed_c10d
open(f"{folder}/torch_rank_{rank}", "wb").write(core._dump_fr_trace())
open(f"{folder}/torch_rank_{rank}.json", "wb").write(core._dump_fr_trace_json())
for _ in range(3):
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
if rank == 1:
    while True:
        time.sleep(0.1)  # its own code
works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, x, 1)])
works[1].wait()
"""


def test_the_recorder_and_torch_s_dumps_of_two_processes_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    assert torch.distributed.is_gloo_available()
    env = os.environ | {"TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANKS, str(r), str(tmp_path)], env=env)
        for r in range(2)
    ]
    own = [tmp_path / f"own/hocket_rank_{r}.json" for r in range(2)]
    try:
        until = time.monotonic() + 150
        while not own[0].exists() and time.monotonic() < until:  # it has waited for 2 s
            time.sleep(0.1)
        ranks[1].send_signal(signal.SIGTERM)
        assert ranks[1].wait(60) == 128 + signal.SIGTERM
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    zero, one = read_dumps(own)
    assert [op.kind for op in zero.ops] == ["all_reduce"] + ["send"] * 4 + ["recv"]
    assert [op.done for op in zero.ops[:4]] == [True] * 4 and zero.ops[-1].waited
    assert one.reason == "signal SIGTERM" and zero.reason
    hang = diagnose_hang([zero, one])
    assert (str(hang.fault), hang.culprits) == ("rank stuck outside of messages", (1,))
    assert hang.behind == (0,)
    torchs = read_dumps([tmp_path / f"torch_rank_{r}" for r in range(2)])
    as_json = read_dumps([tmp_path / f"torch_rank_{r}.json" for r in range(2)])
    assert [x.ops for x in torchs] == [x.ops for x in as_json]
    assert [[op.kind for op in x.ops] for x in torchs] == [["all_reduce"]] * 2
