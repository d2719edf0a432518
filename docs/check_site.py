"""Fails if the built handbook loads anything from elsewhere: `python docs/check_site.py site`."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

_LOADS = {"src", "srcset", "data", "poster"}
_OF_A_LINK = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "preconnect",
    "manifest",
    "modulepreload",
}
_FOREIGN = re.compile(r"\s*(?:[a-z]+:)?//", re.I)
_CSS = re.compile(r"(?:url\(|@import)\s*[\"']?\s*((?:https?:)?//[^\"')\s]+)", re.I)


class _Assets(HTMLParser):
    """Collects what a page loads: addresses that a browser fetches without a click."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes the addresses of one tag."""
        given = {name: value or "" for name, value in attrs}
        loads = [given[name] for name in _LOADS & given.keys()]
        if tag == "link" and _OF_A_LINK & set(given.get("rel", "").split()):
            loads.append(given.get("href", ""))
        self.found += [address for address in loads if _FOREIGN.match(address)]


def foreign(text: str, *, css: bool = False) -> list[str]:
    """Addresses on other hosts that a page or a style sheet loads."""
    if css:
        return _CSS.findall(text)
    assets = _Assets()
    assets.feed(text)
    return assets.found + _CSS.findall(text)


def main() -> None:
    """Reads every page and style sheet below a folder; exits 1 if one loads from elsewhere."""
    folder = Path(sys.argv[1])
    pages = sorted(folder.rglob("*.html"))
    sheets = sorted(folder.rglob("*.css"))
    bad = [
        f"{path.relative_to(folder)} loads {address}"
        for path in pages + sheets
        for address in foreign(path.read_text(encoding="utf-8"), css=path.suffix == ".css")
    ]
    if bad or not pages:
        sys.exit("\n".join(bad) or f"{folder} holds no page")
    print(f"{len(pages)} pages, {len(sheets)} style sheets: nothing from elsewhere")


if __name__ == "__main__":
    main()
