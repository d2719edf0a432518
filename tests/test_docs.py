"""Every session shown in the README and the docs is run and compared."""

import doctest
import importlib
import pkgutil
import re
import shlex
import sys
from pathlib import Path

import pytest

import hocket.schedules
from hocket.cli import main
from hocket.schedules import entries

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def _blocks(kind):
    for page in PAGES:
        for n, (found, text) in enumerate(BLOCK.findall(page.read_text())):
            if found == kind:
                yield pytest.param(text, id=f"{page.name}-{n}")


def _sessions(text):
    """(command, output) pairs of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


@pytest.mark.parametrize("text", list(_blocks("console")))
def test_console_output_is_what_the_command_prints(text, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for command, output in _sessions(text):
        words = shlex.split(command)
        assert words[0] == "hocket"
        main(words[1:])
        out = capsys.readouterr()
        assert (out.out + out.err).rstrip() == output.rstrip(), command


@pytest.mark.parametrize("text", [b for b in _blocks("python") if ">>>" in b.values[0]])
def test_python_session_prints_what_is_shown(text):
    test = doctest.DocTestParser().get_doctest(text, {}, "session", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


MODULES = [m.name for m in pkgutil.iter_modules(hocket.schedules.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_every_generator_shows_its_picture(name):
    module = importlib.import_module(f"hocket.schedules.{name}")
    assert doctest.testmod(module).failed == 0


def test_the_picture_in_the_readme_is_what_hocket_draws(capsys):
    main(["show", "zb-h1", "-p", "4", "-m", "8", "--format", "svg"])
    assert capsys.readouterr().out == (ROOT / "docs/img/zb-h1.svg").read_text()


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links {target}"


def test_the_gallery_is_what_the_registry_says():
    sys.path.insert(0, str(ROOT / "docs"))
    import make_gallery

    assert make_gallery.PAGE.read_text() == make_gallery.page()


def test_every_registered_schedule_says_when_to_use_it():
    assert [e.name for e in entries() if not e.use or not e.source] == []
