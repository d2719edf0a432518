"""Costs: every way to give them, exactness, and every refusal."""

import copy
import pickle
import re
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from common import written
from hocket import Bytes, Costs, build, simulate
from hocket.costs import Cycle, costs_from, costs_toml, load_costs, split
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
    t = simulate(build("zb-h1", p=1, m=1), Costs(p2p_overhead=(10, 20)))
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
    t = simulate(build("interleaved", p=2, m=4, v=v), split(costs, v))
    assert [r.busy for r in t.ranks] in ([24, 36], [t.ranks[0].busy, t.ranks[1].busy])
    assert sum(r.busy for r in t.ranks) == 4 * (3 + 5 + 1 + 2 + 2 + 2)
    assert split(costs, v).bytes.message == 7


def test_costs_toml_reads_every_key(tmp_path):
    path = tmp_path / "costs.toml"
    path.write_text(
        'unit = "us"\nF = [80, 92]\nI = [80, 92]\nW = 40\nFB = { scale = 0.8 }\nlatency = 3\n'
        "lane = { recv = 10, send = 12 }\nbandwidth = 2.5\n[bytes]\nstatic = 5\n"
        "activation = [1, 2]\n"
        "held_between_I_and_W = 1\ngradient = 4\nmessage = 9\n"
    )
    assert load_costs(path) == Costs(
        F=(80, 92), I=(80, 92), W=40, FB={"scale": 0.8}, latency=3, p2p_overhead=(10, 12),
        bandwidth=2.5, unit="us", per=None,
        bytes=Bytes(static=5, activation=(1, 2), held=1, gradient=4, message=9),
    )  # fmt: skip


@pytest.mark.parametrize(
    "costs",
    [
        Costs(),
        Costs(F=(1, 2), I=Cycle([3, 4]), W=0, B=(5, 6), FB="max", unit='1" of µs'),
        Costs(
            F=1.5,
            FB=7,
            latency=0.125,
            p2p_overhead=(0.25, 0),
            bandwidth=10**12,
            slice=(1, 1.5),
            slowdown=2,
        ),
        Costs(FB={"scale": 0.75}, bytes=Bytes(1, (2, 3), 4, 5, 6)),
        Costs(bytes=Bytes(activation=3, held=0)),
    ],
)
def test_written_costs_are_read_back(costs, tmp_path):
    path = tmp_path / "costs.toml"
    path.write_text(costs_toml(costs, ["two lines", "of notes"]), encoding="utf-8")
    assert path.read_text(encoding="utf-8").startswith("# two lines\n# of notes\n")
    assert load_costs(path) == costs


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("F = -1", "F is -1; it must be 0 or more, and finite"),
        ("F = [1, nan]", "F is nan; it must be 0 or more, and finite"),
        ('F = "fast"', "F is 'fast'; it must be a number, or a list with one per stage"),
        ("F = true", "F is True; it must be a number, or a list with one per stage"),
        ("Q = 1",
         "unknown key 'Q'; known are B, D, F, FB, I, R, U, W, bandwidth, bytes, comm_cpu, cores, "
         "latency, microbatch, p2p_overhead, per, slice, slowdown, speed, unit"),
        ('FB = "half"', """FB is 'half'; it must be "sum", "max", a number, or { scale = x }"""),
        ("p2p_overhead = 3", "p2p_overhead is 3; it must be { recv = x, send = y }"),
        ("p2p_overhead = { left = 1 }", "unknown key of p2p_overhead 'left'; known are recv, send"),
        ("bytes = 3", "bytes is 3; it must be a table [bytes]"),
        ("[bytes]\nsize = 3", "unknown key of bytes 'size'; known are activation, gradient, "
         "held_between_I_and_W, message, static, unit"),
        ("bandwidth = 0", "bandwidth is 0; it must be above 0"),
        ("unit = 3", """unit is 3; it must be a text such as "us\""""),
        ("F = ", "not TOML: Invalid value (at end of document)"),
        ("latency = [1, 2]", "latency is (1, 2); it must be a number"),
        ("slowdown = [1, 2]", "slowdown is (1, 2); it must be a number"),
        ("slowdown = 0.5", "slowdown is 0.5; it must be 1 or more"),
        ('bandwidth = "x"', "bandwidth is 'x'; it must be a number"),
        ("bandwidth = [1, 2]", "bandwidth is (1, 2); it must be a number"),
        ("bandwidth = true", "bandwidth is True; it must be a number"),
        ("bandwidth = nan", "bandwidth is nan; it must be 0 or more, and finite"),
        ("F = { cycle = [] }",
         "F is an empty list; it must be a number, or a list with one per stage"),
        ("F = []", "F is an empty list; it must be a number, or a list with one per stage"),
        ("F = { cycle = 3 }",
         "F is {'cycle': 3}; it must be a number, or a list with one per stage"),
        ("F = [[1, 2], [3]]", "F is [1, 2]; it must be a number, or a list with one per stage"),
        ("F = 1979-05-27", "F is datetime.date(1979, 5, 27); it must be a number, or a list with "
         "one per stage"),
        ("I = [1, 2, 3]\nW = [1, 2]", "I has 3 values and W has 2, but B is left out and so their "
         "sum; give each one number, or one per stage"),
        ("slice = 2", "slice is 2; it must be a list with one factor per slice"),
        ("slice = []", "slice is (); it must be a list with one factor per slice"),
        ("slice = { cycle = [1] }", "slice is (1,); it must be a list with one factor per slice"),
        ("slice = [1, true]", "slice is True; it must be a number"),
        ("p2p_overhead = { recv = [1, 2] }", "p2p_overhead is (1, 2); it must be a number"),
        ("FB = { scale = [1] }", "FB.scale is [1]; it must be a number"),
        ("FB = { cycle = [1] }",
         """FB is (1,); it must be "sum", "max", a number, or { scale = x }"""),
        ("[bytes]\nheld_between_I_and_W = true",
         "bytes.held is True; it must be a number, or a list with one per stage"),
        ("F = 1e308", "F is 1e+308; non-zero values must lie between 1e-100 "
         "and 1e+100; use a different unit"),
        ("F = 1e300", "F is 1e+300; non-zero values must lie between 1e-100 "
         "and 1e+100; use a different unit"),
        ("bandwidth = 1e-320", "bandwidth is 1e-320; non-zero values must lie between 1e-100 "
         "and 1e+100; use a different unit"),
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


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"F": None}, "F is None; it must be a number, or a list with one per stage"),
        ({"F": (1, None)}, "F is None; it must be a number, or a list with one per stage"),
        ({"F": np.array(["x"])}, "F is 'x'; it must be a number, or a list with one per stage"),
        ({"F": np.ones((1, 2))},
         "F is [1.0, 1.0]; it must be a number, or a list with one per stage"),
        ({"F": np.True_}, "F is True; it must be a number, or a list with one per stage"),
        ({"F": 1j}, "F is 1j; it must be a number, or a list with one per stage"),
        ({"F": Decimal("nan")}, "F is Decimal('NaN'); it must be 0 or more, and finite"),
        ({"F": Decimal("-1")}, "F is Decimal('-1'); it must be 0 or more, and finite"),
        ({"F": Decimal("1e999999")}, "F is Decimal('1E+999999'); non-zero values must lie "
         "between 1e-100 and 1e+100; use a different unit"),
        ({"F": 10**400}, f"F is 1{'0' * 79}...; non-zero values must lie between 1e-100 "
         "and 1e+100; use a different unit"),
        ({"F": 10**5000}, "F is a number of thousands of digits; non-zero values must lie "
         "between 1e-100 and 1e+100; use a different unit"),
        ({"F": Fraction(1, 10**200)}, f"F is Fraction(1, 1{'0' * 67}...; non-zero values must "
         "lie between 1e-100 and 1e+100; use a different unit"),
        ({"latency": None}, "latency is None; it must be a number"),
        ({"slowdown": None}, "slowdown is None; it must be a number"),
        ({"p2p_overhead": 5}, "p2p_overhead is 5; it must be two numbers, (receive, send)"),
        ({"p2p_overhead": (1, 2, 3)},
         "p2p_overhead is (1, 2, 3); it must be two numbers, (receive, send)"),
        ({"p2p_overhead": (1, None)}, "p2p_overhead is None; it must be a number"),
        ({"slice": (1, None)}, "slice is None; it must be a number"),
        ({"bytes": {"static": 1}}, "bytes is {'static': 1}; it must be Bytes(...)"),
        ({"bytes": None}, "bytes is None; it must be Bytes(...)"),
        ({"FB": None}, """FB is None; it must be "sum", "max", a number, or { scale = x }"""),
        ({"FB": (1, 2)}, """FB is (1, 2); it must be "sum", "max", a number, or { scale = x }"""),
        ({"FB": {"scale": None}}, "FB.scale is None; it must be a number"),
        ({"unit": 5}, """unit is 5; it must be a text such as "us\""""),
        ({"unit": None}, """unit is None; it must be a text such as "us\""""),
    ],
)  # fmt: skip
def test_costs_of_other_types_are_refused_in_one_sentence(given, sentence):
    with pytest.raises(CostError) as e:
        Costs(**given)
    assert str(e.value) == sentence


def test_bytes_of_other_types_are_refused_in_one_sentence():
    with pytest.raises(CostError) as e:
        Bytes(static=None)
    assert str(e.value) == (
        "bytes.static is None; it must be a number, or a list with one per stage"
    )


def test_lists_numpy_and_decimal_numbers_become_pythons_own():
    costs = Costs(
        F=[1, np.float32(0.5)], I=np.array([1, 2]), W=Decimal("0.1"), latency=np.float64(2),
        p2p_overhead=[np.int64(1), np.uint8(2)], slice=[1, 2], FB=np.int32(3),
        slowdown=np.array([2])[0],
        bandwidth=np.float16(0.5), bytes=Bytes(static=[1, 2], message=np.int8(100)),
    )  # fmt: skip
    assert costs == Costs(
        F=(1, 0.5), I=(1, 2), W=Fraction(1, 10), latency=2.0, p2p_overhead=(1, 2),
        slice=(1, 2), FB=3, slowdown=2, bandwidth=0.5, bytes=Bytes(static=(1, 2), message=100),
    )  # fmt: skip
    numbers = [*costs.F, *costs.I, costs.W, costs.latency, *costs.p2p_overhead, costs.FB,
               costs.slowdown, costs.bandwidth, costs.bytes.message]  # fmt: skip
    assert {type(x) for x in numbers} == {int, float, Fraction}
    hash(costs)


def test_sums_of_numpy_integers_do_not_wrap():
    costs = Costs(F=np.int64(2**61), B=np.int64(2**61))
    assert simulate(build("1f1b", p=2, m=2), costs).makespan == 3 * 2.0**62
    assert Costs(I=np.int8(100), W=np.int8(100)).full_backward == 200


def test_a_cycle_stays_a_cycle():
    assert type(Costs(F=Cycle((np.int64(1), 2))).F) is Cycle


def test_costs_whose_fused_slot_is_a_share_are_hashed_copied_and_read_as_a_mapping():
    costs = Costs(FB={"scale": 1})
    assert hash(costs) == hash(Costs(FB={"scale": 1})) and costs == Costs(FB={"scale": 1})
    assert costs != Costs(FB={"scale": 2}) and costs != Costs(FB=1)
    assert isinstance(costs.FB, Mapping)
    assert costs.FB["scale"] == 1 and costs.FB == {"scale": 1} and dict(costs.FB) == {"scale": 1}
    assert "'scale': 1" in repr(costs) and "other" not in costs.FB
    assert pickle.loads(pickle.dumps(costs)) == copy.deepcopy(costs) == replace(costs) == costs


def test_a_mapping_that_changes_later_does_not_change_the_costs():
    given = {"scale": 1}
    costs = Costs(FB=given)
    given["scale"] = 2
    assert costs.FB["scale"] == 1


@pytest.mark.parametrize(
    "costs",
    [
        Costs(F=1e100, B=1e100, latency=1e100),
        Costs(F=10**100, B=1, slowdown=1e100),
        Costs(F=1e-100, I=1e-100, W=0.0),
        Costs(bandwidth=1e-100, bytes=Bytes(message=1e40)),
    ],
)
def test_the_largest_and_smallest_costs_give_finite_times(costs):
    t = simulate(build("1f1b", p=4, m=64), costs)
    assert 0 < t.makespan < float("inf")


@pytest.mark.parametrize(
    "costs",
    [
        Costs(bandwidth=1e-100, bytes=Bytes(message=1e100)),
        Costs(bandwidth=Fraction(1, 10**99), bytes=Bytes(message=10**99)),
        Costs(F=1e100, FB={"scale": 1e100}),
    ],
)
def test_costs_that_make_times_beyond_floats_are_refused(costs):
    with pytest.raises(CostError) as e:
        simulate(build("1f1b", p=2, m=2), costs)
    assert re.fullmatch(
        r"these costs make a time of \S+e\+\d+; it must be at most 1e\+150; use a different unit",
        str(e.value),
    )


def test_a_costs_file_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "costs.toml"
    path.write_bytes(b"\xef\xbb\xbfF = 3\r\n")
    assert load_costs(path) == Costs(F=3, per=None)


@pytest.mark.parametrize("text", ["F = " + "9" * 5000, "F = " + "[" * 100_000])
def test_toml_beyond_what_python_reads_is_refused(tmp_path, text):
    path = tmp_path / "costs.toml"
    path.write_text(text)
    with pytest.raises(CostError, match="not TOML: "):
        load_costs(path)


def test_plain_data_of_other_types_is_refused():
    with pytest.raises(CostError, match="unknown key 'G'"):
        costs_from({"G": 1, "F": object()})


def test_keys_that_had_other_names_are_still_read():
    former = {"lane": {"recv": 1, "send": 2}, "share": 2, "copying": 3}
    assert costs_from(former) == Costs(p2p_overhead=(1, 2), slowdown=2, comm_cpu=3, per=None)
    with pytest.raises(CostError, match=r"^share and slowdown are both given; share is the former"):
        costs_from({"share": 2, "slowdown": 2})
