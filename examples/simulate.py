"""Predict time and memory from measured costs."""

import hocket

# Four stages; the last one is slower, since it also computes the loss. Times in milliseconds.
costs = hocket.Costs(
    F=(10, 10, 10, 13),
    I=(11, 11, 11, 14),
    W=(8, 8, 8, 9),
    latency=0.5,
    unit="ms",
    bytes=hocket.Bytes(static=2e9, activation=0.4e9),
)

for name in ("gpipe", "1f1b", "zb-h1"):
    timeline = hocket.simulate(hocket.build(name, p=4, m=16), costs)
    most = max(rank.peak_bytes for rank in timeline.ranks)
    print(
        f"{name:6} {float(timeline.makespan):6.1f} ms"
        f"  bubble {timeline.bubble_ratio:5.1%}"
        f"  memory of the fullest rank {most / 1e9:4.1f} GB"
    )
