"""Sizes are tested before they size anything: one sentence, at once, and little memory."""

import resource
import subprocess
import sys

import pytest

LOW = 1_500_000_000  # bytes of address space: more than hocket needs, less than such sizes would


def hocket(*words, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "hocket", *map(str, words)], capture_output=True, text=True, cwd=cwd,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LOW, LOW)), timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulate", "1f1b", "-p", 10**9, "-m", 1],
         "1f1b: ranks: 1,000,000,000 are more than hocket takes (1,048,576)"),
        (["simulate", "1f1b", "-p", 2, "-m", 10**9],
         "1f1b: actions, about: 6,000,000,000 are more than hocket takes (50,000,000)"),
        (["simulate", "interleaved", "-p", 4, "-m", 8, "-v", 10**9],
         "interleaved: stages: 4,000,000,000 are more than hocket takes (1,048,576)"),
        (["show", "1f1b", "-p", 10**5, "-m", 10**5],
         "1f1b: actions, about: 30,000,000,000 are more than hocket takes (50,000,000)"),
        (["check", "seq1f1b", "-p", 4, "-m", 4, "-o", f"slices={10**9}"],
         "seq1f1b: slices of a sequence: 1,000,000,000 are more than hocket takes (65,536)"),
        (["check", "moe-pair", "-p", 4, "-m", 8, "-o", f"layers={10**9}"], None),
        (["view", "/dev/zero"], "/dev/zero: is no file, and has more than 64,000,000 bytes"),
        (["run", "1f1b", "-p", 10**5, "-m", 1],
         "--nproc: processes of one machine: 100,000 are more than hocket takes (1,024); start "
         "them with torchrun, on several machines"),
        (["plan", "-p", 10**6, "-m", 8],
         "a plan: ranks: 1,000,000 are more than hocket takes (4,096)"),
        (["plan", "-p", "1-99999999", "-m", 8],
         "-p: 1-99999999 are more than 10,000 numbers"),
        (["check", "dualpipe", "-p", 999_999, "-m", 7], None),
    ],
)  # fmt: skip
def test_what_is_too_large_is_one_sentence_at_once(words, message):
    done = hocket(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert message is None or done.stderr == f"hocket: {message}\n"


def test_the_page_refuses_slices_by_the_million_too():
    from hocket import build
    from hocket.errors import UsageError
    from hocket.page.api import Given, answer

    words = {"schedule": "seq1f1b", "p": "4", "m": "8", "options": "slices=1000000000"}
    with pytest.raises(UsageError, match="the page shows at most 400,000"):
        answer(Given(build("1f1b", p=2, m=2)), words)
