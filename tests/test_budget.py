"""How much code there may be: lines of each room, lines and parameters of each function.

A number here is raised only with a reason in the commit. A change that needs fewer lines lowers it.
"""

import ast
from collections import Counter
from pathlib import Path

import hocket
from common import tree

SRC = Path(hocket.__file__).parent
FILES = sorted(SRC.rglob("*.py"))

ROOMS = {
    "__init__": 70, "__main__": 10, "checker": 620, "cli": 2420, "cluster": 9000, "codes": 40,
    "comparison": 350, "compiled": 190, "costs": 1250, "demo": 560, "deps": 380, "engine": 280,
    "errors": 130, "explanation": 590, "files": 75, "formats": 260, "graph": 540,
    "interop": 3190, "ir": 690, "limits": 40, "lower": 600, "measured": 510, "page": 810,
    "pattern": 210, "planner": 2330, "recognise": 290, "render": 2080, "report": 130,
    "runtime": 5155, "schedules": 2060, "search": 4300, "simulator": 510, "tables": 140,
    "text": 460, "timeline": 745, "trace": 1330, "train": 1510, "words": 150,
}  # fmt: skip
TOTAL = 33_900  # of all of them but cluster; 29_300 once everything has moved

LINES, PARAMETERS = 60, 12
MORE_PARAMETERS = {"runtime/pipeline.py:__init__"}


def _room(path):
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def _functions():
    for path in FILES:
        name = path.relative_to(SRC).as_posix()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_compiled(node):
                yield f"{name}:{node.name}", node


def _is_compiled(function):
    """Functions that numba compiles are one loop over arrays each: long, with every array a bare
    parameter; everything else has annotations."""
    arguments = function.args.args
    bare = all(a.annotation is None and a.arg not in ("self", "cls") for a in arguments)
    return bool(arguments) and bare


def test_every_room_keeps_its_budget_of_lines():
    lines = Counter()
    for path in FILES:
        lines[_room(path)] += len(path.read_text(encoding="utf-8").splitlines())
    assert lines.keys() <= ROOMS.keys()
    over = {room: count for room, count in lines.items() if count > ROOMS[room]}
    assert not over, f"more lines than tests/test_budget.py allows: {over}"
    assert sum(lines.values()) - lines["cluster"] <= TOTAL


def test_functions_are_short_and_take_few_parameters():
    long, many = [], []
    for name, node in _functions():
        if node.end_lineno - node.lineno + 1 > LINES:
            long.append(name)
        a = node.args
        taken = len(a.posonlyargs + a.args + a.kwonlyargs) + bool(a.vararg) + bool(a.kwarg)
        if taken > PARAMETERS:
            many.append(name)
    assert long == []
    assert set(many) <= MORE_PARAMETERS


def _is_kind(node):
    return any(
        isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Name | ast.Attribute)
        and (part.value.id if isinstance(part.value, ast.Name) else part.value.attr) == "Kind"
        for part in ast.walk(node)
    )


def _by_order(parsed):
    """The lines that compare a kind with < or the like."""
    ordered = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    return [
        node.lineno
        for node in ast.walk(parsed)
        if isinstance(node, ast.Compare)
        and any(isinstance(op, ordered) for op in node.ops)
        and any(map(_is_kind, (node.left, *node.comparators)))
    ]


def test_no_kind_is_compared_by_its_number():
    found = {str(path): _by_order(tree(path)) for path in FILES}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_comparison_by_number_is_found():
    code = "a == Kind.F\nkind >= Kind.SEND_F\nx < codes[ir.Kind.B]\nKind.F <= kind < 4"
    assert _by_order(ast.parse(code)) == [2, 3, 4]
