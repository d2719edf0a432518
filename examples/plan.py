"""Find the fastest order under a memory limit."""

import sys
from pathlib import Path

import hocket

request = hocket.Request(
    p=4,
    m=8,
    costs=hocket.Costs(F=10, I=12, W=7, latency=1, per="rank"),
    in_flight=4,  # no rank may hold more than the activations of four microbatches, as in 1F1B
    rounds=1,  # of the search; the default searches for 20 seconds
)
plan = hocket.plan(request)
reference = hocket.simulate(hocket.build("1f1b", p=4, m=8), request.costs)

print(f"1F1B takes {reference.makespan}, the plan takes {plan.makespan} ({plan.found_by})")
print(f"no order of this placement takes less than {plan.bound.value}")
file = Path(sys.argv[1] if len(sys.argv) > 1 else "plan.sched")
file.write_text(hocket.dumps(plan.schedule), encoding="utf-8")
print(f"saved {file}; try: hocket check {file}")
