"""Every schedule of the tests in every form through torch's own runtime, on four local ranks.

    python benchmarks/torch_interop.py            # a minute or two; prints the largest errors

The tests run each schedule in one form; this runs them in all: compute only, with messages early
and late, in blocks and unrolled, and through torch_schedule.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "interop"))

from torch_cases import cases
from torch_ranks import on_four_ranks

FORMS = [
    {"how": how, "receives": receives, "overlap": overlap}
    for how in ("csv", "messages", "schedule")
    for receives in (("early",) if how == "csv" else ("early", "late"))
    for overlap in (False, True)
]


def main() -> int:
    """Returns 1 where a gradient was wrong."""
    jobs = [case._replace(**form) for case in cases() for form in FORMS]
    begin = time.perf_counter()
    ranks = on_four_ranks({"run_cases": jobs}, seconds=1200)["run_cases"]
    worst = 0.0
    for i, job in enumerate(jobs):
        error = max(rank[i].error for rank in ranks if i in rank)
        worst = max(worst, error)
        if error > 1e-12:
            print(f"WRONG by {error:.2e}: {job.name}, {job.how} {job.receives} {job.overlap}")
    print(f"{len(jobs)} runs in {time.perf_counter() - begin:.0f} s, largest error {worst:.1e}")
    return int(worst > 1e-12)


if __name__ == "__main__":
    sys.exit(main())
