"""Local ranks: started quickly, watched, and ended together.

The parent never imports torch: on the CPU the ranks are forked from a server that has imported it
once; on GPUs, where a process must not be forked from one that has used the driver, each starts on
its own.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

from hocket.errors import HocketError, RunError, UsageError

LATE = 6.0  # seconds after SIGTERM in which a rank may still say whom it lost
GRACE = 6.0  # seconds in which the others may end by themselves once one rank has failed
PRELOAD = ["torch", "torch.distributed", "hocket.train.training", "hocket.demo.gpt"]
_CUT = re.compile("Connection (reset|closed|refused)|Broken pipe")
_OURS = (
    str(Path(__file__).parents[1]),
    f"{os.sep}torch{os.sep}",
    f"{os.sep}multiprocessing{os.sep}",
)


class Failure(NamedTuple):
    """Why a rank ended. `rank` and `action` are those to blame, as far as this rank knows."""

    text: str
    rank: int | None
    action: str
    place: str
    is_users: bool


class _Message(NamedTuple):
    """What a rank sends to the parent: "tell", "done" or "failed", and the value."""

    what: str
    value: Any


def launch(
    fn: Callable[..., Any],
    nproc: int,
    args: Sequence[Any] = (),
    timeout: float = 60.0,
    *,
    listen: Callable[[Any], None] | None = None,
    device: str = "cpu",
    preload: Sequence[str] = (),
) -> list[Any]:
    """What `fn(*args)` returned on each of `nproc` local ranks, `[rank]`.

    On each rank the default process group exists (gloo on the CPU, NCCL on GPUs); `timeout` is
    how long its ranks wait for each other. With `listen`, `fn` gets a callable before its other
    arguments; what it is called with is handed to `listen` in this process. preload: modules that
    ranks on the CPU need, imported once for all. `fn`, its arguments
    and results must be picklable, `fn` importable. All processes have ended when this returns or
    raises, and they end when this process does.

    Raises: RunError when a rank fails or is killed, naming it; the HocketError of a rank that is
    about usage; KeyboardInterrupt after Ctrl-C.
    """
    with tempfile.TemporaryDirectory(prefix="hocket-") as folder:
        meeting = f"file://{folder}/ranks"
        context: Any = get_context("forkserver" if device == "cpu" else "spawn")
        if device == "cpu":
            _start_server(context, preload)
        team = _Team(listen)
        try:
            for rank in range(nproc):
                ours, theirs = context.Pipe(duplex=False)
                start = _Start(rank, nproc, meeting, timeout, device, listen is not None)
                process = context.Process(
                    target=_rank_main, args=(start, theirs, fn, tuple(args)), daemon=True
                )
                process.start()
                theirs.close()
                team.add(process, ours)
            team.watch()
        finally:
            team.end()
        return team.results()


def _start_server(context: Any, preload: Sequence[str]) -> None:
    """Starts the server that ranks are forked from, deaf to Ctrl-C and with one thread."""
    context.set_forkserver_preload([*PRELOAD, *preload])
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        forkserver.ensure_running()
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads


# --- in the parent ---------------------------------------------------------------------------


@dataclass
class _Team:
    """The processes of a launch, what they reported and how they ended, by rank."""

    listen: Callable[[Any], None] | None
    processes: list[Any] = field(default_factory=list)
    pipes: list[Any] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    killed: dict[int, int] = field(default_factory=dict)
    cut_off: list[int] = field(default_factory=list)

    def add(self, process: Any, pipe: Any) -> None:
        """Takes in the next rank."""
        self.processes.append(process)
        self.pipes.append(pipe)

    def watch(self) -> None:
        """Returns when every rank has ended, or when those left did not in time."""
        running = set(range(len(self.processes)))
        open_pipes = dict(enumerate(self.pipes))
        deadline = None
        while running:
            if deadline is None and (self.failures or self.killed):
                deadline = time.monotonic() + GRACE
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                self.cut_off = sorted(running)
                return
            ends = {self.processes[r].sentinel: r for r in running}
            ready = connection.wait([*ends, *open_pipes.values()], left)
            for rank, pipe in list(open_pipes.items()):
                if pipe in ready and not self._hear(rank):
                    del open_pipes[rank]
            for sentinel, rank in ends.items():
                if sentinel in ready:
                    running.discard(rank)
                    self._ended(rank, open_pipes)

    def _hear(self, rank: int) -> bool:
        """Takes one message of a rank; False when there will be no more."""
        try:
            message = self.pipes[rank].recv()
        except (EOFError, OSError):
            return False
        if message.what == "tell" and self.listen is not None:
            self.listen(message.value)
        elif message.what == "done":
            self.values[rank] = message.value
        elif message.what == "failed":
            self.failures[rank] = message.value
        return True

    def _ended(self, rank: int, open_pipes: dict[int, Any]) -> None:
        pipe = open_pipes.pop(rank, None)
        while pipe is not None and pipe.poll() and self._hear(rank):
            pass
        self.processes[rank].join()
        if rank not in self.values and rank not in self.failures:
            self.killed[rank] = self.processes[rank].exitcode

    def end(self) -> None:
        """Ends what still runs, and waits for it."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            pipe.close()

    def results(self) -> list[Any]:
        """The ranks' results by rank; raises what went wrong."""
        if not (self.failures or self.killed or self.cut_off):
            return [self.values[rank] for rank in range(len(self.processes))]
        failure = self._cause()
        if failure.is_users:
            raise UsageError(failure.text)
        lines = failure.text.splitlines()
        told = {line.strip() for line in lines}
        for other, said in sorted(self.failures.items()):
            for line in map(str.strip, said.text.splitlines()):
                if line not in told:
                    told.add(line)
                    lines.append(f"  {_by(other, line)}")
        for other in self.cut_off:
            lines.append(f"  rank {other} did not end by itself in {GRACE:g} s and was killed")
        if failure.place:
            lines.append(failure.place)
        raise RunError("\n".join(lines), rank=failure.rank, action=failure.action)

    def _cause(self) -> Failure:
        """What to say first: of the rank whose end explains the others'."""
        for rank, code in self.killed.items():
            action = self._awaited(rank)
            return Failure(_how_killed(rank, code, action), rank, action, "", False)
        own = [f for rank, f in self.failures.items() if f.rank == rank]
        return own[0] if own else next(iter(self.failures.values()))

    def _awaited(self, rank: int) -> str:
        """What the others say that they were waiting for from this rank."""
        pattern = re.compile(rf"waiting for (\S+) of rank {rank}\b")
        said = (pattern.search(failure.text) for failure in self.failures.values())
        return next((match[1] for match in said if match), "")


def _by(rank: int, text: str) -> str:
    return text if text.startswith("rank ") else f"rank {rank}: {text}"


def _how_killed(rank: int, code: int, action: str) -> str:
    """What to say of a rank that could not: `action` is what the others awaited of it."""
    when = f" before its {action} was done" if action else ""
    if code >= 0:
        return f"rank {rank} ended{when} with exit code {code} and no message"
    name = signal.Signals(-code).name
    hint = "; perhaps it ran out of memory" if -code == signal.SIGKILL else ""
    return f"rank {rank} was killed by {name}{when}{hint}"


# --- in a rank -------------------------------------------------------------------------------


class _Start(NamedTuple):
    """What a rank receives at its start."""

    rank: int
    nproc: int
    meeting: str
    timeout: float
    device: str
    listens: bool


def _rank_main(start: _Start, pipe: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The life of one rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        join_group(start.rank, start.nproc, start.meeting, start.timeout, start.device)
        heads = (lambda value: pipe.send(_Message("tell", value)),) if start.listens else ()
        message = pickle.dumps(_Message("done", fn(*heads, *args)))
        code = 0
    except BaseException as error:
        message, code = pickle.dumps(_Message("failed", failure(error, start.rank))), 1
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(message)
    pipe.close()
    # Without the destructors of torch: after a failure they may wait for ranks that are gone.
    os._exit(code)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def join_group(rank: int, nproc: int, meeting: str, timeout: float, device: str) -> None:
    """Makes the default process group of this process; `meeting` is its init_method."""
    import torch
    from torch import distributed

    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank))
        torch.cuda.set_device(local % torch.cuda.device_count())
    else:
        torch.set_num_threads(max(1, cores() // nproc))
    if meeting.startswith("file:") and sys.platform == "linux":
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", "lo"
        )  # all on this machine: no names to look up
    try:
        distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo", init_method=meeting, rank=rank,
            world_size=nproc, timeout=timedelta(seconds=timeout),
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        if not meeting.startswith("env:"):
            raise
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        reason = str(error).partition("\n")[0]
        raise RunError(f"rank {rank} cannot meet the others at {where}: {reason}") from None


def end_late() -> None:
    """Lets SIGTERM end this process only LATE seconds later.

    A launcher ends all ranks of its machine once one is gone. Those know which one that was, and
    the ranks of other machines would take them for the cause.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wait() -> None:  # the main thread may be in a wait, where it runs no handlers
        while os.read(reader, 1) != bytes([signal.SIGTERM]):
            pass
        time.sleep(LATE)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="hocket-end", daemon=True).start()


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def failure(error: BaseException, rank: int) -> Failure:
    """What to report of an error that ended this rank."""
    if isinstance(error, RunError):
        cause = error.__cause__
        blamed = rank if error.rank is None else error.rank
        foreign = cause is not None and not isinstance(cause, HocketError)
        place = _place(cause) if foreign and blamed == rank else ""
        return Failure(str(error), blamed, error.action, place, False)
    if isinstance(error, HocketError):
        return Failure(str(error), rank, "", "", True)
    text = _named(error)
    if _CUT.search(text):
        return Failure(f"rank {rank} lost its connection to another rank", None, "", "", False)
    return Failure(f"rank {rank} failed: {text}", rank, "", _place(error), False)


def _named(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _place(error: BaseException) -> str:
    """The lines of the user's own code that an error came through, or of the last one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in _OURS)]
    return "".join(traceback.format_list(own or frames[-1:])).rstrip()
