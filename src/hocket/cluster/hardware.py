"""What a cluster is: its GPUs, the levels of its network, and how long a message takes on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from hocket.cluster.tables import catalogue_entry, hashed_once, known_keys, load_toml, required
from hocket.errors import UsageError

_USABLE_LINK = 0.8  # of the one-way rate, for large messages; measured 0.78 to 0.82
_USABLE_NIC = 0.9
_HOPS = 5  # steps of a ring that take as long as its launch: 24 us with 2, 48 us with 8 GPUs


@dataclass(frozen=True)
class Gpu:
    """One GPU. Rates without sparsity: TFLOP/s by precision, memory GB and TB/s, links GB/s.

    link: one way, to the GPUs of its scale-up domain, which has `scale_up` of them; nic: one way,
    what a GPU has of its node's network cards. mesh: the links go from each GPU to each other
    one, so that a group of few GPUs has only a share of them. latency_us and nic_latency_us: of
    one hop. reached: TFLOP/s of the fastest 16-bit product that was measured (0: not known).
    stack: the software whose numbers are taken where none is named; borrowed: it was fitted on
    another maker's GPU.
    """

    name: str
    bf16: float
    memory_gb: float
    hbm: float
    link: float
    scale_up: int = 8
    nic: float = 50.0
    fp8: float = 0.0
    fp4: float = 0.0
    power: int = 0
    mesh: bool = False
    latency_us: float = 10.0
    nic_latency_us: float = 20.0
    reached: float = 0.0
    stack: str = ""
    borrowed: bool = False
    source: str = field(default="", compare=False)

    def peak(self, precision: str) -> float:
        """FLOP/s of matrix products in a precision. Raises: UsageError where it has none."""
        rates = {"bf16": self.bf16, "fp16": self.bf16, "fp8": self.fp8, "mxfp8": self.fp8,
                 "fp4": self.fp4}  # fmt: skip
        rate = rates.get(precision)
        if not rate:
            known = [x for x in ("bf16", "fp8", "fp4") if getattr(self, x)]
            raise UsageError(f"{self.name} has no rate for {precision}; it has {', '.join(known)}")
        return rate * 1e12


@dataclass(frozen=True)
class Level:
    """A level of the network: how many GPUs it joins, and what each of them sends at once.

    bandwidth: usable GB/s per GPU, one way. latency_us: of one hop.
    """

    name: str
    size: int
    bandwidth: float
    latency_us: float


@hashed_once
@dataclass(frozen=True)
class Cluster:
    """GPUs and the network between them, the innermost level first.

    memory_gb: what of a GPU's memory a run may use. nics_per_node: left out, one per GPU.
    """

    gpu: Gpu
    gpus: int
    levels: tuple[Level, ...]
    memory_gb: float

    @property
    def node(self) -> int:
        """GPUs of the innermost level: those that one scale-up network joins."""
        return min(self.levels[0].size, self.gpus)

    @property
    def memory(self) -> float:
        """Usable bytes per GPU."""
        return self.memory_gb * 1e9

    def level_of(self, span: int) -> Level:
        """The lowest level that joins this many neighbouring GPUs."""
        return next((x for x in self.levels if x.size >= span), self.levels[-1])

    def bus(self, size: int, stride: int) -> tuple[float, float]:
        """Bytes/s of a ring, and seconds of a hop, for a group of `size` GPUs `stride` apart.

        Groups that share a node share its network cards: a group that has a whole node for itself
        uses all of them.
        """
        level = self.level_of(size * stride)
        inner = self.levels[0]
        if level is inner or self.node == 1:
            share = (size - 1) / (inner.size - 1) if self.gpu.mesh and inner.size > 1 else 1.0
            return level.bandwidth * share * 1e9, level.latency_us * 1e-6
        members = max(1, self.node // stride)
        return min(inner.bandwidth, level.bandwidth * members) * 1e9, level.latency_us * 1e-6

    def ring(self, n_bytes: float, size: int, stride: int, rounds: int = 1) -> float:
        """Seconds of an all-gather or a reduce-scatter of a tensor; rounds 2: an all-reduce."""
        if size <= 1 or not n_bytes:
            return 0.0
        rate, hop = self.bus(size, stride)
        hops = min(size - 1, 2 * size.bit_length())
        return rounds * ((size - 1) / size * n_bytes / rate + (1 + hops / _HOPS) * hop)

    def all_to_all(self, n_bytes: float, size: int, stride: int, copies: float = 1.0) -> float:
        """Seconds in which every GPU of a group sends this much, evenly to all of the group.

        What stays within the innermost level and what leaves it move at the same time. copies: how
        much of the traffic between nodes remains where a token is sent once per node.
        """
        if size <= 1 or not n_bytes:
            return 0.0
        local = max(1, min(size, self.node // stride))
        inner, outer = self.levels[0], self.level_of(size * stride)
        near = n_bytes * (local - 1) / size / (inner.bandwidth * 1e9)
        if outer is inner:
            return near + inner.latency_us * 1e-6
        far = n_bytes * copies * (size - local) / size / (outer.bandwidth * 1e9)
        return max(near, far) + outer.latency_us * 1e-6

    def point_to_point(self, n_bytes: float, stride: int) -> float:
        """Seconds of one message between GPUs `stride` apart."""
        level = self.level_of(2 * stride)
        return n_bytes / (level.bandwidth * 1e9) + level.latency_us * 1e-6


@lru_cache(maxsize=1024)
def slowed(cluster: Cluster, share: float, latency: float) -> Cluster:
    """The cluster with a share of the rate on all levels but the innermost, and slower launches."""
    inner, *outer = (replace(x, latency_us=x.latency_us * latency) for x in cluster.levels)
    levels = (inner, *(replace(x, bandwidth=x.bandwidth * share) for x in outer))
    return replace(cluster, levels=levels)


def load_gpu(name: str) -> Gpu:
    """The GPU of a name in the catalogue. Raises: UsageError with the nearest names."""
    entry = catalogue_entry("gpus", name, "GPU")
    known_keys(entry, Gpu, name)
    return Gpu(**required(entry, Gpu, name))


@lru_cache(maxsize=1024)
def cluster_of(
    gpu: str,
    gpus: int,
    *,
    per_node: int | None = None,
    nic: float | None = None,
    memory_gb: float | None = None,
) -> Cluster:
    """A cluster of one kind of GPU in its usual nodes.

    per_node: GPUs per scale-up domain; nic: GB/s per GPU between the nodes; memory_gb: usable, left
    out what the GPU has.

    Raises: UsageError.
    """
    if gpus < 1:
        raise UsageError(f"gpus is {gpus}; it must be 1 or more")
    one = load_gpu(gpu)
    levels = _usual_levels(one, gpus, per_node or one.scale_up, nic or one.nic)
    return Cluster(one, gpus, levels, memory_gb or one.memory_gb)


def _usual_levels(gpu: Gpu, gpus: int, domain: int, nic: float) -> tuple[Level, ...]:
    return (
        Level("scale-up", domain, gpu.link * _USABLE_LINK, gpu.latency_us),
        Level("network", max(gpus, domain), nic * _USABLE_NIC, gpu.nic_latency_us),
    )


def load_cluster(path: str) -> Cluster:
    """The cluster of a TOML file: gpu, gpus, and what differs from its usual nodes.

    ```
    gpu = "h100"                  # a name of the catalogue, or a table with the keys of a GPU
    gpus = 512
    memory_gb = 76                # usable; left out, what the GPU has
    nics_per_node = 8             # left out, one per GPU
    [[levels]]                    # left out, those of the GPU's usual node
    name = "NVLink"
    size = 8
    bandwidth = 360               # usable GB/s per GPU, one way
    latency_us = 10
    ```

    Raises: UsageError for a missing or unknown key.
    """
    entry = load_toml(path)
    for key in entry:
        if key not in {"gpu", "gpus", "memory_gb", "nics_per_node", "nic", "levels"}:
            raise UsageError(f"{path}: {key} is not a known key of a cluster")
    for key in ("gpu", "gpus"):
        if key not in entry:
            raise UsageError(f"{path}: {key} is missing")
    gpu, gpus = _gpu_of(entry["gpu"], path), entry["gpus"]
    if type(gpus) is not int or gpus < 1:
        raise UsageError(f"{path}: gpus is {gpus!r}; it must be a whole number, 1 or more")
    levels = tuple(_level(x, path) for x in entry.get("levels", ()))
    if not levels:
        share = entry.get("nics_per_node", gpu.scale_up) / gpu.scale_up
        levels = _usual_levels(gpu, gpus, gpu.scale_up, entry.get("nic", gpu.nic) * share)
    if any(a.size >= b.size for a, b in pairwise(levels)):
        raise UsageError(f"{path}: levels must go from the innermost to the outermost")
    if levels[-1].size < gpus:
        raise UsageError(
            f"{path}: the outermost level joins {levels[-1].size} GPUs and the cluster has {gpus}; "
            "add a level that joins all"
        )
    return Cluster(gpu, gpus, levels, float(entry.get("memory_gb", gpu.memory_gb)))


def _gpu_of(given: Any, where: str) -> Gpu:
    if isinstance(given, str):
        return load_gpu(given)
    if not isinstance(given, Mapping):
        raise UsageError(f"{where}: gpu is {given!r}; it must be a name or a table")
    known_keys(given, Gpu, f"{where}: gpu")
    return Gpu(**required(given, Gpu, f"{where}: gpu"))


def _level(given: Any, where: str) -> Level:
    if not isinstance(given, Mapping):
        raise UsageError(f"{where}: a level is {given!r}; it must be a table")
    known_keys(given, Level, f"{where}: levels")
    level = Level(**required(given, Level, f"{where}: levels"))
    if level.size < 1 or level.bandwidth <= 0:
        raise UsageError(f"{where}: level {level.name} must have a size and a bandwidth above 0")
    return level
