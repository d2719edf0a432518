"""Models and runs from the files that people have: Hugging Face, Megatron-LM and torchtitan."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hocket.cluster.model import Mla, Model, Moe, load_model
from hocket.cluster.run import Run
from hocket.cluster.tables import catalogue, load_toml
from hocket.errors import UsageError
from hocket.files import read_text
from hocket.interop.megatron import read_layout

# --- Hugging Face's config.json ---------------------------------------------------------------

# Keys that change no size: they are read past. Any other key is refused, since it could.
_NO_SIZE = frozenset(catalogue("keys")["huggingface"]["no_size"])
_NO_SIZE_WHERE = catalogue("keys")["huggingface"]["no_size_where"]


class Architecture(NamedTuple):
    """How the keys of one architecture name sizes: our name to its key, and what it always has."""

    keys: Mapping[str, str]
    fixed: Mapping[str, Any] = {}
    more: Callable[[Mapping[str, Any], dict[str, Any]], None] | None = None


_LLAMA = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "ffn": "intermediate_size",
    "vocab": "vocab_size", "tied": "tie_word_embeddings", "window": "sliding_window",
}  # fmt: skip
_OPTIONAL = {"kv_heads", "head_dim", "tied", "window", "positions"}
_EXPERTS_OF = {
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok",),
    "ffn": ("moe_intermediate_size",),
}


def _windows(config: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    """The layers that have a window: those that `layer_types` names, else all."""
    window = sizes.get("window")
    if not window or config.get("use_sliding_window") is False:
        sizes["window"] = 0
        return
    types = config.get("layer_types")
    sizes["window_layers"] = types.count("sliding_attention") if types else sizes["layers"]


def _experts(config: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    found = {}
    for name, keys in _EXPERTS_OF.items():
        key = next((k for k in keys if k in config), None)
        if key is None and name == "ffn":
            key = "intermediate_size"
        if key is None or config.get(key) is None:
            raise UsageError(f"{keys[0]} is missing; a model with experts needs it")
        found[name] = config[key]
    shared = (config.get("n_shared_experts") or 0) * found["ffn"]
    sizes["moe"] = Moe(
        found["experts"], found["top_k"], found["ffn"],
        config.get("shared_expert_intermediate_size") or shared,
        config.get("first_k_dense_replace") or 0,
        config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1,
    )  # fmt: skip
    if config.get("mlp_only_layers"):
        raise UsageError(
            "mlp_only_layers is not empty; hocket knows dense layers only at the start"
        )
    if "moe_intermediate_size" not in config:
        sizes["ffn"] = 0
    _windows(config, sizes)


def _deepseek(config: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        if config.get(key) is None:
            raise UsageError(f"{key} is missing; multi-head latent attention needs it")
    sizes["mla"] = Mla(
        config.get("q_lora_rank") or 0, config["kv_lora_rank"], config["qk_nope_head_dim"],
        config["qk_rope_head_dim"], config["v_head_dim"],
    )  # fmt: skip
    sizes["mtp"] = config.get("num_nextn_predict_layers") or 0
    sizes["kv_heads"] = 0
    _experts(config, sizes)


def _gemma(config: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    sizes["tied"] = config.get("tie_word_embeddings", True)
    if sizes.get("window") and not config.get("layer_types"):
        every = config.get("sliding_window_pattern", 2)
        sizes["window_layers"] = sizes["layers"] - sizes["layers"] // every
    else:
        _windows(config, sizes)


_GPT2 = {
    "layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "vocab": "vocab_size",
    "positions": "n_positions",
}  # fmt: skip
_NEOX = {
    k: v for k, v in _LLAMA.items() if k in ("layers", "hidden", "heads", "ffn", "vocab", "tied")
}
_OLD = {"gated": False, "biases": True, "layer_norm": True}

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(_LLAMA, more=_windows),
    "MistralForCausalLM": Architecture(_LLAMA, more=_windows),
    "Qwen2ForCausalLM": Architecture(_LLAMA, {"qkv_bias": True}, _windows),
    "Qwen3ForCausalLM": Architecture(_LLAMA, {"qk_norm": True}, _windows),
    "Qwen2MoeForCausalLM": Architecture(_LLAMA, {"qkv_bias": True}, _experts),
    "Qwen3MoeForCausalLM": Architecture(_LLAMA, {"qk_norm": True}, _experts),
    "MixtralForCausalLM": Architecture(_LLAMA, more=_experts),
    "GptOssForCausalLM": Architecture(_LLAMA, {"qkv_bias": True}, _experts),
    "DeepseekV2ForCausalLM": Architecture(_LLAMA, more=_deepseek),
    "DeepseekV3ForCausalLM": Architecture(_LLAMA, more=_deepseek),
    "KimiK2ForCausalLM": Architecture(_LLAMA, more=_deepseek),
    "GPT2LMHeadModel": Architecture(_GPT2, {**_OLD, "tied": True, "dropout": True}),
    "GPTNeoXForCausalLM": Architecture(_NEOX, _OLD),
    "GemmaForCausalLM": Architecture(_LLAMA, {}, _gemma),
    "Gemma2ForCausalLM": Architecture(_LLAMA, {"norms": 4}, _gemma),
    "Gemma3ForCausalLM": Architecture(_LLAMA, {"norms": 4, "qk_norm": True}, _gemma),
}  # fmt: skip
_READ = {key for keys in _EXPERTS_OF.values() for key in keys} | {
    "n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace",
    "decoder_sparse_step",
    "moe_layer_freq", "mlp_only_layers", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "num_nextn_predict_layers",
}  # fmt: skip


def model_from_huggingface(path: str | Path) -> Model:
    """The model of a Hugging Face `config.json`.

    Raises: UsageError for an architecture or a key that is unknown, and for a size that is missing,
    naming it.
    """
    try:
        config = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: this is not JSON: {error.msg}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path}: this is no object of sizes")
    try:
        return _model(config, str(config.get("_name_or_path") or Path(path).parent.name or "model"))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _model(config: Mapping[str, Any], name: str) -> Model:
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise UsageError("architectures is missing; it must name one architecture")
    known = ARCHITECTURES.get(names[0])
    if known is None:
        raise UsageError(
            f"the architecture {names[0]} is not known; known are {', '.join(ARCHITECTURES)}"
        )
    for key in config:
        sizeless = key in _NO_SIZE or (key, config[key]) in _NO_SIZE_WHERE.items()
        if not sizeless and key not in _READ and key not in known.keys.values():
            raise UsageError(f"{key} is not a known key of {names[0]}, and it could change sizes")
    sizes: dict[str, Any] = dict(known.fixed)
    for ours, key in known.keys.items():
        value = config.get(key)
        if value is None and ours not in _OPTIONAL:
            raise UsageError(f"{key} is missing")
        if value is not None:
            sizes[ours] = _number(value, key, bool if ours == "tied" else int)
    sizes["biases"] = sizes.get("biases", False) or bool(config.get("mlp_bias"))
    sizes["qkv_bias"] = sizes.get("qkv_bias", False) or bool(config.get("attention_bias"))
    if known.more is not None:
        known.more(config, sizes)
    return Model(name=name, **sizes)


def _number(value: Any, key: str, kind: type) -> Any:
    if type(value) is not kind:
        wanted = "true or false" if kind is bool else "a whole number"
        raise UsageError(f"{key} is {value!r}; it must be {wanted}")
    return value


# --- Megatron-LM's arguments ------------------------------------------------------------------

_MEGATRON_MODEL = {
    "num-layers": "layers", "hidden-size": "hidden", "num-attention-heads": "heads",
    "ffn-hidden-size": "ffn",
    "kv-channels": "head_dim", "vocab-size": "vocab", "num-query-groups": "kv_heads",
    "mtp-num-layers": "mtp",
}  # fmt: skip
_MEGATRON_RUN = {
    "seq-length": "seq", "micro-batch-size": "micro_batch", "global-batch-size": "global_batch",
    "tensor-model-parallel-size": "tp", "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "expert-tensor-parallel-size": "etp", "pipeline-model-parallel-size": "pp",
    "num-virtual-stages-per-pipeline-rank": "v",
}  # fmt: skip
_MEGATRON_MOE = {
    "num-experts": "experts", "moe-router-topk": "top_k", "moe-ffn-hidden-size": "ffn",
    "moe-shared-expert-intermediate-size": "shared_ffn",
}  # fmt: skip
_MEGATRON_MLA = {
    "q-lora-rank": "q_rank", "kv-lora-rank": "kv_rank", "qk-head-dim": "nope",
    "qk-pos-emb-head-dim": "rope",
    "v-head-dim": "value",
}  # fmt: skip
_SIZING = ("hybrid", "mamba", "window", "layout", "encoder", "spec", "heterogeneous",
           "moe-layer-freq")  # fmt: skip


_LAYOUT = "pipeline-model-parallel-layout"


def arguments_of(text: str) -> dict[str, Any]:
    """Megatron's arguments of a command line, or of YAML where PyYAML is installed, by long name.

    Raises: UsageError where it is neither.
    """
    if "--" not in text:
        return _yaml(text)
    result: dict[str, Any] = {}
    name = None
    for word in shlex.split(text.replace("\\\n", " "), comments=True):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("_", "-")
            result[name] = value or True
        elif name is not None:
            result[name] = word if result[name] is True else f"{result[name]} {word}"
    return result


def _yaml(text: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "YAML needs PyYAML (pip install pyyaml); or give the arguments as --name value"
        ) from None
    found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise UsageError("these are no arguments of Megatron: expected --name value, or YAML")
    inner = {k: v for part in found.values() if isinstance(part, dict) for k, v in part.items()}
    return {
        str(k).replace("_", "-"): v
        for k, v in {**found, **inner}.items()
        if not isinstance(v, dict)
    }


def from_megatron(text: str, *, name: str = "model") -> tuple[Model, Run]:
    """The model and the run of Megatron-LM's arguments: a command line, a script, or YAML.

    Arguments that change no size are read past. Raises: UsageError for a size that is missing, and
    for an argument that changes sizes in a way that hocket does not know.
    """
    given = arguments_of(text)
    for key in given:
        if any(x in key for x in _SIZING) and key not in (*_MEGATRON_RUN, _LAYOUT):
            raise UsageError(f"--{key} changes sizes in a way that hocket does not know")
    sizes = _taken(
        given, _MEGATRON_MODEL, ("num-layers", "hidden-size", "num-attention-heads", "vocab-size")
    )
    if "swiglu" not in given:
        sizes |= {"gated": False}
    if "group-query-attention" not in given:
        sizes.pop("kv_heads", None)
    moe = _taken(given, _MEGATRON_MOE, ())
    if "experts" in moe:
        moe.setdefault("top_k", 2)
        moe.setdefault("ffn", sizes.get("ffn", 4 * sizes["hidden"]))
        sizes["moe"] = Moe(**moe)
    if "multi-latent-attention" in given:
        needed = ("kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
        sizes["mla"] = Mla(**{"q_rank": 0, **_taken(given, _MEGATRON_MLA, needed)})
        sizes.pop("head_dim", None)
    rms = str(given.get("normalization", "LayerNorm")).lower() == "rmsnorm"
    rotary = given.get("position-embedding-type", "learned_absolute") != "learned_absolute"
    model = Model(
        name=name, tied="untie-embeddings-and-output-weights" not in given, layer_norm=not rms,
        biases="disable-bias-linear" not in given, qk_norm="qk-layernorm" in given,
        positions=0 if rotary else int(given.get("max-position-embeddings", 0)),
        dropout=float(given.get("hidden-dropout", 0.1)) > 0, **sizes,
    )  # fmt: skip
    return model, _megatron_run(given, model)


def _megatron_run(given: Mapping[str, Any], model: Model) -> Run:
    needed = ("seq-length", "micro-batch-size", "global-batch-size")
    sizes = _taken(given, _MEGATRON_RUN, needed)
    if "num-layers-per-virtual-pipeline-stage" in given:
        per = int(given["num-layers-per-virtual-pipeline-stage"])
        sizes["v"] = max(1, model.layers // (sizes.get("pp", 1) * per))
    if _LAYOUT in given:
        letters = read_layout(str(given[_LAYOUT]))
        sizes["split"] = tuple(stage.count("t") for stage in letters)
        sizes["v"] = max(1, len(letters) // sizes.get("pp", 1))
    if given.get("recompute-method") == "block":
        sizes["recompute_layers"] = int(given.get("recompute-num-layers", 1))
    whole = given.get("recompute-granularity")
    recompute = {"full": ("full",), "selective": ("core",)}.get(str(whole), ())
    optimizer = any(k in given for k in ("use-distributed-optimizer", "use-custom-fsdp"))
    return Run(
        **sizes, schedule="interleaved" if sizes.get("v", 1) > 1 else "1f1b", recompute=recompute,
        sp="sequence-parallel" in given, sharding=1 if optimizer else 0,
        grad_overlap="overlap-grad-reduce" in given,
        flash="use-flash-attn" in given or given.get("transformer-impl") == "transformer_engine",
    )  # fmt: skip


def _taken(
    given: Mapping[str, Any], names: Mapping[str, str], needed: Iterable[str]
) -> dict[str, Any]:
    for key in needed:
        if key not in given:
            raise UsageError(f"--{key} is missing")
    result: dict[str, Any] = {}
    for key, ours in names.items():
        if given.get(key) is not None:
            try:
                result[ours] = int(given[key])
            except (TypeError, ValueError):
                raise UsageError(f"--{key} is {given[key]}; it must be a whole number") from None
    return result


# --- torchtitan's TOML ------------------------------------------------------------------------

TITAN_MODELS = {
    ("llama3", "8B"): "llama3-8b", ("llama3", "70B"): "llama3-70b",
    ("llama3", "405B"): "llama3-405b",
    ("deepseek_v3", "671B"): "deepseek-v3", ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "14B"): "qwen3-14b",
    ("qwen3", "32B"): "qwen3-32b", ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
}  # fmt: skip
TITAN_SCHEDULES = {
    "1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved", "LoopedBFS": "looped-bfs",
    "InterleavedZeroBubble": "interleaved-zb", "ZBVZeroBubble": "zb-v", "DualPipeV": "dualpipev",
}  # fmt: skip


def from_torchtitan(path: str | Path, gpus: int) -> tuple[Model, Run]:
    """The model and the run of torchtitan's TOML on a number of GPUs.

    Raises: UsageError for a flavour or a schedule that hocket does not know.
    """
    config = load_toml(path)

    def part(name: str) -> Mapping[str, Any]:
        return config.get(name, {})

    key = (part("model").get("name", "llama3"), part("model").get("flavor", "8B"))
    if key not in TITAN_MODELS:
        known = ", ".join(" ".join(x) for x in TITAN_MODELS)
        raise UsageError(
            f"{path}: the model {' '.join(map(str, key))} is not known; known are {known}"
        )
    layout, training = part("parallelism"), part("training")
    tp, cp, pp = (
        int(layout.get(f"{x}_parallel_degree", 1)) for x in ("tensor", "context", "pipeline")
    )
    name = str(layout.get("pipeline_parallel_schedule", "Interleaved1F1B"))
    known = {x.lower(): ours for x, ours in TITAN_SCHEDULES.items()}
    if pp > 1 and name.lower() not in known:
        raise UsageError(
            f"{path}: the schedule {name} is not known; known are {', '.join(TITAN_SCHEDULES)}"
        )
    shares = max(1, gpus // (tp * cp * pp))
    local = int(training.get("local_batch_size", training.get("batch_size", 8)))
    micro = int(layout.get("pipeline_parallel_microbatch_size", 1)) if pp > 1 else local
    schedule = known.get(name.lower(), "1f1b") if pp > 1 else "1f1b"
    mode = part("activation_checkpoint").get("mode", "selective")
    run = Run(
        int(training.get("seq_len", 2048)), micro, int(training.get("global_batch_size", -1)), tp,
        cp, int(layout.get("expert_parallel_degree", 1)), 1, pp, schedule=schedule, sp=tp > 1,
        sharding=3,
        recompute={"full": ("full",), "selective": ("norm", "activation")}.get(mode, ()),
    )  # fmt: skip
    if run.global_batch < 0:
        run = replace(run, global_batch=local * shares)
    two = schedule in ("interleaved", "looped-bfs", "interleaved-zb", "zb-v", "dualpipev")
    return load_model(TITAN_MODELS[key]), replace(run, v=2 if two else 1)
