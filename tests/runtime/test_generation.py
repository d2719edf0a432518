"""Tokens that a pipeline makes one after the other, against the whole model without a cache."""

from __future__ import annotations

import pytest
import torch
from runtime_ranks import Block, held, on_ranks
from torch import nn

from hocket.demo.gpt import build as gpt
from hocket.errors import RunError
from hocket.runtime import Pipeline
from hocket.schedules import build

pytestmark = pytest.mark.runtime

SMALL = {"layers": 3, "width": 16, "heads": 2, "seq": 24, "dtype": torch.float64, "seed": 3}
NEW = 9


def beginnings(rows):
    return torch.randint(256, (rows, 5), generator=torch.Generator().manual_seed(rows))


def whole(tokens, n, choose):
    """The tokens that follow, every one from a forward of all tokens so far in one process."""
    model, made = gpt(0, 1, **SMALL), tokens
    for _ in range(n):
        with torch.no_grad():
            made = torch.cat([made, choose(model(made)[:, -1])], dim=1)
    return made[:, tokens.shape[1] :]


def generated(schedule, tokens, n, **how):
    """What every rank returns, twice: nothing is left of the first time."""

    n_stages = schedule.placement.n_stages
    modules = [gpt(s, n_stages, slices=2, **SMALL) for s in range(n_stages)]

    def rank(r, g):
        pipe = Pipeline(schedule, held(schedule, r, modules), group=g.group)
        first = pipe.generate(tokens, n, **how)
        assert torch.equal(pipe.generate(tokens, n, **how), first)
        return first

    first, *others = on_ranks(schedule.p, rank)
    assert all(torch.equal(other, first) for other in others)
    return first


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize(
    ("name", "p", "options"),
    [("1f1b", 3, {}), ("zb-v", 2, {}), ("dualpipe", 2, {}), ("seq1f1b", 2, {"slices": 2})],
)
def test_the_likeliest_tokens_are_those_of_the_whole_model(name, p, options, rows):
    tokens = beginnings(rows)
    want = whole(tokens, NEW, lambda scores: scores.argmax(-1, keepdim=True))
    assert len({*want.flatten().tolist()}) > 2
    assert torch.equal(generated(build(name, p=p, m=4, **options), tokens, NEW), want)


def test_drawn_tokens_depend_on_the_seed_and_on_no_schedule():
    draws = torch.Generator().manual_seed(8)
    want = whole(
        beginnings(3), NEW,
        lambda scores: torch.multinomial((scores / 0.7).softmax(-1), 1, generator=draws),
    )  # fmt: skip
    for name in ("1f1b", "zb-v"):
        got = generated(build(name, p=2, m=2), beginnings(3), NEW, temperature=0.7, seed=8)
        assert torch.equal(got, want)


def test_a_sequence_that_has_ended_repeats_its_last_token_until_all_have():
    tokens = beginnings(2)
    free = whole(tokens, NEW, lambda scores: scores.argmax(-1, keepdim=True))
    end = int(free[0, 1])
    got = generated(build("1f1b", p=2, m=2), tokens, NEW, end=end)
    for row, own in zip(free.tolist(), got.tolist(), strict=True):
        n = row.index(end) + 1 if end in row else NEW
        assert own == (row[:n] + [end] * NEW)[: got.shape[1]]
    assert got.shape[1] == (NEW if end not in free[1] else free[1].tolist().index(end) + 1)


def test_what_cannot_generate_is_refused():
    pipe = Pipeline(build("1f1b", p=1, m=2), {0: Block(0)})
    said = r"^generation calls a stage once for each token, but Block does not say what it hands"
    with pytest.raises(RunError, match=said):
        pipe.generate(beginnings(2), 3)
    module = nn.Linear(5, 5)
    module.carries = False
    pipe = Pipeline(build("1f1b", p=1, m=2), {0: module})
    with pytest.raises(RunError, match=r"the last stage gives \[1, 5\], but choosing a token"):
        pipe.generate(torch.ones(2, 5), 3)
