"""What joins a rank to the others: the group, what all agree on, and how a failure reaches all.

Knows nothing of modules or gradients.
"""

from __future__ import annotations

import json
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from hocket.errors import HocketError, RunError
from hocket.ir import Schedule
from hocket.runtime.cuda import NcclWire
from hocket.runtime.execute import Execution
from hocket.runtime.failure import Board, Place, Roll, Watch, failure, place
from hocket.runtime.handshake import agree, exchange, host
from hocket.runtime.program import Role
from hocket.runtime.transport import Wire, break_connections


class Session:
    """The ranks of one pipeline, from the first meeting to the last message.

    rank, size: of this rank in the group of the pipeline. wire: the messages between its ranks;
    None where there is one. replicas: the group of this rank's replicas, or None. names: the
    number of each rank of the pipeline among all processes. hosts: on which machine each is.
    running: the execution that is under way.
    """

    def __init__(
        self, schedule: Schedule, group: Any, replicas: Any, *, device: torch.device,
        timeout: float, make_wire: type[Wire],
    ) -> None:  # fmt: skip
        group, replicas = _group(group, "group"), _group(replicas, "data_parallel")
        self.replicas, self.device, self.timeout = replicas, device, timeout
        self.rank, self.size, self.wire = _wire(group, schedule, timeout, device, make_wire)
        self.names = _names(group, self.size, replicas)
        self.hosts: list[str] = []
        self.running: Execution | None = None
        self._board = Board(None, "")
        self._phase = self._broken = ""
        wires = [replicas, None if self.wire is None else self.wire.group]
        self._break = partial(_break, [one for one in wires if one is not None])
        stores = (getattr(one, "store", None) for one in (group, replicas))
        self._store = next((store for store in stores if store is not None), None)

    @property
    def tagged(self) -> bool:
        """Whether receives may be posted in any order."""
        return self.wire is None or self.wire.tagged

    @property
    def replica(self) -> int:
        """The number of this pipeline among its replicas."""
        return 0 if self.replicas is None else self.replicas.rank()

    def meet(
        self, prepare: Callable[[], Any], same: Mapping[str, str], own: Mapping[str, Any]
    ) -> tuple[Any, list[dict[str, Any]]]:
        """What `prepare` returns, and the `own` words of every rank; collective.

        same: what must be equal on all ranks, in words.

        Raises: RunError where ranks differ or one of them cannot run; a HocketError of `prepare`
        that is the same on all ranks.
        """
        prepared: list[Any] = []
        error: HocketError | None = None
        try:
            prepared.append(prepare())
        except HocketError as failed:
            error = failed
        words = {
            "problem": "" if error is None else str(error), "same": same, "host": host(),
            "token": secrets.token_hex(8), **own,
        }  # fmt: skip
        alone = self.wire is None and self.replicas is None
        if self._store is None and not alone and torch.distributed.is_initialized():
            self._store = torch.distributed.distributed_c10d._get_default_store()
        self._roll = Roll(self._store, self.names, self.names[self.rank])
        every = [
            json.loads(raw) for raw in self._together(json.dumps(words).encode(), self.exchange)
        ]
        try:
            agree(every)
        except RunError:
            if error is not None and all(s["problem"] == words["problem"] for s in every):
                raise error from None
            raise
        self.hosts, token = [s["host"] for s in every], every[0]["token"]
        if self.replicas is not None:  # all of them look at one board
            token = self._together(token.encode(), self.exchange_with_replicas)[0].decode()
        self._watch_for_failures(token)
        return prepared[0], every

    def _together(self, words: bytes, exchange: Callable[[bytes], list[bytes]]) -> list[bytes]:
        """What all gave while the pipeline is built.

        Raises: RunError that names the ranks that did not come.
        """
        try:
            return exchange(words)
        except RuntimeError as error:
            text, rank = self._roll.missing(str(error), self.timeout)
            raise RunError(text, rank=rank) from None

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank of the pipeline gave, by rank; collective."""
        return exchange(self.wire, self.size, data)

    def exchange_with_replicas(self, data: bytes) -> list[bytes]:
        """What every replica of this rank gave, by replica; collective."""
        if _is_nccl(self.replicas):
            every: list[Any] = [None] * self.replicas.size()
            torch.distributed.all_gather_object(every, data, group=self.replicas)
            return every
        wire = Wire(self.replicas, self.timeout, torch.device("cpu"))
        return exchange(wire, self.replicas.size(), data)

    def wait(self, work: Any) -> None:
        """Waits for a transfer of any group, `timeout` seconds at most."""
        work.wait(timedelta(seconds=self.timeout))

    def _watch_for_failures(self, token: str) -> None:
        own = self.names[self.rank]
        others = _others(self.replicas, own, self.size)
        ranks = [name + other - own for other in (own, *others) for name in self.names]
        self._board = Board(self._store, f"hocket/{token}", others, ranks)
        period = min(self.timeout / 6, 5.0)
        self._watch = Watch(self, self._board, own, period, self._break, _where(self))
        if self.wire is not None:
            weakref.finalize(self, self.wire.close)

    # --- failure ----------------------------------------------------------------------------

    def guard(self, call: Callable[[], Any], phase: str) -> Any:
        """What a call returns; its failure is reported to all ranks and ends the pipeline.

        phase: what it is, in words; "" for an execution, which says itself where it is.

        Raises: RunError that names the first rank that failed, where and why.
        """
        if self._broken:
            raise RunError(f"this pipeline has ended: {self._broken}")
        self._phase = phase
        try:
            return call()
        except BaseException as error:
            at, communicating = self._at(error)
            failed = failure(
                error, self.names[self.rank], at, communicating, self._board, self._break
            )
            self._broken = str(failed)
            self._roll.end(self._broken)
            self._break()
            if self.running is not None:
                self.running.end()
            self._board.stay()
            if not isinstance(error, Exception):
                raise
            raise failed from (None if communicating else error)

    def run(self, execution: Execution, call: Callable[[], Any]) -> None:
        """Calls what runs an execution; meanwhile the others can be told where this rank is."""
        self.running = execution
        try:
            self.guard(call, "")
        finally:
            self.running = None

    def _at(self, error: BaseException) -> tuple[Place, bool]:
        """Where this rank is, and whether the error came from a message."""
        running = self.running
        foreign = isinstance(error, RuntimeError)
        if running is None:
            return Place(self._phase), foreign and not self._phase.startswith("the start")
        entry = running.current
        return place(running.program, entry, self.names), (
            foreign and entry is not None and entry.role not in (Role.RUN, Role.HAND)
        )

    def close(self) -> None:
        """Ends the threads of this session."""
        self._watch.end()
        if self.wire is not None:
            self.wire.close()


def _where(session: Session) -> Callable[[], tuple[Any, Place] | None]:
    """Where a session is, without keeping it alive."""
    reference = weakref.ref(session)

    def where() -> tuple[Any, Place] | None:
        session = reference()
        running = None if session is None else session.running
        if session is None or running is None:
            return None
        at = place(running.program, running.current, session.names)
        return (id(running.times), len(running.times)), at

    return where


def _break(groups: Sequence[Any]) -> None:
    for group in groups:
        break_connections(group)


def _names(group: Any, size: int, replicas: Any) -> list[int]:
    """The number of each rank of a pipeline among all processes, for messages about failures."""
    if isinstance(group, torch.distributed.ProcessGroup):
        return torch.distributed.get_process_group_ranks(group)
    first = 0 if replicas is None else replicas.rank() * size
    return list(range(first, first + size))


def _others(replicas: Any, own: int, size: int) -> list[int]:
    """The numbers of the other replicas of a rank; `own` is its own number."""
    if replicas is None:
        return []
    if isinstance(replicas, torch.distributed.ProcessGroup):
        every = torch.distributed.get_process_group_ranks(replicas)
    else:
        every = [own + (i - replicas.rank()) * size for i in range(replicas.size())]
    return [r for r in every if r != own]


def _is_nccl(group: Any) -> bool:
    known = isinstance(group, torch.distributed.ProcessGroup)
    return known and torch.distributed.get_backend(group) == "nccl"


def _group(given: Any, what: str) -> Any:
    """The process group of a DeviceMesh; anything else as it is.

    Raises: RunError for a mesh of several dimensions.
    """
    if not isinstance(given, DeviceMesh):
        return given
    if given.ndim != 1:
        names = given.mesh_dim_names or range(given.ndim)
        raise RunError(
            f"{what}= is a mesh of {given.ndim} dimensions ({', '.join(map(str, names))}); give "
            "one of them, such as mesh['pp']"
        )
    return given.get_group()


def _wire(
    group: Any, schedule: Schedule, timeout: float, device: torch.device, make: type[Wire]
) -> tuple[int, int, Wire | None]:
    """Rank, number of ranks, and the wire; none where there is only one rank."""
    if group is None and torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
    if group is None:
        if schedule.p > 1:
            raise RunError(
                "there is no process group; call torch.distributed.init_process_group first"
            )
        return 0, 1, None
    rank, size, backend = group.rank(), group.size(), group
    if size == 1:
        return 0, 1, None
    if _is_nccl(group):
        return rank, size, NcclWire(group, timeout, device, schedule.placement)
    if isinstance(group, torch.distributed.ProcessGroup):
        backend = group._get_backend(torch.device("cpu"))
    return rank, size, make(backend, timeout, device)
