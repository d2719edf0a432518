"""One process that feeds a reader: `worker.py READER FIRST LAST FOLDER`, a JSON line a failure.

The property: any bytes give a result or one of hocket's errors, within 5 s of processor time and
500 MB beyond what is there after the corpus itself was read. Nothing else may happen: no other
exception, no warning, no text that says Traceback.
"""

import contextlib
import io
import json
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

from readers import CORPUS, READERS

SECONDS, MEMORY = 5, 500 * 2**20


class TooLong(BaseException):
    """The processor time of one input is up."""


def stop(*_):
    raise TooLong


def tried(reader, command, data, folder):
    """How one input ends: the exit status, "refused", or a failure as text."""
    from hocket import HocketError
    from hocket.cli import main

    file = folder / ("input" + "".join(Path(reader.corpus[0]).suffixes))
    file.write_bytes(data)
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            if callable(command):
                status = command(data)
            else:
                paths = {"{}": str(file), "OTHER": str(CORPUS / "trace_rank1.json")}
                status = main([paths.get(w, w.replace("{}", str(file))) for w in command.split()])
    except HocketError:
        return "refused"
    except TooLong:
        return f"more than {SECONDS} s of processor time"
    except SystemExit as end:
        return str(end.code) if end.code == 2 else f"exit {end.code}: {out.getvalue()[-300:]}"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}"[
            :300
        ]
    if status and not out.getvalue().strip():
        return f"status {status} and not a word"
    return str(status) if isinstance(status, int) else "0"


def limited(reader, command, data, folder):
    used = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 3 * SECONDS, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return tried(reader, command, data, folder)
    except TooLong:
        return f"more than {SECONDS} s of processor time"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def changed(name, seed):
    """The command and the bytes of a seed."""
    reader, rng = READERS[name], random.Random(f"{name} {seed}")
    data = (CORPUS / rng.choice(reader.corpus)).read_bytes()
    return rng.choice(reader.commands), reader.change(rng, data, reader.words)


def main():
    name, first, last, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    reader = READERS[name]
    warnings.simplefilter("error")
    signal.signal(signal.SIGPROF, stop)
    for file in reader.corpus:
        for command in reader.commands:
            tried(reader, command, (CORPUS / file).read_bytes(), folder)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    ends = Counter()
    for seed in range(first, last):
        (folder / "at").write_text(str(seed))
        command, data = changed(name, seed)
        end = limited(reader, command, data, folder)
        if end in ("0", "1", "2", "refused"):
            ends[end] += 1
        else:
            print(json.dumps({"seed": seed, "command": str(command), "end": end}), flush=True)
    print(json.dumps({"ends": ends}), flush=True)


if __name__ == "__main__":
    main()
