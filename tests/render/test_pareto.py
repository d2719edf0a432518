from itertools import combinations
from xml.etree import ElementTree

import pytest

from hocket.render.figure import Dot, Lines, Text, text_width
from hocket.render.pareto import Point, figure, front, pareto_svg, pareto_text

POINTS = [
    Point("1f1b", 0.27, 4),
    Point("zb-h1", 0.11, 4),
    Point("zb-h2", 0.0, 7),
    Point("gpipe", 0.27, 8),
    Point("v-min", 0.2, 2),
    Point("twin", 0.11, 4),
]


def test_the_front_is_what_nothing_beats_in_both():
    assert [p.label for p in front(POINTS)] == ["v-min", "twin", "zb-h2"]
    assert front([]) == []


def test_the_terminal_has_a_letter_a_place_and_capitals_on_the_front():
    text = pareto_text(POINTS, width=60, height=11)
    lines = text.splitlines()
    assert lines[0] == (
        "bubble against microbatches in flight, fullest rank; capitals: nothing beats them in both"
    )
    assert "  B  twin, zb-h1: bubble 11.0%, microbatches in flight 4" in lines
    assert "  d  zb-h2" not in text and "  D  zb-h2: bubble 0.0%, microbatches in flight 7" in lines
    assert max(map(len, lines[1:14])) <= 60
    rows = [line for line in lines if "|" in line]
    assert len(rows) == 11 and "D" in rows[-1] and "A" in rows[3]


def test_no_points_are_told():
    assert pareto_text([]) == "no schedule to show"


@pytest.mark.parametrize("points", [POINTS, POINTS[:1], [], [Point("<&>", 0.0, 0.0)]])
def test_svg_has_a_point_a_place_with_its_name(points):
    root = ElementTree.fromstring(pareto_svg(points, memory="bytes"))
    space = "{http://www.w3.org/2000/svg}"
    circles = [e for e in root.iter(f"{space}circle")]
    texts = [e.text for e in root.iter(f"{space}text")]
    assert len(circles) == len({(p.bubble, p.memory) for p in points})
    for point in points:
        assert any(point.label in (text or "") for text in texts)


def test_labels_lie_neither_on_each_other_nor_on_points():
    crowd = [Point(f"schedule-{i}", 0.1 + i / 1000, 4) for i in range(8)]
    shapes = figure([*crowd, Point("below", 0.05, 6)]).shapes
    labels = [s for s in shapes if isinstance(s, Text) and "schedule" in s.text]
    dots = [s for s in shapes if isinstance(s, Dot)]
    assert len(labels) == 8 and len(dots) == 9
    areas = [(s.x, s.x + text_width(s.text), s.y - 9, s.y + 2) for s in labels]
    areas += [(d.x, d.x, d.y, d.y) for d in dots]
    for (x, to_x, y, to_y), (x2, to_x2, y2, to_y2) in combinations(areas, 2):
        assert x >= to_x2 or x2 >= to_x or y >= to_y2 or y2 >= to_y


def test_a_line_leads_to_a_label_that_has_no_room_beside_its_point():
    crowd = [Point(f"schedule-{i}", 0.1 + i / 1000, 4) for i in range(8)]
    shapes = figure(crowd).shapes
    dots = {(s.x, s.y) for s in shapes if isinstance(s, Dot)}
    leaders = [s.paths[0] for s in shapes if isinstance(s, Lines) and len(s.paths) == 1]
    assert len([path for path in leaders if path[0] in dots and len(path) == 2]) >= 5
