"""1F1B over mixture-of-experts layers, their messages on a queue of their own."""

from __future__ import annotations

from hocket.ir import Schedule
from hocket.lower.phases import phases
from hocket.schedules.one_f_one_b import overlap
from hocket.schedules.registry import register


@register(
    "moe-pair",
    source="DeepSeek-V3 technical report, arXiv 2412.19437, section 3.2.1 and figure 4; the order "
    "from DeepSeek's published trace",
    rules=(("layers of 1 or more", lambda layers: layers >= 1),),
    stages_per_rank=4,
    use="MoE models: what the all-to-all inside a stage costs, and which order of phases hides it.",
)
def moe_pair(p: int, m: int, *, layers: int = 1, order: str = "deepseek") -> Schedule:
    """1f1b-overlap with every stage cut into MoE layers of attention, dispatch, experts, combine.

    Dispatch and combine run on the queue `r/comm` of rank r; where a forward and a backward are
    fused, `order` says how their phases overlap: serial, naive, ring, deepseek, megatron,
    megatron-early, or words such as "combB attnF mlpB dispF dispB mlpW mlpF attnB attnW combF".
    `layers` MoE layers a stage. With p=1 m=2 it is one pair and what stands around it. In flight:
    2(p - r) microbatches, each of them on 4 layers stages.

    >>> from hocket import build, dumps
    >>> print(dumps(build("moe-pair", p=1, m=2)), end="")
    # hocket 1
    name moe-pair
    path 0: 0 0/comm 0 0/comm
    0: 0F0 2F0 0F1 2I0 2W0 2F1 0I0 0W0 2I1 2W1 0I1 0W1
    0/comm: 1F0 3F0 3B0 1F1 1B0 3F1 3B1 1B1
    """
    return phases(overlap(p, m), layers=layers, order=order).renamed("moe-pair")
