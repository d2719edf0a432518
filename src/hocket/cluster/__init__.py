"""From a model and a cluster to costs, time and memory: catalogues, operations, estimate, fit."""

from hocket.cluster.calibrate import (
    STEP_NUMBERS,
    Measured,
    calibrate,
    errors,
    fit,
    left_out,
    predicted,
    quantile,
)
from hocket.cluster.estimate import (
    Breakdown,
    Error,
    Estimate,
    Memory,
    estimate,
    step_seconds,
    usual_stages,
)
from hocket.cluster.hardware import Cluster, Gpu, Level, cluster_of, load_cluster, load_gpu
from hocket.cluster.model import Mla, Model, Moe, load_model, model_from
from hocket.cluster.operations import (
    CONVENTIONS,
    active_parameters,
    flops_per_token,
    layer_flops,
    parameters,
)
from hocket.cluster.run import RECOMPUTE, Fault, Run, faults, raise_faults
from hocket.cluster.runs import load_runs
from hocket.cluster.stack import Fit, Stack, dumps_stack, load_stack, stack_from, stack_of
from hocket.cluster.stages import Stage, costs_of, quantities_of_stage, stages
from hocket.cluster.tables import catalogue

__all__ = [
    "CONVENTIONS", "RECOMPUTE", "STEP_NUMBERS", "Breakdown", "Cluster", "Error", "Estimate",
    "Fault", "Fit", "Gpu", "Level", "Measured", "Memory", "Mla", "Model", "Moe", "Run", "Stack",
    "Stage", "active_parameters", "calibrate", "catalogue", "cluster_of", "costs_of",
    "dumps_stack", "errors", "estimate", "faults", "fit", "flops_per_token", "layer_flops",
    "left_out", "load_cluster", "load_gpu", "load_model", "load_runs", "load_stack", "model_from",
    "parameters", "predicted", "quantile", "quantities_of_stage", "raise_faults", "stack_from",
    "stack_of", "stages", "step_seconds", "usual_stages",
]  # fmt: skip
