"""Where ranks meet: words exchanged by all before the first message, and times after a step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

from hocket.errors import RunError
from hocket.ir import Schedule
from hocket.runtime.transport import Wire

ROUNDS = 16  # of asking for the time


def exchange(wire: Wire | None, size: int, data: bytes) -> list[bytes]:
    """What every rank gave, by rank; collective."""
    if wire is None or size == 1:
        return [data]
    mine = torch.tensor([len(data)])
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    wire.wait(wire.group.allgather([lengths], [mine]))
    longest = max(int(n) for n in lengths)
    packed = torch.zeros(max(longest, 1), dtype=torch.uint8)
    packed[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    all_packed = [torch.empty_like(packed) for _ in range(size)]
    wire.wait(wire.group.allgather([all_packed], [packed]))
    return [t.numpy()[: int(n)].tobytes() for t, n in zip(all_packed, lengths, strict=True)]


def host() -> str:
    """What two processes share whose `perf_counter_ns` is one clock; "" where that is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def clock_offsets(wire: Wire | None, rank: int, hosts: list[str], tag: int) -> list[float]:
    """What to add to each rank's `perf_counter_ns` to get rank 0's; collective.

    Ranks of one host share a clock. Others ask rank 0 for the time, and take the answer that came
    back soonest: it is half a round trip old.
    """
    size, own = len(hosts), 0
    if wire is None or all(h == hosts[0] != "" for h in hosts):
        return [0.0] * size
    stamp = torch.zeros(1, dtype=torch.int64)
    for asking in range(1, size):
        rounds = []
        for _ in range(ROUNDS if rank in (0, asking) else 0):
            if rank == asking:
                before = perf_counter_ns()
                sent = wire.group.send([torch.zeros(1, dtype=torch.int64)], 0, tag)
                wire.wait(wire.group.recv([stamp], 0, tag))
                after = perf_counter_ns()
                wire.wait(sent)
                rounds.append((after - before, int(stamp) - (before + after) // 2))
            else:
                wire.wait(wire.group.recv([torch.zeros(1, dtype=torch.int64)], asking, tag))
                stamp[0] = perf_counter_ns()
                wire.wait(wire.group.send([stamp], asking, tag))
        if rounds:
            own = min(rounds)[1]
    raw = exchange(wire, size, str(own).encode())
    return [float(r) for r in raw]


def describe(schedule: Schedule, settings: Mapping[str, Any]) -> dict[str, str]:
    """What must be the same on all ranks, in words."""
    digest = hashlib.sha256()
    for array in (schedule.codes, schedule.slots, schedule.starts):
        digest.update(array.tobytes())
    digest.update(repr((schedule.queues, schedule.placement)).encode())
    return {
        "p": str(schedule.p),
        "m": str(schedule.m),
        "placement": hashlib.sha256(repr(schedule.placement.paths).encode()).hexdigest()[:8],
        "order": f"{schedule.name} {digest.hexdigest()[:8]}",
        **{name: json.dumps(value) for name, value in settings.items()},
    }


def agree(said: list[dict[str, Any]]) -> None:
    """Checks what the ranks said of themselves.

    Raises: RunError that names the ranks and what they differ in, or their own problems.
    """
    problems = [f"rank {r}: {s['problem']}" for r, s in enumerate(said) if s["problem"]]
    differing = []
    names = list(said[0]["same"])
    for name in names:
        values: dict[str, list[int]] = {}
        for r, s in enumerate(said):
            values.setdefault(str(s["same"].get(name)), []).append(r)
        if len(values) > 1:
            parts = ", ".join(f"{v} on {_ranks(ranks)}" for v, ranks in values.items())
            differing.append(f"the ranks disagree on {name}: {parts}")
    if differing or problems:
        raise RunError("\n".join(differing + problems))


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
