"""A test may use so much processor time; how long it waits for the machine does not matter."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import subprocess, sys, time
import pytest

pytestmark = pytest.mark.processor_time(0.3)
BUSY = "import time\\nwhile time.process_time() < 0.8: pass"


def test_waits():
    time.sleep(0.6)


def test_busy():
    while True:
        pass


def test_busy_child():
    subprocess.run([sys.executable, "-c", BUSY], check=True)
"""


@pytest.mark.slow
def test_what_counts_is_processor_time_of_a_test_and_its_children(tmp_path):
    tmp_path.joinpath("conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    tmp_path.joinpath("test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "no:cacheprovider", "-q",
               "--rootdir", str(tmp_path), "-W", "ignore::pytest.PytestUnknownMarkWarning",
               str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    assert "Failed: more than 0.3 s of processor time" in done.stdout
    assert "Failed: child processes used 1 s of processor time" in done.stdout
