"""Phases of MoE layers on two queues: orders, DeepSeek's times, sharing, the seventh trace."""

import tomllib
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import DATA, order_of, written
from hocket import Costs, build, check, load_costs, simulate
from hocket.cli import main
from hocket.costs import Cycle, costs_from, split
from hocket.errors import CostError, ScheduleError, UsageError
from hocket.lower.phases import ORDERS, pair, phases
from hocket.search.bounds import lower_bounds
from hocket.simulator.contention import simulate_shared
from hocket.text import load

H800 = load_costs("deepseek-v3-h800")
quick = settings(
    max_examples=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


def _pair(order, costs=H800, layers=4):
    return simulate_shared(pair(layers, order), costs, fragment=True)


# --- orders ------------------------------------------------------------------------------------


def test_deepseek_order_of_one_layer_on_two_queues():
    assert order_of(pair(1, "deepseek")) == [
        "0F1 2I0 2W0 2F1 0I0 0W0", "3B0 1F1 1B0 3F1"
    ]  # fmt: skip


def test_forward_layer_meets_the_backward_layer_from_the_other_end():
    assert order_of(pair(2, "naive")) == [
        "0F1 6B0 2F1 4B0 4F1 2B0 6F1 0B0", "7B0 1F1 5B0 3F1 3B0 5F1 1B0 7F1"
    ]  # fmt: skip


def test_serial_runs_the_backward_of_all_layers_and_then_the_forward():
    assert order_of(pair(2, "serial"))[0] == "6B0 4B0 2B0 0B0 0F1 2F1 4F1 6F1"


def test_an_order_can_be_written_out():
    assert pair(3, ORDERS["ring"]) == pair(3, "ring")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("coarse", ["1f1b", "1f1b-overlap", "dualpipe", "zb-h1", "interleaved"])
def test_phases_of_any_schedule_check_clean(order, coarse):
    s = phases(build(coarse, p=2, m=4), layers=2, order=order)
    assert check(s, "ordered").problems == ()
    assert s.placement.n_stages == 8 * build(coarse, p=2, m=4).placement.n_stages


def test_phases_that_never_overlap_take_as_long_as_the_whole_stages():
    fine = phases(build("1f1b", p=4, m=8), layers=3, order="serial")
    phase = Costs(F=Cycle((3, 1, 4, 2)), B=Cycle((7, 2, 5, 1)), latency=6)
    assert simulate(fine, phase).makespan == (
        simulate(build("1f1b", p=4, m=8), Costs(F=30, B=45, latency=6)).makespan
    )


def test_unknown_order_says_what_there_is():
    with pytest.raises(UsageError, match=r"^there is no order 'deepsek' of phases; "
                                         r"did you mean deepseek\?$"):  # fmt: skip
        pair(1, "deepsek")
    with pytest.raises(UsageError, match=r"^'combW': a message has no weights; leave it out$"):
        pair(1, "combB combW")
    with pytest.raises(UsageError, match=r"^'attnX' is no phase and letter; phases: attn, disp, "):
        pair(1, "attnX mlpF")


def test_a_pair_is_two_actions_not_more():
    coarse = written("three", ["0"], "0: 0F0+0B0+0W0")
    with pytest.raises(ScheduleError, match=r"^slot 0F0.0B0.0W0: phases pair one forward"):
        phases(coarse)


# --- DeepSeek's times --------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "ms"), [
    ("deepseek", 127.6), ("megatron", 127.6), ("ring", 133.1), ("naive", 142.9), ("serial", 241.5),
])  # fmt: skip
def test_four_layers_with_deepseeks_times(order, ms):
    assert _pair(order).makespan == pytest.approx(ms, abs=0.1)


def test_deepseeks_order_is_within_two_percent_of_their_measured_129_ms():
    assert _pair("deepseek").makespan == pytest.approx(129.0, rel=0.02)


def test_without_the_wait_of_messages_work_alone_decides():
    payload = replace(  # their all-to-all kernels without the wait for the other ranks
        H800, F=Cycle((4.60, 4.45, 4.64, 5.99)), I=Cycle((9.54, 6.37, 5.36, 3.68))
    )
    work = 4 * (4.60 + 4.64 + 9.54 + 5.36 + 2.40 + 5.07)
    assert _pair("deepseek", payload).makespan == pytest.approx(work, abs=0.05)
    assert _pair("ring", payload).makespan == pytest.approx(work, abs=0.05)
    assert _pair("naive", payload).makespan == pytest.approx(133.4, abs=0.1)


def test_lower_bound_of_phases_is_the_work_of_the_busiest_queue():
    s = build("moe-pair", p=1, m=2, layers=4)
    work = lower_bounds(s, H800)[0]
    assert work.value == pytest.approx(8 * (4.60 + 4.64 + 9.54 + 5.36 + 2.40 + 5.07))
    assert work.argument == "rank 0 works that long, with the shortest way in and out"


def test_freeing_attention_early_exposes_the_messages():
    assert _pair("megatron-early").makespan > 1.3 * _pair("megatron").makespan


def test_serial_is_the_sum_of_all_phases():
    a_layer = sum(H800.F) + sum(H800.I) + sum(H800.W)
    assert _pair("serial").makespan == pytest.approx(4 * a_layer)


def test_moe_pair_from_the_command_line(capsys):
    words = ["moe-pair", "-p", "1", "-m", "2", "-o", "layers=4", "-o", "order=ring"]
    assert main(["simulate", *words, "--costs", "deepseek-v3-h800"]) == 0
    assert "makespan 342 ms" in capsys.readouterr().out
    assert main(["show", *words, "--costs", "deepseek-v3-h800", "--width", "100"]) == 0
    assert "0/comm" in capsys.readouterr().out


def test_compare_leaves_phases_out_unless_they_are_named(capsys):
    assert main(["compare", "-p", "2", "-m", "4"]) == 0
    why = "moe-pair cuts stages into phases on two queues; name it to compare it"
    assert f"left out: {why}" in capsys.readouterr().out
    words = [f"moe-pair:layers=4,order={o}" for o in ("deepseek", "serial")]
    assert main(["compare", "-p", "1", "-m", "2", *words, "--costs", "deepseek-v3-h800"]) == 0
    first = capsys.readouterr().out.splitlines()[1].split()
    assert first[:3] == ["moe-pair:layers=4,order=deepseek", "16", "338.5"]


def test_unknown_profile_names_those_there_are():
    with pytest.raises(CostError, match=r"^deepseek: cannot be read: No such file or directory; "
                                        "built-in profiles: deepseek-v3-h800$"):  # fmt: skip
        load_costs("deepseek")


def test_cycle_in_a_costs_file_repeats_over_the_stages():
    costs = costs_from(tomllib.loads("F = { cycle = [1, 2] }\nI = { cycle = [3] }\nW = [0, 4, 1]"))
    assert Cycle((1, 2)) == costs.F
    assert costs.full_backward == (3, 7, 4)
    assert Costs(I=Cycle((1, 2)), W=Cycle((1, 2, 3))).full_backward == Cycle((2, 4, 4, 3, 3, 5))
    assert simulate(build("gpipe", p=3, m=1), costs).makespan == 1 + 2 + 1 + 3 + 7 + 4
    assert Cycle((Fraction(1, 2), Fraction(1, 2), 1, 1)) == split(costs, 2).F


# --- sharing -----------------------------------------------------------------------------------

TWO = ["0 0/comm | 0-1"]


def _two(*lines):
    return written("two", TWO, *lines)


def test_compute_under_a_message_takes_share_times_as_long():
    s = _two("0: 0F0 0F1 0B0 0B1", "0/comm: 1F0 1F1 1B0 1B1")
    costs = Costs(F=(6, 4), B=(1, 0), slowdown=2)
    # 0F0 0-6; 1F0 6-10 slows 0F1: 2 of 6 done at 10, the other 4 alone until 14; 1F1 14-18
    t = simulate(s, costs)
    assert t.slot_end.tolist()[:2] == [6, 14]
    # 0B0 waits for 1B0, which stands behind 1F1: 18-19, and 0B1 19-20
    assert t.makespan == 20
    assert simulate(s, Costs(F=(6, 4), B=(1, 0))).makespan == 18


def test_a_message_that_outlasts_the_work_slows_all_of_it():
    s = _two("0: 0F0 0F1 0B0 0B1", "0/comm: 1F0 1F1 1B0 1B1")
    t = simulate(s, Costs(F=(2, 10), B=(0, 0), slowdown=Fraction(3, 2)))
    assert t.slot_end.tolist()[:2] == [2, 5]  # 2 of work take 3 under 1F0 (2-12)
    assert t.makespan == 22


def test_time_of_a_third_is_exact():
    s = _two("0: 0F0 0F1 0B0 0B1", "0/comm: 1F0 1F1 1B0 1B1")
    t = simulate(s, Costs(F=(3, 1), B=(0, 0), slowdown=Fraction(132, 112)))
    # 0F1 starts at 3; 1 under 1F0 does 112/132 of work, the rest is alone
    assert t.makespan == 4 + 3 - Fraction(112, 132) + 1
    assert t.ranks[0].busy + t.ranks[0].idle == 2 * t.makespan


def test_messages_of_another_rank_slow_nobody():
    s = written("pair", ["0 1/comm 1 | 0-1"], "0: 0F0 0F1 0B0 0B1", "1: 2F0 2B0 2F1 2B1",
                "1/comm: 1F0 1F1 1B0 1B1")  # fmt: skip
    t = simulate(s, Costs(F=(4, 3, 2), B=(0, 0, 0), slowdown=5))
    ends = dict(zip(map(str, map(s.slot, range(s.n_slots))), t.slot_end.tolist(), strict=True))
    assert [t.ticks.value(ends[a]) for a in ("0F0", "0F1")] == [4, 8]  # rank 0 at full speed
    # 2F0 7-8 alone, then under 1F1 (8-11) 3/5 of its other 1 are done; the rest alone
    assert t.ticks.value(ends["2F0"]) == 11 + Fraction(2, 5)


def test_share_and_lane_together_are_refused():
    with pytest.raises(CostError, match=r"^slowdown and p2p_overhead together"):
        simulate(build("moe-pair", p=1, m=2), Costs(slowdown=2, p2p_overhead=(1, 1)))
    with pytest.raises(CostError, match=r"^slowdown is 0.5; it must be 1 or more$"):
        Costs(slowdown=0.5)


times = st.integers(0, 20) | st.fractions(0, 5, max_denominator=6)


@quick
@given(st.data())
def test_with_share_1_the_events_give_the_longest_path(data):
    order = data.draw(st.sampled_from(sorted(ORDERS)))
    s = phases(build("1f1b-overlap", p=data.draw(st.integers(1, 3)), m=4), order=order)
    costs = Costs(
        F=Cycle(data.draw(st.tuples(*[times] * 4))), I=Cycle(data.draw(st.tuples(*[times] * 4))),
        W=Cycle((data.draw(times), 0)), latency=data.draw(times),
    )  # fmt: skip
    a, b = simulate(s, costs), simulate_shared(s, costs)
    assert a.makespan == b.makespan
    assert [r.busy for r in a.ranks] == [r.busy for r in b.ranks]
    for x, y in ((a.slot_start, b.slot_start), (a.slot_end, b.slot_end)):
        assert [a.ticks.value(t) for t in x] == [b.ticks.value(t) for t in y]


@quick
@given(st.fractions(1, 3, max_denominator=5), st.tuples(*[st.integers(0, 9)] * 12))
def test_sharing_never_shortens_and_at_most_stretches_by_its_factor(share, xs):
    costs = Costs(F=Cycle(xs[:4]), I=Cycle(xs[4:8]), W=Cycle((xs[8], 0)))
    for order in ("deepseek", "naive"):
        plain = _pair(order, costs, 2).makespan
        slowed = simulate_shared(
            pair(2, order), Costs(F=costs.F, I=costs.I, W=costs.W, slowdown=share), fragment=True
        ).makespan
        assert plain <= slowed <= share * plain


# --- the seventh trace -------------------------------------------------------------------------

BAD = DATA / "seed" / "moe-bad-overlap"


def test_seventh_trace_replays_to_16545():
    t = simulate(load(f"{BAD}.sched"), load_costs(f"{BAD}.toml"))
    assert t.makespan == 16545
    assert [r.end for r in t.ranks] == [16545, 16025, 15487, 14973]
    assert [r.start for r in t.ranks] == [0, 490, 996.5, 1481]
    assert [r.transfer for r in t.ranks] == [220, 200, 180, 320]


def test_seventh_trace_without_any_overlap_takes_11317():
    assert simulate(build("1f1b", p=4, m=8), load_costs(f"{BAD}.toml")).makespan == 11317


def test_seventh_trace_with_the_deeper_warm_up_takes_9417_and_a_half():
    assert simulate(build("1f1b-overlap", p=4, m=8), load_costs(f"{BAD}.toml")).makespan == 9417.5


@pytest.mark.parametrize("rank", range(4))
def test_slots_of_the_seventh_trace_are_its_phases_paired_naively(rank):
    scale = (1, Fraction(23, 20), Fraction(19, 20), Fraction(21, 20))[rank]
    costs = Costs(
        F=Cycle((40 * scale, 180, 70 * scale, 180)), B=Cycle((50 * scale, 190, 70 * scale, 190))
    )
    slots = load_costs(f"{BAD}.toml")
    assert _pair("naive", costs, 1).makespan == slots.FB
    assert _pair("serial", costs, 1).makespan == slots.F[rank] + slots.B[rank]
