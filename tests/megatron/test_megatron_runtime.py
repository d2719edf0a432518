"""Orders inside Megatron-LM, on CPU over gloo: gradients against the model without a pipeline.

One launch runs all cases, since importing Megatron takes seconds.
"""

from importlib.util import find_spec

import pytest

if find_spec("megatron") is None or find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed (hocket[megatron])", allow_module_level=True)

from megatron_ranks import SIZE, Case, on_four_ranks

pytestmark = [pytest.mark.runtime, pytest.mark.processor_time(400)]

BY_HAND = """# hocket 1
name by-hand
path 0: 0 1
0: 0F1 0F0 0I1 0B0 0W1
1: 1F1 1I1 1F0 1B0 1W1
"""  # forwards out of order, a full backward beside a split one
WAVE = """# hocket 1
name wave
path 0: 0 1 1 0 0 1 1 0
0: 0F0 3F0 4F0 7F0 7I0 4B0 7W0 3B0 0B0 0F1 3F1 4F1 7F1 7B1 4B1 3B1 0B1
1: 1F0 2F0 5F0 6F0 6B0 5B0 2B0 1B0 1F1 2F1 5F1 6F1 6B1 5B1 2B1 1B1
"""
ORDERS = [
    ("1f1b", 1), ("eager-1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1),
    ("zb-v", 2), ("v-half", 2), ("v-min", 2), ("dualpipev", 2),
]  # fmt: skip
EXACT = [
    *(Case(order, 4, 8, v) for order, v in ORDERS),
    *(Case(order, 2, 4, v) for order, v in ORDERS),
    Case("interleaved:v=4", 2, 4, 4),
    Case(BY_HAND, 2, 2),
    Case(WAVE, 2, 2, 4, setting="tied"),
    Case("1f1b", 2, 4, tp=2),
    Case("zb-h1", 2, 4, tp=2, setting="sp"),
    Case("zb-v", 2, 4, 2, tp=2, setting="sp"),
    Case("zb-h1", 2, 4, setting="tied"),
    Case("interleaved", 2, 4, 2, setting="tied overlap"),
    Case("zb-v", 2, 4, 2, setting="tied sharded overlap"),
    Case("zb-h1", 2, 4, setting="overlap verify timeline"),
    Case("v-half", 2, 4, 2, setting="sharded"),
    Case("zb-v", 2, 4, 2, setting="full-recompute"),
    Case("zb-h1", 2, 4, setting="selective-recompute"),
    Case("zb-v", 2, 4, 2, setting="moe"),
    Case("zb-v", 2, 4, 2, setting="per-token"),
    Case("zb-v", 2, 4, 2, setting="scale deallocate"),
    Case("zb-h1", 2, 4, setting="varies"),
]
REFUSED = {
    Case("dualpipe", 4, 8, 2): "dualpipe (p=4) cannot run inside Megatron: it has 2 paths, so a "
    "stage is on several ranks, and Megatron keeps one copy of the weights; take an order with "
    "one path, such as dualpipev",
    Case("zb-h1", 2, 4, setting="defers"): "defer_embedding_wgrad_compute=True cannot be used with "
    "an order of hocket: an order with I and W puts these gradients off, too; turn it off",
    Case("zb-h1", 2, 4, setting="verify dropout"): "verify=True cannot compare gradients under "
    "dropout, whose draws depend on the order; set hidden_dropout to 0 for this check",
    Case(BY_HAND, 2, 4): "by-hand is written for 2 ranks and 2 microbatches, but Megatron has 2 "
    "ranks and a step of 4 microbatches; take a named schedule, which is built for every number",
    Case("zb-v", 2, 4, 1): "zb-v places 2 stages on each rank, but the model has 1 chunks and "
    "virtual_pipeline_model_parallel_size is 1; set it to 2",
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes():
    cases = [*EXACT, *REFUSED]
    ranks = on_four_ranks("compare", cases)
    return {case: [rank[i] for rank in ranks] for i, case in enumerate(cases)}


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_gradients_and_losses_equal_those_without_a_pipeline(outcomes, case):
    ranks = outcomes[case]
    assert [rank.refused for rank in ranks] == [""] * SIZE
    largest = max(rank.largest for rank in ranks)
    assert largest > 0.01
    # Sums over replicas, over a tied weight's uses and over tensor ranks are rounded otherwise.
    alone = case.p == SIZE and not case.setting
    limit = 0.0 if alone else 2e-7 * largest
    assert max(rank.gradient for rank in ranks) <= limit
    assert max(max(rank.loss, rank.evaluation) for rank in ranks) == 0.0
    copies = SIZE // case.p
    whole = ranks[0].of + ("tied" in case.setting.split())
    assert sum(rank.compared for rank in ranks) == copies * whole


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_megatron_cannot_run_is_refused_on_every_rank(outcomes, case):
    for rank in outcomes[case]:
        assert REFUSED[case] in rank.refused


def test_a_step_leaves_a_measured_timeline(outcomes):
    (case,) = [case for case in EXACT if "timeline" in case.setting]
    for rank in outcomes[case]:
        name, makespan = rank.note
        assert name == "zb-h1"
        assert makespan > 0
