"""A flight recorder for messages and collectives on any backend, for `hocket diagnose`.

    from hocket.runtime.recorder import record

    record("dumps")  # after init_process_group

It sees every `send`, `recv` and collective of every process group, whoever calls it, keeps the last
ones in a ring, and writes them where the process fails, gets a signal, or waits for too long.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch._C._distributed_c10d import Backend, ProcessGroup, Work

from hocket.errors import UsageError
from hocket.runtime.transport import BARE

# Methods of a process group, by what Flight Recorder calls them.
_MESSAGES = {"send": "send", "recv": "recv"}
_COLLECTIVES = {
    "allreduce": "all_reduce", "broadcast": "broadcast", "reduce": "reduce", "barrier": "barrier",
    "allgather": "all_gather", "_allgather_base": "_all_gather_base", "gather": "gather",
    "scatter": "scatter", "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "_reduce_scatter_base", "alltoall": "all_to_all",
    "alltoall_base": "all_to_all", "allreduce_coalesced": "allreduce_coalesced",
}  # fmt: skip
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class _Group(NamedTuple):
    """A process group: its name, what it is for, its ranks among all, and the place of this one."""

    name: str
    desc: str
    ranks: list[int]
    rank: int
    backend: str


@dataclass(eq=False, slots=True)
class _Entry:
    """One call; ended: when its wait returned."""

    number: int
    name: str
    group: _Group
    peer: int | None
    seq: int
    tag: int | None
    part: str
    sizes: list[torch.Size]
    dtypes: list[torch.dtype]
    created: int
    work: Any = None
    waiting: int = 0
    failed: bool = False
    ended: int | None = None


@dataclass(eq=False)
class Recorder:
    """The last calls of this process, and what writes them to `folder`.

    after: seconds of waiting for one call after which they are written.
    """

    folder: Path
    size: int
    after: float
    entries: deque[_Entry] = field(init=False)
    counts: dict[Any, int] = field(default_factory=dict)
    by_work: dict[int, _Entry] = field(default_factory=dict)
    groups: dict[int, _Group] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)
    undo: list[tuple[Any, str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.entries = deque(maxlen=self.size)
        self.numbers = itertools.count()
        self.rank = distributed.get_rank()
        self.path = self.folder / f"hocket_rank_{self.rank}.json"

    # --- what is recorded ---------------------------------------------------------------

    def patch(self) -> None:
        """From now on the calls are recorded."""
        for owner in (ProcessGroup, Backend):  # hocket's Pipeline calls the latter
            for name in filter(owner.__dict__.__contains__, (*_MESSAGES, *_COLLECTIVES)):
                self._replace(owner, name, self._recorded(name))
        self._replace(Work, "wait", self._waited)

    def _replace(self, owner: Any, name: str, make: Any) -> None:
        original = getattr(owner, name)
        self.undo.append((owner, name, owner.__dict__[name]))  # binds, unlike what getattr gives
        setattr(owner, name, make(original))

    def _recorded(self, method: str) -> Any:
        def make(original: Any) -> Any:
            def call(group: Any, *args: Any, **options: Any) -> Any:
                entry = self._entry(method, group, args)
                work = original(group, *args, **options)
                if work is not None:
                    key = id(work)
                    self.by_work[key] = entry
                    entry.work = weakref.ref(work, lambda _: self.by_work.pop(key, None))
                return work

            return call

        return make

    def _waited(self, original: Any) -> Any:
        def wait(work: Any, *args: Any, **options: Any) -> Any:
            entry = self.by_work.get(id(work))
            if entry is None:
                return original(work, *args, **options)
            entry.waiting = time.time_ns()
            entry.failed = True  # unless it returns
            out = original(work, *args, **options)
            entry.ended, entry.failed = time.time_ns(), False
            return out

        return wait

    def _entry(self, method: str, group: Any, args: tuple[Any, ...]) -> _Entry:
        tensors = list(_tensors(args))
        name, peer, tag = _COLLECTIVES.get(method, method), None, None
        if method in _MESSAGES:
            peer, tag = args[1:3]
        if id(group) not in self.groups:
            self.groups[id(group)] = _group(group)
        known = self.groups[id(group)]
        key = known.name, method if peer is not None else "", peer
        seq = self.counts[key] = self.counts.get(key, 0) + 1
        entry = _Entry(
            next(self.numbers), name, known, peer, seq, tag, _part(group, tensors),
            [x.shape for x in tensors], [x.dtype for x in tensors], time.time_ns(),
        )  # fmt: skip
        self.entries.append(entry)
        return entry

    # --- when it is written -------------------------------------------------------------

    def watch(self) -> None:
        """Writes on a signal, on an error that ends the process, and after a long wait."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, lambda *_: None)
            signal.set_wakeup_fd(writing)  # the handler of a blocked main thread would never run
        threads = [
            threading.Thread(target=self._signals, args=(reading,), daemon=True),
            threading.Thread(target=self._late, daemon=True),
        ]
        for one in threads:
            one.start()

        def end() -> None:  # Python's exit may abort in a thread that still runs
            self.ended.set()
            os.write(writing, b"\0")
            for one in threads:
                one.join(timeout=1.0)

        atexit.register(end)
        before = sys.excepthook

        def failed(kind: type[BaseException], error: BaseException, where: Any) -> None:
            self.write(f"{kind.__name__}: {error}")
            before(kind, error, where)

        sys.excepthook = failed

    def _signals(self, reading: int) -> None:
        while data := os.read(reading, 1):
            if self.ended.is_set():
                return
            number = signal.Signals(data[0])
            self.write(f"signal {number.name}")
            if number == signal.SIGTERM:
                os._exit(128 + number)

    def _late(self) -> None:
        written: _Entry | None = None
        while not self.ended.wait(min(1.0, self.after / 4)):
            late = time.time_ns() - self.after * 1e9
            for entry in [*self.entries]:
                waits = entry.waiting and entry.ended is None and entry.waiting < late
                if waits and entry is not written:
                    written = entry
                    self.write(f"{entry.name} waited for more than {self.after:g} s")

    def write(self, reason: str) -> None:
        """Writes what was recorded, by the schema of Flight Recorder."""
        entries = [*self.entries]
        text = {
            "hocket_dump": 1, "version": "2.10", "rank": self.rank, "reason": reason,
            "stack": _stack(),
            "pg_config": {
                x.name: {"name": x.name, "desc": x.desc, "ranks": str(x.ranks)}
                for x in [*self.groups.values()]
            },
            "entries": [_as_json(entry) for entry in entries],
        }  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(text))
        new.replace(self.path)

    def stop(self) -> None:
        """Records no more."""
        for owner, name, original in reversed(self.undo):
            setattr(owner, name, original)


def record(folder: str | Path, *, size: int = 2000, after: float = 300.0) -> Recorder:
    """The recorder of this process, switched on; its dumps go to `folder`, a file per rank.

    size: the number of calls that are kept. after: seconds of waiting for one call after which
    they are written; also on an error, SIGTERM (which still ends the process) and SIGUSR1.

    Raises: UsageError before init_process_group.
    """
    if not distributed.is_initialized():
        raise UsageError("record() comes after torch.distributed.init_process_group")
    recorder = Recorder(Path(folder), size, after)
    recorder.patch()
    recorder.watch()
    return recorder


def _group(one: Any) -> _Group:
    """What is known of a process group, or of the backend of one."""
    for group in distributed.distributed_c10d._world.pg_names:
        own = [group._get_backend(device) for device in group._device_types]
        if one is group or any(one is backend for backend in own):
            ranks = distributed.get_process_group_ranks(group)
            backend = distributed.get_backend(group)
            return _Group(group.group_name, group.group_desc, ranks, group.rank(), backend)
    return _Group(f"unknown {one.rank()} of {one.size()}", "", [], one.rank(), "unknown")


def _part(group: Any, tensors: Sequence[torch.Tensor]) -> str:
    """What a message of hocket's own Pipeline is a part of: a header, or values; else nothing."""
    if isinstance(group, ProcessGroup):
        return ""
    return "header" if [x.numel() for x in tensors] == [BARE.nbytes] else "values"


def _tensors(args: tuple[Any, ...]) -> Any:
    """The tensors in the arguments of a call."""
    for one in args:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(tuple(one))


def _stack() -> list[str]:
    """Where the main thread is, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.extract_stack(frame) if frame is not None else []
    return [f"{x.filename}:{x.lineno} {x.name}" for x in reversed(frames)][:20]


def _as_json(entry: _Entry) -> dict[str, Any]:
    work = None if entry.work is None else entry.work()
    done = entry.ended is not None
    if not entry.failed and work is not None:  # a failed one counts as completed
        done = done or work.is_completed()
    state = "completed" if done else "started" if entry.waiting else "scheduled"
    group, sign = entry.group, "<-" if entry.name == "recv" else "->"
    sizes = [[*size] for size in entry.sizes]
    dtypes = [str(one).removeprefix("torch.") for one in entry.dtypes]
    ends = "" if entry.peer is None else f" {group.rank}{sign}{entry.peer}"
    return {
        "record_id": entry.number, "process_group": [group.name, group.desc],
        "collective_seq_id": 0 if ends else entry.seq, "p2p_seq_id": entry.seq if ends else 0,
        "profiling_name": f"{group.backend}:{entry.name}{ends}", "state": state,
        "retired": done, "is_p2p": bool(ends), "time_created_ns": entry.created,
        "time_discovered_completed_ns": entry.ended, "input_sizes": sizes,
        "output_sizes": sizes, "input_dtypes": dtypes, "tag": entry.tag,
        "part": entry.part,
    }  # fmt: skip
