import re
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from render_examples import (
    SMALL,
    comm_queue,
    dualpipe,
    one_f_one_b,
    split_backward,
    two_stages_a_rank,
    with_messages,
)

from hocket.costs import Costs, Ticks
from hocket.ir import Kind, linear
from hocket.ir import Schedule as ScheduleType
from hocket.pattern import run
from hocket.render.grid import grid
from hocket.simulator import simulate

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def rows(text: str, side: str = "│") -> list[str]:
    """What stands between the sides, line by line."""
    return [line.split(side)[1] for line in text.splitlines() if line.count(side) == 2]


def test_grid_of_1f1b_p4_m4_is_the_picture_of_the_papers():
    assert (
        grid(simulate(one_f_one_b(4, 4), Costs(unit="us")), width=200)
        == """\
1f1b  p=4 m=4  makespan 21 us  span 21 us  bubble ratio 42.9%
                                                    idle, peak in flight
0│F0 F1 F2 F3 ··················B0    ···B1    ···B2    ···B3    │ 43% 4
1│···F0 F1 F2 ············B0    F3 B1    ···B2    ···B3    ······│ 43% 3
2│······F0 F1 ······B0    F2 B1    F3 B2    ···B3    ············│ 43% 2
3│·········F0 B0    F1 B1    F2 B2    F3 B3    ··················│ 43% 1
 └┬──────────────┬──────────────┬──────────────┬──────────────┬──┘
  0              5              10             15             20
F forward  B backward  · idle
3 columns are 1 us"""
    )


def test_grid_of_fused_slots_shows_both_microbatches_and_both_directions():
    assert (
        grid(simulate(dualpipe()), width=100)
        == """\
dualpipe  p=4 m=8  makespan 26  span 26  bubble ratio 7.7%        idle, peak in flight
0│F0 F1 F2 f4 i4 w4 f5 F3+b5    ···f6+B0    b6    ···f7+B1    b7    I2 W2 I3 W3 │ 8% 5
1│···F0 f4 F1 f5 F2 b4    f6+B0    F3+b5    f7+B1    b6    B2    ···i7 I3 w7 W3 │ 8% 5
2│···f4 F0 f5 F1 f6 B0    F2+b4    f7+B1    F3+b5    B2    b6    ···I3 i7 W3 w7 │ 8% 5
3│f4 f5 f6 F0 I0 W0 F1 f7+B1    ···F2+b4    B2    ···F3+b5    B3    i6 w6 i7 w7 │ 8% 5
 └┬─────┬─────┬─────┬─────┬─────┬─────┬─────┬─────┬─────┬─────┬─────┬─────┬─────┘
  0     2     4     6     8     10    12    14    16    18    20    22    24    26
F forward  B backward  I input gradient  W weight gradient  + run together  · idle
lower case is a rank's second stage
3 columns are 1 time unit"""
    )


def test_narrow_grid_writes_numbers_downwards_in_one_column_a_unit():
    assert (
        grid(simulate(one_f_one_b(2, 11)), width=50, ascii=True)
        == """\
1f1b  p=2 m=11  makespan 36  span 36
bubble ratio 8.3%       idle, peak in flight
0|FF..B FB FB FB FB FB FB FB FB FB .B | 8% 2
 |01  0 21 32 43 54 65 76 87 98 19  1 |
 |                              0   0 |
1|.FB FB FB FB FB FB FB FB FB FB FB ..| 8% 1
 | 00 11 22 33 44 55 66 77 88 99 11   |
 |                               00   |
 ++---------+---------+---------+-----+
  0         10        20        30
F forward  B backward  . idle
1 column is 1 time unit; numbers read downwards"""
    )


def test_grid_puts_numbers_under_letters_before_it_writes_them_downwards():
    timeline = simulate(one_f_one_b(8, 16))
    wide, narrow = grid(timeline, width=200), grid(timeline, width=80)
    assert [row[:66] for row in rows(wide)[:2]] == [
        "F F F F F F F F ····························B   F B   F B   F B   ",
        "0 1 2 3 4 5 6 7                             0   8 1   9 2   103   ",
    ]
    assert [len(x) for x in rows(narrow)] == [69] * 24
    assert rows(narrow)[:3] == [
        "FFFFFFFF··············B FB FB FB FB FB FB FB FB ·B ·B ·B ·B ·B ·B ·B ",
        "01234567              0 81 92 13 14 15 16 17 18  9  1  1  1  1  1  1 ",
        "                              0  1  2  3  4  5      0  1  2  3  4  5 ",
    ]


def test_messages_and_their_lanes_are_dashes():
    text = grid(simulate(with_messages(), Costs(p2p_overhead=(1, 1))), width=80)
    assert rows(text) == ["F0 S0-···············R0-B0    ", "······R0-F0 B0    S0-·········"]
    assert "- message (S send, R receive)" in text


def test_a_second_queue_of_a_rank_has_its_own_row():
    text = grid(simulate(comm_queue()), width=80)
    starts = [line.split("│")[0] for line in text.splitlines() if "│" in line]
    assert starts == ["     0", "0/comm", "     1", "1/comm"]
    assert [line.split("│")[2] for line in text.splitlines() if "│" in line] == [
        " 50% 3", "", " 50% 3", "",
    ]  # fmt: skip


@settings(deadline=None)
@given(SMALL)
def test_every_tile_stands_at_its_time_with_kind_and_microbatch(schedule):
    timeline = simulate(schedule)
    text = grid(timeline, width=20_000)
    columns, units = re.search(r"(\d+) columns are (\d+) time unit", text).groups()  # type: ignore[union-attr]
    scale = int(columns) / int(units)
    lines = rows(text)
    for slot in range(schedule.n_slots):
        label = "+".join(f"{a.kind.name}{a.mb}" for a in schedule.slot(slot))
        at = round(timeline.slot_start[slot] * scale)
        line = lines[schedule.queue_of_slot[slot]]
        assert line[at : at + len(label) + 1].upper() == label + " "
        end = round(timeline.slot_end[slot] * scale)
        assert line[at + len(label) : end].isspace()
    drawn = sum(re.split(r"[·]+", line) != [""] for line in lines)
    assert drawn == len(schedule.queues)


@settings(max_examples=150, deadline=None)
@given(SMALL, st.integers(20, 240), st.booleans(), st.booleans())
def test_lines_fit_the_width_rows_are_equally_long_and_no_spaces_trail(
    schedule, width, colour, ascii
):
    timeline = simulate(schedule)
    text = grid(timeline, width=width, colour=colour, ascii=ascii)
    plain = ANSI.sub("", text)
    assert all(len(line) <= width for line in plain.splitlines())
    assert all(line == line.rstrip() for line in plain.splitlines())
    assert len({len(row) for row in rows(plain, "|" if ascii else "│")}) == 1
    assert ("\x1b" in text) == colour
    assert ascii is False or text.isascii()
    assert text == grid(timeline, width=width, colour=colour, ascii=ascii)


def test_below_40_columns_the_tiles_get_the_room_of_the_shares_and_peaks():
    text = grid(simulate(one_f_one_b(2, 4)), width=24)
    assert text.splitlines()[:7] == [
        "1f1b  p=2 m=4",
        "makespan 15  span 15",
        "bubble ratio 20.0%",
        "0│FF··B FB FB ·B │",
        " │01  0 21 32  3 │",
        "1│·FB FB FB FB ··│",
        " │ 00 11 22 33   │",
    ]


def test_in_the_narrowest_terminal_no_line_is_longer_than_20_columns(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "7")
    for schedule in (dualpipe(), one_f_one_b(100, 2)):
        lines = grid(simulate(schedule)).splitlines()
        assert max(map(len, lines)) == 20


@settings(deadline=None)
@given(SMALL, st.integers(60, 240))
def test_unsampled_rows_show_every_microbatch_read_across_or_downwards(schedule, width):
    text = grid(simulate(schedule), width=width)
    if "one of the kinds" in " ".join(text.split()):
        return
    lines = rows(text)
    n = len(schedule.queues)
    height = len(lines) // n
    for q in range(n):
        block = lines[q * height : (q + 1) * height]
        if height == 1:
            found = {int(x) for x in re.findall(r"[FBIWfbiw](\d+)", block[0])}
        elif height == 2 and schedule.m > 10:
            ends = [i for i, c in enumerate(block[0]) if c in "FBIWfbiw·+"] + [len(block[0])]
            spans = [block[1][a:b] for a, b in pairwise(ends)]
            found = {int(x) for x in spans if x.strip()}
        else:
            read = ("".join(column).strip() for column in zip(*block[1:], strict=True))
            found = {int(x) for x in read if x}
        assert found == set(range(schedule.m))


def test_a_grid_in_which_most_numbers_have_room_says_how_many_have_not():
    costs = Costs(F=(5, 100, 100, 100), I=100, W=100)
    text = grid(simulate(one_f_one_b(4, 3), costs), width=70)
    assert "1 number has no room; 2 slots are too short" in " ".join(text.split())


def test_sampling_keeps_the_share_of_every_kind():
    timeline = simulate(one_f_one_b(8, 64))
    text = grid(timeline, width=100)
    assert "1 column is 2.341 time units" in text
    for row in rows(text)[::2]:
        assert abs(row.count("F") - 64 / 213 * len(row)) <= 2
        assert abs(row.count("B") - 128 / 213 * len(row)) <= 2


@pytest.mark.parametrize("costs", [Costs(), Costs(F=3, I=3, W=3)])
def test_sampling_at_a_multiple_of_the_period_does_not_hide_forwards(costs):
    # A column of exactly one F and one B would show the same kind in every column.
    text = grid(simulate(one_f_one_b(2, 100), costs), width=109)
    assert all(20 < row.count("F") < 50 for row in rows(text)[::2])


def test_more_than_64_queues_are_grouped():
    lines = [run(Kind.F, r, range(3)) for r in range(130)]
    timeline = simulate(ScheduleType.from_lines("forward", linear(130, 3), lines))
    text = grid(timeline, width=120)
    assert len(rows(text)) == 44
    assert text.splitlines()[1].startswith("0-2    │·FF·")
    assert text.replace("\n", " ").endswith("a row is 3 queues")


def test_p64_m512_has_a_row_for_each_rank_and_fits():
    text = grid(simulate(one_f_one_b(64, 512)), width=200)
    assert len(rows(text)) == 64
    assert max(map(len, text.splitlines())) <= 200


def test_times_that_share_no_unit_are_rounded_to_columns_and_the_legend_says_about():
    costs = Costs(F=(80.5, 92.25, 76.125), I=90, W=77, latency=3.0625, unit="us")
    text = grid(simulate(one_f_one_b(3, 3), costs), width=200)
    assert "1 column is about " in text
    assert re.search(r"1 column is about [\d.]+ us$", text)
    assert all(f"F{mb}" in row and f"B{mb}" in row for row in rows(text) for mb in range(3))


def test_fractions_of_a_unit_are_named_exactly():
    text = grid(simulate(one_f_one_b(2, 2), Costs(F=Fraction(1, 2), I=1, W=1)), width=200)
    assert text.endswith("3 columns are 0.5 time units")


def test_a_measured_timeline_with_jitter_is_drawn_and_called_measured():
    timeline = simulate(one_f_one_b(4, 8), Costs(F=100, I=100, W=100, unit="us"))
    rng = np.random.default_rng(0)
    start = timeline.start + 1e6 + rng.random(len(timeline.start))
    end = timeline.end + 1e6 - rng.random(len(timeline.end))
    measured = replace(
        timeline, start=start, end=end, held=None, ticks=Ticks(1, exact=False), measured=True
    )
    text = grid(measured, width=200)
    assert text.startswith("1f1b (measured)  p=4 m=8")
    assert "1 column is about" in text
    assert all(f"F{mb}" in row for row in rows(text) for mb in range(8))


def test_work_without_time_is_counted_not_drawn():
    text = grid(simulate(split_backward(2, 3), Costs(W=0)), width=200)
    assert "W" not in "".join(rows(text))
    assert "6 slots are too short for a column and not drawn" in text


def test_a_schedule_in_which_nothing_takes_time_is_drawn_empty():
    text = grid(simulate(one_f_one_b(1, 1), Costs(F=0, B=0)), width=80)
    assert rows(text) == ["········"]
    assert text.endswith("nothing takes time")


def test_colour_paints_each_half_of_a_fused_tile():
    text = grid(simulate(dualpipe()), width=100, colour=True)
    assert "\x1b[48;5;25;38;5;231m3 +\x1b[0m\x1b[48;5;114;38;5;16m5  \x1b[0m" in text


def test_grid_without_width_is_200_wide_when_piped(capsys):
    timeline = simulate(two_stages_a_rank(4, 9))
    assert grid(timeline) == grid(timeline, width=200)


def test_messages_alone_take_time_and_the_picture_ends():
    timeline = simulate(one_f_one_b(2, 2), Costs(F=0, B=0, latency=1, unit="s"))
    text = grid(timeline, width=60)
    assert all(set(row) == {"·"} for row in rows(text))
    assert "makespan 2 s" in text
