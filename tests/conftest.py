"""Lets tests import `common` from here, and tells what `make test-core` leaves out."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

SECONDS = {"page", "planner", "interop"}  # folders whose tests look at browsers, searches, torch


def pytest_collection_modifyitems(items):
    for item in items:
        if SECONDS & set(item.path.relative_to(HERE).parts[:1]):
            item.add_marker(pytest.mark.slow)
