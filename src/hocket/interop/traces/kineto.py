"""Traces of torch.profiler (Kineto's Chrome JSON), one file per rank, as measured timelines.

What counts are the ranges `PP:2F0` that torch's pipeline runtime and ours write; where the GPU
was traced, what it did for them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from hocket.checker import check
from hocket.deps import CONSUMERS, PARTNER
from hocket.errors import TextError, UsageError
from hocket.interop.torch.csv import from_rows
from hocket.interop.torch.text import Item, read_word
from hocket.interop.traces.clocks import ONE, Line, lines_of
from hocket.interop.traces.lanes import (
    LONGEST,
    Slice,
    decoded,
    nanoseconds,
    overlapping,
    refuse,
)
from hocket.ir import MAX_RANK, Array, Schedule, action_of, encode
from hocket.lower import strip_communication
from hocket.measured import timeline_of
from hocket.measured.clocks import Messages, messages_of, until_received
from hocket.measured.readings import Readings, readings
from hocket.text import number_up_to
from hocket.timeline import Timeline

_LABEL = re.compile(r"PP:(\S+)(?: (\w+))?")
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)")
_MESSAGE_KERNEL = re.compile(r"nccl|SendRecv", re.IGNORECASE)


class Event(msgspec.Struct, gc=False):
    """What is needed of an event; times in us."""

    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: msgspec.Raw = msgspec.Raw()


class _Correlated(msgspec.Struct, gc=False):
    correlation: int | None = None


class _Distributed(msgspec.Struct):
    rank: int | None = None


class _File(msgspec.Struct):
    traceEvents: list[Event]
    distributedInfo: _Distributed | None = None
    host_name: str = ""
    baseTimeNanoseconds: int = 0


class Range(NamedTuple):
    """One labelled range; ns on the rank's clock.

    role: "" where it is the action itself, else what was done for it ("post", "wait", ...). work:
    when its first operation began; its end where it has none, None where none were traced.
    on_gpu: first start and last end of its kernels.
    """

    item: Item
    role: str
    start: int
    end: int
    work: int | None = None
    on_gpu: tuple[int, int] | None = None


@dataclass(frozen=True)
class RankTrace:
    """The ranges of one rank, by start."""

    source: str
    rank: int | None
    host: str
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Recording:
    """What the traces of one run say: a timeline per step, all on one clock, in us.

    notes: what was found out on the way, for people.
    """

    timelines: tuple[Timeline, ...]
    notes: tuple[str, ...]

    @property
    def typical(self) -> Timeline:
        """The step whose makespan is the median one."""
        ordered = sorted(self.timelines, key=lambda t: float(t.makespan))
        return ordered[(len(ordered) - 1) // 2]

    @property
    def readings(self) -> Readings:
        """The times of all steps."""
        return readings(self.timelines)


def is_kineto(data: bytes) -> bool:
    """True for the beginning of a file that torch.profiler wrote."""
    head = data[:4096]
    return b'"schemaVersion"' in head or b'"deviceProperties"' in head


def rank_trace(data: bytes, source: str = "<trace>") -> RankTrace:
    """The labelled ranges of one file.

    Raises: TextError for what is no such trace, or has ranges that no thread can have run.
    """
    file = decoded(data, _File, source, "a trace of torch.profiler")
    base = file.baseTimeNanoseconds
    if abs(base) > LONGEST * 1000:
        refuse(source, [f"baseTimeNanoseconds is {base}, beyond what a clock shows"])
    labels = [e for e in file.traceEvents if e.ph == "X" and e.name.startswith("PP:")]
    host = sorted((e for e in labels if e.cat != "gpu_user_annotation"), key=lambda e: e.ts)
    if not host:
        raise TextError(source, [(1, _no_ranges(file))])
    items = [_label(e) for e in host]
    refuse(source, _unreadable(host, items))
    known = [(i, *label) for i, label in enumerate(items) if isinstance(label, tuple)]
    on_gpu = _gpu_spans(file.traceEvents, host, source)
    starts = _operation_starts(file.traceEvents, {e.tid for e in host})
    try:
        ranges = tuple(
            _range(host[i], item, role, base, starts.get(host[i].tid, []), on_gpu.get(i))
            for i, item, role in known
        )
    except ValueError as error:
        raise TextError(source, [(1, str(error))]) from None
    work = [
        Slice(f"thread {host[i].tid}", f"PP:{r.item}", r.start - base, r.end - base)
        for (i, item, role), r in zip(known, ranges, strict=True)
        if item.is_compute and not role  # messages are posted and waited for beside it
    ]
    refuse(source, overlapping(work, _ROUNDING))
    rank = file.distributedInfo.rank if file.distributedInfo else None
    if rank is None and (found := _RANK_IN_NAME.search(Path(source).name)):
        rank = number_up_to(found[1], MAX_RANK)
    return RankTrace(source, rank, file.host_name, ranges)


_ROUNDING = 1000  # ns: what the profiler's times of neighbouring ranges may differ by


def _label(event: Event) -> tuple[Item, str] | str | None:
    """The item and the role that a range names, or what is wrong; None for other ranges."""
    match = _LABEL.fullmatch(event.name)
    if not match or match[1][0] not in "0123456789(":
        return None
    item = read_word(match[1])
    return item if isinstance(item, str) else (item, match[2] or "")


def _unreadable(events: Sequence[Event], labels: Sequence[tuple | str | None]) -> Iterator[str]:
    """A sentence for each range that ought to be an action and is none, or ends too early."""
    for e, label in zip(events, labels, strict=True):
        if isinstance(label, str):
            yield f"thread {e.tid}: the range {e.name[:80]!r} at {e.ts:.12g} us: {label}"
        elif label is not None and e.dur < 0:
            yield f"thread {e.tid}: the range {e.name!r} at {e.ts:.12g} us ends before it begins"


def _range(
    event: Event, item: Item, role: str, base: int, ops: Sequence[float],
    on_gpu: tuple[float, float] | None,
) -> Range:  # fmt: skip
    """A labelled range; ops: when operations of its thread began. Raises: ValueError."""
    begin, stop = event.ts, event.ts + event.dur
    first = bisect_left(ops, begin)
    inside = first < len(ops) and ops[first] <= stop
    work = ops[first] if inside else stop if ops else None
    return Range(
        item, role, base + nanoseconds(begin), base + nanoseconds(stop),
        None if work is None else base + nanoseconds(work),
        None if on_gpu is None else (base + nanoseconds(on_gpu[0]), base + nanoseconds(on_gpu[1])),
    )  # fmt: skip


_OTHERS = {
    "Megatron-LM": re.compile(r"(forward|backward)[-_](step|compute|recv|send).*"),
    "DeepSpeed": re.compile(r".*(_exec_\w+|(Forward|Backward)Pass|pipe_(send|recv)_\w+).*"),
}


def _no_ranges(file: _File) -> str:
    """Why a trace says nothing about a pipeline, and what would."""
    names = Counter(e.name for e in file.traceEvents if e.cat == "user_annotation")
    if any(name.startswith(("Forward ", "Backward ")) for name in names):
        return (
            "only ranges such as 'Forward 0': ScheduleGPipe does not say which action; run the "
            "order with hocket.runtime.torch_schedule, whose ranges are PP:2F0"
        )
    sentence = (
        "there are no ranges PP:2F0; torch's Schedule1F1B writes none: run the order with "
        "hocket.runtime.torch_schedule or hocket.runtime.Pipeline under torch.profiler"
    )
    if not names:
        return sentence
    tool = next((t for t, form in _OTHERS.items() if any(map(form.fullmatch, names))), None)
    whose = f" of {tool}" if tool else ""
    shown = ", ".join(repr(name[:40]) for name, _ in names.most_common(4))
    return (
        f"{sentence}. Its ranges{whose} are named {shown}; hocket reads PP:, stage, kind "
        "(F, B, I or W) and microbatch: put the calls of one forward or backward into "
        '`with torch.profiler.record_function(f"PP:{stage}F{microbatch}"):`'
    )


def _operation_starts(events: Sequence[Event], threads: set[int | str]) -> dict:
    """When operations began on the threads that write ranges, sorted; without messages."""
    out: dict[int | str, list[float]] = {}
    for e in events:
        if e.cat == "cpu_op" and e.tid in threads and not e.name.startswith("c10d::"):
            out.setdefault(e.tid, []).append(e.ts)
    return {tid: sorted(starts) for tid, starts in out.items()}


# --- the GPU ------------------------------------------------------------------------------------


def _gpu_spans(
    events: Sequence[Event], ordered: list[Event], source: str
) -> dict[int, tuple[float, float]]:
    """First start and last end on the GPU of each range, by its number in order of start.

    From the profiler's own device ranges where it wrote them, else from the kernels: each has a
    correlation number, that of the call that launched it; the call lies in the range in time.
    """
    device = [e for e in events if e.ph == "X" and e.cat == "gpu_user_annotation"]
    device = [e for e in device if e.name.startswith("PP:")]
    if device:
        return _by_occurrence(ordered, device)
    kernels = [e for e in events if e.ph == "X" and e.cat == "kernel"]
    if not kernels:
        return {}
    launched = _launched(events, source)
    return kernel_spans(
        [(e.ts, e.ts + e.dur) for e in ordered],
        [
            (launched[number], e.ts, e.ts + e.dur)
            for e in kernels
            if not _MESSAGE_KERNEL.search(e.name)
            and (number := _correlated(e, source).correlation) in launched
        ],
    )


def _launched(events: Sequence[Event], source: str) -> dict[int | None, float]:
    """When each kernel was launched, by its correlation number."""
    calls = (e for e in events if e.cat in ("cuda_runtime", "cuda_driver"))
    numbers = ((_correlated(e, source).correlation, e.ts) for e in calls)
    return {number: ts for number, ts in numbers if number is not None}


def _correlated(event: Event, source: str) -> _Correlated:
    raw = bytes(event.args)
    if b"correlation" not in raw:
        return _Correlated()
    return decoded(raw, _Correlated, source, f"the args of {event.name[:80]!r} at {event.ts} us")


def kernel_spans(
    ranges: Sequence[tuple[float, float]], kernels: Sequence[tuple[float, float, float]]
) -> dict[int, tuple[float, float]]:
    """The span of the kernels launched within each range (start, end; sorted, not nested).

    kernels: (when launched, start, end) each. A kernel launched outside of all ranges is left out.
    """
    starts = [start for start, _ in ranges]
    out: dict[int, tuple[float, float]] = {}
    for launched, start, end in kernels:
        i = bisect_left(starts, launched)
        i = i if i < len(starts) and starts[i] == launched else i - 1
        if i >= 0 and launched <= ranges[i][1]:
            first, last = out.get(i, (start, end))
            out[i] = min(first, start), max(last, end)
    return out


def _by_occurrence(host: list[Event], device: list[Event]) -> dict[int, tuple[float, float]]:
    """The k-th device range of a label belongs to its k-th range on the host."""
    spans: dict[str, list[Event]] = {}
    for e in sorted(device, key=lambda e: e.ts):
        spans.setdefault(e.name, []).append(e)
    seen: dict[str, Iterator[int]] = {}
    out = {}
    for i, e in enumerate(host):
        number = next(seen.setdefault(e.name, count()))
        if number < len(spans.get(e.name, ())):
            found = spans[e.name][number]
            out[i] = found.ts, found.ts + found.dur
    return out


# --- all ranks together ----------------------------------------------------------------------


def recording(traces: Sequence[RankTrace], name: str = "imported") -> Recording:
    """The steps of a run, from the traces of its ranks.

    Raises: UsageError where they do not fit together.
    """
    ordered = _by_rank(traces)
    steps = [_steps(trace) for trace in ordered]
    n = min(map(len, steps))
    notes = [f"{len(ordered)} ranks, {n} steps"]
    if max(map(len, steps)) > n:
        notes.append(f"not every rank has every step; the first {n} are taken")
    uses_gpu = any(r.on_gpu for trace in ordered for r in trace.ranges)
    if uses_gpu:
        notes.append("times of computation are those of the GPU")
    zero = min(r.start for trace in ordered for r in trace.ranges)
    raw = [_step([s[k] for s in steps], name, zero) for k in range(n)]
    for schedule in {one[0] for one in raw}:  # a step that cannot run has no critical path
        check(strip_communication(schedule)).raise_if_bad()
    lines, note = _clocks(ordered, raw, uses_gpu=uses_gpu)
    notes.append(note)
    timelines = []
    for (schedule, start, end), line in zip(raw, lines, strict=True):
        rank = schedule.rank_of_queue[schedule.queue_of_slot[schedule.slot_of_action]]
        offset, rate = (
            np.array([getattr(x, part) for x in line])[rank] for part in Line._fields[:2]
        )
        start, end = start + offset + rate * start, end + offset + rate * end
        if not all(r.work is not None for trace in ordered for r in trace.ranges):
            _wait_for_messages(schedule, start, end)
        end = until_received(schedule, start, end)
        if uses_gpu and schedule.has_communication:  # the GPU shows a message as its wait
            schedule, start, end = without_messages(schedule, start, end)
        zero = start.min()
        timelines.append(timeline_of(schedule, (start - zero) / 1e3, (end - zero) / 1e3))
    if not any(timeline.makespan for timeline in timelines):
        raise UsageError("the recording takes no time: all its ranges are empty")
    return Recording(tuple(timelines), tuple(notes))


def _wait_for_messages(schedule: Schedule, start: Array, end: Array) -> None:
    """Where no operations were traced: work begins when its messages were sent, not before."""
    at = {code: i for i, code in enumerate(schedule.codes.tolist())}
    for code, i in at.items():
        action = action_of(code)
        if action.kind not in CONSUMERS:
            continue
        sender, shift = PARTNER[action.kind]
        sent = at.get(encode(int(sender), action.stage + shift, action.mb))
        end[i] = min(end[i], max(start[i], -np.inf if sent is None else start[sent]))
        for kind in CONSUMERS[action.kind]:
            user = at.get(encode(int(kind), action.stage, action.mb))
            if user is not None:
                start[user] = min(max(start[user], end[i]), end[user])


def _clocks(
    traces: Sequence[RankTrace], steps: Sequence[tuple[Schedule, Array, Array]], *, uses_gpu: bool
) -> tuple[list[list[Line]], str]:
    """The line of each rank's clock in each step, and what is known of the clocks, for people.

    Ranks of one host read one clock, unless a message contradicts that.
    """
    parts = [messages_of(*one) if one[0].has_communication else _NO_MESSAGES for one in steps]
    names = [f"host {t.host}" if t.host and not uses_gpu else f"rank {r}"
             for r, t in enumerate(traces)]  # fmt: skip
    hosts = list(dict.fromkeys(names))
    clock = np.array([hosts.index(name) for name in names])
    between = [_of_clocks(part, clock) for part in parts]
    if any(early for _, early in between):
        hosts, clock = [f"rank {r}" for r in range(len(traces))], np.arange(len(traces))
        between = [_of_clocks(part, clock) for part in parts]
    if len(hosts) == 1:
        return [[ONE] * len(traces)] * len(steps), "the ranks read one clock"
    lines = lines_of(len(hosts), [part for part, _ in between])
    return [[line[c] for c in clock] for line in lines], _clock_note(hosts, lines)


_NO_MESSAGES = Messages(*(np.zeros(0, dtype=t) for t in (int, int, float, float)))


def _of_clocks(messages: Messages, clock: Array) -> tuple[Messages, bool]:
    """The messages between clocks; whether one within a clock arrives before it was sent."""
    senders, receivers = clock[messages.senders], clock[messages.receivers]
    out = senders != receivers
    early = bool((messages.received < messages.sent)[~out].any())
    return Messages(senders[out], receivers[out], messages.sent[out], messages.received[out]), early


def _clock_note(clocks: Sequence[str], lines: Sequence[Sequence[Line]]) -> str:
    """How the clocks were aligned, and which nothing bounds."""
    first = lines[0]
    parts = [
        f"{name} {line.offset / 1e3:+.1f} us"
        + (f" {line.rate * 1e6:+.1f} ppm" if line.rate else "")
        + f" (within {abs(line.within) / 1e3:.1f} us)"
        for name, line in zip(clocks[1:], first[1:], strict=True)
        if line.within is not None
    ]
    free = [n for k, n in enumerate(clocks) if any(line[k].within is None for line in lines)]
    sentences = [f"clocks aligned by messages: {', '.join(parts)}"] if parts else []
    windows = 1 + sum(a is not b for a, b in pairwise(lines))
    if windows > 1:
        sentences.append(f"no line fits the whole recording: {windows} parts of it have their own")
    if free:
        sentences.append(
            f"nothing bounds the clock of {', '.join(free)}: no messages go both ways, so times "
            f"between it and {clocks[0]}, the makespan among them, may be wrong by any amount"
        )
    return "; ".join(sentences)


def _by_rank(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces by rank; numbered anew from 0, since the ranks of a run may be those of many."""
    if not traces:
        raise UsageError("there are no traces; give one file per rank")
    ranks = [trace.rank for trace in traces]
    if None in ranks and len(traces) > 1:
        bad = traces[ranks.index(None)].source
        raise UsageError(f"{bad} does not say its rank; name the file like trace_rank0.json")
    doubled = [t for t in traces if ranks.count(t.rank) > 1]
    if doubled:
        raise UsageError(f"{doubled[0].source} and {doubled[1].source} are both of rank "
                         f"{doubled[0].rank}")  # fmt: skip
    ordered = sorted(traces, key=lambda t: t.rank or 0)
    owner: dict[Item, RankTrace] = {}
    for trace in ordered:
        for item in {leaf for r in trace.ranges for leaf in r.item.leaves if leaf.type == "F"}:
            other = owner.setdefault(item, trace)
            if other is not trace:
                raise UsageError(
                    f"{other.source} and {trace.source} both run {item}: they are of two replicas "
                    "of the pipeline; give the traces of one"
                )
    _refuse_missing(ordered)
    return ordered


def _refuse_missing(traces: Sequence[RankTrace]) -> None:
    """Where messages go to or come from a stage that no trace runs, that rank's file is missing."""
    actions = [(trace, a) for trace in traces for r in trace.ranges for a in r.item.actions]
    run = {a.stage for _, a in actions if a.kind not in PARTNER}
    for trace, a in actions:
        if a.kind in PARTNER and (other := a.stage + PARTNER[a.kind][1]) not in run:
            raise UsageError(
                f"{trace.source}: {a} is a message with stage {other}, which no trace here runs; "
                "give the traces of all ranks of the pipeline"
            )


def _steps(trace: RankTrace) -> list[list[Range]]:
    """The ranges step by step: the k-th of each label belongs to step k.

    Raises: TextError where steps do not follow each other then.
    """
    seen: dict[tuple[Item, str], Iterator[int]] = {}
    out: list[list[Range]] = []
    for found in trace.ranges:
        k = next(seen.setdefault((found.item, found.role), count()))
        while len(out) <= k:
            out.append([])
        out[k].append(found)
    for k, (step, after) in enumerate(pairwise(out)):
        last, first = step[-1], after[0]
        if first.start < last.start:
            refuse(trace.source, [
                f"PP:{first.item} runs for the time {k + 2} before PP:{last.item} runs for the "
                f"time {k + 1}: a range stands twice, or the recording begins within a step"
            ])  # fmt: skip
    whole = max(map(len, out), default=0)
    return [step for step in out if len(step) == whole]


def _step(ranks: Sequence[list[Range]], name: str, zero: int) -> tuple[Schedule, Array, Array]:
    """The order that ran, and start and end of each action: ns after `zero` of the rank's clock."""
    rows = [
        [r.item.actions for r in step if r.item.actions and r.role in ("", "post")]
        for step in ranks
    ]
    schedule = from_rows(name, rows)
    times: dict[int, tuple[int, int]] = {}
    for step in ranks:
        times |= _times(step)
    codes = schedule.codes.tolist()
    missing = [str(action_of(c)) for c in codes if c not in times]
    if missing:
        raise UsageError(f"the traces do not say when {missing[0]} ended")
    start, end = (np.array([times[c][i] - zero for c in codes], dtype=float) for i in (0, 1))
    return schedule, start, end


def _times(step: list[Range]) -> dict[int, tuple[int, int]]:
    """When each action of a rank began and ended, by code.

    A RECV ends when its value is there: where a wait of its own says so, else when its consumer
    begins to work. Until then a consumer only waits.
    """
    waits = {_code(r.item): r.end for r in step if r.role == "wait" and len(r.item.actions) == 1}
    posts = {
        _code(r.item): r.start
        for r in step
        if r.item.type in ("RECV_F", "RECV_B") and r.role in ("", "post")
    }
    out: dict[int, tuple[int, int]] = {}
    for r in step:
        if r.role or not r.item.actions or r.item.type in ("RECV_F", "RECV_B"):
            continue
        actions = r.item.actions
        needed = [
            encode(int(kind), a.stage, a.mb)
            for a in actions
            for kind, users in CONSUMERS.items()
            if a.kind in users
        ]
        received = [c for c in needed if c in posts]
        work = r.start
        if received and not all(c in waits for c in received) and r.work is not None:
            work = r.work
        for c in received:
            there = work if r.work is not None else r.end  # at the latest
            out[c] = posts[c], max(posts[c], waits.get(c, there))
        begin, stop = r.on_gpu if r.on_gpu is not None else (work, r.end)
        for a in actions:
            out[encode(int(a.kind), a.stage, a.mb)] = begin, stop
    return out


def _code(item: Item) -> int:
    (action,) = item.actions
    return encode(int(action.kind), action.stage, action.mb)


def without_messages(schedule: Schedule, start: Array, end: Array) -> tuple[Schedule, Array, Array]:
    """The computation alone: its order, and start and end of each action."""
    times = {c: (s, e) for c, s, e in zip(schedule.codes.tolist(), start, end, strict=True)}
    bare = strip_communication(schedule)
    codes = bare.codes.tolist()
    return bare, np.array([times[c][0] for c in codes]), np.array([times[c][1] for c in codes])
