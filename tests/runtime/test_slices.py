"""Sequences cut into slices: what a stage carries from one to the next, and its gradients."""

from __future__ import annotations

import json
import re
import weakref
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from runtime_ranks import (
    Block,
    Looking,
    assert_like_whole,
    close,
    gradients,
    held,
    mean_square,
    on_ranks,
    sequences,
    whole,
)
from torch import nn

from hocket.cli import main
from hocket.costs import load_costs
from hocket.errors import RunError
from hocket.runtime import Pipeline
from hocket.runtime.data import REPLICATED
from hocket.schedules import build
from hocket.text import loads

pytestmark = pytest.mark.runtime


def looking(n: int) -> list[nn.Module]:
    return [Looking(s) for s in range(n)]


def one_rank(module: nn.Module, m: int = 2, slices: int = 2, **options) -> Pipeline:
    return Pipeline(build("seq1f1b", p=1, m=m, slices=slices), {0: module}, mean_square, **options)


# --- gradients ----------------------------------------------------------------------------------


# Orders that nobody wrote down: a greedy rank that takes the last microbatch and backwards first.
ORDERS = {
    "split backwards": lambda: loads("""# hocket 1
name greedy
slices 3
path 0: 0 1
0: 0F3 0F4 0F5 0F0 0F1 0I5 0W5 0I4 0W4 0I3 0W3 0F2 0I2 0W2 0I1 0W1 0I0 0W0
1: 1F3 1F4 1F5 1I5 1W5 1I4 1W4 1I3 1W3 1F0 1F1 1F2 1I2 1W2 1I1 1W1 1I0 1W0
"""),
    "two stages per rank in a V": lambda: loads("""# hocket 1
name greedy
slices 2
path 0: 0 1 1 0
0: 0F2 0F3 0F0 0F1 3F2 3F3 3B3 3B2 3F0 0B3 0B2 3F1 3B1 3B0 0B1 0B0
1: 1F2 1F3 2F2 2F3 1F0 1F1 2F0 2B3 1B3 2B2 1B2 2F1 2B1 1B1 2B0 1B0
"""),
    "split backwards in a V": lambda: loads("""# hocket 1
name greedy
slices 2
path 0: 0 1 1 0
0: 0F2 0F3 0F0 0F1 3F2 3F3 3I3 3W3 3I2 3W2 0I3 0W3 0I2 0W2 3F0 3F1 3I1 3W1 3I0 3W0 0I1 0W1 0I0 0W0
1: 1F2 1F3 2F2 2F3 1F0 1F1 2I3 2W3 1I3 1W3 2I2 2W2 1I2 1W2 2F0 2F1 2I1 2W1 1I1 1W1 2I0 2W0 1I0 1W0
"""),
    "whole and split backwards in turn": lambda: loads("""# hocket 1
name mixed
slices 2
path 0: 0 1
0: 0F0 0F1 0F2 0F3 0I1 0B0 0W1 0B3 0I2 0W2
1: 1F0 1F1 1I1 1I0 1W0 1W1 1F2 1F3 1B3 1I2 1W2
"""),
    "sequences on two paths": lambda: loads("""# hocket 1
name paths
slices 2
path 0: 0 1 | 0,1
path 1: 1 0 | 2,3
0: 0F0 0F1 1F2 1F3 1B3 1B2 0B1 0B0
1: 0F2 0F3 1F0 1F1 1B1 1B0 0B3 0B2
"""),
    "a forward of one sequence fused with a backward of another": lambda: loads("""# hocket 1
name fused
slices 2
path 0: 0 1
0: 0F0 0F1 0F2 0B1 0F3+0B0 0B3 0B2
1: 1F0 1F1 1F2+1B1 1B0 1F3 1B3 1B2
"""),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_any_order_with_slices_has_the_gradients_of_uncut_sequences(name: str) -> None:
    schedule = ORDERS[name]()
    modules = looking(schedule.placement.n_stages)
    assert_like_whole(schedule, modules, *sequences(5, 7), steps=2)


@pytest.mark.parametrize("dispatch", ["gate", "ready"])
def test_other_ways_to_dispatch_keep_slices_in_order(dispatch: str) -> None:
    schedule = build("seq1f1b", p=2, m=3, slices=3)
    assert_like_whole(schedule, looking(2), *sequences(6, 7), dispatch=dispatch, steps=2)


class Odd(nn.Module):
    """Carries what it got, what it returns, a view, a parameter, a number, and no gradients."""

    carries = True

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block = Block(seed)
        self.memory = nn.Parameter(torch.ones(1, 1, 3, dtype=torch.float64))

    def forward(self, x, carried=None):
        before, upto = ((), 0) if carried is None else (carried[0], carried[2])
        y = self.block(x + sum(t.mean(dim=1, keepdim=True) for t in before))
        upto = upto + x.shape[1]
        return y, ((*before, y, y[:, -1:], self.memory), torch.zeros(3), upto, None)


def test_what_is_carried_may_be_the_output_itself_or_be_passed_on_as_it_came() -> None:
    torch.manual_seed(0)
    inputs, targets = sequences(2, 6)
    module, stages = Odd(0), {0: Odd(0)}
    total, carried = torch.zeros(()), None
    for x, y in zip(inputs.split(2, dim=1), targets.split(2, dim=1), strict=True):
        out, carried = module(x, carried)
        total = total + mean_square(out, y) / 3
    total.backward()
    pipe = Pipeline(build("seq1f1b", p=1, m=1, slices=3), stages, mean_square)
    close(pipe.step(inputs, targets), total.detach(), "loss", 1e-12)
    want = gradients(module)
    for name, grad in gradients(stages[0]).items():
        close(grad, want[name], name, 1e-12)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_without_slices_a_stage_that_could_carry_trains_as_ever(name: str) -> None:
    assert_like_whole(build(name, p=2, m=3), looking(2), *sequences(6, 4))


def test_ready_slices_of_any_length_are_taken_as_they_are() -> None:
    inputs, targets = sequences(4, 7)
    schedule, modules = build("seq1f1b", p=2, m=2), looking(2)

    def ready(t):
        return [part for rows in t.split(2) for part in rows.split((5, 2), dim=1)]

    def step(pipe, _):
        return pipe.step(ready(inputs), ready(targets))

    assert_like_whole(schedule, modules, inputs, targets, step=step)


def test_evaluation_in_slices_carries_without_gradients() -> None:
    schedule, modules = build("seq1f1b", p=2, m=2, slices=3), looking(2)
    inputs, targets = sequences(4, 6)

    def rank(r, g):
        pipe = Pipeline(schedule, held(schedule, r, modules), mean_square, group=g.group)
        loss, outputs = pipe.eval(inputs, targets, outputs=True)
        return float(loss), outputs

    (_, _), (loss, outputs) = on_ranks(2, rank)
    want, _ = whole(modules, inputs, targets)
    assert loss == pytest.approx(float(want), abs=1e-12)
    assert [tuple(t.shape) for t in outputs] == [(2, 2, 3)] * 6


# --- memory -------------------------------------------------------------------------------------


def test_what_a_slice_carries_lives_until_its_own_backward_and_no_longer() -> None:
    made: list[weakref.ref] = []
    alive: dict[str, int] = {}

    class Watched(Looking):
        def forward(self, x, carried=None):
            out, new = super().forward(x, carried)
            made.append(weakref.ref(new["keys"].untyped_storage()))
            return out, new

    pipe = one_rank(Watched(0), m=3, slices=3)
    training = pipe._training

    def counted(action, call):
        def run(mb):
            call(mb)
            alive[action] = sum(ref() is not None for ref in made)

        return run

    actions = [str(training.program.action(entry)) for entry in training.program.entries]
    training.calls = [
        (counted(action, call), mb)
        for action, (call, mb) in zip(actions, training.calls, strict=True)
    ]
    pipe.step(*sequences(3, 6))
    assert [a for a in actions if "B" in a] == [f"0B{mb}" for mb in (2, 1, 0, 5, 4, 3, 8, 7, 6)]
    in_flight = accumulate(1 if "F" in action else -1 for action in actions)
    assert [*alive.values()] == [*in_flight]


# --- random numbers, verification ---------------------------------------------------------------


class Forgetful(Looking):
    """Carries its keys, and does not look at them."""

    def forward(self, x, carried=None):
        return super().forward(x)


def test_verify_compares_with_uncut_sequences_and_drops_nothing_out() -> None:
    inputs, targets = sequences(4, 6)

    class Dropping(Looking):
        def forward(self, x, carried=None):
            return super().forward(nn.functional.dropout(x, 0.5, self.training), carried)

    module = Dropping(0)
    pipe = one_rank(module, seed=3)
    pipe.verify(inputs, targets)
    assert module.training and module.block.training
    pipe.verify(
        *([t for rows in x.split(2) for t in rows.split(3, dim=1)] for x in (inputs, targets))
    )
    pipe.step(inputs, targets)
    first = gradients(module)
    module.zero_grad()
    pipe.steps_done = 0
    pipe.step(inputs, targets)
    for name, grad in gradients(module).items():
        close(grad, first[name], name, 0.0)


def test_verify_finds_a_stage_that_does_not_use_what_it_carries() -> None:
    with pytest.raises(RunError) as caught:
        one_rank(Forgetful(0), verify=True, seed=3).step(*sequences(4, 6))
    text = str(caught.value)
    assert "differs from the unpipelined model:\n  the loss is" in text
    assert text.endswith("Does every slice use all that the stage carried, and know its positions?")


# --- mistakes -----------------------------------------------------------------------------------


class Silent(Looking):
    carries = None


class Alone(Looking):
    carries = False

    def forward(self, x):
        return super().forward(x)[0]


class NoArgument(Looking):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Silent(0),
         "seq1f1b cuts sequences into 2 slices, but Silent does not say what it hands "
         "from slice to slice; give it carries = True, take `carried` and return (output, "
         "carried), or carries = False if no position looks at another"),
        (NoArgument(0),
         "NoArgument has carries = True, but its forward takes no `carried`"),
    ],
)  # fmt: skip
def test_a_stage_that_does_not_fit_slices_is_told_before_the_first_step(module, text) -> None:
    with pytest.raises(RunError) as caught:
        one_rank(module)
    assert str(caught.value) == text


def test_stages_that_carry_nothing_say_so_and_need_not_change() -> None:
    one_rank(Alone(0)).step(*sequences(4, 6))


def returning(make):
    class Wrong(Looking):
        def forward(self, x, carried=None):
            return make(*super().forward(x, carried))

    return Wrong(0)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (returning(lambda out, carried: out),
         "stage 0 has carries = True, so its forward must return the pair (output, carried), but "
         "it returned a tensor [2, 3, 3]"),
        (returning(lambda out, carried: (out, carried, 1)),
         "stage 0 has carries = True, so its forward must return the pair (output, carried), but "
         "it returned 3 values"),
        (returning(lambda out, carried: (out, None)),
         "stage 0 carried nothing on (None) from slice 1 of 2, which tells the next slice that it "
         "is the first one; return (output, carried) with what the next slice needs, such as keys "
         "and values"),
        (returning(lambda out, carried: (out, {"keys": {1, 2}})),
         "what stage 0 carries['keys'] is a set; stages hand over tensors, None, plain values, and "
         "tuples, lists and dicts of these"),
    ],
)  # fmt: skip
def test_a_stage_that_carries_something_wrong_on_is_told_at_its_first_forward(module, text) -> None:
    with pytest.raises(RunError) as caught:
        one_rank(module).step(*sequences(4, 6))
    assert str(caught.value) == f"rank 0 failed in 0F0: {text}"


X, FLAT = torch.zeros(4, 6, 3), torch.zeros(4)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (torch.zeros(4, 1, 3), "inputs has 1 positions (dimension 1), too few for 2 slices"),
        (torch.zeros(1, 6, 3), "inputs has 1 rows, too few for 2 microbatches"),
        (FLAT, "inputs has no tensor with positions (dimension 1) to split into 2 slices"),
        (
            (X, torch.zeros(4, 5)),
            f"the tensors of inputs differ in positions (dimension 1): [5, 6]{REPLICATED}",
        ),
        ([X], "inputs has 1 microbatches, but the schedule has 4 (2 of 2 slices)"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_cut_into_slices_is_told(inputs, text) -> None:
    with pytest.raises(RunError) as caught:
        one_rank(Looking(0)).step(inputs, X)
    assert str(caught.value).endswith(text)


def test_a_batch_is_cut_by_rows_then_by_positions_and_weighs_by_both() -> None:
    from hocket.runtime.data import microbatches, shares

    batch = {"x": torch.arange(15).view(3, 5), "row": torch.arange(3), "number": 7}
    parts = microbatches(batch, 4, "inputs", torch.device("cpu"), 2)
    assert [part["x"].tolist() for part in parts] == [
        [[0, 1, 2], [5, 6, 7]], [[3, 4], [8, 9]], [[10, 11, 12]], [[13, 14]]
    ]  # fmt: skip
    assert [part["row"].tolist() for part in parts] == [[0, 1], [0, 1], [2], [2]]
    assert all(part["x"].is_contiguous() and part["number"] == 7 for part in parts)
    assert shares(parts, None, 2) == (6 / 15, 4 / 15, 3 / 15, 2 / 15)
    assert shares([x["row"] for x in parts], None, 2) == (1 / 4,) * 4


# --- the demo model -----------------------------------------------------------------------------


def gpt(n: int, slices: int, **options) -> list[nn.Module]:
    from hocket.demo.gpt import build as stage

    size = {"layers": 2, "width": 8, "heads": 2, "seq": 12, "dtype": torch.float64}
    return [stage(s, n, slices=slices, **size, **options) for s in range(n)]


@pytest.mark.parametrize(("p", "slices"), [(1, 2), (2, 2), (2, 5), (3, 3)])
def test_the_gpt_in_slices_has_the_losses_and_gradients_of_one_process(p: int, slices: int) -> None:
    from hocket.demo.gpt import batch, loss

    schedule, data = build("seq1f1b", p=p, m=3, slices=slices), batch(0, 4, seq=12)
    want_loss, want = whole(gpt(p, 1), *data, loss)
    modules = gpt(p, slices)

    def rank(r, g):
        stages = held(schedule, r, modules)
        pipe = Pipeline(schedule, stages, loss, group=g.group, verify=True)
        return pipe.step(*data), {s: gradients(stage) for s, stage in stages.items()}

    for got, grads in on_ranks(p, rank):
        close(got, want_loss, "loss", 1e-13)
        for s, by_name in grads.items():
            for name, grad in by_name.items():
                close(grad, want[s][name], f"stage {s}, {name}", 1e-14)


def test_dropout_in_slices_does_not_depend_on_the_number_of_ranks() -> None:
    from hocket.demo.gpt import batch, loss

    def losses(p: int) -> list[float]:
        schedule, modules = build("seq1f1b", p=p, m=2), gpt(p, 2, dropout=0.3)

        def rank(r, g):
            pipe = Pipeline(schedule, held(schedule, r, modules), loss, group=g.group, seed=1)
            return [float(pipe.step(*batch(step, 4, seq=12))) for step in range(2)]

        return on_ranks(p, rank)[0]

    assert losses(2) == pytest.approx(losses(1), abs=1e-13)


# --- as a user calls it -------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs/running.md"
SLICED = ["run", "seq1f1b", "-p", "2", "-m", "2", "-o", "slices=3", "--steps", "2", "--verify"]


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """The module of the page, in the current folder."""
    source = re.search(r"```python\n(# reader.py\n.*?)```", PAGE.read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reader.py").write_text(source[1])
    return source[1]


def test_the_stage_of_the_page_runs_in_slices_and_without(reader, capsys):
    assert main([*SLICED, "--model", "reader:build", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["m"], found["slices"], found["batch"]) == (2, 3, 4)
    words = ["run", "1f1b", "-p", "2", "-m", "2", "--steps", "2", "--model", "reader:build"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["losses"] == pytest.approx(found["losses"], rel=1e-4)


@pytest.mark.slow
def test_a_profile_in_slices_has_factors_and_the_sizes_of_a_slice(tmp_path, capsys):
    words = ["profile", "seq1f1b", "-p", "2", "-m", "2", "--steps", "3", "--layers", "2"]
    file = str(tmp_path / "costs.toml")
    assert main([*words, "--width", "16", "--seq", "16", "--output", file]) == 0
    assert "F of stage 1, slice 1" in capsys.readouterr().out
    costs = load_costs(file)
    assert sum(costs.slice) == pytest.approx(2, rel=1e-4) and min(costs.slice) > 0
    assert costs.bytes.message == (8 * 2 * 16 * 4, 256 * 2 * 8 * 4)  # outputs, nothing carried
    assert main(["simulate", "seq1f1b", "-p", "2", "-m", "2", "--costs", file]) == 0
    assert main(["simulate", "seq1f1b", "-p", "2", "-m", "2", "-o", "slices=3", "--costs", file])
    assert "slice has 2 factors, but the schedule has 3 slices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("right", "wrong", "text"),
    [
        ("looks @ v), (k, v)", "looks @ v)",
         "hocket: rank 0 failed in 0F0: stage 0 has carries = True, so its forward must return the "
         "pair (output, carried), but it returned a tensor [2, 4, 16]\n"
         "  rank 1 was in 1F0, waiting for 0SEND_F0 of rank 0\n"),
        ("carries = True", "name = 1",
         "hocket: seq1f1b cuts sequences into 3 slices, but Reader does not say what it hands from "
         "slice to slice; give it carries = True, take `carried` and return (output, carried), or "
         "carries = False if no position looks at another\n"),
    ],
)  # fmt: skip
def test_a_mistake_with_slices_is_told_once(reader, right, wrong, text, tmp_path, capsys):
    name = f"reader_{wrong[:5].strip(' @=')}"
    (tmp_path / f"{name}.py").write_text(reader.replace(right, wrong))
    assert main([*SLICED, "--model", f"{name}:build"]) == 1
    assert capsys.readouterr().err == text
