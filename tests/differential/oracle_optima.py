"""The best order of a small problem, by branch and bound over all orders.

Each microbatch may have its backward whole or split, as asked, one by one at each stage. An order
is built action by action. Without a limit of memory only active orders are built (none of whose
actions could start earlier without making another later), which always hold a best one; with a
limit all whose actions start as early as they can. Microbatches of one path are alike and run
each stage in rising order. Branches end where a state is no better than one seen before, or where
what is left takes too long.
"""

from collections import defaultdict
from fractions import Fraction
from typing import NamedTuple

from oracle_events import Prices
from oracle_text import Action, Order, rank_of

KINDS = {"whole": "FB", "split": "FIW", "either": "FBIW"}


class TooLarge(Exception):
    """There are more branches than asked for."""


class State(NamedTuple):
    """How far each place is (a stage of a path), and when what it made was there.

    forward, back: number of microbatches done at each place; split: those of them whose W is
    due; forward_ends, back_ends: when the results that are still wanted ended.
    """

    forward: tuple
    back: tuple
    due: tuple
    forward_ends: tuple
    back_ends: tuple
    free: tuple
    held: tuple
    last: Fraction


class Search:
    """All orders of one placement with one queue per rank, each rank with at most `most` pairs."""

    def __init__(self, paths, path_of, costs, *, backward="either", most=None):
        order = Order(paths, path_of)
        self.prices, self.kinds, self.most = Prices(order, costs), KINDS[backward], most
        self.places = [(k, s) for k, path in enumerate(paths) for s in range(len(path))]
        self.m = tuple(path_of.count(k) for k, _ in self.places)
        self.rank = [rank_of(paths[k][s]) for k, s in self.places]
        self.first = [s == 0 for _, s in self.places]
        self.end = [s == len(paths[k]) - 1 for k, s in self.places]
        n = range(len(self.places))
        self.takes = [{kind: self._time(s, kind) for kind in self.kinds} for _, s in self.places]
        self.down = [Fraction(0) if self.end[i] else self._way(i, i + 1, "F") for i in n]
        self.up = [Fraction(0) if self.first[i] else self._way(i, i - 1, "B") for i in n]
        self.after_back = [self._after_back(i) for i in n]
        self.after_forward = [self._after_forward(i) for i in n]
        self.least = [min(self._backs(i)) for i in n]

    def _time(self, stage, kind):
        slot = (Action(stage, kind, 0),)
        before, after = self.prices.around(slot)
        return before + self.prices.work(slot) + after

    def _way(self, i, other, kind):
        way = self.prices.way(Action(self.places[i][1], kind, 0))
        return way if self.rank[i] != self.rank[other] else Fraction(0)

    def _backs(self, i):
        """The work of each way to run a backward."""
        t = self.takes[i]
        return [sum(t[k] for k in kinds) for kinds in ("B", "IW") if kinds[0] in t]

    def _after_back(self, i):
        """The shortest way from the end of the first part of a backward to the end of all."""
        if self.first[i]:
            return Fraction(0)
        return self.up[i] + self._back(i - 1)

    def _back(self, i):
        """The shortest way from the gradient of a place's output to the end of all."""
        t, on = self.takes[i], self._after_back(i)
        return min([t[k] + max(on, t.get("W", 0) if k == "I" else 0) for k in "BI" if k in t])

    def _after_forward(self, i):
        if self.end[i]:
            return self._back(i)
        return self.down[i] + self.takes[i + 1]["F"] + self._after_forward(i + 1)

    # --- the search -----------------------------------------------------------------------------

    def below(self, value, *, most):
        """The least makespan below a value, or None; looks at `most` states. Raises: TooLarge."""
        self.best, self.found, self.left = value, None, most
        self.seen = defaultdict(list)
        n, ranks = len(self.places), max(self.rank) + 1
        zero, none = (0,) * n, ((),) * n
        start = State(
            zero, zero, none, none, none, (Fraction(0),) * ranks, (0,) * ranks, Fraction(0)
        )
        todo = [start]
        while todo:
            state = todo.pop()
            if self.left <= 0:
                raise TooLarge
            self.left -= 1
            if self._bound(state) >= self.best or self._is_dominated(state):
                continue
            ready = self._ready(state)
            if not ready:
                if state.back == self.m and not any(state.due):
                    self.best = self.found = max(state.free)
                continue
            branches = sorted(self._branches(state, ready), key=lambda x: (-x[0], x[2]))
            todo += [self._after(state, *one) for one in branches]
        return self.found

    def _ready(self, state):
        """What could run next: (start, place, kind)."""
        out = []
        for i, t in enumerate(self.takes):
            free = state.free[self.rank[i]]
            if state.forward[i] < self.m[i] and (
                self.most is None or state.held[self.rank[i]] < self.most[self.rank[i]]
            ):
                if self.first[i]:
                    out.append((free, i, "F"))
                elif state.forward_ends[i - 1]:
                    out.append((max(free, state.forward_ends[i - 1][0] + self.down[i - 1]), i, "F"))
            if state.back[i] < state.forward[i]:
                if self.end[i]:
                    out += [(free, i, k) for k in "BI" if k in t]
                elif state.back_ends[i + 1]:
                    there = state.back_ends[i + 1][0] + self.up[i + 1]
                    out += [(max(free, there), i, k) for k in "BI" if k in t]
            if state.due[i]:
                out.append((free, i, "W"))
        return out

    def _branches(self, state, ready):
        """What may come next: with a limit all that starts no earlier than the last one did.

        Without, on the rank of what would end first, all that would start before that end:
        another order leaves room for it. Where a backward may be whole or split, the longer counts.
        """
        if self.most is not None:
            return [one for one in ready if one[0] >= state.last]
        end, soonest = min(
            (start + self._longest(i, kind), (start, i, kind)) for start, i, kind in ready
        )
        first, alike = soonest[1], self._like(soonest[1], soonest[2])
        return [
            x for x in ready if self.rank[x[1]] == self.rank[first]
            and (x[0] < end or (x[1] == first and x[2] in alike))
        ]  # fmt: skip

    def _like(self, i, kind):
        """The kinds of which one runs in place of this one."""
        return [k for k in "BI" if k in self.takes[i]] if kind in "BI" else [kind]

    def _longest(self, i, kind):
        return max(self.takes[i][k] for k in self._like(i, kind))

    def _after(self, state, start, i, kind):
        end, rank = start + self.takes[i][kind], self.rank[i]
        forward, back, due = list(state.forward), list(state.back), list(state.due)
        forward_ends, back_ends = list(state.forward_ends), list(state.back_ends)
        free, held = list(state.free), list(state.held)
        free[rank] = end
        if kind == "F":
            forward[i] += 1
            held[rank] += 1
            if not self.end[i]:
                forward_ends[i] += (end,)
            if not self.first[i]:
                forward_ends[i - 1] = forward_ends[i - 1][1:]
        elif kind == "W":
            due[i] = due[i][1:]
        else:
            back[i] += 1
            if not self.first[i]:
                back_ends[i] += (end,)
            if not self.end[i]:
                back_ends[i + 1] = back_ends[i + 1][1:]
            if kind == "I":
                due[i] += (True,)
        held[rank] -= kind in "BW"
        return State(*map(tuple, (forward, back, due, forward_ends, back_ends, free, held)), start)

    def _bound(self, state):
        """No end of this state comes before."""
        left = [Fraction(0)] * len(state.free)
        ways = [max(state.free)]
        for i, t in enumerate(self.takes):
            rank, free = self.rank[i], state.free[self.rank[i]]
            left[rank] += (self.m[i] - state.forward[i]) * t["F"]
            left[rank] += (self.m[i] - state.back[i]) * self.least[i]
            left[rank] += len(state.due[i]) * t.get("W", 0)
            if state.forward[i] < self.m[i]:
                ways.append(free + t["F"] + self.after_forward[i])
            for ends, on in ((state.forward_ends[i], self.after_forward[i]),
                             (state.back_ends[i], self.after_back[i])):  # fmt: skip
                if ends:
                    ways.append(ends[-1] + on)
        return max(*ways, *(a + b for a, b in zip(state.free, left, strict=True)))

    def _is_dominated(self, state):
        key = state[:3]
        when = [*state.free, *(t for ends in state.forward_ends + state.back_ends for t in ends)]
        if self.most is not None:
            when.append(state.last)
        known = self.seen[key]
        if any(all(a <= b for a, b in zip(old, when, strict=True)) for old in known):
            return True
        known[:] = [o for o in known if not all(a <= b for a, b in zip(when, o, strict=True))]
        known.append(when)
        return False
