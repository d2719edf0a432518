"""Recomputation, offload and reload as actions: orders, times, memory, and what is refused."""

from fractions import Fraction

import pytest

from hocket import Bytes, Code, Costs, build, check, dumps, loads, simulate, write_trace
from hocket.errors import ScheduleError, UsageError
from hocket.explanation import explain
from hocket.interop.torch.csv import torch_order
from hocket.interop.traces.load import load_foreign
from hocket.lower import recompute

HEAD = "# hocket 1\nname x\npath 0: 0 1\n"
COSTS = Costs(F=1, B=2, D=0.5, U=0.5, bytes=Bytes(activation=10, message=2))


def order(*lines):
    return loads(HEAD + "\n".join(lines) + "\n")


def test_with_r_only_the_input_is_held_between_the_forward_and_r():
    s = order("0: 0F0 0F1 0R0 0B0 0R1 0B1", "1: 1F0 1R0 1B0 1F1 1B1")
    t = simulate(s, COSTS)
    assert t.makespan == 10
    # rank 0: F0 10, then 2; F1 12, then 4; R0 12 again, B0 gives back 10
    assert [r.peak_bytes for r in t.ranks] == [12, 10]
    _, held = t.levels("bytes")[0]
    assert held.tolist() == [10, 2, 12, 4, 12, 12, 12, 2, 10, 10, 10, 0]


def test_r_beside_its_backward_waits_for_the_gradient_and_r_ahead_does_not():
    plain = build("1f1b", p=2, m=2)
    glued, ahead = recompute(plain), recompute(plain, ahead=True)
    assert "1: 1F0 1R0+1B0 1F1 1R1+1B1" in dumps(glued)
    assert "1: 1F0 1R0 1B0 1F1 1R1 1B1" in dumps(ahead)
    assert (simulate(glued, COSTS).makespan, simulate(ahead, COSTS).makespan) == (12, 11)
    assert recompute(ahead) == ahead


def test_r_only_of_some_stages():
    s = recompute(build("interleaved", p=2, m=2, v=2), stages=[0, 1])
    assert {
        a.stage for line in s.order.values() for x in line for a in x if a.kind.name == "R"
    } == {0, 1}


def test_offloaded_activations_are_gone_until_the_reload_starts():
    s = order("0: 0F0 0F1 0B0 0B1", "0/host: 0D0 0D1 0U0 0U1", "1: 1F0 1B0 1F1 1B1")
    t = simulate(s, COSTS)
    # D0 1 to 1.5, D1 2 to 2.5, U0 2.5 to 3, U1 3 to 3.5; B0 4 to 6
    assert t.makespan == 9 and t.bubble_ratio == pytest.approx(1 - 12 / 18)
    assert t.ranks[0].peak_bytes == 20  # both are reloaded at once here
    late = order("0: 0F0 0F1 0B0 0B1", "0/host: 0D0 0D1 0U0 0D0 0U1".replace(" 0D0 0U1", " 0U1"),
                 "1: 1F0 1B0 1F1 1B1")  # fmt: skip
    assert check(late).ok


def test_a_backward_waits_for_its_reload():
    s = order("0: 0F0 0B0", "0/host: 0D0 0U0", "1: 1F0 1B0")
    slow = simulate(s, Costs(F=1, B=2, D=3, U=4))
    assert slow.makespan == 10  # F 1, D to 4, U to 8, B to 10


@pytest.mark.parametrize(
    ("lines", "action", "code"),
    [
        (["0: 0F0 0R0 0B0", "0/host: 0D0 0U0", "1: 1F0 1B0"], "0R0", Code.UNUSED),
        (["0: 0F0 0B0", "0/host: 0D0", "1: 1F0 1B0"], "0D0", Code.UNUSED),
        (["0: 0F0 0B0 0R0", "1: 1F0 1B0"], "0B0", Code.OUT_OF_ORDER),
        (["0: 0F0 0R0", "1: 1F0"], "0R0", Code.UNUSED),
        (["0: 0F0 0B0", "1: 1F0 1B0 0R0"], "0R0", Code.MISPLACED),
        (["0: 0F0 0B0", "1: 1F0 1B0", "1/host: 0D0 0U0"], "0D0", Code.MISPLACED),
        (["0: 0F0 0B0", "0/host: 0U0 0D0", "1: 1F0 1B0"], "0U0", Code.OUT_OF_ORDER),
    ],
)
def test_what_is_wrong_with_them_is_reported_with_its_place(lines, action, code):
    found = {(p.action, p.code) for p in check(order(*lines)).problems}
    assert (action, code) in found, found


def test_a_reload_without_an_offload_is_refused():
    report = check(order("0: 0F0 0B0", "0/host: 0U0", "1: 1F0 1B0"))
    assert "rank 0: 0D0 is missing, but 0U0 needs it" in str(report)


# Merak's own classes, run by hand: p, m, variant, makespan at F = R = 1, B = 2.
@pytest.mark.parametrize(
    ("p", "m", "variant", "makespan"),
    [
        (4, 8, "checkpointed", 44), (4, 8, "pre-recompute", 41), (4, 8, "last-no-recompute", 39),
        (4, 8, "shifted", 38), (3, 6, "pre-recompute", 30), (3, 6, "last-no-recompute", 28),
        (3, 6, "shifted", 27),
    ],
)  # fmt: skip
def test_merak_takes_the_time_of_its_own_code(p, m, variant, makespan):
    s = build("merak", p=p, m=m, variant=variant)
    assert simulate(s, Costs(F=1, B=2, R=1)).makespan == makespan


def test_torch_s_csv_has_no_letter_for_them():
    with pytest.raises(ScheduleError, match=r"merak has the action R \(recomputation\), which"):
        torch_order(build("merak", p=2, m=2))


def test_merak_refuses_another_variant():
    with pytest.raises(UsageError, match="merak needs variant of checkpointed, "):
        build("merak", p=2, m=2, variant="late")


@pytest.mark.parametrize("ending", ["json", "pftrace"])
@pytest.mark.parametrize("variant", ["checkpointed", "last-no-recompute", "shifted"])
def test_a_trace_of_recomputations_gives_back_costs_that_predict_it(tmp_path, ending, variant):
    costs = Costs(F=(3, 4, 5), B=(7, 8, 9), R=(3, 4, 5), unit="us")
    t = simulate(build("merak", p=3, m=4, variant=variant), costs)
    write_trace(t, tmp_path / f"t.{ending}")
    loaded = load_foreign([tmp_path / f"t.{ending}"])
    assert loaded.schedule.order == t.schedule.order
    assert simulate(loaded.schedule, loaded.costs).makespan == t.makespan
    assert (loaded.costs.F, loaded.costs.B) == (costs.F, costs.B)


def test_times_of_offloads_are_read_back_too(tmp_path):
    s = order("0: 0F0 0F1 0B0 0B1", "0/host: 0D0 0D1 0U0 0U1", "1: 1F0 1B0 1F1 1B1")
    write_trace(simulate(s, Costs(F=1, B=2, D=3, U=4, unit="us")), tmp_path / "t.json")
    costs = load_foreign([tmp_path / "t.json"]).costs
    assert (costs.D[0], costs.U[0], costs.R) == (3, 4, None)


def test_a_shorter_forward_is_no_shorter_recomputation():
    t = simulate(build("merak", p=4, m=8), Costs(F=1, B=2, unit="us"))
    gains = {gain.change: gain.gain for gain in explain(t, Costs(F=1, B=2), others=False).gains}
    apart = simulate(t.schedule, Costs(F=Fraction(9, 10), B=2, R=1)).makespan
    assert gains["every F 10% shorter"] == t.makespan - apart
    assert gains["every R 10% shorter"] > 0


def test_recompute_refuses_a_stage_that_does_not_exist():
    with pytest.raises(ScheduleError, match="1f1b has no stage 2; its stages are 0 to 1"):
        recompute(build("1f1b", p=2, m=2), stages=[0, 2])
