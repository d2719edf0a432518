"""Schedules for torch: named ones, and ones written by hand."""

from __future__ import annotations

from torch_ranks import Case

from hocket import build, dumps

NAMED = [
    ("gpipe", 2, 3, {}), ("gpipe", 4, 4, {}), ("1f1b", 2, 4, {}), ("1f1b", 3, 5, {}),
    ("1f1b", 4, 8, {}), ("1f1b", 4, 2, {}), ("eager-1f1b", 3, 6, {}), ("eager-1f1b", 4, 8, {}),
    ("1f1b-overlap", 3, 6, {}), ("zb-h1", 2, 4, {}), ("zb-h1", 3, 6, {}), ("zb-h1", 4, 8, {}),
    ("zb-h2", 3, 6, {}), ("zb-h2", 4, 8, {}), ("zb-v", 2, 4, {}), ("zb-v", 3, 6, {}),
    ("zb-v", 4, 8, {}), ("zb-v", 2, 1, {}), ("dualpipev", 2, 4, {}), ("dualpipev", 3, 6, {}),
    ("dualpipev", 4, 8, {}), ("interleaved", 2, 4, {"v": 2}), ("interleaved", 3, 6, {"v": 2}),
    ("interleaved", 4, 8, {"v": 2}), ("interleaved", 2, 4, {"v": 3}),
    ("interleaved-zb", 2, 4, {"v": 2}), ("interleaved-zb", 4, 8, {"v": 2}),
    ("interleaved-overlap", 2, 4, {"v": 2}), ("looped-bfs", 2, 4, {"v": 2}),
    ("looped-bfs", 4, 4, {"v": 2}), ("hanayo", 2, 4, {"v": 2}), ("hanayo", 3, 3, {"v": 2}),
    ("hanayo", 2, 4, {"v": 4}), ("group-interleaved", 2, 4, {"v": 2}),
]  # fmt: skip

BY_HAND = {
    "last stage takes microbatches backwards": """
path 0: 0 1
0: 0F0 0F1 0F2 0B2 0B0 0B1
1: 1F2 1F0 1F1 1B2 1B0 1B1
""",
    "two neighbours on a rank": """
path 0: 0 0 1 1
0: 0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1
1: 2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1
""",
    "one rank has three stages": """
path 0: 0 0 1 0
0: 0F0 1F0 0F1 1F1 3F0 3B0 3F1 3B1 1B0 0B0 1B1 0B1
1: 2F0 2F1 2B0 2B1
""",
    "a w of two waves": """
path 0: 0 1 1 0 0 1 1 0
0: 0F0 3F0 4F0 0F1 7F0 7B0 3F1 4F1 7F1 4B0 3B0 7B1 0B0 4B1 3B1 0B1
1: 1F0 2F0 5F0 6F0 1F1 2F1 6B0 5F1 6F1 5B0 2B0 6B1 1B0 5B1 2B1 1B1
""",
    "whole and split backwards mixed": """
path 0: 0 1 2
0: 0F0 0F1 0F2 0B0 0I1 0B2 0W1
1: 1F0 1F1 1I0 1F2 1W0 1B1 1B2
2: 2F0 2I0 2F1 2B1 2F2 2W0 2I2 2W2
""",
    "weights at the very end": """
path 0: 0 1
0: 0F0 0F1 0I0 0I1 0W1 0W0
1: 1F1 1I1 1F0 1I0 1W0 1W1
""",
    "blocks of a forward and a backward": """
path 0: 0 1
0: 0F0 0F1 0F2+0B0 0F3+0B1 0B2 0B3
1: 1F0 1F1+1B0 1F2+1B1 1F3+1B2 1B3
""",
}

_HOW = ("csv", "messages", "schedule")


def cases() -> list[Case]:
    """One way of running each, in turn; receives early and late."""
    texts = {
        f"{name} p={p} m={m} {options or ''}": dumps(build(name, p=p, m=m, **options))
        for name, p, m, options in NAMED
    }
    for name, text in BY_HAND.items():
        texts[name] = f"# hocket 1\nname by-hand\n{text}"
    return [
        Case(name, text, _HOW[i % 3], "late" if i % 4 else "early", i % 2 == 0)
        for i, (name, text) in enumerate(texts.items())
    ]
