"""One configuration in numbers, and fits: what adds up, what is refused, what is found again."""

from dataclasses import asdict, replace

import pytest

from hocket import Costs, simulate
from hocket.cluster import (
    Measured,
    Run,
    calibrate,
    cluster_of,
    costs_of,
    estimate,
    faults,
    fit,
    load_model,
    load_stack,
    predicted,
    stages,
)
from hocket.cluster.operations import F, Shape, layer
from hocket.errors import UsageError

MODEL, CLUSTER, STACK = (
    load_model("llama3-70b"),
    cluster_of("h100", 64),
    load_stack("h100-megatron"),
)
RUN = Run(8192, 1, 128, tp=8, pp=4, v=2, schedule="interleaved", sp=True)


def test_the_parts_of_a_step_add_up():
    found = estimate(MODEL, CLUSTER, STACK, RUN)
    b = found.breakdown
    assert (
        b.compute + b.messages + b.gradients + b.update + b.imbalance + b.bubble
        == pytest.approx(found.step)
    )
    assert min(b.compute, b.messages, b.bubble, b.imbalance) >= 0
    assert found.tokens_per_second * 64 * found.step == pytest.approx(128 * 8192)
    assert 0 < found.mfu < 1


def test_costs_are_what_the_simulator_takes_and_the_pipeline_comes_from_it():
    costs = costs_of(MODEL, CLUSTER, STACK, RUN)
    found = estimate(MODEL, CLUSTER, STACK, RUN)
    assert isinstance(costs, Costs)
    assert simulate(found.timeline.schedule, costs).makespan == found.timeline.makespan < found.step
    assert len(costs.F) == 8


def test_memory_of_each_rank_is_states_and_the_simulated_peak():
    found = estimate(MODEL, CLUSTER, STACK, RUN)
    for memory, rank in zip(found.memory, found.timeline.ranks, strict=True):
        assert memory.total - memory.buffers == pytest.approx(rank.peak_bytes)
    assert found.fullest in (0, 3)
    assert found.as_dict()["memory_bytes"]["total"] == found.memory[found.fullest].total


def test_more_sharding_needs_less_memory_and_full_recomputation_fewer_activations():
    def fullest(**change):
        found = estimate(MODEL, CLUSTER, STACK, replace(RUN, **change))
        return found.memory[found.fullest]

    alone = [fullest(sharding=level, tp=8, pp=1, v=1, schedule="1f1b").total for level in range(4)]
    assert alone == sorted(alone, reverse=True) and len(set(alone)) == 4
    totals = [fullest(sharding=level).total for level in (0, 1, 2)]
    assert totals == sorted(totals, reverse=True)
    kept = [fullest(sharding=level).total for level in (1, 3)]
    assert kept[0] == kept[1]  # with a pipeline, gathered weights and gradients are kept
    assert fullest(recompute=("full",)).activations < fullest().activations / 5
    some = fullest(recompute=("full",), recompute_layers=3).activations
    assert fullest(recompute=("full",)).activations < some < fullest().activations


def test_a_model_with_experts_holds_more_between_i_and_w_and_the_simulator_takes_it():
    model, cluster = load_model("deepseek-v3"), cluster_of("h800", 2048)
    run = Run(4096, 1, 15360, pp=16, ep=64, schedule="zb-h1", lighter=(1, 2))
    costs = costs_of(model, cluster, STACK, run)
    assert costs.bytes.held[5] > costs.bytes.activation[5]
    found = estimate(model, cluster, STACK, run)
    assert found.memory[8].activations > costs.bytes.activation[8]


def test_two_copies_of_the_weights_share_the_work_and_exchange_gradients():
    run = replace(RUN, v=1, schedule="1f1b")
    alone = estimate(MODEL, CLUSTER, STACK, run)
    for name in ("dualpipe", "chimera"):
        both = estimate(MODEL, CLUSTER, STACK, replace(run, schedule=name))
        assert both.breakdown.compute == pytest.approx(alone.breakdown.compute)
        assert sum(asdict(both.breakdown).values()) == pytest.approx(both.step)
        n = len(alone.memory)
        for r in range(n):
            sizes = alone.memory[r].weights + alone.memory[n - 1 - r].weights
            assert both.memory[r].weights == pytest.approx(sizes)
        assert both.breakdown.gradients > alone.breakdown.gradients


def test_slots_of_dualpipe_hide_the_messages_of_experts():
    model, cluster = load_model("deepseek-v3"), cluster_of("h800", 2048)
    run = Run(4096, 1, 15360, pp=16, ep=64)
    apart = estimate(model, cluster, STACK, replace(run, schedule="1f1b"))
    together = estimate(model, cluster, STACK, replace(run, schedule="dualpipe"))
    assert together.breakdown.compute == pytest.approx(apart.breakdown.compute)
    assert together.breakdown.messages < 0.3 * apart.breakdown.messages
    assert sum(asdict(together.breakdown).values()) == pytest.approx(together.step)
    kept = apart.breakdown.messages + apart.breakdown.compute
    assert together.step < kept + together.breakdown.imbalance  # no order of 1f1b's costs can


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tp": 3}, "tp cp pp is 12; it must divide the 64 GPUs"),
        ({"ep": 8}, "ep is 8; it must divide the 0 experts"),
        ({"v": 40}, "pp v is 160; it must be at most the 80 layers"),
        ({"micro_batch": 3}, "micro_batch dp is 6; it must divide the global batch of 128"),
        ({"cp": 0}, "cp is 0; it must be 1 or more"),
        (
            {"split": (20, 20, 20)},
            "split has 3 stages with 60 layers; it needs 8 stages with 80 layers",
        ),
        ({"recompute": ("all",)}, "recompute is all; known are none, core"),
    ],
)
def test_a_broken_rule_is_named(change, sentence):
    texts = [fault.text for fault in faults(MODEL, CLUSTER, replace(RUN, **change))]
    assert any(text.startswith(sentence) for text in texts), texts
    with pytest.raises(UsageError):
        estimate(MODEL, CLUSTER, STACK, replace(RUN, **change))


def test_a_schedule_with_other_stages_is_refused():
    with pytest.raises(
        UsageError, match="zb-v has 8 stages on 4 ranks and the run has 4; set v to 2"
    ):
        estimate(MODEL, CLUSTER, STACK, replace(RUN, schedule="zb-v", v=1))


def test_every_stage_is_counted_once():
    found = stages(MODEL, CLUSTER, STACK, replace(RUN, tp=1))
    assert sum(s.parameters for s in found) == pytest.approx(70.554e9, rel=1e-3)


def test_calibrate_finds_the_stack_that_made_the_runs():
    truth = replace(STACK, gemm=0.45, traffic=3.0)
    runs = [
        replace(RUN, tp=t, pp=p, v=1, schedule="1f1b", sp=t > 1)
        for t, p in ((8, 2), (4, 4), (8, 4), (2, 8), (4, 8))
    ]
    made = [
        Measured(MODEL, CLUSTER, (r,), predicted(Measured(MODEL, CLUSTER, (r,), 1.0), truth))
        for r in runs
    ]
    found = calibrate(made, STACK, name="mine")
    assert found.fit.rows == 5
    assert found.fit.worst < 0.05
    before = max(abs(predicted(m, STACK) / m.seconds - 1) for m in made)
    assert before > 0.1 > 0.03 > max(abs(predicted(m, found) / m.seconds - 1) for m in made)


def test_one_wrong_run_does_not_move_a_fit_far():
    runs = [
        replace(RUN, tp=t, pp=p, v=1, schedule="1f1b", sp=t > 1)
        for t, p in ((8, 2), (4, 4), (8, 4), (2, 8), (4, 8))
    ]
    times = [predicted(Measured(MODEL, CLUSTER, (r,), 1.0), STACK) for r in runs]
    made = [Measured(MODEL, CLUSTER, (r,), t) for r, t in zip(runs, times, strict=True)]
    found = fit([*made[:4], replace(made[4], seconds=3 * times[4])], STACK, ("gemm",))
    assert abs(found.gemm / STACK.gemm - 1) < 0.1


def test_calibrate_without_runs_is_refused():
    with pytest.raises(
        UsageError, match="there is no measured run; give at least one, five are enough"
    ):
        calibrate([], STACK)


def test_memory_of_deepseek_v3_is_the_anatomy_of_megatron_cores_report():
    """256 GPUs, PP 4, VP 4, EP 64: GiB of the parts, as Megatron-Core's MoE report prints them."""
    stack = replace(STACK, gradient=4.0, saved=2, expert_outputs=True)
    model, cluster, gib = load_model("deepseek-v3"), cluster_of("gb200", 256), 2**30
    run = Run(4096, 1, 4096, pp=4, v=4, ep=64, schedule="interleaved", lighter=(1, 2))
    memory = estimate(model, cluster, stack, run).memory[1]
    assert memory.optimizer / gib == pytest.approx(32.1, rel=0.01)
    assert (memory.weights + memory.gradients) / gib == pytest.approx(36.4, rel=0.01)
    made = [
        t
        for t in layer("experts", Shape(4096, 1, ep=64, expert_outputs=True), model).tensors
        if t.made is F
    ]
    parts = {
        "all": sum(t.amount for t in made),
        "expert outputs": sum(t.amount for t in made if t.op == "expert outputs"),
        "up-projections": sum(t.amount for t in made if "mla_up" in t.parts),
    }
    printed = {"all": 131.0, "expert outputs": 26.3, "up-projections": 30.4}
    assert {k: 61 * v / gib for k, v in parts.items()} == pytest.approx(printed, rel=0.04)
