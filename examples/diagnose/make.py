"""Makes the gallery: faults put in on purpose, each with the files that such a job leaves.

    python examples/diagnose/make.py [FOLDER]

Nothing is run on several ranks here: steps are simulated with jitter, and hanging jobs are played
through operation by operation. `verdicts.json` holds what `hocket diagnose` must find.
"""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np

import hocket
from hocket.costs import Costs
from hocket.interop.traces.rows import write_rows

sys.path.insert(0, str(Path(__file__).parent))

from jobs import WORLD, at, dumps_of, program, run
from steps import run_of

HERE = Path(__file__).parent
P, M = 6, 8
ORDER = ["--schedule", "1f1b", "-p", str(P), "-m", str(M)]
LOADER = "/torch/utils/data/dataloader.py:1 next"
UNEQUAL = Costs(F=(1e3, 1e3, 1.4e3, 1.3e3), B=(2e3, 2e3, 2.8e3, 2.6e3))


def slow(folder, **fault):
    """Five steps of 1F1B on four ranks."""
    schedule = hocket.build("1f1b", p=4, m=4)
    write_rows(run_of(schedule, np.random.default_rng(19), steps=5, **fault), folder / "run.jsonl")


def hang(folder, rank=2, edit=lambda line: line, stop=None, **how):
    """The second step of 1F1B on six ranks, after a whole one, with one rank's program changed."""
    schedule = hocket.build("1f1b", p=P, m=M)
    first, second = program(schedule), program(schedule)
    second[rank] = edit(second[rank])
    programs = {r: first[r] + second[r] for r in first}
    dumps_of(run(programs, stop=stop), folder, **how)


def replicas(folder):
    """Two pipelines of three ranks; rank 4 never joins the all-reduce of its replicas."""
    schedule, groups, programs = hocket.build("1f1b", p=3, m=M), {}, {}
    for k, ranks in enumerate(((0, 1, 2), (3, 4, 5))):
        groups[f"pp{k}"] = ("pp", ranks)
        programs |= program(schedule, ranks)
    for stage in range(3):
        groups[f"dp{stage}"] = ("dp", (stage, stage + 3))
        for rank in (stage, stage + 3):
            programs[rank][-1] = ("call", "all_reduce", f"dp{stage}", [[64]])
    stacks = {4: ["/app/train.py:88 clip", "/app/train.py:120 main"]}
    stopped = run(programs, stop=(4, len(programs[4]) - 1))
    dumps_of(stopped, folder, own=True, stacks=stacks, groups=groups)


def without(kind, action):
    """Drops one operation of a program."""
    return lambda line: [x for i, x in enumerate(line) if i != at(line, kind, action)]


def exchanged(one, other):
    """Exchanges two receives of a program."""

    def edit(line):
        i, j = at(line, "recv", one), at(line, "recv", other)
        line[i], line[j] = line[j], line[i]
        return line

    return edit


def instead(name, m):
    """Another schedule on this rank."""
    return lambda _: program(hocket.build(name, p=P, m=m))[2]


def other_call(line):
    """Another size of tensor in the last collective."""
    return [*line[:-1], ("call", "all_reduce", WORLD, [[8]])]


# Who makes it, the words after the folder, the fault, its ranks, and the action or the detail.
CASES = {
    "slow-rank": (partial(slow, rank=(2, range(5), 1.1)), [], "slow rank", [2], []),
    "slow-rank-now-and-then": (
        partial(slow, rank=(1, (3,), 1.3)), [], "slow rank in some steps", [1], [],
    ),
    "slow-link": (partial(slow, link=((1, 2), 6.0)), [], "slow link", [1, 2], []),
    "slow-microbatch": (partial(slow, mb=(3, (2,), 1.8)), [], "slow microbatches", [], [3]),
    "gc-pauses": (partial(slow, pause=(2, (1, 3), 4000.0)), [], "pauses", [2], [2]),
    "unequal-cut": (partial(slow, costs=UNEQUAL), [], "unequal stages", [2, 3], [2, 3]),
    "swapped-receives": (
        partial(hang, edit=exchanged("3B0", "1F2")), ORDER, "swapped receives", [2], "2F2",
    ),
    "missing-send": (partial(hang, edit=without("send", "2B3")), ORDER, "missing send", [2], "2B3"),
    "other-m": (
        partial(hang, edit=instead("1f1b", 6)), ORDER, "other number of microbatches", [2], "2F6",
    ),
    "other-order": (partial(hang, edit=instead("gpipe", M)), ORDER, "another order", [2], "2B0"),
    "killed-rank": (partial(hang, stop=(3, 42)), ORDER, "rank gone", [3], "3F3"),
    "data-loader": (
        partial(hang, stop=(0, 22), own=True, stacks={0: [LOADER]}),
        ORDER, "rank stuck outside of messages", [0], "0F5",
    ),
    "other-collective": (
        partial(hang, edit=other_call), ORDER, "collective mismatch", [2], "all_reduce of [[8]]",
    ),
    "stuck-replica": (
        replicas, ["--schedule", "1f1b", "-p", "3", "-m", str(M)],
        "rank stuck outside of messages", [4], "the end of the step",
    ),
}  # fmt: skip


def main(root):
    """Writes the files of every case and what must be found in them."""
    verdicts = {}
    for name, (make, words, fault, ranks, what) in CASES.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        make(folder)
        if name == "killed-rank":
            (folder / "nccl_trace_rank_3").unlink()
        verdicts[name] = {"words": words, "fault": fault, "ranks": ranks, "what": what}
    (root / "verdicts.json").write_text(json.dumps(verdicts, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
