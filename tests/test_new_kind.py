"""A new kind is one member and one row in deps.py: everything else follows without an edit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import hocket

SRC = Path(hocket.__file__).parent

MEMBER = "    X = 12  # examination\n"
ROW = """    Kind.X: Row(
        name="examination",
        needs=(Need(((Kind.F, 0),), "its own forward"),),
        cost="F",
        effect=Effect(takes={"activation": 1}, frees={}),
        look=Look(
            (Shade("#111111", "#fff", "48;5;16;38;5;231"), Shade("#222222", "#fff", "48;5;17")),
            "Examine",
            "X#1",
        ),
    ),
"""

SESSION = '''
import io, json, sys
from pathlib import Path
import hocket
from hocket.cli import main
from hocket.deps import Kind
from hocket.lower import insert_communication
from hocket.runtime.program import Role, programs

folder = Path(sys.argv[1])
TEXT = """# hocket 1
name examines
path 0: 0 1
0: 0F0 0F1 0X0 0B0 0X1 0B1
1: 1F0 1X0 1B0 1F1 1X1 1B1
"""
file = folder / "examines.sched"
file.write_text(TEXT)

# text, check
schedule = hocket.loads(TEXT)
assert hocket.dumps(schedule) == TEXT and hocket.loads(hocket.dumps(schedule)) == schedule
assert Kind.X in schedule.kinds and not schedule.has_communication
assert hocket.check(schedule, transport="rendezvous").ok
early = hocket.loads(TEXT.replace("0F0 0F1 0X0", "0X0 0F0 0F1"))
assert "0X0" in str(hocket.check(early)), hocket.check(early)
doubled = hocket.loads(TEXT.replace("0X0", "0X0 0X0"))
assert not hocket.check(doubled).ok

# simulate, memory: by hand, F = R = 1 and B = 2 on two ranks
costs = hocket.Costs(F=1, B=2, bytes=hocket.Bytes(activation=10))
t = hocket.simulate(schedule, costs)
assert t.makespan == 11, t.makespan
assert [r.busy for r in t.ranks] == [8, 8]
assert [r.peak_bytes for r in t.ranks] == [30, 30], [r.peak_bytes for r in t.ranks]

# grid, SVG, page data, both traces
def output(*words):
    from contextlib import redirect_stdout
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(list(words)) == 0
    return out.getvalue()

grid = output("show", str(file))
assert "X0" in grid and "X examination" in grid, grid
assert "#111111" in output("show", str(file), "--format", "svg")
from hocket.page.document import page_data
kinds = page_data(t)["kinds"]
assert kinds[12]["letter"] == "X" and not kinds[12]["message"] and kinds[4]["message"]
output("simulate", str(file), "--trace", str(folder / "t.json"))
names = {event["name"] for event in json.loads((folder / "t.json").read_text())["traceEvents"]}
assert any(name.startswith("Examine 0") for name in names), names
hocket.write_trace(t, folder / "t.pftrace")
assert b"X#1" in (folder / "t.pftrace").read_bytes()

# a fake executor: the program of a rank runs every action once, in the order given
lowered = insert_communication(schedule)
done = []
table = {(Role.RUN, Kind.X): lambda stage, mb: done.append(f"{stage}X{mb}")}
for program in programs(lowered):
    for entry in program.entries:
        action = program.action(entry)
        table.get((entry.role, action.kind), lambda stage, mb: None)(action.stage, action.mb)
assert done == ["0X0", "0X1", "1X0", "1X1"], done
print("done")
'''


def test_a_new_kind_needs_one_row_and_no_other_edit(tmp_path):
    copy = tmp_path / "src" / "hocket"
    shutil.copytree(SRC, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / "deps.py").read_text()
    last_member = "    A = 11  # allocation of the room for a reload, which may start then\n"
    last_row = '        look=Look((_TAN, _TAN), "Allocation", "A#1"),\n    ),\n}\n'
    assert text.count(last_member) == text.count(last_row) == 1
    text = text.replace(last_member, last_member + MEMBER)
    text = text.replace(last_row, last_row.removesuffix("}\n") + ROW + "}\n")
    (copy / "deps.py").write_text(text)
    (tmp_path / "session.py").write_text(SESSION)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "session.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip().splitlines()[-1:]) == (0, ["done"]), done.stderr


def test_every_kind_has_a_row_and_the_head_of_deps_shows_what_the_rows_say():
    from hocket import deps

    assert list(deps.ROWS) == list(deps.Kind)
    assert deps.diagram() in deps.__doc__
