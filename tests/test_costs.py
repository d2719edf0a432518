"""Costs: every way to give them, exactness, and every refusal."""

from fractions import Fraction

import pytest

from common import written
from hocket import Bytes, Costs, build, simulate
from hocket.costs import load_costs
from hocket.errors import CostError

FUSED = ("0: 0F0 0F1+0B0 0B1",)


@pytest.mark.parametrize(
    ("fb", "middle"),
    [("sum", 12), ("max", 7), (9, 9), ({"scale": 0.5}, 6.0), (Fraction(1, 3), Fraction(1, 3))],
)
def test_a_fused_slot_takes_the_sum_the_maximum_a_number_or_a_share(fb, middle):
    s = written("fused", ["0"], *FUSED)
    assert simulate(s, Costs(F=5, I=4, W=3, FB=fb)).makespan == 5 + middle + 7


def test_b_left_out_is_i_plus_w():
    s = build("1f1b", p=2, m=1)
    assert simulate(s, Costs(F=1, I=(2, 3), W=10)).makespan == 2 + 12 + 13
    assert simulate(s, Costs(F=1, I=(2, 3), W=10, B=1)).makespan == 4


def test_bandwidth_adds_the_size_of_the_message_to_each_edge():
    s = build("1f1b", p=2, m=1)
    costs = Costs(F=1, B=1, latency=2, bandwidth=4, bytes=Bytes(message=(8, 100)))
    assert simulate(s, costs).makespan == 1 + (2 + 2) + 1 + 1 + (2 + 2) + 1


def test_a_lane_occupies_the_queue_around_every_action_but_w():
    t = simulate(build("zb-h1", p=1, m=1), Costs(lane=(10, 20)))
    assert (t.makespan, t.ranks[0].busy, t.ranks[0].transfer) == (63, 3, 60)


def test_integers_stay_integers_and_thirds_stay_thirds():
    third = Fraction(1, 3)
    t = simulate(build("1f1b", p=3, m=5), Costs(F=third, B=2 * third))
    assert t.makespan == 7 and isinstance(t.makespan, int)
    assert simulate(build("1f1b", p=3, m=6), Costs(F=third, I=third, W=0)).makespan == Fraction(
        16, 3
    )
    assert isinstance(simulate(build("1f1b", p=3, m=6), Costs(F=0.5)).makespan, float)


def test_numbers_too_large_for_exact_ticks_become_floats_not_garbage():
    t = simulate(build("1f1b", p=2, m=2), Costs(F=2**61, B=2**61))
    assert t.makespan == 3 * 2.0**62


@pytest.mark.parametrize("v", [1, 2, 3])
def test_splitting_costs_keeps_the_work_of_a_rank(v):
    costs = Costs(F=(3, 5), I=(1, 2), W=2, bytes=Bytes(activation=(6, 8), message=7))
    t = simulate(build("interleaved", p=2, m=4, v=v), costs.split(v))
    assert [r.busy for r in t.ranks] in ([24, 36], [t.ranks[0].busy, t.ranks[1].busy])
    assert sum(r.busy for r in t.ranks) == 4 * (3 + 5 + 1 + 2 + 2 + 2)
    assert costs.split(v).bytes.message == 7


def test_costs_toml_reads_every_key(tmp_path):
    path = tmp_path / "costs.toml"
    path.write_text(
        'unit = "us"\nF = [80, 92]\nI = [80, 92]\nW = 40\nFB = { scale = 0.8 }\nlatency = 3\n'
        "lane = { recv = 10, send = 12 }\nbandwidth = 2.5\n[bytes]\nstatic = 5\n"
        "activation = [1, 2]\n"
        "held_between_I_and_W = 1\ngradient = 4\nmessage = 9\n"
    )
    assert load_costs(path) == Costs(
        F=(80, 92), I=(80, 92), W=40, FB={"scale": 0.8}, latency=3, lane=(10, 12), bandwidth=2.5,
        unit="us", bytes=Bytes(static=5, activation=(1, 2), held=1, gradient=4, message=9),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("F = -1", "F is -1; it must be 0 or more, and finite"),
        ("F = [1, nan]", "F is nan; it must be 0 or more, and finite"),
        ('F = "fast"', "F is 'fast'; it must be a number, or a list with one a stage"),
        ("F = true", "F is True; it must be a number, or a list with one a stage"),
        ("Q = 1",
         "unknown key 'Q'; known are B, F, FB, I, W, bandwidth, bytes, lane, latency, share, "
         "slice, unit"),
        ('FB = "half"', """FB is 'half'; it must be "sum", "max", a number, or { scale = x }"""),
        ("lane = 3", "lane is 3; it must be { recv = x, send = y }"),
        ("lane = { left = 1 }", "unknown key of lane 'left'; known are recv, send"),
        ("bytes = 3", "bytes is 3; it must be a table [bytes]"),
        ("[bytes]\nsize = 3", "unknown key of bytes 'size'; known are activation, gradient, "
         "held_between_I_and_W, message, static"),
        ("bandwidth = 0", "bandwidth is 0; it must be above 0"),
        ("unit = 3", """unit is 3; it must be a text such as "us\""""),
        ("F = ", "not TOML: Invalid value (at end of document)"),
    ],
)  # fmt: skip
def test_every_refusal_names_the_file_the_key_and_what_it_must_be(tmp_path, text, sentence):
    path = tmp_path / "costs.toml"
    path.write_text(text)
    with pytest.raises(CostError) as e:
        load_costs(path)
    assert str(e.value) == f"{path}: {sentence}"


def test_a_costs_file_that_is_not_there(tmp_path):
    with pytest.raises(CostError, match="cannot be read: No such file or directory"):
        load_costs(tmp_path / "none.toml")
