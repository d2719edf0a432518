"""The V family, limit by limit: the least bubble there can be, published results, ours.

python benchmarks/v_family.py            p = 4, 8, 12, F = I = W; then real costs at p = 8
python benchmarks/v_family.py 16 64      one size of F = I = W
"""

import sys
import time

from hocket import Costs, build, simulate
from hocket.planner import Request, plan

# makespans of the authors' search (arXiv 2405.15362, their code) at p = 8, m = 16, by limit
REAL = Costs(F=149, I=147, W=100, latency=5)
SEARCHED = {8: 17714, 10: 15873, 12: 15081, 16: 13890}


def published(p: int, limit: int) -> int:
    """The authors' bubble within a rank's span, F = I = W."""
    return {2 * p - 1: 3, 2 * p: 0}.get(limit, 6 * p - 1 - 3 * limit)


def least(p: int, limit: int) -> int:
    """No makespan has a smaller bubble (`_target` in schedules/controllable.py says why)."""
    return 3 * p - 1 - limit + max(0, 3 * p - 2 * limit)


def even(p: int, m: int) -> None:
    print(f"\nF = I = W, p={p} m={m}: bubble in stage times")
    print("limit  makespan  least  span  published span  in flight  CPU s")
    for limit in range(2 * ((p + 4) // 3), 2 * p + 1):
        begun = time.process_time()
        schedule = build("v-auto", p=p, m=m, limit=limit)
        took = time.process_time() - begun
        t = simulate(schedule)
        peak = max(r.peak_in_flight for r in t.ranks)
        print(
            f"{limit:5}  {t.makespan - 6 * m:8}  {least(p, limit):5}  {t.span - 6 * m:4}"
            f"  {published(p, limit):14}  {peak:9}  {took:5.1f}"
        )


def real() -> None:
    print("\nF=149 I=147 W=100 latency=5, p=8 m=16: makespan")
    print("limit  authors' search   ours  CPU s")
    for limit, makespan in SEARCHED.items():
        begun = time.process_time()
        asked = Request(
            p=8, m=16, costs=REAL, in_flight=limit / 2, shapes=("v",), v=(2,), split=True
        )
        schedule = plan(asked).schedule
        took = time.process_time() - begun
        print(f"{limit:5}  {makespan:15}  {simulate(schedule, REAL).makespan:5}  {took:5.1f}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        even(int(sys.argv[1]), int(sys.argv[2]))
    else:
        for size in ((4, 8), (8, 16), (12, 24)):
            even(*size)
        real()
