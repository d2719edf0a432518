"""Users of the package get its types: `py.typed` is there, and a checker sees through `hocket`."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hocket

HERE = Path(__file__).parent
TY = Path(sys.executable).with_name("ty")

pytestmark = pytest.mark.skipif(not TY.exists(), reason="ty is not in this environment")


def _ty(name, tmp_path):
    """Exit status and (line, rule) of each finding, where the package is installed, not edited."""
    site = tmp_path / "site"
    shutil.copytree(hocket.__path__[0], site / "hocket", ignore=shutil.ignore_patterns("*.pyc"))
    file = tmp_path / name
    shutil.copy(HERE / name, file)
    done = subprocess.run(
        [TY, "check", "--extra-search-path", site, "--python", sys.prefix, "--output-format",
         "concise", name],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    found = re.findall(rf"^{name}:(\d+):\d+: \w+\[([\w-]+)\]", done.stdout, re.M)
    return done.returncode, {int(line): rule for line, rule in found}, done.stdout


def test_a_users_script_has_no_type_error(tmp_path):
    assert Path(hocket.__file__).with_name("py.typed").exists()
    status, found, text = _ty("user.py", tmp_path)
    assert (status, found) == (0, {}), text


def test_mistakes_of_a_user_are_found(tmp_path):
    lines = (HERE / "wrong.py").read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    status, found, text = _ty("wrong.py", tmp_path)
    assert (status, set(found)) == (1, wrong), text
