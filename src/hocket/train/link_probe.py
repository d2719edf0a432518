"""How long messages take between ranks: to and fro, over the pipeline's own transport."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from hocket.ir import Placement
from hocket.measured.readings import Link, link_of
from hocket.runtime.transport import Downstream, Upstream, Wire

ROUNDS = 32  # of messages up to MANY bytes
FEW = 8  # of larger ones
MANY = 1 << 20
SIZES = [1 << n for n in range(10, 23, 2)]  # 1 KiB to 4 MiB


def pairs_of(placement: Placement) -> list[tuple[int, int]]:
    """The pairs of ranks between which messages pass, each with its lower rank first."""
    hops = {(a.rank, b.rank) for path in placement.paths for a, b in pairwise(path)}
    return sorted({(min(hop), max(hop)) for hop in hops if hop[0] != hop[1]})


def links(
    wire: Wire | None, rank: int, placement: Placement, largest: int, meet: Callable[[], Any]
) -> list[Link]:
    """The links of which this rank is the lower one, measured one after the other; collective.

    wire: None where there is one rank. rank: one beyond the placement's only waits. largest: bytes
    of the largest message of the model. meet: waits for all, so that nothing runs beside a pair.
    """
    if wire is None:
        return []
    sizes = SIZES + [largest] * (largest > SIZES[-1])
    found = []
    for low, high in pairs_of(placement):
        if rank == low:
            found.append(link_of((low, high), {n: _there_and_back(wire, high, n) for n in sizes}))
        elif rank == high:
            for n in sizes:
                _answer(wire, low, n)
        meet()
    return found


def _rounds(nbytes: int) -> int:
    return ROUNDS if nbytes <= MANY else FEW


def _there_and_back(wire: Wire, peer: int, nbytes: int) -> float:
    """Half of the shortest time in which a message comes back, in ms.

    An output goes, as from one stage to the next, and its gradient returns; the first of them
    tells its shape and does not count.
    """
    end = Downstream(wire, 0, 1, 1, {0: peer})
    output = torch.zeros(nbytes // 4, device=wire.device, requires_grad=True)
    times = []
    for _ in range(1 + _rounds(nbytes)):
        started = perf_counter()
        end.send(0, output)
        end.post(0)
        end.wait(0)
        times.append(perf_counter() - started)
        end.release(0)
    return 1e3 * min(times[1:]) / 2


def _answer(wire: Wire, peer: int, nbytes: int) -> None:
    """The other side of it."""
    end = Upstream(wire, 0, 1, 1, {0: peer})
    for _ in range(1 + _rounds(nbytes)):
        end.post(0)
        _, leaves = end.wait(0)
        end.send(0, leaves)
        end.release(0)
