"""Check an order written by hand, and read the report of a deadlock."""

import hocket

# Stage 0 runs on rank 0, stage 1 on rank 1. One line per rank, in execution order.
ORDER = """\
# hocket 1
name mine
path 0: 0 1
0: 0F0 0F1 0B0 0B1
1: 1F0 1B0 1F1 1B1
"""

schedule = hocket.loads(ORDER)
print(hocket.check(schedule))

# Here rank 0 wants the backward of microbatch 0 before it has sent what rank 1 works on first.
broken = hocket.loads(ORDER.replace("0F0 0F1 0B0", "0F0 0B0 0F1").replace("1B0 1F1", "1F1 1B0"))
report = hocket.check(broken)
print(report)
for problem in report.problems:
    print(
        f"first action of the cycle: {problem.action} on rank {problem.rank}, slot {problem.slot}"
    )
