from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.tables import format_bytes, format_time, in_one_unit, table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (33, "33"),
        (-4, "-4"),
        (10**20, "1" + "0" * 20),
        (Fraction(57, 2), "28.5"),
        (Fraction(6, 2), "3"),
        (Fraction(1, 3), "0.3333"),
        (Fraction(-2, 3), "-0.6667"),
        (Fraction(10**30, 3), "3.333e+29"),
        (Fraction(12345678, 1000), "12346"),
        (28.5, "28.5"),
        (5.0, "5"),
        (0.1 + 0.2, "0.3"),
        (1234.5678, "1235"),
        (1234.5, "1234.5"),
        (123456.789, "123457"),
        (0.000123456789, "0.0001235"),
        (1e-9, "1e-09"),
        (2.5e20, "2.5e+20"),
        (float("inf"), "inf"),
        (np.int64(7), "7"),
        (np.float64(7.25), "7.25"),
    ],
)
def test_format_time_is_short_and_exact_where_that_is_short(value, text):
    assert format_time(value) == text
    assert format_time(value, "steps") == f"{text} steps"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (33, "us", "33 us"), (7486, "ms", "7.49 s"), (157.3, "ms", "157 ms"), (0.5, "s", "500 ms"),
        (999.7, "us", "1 ms"), (Fraction(1, 3), "us", "333 ns"), (-1234.5, "us", "-1.23 ms"),
        (0, "ms", "0 ms"), (12345, "s", "12345 s"), (12345.678, "s", "12346 s"),
    ],
)  # fmt: skip
def test_a_time_in_a_real_unit_is_short_for_people(value, unit, text):
    assert format_time(value, unit) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(35.1e9, "B", "35.1 GB"), (512, "MB", "512 MB"), (2048, "MiB", "2.15 GB"), (0, "B", "0 B")],
)
def test_an_amount_of_memory_is_short_for_people(value, unit, text):
    assert format_bytes(value, unit) == text


def test_times_of_one_table_have_one_unit():
    rows = [{"name": "a", "time": 1332}, {"name": "b", "time": Fraction(25, 2)}, {"name": "c"}]
    shown, unit = in_one_unit(rows, ["time"], "us")
    assert ([row.get("time") for row in shown], unit) == (["1.332", "0.013", None], "ms")
    assert in_one_unit(rows, ["time"], "steps") == (rows, "steps")


@given(st.fractions() | st.floats(-1e300, 1e300) | st.integers())
def test_format_time_is_close_to_the_value(value):
    assert abs(float(format_time(value)) - float(value)) <= 5.1e-4 * abs(float(value))


def test_table_aligns_numbers_right_and_text_left():
    rows = [
        {"schedule": "1f1b", "makespan": "33 us", "bubble": "27.3%", "peak": 4},
        {"schedule": "interleaved", "makespan": "28.5 us", "bubble": "8%", "peak": None},
    ]
    assert table(rows, ["schedule", "makespan", "bubble", "peak"]) == (
        "schedule     makespan  bubble  peak\n"
        "1f1b            33 us   27.3%     4\n"
        "interleaved   28.5 us      8%     -"
    )


def test_table_takes_rows_of_values_and_headings_by_key():
    assert table([(1, "a", True), (Fraction(1, 3), "b c", False)], ["n", "name", "ok"]) == (
        "     n  name  ok\n     1  a     yes\n0.3333  b c   no"
    )
    assert table([{"n": 2}], {"n": "number", "x": "missing"}) == "number  missing\n     2        -"


def test_table_without_rows_is_its_headings():
    assert table([], ["a", "b"]) == "a  b"


def test_table_says_when_a_row_has_the_wrong_length():
    with pytest.raises(ValueError, match=r"^a row has 1 values, but the table has 2 columns$"):
        table([[1]], ["a", "b"])
