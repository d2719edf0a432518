"""Imports go one way, and starting costs nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import hocket
from common import tree

SRC = Path(hocket.__file__).parent
# Each room may import those before it, never one after it. One name per floor: no knot is hidden.
LAYERS = [
    "errors", "limits", "words", "files", "tables", "codes", "compiled", "deps", "ir", "pattern",
    "costs", "graph", "engine", "timeline", "text", "lower", "checker", "simulator", "measured",
    "search", "schedules", "recognise", "explanation", "render", "report", "comparison", "trace",
    "page", "interop", "diagnosis", "formats", "cluster", "planner", "runtime", "megatron",
    "torchtitan", "demo", "train", "cli", "__init__", "__main__",
]  # fmt: skip


def _level(name):
    return LAYERS.index(name)


def _imports(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hocket"):
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [a.name for a in node.names]
        elif isinstance(node, ast.Import):
            yield from [a.name.split(".")[1] for a in node.names if a.name.startswith("hocket.")]


def test_no_module_imports_one_above_it():
    bad = []
    for path in SRC.rglob("*.py"):
        own = path.relative_to(SRC).parts[0].removesuffix(".py")
        for name in _imports(path):
            known = name in LAYERS
            if own not in {"__init__", name} and known and _level(name) > _level(own):
                bad.append(f"{path.relative_to(SRC)} imports {name}")
    assert bad == []


def test_every_module_has_a_layer_and_opens_with_what_it_holds():
    for path in SRC.rglob("*.py"):
        assert _level(path.relative_to(SRC).parts[0].removesuffix(".py")) >= 0
        assert ast.get_docstring(tree(path)), path


WITH_TORCH = {"runtime", "megatron", "train", "demo"}


def test_only_the_runtime_and_what_stands_on_it_import_torch():
    for path in SRC.rglob("*.py"):
        room = path.relative_to(SRC)
        if room.parts[0] in WITH_TORCH or room == Path("interop/torch/runtime.py"):
            continue
        for node in ast.walk(tree(path)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(n.split(".")[0] == "torch" for n in names), path


PUBLIC = {"_exit", "_ArgumentGroup", "_asdict", "_replace", "_fields"}  # documented all the same


def _private(tree):
    """The names with a leading underscore that a module uses and does not define."""
    used, own = set(), set(PUBLIC)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute):
            (own if isinstance(node.ctx, ast.Store) else used).add(node.attr)
    return {name for name in used - own if name[0] == "_" and name[1:2] != "_"}


def test_private_names_of_others_are_seen():
    tree = ast.parse("from a import _b, c\nself._d = c._d + c._e\nclass _F: ...\nx._F()")
    assert _private(tree) == {"_b", "_e"}


def test_the_applications_use_no_private_name_of_another_module():
    rooms = ("train", "demo", "cli", "cli.py")
    paths = [p for p in SRC.rglob("*.py") if p.relative_to(SRC).parts[0] in rooms]
    assert len(paths) > 8
    assert {p.name: names for p in paths if (names := _private(tree(p)))} == {}


HEAVY = ("torch", "numba", "ortools", "matplotlib", "rich", "pandas", "scipy")


def _loaded(code):
    code += f"\nimport sys; print([n for n in {HEAVY!r} + ('numpy',) if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def test_importing_hocket_loads_nothing_heavy_not_even_numpy():
    assert _loaded("import hocket") == "[]"


def test_help_loads_nothing_heavy():
    """Nor does the help of any verb."""
    code = "from hocket.cli import VERBS, main\nfor words in [[], *([v] for v in VERBS)]:\n"
    code += "    try: main([*words, '--help'])\n    except SystemExit: pass"
    assert _loaded(code) == "[]"


def test_simulating_loads_numpy_only():
    code = "from hocket.cli import main; main(['simulate', 'zb-h1', '-p', '8', '-m', '32'])"
    assert _loaded(code) == "['numpy']"
