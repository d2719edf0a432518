"""Orders inside torchtitan's trainer, on CPU over gloo: loss and norm are those of its own runs.

One launch runs all cases, since importing torchtitan takes seconds.
"""

from importlib.util import find_spec

import pytest
from titan_ranks import Case, on_four_ranks

import hocket.torchtitan
from hocket import UsageError, build

pytestmark = [pytest.mark.runtime, pytest.mark.processor_time(400)]


def test_versions_that_were_never_tested_are_refused(monkeypatch):
    monkeypatch.setattr(hocket.torchtitan, "version", lambda name: "0.4.1")
    with pytest.raises(UsageError, match=r"torchtitan 0\.4\.1 is installed, but .* with 0\.3\.0"):
        hocket.torchtitan.use("zb-v")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("chimera", "it has 2 paths"),
        ("seq1f1b", "it cuts sequences into slices"),
        ("merak", "it has R; torchtitan recomputes"),
        ("pipeoffload", "it has D and U; torchtitan recomputes"),
    ],
)
def test_orders_that_its_models_cannot_run_are_refused_whatever_their_numbers(name, why):
    with pytest.raises(UsageError, match=rf"^{name} \(p=2\) cannot run inside torchtitan: {why}"):
        hocket.torchtitan._fit(build(name, p=2, m=8), 2, 8)


TRAINED = [
    Case(2),  # saves what the others load
    Case(2, "1f1b"),
    Case(2, "zb-h1", load=0),
    Case(2, "zb-v", load=0),
    Case(2, "hanayo", load=0),
    Case(2, "dualpipev", load=1),
    Case(4, own="Interleaved1F1B", load=1),
    Case(4, "interleaved", 2, load=0),
    Case(4, build("zb-v", p=4, m=8), load=1),
    Case(4, "eager-1f1b", load=0),
]
REFUSED = {
    Case(4, "dualpipe"): "dualpipe (p=4) cannot run inside torchtitan: it has 2 paths, so a stage "
    "is on several ranks, and torchtitan would count its copies more than once in the norm of the "
    "gradients and in checkpoints; take an order with one path, such as dualpipev",
    Case(2, "zb-v", change=(("parallelism.pipeline_parallel_schedule_csv", "a.csv"),)):
    "parallelism.pipeline_parallel_schedule_csv is set, but the order is the one given to "
    "hocket.torchtitan.use; leave it out",
    Case(2, "zb-v", replicas=2): "torchtitan's mesh has dp_shard=2, which was not tested with an "
    "order of hocket; use pipeline parallelism alone",
    Case(2, "1f1b", change=(("compile.enable", True),)): "compile.enable is set, but compiled "
    "stages were not tested here; leave it out",
    Case(2, "1f1b", change=(("parallelism.pipeline_parallel_layers_per_stage", 2),)):
    "parallelism.pipeline_parallel_layers_per_stage is set, but the order says how many stages "
    "there are; leave it out",
    Case(2, build("zb-v", p=2, m=4)): "zb-v has 2 ranks and 4 microbatches, but torchtitan has 2 "
    "ranks and a step of 8 microbatches (training.local_batch_size / "
    "parallelism.pipeline_parallel_microbatch_size); take a named schedule, which is built for "
    "every number",
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes():
    if find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    cases = [*TRAINED, *REFUSED]
    return dict(zip(cases, on_four_ranks(cases), strict=True))


def seen(ranks):
    """Loss and norm by step, and the loss of the validation, where torchtitan shows them."""
    (own,) = (rank for rank in ranks if min(loss for loss, _ in rank.steps.values()) > 0)
    return own.steps, own.validated


@pytest.mark.parametrize("case", TRAINED[1:], ids=str)
def test_loss_norm_and_validation_are_those_of_torchtitan(outcomes, case):
    ranks = outcomes[case]
    assert [rank.refused for rank in ranks] == [""] * len(ranks)
    steps, validated = seen(ranks)
    steps_own, validated_own = seen(outcomes[TRAINED[0]])
    assert sorted(steps) == ([1, 2, 3] if case.load is None else [3])
    for step, (loss, norm) in steps.items():
        assert (loss, norm) == pytest.approx(steps_own[step], rel=1e-5)
        assert norm > 0.5  # so it was clipped
        assert {rank.steps[step][1] for rank in ranks} == {norm}
    assert validated[3] == pytest.approx(validated_own[3], rel=1e-5)
    assert len({loss for loss, _ in steps_own.values()}) == len(steps_own)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_cannot_run_is_refused_in_a_sentence(outcomes, case):
    assert {rank.refused for rank in outcomes[case]} == {REFUSED[case]}


def test_what_was_replaced_is_restored(outcomes):
    assert all(rank.restored for ranks in outcomes.values() for rank in ranks)
