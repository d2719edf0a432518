"""`hocket view TRACE`: what was measured above what its own costs predict."""

import json
import re
import threading

import pytest

from hocket import Costs, build, dumps, simulate, write_trace
from hocket.cli import main
from hocket.interop.traces.load import load_foreign
from hocket.lower import insert_communication
from hocket.page.api import Given
from hocket.page.serve import Server

COSTS = Costs(F=(10, 12), I=(11, 9), W=(8, 7), latency=3, unit="us")
MAKESPANS = "hocket.views.map(view => view.makespan)"
LABELS = "hocket.views.map(view => view.label)"
HEADS = "[...document.querySelectorAll('#heads p')].map(line => line.textContent)"


def run(capsys, *words):
    status = main([str(w) for w in words])
    out = capsys.readouterr()
    return status, out.out, out.err


def profiled(folder, timeline):
    """Traces as torch.profiler writes them of a timeline with messages: a file per rank."""
    s = timeline.schedule
    events = [[] for _ in range(s.p)]
    for a, slot in enumerate(s.slot_of_action.tolist()):
        start, end = float(timeline.start[a]), float(timeline.end[a])
        about = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 7}
        name = f"PP:{s.slot(slot)}" + (" wait" if "RECV" in str(s.slot(slot)) else "")
        own = events[s.rank_of_queue[s.queue_of_slot[slot]]]
        own.append({**about, "name": name, "ts": start, "dur": end - start})
        if "RECV" not in name:
            own.append({**about, "cat": "cpu_op", "name": "aten::mm", "ts": start, "dur": 1})
    paths = [folder / f"trace_rank{rank}.json" for rank in range(s.p)]
    for rank, path in enumerate(paths):
        head = {"schemaVersion": 1, "distributedInfo": {"rank": rank}, "host_name": "one"}
        path.write_text(json.dumps({**head, "baseTimeNanoseconds": 0, "traceEvents": events[rank]}))
    return paths


@pytest.fixture
def traces(tmp_path):
    return profiled(tmp_path, simulate(insert_communication(build("zb-h1", p=2, m=4)), COSTS))


def test_traces_of_ranks_are_shown_above_what_their_costs_predict(show, traces, tmp_path, capsys):
    page = tmp_path / "page.html"
    status, out, _ = run(capsys, "view", *traces, "--output", page)
    assert status == 0 and out.startswith(f"page: {page} (")
    tab = show(page.read_text())
    makespan = float(simulate(build("zb-h1", p=2, m=4), COSTS).makespan)
    assert tab.run(LABELS) == ["measured", "predicted"]
    assert tab.run(MAKESPANS) == pytest.approx([makespan, makespan], rel=0.01)
    assert "this is zb-h1 -p 2 -m 4" in tab.run(HEADS)[0]
    measured, predicted = tab.run("hocket.scene.heads.map(({y}) => y)")
    assert measured < predicted
    tile = """(v => { const i = v.rows[1].works[0];
        return hocket.probe(hocket, hocket.scene.left + (v.start[i] + 1) * v.per_step *
            hocket.scene.scale, hocket.scene.rows[1].y + 2).text })(hocket.views[0])"""
    lines = tab.run(tile).splitlines()
    assert lines[:2] == ["1F0: stage 1, forward, microbatch 0", "rank 1, 13 to 25 us (12 us)"]
    assert re.fullmatch(r"predicted: 13\S* to 25\S* us \(12 us\)", lines[-1])


def test_arrows_end_where_a_message_has_arrived(show, traces, tmp_path, capsys):
    page = tmp_path / "page.html"
    run(capsys, "view", *traces, "--output", page)
    tab = show(page.read_text())
    backwards = """(() => { const found = [];
        const surface = Object.create(hocket.surface,
            {arrow: {value: (x0, y0, x1) => found.push(x1 - x0)}});
        hocket.paint(hocket, surface);
        return [found.length, found.filter(d => d < -1e-6).length] })()"""
    count, late = tab.run(backwards)
    assert count == 2 * 8 and late == 0


@pytest.mark.parametrize("ending", ["pftrace", "json", "json.gz"])
def test_a_trace_of_simulate_comes_back_exactly(capsys, tmp_path, ending):
    trace, page = tmp_path / f"t.{ending}", tmp_path / "page.html"
    timeline = simulate(build("1f1b", p=4, m=8), Costs(F=10, B=21, latency=3, unit="us"))
    write_trace(timeline, trace)
    assert run(capsys, "view", trace, "-o", page)[0] == 0
    views = data(page)["views"]
    assert [v["label"] for v in views] == ["trace", "predicted"]
    assert [v["makespan"] for v in views] == [timeline.makespan, timeline.makespan]


def data(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S).group(1))


def test_what_run_measured_is_taken_from_its_trace(capsys, tmp_path):
    trace, page = tmp_path / "run.pftrace", tmp_path / "page.html"
    schedule = build("1f1b", p=2, m=4)
    predicted = simulate(schedule, Costs(F=10, B=20, unit="us"))
    slower = simulate(schedule, Costs(F=12, B=25, unit="us"))
    write_trace({"predicted": predicted, "measured": slower}, trace)
    assert run(capsys, "view", trace, "-o", page)[0] == 0
    views = data(page)["views"]
    assert [v["label"] for v in views] == ["measured", "predicted"]
    assert [v["makespan"] for v in views] == [slower.makespan, slower.makespan]
    assert views[0]["note"] == (
        "this is 1f1b -p 2 -m 4; of several timelines measured is taken, not predicted"
    )
    costs = tmp_path / "costs.toml"
    costs.write_text('unit = "us"\nF = 10\nB = 20\n')
    run(capsys, "view", trace, "-o", page, "--costs", costs)
    assert [v["makespan"] for v in data(page)["views"]] == [slower.makespan, predicted.makespan]


def test_a_csv_of_torch_is_shown_as_the_order_it_is(capsys, tmp_path):
    path, page = tmp_path / "order.csv", tmp_path / "page.html"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    run(capsys, "view", path, "-o", page)
    (view,) = data(page)["views"]
    assert (view["label"], view["note"][:22]) == ("1f1b", "this is 1f1b -p 2 -m 2")


def test_served_the_form_has_the_costs_that_were_read_and_asks_what_if(browser, traces):
    given = Given.of_trace(load_foreign(traces))
    with Server(given) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        tab = browser.open(server.url)
        values = "[...new FormData(document.forms.form)].map(([, value]) => value)"
        schedule, p, m, *_, costs = tab.run(values)
        assert (schedule, p, m) == ("zb-h1", "2", "4")
        assert 'unit = "us"' in costs and "F = [10.0, 12.0]" in costs
        tab.run("""(form => { form.elements.schedule.value = "gpipe";
            form.dispatchEvent(new Event("input", {bubbles: true})) })(document.forms.form)""")
        tab.until("hocket.answered === 1")
        assert tab.run(LABELS) == ["measured", "gpipe, predicted"]
        wanted = [simulate(build(name, p=2, m=4), COSTS).makespan for name in ("zb-h1", "gpipe")]
        assert tab.run(MAKESPANS) == pytest.approx([float(x) for x in wanted], rel=0.01)
        assert tab.complaints == []
        tab.close()
        server.shutdown()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["view", "{trace}", "-p", 2],
         "{trace} is a file: -p, -m, -v and -o are for named schedules"),
        (["view", "1f1b", "gpipe", "-p", 2, "-m", 2],
         "view shows one schedule, and gpipe with --beside; only traces of one run can be several"),
        (["view", "1f1b", "-p", 2, "-m", 2, "--step", 1],
         "--step is for traces of torch.profiler"),
        (["view", "{trace}", "--step", 1],
         "{trace} holds one step; --step is for traces of torch.profiler"),
        (["view", "{trace}", "--beside", "gpipe"],
         "a trace is shown above what its own costs predict; leave out --beside (the served page's "
         "form has other schedules)"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_sentence(capsys, tmp_path, words, message):
    trace = tmp_path / "t.pftrace"
    write_trace(simulate(build("1f1b", p=2, m=2)), trace)
    words = [str(w).replace("{trace}", str(trace)) for w in words]
    status, _, err = run(capsys, *words)
    assert (status, err) == (2, f"hocket: {message.replace('{trace}', str(trace))}\n")


def test_an_order_that_is_no_registered_one_says_which_is_nearest(capsys, tmp_path):
    from hocket import loads

    own = loads(dumps(build("zb-h1", p=4, m=8)).replace("2W0 2F4", "2F4 2W0"))
    trace, page = tmp_path / "own.pftrace", tmp_path / "page.html"
    write_trace(simulate(own, Costs(F=10, I=12, W=7, unit="us")), trace)
    run(capsys, "view", trace, "-o", page)
    assert data(page)["views"][0]["note"].startswith("nearest is zb-h1 -p 4 -m 8 (97% alike)")
