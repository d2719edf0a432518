"""The PDF: read back by the file format's own rules, and against the SVG of the same picture."""

import re
import zlib
from xml.etree import ElementTree

import pytest
from render_examples import dualpipe, one_f_one_b

from hocket import build
from hocket.costs import Costs
from hocket.render.figure import FILLS, Figure, Lines, Text, text_width
from hocket.render.pareto import Point, pareto_pdf
from hocket.render.pdf import as_pdf, pdf
from hocket.render.svg import svg
from hocket.simulator import simulate

NUMBER = r"(-?\d+(?:\.\d+)?)"


def objects(data):
    """Every object by number, found through the cross-reference table alone."""
    start = int(re.search(rb"startxref\n(\d+)\n%%EOF\n\Z", data).group(1))
    head, table = re.match(rb"xref\n0 (\d+)\n((?:\d{10} \d{5} [fn] \n)+)", data[start:]).groups()
    places = [int(line[:10]) for line in table.split(b"\n")[1:-1]]
    assert len(places) == int(head) - 1
    out = {}
    for number, place in enumerate(places, 1):
        mark = b"%d 0 obj\n" % number
        assert data[place:].startswith(mark)
        out[number] = data[place + len(mark) : data.index(b"\nendobj\n", place)]
    return out


def content(data):
    head, _, rest = objects(data)[4].partition(b"\nstream\n")
    length = int(re.search(rb"/Length (\d+)", head).group(1))
    assert rest[length:] == b"\nendstream"
    return zlib.decompress(rest[:length]).decode("cp1252")


def boxes(text):
    """(x, y, width, height) of every rectangle by its colour, y upwards."""
    out, colour = {}, None
    for line in text.splitlines():
        if line.endswith(" rg"):
            colour = line
        elif found := re.fullmatch(" ".join([NUMBER] * 4) + " re f", line):
            out.setdefault(colour, []).append(tuple(map(float, found.groups())))
    return out


def rgb(fill):
    values = (int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return " ".join(f"{value:.3g}" for value in values) + " rg"


def words(text):
    return [re.sub(r"\\(.)", r"\1", found) for found in re.findall(r"Td \((.*)\) Tj ET", text)]


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), dualpipe()])
def test_the_page_is_the_svg_s_picture_upside_down(schedule):
    timeline = simulate(schedule, Costs(unit="us"))
    data, root = pdf(timeline), ElementTree.fromstring(svg(timeline))
    height = float(root.get("height"))
    size = f"/MediaBox[0 0 {float(root.get('width')) * 0.75:g} {height * 0.75:g}]"
    assert size.encode() in objects(data)[3]
    found = boxes(content(data))
    for css, (fill, _) in FILLS.items():
        rects = [
            tuple(float(e.get(k)) for k in ("x", "y", "width", "height"))
            for e in root.iter("{http://www.w3.org/2000/svg}rect")
            if e.get("class") == css
        ]
        mine = [(x, height - y - h, w, h) for x, y, w, h in found.get(rgb(fill), [])]
        assert mine == [pytest.approx(rect, abs=0.011) for rect in rects], css
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words(content(data)) == texts


def test_the_title_is_the_document_s_and_says_any_letter():
    timeline = simulate(one_f_one_b(1, 1))
    data = pdf(timeline, title="流水线 (a\\b) \ud800")
    assert objects(data)[7].startswith(b"<</Title<feff6d416c347ebf")
    assert words(content(data))[0] == "??? (a\\b) ?"


def test_text_is_set_from_its_end_by_the_font_s_widths():
    shapes = [Text("", 100, 20, "Will 7%", anchor) for anchor in ("start", "middle", "end")]
    places = re.findall(rf"Tf {NUMBER} ", content(as_pdf(Figure(200, 40, "x", shapes))))
    width = 11 * (944 + 222 * 3 + 278 + 556 + 889) / 1000
    assert text_width("Will 7%") == pytest.approx(width)
    assert [float(x) for x in places] == [100, round(100 - width / 2, 2), round(100 - width, 2)]


def test_equal_pictures_make_equal_files_and_large_ones_stay_small():
    timeline = simulate(build("zb-h1", p=64, m=128))
    data = pdf(timeline)
    assert data == pdf(timeline) and len(data) < 100_000
    assert content(data).count(" re\n") > 5000


def test_a_chart_has_its_points_and_its_dashed_front():
    points = [Point("a", 0.3, 2), Point("b", 0.1, 4), Point("c", 0.3, 8)]
    text = content(pareto_pdf(points))
    assert text.count(" c\n") == 4 * 3 and "[4 3] 0 d" in text
    assert {"a", "b", "c", "microbatches in flight"} <= set(words(text))


def test_lines_keep_their_corners():
    text = content(as_pdf(Figure(100, 50, "x", [Lines("axis", [[(1, 2), (3, 4), (5.5, 4)]])])))
    assert "1 48 m\n3 46 l\n5.5 46 l\nS" in text
