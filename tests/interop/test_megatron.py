"""Megatron's layouts and interleaved settings, read and written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket import build, simulate
from hocket.errors import TextError, UsageError
from hocket.interop.megatron import (
    Settings,
    Weights,
    balanced,
    flags,
    megatron_run,
    read_layout,
    refusals,
    settings_of,
    write_layout,
)


def test_the_published_layout_has_32_stages():
    stages = read_layout("Et*3|(tt|)*29,m|L")
    assert stages == ("Ettt", *["tt"] * 29, "m", "L")
    assert read_layout(write_layout(stages)) == stages


@given(st.lists(st.text("Etm", max_size=6), min_size=1, max_size=12))
def test_every_layout_is_read_as_it_was_written(stages):
    assert read_layout(write_layout(stages)) == tuple(stages)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Et|(tt", "<layout>:1: layout 'Et|>(tt': a bracket is not closed"),
        ("Ett)|L", "<layout>:1: layout 'Ett>)|L': this bracket closes nothing"),
        (
            "Et|t*|L",
            "<layout>:1: layout 'Et|t>*|L': expected a letter before * and a number after it",
        ),
        (
            "Et|((t|)*2)*2L",
            "<layout>:1: layout 'Et|>((t|)*2)*2L': brackets do not nest in Megatron's layouts",
        ),
        (
            "E(tt)L",
            "<layout>:1: layout 'E>(tt)L': brackets need something in them, and a repetition "
            "such as *3",
        ),
        ("Ex|L", "<layout>:1: layout 'E>x|L': expected one of E t m L | ( ) * and numbers"),
    ],
)
def test_a_layout_that_cannot_be_read_shows_where(text, sentence):
    with pytest.raises(TextError) as caught:
        read_layout(text)
    assert str(caught.value) == sentence


def test_costs_of_a_stage_are_its_layers_with_embedding_and_loss():
    run = megatron_run("Ett|tt|tt|tL", p=4, m=8, weights=Weights(embedding=0.5, loss=2))
    assert run.schedule == build("1f1b", p=4, m=8)
    assert run.costs.F == (2.5, 2, 2, 3)
    assert simulate(run.schedule, run.costs).makespan > 0


def test_virtual_stages_are_interleaved_in_groups():
    run = megatron_run("Et|t|t|t|t|t|t|tL", p=4, m=8, group=8)
    assert run.schedule == build("interleaved", p=4, m=8, v=2, group=8)
    run = megatron_run("Et|t|t|tL", p=2, m=4)
    assert run.warnings[1].startswith("with two ranks both neighbours are the same process")


@pytest.mark.parametrize(
    ("layout", "p", "m", "group", "sentence"),
    [
        ("Et|tt|L", 2, 4, None, "3 stages do not divide over 2 ranks"),
        ("tE|tL", 2, 4, None, "the embedding E must appear once, before all layers"),
        ("Et|Lt", 2, 4, None, "the loss L must appear once, after all layers"),
        ("Et|t|m|tL", 2, 4, None, "multi-token prediction m must come after all layers"),
        ("Et|t|m|mL", 4, 8, None, "all of multi-token prediction m must be in one stage, not in "),
        ("Et|m|t|tL", 2, 4, None, "m must be in the last virtual stage of its rank"),
        ("Et|t|t|tL", 2, 5, None, "5 microbatches in groups of 2 leave 1 for the last"),
        ("Et|t|t|tL", 2, 4, 1, "the microbatch group is 1; it must be from 2 (ranks) to 4"),
    ],
)
def test_what_megatron_refuses_is_told(layout, p, m, group, sentence):
    assert any(sentence in text for text in refusals(Settings(read_layout(layout), p, m, group)))
    with pytest.raises(UsageError, match="Megatron refuses this: "):
        megatron_run(layout, p=p, m=m, group=group)


def test_prediction_on_rank_0_is_accepted_in_the_last_virtual_stage_as_megatron_does():
    assert refusals(Settings(read_layout("Et|t|m|L"), 2, 4)) == []
    assert megatron_run("Et|t|m|L", p=2, m=4).schedule == build("interleaved", p=2, m=4, v=2)


def test_the_number_of_layers_and_empty_stages_are_reported():
    run = megatron_run("Et*29||t*30|L", p=4, m=8)
    assert run.warnings[:2] == (
        "the layout has 59 layers: Megatron demands --num-layers 59",
        "stage 1 (rank 1) is empty: it only passes messages on",
    )
    with pytest.raises(UsageError, match="the layout has 59 layers, the model 61"):
        megatron_run("Et*29||t*30|L", p=4, m=8, layers=61)
    prediction = megatron_run("Et|t|t|mL", p=4, m=8)
    assert "--num-layers 3 and --mtp-num-layers 1" in prediction.warnings[0]


def test_empty_stages_of_an_export_are_reported_with_their_ranks():
    settings = settings_of(build("1f1b", p=8, m=8), balanced(5, 8))
    empty = [k for k, stage in enumerate(settings.stages) if not stage]
    assert empty
    assert [f"# stage {k} (rank {k}) is empty: it only passes messages on" for k in empty] == flags(
        settings
    )[-len(empty) :]


@pytest.mark.parametrize(
    "text",
    ["t*3000000000", "(t|)*200000000L", "t*9223372036854775808", "t*" + "9" * 5000],
)
def test_numbers_of_a_layout_are_tested_before_anything_is_repeated(text):
    with pytest.raises(TextError, match="it has more than 10000 letters"):
        read_layout(text)


def test_three_thousand_brackets_are_a_sentence():
    with pytest.raises(TextError, match="a bracket is not closed"):
        read_layout("EEE" + "(" * 3000)


@pytest.mark.parametrize("group", [4, 5, 8])
def test_settings_of_a_schedule_give_it_back(group):
    s = build("interleaved", p=4, m=8, v=2, group=group) if group != 5 else build(
        "interleaved", p=4, m=9, v=2, group=5
    )  # fmt: skip
    settings = settings_of(s)
    again = megatron_run(settings.stages, p=4, m=s.m, group=settings.group)
    assert again.schedule.order == s.order
    assert f"--microbatch-group-size-per-virtual-pipeline-stage {settings.group}" in flags(settings)


def test_orders_and_placements_that_megatron_does_not_have_are_refused():
    with pytest.raises(UsageError, match="Megatron places stage k on rank k mod 4"):
        settings_of(build("zb-v", p=4, m=8))
    with pytest.raises(UsageError, match="zb-h1 is an order that Megatron does not have"):
        settings_of(build("zb-h1", p=4, m=8))


@pytest.mark.parametrize("n_layers", [4, 13, 32, 61])
@pytest.mark.parametrize("n_stages", [1, 2, 8, 16])
def test_balanced_layouts_hold_every_layer_and_fill_no_stage_more_than_needed(n_layers, n_stages):
    weights = Weights(embedding=1, loss=2)
    stages = balanced(n_layers, n_stages, weights)
    assert "".join(stages) == "E" + "t" * n_layers + "L"
    fullest = max(weights.of(stage) for stage in stages)
    assert fullest == max(-(-(n_layers + 3) // n_stages), 2)
