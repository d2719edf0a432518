"""Runs orders inside Megatron on four local ranks, in one launch for many cases.

Importing Megatron takes seconds, so one process imports it and forks the ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

SIZE = 4
LIMIT = datetime.timedelta(minutes=4)  # no load delays a message so long
VOCABULARY, SEQUENCE, ROWS, HIDDEN, LAYERS = 32, 8, 2, 16, 8


class Case(NamedTuple):
    """One order in one setting of Megatron; without an order Megatron runs its own.

    setting: words that change the model or Megatron's settings, see `_settings`.
    """

    order: str | None
    p: int
    m: int = 4
    v: int = 1
    tp: int = 1
    setting: str = ""


class Outcome(NamedTuple):
    """The largest difference of a gradient, and of a loss, to the model without a pipeline.

    compared: number of gradients, of so many in the whole model. refused: the error instead. note:
    more of what was seen.
    """

    gradient: float = 0.0
    loss: float = 0.0
    evaluation: float = 0.0
    compared: int = 0
    of: int = 0
    largest: float = 0.0
    refused: str = ""
    note: Any = None


def on_four_ranks(function: str, cases: list[Case], seconds: float = 600) -> list[list[Outcome]]:
    """What a function of this module returned for each case, by rank and case."""
    with tempfile.TemporaryDirectory(prefix="hocket-megatron-") as folder:
        Path(folder, "jobs").write_bytes(pickle.dumps((function, [tuple(c) for c in cases])))
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, __file__, folder],
            capture_output=True, text=True, timeout=seconds, check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-20000:]
        ranks = [pickle.loads(Path(folder, f"rank{r}").read_bytes()) for r in range(SIZE)]
        return [[Outcome(*one) for one in rank] for rank in ranks]


def serve(folder: str) -> int:
    """Forks the ranks, once Megatron is imported; 0 when all of them ended well."""
    warnings.filterwarnings("ignore")
    import cpu
    import torch

    torch.set_num_threads(1)
    cpu.install()
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.pipeline_parallel  # noqa: F401

    import hocket.megatron.placing  # noqa: F401

    children = [_fork(rank, folder) for rank in range(SIZE)]
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def _fork(rank: int, folder: str) -> int:
    child = os.fork()
    if child:
        return child
    try:
        from torch import distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=SIZE,
            timeout=LIMIT,
        )  # fmt: skip
        function, cases = pickle.loads(Path(folder, "jobs").read_bytes())
        out = [tuple(globals()[function](Case(*case))) for case in cases]
        Path(folder, f"rank{rank}").write_bytes(pickle.dumps(out))
        dist.barrier()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


# --- the model ----------------------------------------------------------------------------------


def _settings(setting: str) -> dict[str, Any]:
    """Arguments of Megatron's config."""
    known: dict[str, dict[str, Any]] = {
        "sp": {"sequence_parallel": True},
        "full-recompute": {
            "recompute_granularity": "full", "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        "selective-recompute": {"recompute_granularity": "selective"},
        "moe": {
            "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.1,
            "moe_router_load_balancing_type": "aux_loss", "add_bias_linear": False,
        },
        "per-token": {"calculate_per_token_loss": True},
        "deallocate": {"deallocate_pipeline_outputs": True},
        "varies": {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"},
        "scale": {"grad_scale_func": lambda loss: loss * 1024.0},
        "dropout": {"hidden_dropout": 0.1},
    }  # fmt: skip
    out: dict[str, Any] = {}
    for word in setting.split():
        out |= known.get(word, {})
    return out


_LAYOUTS: dict[tuple[int, int], dict[str, Any]] = {}


def _parallel(p: int, v: int, tp: int) -> None:
    """Megatron's groups, built once for each layout: threads of gloo outlive their groups."""
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    def state() -> dict[str, Any]:
        return {name: value for name, value in vars(ps).items() if name.isupper()}

    if not _LAYOUTS:
        _LAYOUTS[0, 0] = state()
    known = (p, tp) in _LAYOUTS
    vars(ps).update(_LAYOUTS[(p, tp) if known else (0, 0)])
    if not known:
        ps.initialize_model_parallel(tp, p)
        model_parallel_cuda_manual_seed(123)
        _LAYOUTS[p, tp] = state()
    ps.set_virtual_pipeline_model_parallel_world_size(v if v > 1 else None)


def _config(case: Case) -> Any:
    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=4, use_cpu_initialization=True,
        pipeline_model_parallel_size=case.p, tensor_model_parallel_size=case.tp,
        virtual_pipeline_model_parallel_size=case.v if case.v > 1 else None,
        pipeline_dtype=torch.float32, params_dtype=torch.float32,
        masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0} | _settings(case.setting),
    )  # fmt: skip
    config.finalize_model_grads_func = finalize_model_grads
    config.defer_embedding_wgrad_compute = "defers" in case.setting.split()
    return config


def _provider(config: Any, setting: str) -> Any:
    """As in a training script: it builds one chunk, and knows nothing of hocket."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    def model_provider(pre_process=True, post_process=True, vp_stage=None):
        spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
        return GPTModel(
            config=config, transformer_layer_spec=spec, vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE, pre_process=pre_process, post_process=post_process,
            share_embeddings_and_output_weights="tied" in setting.split(), vp_stage=vp_stage,
            position_embedding_type="rope",
        )  # fmt: skip

    return model_provider


def _model(config: Any, case: Case, provider: Any) -> list[Any]:
    """The chunks of this rank, built as Megatron's `get_model` builds them, with equal weights."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    overlap, distributed = ("overlap" in case.setting.split(), "sharded" in case.setting.split())
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=200,
        use_distributed_optimizer=distributed,
    )  # fmt: skip
    model = []
    for i in range(case.v):
        vp_stage = i if case.v > 1 else None
        more = {} if vp_stage is None else {"vp_stage": vp_stage}
        first = ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        chunk = provider(pre_process=first, post_process=last, **more)
        fill(chunk)
        model.append(DistributedDataParallel(config, settings, chunk, disable_bucketing=i > 0))
    if overlap:
        no_syncs = [chunk.no_sync for chunk in model]
        config.no_sync_func = no_syncs if case.v > 1 else no_syncs[0]
    return model


def named(chunk: Any) -> Any:
    """The parameters of a chunk by their names in the whole model."""
    inner = chunk
    while hasattr(inner, "module"):
        inner = inner.module
    for name, p in inner.named_parameters():
        if ".layers." in name:
            before, after = name.split(".layers.")
            i, rest = after.split(".", 1)
            name = f"{before}.layers.{inner.decoder.layers[int(i)].layer_number}.{rest}"
        yield name, p


def fill(chunk: Any) -> None:
    """Weights that depend on their names alone, and on the rank where they are split."""
    import torch
    from megatron.core import parallel_state as ps

    tied = chunk.share_embeddings_and_output_weights
    for name, p in named(chunk):
        if tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        if getattr(p, "tensor_model_parallel", False):
            name += f"/{ps.get_tensor_model_parallel_rank()}"
        seed = int(hashlib.md5(name.encode()).hexdigest()[:8], 16)
        values = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) * 0.2
        with torch.no_grad():
            p.copy_(values + ("layernorm.weight" in name))


def batches(m: int, first: int, replica: int, setting: str) -> Any:
    """Microbatches of tokens and labels; those of a replica are its own."""
    import torch

    generator = torch.Generator().manual_seed(100 * replica + first)
    for mb in range(m):
        length = SEQUENCE - mb % 3 if "varies" in setting.split() else SEQUENCE
        tokens = torch.randint(0, VOCABULARY, (ROWS, length + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def forward_step(setting: str) -> Any:
    import torch

    def loss(output):
        mean = output.float().mean()
        if "per-token" in setting.split():
            count = torch.tensor(output.numel(), dtype=torch.int)
            return output.float().sum(), count, {"loss": mean.detach().clone()}
        return mean, {"loss": mean.detach().clone()}

    def step(data, model):
        tokens, labels = next(data)
        length = tokens.shape[1]
        positions = torch.arange(length).unsqueeze(0).expand(ROWS, -1)
        mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        return model(tokens, positions, mask, labels=labels), loss

    return step


# --- one case -----------------------------------------------------------------------------------


class Seen(NamedTuple):
    """Gradients by name, losses of the step and of an evaluation of one microbatch more."""

    gradients: dict[str, Any]
    losses: list[float]
    evaluation: list[float]


def _call(
    function: Any, case: Case, model: list[Any], m: int, replicas: int, first: int, **more: Any
) -> list[float]:
    from megatron.core import parallel_state as ps

    # Without a pipeline there are more replicas, and several see the same data.
    replica = ps.get_data_parallel_rank() % replicas
    data = [batches(m, first, replica, case.setting) for _ in model]
    one = case.v == 1
    found = function(
        forward_step_func=forward_step(case.setting), data_iterator=data[0] if one else data,
        model=model[0] if one else model, num_microbatches=m, seq_length=SEQUENCE,
        micro_batch_size=ROWS, **more,
    )  # fmt: skip
    return [float(one["loss"]) for one in found]


def _run(case: Case, function: Any, provider: Any, config: Any, replicas: int) -> Seen:
    from megatron.core import parallel_state as ps

    model = _model(config, case, provider)
    for chunk in model:
        chunk.zero_grad_buffer()
    losses = _call(function, case, model, case.m, replicas, 0, forward_only=False)
    for chunk in model:
        _gather_shards(chunk, ps.get_data_parallel_group(with_context_parallel=True))
    gradients = {n: p.main_grad.clone() for chunk in model for n, p in named(chunk)}
    evaluation = _call(function, case, model, case.m + 1, replicas, 7, forward_only=True)
    return Seen(gradients, losses, evaluation)


def _gather_shards(chunk: Any, group: Any) -> None:
    """Completes the gradients that the distributed optimizer leaves in shards."""
    from torch import distributed as dist

    if not chunk.ddp_config.use_distributed_optimizer or group.size() == 1:
        return
    for bucket_group in chunk.bucket_groups:
        for bucket in bucket_group.buckets:
            shards = [*bucket.grad_data.chunk(group.size())]
            out = [shard.clone() for shard in shards]
            dist.all_gather(out, shards[group.rank()].clone(), group=group)
            for shard, whole in zip(shards, out, strict=True):
                shard.copy_(whole)


_REFERENCES: dict[Any, Seen] = {}


def _reference(case: Case) -> Seen:
    """The same model without a pipeline, run by Megatron itself."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ours = {"overlap", "sharded", "deallocate", "verify", "defers", "timeline"}
    setting = " ".join(w for w in case.setting.split() if w not in ours)
    key = (case.p, case.m, case.tp, setting)
    if key not in _REFERENCES:
        alone = Case(None, 1, case.m, 1, case.tp, setting)
        _parallel(1, 1, case.tp)
        config = _config(alone)
        function = get_forward_backward_func()
        provider = _provider(config, setting)
        _REFERENCES[key] = _run(alone, function, provider, config, SIZE // (case.tp * case.p))
    return _REFERENCES[key]


def compare(case: Case) -> Outcome:
    """An order inside Megatron against the model without a pipeline."""
    from megatron.core import parallel_state as ps
    from megatron.core import pipeline_parallel

    import hocket.megatron as hm
    from hocket.errors import HocketError
    from hocket.text import loads

    want = _reference(case)
    _parallel(case.p, case.v, case.tp)
    config = _config(case)
    words = case.setting.split()
    installed = None
    try:
        order: Any = loads(case.order) if "\n" in case.order else case.order
        installed = hm.use(order, v=None, verify="verify" in words)
        provider = installed.place(_provider(config, case.setting))
        function = pipeline_parallel.get_forward_backward_func()
        got = _run(case, function, provider, config, SIZE // (case.tp * case.p))
        note = _timeline(installed) if "timeline" in words else None
    except HocketError as error:
        return Outcome(refused=str(error))
    finally:
        if installed is not None:
            installed.restore()
    own = pipeline_parallel.get_forward_backward_func
    assert own.__module__ == "megatron.core.pipeline_parallel.schedules"
    tied = "tied" in words
    worst = largest = 0.0
    for name, gradient in got.gradients.items():
        if tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        worst = max(worst, float((gradient - want.gradients[name]).abs().max()))
        largest = max(largest, float(gradient.abs().max()))
    last = ps.get_pipeline_model_parallel_rank() == case.p - 1
    losses = _apart(got.losses, want.losses, last)
    evaluation = _apart(got.evaluation, want.evaluation, last)
    counts = len(got.gradients), len(want.gradients)
    return Outcome(worst, losses, evaluation, *counts, largest, "", note)


def _apart(got: list[float], want: list[float], last: bool) -> float:
    """The largest difference of losses, which only the last rank has."""
    assert len(got) == (len(want) if last else 0)
    return max((abs(a - b) for a, b in zip(got, want, strict=False)), default=0.0)


def _timeline(installed: Any) -> Any:
    timeline = installed.function.timeline()
    return timeline.schedule.name, float(timeline.makespan)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(serve(sys.argv[1]))
