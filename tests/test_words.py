"""Phrases that no native writer would use, or that another term of the field has replaced."""

import ast
import re
from pathlib import Path

import hocket
from common import tree
from hocket.cli import parser

ROOT = Path(__file__).parent.parent
SRC = Path(hocket.__file__).parent

# "a rank" is right in "on a rank", and wrong where it means "per rank".
COUNTED = (
    "one|two|three|four|v|stages|actions?|slots?|microbatches|lines?|values?|functions?|threads?|"
    "process(?:es)?|messages?|numbers?|modules?|cores?|rows?|factors?|costs?|streams?|files?|bytes"
)
UNITS = "rank|stage|queue|layer|kind|line|verb|file|GPU|phase|process"
# A pattern, and what to write instead.
BANNED = {
    r"\bin (?:a|one) circle\b|\b(?:the|its|whole|each|every) circles?\b|\bcircles? of\b": "cycle",
    rf"\b(?:{COUNTED}) an? (?:{UNITS})\b(?!')": "per rank, per stage, ...",
    r"\bslots? of two\b": "fused forward-backward slot",
    r"\bwhole backwards?\b": "full backward",
    r"\bat home (?:elsewhere|where)\b": "coming from another framework",
    r"\bwhat else the machine\b|\ball else on the machine\b": "background load",
    r"\bstands? (?:nowhere|behind|before|there|once)\b": "is, appears, is placed",
    r"\bcuts? of (?:the )?layers\b|\bthe cut is\b": "partition of layers into stages",
    r"\bby chance\b": "at random",
    r"\bwhat does not hold included\b": "including what does not hold",
    r"\bor alike\b": "or similar",
    r"\bbeside all that\b": "in addition",
    r"\bis no text for\b": "cannot be printed to",
    r"\bwhat is said (?:of|above|after)\b": "the heading, the advice, ...",
    r"\b(?:is|are|was|were) told\b": "is reported, shown, printed",
    r"\bsays? `": "the verb in its place: run `...` to see",
    r"^[^.]*\. [Ii]mports (?:only|nothing|errors|ir)\b": "nothing: a test knows the imports",
}
PATTERNS = {re.compile(pattern): better for pattern, better in BANNED.items()}


def _strings(path):
    """The string literals of a module, docstrings among them: (line, text)."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _texts():
    """(name of a file, [(line, text)])."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
    for path in filter(Path.exists, pages):
        paragraphs, line = [], 1
        for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
            paragraphs.append((line, paragraph))
            line += paragraph.count("\n") + 2
        yield str(path.relative_to(ROOT)), paragraphs
    for path in sorted(SRC.rglob("*.py")):
        yield str(path.relative_to(SRC.parents[1])), list(_strings(path))
    for path in sorted([*SRC.rglob("*.js"), *SRC.rglob("*.html")]):
        lines = path.read_text(encoding="utf-8").splitlines()
        yield str(path.relative_to(SRC.parents[1])), list(enumerate(lines, 1))
    yield "hocket --help", [(0, text) for text in _helps(parser())]


def _helps(parser):
    yield parser.format_help()
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for one in action.choices.values():
                yield from _helps(one)


def findings(texts):
    """Each banned phrase: where it is, and what to write instead."""
    for line, text in texts:
        flat = re.sub(r"\s+", " ", text)
        for pattern, better in PATTERNS.items():
            for match in pattern.finditer(flat):
                yield f"{line}: {match[0]!r}; better: {better}"


LEFT = 0


def test_no_banned_phrase():
    found = [f"{name}:{finding}" for name, texts in _texts() for finding in findings(texts)]
    assert len(found) <= LEFT, "\n".join(found)


def test_the_patterns_find_what_they_are_for():
    bad = ["in a\ncircle", "v stages a rank", "one a stage", "slots of two", "which is told"]
    assert all(list(findings([(1, text)])) for text in bad)
    assert not list(findings([(1, "on a rank, per rank, a stage of one rank, cycle")]))
