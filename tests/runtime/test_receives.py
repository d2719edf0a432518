"""Where receives stand after the passes that move them."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.checker import check
from hocket.ir import Action, Kind, Schedule, linear
from hocket.lower import insert_communication
from hocket.lower.evaluation import forward_only
from hocket.lower.receives import defer_receives, place_receives
from hocket.lower.slots import forwards_first
from hocket.runtime.program import Role, programs
from hocket.schedules import build

pytestmark = pytest.mark.runtime
NAMES = ["1f1b", "interleaved", "zb-h1", "chimera", "dualpipe", "dualpipev", "gpipe"]


def _lowered(name: str, p: int = 4, m: int = 8):
    return insert_communication(forwards_first(build(name, p=p, m=m)))


@pytest.mark.parametrize("name", NAMES)
def test_deferred_receives_keep_every_channel_in_order(name: str) -> None:
    before = _lowered(name)
    after = defer_receives(before)
    assert check(after, "rendezvous").ok
    for q in range(len(before.queues)):
        lines = [
            [a for slot in s.line(q) for a in slot if a.kind.is_communication]
            for s in (before, after)
        ]
        assert lines[0] == lines[1]


def test_deferred_receives_of_1f1b() -> None:
    text = " ".join(map(str, defer_receives(_lowered("gpipe", 2, 3), lead=0).line(0)))
    assert text == ("0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2")


@pytest.mark.parametrize("name", NAMES)
def test_placed_receives_stand_two_computations_before_their_use(name: str) -> None:
    lowered = place_receives(_lowered(name), lead=2)
    check(lowered).raise_if_bad()
    for program in programs(lowered):
        computed = 0
        posted: dict[int, int] = {}
        sent = set()
        for entry in program.entries:
            action = program.action(entry)
            if entry.role is Role.RUN:
                computed += 1
            elif entry.role is Role.SEND:
                sent.add((action.kind, action.stage, action.mb))
            elif entry.role is Role.POST:
                posted[entry.action] = computed
                if action.kind == Kind.RECV_B:
                    assert (Kind.SEND_F, action.stage, action.mb) in sent
            elif entry.role is Role.WAIT:
                assert computed - posted.pop(entry.action) <= 5  # slots of two
        assert not posted


def test_forward_only_keeps_the_order_of_the_forwards() -> None:
    order = forward_only(build("1f1b", p=2, m=3))
    assert [str(s) for s in order.line(0)] == ["0F0", "0F1", "0F2"]
    assert check(order).ok and order.is_forward_only


def test_sends_are_freed_as_soon_as_a_message_proves_them_complete() -> None:
    programs_ = programs(place_receives(_lowered("1f1b", 2, 8)))
    roles = [e.role for e in programs_[0].entries]
    assert roles.count(Role.FREE) == 8 and Role.RELEASE not in roles
    roles = [e.role for e in programs_[1].entries]
    assert roles.count(Role.FREE) >= 6 and roles.count(Role.RELEASE) <= 2


def _run(schedule: Schedule) -> int:
    """Runs the programs entry by entry, where a send is complete once it is waited for.

    Returns the most sends that any rank had open.
    """
    lines = [[(e.role, p.action(e)) for e in p.entries] for p in programs(schedule)]
    done: set[tuple[Role, Action]] = set()

    def may(role: Role, a: Action) -> bool:
        if role is Role.WAIT:
            return (Role.SEND, Action(Kind.SEND_F, a.stage - 1, a.mb)) in done
        if role is Role.RELEASE:
            return (Role.WAIT, Action(Kind.RECV_F, a.stage + 1, a.mb)) in done
        return True

    at = [0] * len(lines)
    while any(i < len(line) for i, line in zip(at, lines, strict=True)):
        before = list(at)
        for r, line in enumerate(lines):
            while at[r] < len(line) and may(*line[at[r]]):
                done.add(line[at[r]])
                at[r] += 1
        assert at != before, f"all ranks wait, after {at} entries"
    most = 0
    for line in lines:
        steps = [(role is Role.SEND) - (role is Role.RELEASE) for role, _ in line]
        most = max(most, *accumulate(steps))
    return most


def _forwards(orders: list[list[int]]) -> Schedule:
    lines = [[[Action(Kind.F, r, mb)] for mb in order] for r, order in enumerate(orders)]
    bare = Schedule.from_order("own", linear(len(orders), len(orders[0])), lines)
    return place_receives(insert_communication(bare))


@given(st.integers(2, 4).flatmap(lambda p: st.lists(
    st.permutations(range(9)), min_size=p, max_size=p)))  # fmt: skip
def test_an_evaluation_never_waits_for_a_message_that_is_received_later(orders) -> None:
    _run(_forwards(orders))


def test_an_evaluation_in_reverse_on_the_next_rank_ends() -> None:
    _run(_forwards([list(range(10)), list(range(9, -1, -1))]))


def test_an_evaluation_in_order_has_few_messages_under_way() -> None:
    assert _run(_forwards([list(range(32))] * 4)) == 4
