"""Runs with faults put in on purpose: the costs of an order with jitter, as measured timelines."""

import numpy as np

from hocket.costs import Costs, CostTable
from hocket.graph import graph
from hocket.ir import mbs_of
from hocket.measured import timeline_of


def run_of(schedule, rng, *, costs=None, steps=8, jitter=0.02, rank=None, link=None, mb=None,
           pause=None):  # fmt: skip
    """Timelines of some steps in us.

    Every action, rank and step takes longer or shorter at random; messages and the gaps between
    actions too. rank: (which, in which steps, times as long); mb: the same of a microbatch; link:
    (two ranks, times as long); pause: (which rank, in which steps, for how long).
    """
    g, n_ranks = graph(schedule), schedule.p
    costs = costs or Costs(F=1000.0, I=1000.0, W=1000.0, B=2000.0)
    usual = CostTable(costs, schedule).work().astype(float)
    owner = schedule.rank_of_queue[schedule.queue_of_slot]
    mbs = mbs_of(schedule.codes[schedule.slots[:-1]])
    target = g.node_of_action[g.target]
    ends = np.sort(np.stack([owner[g.needs], owner[target]], axis=1), axis=1)
    out = []
    for step in range(steps):
        work = usual * np.exp(jitter * rng.standard_normal(len(usual)))
        work *= np.exp(0.01 * rng.standard_normal())
        work *= np.exp(0.007 * rng.standard_normal(n_ranks))[owner]
        gap = 20 * np.exp(0.5 * rng.standard_normal(len(usual)))
        delay = np.where(g.crosses, 60 * np.exp(0.3 * rng.standard_normal(len(target))), 0.0)
        if rank is not None and step in rank[1]:
            work[owner == rank[0]] *= rank[2]
        if mb is not None and step in mb[1]:
            work[mbs == mb[0]] *= mb[2]
        if pause is not None and step in pause[1]:
            gap[rng.choice(np.flatnonzero(owner == pause[0]))] += pause[2]
        if link is not None:
            delay[(ends == link[0]).all(axis=1)] *= link[1]
        out.append(_timeline(schedule, g, target, work, gap, delay))
    return out


def _timeline(schedule, g, target, work, gap, delay):
    needs = [[] for _ in work]
    for edge, (source, node) in enumerate(zip(g.needs.tolist(), target.tolist(), strict=True)):
        needs[node].append((source, delay[edge]))
    start, end = np.zeros(len(work)), np.zeros(len(work))
    for node in g.sequence.tolist():
        free = 0.0 if g.heads[node] else end[node - 1]
        start[node] = max([free, *(end[s] + d for s, d in needs[node])]) + gap[node]
        end[node] = start[node] + work[node]
    slot = schedule.slot_of_action
    return timeline_of(schedule, start[slot], end[slot])
