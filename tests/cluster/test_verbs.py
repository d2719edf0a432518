"""The commands from a model and a cluster: what they print, refuse and write."""

import json
import tomllib

import pytest

from hocket import load_costs
from hocket.cli import main
from hocket.cluster import (
    Run,
    cluster_of,
    costs_of,
    estimate,
    load_cluster,
    load_gpu,
    load_model,
    load_stack,
    stack_of,
)
from hocket.cluster.report import PARTS, limited_by
from hocket.errors import UsageError

WORDS = ["--model", "llama3-70b", "--gpu", "h100", "--gpus", "64", "--seq", "8192",
         "--global-batch", "64", "--tp", "8", "--pp", "4"]  # fmt: skip
RUN = Run(8192, 1, 64, tp=8, pp=4, sp=True)


def _run(capsys, *words):
    status = main([str(w) for w in words])
    out = capsys.readouterr()
    return status, out.out, out.err


def _estimated(**change):
    case = (load_model("llama3-70b"), cluster_of("h100", 64), load_stack("h100-megatron"))
    return estimate(*case, Run(**{**vars(RUN), **change}))


def test_estimate_is_what_the_library_says_about_the_same_run(capsys):
    status, out, _ = _run(capsys, "estimate", *WORDS, "--json")
    found, data = _estimated(), json.loads(out)
    assert status == 0 and data["fits"]
    assert data["step_s"] == pytest.approx(found.step)
    assert data["dp"] == 2 and data["microbatches"] == 32
    assert sum(data["breakdown_s"].values()) == pytest.approx(found.step)
    parts = data["memory_bytes"]
    assert sum(parts[k] for k in ("weights", "gradients", "optimizer", "activations", "buffers")) \
        == pytest.approx(parts["total"])  # fmt: skip
    assert data["stack_error"] == found.error._asdict()
    assert {"mfu", "flops_per_token", "flops_convention", "limited_by", "notes"} <= set(data)


def test_estimate_prints_the_verdict_first_and_then_every_number(capsys):
    out = _run(capsys, "estimate", *WORDS)[1].splitlines()
    assert out[0].startswith("Llama-3-70B on 64 H100-80GB-SXM: ") and "MFU" in out[0]
    assert out[1].startswith("it fits: rank 0 is the fullest, with ")
    assert out[2].startswith("limited by ")
    assert out[3].startswith("error on the 6 runs that h100-megatron was fitted on: median 4.0 %")
    first = [line.split("  ")[0] for line in out]
    for name in (*(part.name for part in PARTS.values()), "weights", "gradients", "activations"):
        assert name in first


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (["--schedule", "interleaved", "-v", "2"], {"schedule": "interleaved", "v": 2}),
        (["--schedule", "zb-v"], {"schedule": "zb-v", "v": 2}),
        (["--schedule", "interleaved:group=8", "-v", "2"],
         {"schedule": "interleaved", "v": 2, "options": (("group", 8),)}),
        (["--recompute", "core,norm", "--recompute-layers", "3"],
         {"recompute": ("core", "norm"), "recompute_layers": 3}),
        (["--split", "19,21,21,19"], {"split": (19, 21, 21, 19)}),
        (["--lighter", "1,1", "--no-sp", "--no-flash"],
         {"lighter": (1, 1), "sp": False, "flash": False}),
        (["--sharding", "3", "--no-grad-overlap"], {"sharding": 3, "grad_overlap": False}),
    ],
)  # fmt: skip
def test_every_option_reaches_the_run(capsys, words, change):
    data = json.loads(_run(capsys, "estimate", *WORDS, *words, "--json")[1])
    assert data["step_s"] == pytest.approx(_estimated(**change).step)
    assert data["ranks_bytes"] == pytest.approx([m.total for m in _estimated(**change).memory])


def test_what_is_left_out_is_derived_from_the_layout(capsys):
    words = ["--model", "mixtral-8x7b", "--gpu", "h100", "--tp", "2", "--ep", "8", "--pp", "2"]
    data = json.loads(_run(capsys, "estimate", *words, "--json")[1])
    assert (data["gpus"], data["dp"], data["microbatches"], data["run"]["seq"]) == (16, 4, 8, 4096)
    assert data["stack"] == "h100-megatron"
    words = [*words[:4], "--tp", "2", "--dp", "3", "--global-batch", "12"]
    assert json.loads(_run(capsys, "estimate", *words, "--json")[1])["gpus"] == 6


def test_a_cluster_file_and_a_model_file_are_read(capsys, tmp_path):
    cluster, model = tmp_path / "mine.toml", tmp_path / "config.json"
    cluster.write_text('gpu = "h100"\ngpus = 64\nmemory_gb = 70\n')
    model.write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 80, "hidden_size": 8192,
        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
        "vocab_size": 128256, "tie_word_embeddings": False,
    }))  # fmt: skip
    words = ["--model", model, "--cluster", cluster, *WORDS[6:]]
    data = json.loads(_run(capsys, "estimate", *words, "--json")[1])
    assert data["memory_bytes"]["limit"] == 70e9
    assert data["step_s"] == pytest.approx(_estimated().step)
    status, _, err = _run(capsys, "estimate", *words, "--gpus", 128)
    assert (status, err) == (2, f"hocket: gpus is 128; {cluster} has 64\n")


def test_what_does_not_fit_says_by_how_much_and_exits_with_1(capsys):
    status, out, _ = _run(capsys, "estimate", *WORDS, "--memory", "40GB")
    need = _estimated().memory[0].total
    assert status == 1
    assert "it does not fit: rank 0 is the fullest" in out
    assert f"limited by memory: rank 0 needs {(need - 40e9) / 1e9:.3g} GB more than it has" in out


def test_each_broken_rule_is_one_sentence(capsys):
    words = [*WORDS, "--tp", "7", "--gpus", "64", "--global-batch", "63"]
    status, out, err = _run(capsys, "estimate", *words)
    assert (status, out) == (2, "")
    assert err.splitlines()[:2] == [
        "hocket: tp cp pp is 28; it must divide the 64 GPUs",
        "tp is 7; it must divide the 64 heads",
    ]
    assert "Traceback" not in err and len(err.splitlines()) == 5


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--dp", "3"], "dp is 3; 64 GPUs with tp 8, cp 1 and pp 4 have 2 data parallel ranks"),
        (["--schedule", "nope"], "there is no schedule 'nope'"),
        (["--schedule", "1f1b:m=3"], "m of 1f1b is set by --global-batch"),
        (["--pp", "1000000000", "--gpus", "8000000000"], "pp v is 1000000000"),
        (["-v", "100000000000"], "pp v is 400000000000; it must be at most the 80 layers"),
        (["--recompute", "all"], "recompute is all; known are none, core"),
        (["--recompute-layers", "-1"], "recompute_layers is -1; it must be 0 or more"),
        (["--lighter", "1"], "expected two whole numbers such as 1,2, found '1'"),
        (["--memory", "0"], "memory is 0; it must be above 0"),
        (["--gpus", "0"], "gpus is 0; it must be 1 or more"),
        (["--pp", "0"], "pp is 0; it must be 1 or more"),
        (["--global-batch", "0"], "global_batch is 0; it must be 1 or more"),
        (["--model", "llama3-71b"], "there is no model named 'llama3-71b'; did you mean"),
        (["--gpu", "h101"], "there is no GPU named 'h101'; did you mean"),
        (["--stack", "h100-megatrn"], "there is no stack named 'h100-megatrn'; did you mean"),
        (["--cluster", "c.toml"], "name the GPU with --gpu, or a file of the cluster"),
        (["--schedule", "dualpipe"], "dualpipe holds two copies of the weights"),
        (["--schedule", "seq1f1b"], "seq1f1b divides sequences into slices"),
        (["--schedule", "moe-pair", "-v", "4"], "moe-pair has several queues per rank"),
        (["--gpu", "h200"], "no stack is the usual one of H200"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(capsys, words, sentence):
    status, out, err = _run(capsys, "estimate", *WORDS, *words)
    assert (status, out) == (2, "")
    assert sentence in err and "Traceback" not in err and len(err.splitlines()) == 1


def test_calibrate_first_is_the_first_line_where_nothing_was_measured(capsys):
    words = ["--model", "mixtral-8x7b", "--gpu", "h100", "--ep", "8", "--sharding", "2"]
    out = _run(capsys, "estimate", *words, "--stack", "h100-foundry")[1]
    assert out.startswith("calibrate first")
    assert "h100-foundry was fitted on no run of models with experts: its error is unknown" in out
    assert not _run(capsys, "estimate", *words)[1].startswith("calibrate first")


def test_what_limits_a_step_follows_the_configuration():
    assert limited_by(_estimated(schedule="gpipe", global_batch=8)).startswith("bubble, ")
    assert limited_by(_estimated(split=(35, 15, 15, 15))).startswith("memory: rank 0 needs ")
    assert limited_by(_estimated(global_batch=1024)).startswith("computation, ")


def test_the_usual_stack_is_that_of_megatron():
    assert stack_of(load_gpu("b200")).name == "b200-megatron"
    with pytest.raises(UsageError, match="no stack is the usual one of H800; choose one with"):
        stack_of(load_gpu("h800"))


def test_costs_writes_what_the_library_computes_and_other_commands_read(capsys, tmp_path):
    path = tmp_path / "costs.toml"
    status, out, _ = _run(capsys, "costs", *WORDS, "-o", path)
    assert (status, out) == (0, f"written: {path}; use it with -p 4 --costs {path}\n")
    text, costs, ours = path.read_text(), load_costs(path), _estimated().costs
    assert text.startswith("# Llama-3-70B on 64 H100-80GB-SXM, 4 stages of 20, 20, 20, 20 layers\n")
    assert costs.per == "stage"
    assert list(costs.F) == pytest.approx(ours.F, rel=1e-5)
    assert costs.bytes.held == pytest.approx(ours.bytes.held, rel=1e-5)
    words = ["simulate", "1f1b", "-p", 4, "-m", 32, "--costs", path, "--json"]
    made = json.loads(_run(capsys, *words)[1])["makespan"]
    assert made == pytest.approx(_estimated().timeline.makespan, rel=1e-5)


def test_costs_prints_the_file_and_its_json_has_the_same_values(capsys):
    text = _run(capsys, "costs", *WORDS)[1]
    data = json.loads(_run(capsys, "costs", *WORDS, "--json")[1])
    assert tomllib.loads(text)["F"] == data["F"] and data["toml"].strip() == text.strip()
    case = (load_model("llama3-70b"), cluster_of("h100", 64), load_stack("h100-megatron"), RUN)
    assert data["I"] == pytest.approx(costs_of(*case).I, rel=1e-5)


def test_costs_of_a_folder_that_is_missing_are_refused_before_any_work(capsys, tmp_path):
    status, _, err = _run(capsys, "costs", *WORDS, "-o", tmp_path / "no" / "costs.toml")
    assert status == 2 and "cannot be written there" in err


def test_costs_of_an_uncertain_stack_say_calibrate_first(capsys):
    words = ["--model", "mixtral-8x7b", "--gpu", "h100", "--ep", "8"]
    assert "calibrate first" in _run(capsys, "costs", *words, "--stack", "h100-fp8-megatron")[1]
    assert "calibrate first" not in _run(capsys, "costs", *words)[1]


def test_a_cluster_of_the_file_is_the_one_of_the_library(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('gpu = "h100"\ngpus = 64\n')
    assert load_cluster(path) == cluster_of("h100", 64)
