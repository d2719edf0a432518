"""Pictures that commands write: the form by name or by the file's ending, and where they go."""

import json
import subprocess
import sys

import pytest

from hocket.cli import main, output
from hocket.errors import UsageError
from hocket.formats import Subject, choose

SIZE = ["-p", "4", "-m", "8"]


def run(capsys, *words):
    status = main([str(w) for w in words])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_the_chart_is_written_as_its_ending_says_and_the_table_still_printed(capsys, tmp_path):
    path = tmp_path / "chart.svg"
    status, out, _ = run(capsys, "compare", *SIZE, "1f1b", "zb-h1", "-o", path)
    assert status == 0 and f"\n\nchart: {path}\n\n1f1b -> zb-h1\n" in out
    assert path.read_text().startswith("<svg") and ">zb-h1<" in path.read_text()


def test_a_chart_without_a_file_is_the_only_output(capsys):
    status, out, _ = run(capsys, "compare", *SIZE, "--chart", "--format", "svg")
    assert status == 0 and out.startswith("<svg") and out.endswith("</svg>\n")


def test_the_chart_s_memory_is_bytes_where_the_costs_have_them(capsys, tmp_path):
    costs = tmp_path / "costs.toml"
    costs.write_text("[bytes]\nactivation = 3e9\nstatic = 1e9\n")
    _, out, _ = run(capsys, "compare", *SIZE, "1f1b", "gpipe", "--chart", "--costs", costs)
    assert "  A  1f1b: bubble 27.3%, memory (GB) 13\n" in out
    _, out, _ = run(capsys, "compare", *SIZE, "1f1b", "gpipe", "--chart")
    assert "  A  1f1b: bubble 27.3%, microbatches in flight 4\n" in out


def test_a_chart_that_cannot_be_written_is_one_sentence(capsys):
    status, _, err = run(capsys, "compare", *SIZE, "1f1b", "gpipe", "-o", "/none/x.svg")
    assert (status, err) == (
        2,
        "hocket: /none/x.svg: cannot be written: No such file or directory\n",
    )


def test_json_says_where_the_chart_is(capsys, tmp_path):
    path = tmp_path / "chart.svg"
    _, out, _ = run(capsys, "compare", *SIZE, "1f1b", "zb-h1", "--json", "-o", path)
    assert json.loads(out)["chart"] == str(path) and path.exists()


@pytest.mark.parametrize(
    ("form", "path", "found"),
    [
        (None, None, "grid"),
        (None, "a.SVG", "svg"),
        ("grid", "a.x", "grid"),
        (None, "a.x", "grid"),
    ],
)
def test_the_form_is_the_one_asked_for_else_the_ending_s(form, path, found):
    assert choose(form, path, Subject.TIMELINE).name == found


def test_one_entry_adds_a_format_to_the_command_its_help_and_its_files(tmp_path):
    code = (
        "from hocket import formats\n"
        "write = lambda *_, **__: '...'\n"
        "own = formats.Format('dots', formats.Subject.TIMELINE, write, ('.dots',))\n"
        "formats.FORMATS += (own,)\n"
        "import sys; from hocket.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    for words, printed in (
        (["show", "1f1b", *SIZE, "--format", "dots"], "..."),
        (["show", "1f1b", *SIZE, "-o", str(tmp_path / "a.dots")], ""),
        (["show", "--help"], "dots}"),
        (["show", "1f1b", *SIZE, "--format", "dot"], "did you mean dots?"),
    ):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        assert printed in done.stdout + done.stderr
    assert (tmp_path / "a.dots").read_text() == "..."


def test_a_picture_of_pixels_is_refused_instead_of_holding_text(capsys, tmp_path):
    path = tmp_path / "a.png"
    for words in (["show", "zb-h1", *SIZE, "-o", path], ["compare", *SIZE, "1f1b", "-o", path]):
        status, _, err = run(capsys, *words)
        assert status == 2 and not path.exists()
        assert err == f"hocket: {path}: pictures are drawn as .svg or .pdf, not as .png\n"


def test_bytes_are_not_written_to_a_terminal(monkeypatch, capsysbinary):
    output.put(b"%PDF", None)
    assert capsysbinary.readouterr().out == b"%PDF"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with pytest.raises(UsageError, match="refusing to write a PDF to a terminal"):
        output.put(b"%PDF", None)


def test_show_writes_a_pdf_named_by_output_or_o(capsysbinary, tmp_path):
    first, second = tmp_path / "a.pdf", tmp_path / "b.pdf"
    assert main(["show", "zb-h1", *SIZE, "--output", str(first)]) == 0
    assert main(["show", "zb-h1", *SIZE, "--format", "pdf", "-o", str(second)]) == 0
    assert capsysbinary.readouterr().out == b""
    assert first.read_bytes() == second.read_bytes() and first.read_bytes().startswith(b"%PDF-")
    assert main(["show", "zb-h1", *SIZE, "--format", "pdf"]) == 0
    assert capsysbinary.readouterr().out == first.read_bytes()


def test_o_names_a_file_by_its_ending_and_an_option_by_its_equals_sign(capsys, tmp_path):
    path = tmp_path / "a.sched"
    words = ["show", "interleaved", *SIZE, "-o", "group=4", "-o", path]
    assert run(capsys, *words)[0] == 0 and path.read_text().startswith("# hocket 1")
    status, _, err = run(capsys, *words, "--output", tmp_path / "b.svg")
    assert (status, err) == (
        2, f"hocket: the output is named twice: {tmp_path / 'b.svg'} and {path}\n",
    )  # fmt: skip


def test_a_chart_can_be_a_pdf_by_name_or_by_the_file_s_ending(capsysbinary, tmp_path):
    path = tmp_path / "chart.pdf"
    assert main(["compare", *SIZE, "1f1b", "zb-h1", "-o", str(path)]) == 0
    capsysbinary.readouterr()
    assert main(["compare", *SIZE, "1f1b", "zb-h1", "--format", "pdf"]) == 0
    assert capsysbinary.readouterr().out == path.read_bytes()
