"""The page in a real browser, opened from disk."""

import json
import re
from base64 import b64decode

import pytest
from browser import Picture

from hocket import Costs, build, dumps, simulate
from hocket.costs import Bytes
from hocket.errors import UsageError
from hocket.lower import insert_communication
from hocket.page.document import page
from hocket.render.figure import FILLS

COSTS = Costs(
    F=10, I=12, W=7, latency=3, unit="us", bytes=Bytes(static=10, activation=5, gradient=2)
)
AT = """((view, name) => {
  const a = hocket, v = a.views[view], box = a.canvas.getBoundingClientRect();
  for (let i = 0; i < v.count; i++) {
    const c = v.columns;
    if (`${c.stage[i]}${v.kinds[c.kind[i] % 16].letter}${c.mb[i]}` !== name) continue;
    const item = a.scene.rows.find(r => r.index === view && i < v.first[r.row.index + 1]);
    const x = s => a.scene.left + (s * v.per_step - a.scene.from) * a.scene.scale + box.left;
    return {x0: x(v.start[i]), x1: x(v.end[i]), y: item.y + box.top, height: item.height,
            memory: item.memory && item.memory.y + box.top};
  }
})"""


def rgb(fill):
    digits = fill[1:] if len(fill) == 7 else "".join(2 * c for c in fill[1:])
    return tuple(int(digits[i : i + 2], 16) for i in (0, 2, 4))


def at(tab, name, view=0):
    return tab.run(f"{AT}({view}, {json.dumps(name)})")


def zb(p=4, m=8, costs=COSTS):
    return simulate(build("zb-h1", p=p, m=m), costs)


def near(a, b, by=3):
    return all(abs(x - y) <= by for x, y in zip(a, b, strict=True))


def test_every_tile_has_its_kind_s_colour_at_its_rank_and_time(show):
    timeline = zb()
    tab = show(page(timeline), "show=gaps")
    seen = tab.picture()
    left, scale = tab.run("[hocket.scene.left, hocket.scene.scale]")
    box = tab.run("(({left, top}) => [left, top])(hocket.canvas.getBoundingClientRect())")
    rows = tab.run("hocket.scene.rows.map(({y, height}) => [y, height])")
    s, ticks = timeline.schedule, timeline.ticks
    for q in range(len(s.queues)):
        for i in range(s.starts[q], s.starts[q + 1]):
            start, end = (float(ticks.value(x[i])) for x in (timeline.start, timeline.end))
            x = box[0] + left + (start + 0.15 * (end - start)) * scale
            kind = s.slot(i)[0].kind.name
            assert near(seen.at(x, box[1] + rows[q][0] + 3), rgb(FILLS[kind][0])), s.slot(i)


def test_idle_is_coloured_by_its_cause(show):
    tab = show(page(zb()), "show=gaps")
    first = at(tab, "1F0")
    seen = tab.picture()
    per_unit = (first["x1"] - first["x0"]) / 10
    y = first["y"] + 3
    colours = tab.run("[hocket.colours.dependencyRgb, hocket.colours.transferRgb]")
    assert near(seen.at(first["x0"] - 5 * per_unit, y), colours[0])  # 0F0 still runs
    assert near(seen.at(first["x0"] - 1.5 * per_unit, y), colours[1])  # its message is under way
    tab.key("g")
    lane = tab.run("hocket.colours.laneRgb")
    assert near(tab.picture().at(first["x0"] - 5 * per_unit, y), lane)


GAPS = """hocket.views[0].rows.map(row => [...row.busy].flatMap(i => {
  const v = hocket.views[0];
  return [[v.free[i], v.until[i], "dependency"], [v.until[i], v.begin[i], "transfer"]]
}).concat([[row.last, hocket.views[0].steps, "end"]])
  .filter(([a, b]) => b - a > 1e-6 * hocket.views[0].steps)
  .map(([a, b, cause]) => [a * hocket.views[0].per_step, b * hocket.views[0].per_step, cause]))"""


def test_gaps_of_the_page_are_those_of_the_timeline(show):
    lane = Costs(F=10, I=12, W=7, p2p_overhead=(2, 3))
    for schedule, costs in (
        (build("zb-h1", p=4, m=8), COSTS),
        (build("zb-v", p=4, m=8), Costs(F=1.37, I=1.51, W=0.77, latency=0.213)),
        (build("dualpipe", p=4, m=8), lane),
        (build("seq1f1b", p=4, m=6), COSTS),
        (build("moe-pair", p=2, m=4), Costs()),
        (insert_communication(build("1f1b", p=4, m=8)), COSTS),
        (insert_communication(build("interleaved", p=2, m=4, v=2)), lane),
    ):
        timeline = simulate(schedule, costs)
        least = 1e-6 * float(timeline.makespan)
        wanted = [
            [
                [pytest.approx(float(g.start)), pytest.approx(float(g.end)), g.cause]
                for g in timeline.gaps(queue)
                if g.end - g.start > least
            ]
            for queue in schedule.queues
        ]
        assert show(page(timeline)).run(GAPS) == wanted, schedule


def test_hover_tells_action_times_and_what_it_waited_for(show):
    tab = show(page(zb()))
    tile = at(tab, "2F3")
    tab.move((tile["x0"] + tile["x1"]) / 2, tile["y"] + 5)
    tab.settle()
    assert tab.run("document.getElementById('hover').textContent") == (
        "2F3: stage 2, forward, microbatch 3\nrank 2, 104 to 114 us (10 us)\n"
        "waited 6 us for 1F3 on rank 1, 3 us of it for the message"
    )
    tab.move(tile["x0"] - 5, tile["y"] + 5)
    tab.settle()
    text = tab.run("document.getElementById('hover').textContent")
    assert text == (
        "rank 2 idle, 101 to 104 us (3 us)\n2F3 waits for 1F3, which is under way from 1"
    )
    tab.move(tile["x0"], tile["memory"] + 5)
    tab.settle()
    text = tab.run("document.getElementById('hover').textContent")
    assert text.startswith("rank 2 at 104 us: ") and text.endswith("bytes\npeak 32")


def test_click_lights_the_chain_of_dependencies(show):
    tab = show(page(zb()))
    tile = at(tab, "2F3")
    tab.click((tile["x0"] + tile["x1"]) / 2, tile["y"] + 5)
    chain = tab.run("""(({chain}) => [chain.before, chain.after].map(some => some.map(i => {
        const {stage, kind, mb} = hocket.views[0].columns;
        return `${stage[i]}${"FBIW"[kind[i] % 16]}${mb[i]}`})))(hocket.state.selected)""")
    assert sorted(chain[0]) == ["0F3", "1F3"]
    assert sorted(chain[1]) == [
        "0I3", "0W3", "1I3", "1W3", "2I3", "2W3", "3F3", "3I3", "3W3",
    ]  # fmt: skip
    seen = tab.picture()
    before, after, ground = tab.run(
        "['before', 'after', 'ground'].map(name => hocket.colours[name])"
    )
    for name, colour in (("1F3", before), ("3F3", after)):
        here = at(tab, name)
        assert near(seen.at(here["x0"] + 1, here["y"] + 10), rgb(colour)), name
    other = at(tab, "2F4")
    red, green, blue = seen.at(other["x0"] + 4, other["y"] + 4)
    assert sum(rgb(ground)) - (red + green + blue) < sum(rgb(ground)) - sum(rgb(FILLS["F"][0]))
    told = tab.run("document.getElementById('told').textContent")
    assert told.endswith("needs 2 actions, is needed by 9")
    assert tab.hash() == "#sel=0.2F3"
    tab.key("Escape")
    assert tab.run("hocket.state.selected") is None and tab.hash() == ""


def test_the_critical_path_is_framed_on_a_key(show):
    timeline = zb()
    tab = show(page(timeline))
    tab.key("c")
    seen, colour = tab.picture(), rgb(tab.run("hocket.colours.path"))
    steps = {str(step.slot) for step in timeline.critical_path()}
    for name in ("0F0", "3I7", "1F1", "2W7"):
        here = at(tab, name)
        assert near(seen.at(here["x0"] + 1, here["y"] + 10), colour) == (name in steps), name


def test_memory_lies_under_the_tiles_and_is_red_above_the_limit(show):
    tab = show(page(zb(), limit=20))
    tile = at(tab, "0I1")
    row = tab.run("(({y, height}) => [y, height])(hocket.scene.rows[0].memory)")
    top = tab.run("hocket.canvas.getBoundingClientRect().top")
    x = tile["x0"] + 1
    seen = tab.picture()
    level, over = (rgb(tab.run(f"hocket.colours.{name}")) for name in ("level", "over"))
    assert near(seen.at(x, top + row[0] + row[1] - 2), level)
    assert near(seen.at(x, top + row[0] + 4), over)
    tab.key("m")
    assert tab.run("hocket.scene.rows[0].memory") is None


def test_memory_levels_end_where_they_began_and_peak_as_simulated(show):
    timeline = zb()
    tab = show(page(timeline))
    levels = tab.run("hocket.views[0].memoryOfRank.map(({values}) => [...values])")
    assert [max(x) for x in levels] == timeline.peak_bytes
    assert [x[-1] for x in levels] == [10, 10, 10, 10]


def test_memory_of_a_window_starts_at_the_level_that_it_has_there(show):
    timeline = zb()
    tab = show(page(timeline), "t=150..200")
    top = tab.run("hocket.canvas.getBoundingClientRect().top")
    left, scale = tab.run("[hocket.scene.left, hocket.scene.scale]")
    y, height = tab.run("(({y, height}) => [y, height])(hocket.scene.rows[1].memory)")
    level = rgb(tab.run("hocket.colours.level"))
    per_byte = (height - 1) / max(timeline.peak_bytes)
    seen = tab.picture()
    changes, values = (x.tolist() for x in timeline.levels("bytes")[1])
    for t in (151, 163, 177, 188, 199):
        value = 10 + [v for at, v in zip(changes, values, strict=True) if at <= t][-1]
        x = 16 + left + (t - 150) * scale + 1
        assert near(seen.at(x, top + y + height - value * per_byte + 1), level), t
        assert not near(seen.at(x, top + y + height - value * per_byte - 2), level), t


def test_zoom_pan_and_fit_by_wheel_keys_and_drag(show):
    tab = show(page(zb()))
    x, y = tab.run(
        "(({left, top}) => [left + 300, top + 60])(hocket.canvas.getBoundingClientRect())"
    )
    whole = tab.run("[hocket.scene.from, hocket.scene.to]")
    under = "(hocket.scene.from + (300 - hocket.scene.left) / hocket.scene.scale)"
    time = tab.run(under)
    tab.wheel(x, y, -400)
    assert tab.run("hocket.scene.to - hocket.scene.from") < 0.6 * (whole[1] - whole[0])
    assert tab.run(under) == pytest.approx(time, rel=1e-6)
    assert re.fullmatch(r"#t=[\d.]+\.\.[\d.]+", tab.hash())
    before = tab.run("hocket.scene.from")
    tab.key("d")
    assert tab.run("hocket.scene.from") > before
    tab.key("0")
    assert tab.run("[hocket.scene.from, hocket.scene.to]") == whole


def test_two_fingers_zoom_one_moves_and_a_tap_selects(show):
    tab = show(page(zb()))
    left, top = tab.run("(({left, top}) => [left, top])(hocket.canvas.getBoundingClientRect())")
    x, y = left + 400, top + 60
    under = "(hocket.scene.from + (400 - hocket.scene.left) / hocket.scene.scale)"
    time = tab.run(under)
    spread = [[(x - d, y), (x + d, y + 5)] for d in (50, 70, 90, 100)]
    tab.touch(*spread)
    whole = simulate(build("zb-h1", p=4, m=8), COSTS).makespan
    assert tab.run("hocket.scene.to - hocket.scene.from") == pytest.approx(whole / 2, rel=0.02)
    assert tab.run(under) == pytest.approx(time, abs=whole / 50)
    assert tab.run("hocket.state.selected") is None
    start = tab.run("hocket.scene.from")
    tab.touch(*[[(x - d, y)] for d in (0, 20, 40, 80)])
    moved = (tab.run("hocket.scene.from") - start) * tab.run("hocket.scene.scale")
    assert moved == pytest.approx(80, abs=1)
    tile = at(tab, "2F3")
    tab.touch([((tile["x0"] + tile["x1"]) / 2, tile["y"] + 5)])
    assert tab.run("document.getElementById('told').textContent").startswith("2F3: stage 2")


def test_on_a_phone_the_tiles_have_the_width_and_nothing_sticks_out(show):
    tab = show(page({"a": zb(), "b": simulate(build("moe-pair", p=2, m=4), Costs(unit="us"))}))
    tab.ask(
        "Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1,
        mobile=True,
    )  # fmt: skip
    tab.until("hocket.width < 360")
    tab.settle()
    assert tab.run("hocket.scene.plot") > 240
    assert tab.run("document.documentElement.scrollWidth") <= 360
    assert tab.run("hocket.canvas.style.touchAction") == "pan-y"


def test_the_legend_names_only_what_is_there(show):
    legend = "[...document.querySelectorAll('#legend span')].map(x => x.textContent)"
    tab = show(page(simulate(build("1f1b", p=1, m=1))))
    assert tab.run(legend) == ["forward", "backward", "microbatches in flight"]
    tab = show(page(zb()))
    assert tab.run(legend)[3:6] == [
        "idle: what it needs has not ended", "idle: the message is under way",
        "idle: nothing left to do",
    ]  # fmt: skip
    tab.key("g")
    assert tab.run(legend)[3:] == ["idle", "memory"]


def test_only_the_lit_chain_s_messages_are_drawn_as_arrows(show):
    tab = show(page(zb()), "sel=0.2F3")
    arrows = """(() => { const found = [];
        const surface = Object.create(hocket.surface, {arrow: {value: x => found.push(x)}});
        hocket.paint(hocket, surface);
        return found.length })()"""
    assert tab.run(arrows) == 6  # forward through ranks 0 to 3, and back
    tab.key("Escape")
    assert tab.run(arrows) == 2 * 3 * 8


def test_the_address_holds_the_whole_view(show):
    text = page(zb())
    tab = show(text, "t=50..150&sel=0.2F3&show=path,memory&theme=dark&limit=22")
    assert tab.run("[hocket.scene.from, hocket.scene.to]") == [50, 150]
    assert tab.run("hocket.state.show") == {
        "path": True, "gaps": False, "memory": True, "arrows": False,
    }  # fmt: skip
    assert tab.run("hocket.state.limit") == 22
    assert tab.run("hocket.colours.ground") == "#0d1117"
    assert near(tab.picture().at(5, 5), rgb("#0d1117"))
    assert "2F3: stage 2" in tab.run("document.getElementById('told').textContent")
    assert set(tab.hash()[1:].split("&")) == set(
        ["t=50..150", "sel=0.2F3", "show=path,memory", "theme=dark", "limit=22"]
    )


def test_arrow_keys_walk_along_and_across_the_ranks(show):
    tab = show(page(zb()))
    name = "hocket.state.selected && document.getElementById('told').textContent.split(':')[0]"
    tab.run("hocket.canvas.focus()")
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        tab.key(key)
        seen.append(tab.run(name))
    assert seen == ["0F0", "0F1", "1F0", "1F0"]
    assert tab.run("document.getElementById('told').getAttribute('aria-live')") == "polite"


def test_more_ranks_than_fit_are_scrolled_to_and_a_selected_one_is_brought_in(show):
    tab = show(page(simulate(build("1f1b", p=120, m=4))))
    assert tab.run("hocket.scene.overflow") > 0
    inside = "hocket.scene.rows.findIndex(({y}) => y >= 22)"
    assert tab.run(inside) == 0
    tab.key("PageDown")
    first = tab.run(inside)
    assert first > 10
    tab.run("hocket.canvas.focus()")
    tab.key("ArrowRight")  # selects the first tile, of rank 0
    tab.key("ArrowRight")
    assert tab.run(inside) == 0


def test_the_list_of_keys_opens_and_closes(show):
    tab = show(page(zb()))
    hidden = "document.getElementById('keys').hidden"
    assert tab.run(hidden)
    tab.key("?")
    assert not tab.run(hidden)
    assert (
        tab.run("document.querySelector('[data-do=help]').getAttribute('aria-expanded')") == "true"
    )
    tab.key("?")
    assert tab.run(hidden)


def test_the_page_follows_the_reader_s_dark_scheme(show):
    tab = show(page(zb()))
    assert tab.run("hocket.colours.ground") == "#ffffff"
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    tab.ask("Emulation.setEmulatedMedia", features=features)
    tab.settle()
    assert tab.run("hocket.colours.ground") == "#0d1117"
    assert near(tab.picture().at(5, 5), rgb("#0d1117"))


def test_two_timelines_share_one_axis(show):
    slow = simulate(build("1f1b", p=4, m=8), Costs(F=0.01, I=0.012, W=0.007, unit="ms"))
    tab = show(page({"predicted": zb(), "measured": slow}))
    assert tab.run("hocket.scene.rows.map(({index}) => index)") == [0] * 4 + [1] * 4
    a, b = at(tab, "0F0"), at(tab, "0F0", view=1)
    assert a["x0"] == b["x0"] and b["x1"] == pytest.approx(a["x1"], abs=0.01) and b["y"] > a["y"]


def test_a_selected_action_is_framed_in_the_other_timeline_too(show):
    slow = simulate(build("zb-h1", p=4, m=8), Costs(F=12, I=12, W=7, latency=4, unit="us"))
    tab = show(page({"measured": slow, "predicted": zb()}), "sel=0.2F3")
    selected = rgb(tab.run("hocket.colours.selected"))
    seen = tab.picture()
    for view in (0, 1):
        here = at(tab, "2F3", view)
        assert near(seen.at(here["x0"] + 1, here["y"] + 10), selected, by=20), view
    other = at(tab, "2F4", 1)
    assert near(seen.at(other["x0"] + 4, other["y"] + 4), rgb(FILLS["F"][0]))  # not dimmed


def test_fused_slots_messages_and_other_streams_are_drawn(show):
    dual = simulate(build("dualpipe", p=4, m=8), COSTS)
    tab = show(page(dual))
    part = at(tab, "0F3")
    seen = tab.picture()
    assert near(seen.at(part["x0"] + 5, part["y"] + 3), rgb(FILLS["F"][0]))
    assert near(seen.at(part["x0"] + 5, part["y"] + part["height"] - 3), rgb(FILLS["B x"][0]))
    lowered = simulate(insert_communication(build("1f1b", p=2, m=4)), COSTS)
    tab = show(page(lowered))
    assert tab.run("hocket.views[0].rows.every(row => row.messages.length > 0)")
    tab = show(page(simulate(build("moe-pair", p=2, m=4))))
    assert "0/comm" in tab.run("hocket.scene.rows.map(({row}) => row.name)")
    tab = show(page(simulate(build("1f1b", p=2, m=4), Costs(p2p_overhead=(1, 2)))))
    assert tab.run("hocket.views[0].begin[0]") == 0 and tab.run("hocket.views[0].start[0]") == 1


def test_the_sched_text_is_hocket_s_own(show):
    for name in ("zb-h1", "dualpipe", "seq1f1b"):
        schedule = build(name, p=4, m=8)
        tab = show(page(simulate(schedule)))
        assert tab.run("hocket.asSched(hocket.views[0])") == dumps(schedule)


def test_svg_of_the_view_has_a_rect_for_every_tile_a_heading_and_a_legend(show):
    from xml.etree import ElementTree

    tab = show(page(zb()))
    root = ElementTree.fromstring(tab.run("hocket.asSvg(hocket)"))
    rects = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    fills = [e.get("fill") for e in rects]
    assert [fills.count(FILLS[k][0]) for k in "FIW"] == [33, 33, 33]  # 32, and in the legend
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "rank 3" in texts and texts.count("7") == 12
    assert texts[0].startswith("zb-h1  ·  p=4 m=8  ·  makespan 313 us")
    assert "idle: the message is under way" in texts
    height = float(root.get("height"))
    assert all(float(e.get("y")) + float(e.get("height")) <= height + 0.01 for e in rects)


def test_png_of_the_view_is_the_picture_between_heading_and_legend(show):
    tab = show(page(zb()))
    made = Picture(b64decode(tab.run("hocket.asCanvas(hocket).toDataURL().split(',')[1]")))
    seen = tab.picture()
    left, top, width, height = tab.run("""(({left, top, width, height}) =>
        [left, top, width, height])(hocket.canvas.getBoundingClientRect())""")
    assert made.width == width and made.height > height + 2 * 26
    for x, y in ((100, 30), (300, 36), (500, 90), (700, 200)):
        assert made.at(x, y + 26) == seen.at(x + left, y + top), (x, y)
    swatch = {made.at(13, y) for y in range(26 + int(height), made.height)}
    assert rgb(FILLS["F"][0]) in swatch


def test_the_downloaded_trace_is_the_one_that_simulate_writes(show):
    from hocket.page.document import trace_bytes

    timeline = zb()
    tab = show(page(timeline))
    size = tab.run("""(async () => {
        const {gzip} = hocket.views[0].trace;
        const raw = await (await fetch("data:;base64," + gzip)).blob();
        const all = raw.stream().pipeThrough(new DecompressionStream("gzip"));
        return (await new Response(all).arrayBuffer()).byteLength})()""")
    assert size == len(trace_bytes("zb-h1", timeline))


def test_nothing_is_loaded_from_elsewhere_and_names_are_escaped():
    schedule = build("1f1b", p=2, m=2).renamed("</script><b>&")
    text = page(simulate(schedule))
    assert "</script><b>" not in text and text.count("</script>") == 2
    assert re.findall(r'(?:src|href)="(?!data:)', text) == []
    assert "@import" not in text and "url(" not in text.replace("url(#tip)", "")


def test_a_summary_in_words_is_there_without_the_picture():
    text = page(zb())
    start = text.index('id="summary-text">')
    assert "zb-h1: p=4 m=8, makespan 313 us" in text[start:]
    assert 'aria-describedby="summary-text"' in text


def test_more_than_two_timelines_or_units_without_common_axis_are_refused():
    with pytest.raises(UsageError, match="a page shows one or two timelines, not 3"):
        page(dict.fromkeys("abc", zb()))
    other = simulate(build("1f1b", p=4, m=8), Costs())
    with pytest.raises(UsageError, match="times in us and in no unit have no common axis"):
        page({"a": zb(), "b": other})


def test_98304_tiles_are_drawn_from_a_page_under_a_megabyte(show):
    timeline = simulate(build("zb-h1", p=64, m=512), COSTS)
    text = page(timeline)
    assert len(text) < 1_000_000
    tab = show(text)
    assert tab.run("hocket.views[0].count") == 98_304
    assert tab.run("hocket.drawn.ms") < 1000
    y, x = tab.run("""(() => {const {top, left} = hocket.canvas.getBoundingClientRect();
        return [top + hocket.scene.rows[30].y + 2, left + hocket.scene.left]})()""")
    seen = tab.picture()
    assert near(seen.at(x + 2, y), tab.run("hocket.colours.dependencyRgb"), by=8)
    # rank 30's first forwards, too narrow to be told apart, are forward's colour
    begin = tab.run("hocket.views[0].start[hocket.views[0].first[30]] * hocket.scene.scale")
    assert near(seen.at(x + begin + 8, y), rgb(FILLS["F"][0]), by=8)
