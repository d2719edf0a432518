"""Every reader of files that are not hocket's to trust: its corpus, its changes, its commands.

A new format is one entry here and a file in corpus/. What is imported from the inside of hocket
stands here and nowhere else.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mutate

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Reader:
    """corpus: files to begin with. change: makes another input of one of them. commands: of which
    one, by chance, reads it, `{}` in place of its path and OTHER in that of the trace of another
    rank; or a function that takes its bytes.
    words: what its grammar knows.
    """

    corpus: tuple[str, ...]
    change: Callable
    commands: tuple[str | Callable, ...]
    words: tuple[str, ...] = ()


def _schedule_json(data):
    from hocket.errors import TextError
    from hocket.text import from_json

    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:  # json's own limits
        raise TextError("input", [(1, f"not JSON: {error}")]) from None
    from_json(value)
    return 0


def _layout(data):
    from hocket.cli import main

    text = data.decode("utf-8", "replace").strip("\n").replace("\0", "")
    return main(["import", f"--layout={text}", "-p", "2", "-m", "4", "--json"])


KINDS = ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "+")
IMPORTS = (
    "import {}", "import {} --why --json", "import {} --costs {}.toml --output {}.sched",
    "view {} --output {}.html",
)  # fmt: skip
SLICES = (
    "F", "B", "I", "W", "F+B", "send", "receive", "PP:0F0", "PP:1B3", "PP:2RECV_F0", "X", "M", "E",
    "F_d0_mb0_s0_compute", "FB_Fd0_mb0_s0_Bd0_mb1_s0_send", "thread_name", "rank 0", "rank 1 comm",
    "kernel", "user_annotation", "gpu_user_annotation", "cpu_op", "0F0", "1B0", "PP:0F99999999",
)  # fmt: skip

READERS = {
    "sched": Reader(
        ("zb.sched", "messages.sched", "sliced.sched"), mutate.words,
        ("check {}", "check {} --transport rendezvous --json", "simulate {}", "show {} --width 100",
         "show {} --format sched", "explain {}"),
        (*KINDS, "path", "|", "-", "slices", "name", "# hocket 1", "0/comm", "3F0", "path 1: 0"),
    ),
    "schedule JSON": Reader(
        ("zb.json",), mutate.tree, (_schedule_json,), ("0F0", "0/comm", "1W2", *KINDS),
    ),
    "costs": Reader(
        ("full.toml", "plain.toml"), mutate.words,
        ("simulate 1f1b -p 2 -m 2 --costs {}", "compare -p 2 -m 2 --costs {} 1f1b zb-h1",
         "explain zb-h1 -p 2 -m 2 --costs {}"),
        ("F", "I", "W", "B", "FB", "latency", "[bytes]", "cycle", "{", "}", "[", "]", "=", '"sum"',
         "p2p_overhead", "recv", "send", "slice", "cores", "slowdown", "comm_cpu", "true", "scale"),
    ),
    "torch CSV": Reader(
        ("compute.csv", "messages.csv"), mutate.words,
        ("import {}", "check {} --for torch -p 2 -m 4", "check {} --for torch -p 2 -m 4 --defer"),
        ("0F0", "1B1", "2I3", "0UNSHARD", "0RESHARD", "0SEND_F1", "0REDUCE_GRAD", ",", "",
         "OVERLAP_F_B", "(0F1;1B0)OVERLAP_F_B"),
    ),
    "Chrome trace": Reader(("run.json",), mutate.tree, IMPORTS, SLICES),
    "drawn trace": Reader(("drawn.json",), mutate.tree, IMPORTS, SLICES),
    "Perfetto trace": Reader(("run.pftrace",), mutate.fields, IMPORTS),
    "profiler trace": Reader(
        ("trace_rank0.json",), mutate.tree,
        ("import {} OTHER", "import {} OTHER --why --json", "import OTHER {} --costs {}.toml",
         "import {}", "view {} OTHER --output {}.html"),
        SLICES,
    ),
    "packed trace": Reader(("run.json.gz",), mutate.packed, IMPORTS, SLICES),
    "layout": Reader(
        ("looped.layout", "mtp.layout"), mutate.words, (_layout,),
        ("E", "t", "m", "L", "|", "(", ")", "*3", "*29", ",", "*", "*9223372036854775808"),
    ),
}  # fmt: skip
