"""The table of operations against published closed formulas."""

import pytest

from hocket.cluster import active_parameters, flops_per_token, load_model, parameters
from hocket.cluster.model import Model
from hocket.cluster.operations import LAYERS, F, I, Shape, W, layer

H, A, S, B = 1024, 16, 2048, 2
GPT = Model(
    "GPT", 4, H, A, 51200, gated=False, biases=True, layer_norm=True, positions=S, dropout=True
)


def activation(shape, *, drop=()):
    return sum(
        t.amount
        for t in layer("dense", shape, GPT).tensors
        if t.made is F and not {*t.parts} & {*drop}
    )


@pytest.mark.parametrize(
    ("t", "sp", "formula"),
    [
        (1, False, lambda t: 34 + 5 * A * S / H),
        (4, False, lambda t: 10 + 24 / t + 5 * A * S / (H * t)),
        (4, True, lambda t: (34 + 5 * A * S / H) / t),
    ],
)
def test_activation_of_a_layer_is_korthikantis_table_2(t, sp, formula):
    shape = Shape(S, B, tp=t, sp=sp, flash=False)
    assert activation(shape) == pytest.approx(S * B * H * formula(t))


def test_selective_recomputation_drops_the_scores():
    assert activation(Shape(S, B, flash=False), drop=["core"]) == pytest.approx(S * B * H * 34)


def test_between_i_and_w_a_gpt_layer_holds_32sbh():
    """Qi et al., arXiv 2401.10241: I releases 2h + 5as, W releases 32h."""
    held = sum(
        t.amount for t in layer("dense", Shape(S, B, flash=False), GPT).tensors if t.until is W
    )
    assert held == pytest.approx(32 * S * B * H)


def test_with_flash_attention_i_frees_nothing_of_a_llama_layer():
    model = load_model("llama3-70b")
    tensors = layer("dense", Shape(8192, 1), model).tensors
    before = sum(t.amount for t in tensors if t.made is F and t.op != "row sums")
    after = sum(t.amount for t in tensors if t.until is W)
    assert before == after == 274_432 * 8192


def test_a_deepseek_v3_layer_holds_more_after_i_than_before():
    """Its attention 16,256 bytes per token less, its experts 2kh = 114,688 more, and the router."""
    model, shape = load_model("deepseek-v3"), Shape(4096, 1, ep=64)
    dense, experts = (layer(kind, shape, model).tensors for kind in ("dense", "experts"))

    def freed(tensors):
        kept = [t for t in tensors if t.op not in ("row sums", "routing")]
        return sum(t.amount for t in kept if t.until is W) - sum(
            t.amount for t in kept if t.made is F
        )

    assert freed(dense) / 4096 == pytest.approx(-16_256)
    assert freed(experts) / 4096 == pytest.approx(-16_256 + 2 * 8 * 7168)


def test_flops_of_a_gpt_are_megatrons_formula():
    """72 B s L h^2 (1 + s/6h + V/12Lh), Narayanan et al., arXiv 2104.04473, not recomputed."""
    n, v = GPT.layers, GPT.vocab
    formula = 72 * n * H**2 * (1 + S / (6 * H) + v / (12 * n * H))
    assert flops_per_token(GPT, S, "full") == pytest.approx(formula)


def test_flops_without_attention_are_6n():
    model = load_model("llama3-70b")
    matrices = parameters(model) - model.vocab * model.hidden
    assert flops_per_token(model, 128) == pytest.approx(6 * matrices, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("llama2-7b", 6.738, 6.738),
        ("llama3-70b", 70.554, 70.554),
        ("llama3-405b", 405.853, 405.853),
        ("mixtral-8x7b", 46.703, 12.88),
        ("qwen3-235b-a22b", 235.094, 22.19),
        ("gpt2-xl", 1.5576, 1.5576),
        ("deepseek-v2", 235.741, 21.376),
        ("gpt-oss-120b", 116.79, 5.71),
    ],
)
def test_parameters_of_published_models(name, billions, active):
    model = load_model(name)
    assert parameters(model, mtp=False) / 1e9 == pytest.approx(billions, rel=5e-4)
    assert active_parameters(model) / 1e9 == pytest.approx(active, rel=2e-3)


def test_deepseek_v3_has_671_billion_parameters_and_37_active():
    model = load_model("deepseek-v3")
    assert parameters(model, mtp=False) / 1e9 == pytest.approx(671.0, rel=1e-3)
    assert active_parameters(model) / 1e9 == pytest.approx(37.5, rel=1e-2)


@pytest.mark.parametrize("kind", LAYERS)
def test_tensor_parallel_shares_sum_to_the_whole(kind):
    model = load_model("deepseek-v3")
    whole, part = (layer(kind, Shape(4096, 1, tp=t, etp=t, sp=True), model) for t in (1, 8))
    ours = {
        "router",
        "compress",
        "join",
    }  # every rank of the group computes its own tokens of these
    split = [
        sum(r.flops for r in x.rows if r.phase is F and r.op not in ours) for x in (whole, part)
    ]
    assert split[1] * 8 == pytest.approx(split[0], rel=0.02)


def test_linear_layers_cost_the_same_in_f_i_and_w():
    rows = [r for r in layer("dense", Shape(S, B), GPT).rows if "core" not in r.parts]
    sums = [sum(r.flops for r in rows if r.phase is phase) for phase in (F, I, W)]
    assert sums[0] == sums[1] == sums[2] > 0
