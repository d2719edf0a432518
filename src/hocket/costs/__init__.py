"""What things cost in time and bytes, for which part of a model, and as durations and delays."""

from hocket.costs.model import (
    Bytes,
    Costs,
    Cycle,
    Number,
    PerStage,
    fused_rule,
    per_stage,
    quotient,
)
from hocket.costs.scaling import fitted, fitted_together, recut, refitted, split
from hocket.costs.table import CostTable, Ticks, ticks_for
from hocket.costs.toml import costs_from, costs_toml, load_costs, profiles

__all__ = [
    "Bytes", "CostTable", "Costs", "Cycle", "Number", "PerStage", "Ticks", "costs_from",
    "costs_toml", "fitted", "fitted_together", "fused_rule", "load_costs", "per_stage", "profiles",
    "quotient", "recut", "refitted", "split", "ticks_for",
]  # fmt: skip
