"""Every session in the README and the docs is run and compared; every picture is made anew."""

import doctest
import importlib
import os
import pkgutil
import re
import shlex
import sys
from pathlib import Path

import pytest

import hocket.schedules
from hocket.cli import main, parser
from hocket.errors import Code
from hocket.schedules import entries

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import check_site  # noqa: E402
import make_errors  # noqa: E402
import make_gallery  # noqa: E402
import make_pictures as pages  # noqa: E402

from test_structure import LAYERS  # noqa: E402

ALL_PAGES = pages.PAGES + list(pages.TRANSLATED)


def _pages(kind, holding=""):
    for page in pages.PAGES:
        if any(b.kind == kind and holding in b.text for b in pages.blocks(page)):
            yield pytest.param(page, id=os.path.relpath(page, ROOT))


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A folder for the files of a page, the modules among them forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def _is(printed, shown):
    """True when the output is the one shown, in which a line `...` stands for any lines."""
    parts = re.split(r"^\.\.\.$", shown.rstrip(), flags=re.M)
    return re.fullmatch(".*".join(map(re.escape, parts)), printed.rstrip(), re.S) is not None


def test_three_dots_stand_for_lines_and_for_nothing_else():
    assert _is("a\nb\nc", "a\n...") and _is("a\nb\nc\n", "a\n...\nc") and _is("a", "a")
    assert not _is("a\nb", "a") and not _is("a\nb", "...\na") and not _is("a...", "a\n...")


@pytest.mark.parametrize("page", list(_pages("console")))
def test_console_output_is_what_the_command_prints(page, here, capsys):
    pages.write_files(page, here)
    for block in pages.blocks(page):
        for command, output in pages.sessions(block.text) if block.kind == "console" else ():
            words = shlex.split(command)
            assert words[0] == "hocket"
            main(words[1:])
            out = capsys.readouterr()
            assert _is(out.out + out.err, output), f"{command}\n{out.out}{out.err}"
    for made in here.glob("*.svg"):
        assert made.read_text() == (pages.IMAGES / made.name).read_text(), (
            f"{made.name} is not what hocket draws: run python docs/make_pictures.py"
        )


@pytest.mark.parametrize("page", list(_pages("python", ">>>")))
def test_python_session_prints_what_is_shown(page, here):
    pages.write_files(page, here)
    for block in pages.blocks(page):
        if block.kind == "python" and ">>>" in block.text:
            test = doctest.DocTestParser().get_doctest(block.text, {}, page.name, None, 0)
            assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


def _named_commands(page):
    """The commands in inline code and in blocks that are not run: (verb, options)."""
    text = re.sub(r"^```console\n.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for line in re.findall(r"^(?:python -m )?hocket (.*)$", text, re.M) + re.findall(
        r"`hocket ([^`]+)`", text
    ):
        verb, *rest = shlex.split(line, comments=True)
        yield verb, [word.partition("=")[0] for word in rest if re.match("--?[A-Za-z]", word)]


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: os.path.relpath(page, ROOT))
def test_commands_that_are_not_run_exist_with_their_options(page):
    choices = next(a.choices for a in parser()._actions if isinstance(a.choices, dict))
    for verb, options in _named_commands(page):
        known = choices[verb]._option_string_actions if verb in choices else {"--help", "--version"}
        assert verb in choices or verb in known, f"there is no command hocket {verb}"
        assert [o for o in options if o not in known] == [], f"hocket {verb}"


@pytest.mark.runtime
def test_the_start_page_ends_with_a_run_on_two_ranks(here, capfd):
    page = ROOT / "docs/index.md"
    pages.write_files(page, here)
    (command,) = re.findall(r"^hocket (run .*)$", page.read_text(), re.M)
    assert main(shlex.split(command)) == 0
    printed, shown = capfd.readouterr().out, pages.blocks(page)[-1].text
    first = re.compile(r"^(step|split|rank [01]:|rank  ms)\b", re.M)  # the times differ every time
    assert printed.count("loss") == shown.count("loss") == 3
    assert set(first.findall(shown)) <= set(first.findall(printed))


MODULES = [m.name for m in pkgutil.iter_modules(hocket.schedules.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_every_generator_shows_its_picture(name):
    module = importlib.import_module(f"hocket.schedules.{name}")
    assert doctest.testmod(module).failed == 0


def test_every_picture_stands_above_the_command_that_makes_it():
    made = set()
    for page in pages.PAGES:
        text, commands = page.read_text(), pages.picture_commands(page)
        for name in re.findall(r"!\[[^\]]*\]\([^)]*?([^/)]+\.svg)\)", text):
            assert name in commands, f"{page.name} shows {name}, but has no command that makes it"
        assert all(f"{name})" in text for name in commands), page.name
        made |= commands.keys()
    assert made == {path.name for path in pages.IMAGES.iterdir()}


def test_the_translated_story_has_the_same_blocks_and_pictures():
    ((theirs, own),) = pages.TRANSLATED.items()
    assert pages.blocks(own) == pages.blocks(theirs)
    parts = re.compile(r"!\[.*\]\((?:\.\./)?(img/.*)\)|^(## )|arXiv (\S+\d)", re.M)
    assert parts.findall(own.read_text()) == parts.findall(theirs.read_text())


def test_links_between_pages_lead_somewhere():
    for page in ALL_PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links {target}"


def test_every_page_stands_in_the_navigation_of_the_handbook():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    there = [os.path.relpath(p, ROOT / "docs") for p in ALL_PAGES if p.parent != ROOT]
    assert sorted(listed) == sorted(there)


def test_the_check_of_the_site_finds_what_a_page_loads_from_elsewhere():
    here = '<link rel="stylesheet" href="a.css"><script src="b.js"></script><a href="https://c.d/">'
    assert check_site.foreign(here + '<img src="data:image/png;base64,//8=">') == []
    for there in (
        '<script src="https://a.b/c.js"></script>',
        '<link rel="stylesheet preload" href="//a.b/c.css">',
        '<img src="http://a.b/c.png">',
        "<style>@import 'https://a.b/c.css';</style>",
        '<p style="background:url(https://a.b/c.png)">',
    ):
        assert len(check_site.foreign(there)) == 1, there
    assert check_site.foreign("a{src:url(fonts/a.woff2)}", css=True) == []
    assert check_site.foreign("a{src:url( 'https://a.b/c.woff2' )}", css=True) != []


def test_the_layers_in_the_design_page_are_those_that_are_held():
    blocks = [b.text.split("\n") for b in pages.blocks(ROOT / "docs/design.md") if b.kind == "text"]
    shown = [name for line in blocks[1] for name in line.split()]
    assert shown[::-1] == LAYERS


def test_the_page_of_codes_is_what_the_table_says_and_every_code_is_raised():
    assert make_errors.PAGE.read_text() == make_errors.page()
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    raised = set(re.findall(r"\bCode\.([A-Z_]+)", sources))
    assert raised == {code.name for code in Code}


def test_the_gallery_is_what_the_registry_says():
    assert make_gallery.PAGE.read_text() == make_gallery.page()


def test_every_registered_schedule_says_when_to_use_it():
    assert [e.name for e in entries() if not e.use or not e.source] == []
