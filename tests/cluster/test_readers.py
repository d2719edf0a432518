"""Models and runs from the files that people have, and the sentence for each mistake."""

import json

import pytest

from hocket.cluster import (
    active_parameters,
    catalogue,
    flops_per_token,
    layer_flops,
    load_cluster,
    load_gpu,
    load_model,
    load_stack,
    parameters,
)
from hocket.cluster.model import padded_vocab
from hocket.cluster.readers import ARCHITECTURES, from_megatron, from_torchtitan
from hocket.cluster.stack import dumps_stack
from hocket.errors import UsageError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "moe_layer_freq": 1,
}
QWEN_MOE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "intermediate_size": 6144,
}


@pytest.fixture
def config(tmp_path):
    def write(content):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("content", "name"),
    [(LLAMA, "llama3-8b"), (DEEPSEEK, "deepseek-v3"), (QWEN_MOE, "qwen3-30b-a3b")],
)
def test_config_json_gives_the_model_of_the_catalogue(config, content, name):
    found, known = load_model(config(content)), load_model(name)
    assert parameters(found) == parameters(known)
    assert active_parameters(found) == active_parameters(known)


def test_gpt2_and_mixtral_and_gemma(config):
    gpt2 = {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 48,
        "n_embd": 1600,
        "n_head": 25,
        "n_positions": 1024,
        "vocab_size": 50257,
        "activation_function": "gelu_new",
    }
    assert parameters(load_model(config(gpt2))) == parameters(load_model("gpt2-xl"))
    mixtral = {
        **LLAMA,
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    assert parameters(load_model(config(mixtral))) == parameters(load_model("mixtral-8x7b"))
    gemma = {
        **LLAMA,
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": 256,
        "sliding_window": 4096,
    }
    model = load_model(config({k: v for k, v in gemma.items() if k != "tie_word_embeddings"}))
    assert (model.tied, model.norms, model.window_layers) == (True, 4, 16)


def test_a_key_that_changes_no_size_where_it_has_one_value_is_read_past_there_only(config):
    gpt2 = {
        "architectures": ["GPT2LMHeadModel"], "n_layer": 12, "n_embd": 768, "n_head": 12,
        "vocab_size": 50257, "n_positions": 1024, "tie_word_embeddings": True,
    }  # fmt: skip
    assert load_model(config(gpt2 | {"add_cross_attention": False})).tied
    for key, value in (("add_cross_attention", True), ("tie_word_embeddings", False)):
        with pytest.raises(UsageError, match=f"{key} is not a known key of GPT2LMHeadModel, and"):
            load_model(config(gpt2 | {key: value}))


def test_operations_of_layers_are_those_of_the_whole_without_further_tokens(config):
    model = load_model(config(DEEPSEEK))
    each = layer_flops(model, 4096)
    assert len(each) == 63 and each[0] == 0
    assert each[1] == each[3] != each[4] == each[-2]
    plain = load_model(config(LLAMA))
    padding = padded_vocab(plain, 1) / plain.vocab
    head = layer_flops(plain, 4096)[-1]
    total = sum(layer_flops(plain, 4096)) - head + head / padding
    assert 3 * total / 4096 == pytest.approx(flops_per_token(plain, 4096), rel=1e-12)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'; it must be a whole number"),
        (
            {"num_wide_layers": 3},
            "num_wide_layers is not a known key of LlamaForCausalLM, and it could change sizes",
        ),
        (
            {"architectures": ["MambaForCausalLM"]},
            "the architecture MambaForCausalLM is not known; known are " + ", ".join(ARCHITECTURES),
        ),
        ({"architectures": None}, "architectures is missing; it must name one architecture"),
        (
            {"num_key_value_heads": 5},
            "model: heads is 32 and kv_heads is 5; heads must be a multiple of kv_heads",
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_one_sentence(config, tmp_path, change, sentence):
    path = config({**LLAMA, **change, "_name_or_path": "model"})
    with pytest.raises(UsageError) as error:
        load_model(path)
    assert str(error.value) == f"{path}: {sentence}"


def test_an_unknown_name_is_answered_with_near_ones():
    with pytest.raises(
        UsageError, match=r"^there is no model named 'lama3-70b'; did you mean llama3-70b"
    ):
        load_model("lama3-70b")
    with pytest.raises(UsageError, match=r"^there is no GPU named 'h10'; did you mean h100"):
        load_gpu("h10")


MEGATRON = """
torchrun pretrain_gpt.py --num-layers 80 --hidden-size 8192 --num-attention-heads 64 \\
  --group-query-attention --num-query-groups 8 --ffn-hidden-size 28672 --vocab-size 128256
  --swiglu --normalization RMSNorm
  --position-embedding-type rope --untie-embeddings-and-output-weights
  --disable-bias-linear --hidden-dropout 0 --seq-length 8192 --micro-batch-size 1
  --global-batch-size 512 --tensor-model-parallel-size 8
  --sequence-parallel --pipeline-model-parallel-size=4
  --num-layers-per-virtual-pipeline-stage 5 --use-distributed-optimizer
  --use-flash-attn --recompute-granularity selective --bf16 --lr 1e-4
"""


def test_megatrons_arguments_give_model_and_run():
    model, run = from_megatron(MEGATRON)
    assert parameters(model) == parameters(load_model("llama3-70b"))
    assert (run.tp, run.pp, run.v, run.schedule, run.sp, run.sharding) == (
        8,
        4,
        4,
        "interleaved",
        True,
        1,
    )
    assert (run.seq, run.micro_batch, run.global_batch, run.recompute) == (8192, 1, 512, ("core",))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (MEGATRON.replace("--hidden-size 8192", ""), "--hidden-size is missing"),
        (
            MEGATRON.replace("--num-layers 80", "--num-layers many"),
            "--num-layers is many; it must be a whole number",
        ),
        (
            MEGATRON + " --moe-layer-freq 2",
            "--moe-layer-freq changes sizes in a way that hocket does not know",
        ),
    ],
)
def test_arguments_that_cannot_be_read_are_one_sentence(text, sentence):
    with pytest.raises(UsageError) as error:
        from_megatron(text)
    assert str(error.value) == sentence


def test_torchtitans_file_gives_model_and_run(tmp_path):
    path = tmp_path / "llama.toml"
    path.write_text(
        '[model]\nname = "llama3"\nflavor = "70B"\n[training]\nlocal_batch_size = 8\n'
        "seq_len = 8192\n"
        "[parallelism]\ntensor_parallel_degree = 8\npipeline_parallel_degree = 2\n"
        'pipeline_parallel_schedule = "1F1B"\n[activation_checkpoint]\nmode = "full"\n'
    )
    model, run = from_torchtitan(path, 64)
    assert model.name == "Llama-3-70B"
    assert (run.tp, run.pp, run.schedule, run.global_batch, run.recompute) == (
        8,
        2,
        "1f1b",
        32,
        ("full",),
    )


@pytest.mark.parametrize("kind", ["models", "gpus", "stacks"])
def test_every_entry_of_the_catalogues_is_read_and_has_a_source(kind):
    load = {"models": load_model, "gpus": load_gpu, "stacks": load_stack}[kind]
    for name, entry in catalogue(kind).items():
        assert load(name) is not None
        assert entry.get("source") or entry["fit"]["sources"], name


def test_a_stack_survives_being_written(tmp_path):
    stack = load_stack("h100-megatron")
    path = tmp_path / "mine.toml"
    path.write_text(dumps_stack(stack))
    again = load_stack(str(path))
    assert again.gemm == pytest.approx(stack.gemm, rel=1e-3)
    assert again.fit.sources == stack.fit.sources


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('gpu = "h100"\n', "gpus is missing"),
        ('gpu = "h100"\ngpus = 0\n', "gpus is 0; it must be a whole number, 1 or more"),
        ('gpu = "h100"\ngpus = 8\nspeed = 1\n', "speed is not a known key of a cluster"),
        (
            'gpu = "h100"\ngpus = 64\n[[levels]]\nname = "a"\nsize = 8\nbandwidth = 300\n'
            "latency_us = 5\n",
            "the outermost level joins 8 GPUs and the cluster has 64; add a level that joins all",
        ),
    ],
)
def test_a_cluster_file_that_cannot_be_read_is_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        load_cluster(str(path))
    assert str(error.value) == f"{path}: {sentence}"
