"""Chimera and its relatives: units, the ways to join them, two Vs; GEMS and TeraPipe."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import COSTS, order_of, records
from hocket import Costs, build, check, dumps, loads, simulate
from hocket.errors import UsageError
from hocket.schedules import closed_form, entry, settings_of

FORWARDS = {"direct": 1, "doubling": 2, "halving": 2}
SIZES = [(2, 2), (4, 2), (4, 4), (6, 2), (6, 6), (8, 2), (8, 4), (8, 8)]
PUBLISHED = [
    r for r in records()
    if r["schedule"] == "chimera" and "order" in r and r["m"] % r["p"] == 0
]  # fmt: skip
joined = st.tuples(st.sampled_from(SIZES), st.sampled_from(sorted(FORWARDS)), st.integers(1, 3))
quick = settings(max_examples=25, deadline=None, derandomize=True)
time = st.integers(1, 30)


def _joined(case):
    (p, pipes), concat, units = case
    return build("chimera", p=p, m=units * FORWARDS[concat] * p, pipes=pipes, concat=concat)


def _renumbered(order, pipes):
    """The order with the pipes 1 and 2 of four exchanged: the authors number them so."""
    at = [0, 2, 1, 3] if pipes == 4 else range(pipes)
    return [re.sub(r"\d+(?= |$)", lambda x: str(int(x[0]) // pipes * pipes + at[int(x[0]) % pipes]),
                   line) for line in order]  # fmt: skip


@pytest.mark.parametrize("r", PUBLISHED, ids=lambda r: f"p{r['p']}-m{r['m']}")
def test_direct_concatenation_equals_the_authors_order_action_by_action(r):
    pipes = r["options"]["pipes"]
    s = build("chimera", p=r["p"], m=r["m"], pipes=pipes, concat="direct")
    assert order_of(s) == _renumbered(r["order"], pipes)
    for name, costs in COSTS.items():
        t = simulate(s, costs)
        assert t.makespan == r["expected"][name]["makespan"]
        assert [x.peak_in_flight for x in t.ranks] == r["expected"][name]["peak_in_flight"]


@quick
@given(joined, time, time)
def test_joined_units_take_their_formula_at_every_cost(case, f, b):
    s, costs = _joined(case), Costs(F=f, B=b)
    (p, pipes), concat, _ = case
    known = settings_of(entry("chimera"), p, s.m, None, {"pipes": pipes, "concat": concat})
    assert simulate(s, costs).makespan == closed_form(entry("chimera"), known, costs)


@quick
@given(st.sampled_from(SIZES), time, st.integers(0, 30), st.integers(1, 3))
def test_doubled_units_join_without_a_bubble_up_to_a_backward_of_two_forwards(size, f, more, n):
    (p, pipes), b = size, min(f + more, 2 * f)
    for concat in ("doubling", "halving"):
        s = build("chimera", p=p, m=2 * p * n, pipes=pipes, concat=concat)
        assert simulate(s, Costs(F=f, B=b)).makespan == (s.m + p // pipes - 1) * (f + b)


@pytest.mark.parametrize(("p", "pipes"), [(4, 2), (8, 2), (8, 4)])
def test_directly_joined_units_lose_more_with_every_unit_and_doubled_ones_do_not(p, pipes):
    def bubble(concat, m):
        s = build("chimera", p=p, m=m, pipes=pipes, concat=concat)
        return simulate(s, Costs(F=1, B=2)).makespan - 3 * m

    n = p // pipes
    assert [bubble("direct", k * p) for k in (1, 2, 4)] == [
        (2 * n - 2) * (1 + k) for k in (1, 2, 4)
    ]
    assert [bubble("doubling", k * p) for k in (2, 4, 8)] == [3 * (n - 1)] * 3


@quick
@given(joined, time, time, st.integers(0, 5))
def test_joined_units_hold_a_unit_at_most_and_the_outer_stages_less(case, f, b, latency):
    s = _joined(case)
    (p, pipes), concat, _ = case
    n = p // pipes
    inner = [min(r % (2 * n), 2 * n - 1 - r % (2 * n)) for r in range(p)]
    expected = [FORWARDS[concat] * p - n + 1 + x for x in inner]
    t = simulate(s, Costs(F=f, B=b, latency=latency))
    assert [r.peak_in_flight for r in t.ranks] == expected


@quick
@given(joined)
def test_joined_units_check_clean_on_every_transport_and_read_back(case):
    s = _joined(case)
    for transport in ("tagged", "ordered", "rendezvous"):
        assert check(s, transport).problems == ()
    assert loads(dumps(s)) == s


def test_every_forward_slot_of_doubling_runs_two_microbatches_back_to_back():
    s = build("chimera", p=8, m=32, pipes=4, concat="doubling")
    for line in order_of(s):
        slots = re.sub(r"(\d+)F(\d*[02468]) \1F(\d+)", r"\1P\2,\3", line)
        assert "F" not in slots
        assert all(int(b) == int(a) + 1 for a, b in re.findall(r"P(\d+),(\d+)", slots))


def test_halving_is_the_order_of_doubling():
    a, b = (build("chimera", p=4, m=16, concat=c) for c in ("doubling", "halving"))
    assert a == b


def test_greedy_is_never_worse_than_direct_in_the_same_memory():
    for p, m, pipes in ((4, 8, 2), (8, 32, 2), (16, 32, 4), (16, 64, 4)):
        greedy, direct = (
            simulate(build("chimera", p=p, m=m, pipes=pipes, concat=c)).makespan
            for c in ("greedy", "direct")
        )
        assert greedy <= direct


@pytest.mark.parametrize(
    ("options", "m", "sentence"),
    [
        ({"concat": "doubling"}, 12, "m a multiple of p for concat=direct, of 2p for doubling and"),
        ({"concat": "direct"}, 6, "m a multiple of p for concat=direct, of 2p for doubling and"),
        ({"concat": "direct", "limit": 4}, 8, "no limit unless concat=greedy"),
        ({"concat": "twice"}, 8, "concat as one of greedy, direct, doubling, halving"),
    ],
)
def test_what_units_cannot_be_joined_is_said(options, m, sentence):
    with pytest.raises(UsageError, match=sentence):
        build("chimera", p=4, m=m, **options)


# --- BitPipe: the same units over two Vs --------------------------------------------------------


# What the authors' code runs for p=4 m=8 (forward and backward lists and warm-up of their
# bitpipe_schedule.py); its first unit is figure "BitPipe-v" of their repository.
BITPIPE = """
0F0 0F2 3F1 4F1 3F3 4F3 7F0 7B0 7F2 7B2 4B1 3B1 4B3 3B3 0B0 0F4 0B2 0F6 3F5 4F5 3F7 4F7 7F4 7B4 \
7F6 7B6 4B5 3B5 4B7 3B7 0B4 0B6
1F0 2F1 1F2 2F3 5F1 6F0 5F3 6F2 6B0 5B1 6B2 5B3 2B1 1B0 2B3 1B2 1F4 2F5 1F6 2F7 5F5 6F4 5F7 6F6 \
6B4 5B5 6B6 5B7 2B5 1B4 2B7 1B6
1F1 2F0 1F3 2F2 5F0 6F1 5F2 6F3 6B1 5B0 6B3 5B2 2B0 1B1 2B2 1B3 1F5 2F4 1F7 2F6 5F4 6F5 5F6 6F7 \
6B5 5B4 6B7 5B6 2B4 1B5 2B6 1B7
0F1 0F3 3F0 4F0 3F2 4F2 7F1 7B1 7F3 7B3 4B0 3B0 4B2 3B2 0B1 0F5 0B3 0F7 3F4 4F4 3F6 4F6 7F5 7B5 \
7F7 7B7 4B4 3B4 4B6 3B6 0B5 0B7
"""


def test_bitpipe_equals_the_authors_order_action_by_action():
    assert order_of(build("bitpipe", p=4, m=8)) == BITPIPE.split("\n")[1:-1]


@quick
@given(st.integers(1, 5), st.integers(1, 3), time, time)
def test_bitpipe_has_half_of_the_bubble_of_chimera_in_the_same_memory(half, units, f, b):
    p, m = 2 * half, 2 * half * units
    bit, direct = build("bitpipe", p=p, m=m), build("chimera", p=p, m=m, concat="direct")
    t, d = simulate(bit, Costs(F=f, B=b)), simulate(direct, Costs(F=2 * f, B=2 * b))
    work = 2 * m * (f + b)
    assert 2 * (t.makespan - work) == d.makespan - work
    assert max(r.peak_in_flight for r in t.ranks) == 2 * max(r.peak_in_flight for r in d.ranks)
    assert bit.placement.weight_copies == 2


@quick
@given(st.integers(1, 8), st.integers(1, 9), time, time)
def test_gems_holds_one_microbatch_and_takes_its_formula(p, m, f, b):
    s = build("gems", p=p, m=m)
    t = simulate(s, Costs(F=f, B=b))
    assert t.makespan == m * p * max(f, b) + (m + p - 1) * min(f, b)
    assert {r.peak_in_flight for r in t.ranks} == {1}


def test_gems_bubble_ratio_nears_the_one_that_chimera_gives_it():
    t = simulate(build("gems", p=8, m=512), Costs(F=1, B=2))
    assert abs(t.bubble_ratio - 7 / 8.5) < 0.001


@quick
@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 4), time, time, st.integers(0, 5))
def test_terapipe_takes_the_time_of_gpipe_over_slices_with_all_in_flight(p, m, n, f, b, latency):
    t = simulate(build("terapipe", p=p, m=m, slices=n), Costs(F=f, B=b, latency=latency))
    assert t.makespan == (m * n + p - 1) * (f + b) + 2 * (p - 1) * latency
    assert {r.peak_in_flight for r in t.ranks} == {m * n}
