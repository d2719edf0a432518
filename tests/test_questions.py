"""docs/questions.md shows what benchmarks/questions.py prints, and what it says holds."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import questions  # noqa: E402

PAGE = (ROOT / "docs" / "questions.md").read_text()
SHOWN = dict(
    re.findall(
        r"^```sh\n\$ python benchmarks/questions.py (\w+)\n```\n```text\n(.*?)^```$",
        PAGE,
        re.M | re.S,
    )
)
SLOW = {"chimera", "depth", "warmup", "jitter"}


def _numbers(text, start):
    """The numbers of the row that starts so."""
    row = next(line for line in text.splitlines() if line.startswith(start))
    return [float(x) for x in re.findall(r"(?<= )\d+\.\d+|(?<= )\d+(?= |$)", row[len(start) :])]


def test_every_question_stands_on_the_page():
    assert SHOWN.keys() == questions.QUESTIONS.keys()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in questions.QUESTIONS],
)
def test_table_on_the_page_is_what_the_command_prints(name):
    assert "\n".join(questions.QUESTIONS[name]()).rstrip() == SHOWN[name].rstrip()


def test_command_without_a_question_lists_them(capsys):
    assert questions.main([]) == 0
    assert "warmup    Why is the warm-up of interleaving twice as deep?" in capsys.readouterr().out
    assert questions.main(["nothing"]) == 2


def test_traffic_command_prints_its_table(capsys):
    assert questions.main(["traffic"]) == 0
    assert capsys.readouterr().out.rstrip() == SHOWN["traffic"].rstrip()


def test_short_warm_up_of_interleaving_costs_nothing_without_latency_and_everything_with_it():
    from hocket import Costs, build, check

    for p, m, v in ((2, 4, 2), (4, 8, 3), (8, 16, 2)):
        short, deep = (questions.interleaved(p, m, v, k) for k in (1, 2))
        assert check(short, "rendezvous").problems == ()
        assert deep == build("interleaved", p=p, m=m, v=v, group=p)
        costs = Costs(F=2 * v, B=4 * v)
        assert questions._time(short, costs) == questions._time(deep, costs)
        late = Costs(F=2 * v, B=4 * v, latency=1)
        assert questions._time(short, late) > questions._time(deep, late)


def test_dispatcher_without_jitter_makes_the_1f1b_makespan():
    from hocket import build

    p, m = 4, 8
    s = build("1f1b", p=p, m=m)
    durations = questions._durations(s, questions.THIRDS, questions.even(0), 0)
    caps = [p - r for r in range(p)]
    kinds = questions.Kind
    assert questions.dispatch(s, durations, (kinds.B, kinds.F), caps) == (m + p - 1) * 3


def test_dispatcher_never_beats_the_static_order_by_much_under_its_cap():
    from statistics import mean

    from hocket import build

    p, m, n, kinds = 4, 12, 40, questions.Kind
    s = build("1f1b", p=p, m=m)
    static = mean(questions._jittered(s, questions.THIRDS, questions.even(0.2), n))
    for prefer in ((kinds.B, kinds.F), (kinds.F, kinds.B)):
        times = [
            questions.dispatch(
                s, questions._durations(s, questions.THIRDS, questions.even(0.2), seed), prefer,
                [p - r for r in range(p)],
            )
            for seed in range(n)
        ]  # fmt: skip
        assert mean(times) > 0.99 * static


def test_gradients_of_more_pipes_cost_more_than_in_proportion():
    assert questions.exchange(1, 1, once=3) == 0
    assert questions.exchange(2, 1, once=3) == 2 * 2 * 0.5 * 3
    assert questions.exchange(4, 8, once=1) == 4 * 2 * 31 / 32


def test_what_the_page_says_of_the_orders_of_a_pair():
    rows = SHOWN["overlap"]
    assert _numbers(rows, "deepseek") == [127.6, 125.7]
    assert _numbers(rows, "fused F+B, warm-up of 1f1b (the trace)")[0] == 16545
    assert _numbers(rows, "no overlap, plain 1f1b")[0] == 11317
    assert _numbers(rows, "fused F+B, warm-up 2 (p-1-r) + 1")[0] == 9417.5


def test_what_the_page_says_of_ways_to_join_units():
    first, second = SHOWN["units"].split("a message takes")
    rows = [[float(x) for x in re.findall(r"[\d.]+(?= \()", line)] for line in first.splitlines()]
    rows = [row for row in rows if row]
    assert len(rows) == 6
    for direct, greedy, wide, doubling, halving, halves in rows:
        assert 1.01 < greedy / doubling < 1.06 and wide / doubling < 1.03
        assert direct > greedy >= wide >= doubling > halves > halving > halves / 1.03
    for line in second.splitlines()[2:]:
        greedy, doubling = [float(x) for x in re.findall(r"[\d.]+(?= \()", line)][1:4:2]
        assert 1.015 < greedy / doubling < 1.06
