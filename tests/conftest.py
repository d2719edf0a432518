"""Lets tests import `common`, marks the slow folders, limits the processor time of each test."""

import resource
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

# Folders whose tests look at browsers, searches, torch, thousands of drawn orders and files.
SECONDS = {"page", "planner", "interop", "differential", "fuzz", "megatron"}
# Seconds of processor time, so that a busy machine fails no test; `timeout` in pyproject.toml is
# a limit on real time, wide enough for any load, that ends what hangs.
LIMIT = 120
# Both of these look at the clock: how long one example takes, and how long it takes to draw one.
hypothesis_settings.register_profile(
    "any load", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("any load")

# A shell starts background jobs with Ctrl-C ignored, and every child would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

WITHOUT_TORCH = find_spec("torch") is None
collect_ignore = ["runtime", "soak", "megatron"] if WITHOUT_TORCH else []


def pytest_report_header():
    return (
        "torch is not installed: tests/runtime, tests/soak and tests/megatron are left out"
        if WITHOUT_TORCH
        else None
    )


def pytest_collection_modifyitems(items):
    for item in items:
        if SECONDS & set(item.path.relative_to(HERE).parts[:1]):
            item.add_marker(pytest.mark.slow)


def _children():
    """Processor time of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _within_limit(item):
    """Runs one phase of a test; it fails above the limit, at once if its own process is busy."""
    marker = item.get_closest_marker("processor_time")
    limit = marker.args[0] if marker else LIMIT

    def stop(*_):
        pytest.fail(f"more than {limit} s of processor time")

    before = _children()
    handler = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        result = yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
    used = _children() - before
    if used > limit:
        pytest.fail(f"child processes used {used:.0f} s of processor time, limit {limit} s")
    return result


pytest_runtest_setup = pytest.hookimpl(wrapper=True)(_within_limit)
pytest_runtest_call = pytest.hookimpl(wrapper=True)(_within_limit)
