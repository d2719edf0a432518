"""Checkpoints: names of the whole model, resumed under another pipeline, damaged or cut short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runtime_ranks import Block, batch, mean_square, on_ranks
from torch import nn

from hocket.cli import main
from hocket.errors import RunError
from hocket.runtime import Checkpoints, Pipeline
from hocket.schedules import build
from hocket.train.launch import launch

pytestmark = pytest.mark.runtime

LAYERS, ROWS, SEED = 4, 8, 5


class Layer(nn.Sequential):
    """A block with dropout, whose masks are the same in every placement."""

    def __init__(self, seed):
        super().__init__(Block(seed), nn.Dropout(0.3))


def stages_of(schedule, rank, layers=LAYERS, seed=0):
    """The stages of a rank: each a sequence of layers."""
    n = schedule.placement.n_stages
    of = [range(s * layers // n, (s + 1) * layers // n) for s in range(n)]
    mine = schedule.placement.stages_of_rank[rank]
    return {s: nn.Sequential(*(Layer(seed + i) for i in of[s])) for s in mine}


def parameters(pipe):
    return [p for _, p in pipe.named_parameters()]


def one_process(m=4, **more):
    schedule = build("1f1b", p=1, m=m)
    return Pipeline(schedule, stages_of(schedule, 0, **more), mean_square, seed=SEED)


def trained(pipe, optimizer, steps, rows=slice(None)):
    """The losses of some steps, each with rows of its own."""
    losses = []
    for _ in range(steps):
        x, y = batch(ROWS, seed=pipe.steps_done)
        losses.append(float(pipe.step(x[rows], y[rows])))
        optimizer.step()
    return losses


def adam(pipe):
    from hocket.train.training import Adam

    return Adam(parameters(pipe), 0.05)


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("zb-v", 2), ("dualpipe", 1)])
def test_weights_have_the_same_names_whatever_the_partition(name, v):
    schedule = build(name, p=2, m=4)
    whole = {f"{i}.{name}": p for i in range(4) for name, p in Layer(i).named_parameters()}

    def rank(r, g):
        pipe = Pipeline(schedule, stages_of(schedule, r), mean_square, group=g.group)
        state = pipe.state_dict()
        assert [n for n, _ in pipe.named_parameters()] == [*state]
        pipe.load_state_dict({n: torch.zeros_like(p) for n, p in whole.items()})
        assert not any(p.any() for p in parameters(pipe))
        return {n: p.shape for n, p in state.items()}

    every = on_ranks(2, rank)
    assert {n for own in every for n in own} == {*whole}
    assert all(shape == whole[n].shape for own in every for n, shape in own.items())


def test_a_module_may_name_its_own_weights_and_clashes_are_refused():
    schedule = build("interleaved", p=1, m=2, v=2)

    class Named(Block):
        def whole_name(self, name):
            return f"decoder.{name}"

    pipe = Pipeline(schedule, {0: Named(0), 1: Block(1)}, mean_square)
    names = [f"{part}.linear.{name}" for part in ("decoder", 1) for name in ("weight", "bias")]
    assert [*pipe.state_dict()] == names
    pipe = Pipeline(schedule, {0: Named(0), 1: Named(1)}, mean_square)
    both = "stage 1 and one before it both have the name 'decoder.linear.weight'"
    with pytest.raises(RunError, match=both):
        pipe.state_dict()
    with pytest.raises(RunError, match=r"the state has no 'decoder.linear.weight', which stage 0"):
        pipe.load_state_dict({})


def _chain(folder):
    """Two steps under each of three pipelines on two ranks, each going on from the one before."""
    import torch.distributed as dist

    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(2)]
    losses = []
    for name, p, m in (("1f1b", 2, 4), ("zb-v", 2, 4), ("1f1b", 1, 2)):
        schedule = build(name, p=p, m=m)
        replicas = {} if p == 2 else {"group": alone[rank], "data_parallel": dist.group.WORLD}
        stages = stages_of(schedule, rank % p, seed=9 * len(losses))  # other weights than before
        pipe = Pipeline(schedule, stages, mean_square, seed=SEED, **replicas)
        optimizer, store = adam(pipe), Checkpoints(folder)
        assert (store.load(pipe, optimizer) is None) == (not losses)
        half = slice(None) if p == 2 else slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
        for loss in trained(pipe, optimizer, 2, half):
            both = torch.tensor(loss, dtype=torch.float64)
            dist.all_reduce(both)
            losses.append(float(both) / 2)
        assert store.save(pipe, optimizer) == Path(folder) / f"step-{len(losses)}"
    return losses


def test_a_run_goes_on_under_another_schedule_p_v_and_number_of_replicas(tmp_path):
    pipe = one_process()
    want = trained(pipe, adam(pipe), 8)
    losses, others = launch(_chain, 2, (str(tmp_path),))
    assert losses == others
    pipe = one_process(seed=99)
    optimizer = adam(pipe)
    assert Checkpoints(tmp_path).load(pipe, optimizer) == tmp_path / "step-6"
    losses += trained(pipe, optimizer, 2)
    assert losses == pytest.approx(want, rel=1e-10, abs=0)
    assert sorted(os.listdir(tmp_path)) == ["step-4", "step-6"]


def test_optimizer_groups_scheduler_and_random_numbers_go_on(tmp_path):
    def run(store, start, steps):
        torch.manual_seed(start)
        pipe = one_process()
        pipe.seed = None
        weights = [p for name, p in pipe.named_parameters() if name.endswith("weight")]
        biases = [p for name, p in pipe.named_parameters() if name.endswith("bias")]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.01}]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if start:
            store.load(pipe, optimizer, scheduler=scheduler)
            assert pipe.steps_done == start
        out = []
        for _ in range(steps):
            out += trained(pipe, optimizer, 1)
            optimizer.zero_grad()
            scheduler.step()
        store.save(pipe, optimizer, scheduler=scheduler)
        return out, [group["lr"] for group in optimizer.param_groups], torch.rand(1)

    whole, rates, number = run(Checkpoints(tmp_path / "whole"), 0, 6)
    store = Checkpoints(tmp_path / "parts")
    first, _, _ = run(store, 0, 3)
    rest, rates_too, number_too = run(store, 3, 3)
    assert (first + rest, rates_too, number_too) == (whole, rates, number)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path):
    reports = []
    store = Checkpoints(tmp_path, report=reports.append)
    pipe = one_process()
    optimizer = adam(pipe)
    for _ in range(3):
        trained(pipe, optimizer, 1)
        store.save(pipe, optimizer)
    assert [path.name for path in store.found()] == ["step-3", "step-2"]
    data = tmp_path / "step-3" / "__0_0.distcp"
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    assert store.load(pipe, optimizer) == tmp_path / "step-2"
    assert pipe.steps_done == 2
    data.write_bytes(raw[:100])
    (tmp_path / "step-2" / "hocket.json").unlink()
    with pytest.raises(RunError, match=r"every checkpoint in .* is damaged"):
        store.load(pipe, optimizer)
    size, name = f"{len(raw):,}", f"{tmp_path}/step-"
    assert reports == [
        f"{name}3 is damaged and was skipped: __0_0.distcp has other bytes than the {size} that "
        "were written",
        f"{name}3 is damaged and was skipped: __0_0.distcp has 100 bytes, not the {size} that were "
        "written",
        f"{name}2 is damaged and was skipped: hocket.json is missing or cannot be read",
    ]
    data.unlink()
    with pytest.raises(RunError):
        store.load(pipe, optimizer)
    pipe.steps_done = 2
    store.save(pipe, optimizer)  # the run goes on from here, and nothing newer is left
    assert [path.name for path in store.found()] == ["step-2"]
    assert store.load(pipe, optimizer) == tmp_path / "step-2"
    assert reports[3].endswith("__0_0.distcp cannot be read (No such file or directory)")


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        (5, "step-1 has no weight '4.0.linear.weight'; is it of another model?"),
        (3, "step-1 has '3.0.linear.weight', which this model lacks"),
        (4, r"step-1 has '0.0.linear.weight' as \[3, 3\] float64, but this model has \[3, 3\] fl"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, layers, sentence):
    store, pipe = Checkpoints(tmp_path), one_process()
    trained(pipe, adam(pipe), 1)
    store.save(pipe)
    other = one_process(layers=layers)
    if layers == LAYERS:
        other.modules[0].float()
    with pytest.raises(RunError, match=sentence):
        store.load(other)


def test_a_state_that_was_not_saved_is_missed_by_name(tmp_path):
    store, pipe = Checkpoints(tmp_path), one_process()
    store.save(pipe)
    with pytest.raises(RunError, match=r"step-0 has nothing called 'scaler'"):
        store.load(pipe, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(RunError, match=r"no state of an optimizer for '0.0.linear.weight'"):
        store.load(pipe, adam(pipe))


_KILLED = """
import os, random, shutil, signal, sys
sys.path[:0] = sys.argv[3:]
import torch
from test_checkpoint import Checkpoints, adam, one_process, trained

folder, kills, saved = sys.argv[1], int(sys.argv[2]), []
torch.set_num_threads(1)
want_pipe = one_process()
want = trained(want_pipe, adam(want_pipe), 8)
Checkpoints(folder + "/warm").save(want_pipe)  # what is imported at the first save
WATCHED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


def run(at):
    seen = [0]

    def count(event, args):
        if event in WATCHED:
            seen[0] += 1
            if seen[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    store, pipe = Checkpoints(folder + "/run"), one_process(seed=at)
    optimizer = adam(pipe)
    store.load(pipe, optimizer)
    if pipe.steps_done == 0:
        start = one_process()
        pipe.load_state_dict(start.state_dict())
    while pipe.steps_done < 8:
        before = pipe.steps_done
        (loss,) = trained(pipe, optimizer, 1)
        assert abs(loss - want[before]) < 1e-10, (before, loss, want[before])
        with open(folder + "/done", "a") as file:
            print(pipe.steps_done, file=file)
        if pipe.steps_done % 2 == 0:
            store.save(pipe, optimizer)


killed, pick = 0, random.Random(int(sys.argv[2]))
while killed < kills:
    at = pick.randint(1, 200)
    pid = os.fork()
    if pid == 0:
        run(at)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    done = int(open(folder + "/done").read().split()[-1]) if os.path.exists(folder + "/done") else 0
    pipe = one_process()
    Checkpoints(folder + "/run").load(pipe, adam(pipe))
    assert done - pipe.steps_done <= 2, (done, pipe.steps_done)
    if status == 0:
        assert done == pipe.steps_done == 8
        shutil.rmtree(folder + "/run")
        os.remove(folder + "/done")
    else:
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        killed += 1
        saved.append(pipe.steps_done)
print(*saved)
"""


@pytest.mark.parametrize("kills", [12])
def test_a_run_killed_at_any_access_to_a_file_loses_no_more_than_n_steps(tmp_path, kills):
    paths = [str(Path(__file__).parent), *sys.path]
    ran = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path), str(kills), *paths],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    saved = [int(word) for word in ran.stdout.split()]
    assert len(saved) == kills and 0 in saved and max(saved) > 2


_FATAL = """
import os, signal
from hocket.demo import gpt

build, loss = gpt.build, gpt.loss

def batch(step, size, *, seq=16, seed=0):
    if step == 5 and os.path.exists(DIES):
        os.kill(os.getpid(), signal.SIGKILL)
    return gpt.batch(step, size, seq=seq, seed=seed)
"""


def test_a_run_that_was_killed_goes_on_under_another_schedule_and_more_replicas(
    tmp_path, monkeypatch, capsys
):
    dies = tmp_path / "dies"
    (tmp_path / "fatal.py").write_text(f"DIES = {str(dies)!r}\n{_FATAL}")
    monkeypatch.chdir(tmp_path)
    words = ["--model", "fatal:build", "--layers", "2", "--width", "16", "--dropout", "0.1"]
    words += ["--float64", "--steps", "8", "--json"]

    def run(*more):
        status = main(["run", *more, *words])
        out, err = capsys.readouterr()
        return status, json.loads(out) if out else None, err

    _, whole, _ = run("1f1b", "-p", "2", "-m", "4", "--batch", "8")
    saving = ["--save", "kept", "--every", "2"]
    dies.touch()
    status, found, err = run("zb-v", "-p", "2", "-m", "4", "--batch", "8", *saving)
    assert (status, found) == (1, None)
    assert "was killed by SIGKILL" in err
    dies.unlink()
    status, _, err = run("zb-v", "-p", "2", "-m", "4", "--batch", "8", *saving)
    assert status == 2
    assert "kept holds checkpoints already; go on from them with --resume" in err
    (tmp_path / "kept" / "step-6").mkdir()
    two = ["-p", "1", "-m", "2", "--batch", "4", "--nproc", "2"]
    status, found, err = run("1f1b", *two, *saving, "--resume")
    assert err.splitlines() == [
        "hocket: kept/step-6 is damaged and was skipped: hocket.json is missing or cannot be read",
        "hocket: kept/step-4 is loaded; the run begins with step 5",
    ]
    assert found["losses"] == pytest.approx(whole["losses"][4:], rel=1e-10, abs=0)
    assert (found["steps_before"], found["checkpoint"]) == (4, "kept/step-8")
    status, _, err = run("1f1b", *two, *saving, "--resume", "--seed", "1")
    other = "hocket: the checkpoint is of a run with --seed 0, not 1"
    assert (status, err.splitlines()[0]) == (2, other)
    status, _, err = run("1f1b", *two, *saving, "--resume")
    assert (status, err) == (
        2, "hocket: kept/step-8 has 8 steps already; give --steps more than 8\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--resume"], "--resume needs --save DIR, the folder of the checkpoints"),
        (["--save", "x", "--every", "0"], "--every is 0; it must be 1 or more"),
        (["--save", "/dev/null/x"], "--save /dev/null/x: Not a directory"),
        (["--save", "x", "--beside", "zb-h1"], "--save is for one order; leave --beside out"),
    ],
)
def test_what_cannot_be_saved_is_said_before_any_rank_starts(words, sentence, capsys):
    assert main(["run", "1f1b", "-p", "2", "-m", "4", *words]) == 2
    assert capsys.readouterr().err == f"hocket: {sentence}\n"
