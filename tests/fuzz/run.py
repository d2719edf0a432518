"""Runs workers over seeds and gathers how inputs ended; where a worker dies, its input failed."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent


def fuzz(reader, first, last):
    """(how inputs ended, failures) of the seeds from `first` up to `last`."""
    ends, failures = Counter(), []
    with TemporaryDirectory() as folder:
        while first < last:
            done = subprocess.run(
                [sys.executable, HERE / "worker.py", reader, str(first), str(last), folder],
                capture_output=True, text=True, check=False,
                env=os.environ | {"PYTHONPATH": path()},
            )  # fmt: skip
            for line in map(json.loads, filter(None, done.stdout.split("\n"))):
                ends.update(line.get("ends", {}))
                failures += [line] if "seed" in line else []
            if done.returncode == 0:
                break
            at = int((Path(folder) / "at").read_text()) if (Path(folder) / "at").exists() else first
            end = f"the process ended with {done.returncode}: {done.stderr[-300:]}"
            failures.append({"seed": at, "end": end})
            first = at + 1
    return ends, failures


def path():
    return os.pathsep.join([str(HERE), *filter(None, sys.path)])
