"""Jobs that hang, played through: what each rank posts, where it stops, and the dumps of that."""

import json
import pickle

from hocket.diagnosis.plan import Plan

WORLD = "0"


def program(schedule, ranks=None, group=WORLD):
    """What each rank does in a step: [("recv", message) | ("send", message) | ("call", ...)]."""
    plan = Plan(schedule, tuple(ranks or range(schedule.p)))
    out = {}
    for rank in plan.ranks:
        out[rank] = []
        for slot in plan.slots(rank):
            out[rank] += [("recv", one) for one, _ in plan.needs_of.get(slot, ())]
            out[rank] += [("send", one) for one, _ in plan.sends_of.get(slot, ())]
        out[rank].append(("call", "all_reduce", group, [[4]]))  # of the gradients, or a norm
    return out


def at(line, kind, action):
    """Where in a program a message is sent or received."""
    return next(i for i, x in enumerate(line) if x[0] == kind and str(x[1].action) == action)


def run(programs, *, stop=None):
    """What each rank has posted when nothing moves any more: [(operation, whether it is done)].

    Receives and calls block, sends do not. stop: (rank, after so many operations).
    """
    posted = {rank: [] for rank in programs}
    moved = True
    while moved:
        moved = False
        for rank, line in programs.items():
            own = posted[rank]
            while len(own) < len(line) and (rank, len(own)) != stop:
                if own and not _is_done(rank, len(own) - 1, programs, posted):
                    break
                own.append(line[len(own)])
                moved = True
    return {
        rank: [(x, _is_done(rank, i, programs, posted)) for i, x in enumerate(own)]
        for rank, own in posted.items()
    }


def _is_done(rank, index, programs, posted):
    what = posted[rank][index]
    if what[0] == "send":
        return True
    if what[0] == "call":
        number = _calls(posted[rank][: index + 1], what[2])
        members = [r for r, line in programs.items() if _calls(line, what[2])]
        return all(_calls(posted[r], what[2]) >= number for r in members)
    peer = what[1].sender
    number = sum(x[0] == "recv" and x[1].sender == peer for x in posted[rank][: index + 1])
    return sum(x[0] == "send" and x[1].receiver == rank for x in posted[peer]) >= number


def _calls(line, group):
    return sum(x[0] == "call" and x[2] == group for x in line)


def dumps_of(posted, folder, *, own=False, stacks=None, groups=None):
    """Writes a file per rank: a pickle of Flight Recorder, or (own) JSON of hocket's recorder."""
    groups = groups or {"0": ("default_pg", sorted(posted))}
    for rank, ops in posted.items():
        data = {
            "version": "2.10", "entries": [*_entries(rank, ops, groups)],
            "pg_config": {
                name: {"name": name, "desc": desc, "ranks": str([*ranks])}
                for name, (desc, ranks) in groups.items() if rank in ranks
            },
        }  # fmt: skip
        if own:
            more = {"hocket_dump": 1, "rank": rank, "stack": (stacks or {}).get(rank, [])}
            (folder / f"hocket_rank_{rank}.json").write_text(json.dumps(more | data))
        else:
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(data, protocol=2))


def _entries(rank, ops, groups):
    """Entries of version 2.10 of the schema; a message goes through a group of both ranks."""
    calls = {}
    for number, (what, done) in enumerate(ops):
        ends, sizes = "", [[2, 8]]
        if what[0] == "call":
            name, group, sizes = what[1:]
            calls[group] = calls.get(group, 0) + 1
        else:
            name = what[0]
            peer = what[1].receiver if name == "send" else what[1].sender
            group, (_, ranks) = next((g, x) for g, x in groups.items() if {rank, peer} <= {*x[1]})
            sign = "->" if name == "send" else "<-"
            ends = f" {ranks.index(rank)}{sign}{ranks.index(peer)}"
        yield {
            "record_id": number, "pg_id": 0, "process_group": (group, groups[group][0]),
            "collective_seq_id": 0 if ends else calls[group], "p2p_seq_id": number,
            "profiling_name": f"nccl:{name}{ends}", "input_sizes": sizes, "output_sizes": sizes,
            "input_dtypes": ["Float"], "state": "completed" if done else "started",
            "retired": done, "is_p2p": bool(ends), "time_created_ns": number,
        }  # fmt: skip
