"""The commands from a model and a cluster: what they print, refuse and write."""

import json
import re
import tomllib
from dataclasses import replace

import pytest

from hocket import load_costs
from hocket.cli import main
from hocket.cluster import (
    Gpu,
    Run,
    catalogue,
    cluster_of,
    costs_of,
    estimate,
    faults,
    load_cluster,
    load_gpu,
    load_model,
    load_runs,
    load_stack,
    predicted,
    stack_of,
    stages,
)
from hocket.cluster.readers import from_megatron
from hocket.cluster.report import PARTS, limited_by
from hocket.cluster.search import Space, bound, runs_of, search
from hocket.cluster.targets import megatron
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
    assert re.fullmatch(r"computation .* %; exposed TP, CP, EP .*; exposed DP .*; bubble .*; "
                        r"imbalance .* %", out[3])  # fmt: skip
    assert out[4].startswith("would help most: --schedule zb-v (+")
    assert out[5].startswith("error on the 6 runs that h100-megatron was fitted on: median 4.0 %")
    first = [line.split("  ")[0] for line in out]
    for name in (*PARTS.values(), "weights", "gradients", "activations"):
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
    assert "Traceback" not in err and len(err.splitlines()) == 6
    assert err.splitlines()[-1].startswith("nearest possible: --tp ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--dp", "3"], "dp is 3; 64 GPUs with tp 8, cp 1 and pp 4 have 2 data parallel ranks"),
        (["--schedule", "nope"], "there is no schedule 'nope'"),
        (["--schedule", "1f1b:m=3"], "m of 1f1b is set by --global-batch"),
        (["--pp", "1000000000", "--gpus", "8000000000"], "pp v is 1000000000"),
        (["-v", "100000000000"], "pp v is 400000000000; it must be at most the 80 layers"),
        (["--recompute", "all"], "recompute is all; known are none, core"),
        (["--recompute-layers", "-1"], "--recompute-layers: expected whole numbers such as 4, 0-3"),
        (["--lighter", "1"], "expected two whole numbers such as 1,2, found '1'"),
        (["--memory", "0"], "memory is 0; it must be one size above 0"),
        (["--gpus", "0"], "gpus is 0; it must be 1 or more"),
        (["--pp", "0"], "pp is 0; it must be 1 or more"),
        (["--global-batch", "0"], "global_batch is 0; it must be 1 or more"),
        (["--model", "llama3-71b"], "there is no model named 'llama3-71b'; did you mean"),
        (["--gpu", "h101"], "there is no GPU named 'h101'; did you mean"),
        (["--stack", "h100-megatrn"], "there is no stack named 'h100-megatrn'; did you mean"),
        (["--cluster", "c.toml"], "name the GPU with --gpu, or a file of the cluster"),
        (["--schedule", "seq1f1b"], "seq1f1b divides sequences into slices"),
        (["--schedule", "moe-pair", "-v", "4"], "moe-pair has several queues per rank"),
        (["--recompute-layers", "1,2,3"], "recompute_layers has 3 numbers; it needs 1, or one for"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(capsys, words, sentence):
    status, out, err = _run(capsys, "estimate", *WORDS, *words)
    assert (status, out) == (2, "")
    near = "\nnearest possible: " in err
    assert sentence in err and "Traceback" not in err and len(err.splitlines()) == 1 + near


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
    assert stack_of(load_gpu("h800")).name == "h100-megatron"
    assert stack_of(load_gpu("h100"), "torchtitan").name == "h100-torchtitan"
    assert stack_of(load_gpu("a100"), "torchtitan").name == "a100-megatron"  # there is none
    with pytest.raises(UsageError, match="no stack is the usual one of X; choose one with --stack"):
        stack_of(Gpu("X", 100.0, 40.0, 1.0, 100.0))


def test_a_stack_of_another_maker_is_scaled_by_the_fastest_product_and_asks_to_be_calibrated():
    ours, home, gpu = stack_of(load_gpu("mi300x")), load_stack("h100-megatron"), load_gpu("mi300x")
    assert ours.calibrate_first and not home.calibrate_first
    assert ours.gemm / home.gemm == pytest.approx((668 / 1307) / (794 / 989))
    assert gpu.reached * ours.gemm < gpu.bf16


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


RUNS = """
model = "llama3-70b"
gpu = "h100"
gpus = 64
seq = 8192
tp = 8
micro_batch = 1
global_batch = 64
"""
LAYOUTS = (
    'pp = 4', 'pp = 8', 'pp = 4\nschedule = "interleaved"\nv = 5', 'pp = 4\nschedule = "zb-v"',
    'pp = 2\nrecompute = ["full"]', 'pp = 4\nsplit = [19, 21, 21, 19]',
)  # fmt: skip


def _runs(path, tables, head=RUNS):
    path.write_text(head + "".join(f"[[run]]\n{table}\n" for table in tables))
    return path


def _slower(path, factor):
    """The runs of all layouts as a slower cluster would have measured them."""
    times = [
        predicted(x, load_stack("h100-megatron"))
        for x in load_runs(_runs(path, [f"{table}\nstep_s = 1" for table in LAYOUTS]))
    ]
    return _runs(path, [f"{x}\nstep_s = {factor * t}" for x, t in zip(LAYOUTS, times, strict=True)])


def test_a_run_of_the_file_is_that_of_the_command(tmp_path):
    runs = load_runs(_runs(tmp_path / "r.toml", [f"{x}\nstep_s = 2" for x in LAYOUTS]))
    assert [x.seconds for x in runs] == [2.0] * 6
    assert runs[0].runs == (RUN,) and runs[0].cluster == cluster_of("h100", 64)
    assert (runs[2].runs[0].v, runs[3].runs[0].v) == (5, 2)
    assert runs[4].runs[0].recompute == ("full",) and runs[5].runs[0].split == (19, 21, 21, 19)


def test_calibrate_finds_a_slower_cluster_and_estimate_takes_it(capsys, tmp_path):
    runs, mine = _slower(tmp_path / "runs.toml", 1.25), tmp_path / "mine.toml"
    words = ["calibrate", runs, "--stack", "h100-megatron", "-o", mine, "--json"]
    status, out, _ = _run(capsys, *words)
    data = json.loads(out)
    assert status == 0
    for one in data["runs"]:
        assert one["before_s"] == pytest.approx(one["measured_s"] / 1.25)
        assert one["after_s"] == pytest.approx(
            one["measured_s"], rel=0.04
        )  # from 20 %; the prior holds it back
    (error,) = data["errors"]
    assert (error["experts"], error["rows"]) == (False, 6) and error["worst"] < 0.05
    assert load_stack(str(mine)).name == "mine" and load_stack(str(mine)).fit.own
    step = json.loads(_run(capsys, "estimate", *WORDS, "--stack", mine, "--json")[1])["step_s"]
    assert step == pytest.approx(1.25 * _estimated().step, rel=0.04)


def test_calibrate_prints_the_errors_before_and_after(capsys, tmp_path):
    runs, mine = _slower(tmp_path / "runs.toml", 1.25), tmp_path / "mine.toml"
    lines = _run(capsys, "calibrate", runs, "--stack", "h100-megatron", "-o", mine)[1].splitlines()
    assert lines[0] == "mine: gemm, half, traffic, layer_ms fitted to 6 runs"
    assert lines[1].endswith("h100-megatron as it was: median 20.0 %, worst 20.0 %")
    assert lines[2] == "each run was left out of the fit that predicts it"
    assert lines[-1] == f"written: {mine}; use it with --stack {mine}"


def test_runs_of_models_with_experts_end_calibrate_first(capsys, tmp_path):
    head = 'model = "mixtral-8x7b"\ngpu = "h100"\ngpus = 64\nseq = 4096\nmicro_batch = 1\n'
    tables = [
        f"{x}\nglobal_batch = 256\nstep_s = 9" for x in ("ep = 8", "ep = 8\npp = 2", "ep = 4")
    ]
    runs, mine = _runs(tmp_path / "runs.toml", tables, head), tmp_path / "mine.toml"
    stack = "h100-fp8-megatron"
    out = json.loads(_run(capsys, "calibrate", runs, "--stack", stack, "-o", mine, "--json")[1])
    assert [(x["experts"], x["rows"]) for x in out["errors"]] == [(True, 3)]
    assert "grouped" in out["fitted"]
    words = ["estimate", "--model", "mixtral-8x7b", "--gpu", "h100", "--ep", "8", "--json"]
    assert json.loads(_run(capsys, *words, "--stack", stack)[1])["calibrate_first"]
    assert not json.loads(_run(capsys, *words, "--stack", mine)[1])["calibrate_first"]


def test_one_run_fits_one_number_and_its_error_stays_unknown(capsys, tmp_path):
    runs, mine = _runs(tmp_path / "r.toml", ["pp = 4\nstep_s = 12"]), tmp_path / "mine.toml"
    out = _run(capsys, "calibrate", runs, "--stack", "h100-megatron", "-o", mine)[1]
    assert out.startswith("mine: gemm fitted to 1 run\n")
    assert "that run was not left out of the fit: measure five to know the error" in out
    out = _run(capsys, "estimate", *WORDS, "--stack", mine)[1]
    assert out.startswith("calibrate first")
    assert "mine was fitted on one run: its error is unknown" in out


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("pp = 4", "step_s is missing"),
        ("pp = 4\nstep_s = 0", "step_s is 0; it must be the seconds of one step, above 0"),
        ("pp = 4\nstep_s = inf", "step_s is inf; it must be"),
        ("pp = 4\nstep_s = nan", "step_s is nan; it must be"),
        ("pp = 4\nstep_s = true", "step_s is True; it must be"),
        ('pp = 4\nstep_s = "9"', "step_s is '9'; it must be"),
        ("pp = 4\nstep = 9", "step is not a known key; did you mean step_s"),
        ("pp = 3\nstep_s = 9", "tp cp pp is 24; it must divide the 64 GPUs"),
        ('pp = "4"\nstep_s = 9', "pp is '4'; it must be a whole number"),
        ("pp = 4\nrecompute = 3\nstep_s = 9", "recompute is 3; it must be a list of parts"),
        ('pp = 4\nsplit = ["a"]\nstep_s = 9', "split is ['a']; it must be a list of whole numbers"),
        ("pp = 4\nlighter = [1]\nstep_s = 9", "lighter is [1]; it must be two whole numbers"),
        ("pp = 4\nrecompute_layers = 1.5\nstep_s = 9", "recompute_layers is 1.5; it must be"),
        ("pp = 4\noptions = 3\nstep_s = 9", "options is 3; it must be a table"),
        ("pp = 4\nschedule = 3\nstep_s = 9", "schedule is 3; it must be a name"),
        ('pp = 4\nschedule = "nope"\nstep_s = 9', "there is no schedule 'nope'"),
        ('pp = 4\nschedule = "seq1f1b"\nstep_s = 9', "seq1f1b divides sequences into slices"),
        ("model = 3\nstep_s = 9", "model is 3; it must be a name or a file"),
        ("gpu = 3\nstep_s = 9", "gpu is 3; it must be a name"),
        ("gpus = 1.5\nstep_s = 9", "gpus is 1.5; it must be a whole number"),
    ],
)
def test_a_mistake_in_a_run_names_the_file_and_the_run(capsys, tmp_path, table, sentence):
    path, mine = _runs(tmp_path / "r.toml", ["pp = 4\nstep_s = 9", table]), tmp_path / "mine.toml"
    status, out, err = _run(capsys, "calibrate", path, "--stack", "h100-megatron", "-o", mine)
    assert (status, out) == (2, "") and not mine.exists()
    assert err.startswith(f"hocket: {path}: run 2: ") and sentence in err
    assert "Traceback" not in err and len(err.splitlines()) == 1


def test_a_file_without_runs_is_refused(capsys, tmp_path):
    for text in ("", "run = 3", "run = []", "[run]\npp = 4"):
        (tmp_path / "r.toml").write_text(text)
        words = ["calibrate", tmp_path / "r.toml", "--stack", "h100-megatron", "-o", "m.toml"]
        status, _, err = _run(capsys, *words)
        assert status == 2 and "there is no [[run]]" in err


def test_list_shows_every_entry_of_the_catalogues(capsys):
    status, out, _ = _run(capsys, "list", "--models", "--gpus", "--stacks", "--json")
    data = json.loads(out)
    assert status == 0
    for kind, rows in data.items():
        assert [row["name"] for row in rows] == list(catalogue(kind))
        assert all(row.get("source") or row.get("sources") for row in rows)
    sizes = {row["name"]: row for row in data["models"]}
    assert sizes["llama3-70b"]["parameters"] == pytest.approx(70.55e9, rel=1e-3)
    assert sizes["deepseek-v3"]["parameters"] == pytest.approx(671e9, rel=1e-3)
    for option in ("--models", "--gpus", "--stacks"):
        text = _run(capsys, "list", option)[1]
        assert all(f"\n{name} " in text for name in catalogue(option[2:]))


PLAN = ["plan", "--model", "llama3-8b", "--gpu", "h100", "--gpus", "16", "--seq", "8192",
        "--global-batch", "32"]  # fmt: skip
SMALL = Space(8192, 32, tp=(1, 2, 4), cp=(1, 2), pp=(1, 2, 4), micro_batch=(1, 2), v=(1, 2, 4))


def _each(space):
    """Every configuration of a space that can run, simulated; without any pruning."""
    case = load_model("llama3-8b"), cluster_of("h100", 16), load_stack("h100-megatron")
    for run in runs_of(case[0], case[1], space):
        if not faults(case[0], case[1], run):
            try:
                yield case, estimate(*case, run)
            except UsageError:  # interleaved needs m to be a multiple of p
                continue


def test_the_search_keeps_exactly_what_simulating_everything_keeps():
    simulated = [(case, e) for case, e in _each(SMALL) if e.fits]
    fastest = min(e.step for _, e in simulated)
    kept = {e.run for _, e in simulated if e.step <= 1.03 * fastest}
    found = search(*simulated[0][0], replace(SMALL, uneven=False, partly=False))
    assert {e.run for e in found.best} == kept and len(kept) > 3
    assert found.fastest.step == fastest
    assert sum(found.counts.values()) == len(list(runs_of(*simulated[0][0][:2], SMALL)))


def test_no_simulation_is_faster_than_its_bound():
    ratios = [
        e.step / bound(stages(*case, e.run), case[1], case[2], e.run) for case, e in _each(SMALL)
    ]
    assert len(ratios) > 200 and 1 <= min(ratios) < 1.1


def test_plan_of_a_model_prints_what_to_run_and_estimate_agrees(capsys):
    words = [*PLAN, "--tp", "2,4", "--pp", "2,4", "--cp", "1"]
    status, out, _ = _run(capsys, *words)
    data = json.loads(_run(capsys, *words, "--json")[1])
    first = data["best"][0]
    assert status == 0 and out.startswith("run tp ")
    assert f": {first['options']}\n" in out.splitlines(keepends=True)[0]
    again = ["estimate", *PLAN[1:], *first["options"].split(), "--json"]
    assert json.loads(_run(capsys, *again)[1])["step_s"] == pytest.approx(first["step_s"])
    assert {x["run"]["tp"] for x in data["best"]} <= {2, 4}
    steps = [x["step_s"] for x in data["best"]]
    assert max(steps) <= 1.03 * min(steps)


def test_plan_keeps_to_the_memory_and_says_when_nothing_fits(capsys):
    data = json.loads(_run(capsys, *PLAN, "--tp", "4", "--memory", "40GB", "--json")[1])
    assert all(x["memory_bytes"]["total"] <= 40e9 for x in data["best"])
    status, out, err = _run(capsys, *PLAN, "--tp", "4", "--memory", "3GB")
    assert (status, out) == (1, "")
    assert err.startswith("hocket: no configuration fits: ") and "need more memory" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--costs", "costs.toml"], "a plan for --model has no use for --costs"),
        (["-p", "4"], "a plan for --model has no use for -p"),
        (["--no-search"], "a plan for --model has no use for --no-search"),
        (["--schedule", "zb-h2"], "a search does not try 'zb-h2'; did you mean zb-h1"),
        (["--tp", "1-5000", "--pp", "1-5000"], "configurations to search: 75,000,000 are more"),
        (["--memory", "40GB,40GB"], "it must be one size above 0"),
        (["--margin", "2"], "--margin is 2; it must be from 0 to below 1"),
        (["--cluster", "c.toml"], "name the GPU with --gpu, or a file of the cluster"),
    ],
)
def test_a_mistake_in_a_plan_of_a_model_is_one_sentence(capsys, words, sentence):
    status, out, err = _run(capsys, *PLAN, *words)
    assert (status, out) == (2, "") and sentence in err and len(err.splitlines()) == 1


def test_a_plan_needs_the_model_the_gpus_and_the_batch(capsys):
    for left, name in ((1, "--model"), (5, "--gpus"), (7, "--seq"), (9, "--global-batch")):
        words = PLAN[:left] + PLAN[left + 2 :]
        assert _run(capsys, *words)[2] == f"hocket: a plan of a model on a cluster needs {name}\n"


def test_degrees_of_0_break_a_rule(capsys):
    assert "break a rule" in _run(capsys, *PLAN, "--pp", "0")[2]
    assert "break a rule" in _run(capsys, *PLAN, "--tp", "0", "--micro-batch", "0")[2]


MEGATRON = """--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 128256
--ffn-hidden-size 14336 --group-query-attention --num-query-groups 8 --swiglu """


def test_the_flags_for_megatron_are_read_back_as_the_same_run(capsys):
    words = [*PLAN, "--tp", "2", "--pp", "2,4", "--for", "megatron"]
    status, out, _ = _run(capsys, *words)
    data = json.loads(_run(capsys, *words, "--json")[1])
    assert status == 0 and out.splitlines()[0] == data["flags"]
    _, run = from_megatron(MEGATRON + data["flags"])
    first = data["best"][0]["run"]
    keys = ("seq", "micro_batch", "global_batch", "tp", "cp", "ep", "pp", "v", "schedule", "sp",
            "sharding", "grad_overlap")  # fmt: skip
    assert {k: getattr(run, k) for k in keys} == {k: first[k] for k in keys}
    assert list(run.recompute) == first["recompute"]
    assert run.layers_of(32) == Run(**first).layers_of(32)


def test_for_megatron_chooses_only_what_megatron_has(capsys):
    data = json.loads(_run(capsys, *PLAN, "--for", "megatron", "--margin", "0.3", "--json")[1])
    runs = [x["run"] for x in data["best"]]
    assert len(runs) > 10 and {x["schedule"] for x in runs} == {"1f1b", "interleaved"}
    assert any(x["pp"] > 1 and (32 + sum(x["lighter"])) % (x["pp"] * x["v"]) for x in runs)
    assert {tuple(x["recompute"]) for x in runs} <= {(), ("full",)}
    err = _run(capsys, *PLAN, "--for", "megatron", "--schedule", "zb-v")[2]
    assert err == "hocket: megatron does not have 'zb-v'; choose from 1f1b, interleaved\n"


def _found(run, gpus, model="mixtral-8x7b"):
    case = (load_model(model), cluster_of("h100", gpus), load_stack("h100-megatron"))
    return estimate(*case, run)


def test_every_flag_for_megatron_appears_where_its_setting_does():
    run = Run(4096, 2, 64, 2, 2, 8, 1, 4, 4, "interleaved", recompute=("full",))
    words = (
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --expert-model-parallel-size 8 "
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 4 "
        "--micro-batch-size 2 --global-batch-size 64 --seq-length 4096 "
        "--use-distributed-optimizer --overlap-grad-reduce --recompute-granularity full "
    )
    assert (
        megatron(_found(run, 64)) == words + "--recompute-method uniform --recompute-num-layers 1"
    )
    some = megatron(_found(replace(run, recompute_layers=1), 64))
    assert some == words + "--recompute-method block --recompute-num-layers 1"
    plain = Run(4096, 2, 64, sharding=0, grad_overlap=False)
    text = "--micro-batch-size 2 --global-batch-size 64 --seq-length 4096"
    assert megatron(_found(plain, 8, "llama3-8b")) == text


def test_stages_of_unlike_size_become_a_layout_for_megatron():
    run = Run(4096, 1, 64, pp=4, v=2, schedule="interleaved")
    even = megatron(_found(run, 4, "llama3-8b"))
    assert "--num-virtual-stages-per-pipeline-rank 2" in even and "layout" not in even
    text = megatron(_found(replace(run, lighter=(0, 2)), 4, "llama3-8b"))
    assert '--pipeline-model-parallel-layout "Et*5|t*5|(t*4|)*5ttL"' in text
    _, again = from_megatron(MEGATRON + text)
    assert again.split == replace(run, lighter=(0, 2)).layers_of(32) and again.v == 2
    ends = _found(replace(run, pp=2, v=1, schedule="1f1b", lighter=(1, 1)), 4, "llama3-8b")
    assert "--account-for-embedding-in-pipeline-split --account-for-loss" in megatron(ends)
