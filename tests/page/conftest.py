"""One browser for all tests of the page, and pages to open in it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from browser import Browser, why_not


@pytest.fixture(scope="session")
def browser():
    missing = why_not()
    if missing:
        pytest.skip(missing)
    running = Browser()
    yield running
    running.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens a document from disk; in the end its console must have been silent."""
    tabs = []

    def open_page(text: str, hash: str = ""):
        path = tmp_path / f"page{len(tabs)}.html"
        path.write_text(text, encoding="utf-8")
        tabs.append(browser.open(f"{path.as_uri()}#{hash}"))
        return tabs[-1]

    yield open_page
    complaints = [text for tab in tabs for text in tab.complaints]
    for tab in tabs:
        tab.close()
    assert complaints == []
