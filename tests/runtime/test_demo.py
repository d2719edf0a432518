"""The demo model, its data, and training it under schedules as in one process."""

from __future__ import annotations

import itertools

import pytest

from hocket.cli import parser
from hocket.cli.run import VERB, settings_of
from hocket.errors import UsageError
from hocket.train.launch import launch

pytestmark = pytest.mark.runtime


def settings(name, p, m, *words):
    sizes = ["-p", str(p), "-m", str(m)]
    return settings_of(VERB.read(parser().read(["run", name, *sizes, *words])))


# --- what ranks do ---------------------------------------------------------------------------


def losses_of(all_settings):
    from hocket.train.training import Trainer, run

    return [run([Trainer(one)], lambda *_: None, kept=1)[0].losses for one in all_settings]


def losses_alone(one):
    """The same run without any schedule, microbatch by microbatch, its sequences whole."""
    import torch

    from hocket.train.training import Adam, task_from

    task, placement = task_from(one, slices=1), one.schedule.placement
    model = torch.nn.Sequential(*(task.build(s) for s in range(placement.n_stages)))
    optimizer, losses = Adam(model.parameters(), one.lr), []
    for index in range(one.steps):
        inputs, targets = task.batch(index)
        m, total = placement.m // placement.slices, 0.0
        for x, y in zip(torch.tensor_split(inputs, m), torch.tensor_split(targets, m), strict=True):
            loss = task.loss(model(x), y) * (len(y) / len(targets))
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses


# --- the tests -------------------------------------------------------------------------------

SMALL = ("--float64", "--layers", "4", "--width", "16", "--seq", "16", "--batch", "9")


@pytest.mark.processor_time(400)
@pytest.mark.parametrize(
    ("p", "m", "names", "steps"),
    [
        (2, 4, ("1f1b", "zb-h1", "dualpipev", "chimera", "seq1f1b"), 30),
        pytest.param(4, 8, ("zb-h1", "dualpipev", "chimera"), 20, marks=pytest.mark.slow),
    ],
)
def test_losses_of_many_steps_equal_those_of_one_process(p, m, names, steps):
    words = (*SMALL, "--steps", str(steps), "--lr", "0.01")
    runs = [settings(name, p, m, *words) for name in names]
    (alone,) = launch(losses_alone, 1, (runs[0],))
    assert alone[-1] < alone[0] - steps / 50
    for per_rank in launch(losses_of, p, (runs,)):
        for one, losses in zip(runs, per_rank, strict=True):
            assert losses == pytest.approx(alone, abs=1e-8), one.schedule.name


def test_with_dropout_losses_do_not_depend_on_the_schedule_or_the_number_of_ranks():
    words = (*SMALL, "--steps", "4", "--dropout", "0.2")
    runs = [settings(name, 4, 8, *words) for name in ("gpipe", "zb-h1", "dualpipev", "chimera")]
    (alone,) = launch(losses_of, 1, ([settings("gpipe", 1, 8, *words)],))
    (plain,) = launch(losses_of, 1, ([settings("gpipe", 1, 8, *words, "--dropout", "0")],))
    assert alone[0] != plain[0]
    for per_rank in launch(losses_of, 4, (runs,)):
        for one, losses in zip(runs, per_rank, strict=True):
            assert losses == pytest.approx(alone[0], abs=1e-8), one.schedule.name


def modules_loaded(one):
    import sys

    from hocket.train.training import Trainer, run

    run([Trainer(one)], lambda *_: None)
    return "torch._dynamo" in sys.modules


def test_a_run_does_not_import_the_compiler():
    """It takes several seconds in every rank; torch.optim imports it."""
    assert launch(modules_loaded, 1, (settings("zb-h1", 1, 2, *SMALL, "--steps", "1"),)) == [False]


@pytest.mark.slow
def test_adam_is_that_of_torch():
    import torch

    from hocket.train.training import Adam

    pair = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    optimizers = [Adam(pair[:1], 0.1), torch.optim.Adam(pair[1:], lr=0.1)]
    for step in range(5):
        for p, optimizer in zip(pair, optimizers, strict=True):
            (p * torch.tensor([1.0, -2.0, 0.3 * step])).square().sum().backward()
            optimizer.step()
            p.grad = None
    assert torch.allclose(*pair, atol=1e-14, rtol=0)


@pytest.mark.parametrize("n", range(1, 7))
def test_the_cut_has_the_lightest_heaviest_stage(n):
    from hocket.demo.gpt import cut

    work = [1, 6, 10, 6, 10, 9]
    stages = cut(work, n)
    assert [i for first, last in stages for i in range(first, last)] == list(range(len(work)))
    heaviest = max(sum(work[first:last]) for first, last in stages)
    borders = itertools.combinations(range(1, len(work)), n - 1)
    every = [
        max(sum(work[a:b]) for a, b in itertools.pairwise((0, *inner, len(work))))
        for inner in borders
    ]
    assert heaviest == min(every)


def test_more_stages_than_parts_says_how_many_layers_are_needed():
    from hocket.demo.gpt import build

    with pytest.raises(UsageError) as caught:
        build(0, 8, layers=2)
    assert str(caught.value) == (
        "the schedule has 8 stages, but the model has 6 parts (2 a layer, the embedding and the "
        "head); give --layers 3 or more"
    )
    build(7, 8, layers=3)


def test_stages_have_the_parts_that_a_plan_gave_them():
    from hocket.demo.gpt import build

    sizes = [len(build(i, 3, layers=2, parts="3,3/1,4,1")) for i in range(3)]
    assert sizes == [1, 4, 1]
    for wrong in ("3,3", "1,4,2", "1,5,0", "1,x,5", "1,4,1,"):
        with pytest.raises(UsageError, match="give a number of parts for each stage"):
            build(0, 3, layers=2, parts=wrong)


def test_weights_do_not_depend_on_the_cut():
    import torch

    from hocket.demo.gpt import build

    def weights(n):
        stages = [build(s, n, layers=2, width=8) for s in range(n)]
        return [p for stage in stages for p in stage.parameters()]

    for n in (2, 3, 6):
        for a, b in zip(weights(1), weights(n), strict=True):
            assert torch.equal(a, b)


def test_a_batch_is_the_same_for_the_same_step_and_targets_are_the_next_bytes(tmp_path):
    import torch

    from hocket.demo.data import batch

    inputs, targets = batch(3, 5, seq=20)
    again, _ = batch(3, 5, seq=20)
    other, _ = batch(4, 5, seq=20)
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    file = tmp_path / "text"
    file.write_text("abcd")
    inputs, targets = batch(0, 1, seq=3, data=str(file))
    assert (bytes(inputs[0].tolist()), bytes(targets[0].tolist())) == (b"abc", b"bcd")
    with pytest.raises(UsageError, match="the text has 4 tokens; --seq 4 needs 5 or more"):
        batch(0, 1, seq=4, data=str(file))
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        batch(0, 1, data=str(tmp_path / "none"))
