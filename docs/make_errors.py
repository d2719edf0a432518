"""Writes docs/errors.md from the table in `hocket.errors`: `python docs/make_errors.py`."""

from __future__ import annotations

from pathlib import Path

from hocket.errors import Code

PAGE = Path(__file__).parent / "errors.md"
HEAD = """# Error codes

Made by `python docs/make_errors.py` from `hocket.errors.Code`; a test keeps it up to date.

Every fault has a code for programs and a sentence for people. A code never changes its meaning; a
sentence may be reworded. With `--json`, a command that fails prints
`{"problems": [{"rank", "slot", "action", "text", "code"}]}`, and `hocket check --json` has the same
list. In Python, `error.problems` of every `hocket.HocketError` holds them.

The exit status is 1 for a schedule that cannot run (HK1), for a request without an answer (HK5)
and for a step that failed (HK6). It is 2 for wrong use (HK2), an unreadable file (HK3) and costs
that do not fit (HK4).

| code | `hocket.Code` | meaning |
|---|---|---|
"""


def page() -> str:
    """The page."""
    return HEAD + "".join(f"| {one.value} | `{one.name}` | {one.meaning} |\n" for one in Code)


if __name__ == "__main__":
    PAGE.write_text(page())
