"""Read the trace of a run back, and compare measured with predicted."""

import sys
import tempfile
from pathlib import Path

import hocket
from hocket.interop.traces.load import load_foreign

files = sys.argv[1:]  # the traces of torch.profiler, one per rank, or a trace that hocket wrote
if not files:  # without one, this writes a trace of a simulation, as `hocket simulate --trace` does
    files = [Path(tempfile.mkdtemp(), "run.json")]
    times = hocket.Costs(F=(10, 10, 10, 14), I=12, W=7, latency=1, unit="us")
    hocket.write_trace(hocket.simulate(hocket.build("zb-h1", p=4, m=8), times), files[0])

run = load_foreign(files)
assert run.timeline is not None and run.costs is not None
predicted = hocket.simulate(run.schedule, run.costs)

print(f"{run.schedule.name}: measured {float(run.timeline.makespan):.1f} {run.timeline.unit}")
print(f"predicted from the costs read back: {float(predicted.makespan):.1f} {run.timeline.unit}")
for rank, (was, said) in enumerate(zip(run.timeline.ranks, predicted.ranks, strict=True)):
    print(f"rank {rank}: idle {float(was.idle):.1f}, predicted {float(said.idle):.1f}")
