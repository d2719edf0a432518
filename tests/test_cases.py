"""Public reports of what went wrong elsewhere, with the right answer here."""

import numpy as np
import pytest

from common import DATA, order_of, written
from hocket import Bytes, Costs, build, check, simulate
from hocket.costs import load_costs
from hocket.errors import ScheduleError, UsageError
from hocket.ir import Kind, Line, Queue, Schedule, kinds_of, linear, looped
from hocket.lower import insert_communication, strip_communication
from hocket.pattern import lay
from hocket.text import load

B2 = Costs(F=1, B=2)
HALF = Costs(F=0.5, B=1)


def _idle(t):
    return [r.idle for r in t.ranks]


def _peaks(t):
    return [r.peak_in_flight for r in t.ranks]


# --- A01 to A05: sizes ------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "makespan", "peaks"), [(2, 15, [2, 2, 2, 1]), (1, 12, [1, 1, 1, 1])])
def test_1f1b_with_fewer_microbatches_than_ranks_runs(m, makespan, peaks):
    s = build("1f1b", p=4, m=m)
    t = simulate(s, B2)
    assert check(s).ok
    assert (t.makespan, _idle(t), _peaks(t)) == (makespan, [9] * 4, peaks)


def test_interleaved_with_m_not_divisible_by_p_regroups():
    t = simulate(build("interleaved", p=4, m=10, v=2), HALF)
    assert (t.makespan, _idle(t), _peaks(t)) == (34.5, [4.5] * 4, [12, 10, 8, 6])


def test_interleaved_with_m_below_p_runs_and_beats_1f1b():
    assert simulate(build("interleaved", p=6, m=3, v=2), HALF).makespan == 21.0
    assert simulate(build("1f1b", p=6, m=3), B2).makespan == 24


def test_refusal_names_rule_values_and_nearest_settings():
    with pytest.raises(UsageError) as e:
        build("interleaved", p=6, m=12, v=2, group=5)
    assert str(e.value) == (
        "interleaved needs a group of at least min(p, m) and at most m microbatches, with m mod "
        "group either 0 or at least p; given p=6 m=12 v=2 group=5; "
        "nearest that fit: group=6, m=5, p=2"
    )
    with pytest.raises(UsageError) as e:
        build("dualpipe", p=4, m=6)
    assert str(e.value) == ("dualpipe needs m >= 2p; given p=4 m=6; nearest that fit: m=8, p=2")


def test_v_shaped_order_on_a_round_robin_placement_names_the_first_wrong_stage():
    v = build("dualpipev", p=4, m=8)
    lines = [_line_of(v, q) for q in range(4)]
    wrong = Schedule.from_lines("dualpipev", looped(4, 8, 2), lines)
    report = check(wrong)
    assert not report.ok
    assert report.problems[0].text == (
        "rank 0 slot 7: 7F0 belongs on rank 3 (path 0 places stage 7 there)"
    )
    assert [[q.rank for q in path] for path in v.placement.paths] == [[0, 1, 2, 3, 3, 2, 1, 0]]


def _line_of(s, q):
    first, last = s.starts[q], s.starts[q + 1]
    return Line(s.codes[s.slots[first] : s.slots[last]], s.widths[first:last])


@pytest.mark.parametrize(
    ("m", "latency", "single", "double"),
    [(8, 0, 28.5, 28.5), (8, 0.25, 36.0, 32.0), (16, 0.25, 66.0, 56.0)],
)
def test_twice_the_interleaved_warm_up_hides_latency(m, latency, single, double):
    costs = Costs(F=0.5, B=1, latency=latency)
    assert simulate(build("interleaved", p=4, m=m, v=2), costs).makespan == double
    assert simulate(_single_warm_up(4, m), costs).makespan == single


def test_twice_the_interleaved_warm_up_costs_activations():
    assert _peaks(simulate(_single_warm_up(4, 8), HALF)) == [8, 7, 6, 5]
    assert _peaks(simulate(build("interleaved", p=4, m=8, v=2), HALF)) == [11, 9, 7, 5]


def _single_warm_up(p, m):
    """Interleaved v=2 with warm-up (p - 1 - r) + p instead of 2(p - 1 - r) + p."""
    double = build("interleaved", p=p, m=m, v=2)
    lines = []
    for r in range(p):
        codes = _line_of(double, r).codes
        forwards, backwards = codes[kinds_of(codes) == Kind.F], codes[kinds_of(codes) == Kind.B]
        w, order = p - 1 - r + p, list(codes[:0])
        order += list(forwards[:w])
        for i in range(len(forwards)):
            order += [*forwards[w + i : w + i + 1], backwards[i]]
        lines.append(lay(np.array(order, dtype=np.int64)))
    return Schedule.from_lines("single", double.placement, lines)


# --- A06 to A08: faults -----------------------------------------------------------------------

NAIVE_1F1B = (
    "0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
)


def test_two_neighbours_that_both_send_first_deadlock_only_when_sends_block():
    s = written("naive", ["0 1"], *NAIVE_1F1B)
    assert check(s, "tagged").ok
    assert check(s, "ordered").ok
    report = check(s, "rendezvous")
    assert report.problems[0].text == (
        "deadlock when sends block: circular wait:\n"
        "  rank 0 slot 3: 0SEND_F1 waits for 1RECV_F1 on rank 1 (the other side of the message), "
        "which is queued behind 1SEND_B0\n"
        "  rank 1 slot 3: 1SEND_B0 waits for 0RECV_B0 on rank 0 (the other side of the message), "
        "which is queued behind 0SEND_F1\n"
        "  ranks that both send first must send and receive in one slot, such as "
        "0SEND_F1+0RECV_B0; the order that insert_communication makes never blocks"
    )


def test_one_microbatch_alone_does_not_deadlock_when_sends_block():
    s = written(
        "naive", ["0 1"],
        "0: 0F0 0SEND_F0 0RECV_B0 0B0", "1: 1RECV_F0 1F0 1B0 1SEND_B0",
    )  # fmt: skip
    assert check(s, "rendezvous").ok


def test_send_and_receive_in_one_slot_remove_the_cycle():
    s = written(
        "grouped", ["0 1"],
        "0: 0F0 0SEND_F0 0F1 0SEND_F1+0RECV_B0 0B0 0RECV_B1 0B1",
        "1: 1RECV_F0 1F0 1B0 1SEND_B0+1RECV_F1 1F1 1B1 1SEND_B1",
    )  # fmt: skip
    assert check(s, "rendezvous").ok
    assert simulate(s, B2).makespan == 9


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "dualpipe", "chimera"])
@pytest.mark.parametrize("transport", ["tagged", "ordered", "rendezvous"])
def test_inserted_communication_runs_on_every_transport(name, transport):
    lowered = insert_communication(build(name, p=4, m=8))
    assert lowered.has_communication
    assert check(lowered, transport).problems == ()
    assert strip_communication(lowered) == build(name, p=4, m=8)


def test_fixed_exchange_order_between_two_ranks_crosses_messages_without_tags():
    s = written(
        "crossed", ["0 1 0 1"],
        "0: 0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 0F1 2SEND_B0+0SEND_F1 "
        "2RECV_F1 0RECV_B0 2F1 2SEND_F1 0B0 2RECV_B1 2B1 2SEND_B1 0RECV_B1 0B1",
        "1: 1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 1RECV_F1+1RECV_B0 1F1 1SEND_F1 "
        "1B0 1SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 1RECV_B1 1B1 1SEND_B1",
    )  # fmt: skip
    assert check(s, "tagged").ok
    report = check(s, "ordered")
    assert [p.text for p in report.problems] == [
        "rank 1 slot 7: message 2 from rank 0 to rank 1 is 2SEND_B0 (rank 0 slot 8), but 1RECV_F1 "
        "receives it; without tags the two are swapped silently: receive in the order of the sends"
    ]
    right = order_of(s)[1].replace("1RECV_F1+1RECV_B0", "1RECV_B0+1RECV_F1")
    assert check(written("right", ["0 1 0 1"], f"0: {order_of(s)[0]}", f"1: {right}"), "ordered").ok


def test_w_before_its_i_is_told_with_rank_and_place():
    lines = order_of(build("zb-h1", p=4, m=4))
    lines[3] = lines[3].replace("3F0 3I0", "3F0 3W0 3I0").replace("3I3 3W0", "3I3")
    s = written("bad", ["0 1 2 3"], *(f"{r}: {x}" for r, x in enumerate(lines)))
    assert [p.text for p in check(s).problems] == [
        "rank 3 slot 1: 3W0 is placed before 3I0 (slot 2), its input gradient"
    ]


def test_missing_w_is_told_with_what_would_be_lost():
    lines = order_of(build("zb-h1", p=4, m=4))
    lines[3] = lines[3].replace(" 3W3", "")
    s = written("bad", ["0 1 2 3"], *(f"{r}: {x}" for r, x in enumerate(lines)))
    assert [p.text for p in check(s).problems] == [
        "rank 3: 3W3 is missing: the weight gradients of stage 3 for microbatch 3 would be lost"
    ]


# --- A09 to A15: numbers ----------------------------------------------------------------------


def test_1f1b_of_16_ranks_and_8_microbatches_idles_65_percent():
    t = simulate(build("1f1b", p=16, m=8), Costs(F=1, B=1))
    assert (t.makespan, _idle(t)) == (46, [30] * 16)
    assert t.bubble_ratio == pytest.approx(0.6522, abs=5e-5)
    assert _peaks(t) == [8] * 9 + [7, 6, 5, 4, 3, 2, 1]


def test_dualpipe_of_16_ranks_has_its_second_path_mirrored():
    s = build("dualpipe", p=16, m=64)
    t = simulate(s, Costs(FB=3))
    assert [q.rank for q in s.placement.paths[1]] == list(range(15, -1, -1))
    assert (t.makespan, _idle(t), set(_peaks(t))) == (206, [14] * 16, {17})


@pytest.mark.parametrize(
    ("costs", "makespan", "idle"),
    [
        (Costs(FB=2), 52, [1, 2, 3, 3, 3, 3, 2, 1]),
        (Costs(F=2, FB=4), 92, [12] * 8),
        (Costs(F=1, I=1.5, W=1, FB=3.5), 78, [8] * 8),
        (Costs(F=1, I=1, W=2, FB=4), 86, [6] * 8),
    ],
)
def test_dualpipe_is_simulated_where_the_published_formula_does_not_apply(costs, makespan, idle):
    t = simulate(build("dualpipe", p=8, m=20), costs)
    assert (t.makespan, _idle(t)) == (makespan, idle)


def test_dualpipe_of_16_ranks_with_free_backward_idles_1_to_7():
    t = simulate(build("dualpipe", p=16, m=64), Costs(FB=2))
    assert t.makespan == 152
    assert _idle(t) == [*range(1, 8), 7, 7, *range(7, 0, -1)]


def test_zb_h1_bubble_is_the_same_number_in_both_conventions_of_b():
    t = simulate(build("zb-h1", p=8, m=20))
    assert (t.makespan, _idle(t), _peaks(t)) == (67, [7] * 8, [8] * 8)


def test_interleaving_beats_dualpipe_beyond_three_and_a_half_stages_a_rank():
    idle = {
        v: _idle(simulate(build("interleaved", p=8, m=24, v=v), Costs(per="rank")))[0]
        for v in (2, 3, 4)
    }
    assert idle[3] == 7
    assert idle[4] == 5.25
    assert _idle(simulate(build("dualpipe", p=8, m=24), Costs(FB=3))) == [6] * 8
    assert max(_peaks(simulate(build("interleaved", p=4, m=8, v=2)))) / 2 == 5.5


@pytest.mark.parametrize(
    ("p", "m", "latency", "hoisted", "late"),
    [(2, 4, 0, 20.0, 13.5), (2, 4, 0.25, 25.0, 15.0)],
)
def test_a_receive_that_is_placed_early_and_blocks_costs_time(p, m, latency, hoisted, late):
    costs = Costs(F=0.5, B=1, latency=latency)
    early = insert_communication(build("interleaved", p=p, m=m, v=2))
    assert simulate(early, costs, blocking=True).makespan == hoisted
    assert simulate(early, costs).makespan == late
    assert simulate(_just_in_time(early), costs, blocking=True).makespan == late
    assert simulate(_just_in_time(early), costs).makespan == late


def test_receives_hoisted_by_torch_itself_cost_time_only_when_they_block():
    early = load(DATA / "cases" / "torch_interleaved_p4_m8_v2.sched")
    for latency, blocking, free in ((0, 46.0, 28.5), (0.25, 59.5, 32.0)):
        costs = Costs(F=0.5, B=1, latency=latency)
        assert simulate(early, costs, blocking=True).makespan == blocking
        assert simulate(early, costs).makespan == free
        assert simulate(_just_in_time(early), costs, blocking=True).makespan == free


def _just_in_time(s):
    """Each RECV moved to just before the action that uses it."""
    order = {}
    for q, slots in s.order.items():
        receives = {(a.stage, a.mb, a.kind): a for (a,) in slots if a.kind.name.startswith("RECV")}
        out = []
        for slot in slots:
            (a,) = slot
            if a in receives.values():
                continue
            if a.kind in (Kind.F, Kind.B):
                kind = Kind.RECV_F if a.kind == Kind.F else Kind.RECV_B
                if (a.stage, a.mb, kind) in receives:
                    out.append((receives[a.stage, a.mb, kind],))
            out.append(slot)
        order[q] = out
    return Schedule.from_order(s.name, s.placement, order)


@pytest.mark.parametrize(("m", "makespan"), [(8, 57), (4, 33), (16, 105), (32, 201)])
def test_a_last_stage_twice_as_heavy_sets_the_pace(m, makespan):
    t = simulate(build("1f1b", p=4, m=m), Costs(F=(1, 1, 1, 2), B=(2, 2, 2, 4)))
    assert t.makespan == makespan
    assert _idle(t) == [makespan - 3 * m] * 3 + [makespan - 6 * m]


@pytest.mark.parametrize(
    ("m", "whole", "split", "break_even"),
    [
        (8, 33, 27, 0.75),
        (16, 57, 51, 0.375),
        (64, 201, 195, 0.09375),
        (512, 1545, 1539, 0.01171875),
    ],
)
def test_zero_bubble_gains_little_for_many_microbatches(m, whole, split, break_even):
    assert simulate(build("1f1b", p=4, m=m), B2).makespan == whole
    assert simulate(build("zb-h1", p=4, m=m)).makespan == split
    dearer = simulate(build("zb-h1", p=4, m=m), Costs(I=1 + break_even)).makespan
    assert dearer == pytest.approx(whole, abs=(4 - 1) * break_even + 1e-9)


def test_the_recomputed_forward_is_paid_in_i_once_or_in_i_and_w_twice():
    assert simulate(build("1f1b", p=4, m=8), Costs(F=1, B=3)).makespan == 44
    assert simulate(build("zb-h1", p=4, m=8), Costs(F=1, I=2, W=1)).makespan == 38
    assert simulate(build("zb-h1", p=4, m=8), Costs(F=1, I=2, W=2)).makespan == 46


def test_recomputation_holds_the_full_activation_between_i_and_w():
    costs = Costs(F=1, I=2, W=1, bytes=Bytes(activation=1, held=10))
    peaks = [r.peak_bytes for r in simulate(build("zb-h1", p=4, m=8), costs).ranks]
    assert peaks[3] == 40  # four W pending on the last rank, each with all its activations
    assert peaks[0] < peaks[1] < peaks[2] < peaks[3]


# --- A17, A19, A22: memory --------------------------------------------------------------------


@pytest.mark.parametrize(("m", "peaks"), [(8, [4, 3, 2, 1]), (2, [2, 2, 2, 1])])
def test_1f1b_holds_p_minus_r_activations_not_one_more(m, peaks):
    assert _peaks(simulate(build("1f1b", p=4, m=m))) == peaks


def test_an_uneven_cut_is_reported_per_stage_not_as_the_average():
    costs = Costs(bytes=Bytes(static=(150, 200, 200, 350)))
    t = simulate(build("1f1b", p=4, m=8), costs)
    assert [r.peak_bytes for r in t.ranks] == [150, 200, 200, 350]


@pytest.mark.parametrize(
    ("caps", "makespan"),
    [((4, 3, 2, 1), 33), ((3, 3, 2, 1), 48), ((3, 2, 2, 1), 51), ((2, 2, 2, 1), 69),
     ((1, 1, 1, 1), 96)],
)  # fmt: skip
def test_caps_per_rank_that_fall_along_the_pipeline_run(caps, makespan):
    t = simulate(_capped(caps, 8), B2)
    assert (t.makespan, _peaks(t)) == (makespan, list(caps))


def test_a_cap_on_rank_0_below_its_neighbours_need_deadlocks_and_says_so():
    s = _capped((2, 3, 2, 1), 8)
    problem, *behind = check(s).problems
    assert [p.text.split(": ")[1] for p in behind] == ["rank 2 slot 3", "rank 3 slot 4"]
    assert problem.text == (
        "deadlock: circular wait:\n"
        "  rank 0 slot 2: 0B0 waits for 1B0 on rank 1 (the gradient of its output), "
        "which is queued behind 1F2\n"
        "  rank 1 slot 2: 1F2 waits for 0F2 on rank 0 (its input), which is queued behind 0B0"
    )
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(s)


def _capped(caps, m):
    """1F1B with cap c on each rank: c forwards, then one backward and one forward in turn."""
    from hocket.pattern import alternate, cut, join, run

    lines = []
    for r, c in enumerate(caps):
        f, b = run(Kind.F, r, range(m)), run(Kind.B, r, range(m))
        lines.append(join(cut(f, 0, c), alternate(cut(b, 0, m - c), cut(f, c)), cut(b, m - c)))
    return Schedule.from_lines("capped", linear(len(caps), m), lines)


# --- A31, A34 (simulated part), A39 ------------------------------------------------------------


def test_frozen_first_stages_cost_no_backward():
    t = simulate(build("1f1b", p=4, m=8), Costs(F=1, B=(0, 1, 2, 2)))
    assert (t.makespan, _idle(t)) == (30, [22, 14, 6, 6])


def test_a_forward_only_order_is_complete_and_frees_at_once():
    from hocket.pattern import run

    lines = [run(Kind.F, r, range(8)) for r in range(4)]
    s = Schedule.from_lines("evaluation", linear(4, 8), lines)
    assert check(s).ok
    t = simulate(s)
    assert (t.makespan, _peaks(t)) == (11, [1] * 4)
    assert simulate(s, Costs(latency=0.5)).makespan == 12.5


def test_97472_lowered_actions_are_built_and_checked_without_a_python_loop_over_pairs():
    s = insert_communication(build("interleaved", p=32, m=256, v=2))
    assert len(s.codes) == 97280
    assert check(s, "ordered").ok


def test_costs_file_that_does_not_fit_is_one_clear_sentence(tmp_path):
    from hocket.errors import CostError

    path = tmp_path / "costs.toml"
    path.write_text("F = [1, 2]\n")
    with pytest.raises(CostError) as e:
        simulate(build("1f1b", p=4, m=4), load_costs(path))
    assert str(e.value) == (
        "F has 2 values, but the schedule has 4 stages; give one number, or one per stage"
    )


def test_queue_of_a_second_stream_is_a_place_of_its_own():
    s = written("streams", ["0 0/comm 1"], "0: 0F0 0F1 0B0 0B1", "0/comm: 1F0 1F1 1B0 1B1",
                "1: 2F0 2B0 2F1 2B1")  # fmt: skip
    assert s.queues == (Queue(0), Queue(0, "comm"), Queue(1))
    assert check(s).ok
    t = simulate(s, Costs(latency=5))
    assert t.makespan == 22
    assert [r.rank for r in t.ranks] == [0, 1]
