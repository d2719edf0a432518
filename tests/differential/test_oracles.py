"""The oracles themselves, on inputs whose results are known from the handbook or by hand."""

import oracle_draw
import pytest
from against import explained
from oracle_events import Stopped, simulate
from oracle_memory import peaks
from oracle_optima import Search
from oracle_text import read, write
from oracle_verdicts import TRANSPORTS, verdict

ONE_F_ONE_B = """# hocket 1
name 1f1b
path 0: 0 1
0: 0F0 0F1 0B0 0B1
1: 1F0 1B0 1F1 1B1
"""
CROSSED = """# hocket 1
name crossed
path 0: 0 1
0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
"""


def test_1f1b_p2_m2_takes_9_and_holds_2_and_1():
    run = simulate(read(ONE_F_ONE_B), {})
    assert (run.makespan, run.span, peaks(run, {})) == (9, 9, [(2, 0), (1, 0)])


def test_p2p_overhead_occupies_the_queue_before_and_after_its_work():
    run = simulate(read(ONE_F_ONE_B), {"p2p_overhead": {"recv": 1, "send": 2}, "latency": 3})
    start, end = next((a, b) for action, (a, b) in run.times.items() if str(action) == "1F0")
    assert (start, end) == (1 + 1 + 2 + 3 + 1, 9)


@pytest.mark.parametrize(
    ("change", "verdicts"),
    [
        (("", ""), ["runs", "runs", "blocked"]),
        (("1RECV_F1 1F1 1B1", "1F1 1B1"), ["incomplete"] * 3),
        (("1B0 1SEND_B0 1RECV_F1 1F1", "1RECV_F1 1F1 1B0 1SEND_B0"), ["runs"] * 3),
        (("0SEND_F1 0RECV_B0", "0SEND_F1+0RECV_B0"), ["runs"] * 3),
        (("1RECV_F0 1F0", "1F0 1RECV_F0"), ["stuck"] * 3),
        (
            ("1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1", "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0"),
            ["runs", "swapped", "swapped"],
        ),
    ],
)
def test_verdicts_of_the_crossed_sends_of_the_handbook(change, verdicts):
    order = read(CROSSED.replace(*change))
    assert [verdict(order, transport) for transport in TRANSPORTS] == verdicts


def test_a_cycle_stops_the_simulation():
    cycle = ONE_F_ONE_B.replace("0F0 0F1 0B0", "0F0 0B0 0F1").replace("1B0 1F1", "1F1 1B0")
    assert verdict(read(cycle), "tagged") == "stuck"
    with pytest.raises(Stopped):
        simulate(read(cycle), {})


@pytest.mark.parametrize(("backward", "value"), [("whole", 90), ("split", 80), ("either", 78)])
def test_the_best_of_all_orders_where_whole_backwards_are_cheaper(backward, value):
    costs = {"F": 10, "I": 12, "W": 12, "B": 20}
    search = Search([["0", "1"]], [0, 0], costs, backward=backward)
    assert search.below(1000, most=1000) == value
    assert search.below(value, most=1000) is None


def test_the_best_order_of_one_in_flight_is_that_of_one_microbatch_after_the_other():
    search = Search([["0", "1"]], [0, 0, 0], {"F": 1, "B": 2}, backward="whole", most=[1, 1])
    assert search.below(1000, most=1000) == 3 * 6


def test_an_order_with_another_time_is_reported_with_its_seed_and_its_text():
    order = read(ONE_F_ONE_B)
    assert explained(7, ["start of 0F0: hocket 1, events 0"], order).startswith("seed 7\nstart of")
    assert write(order) in explained(7, [], order)


def test_broken_orders_are_broken_in_many_ways():
    import random

    rng, ends = random.Random(1), set()
    for _ in range(200):
        order = oracle_draw.order(rng, oracle_draw.placement(rng))
        ends |= {verdict(oracle_draw.broken(rng, order), t) for t in TRANSPORTS}
    assert ends == {"runs", "incomplete", "stuck", "swapped", "blocked"}
