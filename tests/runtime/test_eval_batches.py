"""Several batches through the forwards of a pipeline, without a pause between them."""

from __future__ import annotations

import pytest
import torch
from runtime_ranks import Block, Looking, batch, close, held, mean_square, on_ranks, sequences

from hocket import Costs, simulate
from hocket.errors import RunError
from hocket.runtime import Pipeline
from hocket.runtime.orders import forwards
from hocket.schedules import build

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize(("name", "p"), [("1f1b", 3), ("zb-v", 2), ("dualpipe", 2), ("seq1f1b", 2)])
def test_every_batch_has_the_loss_and_outputs_of_its_own_evaluation(name, p):
    schedule = build(name, p=p, m=4)
    sliced = schedule.placement.slices > 1
    kind, data = (Looking, sequences) if sliced else (Block, lambda n, _: batch(n, seed=n))
    modules = [kind(s) for s in range(schedule.placement.n_stages)]
    batches = [data(rows, 7) for rows in (9, 4, 11)]

    def rank(r, g):
        pipe = Pipeline(schedule, held(schedule, r, modules), mean_square, group=g.group)
        first = pipe.eval_batches(batches, outputs=True)
        want = [pipe.eval(*one, outputs=True) for one in batches]
        assert [float(x) for x in pipe.eval_batches(batches)] == [float(x) for x, _ in first]
        assert pipe.eval_batches([(x, None) for x, _ in batches[:2]]) == [None, None]
        assert pipe.eval_batches([]) == []
        return first, want

    for got, want in on_ranks(p, rank):
        for (loss, outputs), (own, theirs) in zip(got, want, strict=True):
            close(loss, own, "the loss", 1e-12)
            for a, b in zip(outputs, theirs, strict=True):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(a, b)


def test_only_the_first_and_the_last_batch_wait_for_other_ranks():
    schedule, costs = build("1f1b", p=4, m=8), Costs(F=1, latency=0)
    assert simulate(forwards(schedule, 1), costs).makespan == 8 + 3
    assert simulate(forwards(schedule, 5), costs).makespan == 5 * 8 + 3


def test_ranks_with_other_numbers_of_batches_are_refused():
    schedule = build("1f1b", p=2, m=2)

    def rank(r, g):
        pipe = Pipeline(schedule, {r: Block(r)}, mean_square, group=g.group)
        with pytest.raises(RunError, match=r"^the ranks have other numbers of batches: 1, 2$"):
            pipe.eval_batches([batch(4)] * (r + 1))
        return pipe.eval_batches([batch(4)])

    on_ranks(2, rank)
