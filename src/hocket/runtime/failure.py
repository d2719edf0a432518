"""What happens when a rank raises, dies or hangs: everyone ends, and all name the first cause.

A rank that fails writes down who, where and why in the store of the process group, then breaks its
connections; that wakes its neighbours, which do the same. A rank that is cut off writes down whom
it lost first: one that lost another and is gone itself (a launcher ended it, say) is not the cause.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.distributed import PrefixStore

from hocket.deps import PARTNER
from hocket.errors import RunError
from hocket.ir import action_of
from hocket.runtime.program import Entry, Program, Role

# Seconds in which the rank that broke a connection may say why, before this one says what it sees;
# a rank that knows less (not even who is gone) leaves the word to others for longer.
GRACE = 0.5
LONG_GRACE = 3.0
STAY = 2.0  # seconds in which the others may read what this rank said, should it hold the store
_COMPILERS = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")


class Place(NamedTuple):
    """Where a rank is: its action in words, and whom it waits for (rank, their action).

    peer: the rank on the other side of its message, waited for or not.
    """

    action: str
    waits_for: tuple[int, str] | None = None
    peer: int | None = None

    def __str__(self) -> str:
        if self.waits_for is None:
            return f"in {self.action}"
        rank, action = self.waits_for
        return f"in {self.action}, waiting for {action} of rank {rank}"


def place(program: Program, entry: Entry | None, names: Sequence[int]) -> Place:
    """Where a rank is that runs this entry; None: after the last one.

    names: the number of each rank of the schedule among all processes.
    """
    if entry is None:
        return Place("the end of the step")
    action = program.action(entry)
    if action.kind not in PARTNER:
        return Place(str(action))
    kind, offset = PARTNER[action.kind]
    partner = f"{action.stage + offset}{kind.name}{action.mb}"
    peer = names[program.peer[entry.action]]
    waits_for = (peer, partner) if entry.role in (Role.WAIT, Role.RELEASE) else None
    label = _consumer(program, entry) if entry.role is Role.WAIT else str(action)
    return Place(label, waits_for, peer)


def _consumer(program: Program, entry: Entry) -> str:
    """The computation that a WAIT precedes."""
    entries = program.entries
    at = entries.index(entry)
    after = next(e for e in entries[at:] if e.role is Role.RUN)
    return str(action_of(program.schedule.codes[after.action]))


class _Notes:
    """What ranks leave each other in the store of a process group."""

    def __init__(self, store: Any, prefix: str) -> None:
        self.store: Any = None if store is None else PrefixStore(prefix, store)
        self.gone = store is None  # also once the store has died with its rank

    def _ask(self, call: Callable[[], Any]) -> Any:
        """What the store says; None once it does not answer any more."""
        if self.gone:
            return None
        try:
            return call()
        except RuntimeError:
            self.gone = True
            return None

    def _get(self, key: str) -> bytes | None:
        return self._ask(lambda: self.store.get(key) if self.store.check([key]) else None)


class Board(_Notes):
    """The few words that ranks leave each other on failure; without a store, each sees only itself.

    others: the ranks that the stages of this one may exchange messages of their own with.
    ranks: all that have a part in the step.
    """

    def __init__(
        self, store: Any, prefix: str, others: Sequence[int] = (), ranks: Sequence[int] = ()
    ) -> None:
        super().__init__(store, prefix)
        self.others, self.ranks = others, ranks

    def first(self, record: dict[str, Any]) -> dict[str, Any]:
        """Leaves a record of the failure unless there is one; returns the one that stands."""
        text = self._ask(lambda: self.store.compare_set("failed", "", json.dumps(record)))
        return record if text is None else json.loads(text)

    def failed(
        self, wait: float = 0.0, known: Callable[[], Any] = lambda: None
    ) -> dict[str, Any] | None:
        """The record of the first failure, if one comes within `wait` seconds.

        known: gives the cause, None while it is not known; then nobody needs to wait for longer.
        """
        until = time.monotonic() + wait
        while True:
            record = self._read("failed")
            if record is not None or self.gone or time.monotonic() >= until:
                return record
            if known() is not None:
                return None
            time.sleep(0.05)

    def lose(self, loss: dict[str, Any]) -> None:
        """Leaves word of whom a rank has lost, and where it was."""
        key = f"lost/{loss['told_by']}"  # unlike `set`, this waits until it is there
        self._ask(lambda: self.store.compare_set(key, "", json.dumps(loss)))

    def only_silent(self) -> int | None:
        """The one rank that did not say whom it lost; None where there are more."""
        silent = [r for r in self.ranks if self._get(f"lost/{r}") is None]
        return silent[0] if len(silent) == 1 and not self.gone else None

    def first_loss(self, loss: dict[str, Any]) -> dict[str, Any]:
        """From one loss on to that of a rank that had not lost another itself."""
        seen = {loss["told_by"]}
        while loss["rank"] is not None and loss["rank"] not in seen:
            before = self._read(f"lost/{loss['rank']}")
            if before is None:
                return loss
            seen.add(loss["rank"])
            loss = before
        return loss | {"rank": self.only_silent()}

    def stay(self) -> None:
        """Waits until all ranks but a lost one have read the record, STAY seconds at most."""
        record = self._read("failed")
        if record is None:
            return
        ranks = len(self.ranks) - (record["rank"] != record["told_by"])
        until = time.monotonic() + STAY
        read = self._ask(lambda: self.store.add("read", 1))
        while read is not None and read < ranks and time.monotonic() < until:
            time.sleep(0.02)
            read = self._ask(lambda: self.store.add("read", 0))

    def say(self, rank: int, where: dict[str, Any]) -> None:
        """Leaves word of where a rank has been standing still."""
        self._ask(lambda: self.store.set(f"at/{rank}", json.dumps(where)))

    def heard(self, rank: int) -> dict[str, Any] | None:
        """What a rank said last."""
        return self._read(f"at/{rank}")

    def _read(self, key: str) -> dict[str, Any] | None:
        text = self._get(key)
        return None if text is None else json.loads(text)


class Roll(_Notes):
    """Who has come to build a pipeline, written down before the ranks first speak."""

    def __init__(self, store: Any, names: Sequence[int], own: int) -> None:
        super().__init__(store, f"hocket/roll/{zlib.crc32(repr([*names]).encode()):x}")
        self.names, self.own = names, own
        self._start = time.monotonic()
        self._count = self._ask(lambda: self.store.add(str(own), 1)) or 0
        self._before = self._get("ended")

    def end(self, text: str) -> None:
        """Writes down why a pipeline on these ranks has ended, and their group with it."""
        self._ask(lambda: self.store.set("ended", text))

    def _absent(self) -> list[int]:
        """The ranks that came less often than this one."""
        counts = {r: self._ask(lambda r=r: self.store.add(str(r), 0)) for r in self.names}
        return [r for r, n in counts.items() if n is not None and n < self._count]

    def missing(self, error: str, timeout: float) -> tuple[str, int | None]:
        """What to say when the ranks could not speak, and which rank is to blame."""
        late = time.monotonic() - self._start >= timeout
        if self._before is not None and not late:
            return (
                "the process group has ended with an earlier pipeline on it; make a new one with "
                f"torch.distributed.new_group. That pipeline ended so: {self._before.decode()}"
            ), None
        until = time.monotonic() + (0.0 if late else LONG_GRACE)
        while (absent := self._absent()) and time.monotonic() < until:
            time.sleep(0.05)  # others may be on their way
        if absent:
            who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
            how = f"did not come in {timeout:g} s" if late else "died before"
            text = f"{who} {how}, when the pipeline was built"
            self.end(text)
            return f"{text}\n  rank {self.own} was waiting for it", absent[0]
        now = self._get("ended")
        reason = error if now is None else now.decode()
        return f"the ranks could not speak while the pipeline was built: {reason}", None


class Watch:
    """A thread that says where this rank stands when it stands still, and hears of failures.

    `where()` gives (a number that grows with progress, the place), or None between steps.
    """

    def __init__(
        self, owner: Any, board: Board, rank: int, period: float, break_up: Callable[[], None],
        where: Callable[[], tuple[Any, Place] | None],
    ) -> None:  # fmt: skip
        self.board, self.rank, self.period = board, rank, period
        self.break_up, self.where = break_up, where
        self._stop = threading.Event()
        thread = threading.Thread(target=self._loop, name="hocket-watch", daemon=True)
        thread.start()
        self.end = weakref.finalize(owner, _ended, self._stop, thread)

    def _loop(self) -> None:
        before, since = None, 0.0
        while not self._stop.wait(self.period):
            now = self.where()
            if now is None or now[0] != before:
                before, since = (None if now is None else now[0]), time.time()
                continue
            at = now[1]
            text = f"compiling {at!s}" if compiling() else str(at)
            self.board.say(
                self.rank,
                {"action": at.action, "waits_for": at.waits_for, "since": since, "text": text},
            )
            if self.board.failed() is not None:
                self.break_up()
                return


def compiling() -> bool:
    """Whether some thread of this process is inside torch.compile."""
    frames: list[Any] = [*sys._current_frames().values()]
    for frame in frames:
        while frame is not None:
            if frame.f_code.co_filename.endswith(_COMPILERS):
                return True
            frame = frame.f_back
    return False


def _ended(stop: threading.Event, thread: threading.Thread) -> None:
    """Ends a thread and waits for that: Python's exit may abort in one that still runs."""
    stop.set()
    if thread is not threading.current_thread():
        thread.join(timeout=0.5)


def failure(
    error: BaseException, rank: int, at: Place, communicating: bool, board: Board,
    break_up: Callable[[], None],
) -> RunError:  # fmt: skip
    """The error to raise on this rank: it names the first rank that failed, where and why.

    break_up: breaks the connections of this rank, so that the others hear of it.
    """
    if _lost(error, communicating):
        board.lose(_loss(rank, at))
        break_up()
        if at.peer is None:
            record = board.failed(LONG_GRACE, board.only_silent)
        else:
            record = board.failed(GRACE)
    else:
        record = board.failed()
    if record is None:
        record = board.first(_record(error, rank, at, communicating, board))
    text = record["text"]
    if record["told_by"] != rank:
        text += f"\n  rank {rank} was {at}"
    return RunError(text, rank=record["rank"], action=record["action"])


def _record(
    error: BaseException, rank: int, at: Place, communicating: bool, board: Board
) -> dict[str, Any]:
    if _lost(error, communicating) and (communicating or board.only_silent() is not None):
        loss = board.first_loss(_loss(rank, at))
        who = "another rank" if loss["rank"] is None else f"rank {loss['rank']}"
        where = f"rank {loss['told_by']} was {loss['at']}, when the connection broke"
        return loss | {"text": f"{who} is gone (killed?): {where}"}
    late = _late(at, board) if isinstance(error, RuntimeError) and _timed_out(error) else None
    if not communicating and late is not None:
        return _hang(rank, at._replace(waits_for=late), board)
    if not communicating:
        what = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        text = f"rank {rank} failed in {at.action}: {what}"
        return {"rank": rank, "action": at.action, "text": text, "told_by": rank}
    return _hang(rank, at, board)


def _loss(rank: int, at: Place) -> dict[str, Any]:
    """What a rank says whose connection broke: whom it lost, if it knows that, and where it was."""
    culprit, action = at.waits_for if at.waits_for is not None else (at.peer, at.action)
    return {"rank": culprit, "action": action, "at": str(at), "told_by": rank}


def _late(at: Place, board: Board) -> tuple[int, str] | None:
    """Which of the others stands still elsewhere, and where, once a message of a stage's own is."""
    for other in board.others:
        said = board.heard(other)
        if said is not None and said["action"] != at.action:
            return other, said["action"]
    return None


def _lost(error: BaseException, communicating: bool) -> bool:
    """Whether an error says that a connection broke."""
    return (communicating or _cut_off(error)) and not _timed_out(error)


def _cut_off(error: BaseException) -> bool:
    """Whether a message of the stage's own failed, such as an all-to-all."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("connection" in text or "broken pipe" in text)


def _timed_out(error: BaseException) -> bool:
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def _hang(rank: int, at: Place, board: Board) -> dict[str, Any]:
    """Follows who waits for whom, from this rank to one that does not wait: it hangs."""
    lines = [f"rank {rank} was {at}"]
    seen, waits = {rank}, at.waits_for
    while waits is not None:
        culprit, action = waits
        said = board.heard(culprit)
        if said is None or culprit in seen:
            break
        seconds = time.time() - said["since"]
        lines.append(f"rank {culprit} has been {said['text']} for {seconds:.0f} s")
        seen.add(culprit)
        action, waits = said["action"], said["waits_for"]
    else:
        culprit, action = (None, at.action) if at.waits_for is None else (culprit, action)
    who = "another rank" if culprit is None else f"rank {culprit}"
    what = f"{who} does not answer in {action}"
    if "has been compiling" in lines[-1]:
        what = f"{who} takes longer to compile {action} than a message may (give timeout= more)"
    text = f"{what}:\n  " + "\n  ".join(lines)
    return {"rank": culprit, "action": action, "text": text, "told_by": rank}
