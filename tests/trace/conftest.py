"""Perfetto's engine, started once for all traces."""

import sys
from pathlib import Path

import pytest

# appended: the folder's name is a package's name, and that package must be found first
sys.path.append(str(Path(__file__).parents[1] / "perfetto"))
import engine as perfetto_engine


@pytest.fixture(scope="session")
def engine():
    missing = perfetto_engine.why_not()
    if missing:
        pytest.skip(missing)
    running = perfetto_engine.Engine()
    yield running
    running.close()
