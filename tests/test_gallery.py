"""docs/schedules.md: every published schedule is there, or the reason why not."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import make_gallery  # noqa: E402

PAGE = make_gallery.PAGE.read_text()
PUBLISHED = """
GPipe 1F1B DAPPLE PipeDream-flush eager combined interleaved microbatch_group_size_per_vp_stage
breadth-first ZB-H1 ZB-H2 ZB-1p ZB-2p ZB-V V-ZB V-Half V-Min 1F1B-V DualPipe DualPipeV GIS Seq1F1B
Seq1F1B-I Hanayo Chimera doubling halving concatenation BitPipe GEMS TeraPipe PipeDream
PipeDream-2BW PipeMare XPipe BPipe PipeOffload OptPipe AdaPipe Merak Mario WeiPipe TawPipe RoundPipe
Vocabulary
BigMac Optimus GraphPipe PipeFill PipeFisher SlimPipe HelixPipe MEPipe DynaPipe SlimPack Skrull STP
dual-batch 2BP zb1f1b Tessel AdaPtis FlexPipe tabular
"""


@pytest.mark.parametrize("name", PUBLISHED.split())
def test_every_published_schedule_stands_on_the_page(name):
    assert name.lower() in PAGE.lower()


def _evicted(n, room, m):
    """Microbatches that a rank of 1F1B with n in flight sends away to keep `room` of them."""
    held, away, count = [], set(), 0

    def make_room():
        nonlocal count
        if len(held) == room:
            away.add(held.pop())  # the latest: it is needed last
            count += 1

    order = [("F", i) for i in range(n - 1)]
    order += [x for i in range(m - n + 1) for x in (("F", n - 1 + i), ("B", i))]
    order += [("B", i) for i in range(m - n + 1, m)]
    for kind, mb in order:
        if kind == "F":
            make_room()
            held.append(mb)
        else:
            if mb in away:
                make_room()
                away.remove(mb)
                held.append(mb)
            held.remove(mb)
        held.sort()
    return count


@pytest.mark.parametrize("p", [4, 8, 16])
def test_bpipe_moves_the_share_of_microbatches_that_the_page_says(p):
    m = 100 * p
    for r in range(p // 2):
        said = (p / 2 - 1 - r) / (p - 1 - r)
        assert abs(_evicted(p - r, p // 2 + 1, m) / m - said) < 0.02


def test_v_half_holds_what_bpipe_would():
    rows = [line.split() for line in make_gallery.balanced().splitlines()[1:]]
    assert [row[4] for row in rows] == [row[6] for row in rows] == ["3", "5", "9"]
