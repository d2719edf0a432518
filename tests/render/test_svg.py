import re
from collections import Counter
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from render_examples import (
    SMALL,
    comm_queue,
    dualpipe,
    one_f_one_b,
    two_stages_a_rank,
    with_messages,
)

from hocket.costs import Costs
from hocket.ir import Kind
from hocket.render.svg import svg
from hocket.simulator import simulate

NAMESPACE = "{http://www.w3.org/2000/svg}"
KINDS = {"F", "B", "I", "W", "M"}


def parse(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def tiles(root: ElementTree.Element, tag: str = "rect") -> list[ElementTree.Element]:
    """Tiles without the swatches of the legend, which lie below the axis."""
    axis = next(e for e in root.iter(f"{NAMESPACE}path") if e.get("class") == "axis")
    bottom = float(re.match(r"M\S+ ([\d.]+)", axis.get("d", "")).group(1))  # type: ignore[union-attr]
    return [
        e
        for e in root.iter(NAMESPACE + tag)
        if set(e.get("class", "").split()) & KINDS and float(e.get("y", "0")) < bottom
    ]


def test_every_action_is_a_rect_at_its_time_with_its_number():
    timeline = simulate(one_f_one_b(3, 4))
    root = parse(svg(timeline))
    rects = tiles(root)
    assert Counter(e.get("class") for e in rects) == {"F": 12, "B": 12}
    widths = {e.get("class"): float(e.get("width", "0")) for e in rects}
    unit = widths["F"] + 1
    assert widths["B"] == 2 * unit - 1
    left = min(float(e.get("x", "0")) for e in rects)
    assert [(float(e.get("x", "0")) - left) / unit for e in rects] == timeline.start.tolist()
    numbers = Counter(e.text for e in tiles(root, "text"))
    assert numbers == {str(mb): 6 for mb in range(4)}


def test_a_fused_slot_is_layers_and_the_other_direction_is_shade_x():
    root = parse(svg(simulate(dualpipe())))
    rects = [e for e in tiles(root) if e.get("height") == "12"]
    assert Counter(e.get("class") for e in rects) == {"F": 6, "F x": 6, "B": 6, "B x": 6}
    by_x = Counter((e.get("x"), e.get("width")) for e in rects)
    assert all(n % 2 == 0 for n in by_x.values())


def test_heading_idle_peak_axis_and_legend_are_text():
    texts = [e.text for e in parse(svg(simulate(one_f_one_b(2, 2), Costs(unit="us")))).iter()]
    assert texts[1:2] == ["1f1b, p=2 m=2"]
    for text in (
        "makespan 9 us  ·  span 9 us  ·  bubble ratio 33.3%", "rank 0", "rank 1", "idle",
        "in flight", "33%", "time (us)", "forward", "backward",
    ):  # fmt: skip
        assert text in texts


def test_svg_adapts_to_a_dark_page_and_scales():
    text = svg(simulate(one_f_one_b(2, 2)))
    root = parse(text)
    assert "@media(prefers-color-scheme:dark)" in text
    assert "max-width:100%;height:auto" in text
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"


def test_every_style_rule_stays_inside_the_picture():
    style = parse(svg(simulate(dualpipe()))).find(f"{NAMESPACE}style")
    assert style is not None
    text = re.sub(r"@media\([^)]*\)\{", "", style.text or "")
    for selectors in re.findall(r"([^{}]+)\{", text):
        assert all(s.strip().startswith(".hocket") for s in selectors.split(","))


@pytest.mark.parametrize("title", ['a < b & "c" \'>', "nul \x00 and \ud800 and \uffff", "]]>"])
def test_any_title_gives_valid_xml(title):
    root = parse(svg(simulate(one_f_one_b(1, 1)), title=title))
    kept = re.sub("[\x00\ud800\uffff]", "\ufffd", title)
    assert [e.text for e in root.iter() if e.get("class") == "title"] == [kept]


def test_an_empty_title_leaves_no_heading():
    root = parse(svg(simulate(one_f_one_b(1, 1)), title=""))
    assert [e.text for e in root.iter() if e.get("class") == "title"] == []
    assert root.find(f"{NAMESPACE}title").text == "1f1b"  # type: ignore[union-attr]


def test_more_than_5000_tiles_are_one_path_for_each_rank_and_kind_without_numbers():
    timeline = simulate(one_f_one_b(16, 200))
    text = svg(timeline)
    root = parse(text)
    paths = [e for e in root.iter(f"{NAMESPACE}path") if e.get("class") in KINDS]
    assert Counter(e.get("class") for e in paths) == {"F": 16, "B": 16}
    assert tiles(root) == [] and tiles(root, "text") == []
    assert len(text) < 100_000
    drawn = [float(x) for e in paths if e.get("class") == "F"
             for x in re.findall(r"h([\d.]+)", e.get("d", ""))]  # fmt: skip
    lane = float(next(e for e in root.iter() if e.get("class") == "lane").get("width", "0"))
    assert sum(drawn) / lane == pytest.approx(16 * 200 / timeline.makespan, rel=1e-3)


def test_messages_are_thin_and_below_work():
    rects = tiles(parse(svg(simulate(with_messages(), Costs(p2p_overhead=(1, 1))))))
    assert [e.get("class") for e in rects] == ["M"] * 4 + ["F", "B", "F", "B"]


def test_a_second_queue_has_a_lane_and_the_rank_one_idle_share():
    texts = [e.text for e in parse(svg(simulate(comm_queue()))).iter(f"{NAMESPACE}text")]
    assert [x for x in texts if x and x.startswith("rank")] == [
        "rank 0", "rank 0/comm", "rank 1", "rank 1/comm",
    ]  # fmt: skip
    assert texts.count("50%") == 2


def test_nothing_that_takes_time_is_still_a_picture():
    root = parse(svg(simulate(one_f_one_b(1, 1), Costs(F=0, B=0))))
    assert tiles(root) == []


@settings(max_examples=40, deadline=None)
@given(SMALL)
def test_any_small_order_has_a_rect_for_each_action_inside_the_page(schedule):
    timeline = simulate(schedule)
    text = svg(timeline)
    root = parse(text)
    rects = tiles(root)
    assert len(rects) == len(schedule.codes)
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    for e in root.iter(f"{NAMESPACE}rect"):
        assert 0 <= float(e.get("x", "0")) <= width - float(e.get("width", "0"))
        assert 0 <= float(e.get("y", "0")) <= height - float(e.get("height", "0"))
    assert text == svg(timeline)


def test_a_page_too_narrow_for_numbers_keeps_its_tiles():
    root = parse(svg(simulate(two_stages_a_rank(4, 200))))
    assert len(tiles(root)) == 4 * 200 * 4
    assert float(root.get("width", "0")) < 1800
    assert {k.name for k in (Kind.F, Kind.B)} <= {e.get("class") for e in tiles(root)}
