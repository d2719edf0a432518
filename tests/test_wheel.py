"""The wheel, built and installed into an empty environment, has all that the commands need."""

import json
import os
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

import hocket

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


def _done(*command, cwd=None):
    """A command that has ended; it does not see the folders that these tests import from."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=alone)


def _run(*command, cwd=None):
    """What a command prints. Fails with its messages."""
    done = _done(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """The folder of programs of an environment with this wheel and its two dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "empty", with_pip=False)
    bin = folder / "empty" / "bin"
    _run(sys.executable, "-m", "pip", "--python", str(bin / "python"), "install", "--quiet",
         "--no-deps", "--no-index", str(wheel))  # fmt: skip
    (site,) = (folder / "empty" / "lib").glob("python*/site-packages")
    for name in ("numpy", "msgspec"):  # linked, so that no registry is needed
        origin = Path(find_spec(name).origin).parent
        for path in (origin, origin.with_name(f"{name}.libs")):
            if path.exists():
                site.joinpath(path.name).symlink_to(path)
    return bin


def test_the_version_stands_in_one_place(commands):
    assert _run(commands / "hocket", "--version") == f"hocket {hocket.__version__}\n"
    code = "import hocket, importlib.metadata as m; print(m.version('hocket'), hocket.__file__)"
    version, file = _run(commands / "python", "-c", code).split()
    assert version == hocket.__version__
    assert Path(file).is_relative_to(commands.parent)
    assert Path(file).with_name("py.typed").exists()


def test_the_page_has_its_scripts(commands, tmp_path):
    _run(commands / "hocket", "view", "zb-v", "-p", "4", "-m", "8", "--output", "page.html",
         cwd=tmp_path)  # fmt: skip
    text = tmp_path.joinpath("page.html").read_text(encoding="utf-8")
    for path in ROOT.glob("src/hocket/page/assets/*.js"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert max(lines, key=len) in text, path.name


def test_a_plan_reads_a_built_in_profile(commands, tmp_path):
    words = ["plan", "-p", "2", "-m", "4", "--in-flight", "2", "--costs", "deepseek-v3-h800",
             "-v", "1", "--no-search", "--json"]  # fmt: skip
    found = json.loads(_run(commands / "hocket", *words, cwd=tmp_path))
    assert found["lower_bound"] <= found["value"]


def test_the_demo_compares_draws_and_traces_and_then_asks_for_torch(commands, tmp_path):
    done = _done(commands / "hocket", "demo", cwd=tmp_path)
    assert "Every schedule at p=4 m=8" in done.stdout
    assert tmp_path.joinpath("traces", "zb-h1.pftrace").exists()
    assert done.returncode == 2
    assert done.stderr == "hocket: training needs torch: pip install 'hocket[torch]'\n"
