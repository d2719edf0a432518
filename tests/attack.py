"""The long attack: `make attack`, or `python tests/attack.py --seconds 3600 --seed 0`.

Runs every claim of tests/differential, the kills of tests/soak and every reader of tests/fuzz in
turn, on seeds that CI does not try, for equal shares of the time, on all cores. Prints the seeds,
counts what was met, and ends with status 1 where hocket and an oracle differ, a promise of the
runtime is broken, or a file ends in anything but a result or one of hocket's errors.
`--claim times --only 12345` runs one seed again.
"""

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "differential"), str(HERE / "fuzz"), str(HERE / "soak")]

from against import CLAIMS, plans_hold  # noqa: E402
from long_use import soak  # noqa: E402
from readers import READERS  # noqa: E402
from run import fuzz  # noqa: E402
from worker import changed  # noqa: E402

BATCH = 500  # inputs for which one worker is started
FIRST = 1_000_000  # seeds below are CI's
COMPARED = {**CLAIMS, "soak": soak}
ALL = [*COMPARED, *READERS]
LARGER = {"plans": partial(plans_hold, most_ranks=4, most_microbatches=4, branches=100_000)}


def attack(claim, first, seconds):
    """Seeds from `first` on for some seconds: (claim, seeds, what was met, failures)."""
    return (feed if claim in READERS else compare)(claim, first, seconds)


def feed(reader, first, seconds):
    met, failures = Counter(), []
    deadline, seed = time.monotonic() + seconds, first
    while time.monotonic() < deadline:
        ends, bad = fuzz(reader, seed, seed + BATCH)
        met += ends
        failures += [f"{reader}: {one}" for one in bad]
        seed += BATCH
    return reader, range(first, seed), met, failures


def compare(claim, first, seconds):
    tried, met, failures = LARGER.get(claim, COMPARED[claim]), Counter(), []
    deadline, seed = time.monotonic() + seconds, first
    with TemporaryDirectory() as folder:
        while time.monotonic() < deadline:
            try:
                met[tried(seed, Path(folder))] += 1
            except Exception as error:  # whatever hocket raises is a finding
                failures.append(
                    f"{claim} {type(error).__name__}: {error or 'no text'}, seed {seed}"
                )
            seed += 1
    return claim, range(first, seed), met, failures


def again(claims, seed):
    """One seed of some claims: what it met, and for a reader its input."""
    failed = False
    for claim in claims:
        if claim in READERS:
            ends, bad = fuzz(claim, seed, seed + 1)
            print(claim, *changed(claim, seed), dict(ends), *bad, sep="\n")
            failed |= bool(bad)
        else:
            with TemporaryDirectory() as folder:
                print(claim, seed, LARGER.get(claim, COMPARED[claim])(seed, Path(folder)))
    return int(failed)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=float(os.environ.get("ATTACK_SECONDS", 3600))
    )
    parser.add_argument("--seed", type=int, default=0, help="another attack for each number")
    parser.add_argument("--claim", choices=ALL, action="append")
    parser.add_argument("--only", type=int, metavar="SEED", help="run this one seed of --claim")
    args = parser.parse_args()
    claims = args.claim or ALL
    if args.only is not None:
        return again(claims, args.only)
    cores = os.cpu_count() or 1
    share, failed = args.seconds / len(claims), 0
    first = FIRST * (1 + args.seed * cores)
    with ProcessPoolExecutor(cores) as pool:
        for claim in claims:
            firsts = [first + FIRST * i for i in range(cores)]
            for _, seeds, met, failures in pool.map(
                attack, [claim] * cores, firsts, [share] * cores
            ):
                print(
                    f"{claim}: seeds {seeds.start} to {seeds.stop - 1}, {len(failures)} failures",
                    flush=True,
                )
                print("  " + ", ".join(f"{n} {what}" for what, n in met.most_common()))
                print(*failures[:5], sep="\n\n", end="\n" if failures else "")
                failed += len(failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
