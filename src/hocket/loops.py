"""The inner loops over a schedule's arrays: plain Python, and the same functions compiled.

Small schedules run the functions as they stand, on lists; large ones run them compiled by numba
on arrays (`run` chooses). No rule is written here: what waits for what comes in as arrays made
from `deps.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from hocket.codes import kinds_of, mbs_of, stages_of

# --- the order and the graph ------------------------------------------------------------------


# `i & ROOM` is i. It tells the compiler that an index is not below 0, so that the compiled loop
# does not look for negative ones: a fifth of the time of the loops that use it.
ROOM = (1 << 40) - 1


def lay_down(times, part_of, opens, first, add, pool, codes, slots):
    """Writes repeated patterns, queue by queue, to `codes`, and where slots start to `slots`.

    Block b of queue q repeats `times[b, q]` times its parts `part_of[b]` to `part_of[b + 1]`: part
    j in repeat i is `pool[first[j, q] + i] + add[j, q]`, and `opens[j]` a slot. Without room in
    `slots` these are not written.
    """
    n_blocks, n, k = len(part_of) - 1, 0, 0
    n_queues = len(times) // n_blocks if n_blocks else 0
    for q in range(n_queues):
        for b in range(n_blocks):
            n_times, width, height = times[b * n_queues + q], part_of[b + 1] - part_of[b], 0
            for j in range(part_of[b], part_of[b + 1]):
                height += opens[j]
            at, slot = n, k - 1
            for j in range(part_of[b], part_of[b + 1]):
                source, more = first[j * n_queues + q], add[j * n_queues + q]
                for i in range(n_times):
                    codes[at + i * width] = pool[source + i] + more
                slot += opens[j]
                if opens[j] and len(slots):
                    for i in range(n_times):
                        slots[slot + i * height] = at + i * width
                at += 1
            n += n_times * width
            k += n_times * height


def tally(codes, slots, starts, home, path_of, lengths, n_stages, seen):
    """Marks every action in `seen[stage, mb]`, a bit for each kind; returns how many are odd.

    Odd: of no stage or microbatch, on a queue that is not `home[path, stage]`, or doubled.
    """
    m, n_odd = len(path_of), 0
    for q in range(len(starts) - 1):
        for a in range(slots[starts[q]], slots[starts[q + 1]]):
            code = codes[a]
            kind, stage, mb = kinds_of(code), stages_of(code), mbs_of(code) & ROOM
            if mb >= m or stage >= lengths[mb] or home[path_of[mb] * n_stages + stage] != q:
                n_odd += 1
                continue
            cell = stage * m + mb
            n_odd += seen[cell] >> kind & 1
            seen[cell] |= 1 << kind
    return n_odd


def census(seen, lengths, n_stages, found):
    """Marks in `found` which sets of kinds the (stage, microbatch) pairs have."""
    m = len(lengths)
    for stage in range(n_stages):
        for mb in range(m):
            if stage < lengths[mb]:
                found[seen[stage * m + mb]] = True


def walk(  # noqa: C901 (see `link`)
    codes, slots, starts, home, path_of, n_stages, n_needs, offset_of, place_of, row_of, delays,
    table, work, ends, cursor, owed, behind, free, start, end, until,
):  # fmt: skip
    """When each action starts and ends if all start as early as they can.

    Returns how many slots ran. Kind k has the needs `n_needs * k` to `n_needs * (k + 1)`. Need i of
    an action is ready at `ends[place_of[i] + cell]`, which is below 0 while that has not ended;
    cell: where its stage and microbatch stand in each row of `ends`. Every queue runs until it
    meets what has not ended, then waits in the list `owed` of the queue it waits for; `behind`
    links these lists, and that of the queues that may move. `free`: when each queue falls free.
    A slot takes `work[slot]`, without that the sum of its parts in `table[kind, stage]`. Without
    room in `start` no times are written; with `delays[need, path, stage]`, `until` gets when what
    held a slot had ended. Arrays that are None cost nothing: compiled code is made for each case.
    """
    m, none, n_paths = len(path_of), 0 * table[0], len(home) // n_stages
    timed = len(start) > 0
    n_done, queue, last_queue = 0, 0, len(owed) - 1
    while queue >= 0:
        q = queue & ROOM
        queue = behind[q]
        i, last, owing = cursor[q] & ROOM, starts[q + 1], -1
        begun, a = i, i if slots is None else slots[i]
        clock = free[q]
        time, held, spent = clock, clock, none
        while i < last:
            code = codes[a & ROOM]
            kind, stage, mb = kinds_of(code), stages_of(code), mbs_of(code) & ROOM
            cell = stage * m + mb
            for need in range(n_needs * kind, n_needs * (kind + 1)):
                ready = ends[(place_of[need] + cell) & ROOM]
                if ready < 0:
                    owing = home[(path_of[mb] * n_stages + stage + offset_of[need]) & ROOM]
                    break
                if delays is not None:
                    way = (need * n_paths + path_of[mb]) * n_stages + stage
                    due = ready + delays[way & ROOM]
                    if due > time:
                        time, held = due, ready
                elif ready > time:
                    time = ready
            if owing >= 0:
                break
            spent += table[(kind * n_stages + stage) & ROOM]
            a += 1
            if slots is not None and a < slots[(i + 1) & ROOM]:
                continue
            clock = time + (spent if work is None else work[i & ROOM])
            at = i if slots is None else a - 1
            row = row_of[kind]
            if row >= 0:
                ends[(row + cell) & ROOM] = clock
            if timed:
                start[at & ROOM], end[at & ROOM] = time, clock
            if slots is not None:
                for part in range(slots[i & ROOM], a - 1):
                    b = part & ROOM
                    code, row = codes[b], row_of[kinds_of(codes[b])]
                    if row >= 0:
                        ends[(row + stages_of(code) * m + mbs_of(code)) & ROOM] = clock
                    if timed:
                        start[b], end[b] = time, clock
            if delays is not None:
                until[i & ROOM] = held
            time, held, spent = clock, clock, none
            i += 1
        if owing >= 0:
            behind[q], owed[owing & ROOM] = owed[owing & ROOM], q
        if i > begun:
            cursor[q], free[q] = i, clock
            n_done += i - begun
            woken, owed[q] = owed[q], -1
            if woken >= 0:
                if queue < 0:
                    queue = woken
                else:
                    behind[last_queue & ROOM] = woken
                while behind[woken & ROOM] >= 0:
                    woken = behind[woken & ROOM]
                last_queue = woken
    return n_done


def locate(codes, lengths, n_stages, empty, table, counts):
    """Writes every action's position to `table[kind, stage, mb]`, and counts the kinds."""
    m = len(lengths)
    cells = n_stages * m
    for a in range(len(codes)):
        code = codes[a]
        kind, stage, mb = kinds_of(code), stages_of(code), mbs_of(code) & ROOM
        if mb >= m or stage >= lengths[mb]:
            continue
        if counts[kind] == 0:
            for cell in range(kind * cells, (kind + 1) * cells):
                table[cell] = empty
        counts[kind] += 1
        table[kind * cells + stage * m + mb] = a


def link(  # noqa: C901 (a call inside this nest would make it ten times slower, compiled)
    codes, first, visit, node_of, chains, ranks, posts, lengths, slices, table, empty,
    keep, need_of_kind, offset_of, step_of, source_of, source_cells,
    need_starts, needs, source, target, crosses,
):  # fmt: skip
    """Writes what every node waits for; returns the numbers of edges, open needs and late ones.

    Node i holds the actions `visit[first[i]:first[i + 1]]`, or those positions themselves where
    `visit` is empty, and is its own action where `node_of` is empty. Edges that a chain's own
    order implies are left out unless `keep`. Late: a source that stands behind in the same chain.
    """
    m, e, n_open, n_late = len(lengths), 0, 0, 0
    n_serial = len(first) - 1 - len(posts)
    for chain in range(len(chains) - 1):
        top, last = chains[chain], chains[chain + 1]
        for i in range(top, last):
            for v in range(first[i], first[i + 1]):
                a = visit[v] if len(visit) else v
                code = codes[a]
                kind, stage, mb = kinds_of(code), stages_of(code), mbs_of(code)
                length = lengths[mb] if mb < m else 0
                if stage >= length:
                    continue
                here = stage * m + mb
                for need in range(need_of_kind[kind], need_of_kind[kind + 1]):
                    wanted, step, j = stage + offset_of[need], step_of[need], empty
                    if wanted < 0 or wanted >= length:
                        continue
                    if step != 0 and not 0 <= mb % slices + step < slices:
                        continue
                    for s in range(source_of[need], source_of[need + 1]):
                        j = table[here + source_cells[s]]
                        if j != empty:
                            break
                    if j == empty:
                        n_open += 1
                        continue
                    node = node_of[j] if len(node_of) else j
                    n_late += i < node < last
                    if keep or not top <= node <= i:
                        needs[e], source[e], crosses[e] = node, j, ranks[node] != ranks[i]
                        if len(target):
                            target[e] = a
                        e += 1
            if i >= n_serial and posts[i - n_serial] >= 0:
                j = posts[i - n_serial]
                needs[e], source[e], target[e] = node_of[j], j, visit[first[i]]
                crosses[e] = False
                e += 1
            need_starts[i + 1] = e
    return e, n_open, n_late


def topological(chains, need_starts, needs, done, waiting, next_waiting, stack, cursor, sequence):
    """Runs every chain until all stand still; returns how many nodes ran, in `sequence`.

    `stack` holds the chains that may move; a chain that meets an unfinished node joins the list
    of those waiting for it.
    """
    top, n_done = len(stack), 0
    while top:
        top -= 1
        chain = stack[top]
        i, last = cursor[chain], chains[chain + 1]
        while i < last:
            free = True
            for e in range(need_starts[i], need_starts[i + 1]):
                j = needs[e]
                if not done[j]:
                    next_waiting[chain], waiting[j] = waiting[j], chain
                    free = False
                    break
            if not free:
                break
            done[i] = True
            sequence[n_done] = i
            n_done += 1
            woken = waiting[i]
            while woken >= 0:
                stack[top] = woken
                top += 1
                woken = next_waiting[woken]
            i += 1
        cursor[chain] = i
    return n_done


def replay(sequence, heads, need_starts, needs, delays, start, end):
    """When each node starts and ends, taken in an order in which all can run.

    `end` holds the durations before and the ends after.
    """
    for i in sequence:
        time = 0 if heads[i] else end[i - 1]
        for e in range(need_starts[i], need_starts[i + 1]):
            ready = end[needs[e]] + delays[e]
            if ready > time:
                time = ready
        start[i] = time
        end[i] += time


def replay_samples(sequence, heads, need_starts, needs, delays, time, end):
    """Ends of every node in all samples at once, `[node, sample]`.

    `end` holds the durations before and the ends after; `delays` is `[edge, sample]`, or one row
    for all edges; `time` is room for one number a sample.
    """
    shared = len(delays) == 1
    n = len(time)
    for i in sequence:
        mine = end[i]
        if heads[i]:
            for k in range(n):
                time[k] = 0
        else:
            before = end[i - 1]
            for k in range(n):
                time[k] = before[k]
        for e in range(need_starts[i], need_starts[i + 1]):
            theirs = end[needs[e]]
            delay = delays[0] if shared else delays[e]
            for k in range(n):
                ready = theirs[k] + delay[k]
                time[k] = ready if ready > time[k] else time[k]
        for k in range(n):
            mine[k] += time[k]


def rounds(starts, need_starts, needs, done, cursor, sequence):
    """An order in which all slots can run: every queue in turn runs its next slot if it can.

    Returns how many slots ran.
    """
    n, n_done, before = len(sequence), 0, -1
    while n_done < n and n_done > before:
        before = n_done
        for q in range(len(starts) - 1):
            i = cursor[q]
            if i == starts[q + 1]:
                continue
            free = True
            for e in range(need_starts[i], need_starts[i + 1]):
                if not done[needs[e]]:
                    free = False
                    break
            if free:
                done[i] = True
                cursor[q] = i + 1
                sequence[n_done] = i
                n_done += 1
    return n_done


def place_messages(
    sequence, queue_of_slot, codes, slots, sends, receives, receiver, places, new_codes, new_widths,
    code_at, width_at,
):  # fmt: skip
    """Lays slots down in `sequence`, each message behind its sender's slot and at its receiver.

    `places[a]` is the row of action a's message in `sends`, `receives`, `receiver`; below 0: none.
    Queue q writes from `code_at[q]` and `width_at[q]` on.
    """
    for slot in sequence:
        q = queue_of_slot[slot]
        for a in range(slots[slot], slots[slot + 1]):
            new_codes[code_at[q]] = codes[a]
            code_at[q] += 1
        new_widths[width_at[q]] = slots[slot + 1] - slots[slot]
        width_at[q] += 1
        for a in range(slots[slot], slots[slot + 1]):
            k = places[a]
            if k >= 0:
                to = receiver[k]
                new_codes[code_at[q]], new_widths[width_at[q]] = sends[k], 1
                code_at[q] += 1
                width_at[q] += 1
                new_codes[code_at[to]], new_widths[width_at[to]] = receives[k], 1
                code_at[to] += 1
                width_at[to] += 1


# --- costs and metrics ------------------------------------------------------------------------


def gather_work(codes, slots, table, n_columns, n_stages, slices, forward, backward, largest,
                work, fused):  # fmt: skip
    """Work of each slot: the sum of its parts; of a forward with a backward, if asked, the largest.

    `table[kind, slice, stage]` has a row for each kind of computation. `fused` says which slots
    run a forward and a backward together (left alone where it is empty).
    """
    for i in range(len(slots) - 1):
        total = 0 * table[0]
        longest = total
        forwards = backwards = False
        for a in range(slots[i], slots[i + 1]):
            code = codes[a]
            kind = kinds_of(code)
            if kind * n_columns >= len(table):
                continue
            column = stages_of(code)
            if slices > 1:
                column += mbs_of(code) % slices * n_stages
            part = table[kind * n_columns + column]
            total += part
            longest = max(longest, part)
            forwards = forwards or forward[kind]
            backwards = backwards or backward[kind]
        both = forwards and backwards
        work[i] = longest if both and largest else total
        if len(fused):
            fused[i] = both


def totals(codes, slots, starts, occupies, slot_start, slot_end, before, after, takes, frees,
           n_stages, first, last, busy, transfer, peak):  # fmt: skip
    """Of each queue: first and last occupied tick, work, transfers, and the peak of a quantity.

    Action a takes `takes[kind, stage]` when its slot starts and gives back `frees` when it ends.
    """
    lanes, wide = len(before) > 0, len(slots) <= len(codes)
    for q in range(len(starts) - 1):
        new, level, top = True, 0 * takes[0], peak[q]
        low, high, work, moved = first[q], last[q], busy[q], transfer[q]
        for j in range(starts[q], starts[q + 1]):
            i = j & ROOM
            begin, finish = slot_start[i], slot_end[i]
            if lanes:
                moved += before[i] + after[i]
            if not occupies[i]:
                continue
            work += finish - begin
            if lanes:
                begin -= before[i]
                finish += after[i]
            if new or begin < low:
                low = begin
            if new or finish > high:
                high = finish
            new = False
            at = kinds_of(codes[i]) * n_stages + stages_of(codes[i])
            taken, freed = takes[at & ROOM], frees[at & ROOM]
            if wide:
                taken, freed = 0 * taken, 0 * freed
                for a in range(slots[i], slots[i + 1]):
                    at = kinds_of(codes[a]) * n_stages + stages_of(codes[a])
                    taken += takes[at]
                    freed += frees[at]
            level += taken
            top = max(top, level)
            level -= freed
        first[q], last[q], busy[q], transfer[q], peak[q] = low, high, work, moved, top


def binding(node, need_starts, needs, delays, end, receives, heads):
    """The (node, edge) that held a node longest; a RECV is seen through to its SEND.

    Edge -1: the RECV before it in its queue held it. Node -1: nothing held it.
    """
    found, found_edge = -1, -1
    while True:
        best, best_edge = -1, -1
        latest = end[node] * 0
        for e in range(need_starts[node], need_starts[node + 1]):
            ready = end[needs[e]] + delays[e]
            if best < 0 or ready > latest:
                best, best_edge, latest = needs[e], e, ready
        if len(receives):
            if not heads[node] and receives[node - 1] and (best < 0 or end[node - 1] > latest):
                best, best_edge = node - 1, -1
            if best >= 0:
                found, found_edge = best, best_edge
                if receives[best]:
                    node = best
                    continue
        else:
            found, found_edge = best, best_edge
        return found, found_edge


def held_until(slots, occupies, node_of, need_starts, needs, delays, end, receives, heads, until):
    """Writes when what held a slot had ended to `until`, where something did."""
    for i in range(len(until)):
        if occupies[i]:
            node = node_of[slots[i]] if len(node_of) else i
            held, _ = binding(node, need_starts, needs, delays, end, receives, heads)
            if held >= 0:
                until[i] = end[held]


def idleness(
    codes, slots, starts, occupies, begin, finish, until, forward, backward, zero, causes, phases,
    free_at, phase_of,
):  # fmt: skip
    """Idle ticks before each queue's slots by cause and phase, `[queue, 3]`.

    until: when what held each slot had ended; empty where it then starts. With `free_at` and
    `phase_of` also of each slot: when its queue fell free, and the phase.
    """
    told, base = len(phase_of) > 0, starts[0]
    for q in range(len(starts) - 1):
        last_forward = starts[q + 1] - 1
        while last_forward >= starts[q]:
            some = False
            for a in range(slots[last_forward], slots[last_forward + 1]):
                some = some or forward[kinds_of(codes[a])]
            if some:
                break
            last_forward -= 1
        free, phase, backwards = zero, 0, False
        for j in range(starts[q], starts[q + 1]):
            i = j & ROOM
            if not occupies[i]:
                continue
            phase = 0 if not backwards else 2 if i > last_forward else 1
            if not backwards:
                for a in range(slots[i], slots[i + 1]):
                    backwards = backwards or backward[kinds_of(codes[a])]
            if begin[i] > free:
                ended = begin[i]
                if len(until) and until[i] < ended:
                    ended = max(until[i], free)
                causes[3 * q] += ended - free
                causes[3 * q + 1] += begin[i] - ended
                phases[3 * q + phase] += begin[i] - free
            if told:
                free_at[i - base], phase_of[i - base] = free, phase
            free = finish[i]


# --- bytes ------------------------------------------------------------------------------------


def copy_segments(pool, source, length, out):
    """Copies `pool[source[i]:source[i] + length[i]]` of every i to `out`, one after the other."""
    at = 0
    for i in range(len(source)):
        first = source[i]
        for k in range(length[i]):
            out[at + k] = pool[first + k]
        at += length[i]


def write_varints(tag, values, width, rows, length):
    """Writes a tag and a number of 7 bits a byte to the front of each row of `width` bytes."""
    for i in range(len(values)):
        at = i * width
        for k in range(len(tag)):
            rows[at + k] = tag[k]
        n, value = len(tag), values[i]
        while value > 127:
            rows[at + n] = (value & 127) | 128
            value >>= 7
            n += 1
        rows[at + n] = value
        length[i] = n + 1


# --- compiled or not ----------------------------------------------------------------------------

LOOPS = (
    lay_down, tally, census, walk, locate, link, topological, replay, replay_samples, rounds,
    place_messages, gather_work, totals, binding, held_until, idleness, copy_segments,
    write_varints,
)  # fmt: skip

# What numba's import and its loading of cached code cost, counted in actions that one plain loop
# could have gone over in that time. Compiling pays from then on, and nobody pays twice.
WORTH = 150_000
SMALLEST = 1_000  # below it a list is as fast as the call of compiled code on arrays


class _Chooser:
    """Decides whether a loop runs compiled; loads numba when the plain loops have cost as much."""

    def __init__(self) -> None:
        self.forced: bool | None = None
        self._spent = 0
        self._compiled: dict[str, Callable[..., Any]] | None = None
        self._absent = False

    def compiled(self, size: int) -> dict[str, Callable[..., Any]] | None:
        """The compiled loops, if they are to be used for this many actions."""
        if self.forced is False or self._absent:
            return None
        if self._compiled is None and self.forced is None:
            self._spent += size
            if self._spent < WORTH:
                return None
        if self._compiled is None:
            self._load()
        return self._compiled if size >= SMALLEST or self.forced else None

    def _load(self) -> None:
        try:
            import numba
        except ImportError:
            self._absent = True
        else:
            self._compiled = _compile(numba)
            # Once an array of this size was freed, the C library keeps what arrays leave behind
            # for the next ones instead of clearing new memory for each: a third of the time.
            np.empty(31 << 20, dtype=np.uint8)


_chooser = _Chooser()


def run(
    loop: Callable[..., Any], size: int, inputs: Sequence[Any], outputs: Sequence[np.ndarray] = ()
) -> Any:
    """What `loop(*inputs, *outputs)` returns; it writes to the outputs.

    size: how many actions it goes over, which decides whether it runs compiled.
    """
    compiled = _chooser.compiled(size)
    if compiled is not None:
        return compiled[_name(loop)](*inputs, *outputs)
    lists = [x.tolist() for x in outputs]
    given = [x.tolist() if isinstance(x, np.ndarray) else x for x in inputs]
    result = loop(*given, *lists)
    for array, values in zip(outputs, lists, strict=True):
        array[...] = values
    return result


def compiled(spent: int) -> dict[str, Callable[..., Any]] | None:
    """The compiled loops by name, once they pay; `spent` actions more have gone by.

    For callers that keep their arrays between many short calls: on lists before, arrays after.
    """
    return _chooser.compiled(max(spent, SMALLEST))


def is_compiled() -> bool:
    """True when numba is installed (loads it)."""
    with forced(True):
        return _chooser.compiled(0) is not None


@contextmanager
def forced(compiled: bool | None) -> Generator[None]:
    """Inside it every loop runs compiled (True), or none does (False): for tests and benchmarks."""
    before, _chooser.forced = _chooser.forced, compiled
    try:
        yield
    finally:
        _chooser.forced = before


def _compile(numba: Any) -> dict[str, Callable[..., Any]]:
    """Every loop compiled when first called, its code kept on disk for the next process."""
    names: dict[str, Any] = {"__name__": __name__, "range": range, "len": len, "ROOM": ROOM}
    for helper in (kinds_of, stages_of, mbs_of):
        names[_name(helper)] = numba.njit(inline="always")(helper)
    return _compile_all(numba, LOOPS, names, (__name__, "hocket.codes"))


def compile_others(
    functions: Sequence[Callable[..., Any]],
    names: dict[str, Any],
    modules: Sequence[str],
    **options: Any,
) -> dict[str, Callable[..., Any]] | None:
    """Functions of other modules by name, compiled when first called; None without numba.

    names: what they use beside each other; modules: whose sources their code depends on; options:
    of numba.
    """
    try:
        import numba
    except ImportError:
        return None
    return _compile_all(numba, functions, names, modules, **options)


def _compile_all(
    numba: Any,
    functions: Sequence[Any],
    names: dict[str, Any],
    modules: Sequence[str],
    **options: Any,
) -> dict[str, Callable[..., Any]]:
    with _cache_folder(numba, modules):
        for function in functions:
            copy = FunctionType(function.__code__, names, _name(function))
            names[_name(function)] = _jit(numba, copy, **options)
    return names


def _name(loop: Any) -> str:
    return loop.__name__


def _jit(numba: Any, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    try:
        return numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # no folder that can be written to
        return numba.njit(nogil=True, **options)(function)


@contextmanager
def _cache_folder(numba: Any, modules: Sequence[str]) -> Generator[None]:
    """Lets numba keep compiled code in the user's cache, apart for each version of the sources."""
    import hashlib

    digest = hashlib.sha256()
    for module in modules:
        digest.update(Path(str(sys.modules[module].__file__)).read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    before = numba.config.CACHE_DIR
    if not before:
        numba.config.CACHE_DIR = str(root / "hocket" / digest.hexdigest()[:16])
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before
