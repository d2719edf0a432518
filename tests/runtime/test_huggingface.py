"""Hugging Face causal language models split into stages, against the unsplit model."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runtime_ranks import LONG, close, on_ranks
from torch.nn.functional import cross_entropy

from hocket.cli import main
from hocket.cluster import layer_flops, load_model
from hocket.errors import RunError, UsageError
from hocket.runtime import Pipeline, load_stage, split_model
from hocket.schedules import build

transformers = pytest.importorskip("transformers", reason="pip install transformers runs these")
pytestmark = pytest.mark.runtime

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
MODELS = {
    "Llama": SIZES | {"tie_word_embeddings": True},
    "Qwen2": SIZES,
    "Qwen3": SIZES | {"head_dim": 8},
    "Mistral": SIZES | {"sliding_window": 4},
    "Mixtral": SIZES | EXPERTS,
    "Qwen2Moe": SIZES | EXPERTS,
    "Qwen3Moe": SIZES | EXPERTS | {"tie_word_embeddings": True},
    "GPT2": {"vocab_size": 48, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
    | {"bos_token_id": 1, "eos_token_id": 2},
    "Gemma": SIZES | {"head_dim": 8},
    "Gemma2": SIZES | {"head_dim": 8, "sliding_window": 4},
    "Gemma3Text": SIZES | {"head_dim": 8, "sliding_window": 4},
    "GPTNeoX": {key: n for key, n in SIZES.items() if key != "num_key_value_heads"},
}


def model_of(kind, **more):
    config = getattr(transformers, f"{kind}Config")(**MODELS.get(kind, SIZES) | more)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    return model.double().eval()


def batch():
    """Tokens and targets, a mask of padding at the end, and positions that begin with 3."""
    draws = torch.Generator().manual_seed(5)
    tokens = torch.randint(48, (8, 9), generator=draws)
    mask = torch.ones_like(tokens)
    mask[1, 7:] = mask[6, 6:] = 0
    positions = (torch.arange(9) + 3).expand(8, 9)
    return tokens, tokens.roll(-1, 1), {"attention_mask": mask, "position_ids": positions}


def loss(scores, targets):
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


def whole(model):
    """Loss and gradients of the unsplit model, by name.

    It takes one microbatch after the other, since some norms sum over rows in single precision.
    """
    model = copy.deepcopy(model)
    tokens, targets, more = batch()
    total = torch.zeros((), dtype=torch.float64)
    parts = (t.split(2) for t in (tokens, targets, *more.values()))
    for x, y, mask, positions in zip(*parts, strict=True):
        out = model(x, attention_mask=mask, position_ids=positions, use_cache=False)
        part = loss(out.logits, y) / 4
        part.backward()
        total += part.detach()
    return total, {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}


def trained(model, schedule, stages, **options):
    """The loss and the gradients by name, of a step on each rank; the names of all states."""
    tokens, targets, more = batch()

    def rank(r, g):
        split = split_model(copy.deepcopy(model), stages)
        held = {s: split[s] for s in schedule.placement.stages_of_rank[r]}
        pipe = Pipeline(schedule, held, loss, group=g.group, timeout=LONG, **options)
        first = pipe.eval(tokens, targets, arguments=more)
        total = pipe.step(tokens, targets, arguments=more)
        close(first, total, "the evaluated loss")
        return total, {n: p.grad for n, p in pipe.named_parameters()}, pipe.state_dict()

    return on_ranks(schedule.p, rank)


SCHEDULES = [
    build("1f1b", p=2, m=4), build("interleaved", p=2, m=4, v=2), build("zb-v", p=2, m=4),
    build("1f1b", p=4, m=4),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:stage .+ no part of its backward")  # of GPT-2
@pytest.mark.parametrize("kind", MODELS)
def test_loss_gradients_and_names_are_those_of_the_unsplit_model(kind):
    model = model_of(kind)
    want, gradients = whole(model)
    mirrored = [build("dualpipe", p=2, m=4)] if kind == "Llama" else []
    like_another = kind in ("Qwen3Moe", "Gemma", "GPTNeoX")
    for schedule in SCHEDULES[2:3] if like_another else SCHEDULES + mirrored:
        out = trained(model, schedule, schedule.placement.n_stages)
        names = set()
        for total, own, state in out:
            close(total, want, f"{schedule.name}: the loss")
            for name, grad in own.items():
                close(grad, gradients[name], f"{schedule.name}: {name}")
                assert grad is not None and grad.any(), name
            names |= state.keys()
        assert names == model.state_dict().keys()


@pytest.mark.parametrize(
    ("kind", "parts"), [("Llama", [1, 5]), ("Mistral", [3, 3]), ("GPT2", [2, 4])]
)
@pytest.mark.filterwarnings("ignore:stage .+ no part of its backward")
def test_slices_train_like_whole_sequences_and_tokens_follow_as_without_a_cache(kind, parts):
    model = model_of(kind)
    tokens, targets, more = batch()
    beginning = made = tokens[:3, :5]
    for _ in range(6):
        with torch.no_grad():
            scores = model(made, use_cache=False).logits
        made = torch.cat([made, scores[:, -1:].argmax(-1)], dim=1)
    want, gradients = whole(model)
    schedule = build("seq1f1b", p=2, m=4, slices=3)

    def rank(r, g):
        stage = split_model(copy.deepcopy(model), parts)[r]
        stage.carries = True
        pipe = Pipeline(schedule, {r: stage}, loss, group=g.group, timeout=LONG)
        close(pipe.step(tokens, targets, arguments=more), want, "loss")
        for name, p in pipe.named_parameters():
            close(p.grad, gradients[name], name)
        assert torch.equal(pipe.generate(beginning, 6), made[:, 5:])

    on_ranks(2, rank)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
def test_adapters_train_and_frozen_weights_do_not():
    peft = pytest.importorskip("peft", reason="pip install peft runs this")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model_of("Qwen2"), config)
    model = adapted.get_base_model()
    want, gradients = whole(model)
    for total, own, _ in trained(adapted, build("zb-v", p=2, m=4), 4):
        close(total, want, "loss")
        for name, grad in own.items():
            assert (grad is not None) == ("lora" in name), name
            close(grad, gradients[name], name)


def one_rank(stages, loss=loss, **options):
    n = len(stages)
    schedule = build("1f1b", p=1, m=2) if n == 1 else build("interleaved", p=1, v=n, m=2)
    return Pipeline(schedule, dict(enumerate(stages)), loss, **options)


def test_dropout_depends_on_no_partition():
    model = model_of("GPT2").train()
    tokens, targets, more = batch()
    losses = []
    for parts in ([6], [1, 1, 2, 1, 1], [3, 3]):
        pipe = one_rank(split_model(copy.deepcopy(model), parts), seed=4)
        losses.append(float(pipe.step(tokens, targets, arguments=more)))
    assert len({*losses}) == 1
    assert abs(losses[0] - float(pipe.eval(tokens, targets, arguments=more))) < 1e-12
    assert (
        abs(losses[0] - float(one_rank(split_model(model.eval(), 1)).eval(tokens, targets))) > 1e-4
    )


def test_layers_are_split_evenly_by_given_parts_or_by_loads():
    def sizes(*args, **options):
        stages = split_model(model_of("Llama"), *args, **options)
        names = [{pipe_name(n) for n in s.state_dict()} for s in stages]
        return ["".join(sorted(own)) for own in names]

    def pipe_name(name):
        part = name.removeprefix("part.model.").removeprefix("part.")
        return {"e": "e", "n": "h", "l": "h" if part.startswith("lm") else part[7]}[part[0]]

    assert sizes(2) == ["01e", "23h"]
    assert sizes(6) == ["e", "0", "1", "2", "3", "h"]
    assert sizes([1, 4, 1]) == ["e", "0123", "h"]
    assert sizes(2, loads=[0, 1, 1, 1, 1, 3]) == ["012e", "3h"]


@pytest.mark.parametrize(
    ("kind", "more", "stages", "sentence"),
    [
        (
            "Bloom",
            {"n_layer": 2},
            2,
            "BloomForCausalLM has the parts word_embeddings, .*, but a split needs ",
        ),
        ("Mixtral", {"output_router_logits": True}, 2, "adds a loss of the routers of all layers"),
        (
            "Llama",
            {},
            [3, 2],
            r"the stages have \[3, 2\] parts; it must .* the model has 6 parts \(",
        ),
        (
            "Llama",
            {},
            7,
            r"the model has 6 parts \(the embedding, 4 layers, .*\), which do not make 7",
        ),
    ],
)
def test_what_does_not_fit_is_refused(kind, more, stages, sentence):
    with pytest.raises(UsageError, match=sentence):
        split_model(model_of(kind, **more), stages)


def test_loads_are_one_for_each_part():
    with pytest.raises(UsageError, match="there are 4 loads, but the model has 6 parts"):
        split_model(model_of("Llama"), 2, loads=[1, 1, 1, 1])


def test_a_model_that_scales_between_its_layers_is_refused_in_the_first_forward():
    config = transformers.GraniteConfig(**SIZES, embedding_multiplier=2.0)
    stages = split_model(transformers.AutoModelForCausalLM.from_config(config), 2)
    tokens, targets, _ = batch()
    with pytest.raises(RunError, match="changes the hidden state between its layers; such a model"):
        one_rank(stages).step(tokens, targets)


# --- folders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Llama", "Mixtral", "GPT2"])
def test_a_stage_of_a_folder_has_its_weights_whether_read_or_drawn(kind, tmp_path):
    model = model_of(kind).float()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    drawn = load_stage(tmp_path, 0, 1, seed=3).part.state_dict()
    assert drawn.keys() == model.state_dict().keys()
    other = load_stage(tmp_path, 0, 1, seed=4).part.state_dict()
    assert not any(torch.equal(drawn[n], other[n]) for n in drawn if "proj" in n and "weight" in n)
    split = [load_stage(tmp_path, s, [1, 2, 3], seed=3) for s in range(3)]
    model.save_pretrained(tmp_path)
    read = [load_stage(tmp_path, s, [1, 2, 3], dtype=torch.float64) for s in range(3)]
    buffers = dict(model.named_buffers())
    for stages, want in ((split, drawn), (read, model.state_dict())):
        held = {n: t for stage in stages for n, t in stage.part.state_dict().items()}
        assert held.keys() == want.keys()
        assert all(torch.equal(t.float(), want[n]) for n, t in held.items())
        for stage in stages:
            assert all(torch.equal(b.float(), buffers[n]) for n, b in stage.part.named_buffers())
    assert split[0].tied_parameters == split_model(model, [1, 2, 3])[0].tied_parameters


@pytest.mark.parametrize("kind", MODELS)
def test_operations_are_counted_from_the_config_that_transformers_writes(kind, tmp_path):
    config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config.architectures = [names[config.model_type]]
    config.save_pretrained(tmp_path)
    flops = layer_flops(load_model(str(tmp_path / "config.json")), 16)
    assert len(flops) == 6 and flops[0] == 0 and min(flops[1:]) > 1e5


def test_folders_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"nothing has no config\.json$"):
        load_stage(tmp_path / "nothing", 0, 1)
    model = model_of("Qwen2").float()
    model.save_pretrained(tmp_path)
    weights = next(tmp_path.glob("*.safetensors"))
    from safetensors.torch import load_file, save_file

    held = load_file(weights)
    del held["model.layers.1.mlp.up_proj.weight"]
    save_file(held, weights, {"format": "pt"})
    load_stage(tmp_path, 0, [2, 4])
    with pytest.raises(UsageError, match=r"has no weights for model.layers.1.mlp.up_proj.weight$"):
        load_stage(tmp_path, 1, [2, 4])
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(UsageError, match=f"^{tmp_path}: .+"):
        load_stage(tmp_path, 1, [2, 4])
    Path(tmp_path, "config.json").write_text('{"model_type": "gpt5"}')
    with pytest.raises(UsageError, match=f"^{tmp_path}: "):
        load_stage(tmp_path, 0, 1)


# --- the page --------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs/huggingface.md"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of reading a checkpoint
def test_every_block_of_the_page_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert [kind for kind, _ in blocks] == ["python", "sh", "python", "sh", "python", "python"]
    for kind, text in blocks:
        if kind == "sh":
            for line in text.splitlines():
                assert main(shlex.split(line)[1:]) == 0
            continue
        with monkeypatch.context() as own:
            for name, value in env.items():
                own.setenv(name, value)
            exec(compile(text, str(PAGE), "exec"), {})
        if dist.is_initialized():
            dist.destroy_process_group()
    printed = capfd.readouterr().out
    losses = [float(x) for x in re.findall(r"^\d (\d\.\d+)$", printed, re.M)]
    assert len(losses) == 3 and losses[2] < losses[0]
    first, _, trained = re.findall(r"^step 1/3  loss (\S+)", printed, re.M)
    assert float(trained) < float(first) - 0.2
