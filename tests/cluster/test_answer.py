"""The answer of a search: why others lost, what is near, what helps, other frameworks."""

import json
import subprocess
import sys
import tomllib
from dataclasses import asdict, replace
from xml.etree import ElementTree

import pytest

from hocket import check, loads
from hocket.cli import main
from hocket.cluster import Run, cluster_of, estimate, faults, load_model, load_stack, stack_of
from hocket.cluster.chart import chart
from hocket.cluster.readers import from_torchtitan
from hocket.cluster.reasons import PARTS, estimate_words, helps, nearest, reason
from hocket.cluster.search import Fate, Space, outcomes_of, search
from hocket.cluster.targets import TARGETS
from hocket.render.svg import as_svg

MODEL, CLUSTER, STACK = load_model("llama3-8b"), cluster_of("h100", 32), load_stack("h100-megatron")
CASE = (MODEL, CLUSTER, STACK)
SPACE = Space(8192, 64, tp=(1, 2, 3), cp=(1,), pp=(2, 4), micro_batch=(1, 2))
PLAN = ["plan", "--model", "llama3-8b", "--gpu", "h100", "--gpus", "32", "--seq", "8192",
        "--global-batch", "64"]  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return search(*CASE, SPACE)


def _run(capsys, *words):
    status = main([str(w) for w in words])
    out = capsys.readouterr()
    return status, out.out, out.err


# --- why -----------------------------------------------------------------------------------------


def test_every_configuration_has_a_fate_and_its_reason(found):
    fates = {x.fate for x in found.outcomes}
    assert fates == set(Fate) - {Fate.STATES}
    assert len({x.run for x in found.outcomes}) > 150
    for x in found.outcomes:
        text = reason(x, found)
        if x.fate is Fate.RULE:
            assert text == "; ".join(f.text for f in faults(MODEL, CLUSTER, x.run)) != ""
        elif x.fate is Fate.MEMORY:
            over = estimate(*CASE, x.run)
            assert over.memory[over.fullest].total == x.n_bytes > CLUSTER.memory
            assert " more than the limit" in text
        elif x.fate is Fate.BOUND:
            assert x.seconds <= estimate(*CASE, x.run).step and "at least" in text
        else:
            assert " slower: " in text or text == "is the fastest"


def test_the_reason_of_a_slower_one_names_the_part_that_grew_most(found):
    fastest = found.fastest
    one = next(x for x in found.outcomes if x.fate is Fate.SLOWER)
    grown = {k: v - getattr(fastest.breakdown, k) for k, v in asdict(one.parts).items()}
    text = reason(one, found)
    share = one.seconds / fastest.step - 1
    assert text.startswith(f"is {100 * share:.1f} % slower: ")
    assert f" more {PARTS[max(grown, key=grown.get)]}" in text.split(" and ")[0]


def test_a_question_is_about_exactly_what_it_names_and_all_that_fit_are_simulated(capsys):
    words = [*PLAN, "--why", "tp=4,pp=8,micro-batch=1"]
    data = json.loads(_run(capsys, *words, "--json")[1])
    assert len(data["why"]) > 10
    assert all(x["options"].startswith("--tp 4") and "--pp 8" in x["options"] for x in data["why"])
    assert "bound" not in {x["fate"] for x in data["why"]}
    steps = [x["step_s"] for x in data["why"] if x["fate"] in ("kept", "slower")]
    assert steps == sorted(steps) and steps[0] > data["best"][0]["step_s"] / 1.03
    lines = _run(capsys, *words)[1].splitlines()
    assert any(x.startswith("why not tp=4, pp=8, micro-batch=1: of ") for x in lines)
    first = next(x for x in lines if x.startswith("tp 4, ") and " slower: " in x)
    assert data["why"][0]["reason"] in first


def test_a_question_about_what_is_never_tried_names_the_rule(capsys):
    out = _run(capsys, *PLAN, "--why", "tp=3,pp=4")[1]
    assert "tp is 3; it must divide the 32 heads" in out
    assert ", 0 fit and were simulated" in out
    status, _, err = _run(capsys, *PLAN, "--why", "stages=3")
    assert (status, err.startswith("hocket: --why: stages is not what --why asks about")) == (
        2,
        True,
    )


def test_json_has_every_configuration(capsys):
    data = json.loads(_run(capsys, *PLAN, "--tp", "1,2", "--pp", "2", "--json")[1])
    assert len(data["configurations"]) == sum(data["counts"].values()) > 100
    assert all(x["reason"] and x["options"] for x in data["configurations"])
    assert data["best"][0]["plus_minus"]["step_s"] == pytest.approx(
        STACK.fit.median * data["best"][0]["step_s"]
    )
    assert [x["tokens_per_s_gain"] for x in data["would_help"]] == sorted(
        (x["tokens_per_s_gain"] for x in data["would_help"]), reverse=True
    )


# --- what is near --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"tp": 7}, {"pp": 5}, {"global_batch": 63}, {"tp": 3, "pp": 7}, {"v": 9}, {"ep": 4},
     {"cp": 3}, {"pp": 0}, {"micro_batch": 5}, {"pp": 10**9}],
)  # fmt: skip
def test_what_is_near_an_impossible_configuration_is_possible_and_differs_only_where_it_says(
    change,
):
    run = replace(Run(8192, 1, 64, tp=2, pp=4, sp=True, schedule="interleaved", v=2), **change)
    assert faults(MODEL, CLUSTER, run)
    found = nearest(MODEL, CLUSTER, run)
    assert 1 <= len(found) <= 3
    for near in found:
        assert not faults(MODEL, replace(CLUSTER, gpus=near.gpus), near.run)
        changed = {k for k, v in asdict(near.run).items() if v != asdict(run)[k]}
        assert changed | ({"gpus"} if near.gpus != 32 else set()) == set(near.changes) != set()


def test_a_number_of_gpus_that_nothing_divides_names_batches_that_suit_it(capsys):
    words = [*PLAN[:5], "--gpus", "20", "--seq", "8192", "--global-batch", "64"]
    status, _, err = _run(capsys, *words, "--tp", "1", "--pp", "1", "--cp", "1")
    assert status == 1 and "nearest possible: --global-batch 60; " in err
    ok = [*words[:-1], "60", "--pp", "1", "--cp", "1", "--tp", "1"]
    assert _run(capsys, *ok)[0] == 0


def test_nothing_fits_names_the_smallest_and_what_it_lacks(capsys):
    status, _, err = _run(capsys, *PLAN, "--memory", "3GB")
    assert status == 1 and "the smallest, --" in err
    assert "more than the limit; try more --gpus or a larger --memory" in err


# --- what would help -----------------------------------------------------------------------------


def test_what_would_help_is_what_simulating_it_gains():
    base = estimate(*CASE, Run(8192, 1, 64, tp=2, pp=4, sp=True))
    gains = {x.text: x.gain for x in helps(base)}
    v = estimate(*CASE, replace(base.run, schedule="zb-v", v=2))
    assert gains["--schedule zb-v"] == pytest.approx(
        v.tokens_per_second / base.tokens_per_second - 1
    )
    assert list(gains.values()) == sorted(gains.values(), reverse=True)
    assert min(gains.values()) > 0 and "recompute nothing" not in gains
    again = estimate(*CASE, replace(base.run, recompute=("full",)))
    assert {x.text: x.gain for x in helps(again)}["recompute nothing"] > 0.2


def test_where_it_does_not_fit_only_changes_that_fit_are_named(capsys):
    small = replace(CLUSTER, memory_gb=40)
    base = estimate(MODEL, small, STACK, Run(8192, 2, 64, pp=4))
    assert not base.fits
    found = {x.text for x in helps(base)}
    assert "--recompute full" in found and "twice the --global-batch" not in found
    words = ["estimate", *PLAN[1:], "--pp", "4", "--micro-batch", "2", "--memory", "40GB"]
    out = _run(capsys, *words)[1]
    assert "\nwould fit with: " in out and "\nlimited by memory: rank 0 needs " in out


# --- the refined search --------------------------------------------------------------------------


def test_part_of_the_layers_recompute_where_that_is_all_it_takes():
    tight = replace(CLUSTER, memory_gb=42)
    space = Space(8192, 64, tp=(1,), cp=(1,), pp=(4,), micro_batch=(1,), schedule=("1f1b",),
                  recompute=((), ("full",)), uneven=False)  # fmt: skip
    found = search(MODEL, tight, STACK, space, margin=1.0)
    runs = {x.run.recompute_layers: x for x in found.outcomes if x.run.recompute == ("full",)}
    even = next(n for n in runs if isinstance(n, int))
    by_stage = next(n for n in runs if isinstance(n, tuple))
    assert runs[even].fate is runs[by_stage].fate is Fate.KEPT
    assert list(by_stage) == sorted(by_stage, reverse=True) and max(by_stage) == even < 8
    fewer = estimate(MODEL, tight, STACK, replace(runs[even].run, recompute_layers=even - 1))
    assert not fewer.fits
    assert runs[by_stage].seconds <= runs[even].seconds < runs[None].seconds
    options = estimate_words(runs[by_stage].run)
    assert f"--recompute-layers {','.join(map(str, by_stage))}" in options


def test_lighter_ends_are_tried_where_they_are_faster():
    space = Space(8192, 64, tp=(2,), cp=(1,), pp=(4,), micro_batch=(1,), schedule=("zb-h1",))
    found = search(*CASE, space)
    even = search(*CASE, replace(space, uneven=False))
    assert found.fastest.run.lighter != (0, 0) == even.fastest.run.lighter
    assert found.fastest.step < even.fastest.step


# --- other frameworks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "gpus"),
    [({}, 16), ({"schedule": "interleaved", "v": 2}, 32), ({"schedule": "zb-v", "v": 2}, 32),
     ({"tp": 2, "sp": True, "recompute": ("full",)}, 32), ({"pp": 1}, 16)],
)  # fmt: skip
def test_torchtitan_reads_back_the_same_run(change, gpus, tmp_path):
    run = Run(8192, 1, 64, pp=4, sharding=3, **{k: v for k, v in change.items() if k != "pp"})
    run = replace(run, **change)
    one = estimate(MODEL, cluster_of("h100", gpus), STACK, run)
    path = tmp_path / "train.toml"
    path.write_text(TARGETS["torchtitan"].text(one))
    model, again = from_torchtitan(path, gpus)
    keys = ("seq", "global_batch", "tp", "cp", "pp", "v", "schedule", "sharding", "recompute")
    assert model == MODEL and {k: getattr(again, k) for k in keys} == {
        k: getattr(run, k) for k in keys
    }
    titan = tomllib.loads(path.read_text())["parallelism"]
    assert ("pipeline_parallel_schedule_csv" in titan) is False


def test_torchtitan_gets_a_csv_for_an_order_that_it_has_no_name_for(tmp_path, capsys):
    run = Run(8192, 1, 64, pp=4, schedule="zb-h1", sharding=3, lighter=(0, 2))
    text = TARGETS["torchtitan"].text(estimate(*CASE, run))
    titan = tomllib.loads(text)["parallelism"]
    assert titan["pipeline_parallel_schedule"] == "1F1B"
    assert titan["pipeline_parallel_last_stage_less_layers"] == 2
    command = next(x for x in text.splitlines() if x.startswith("# hocket "))[2:].split()
    path = tmp_path / titan["pipeline_parallel_schedule_csv"]
    assert _run(capsys, *command[1:-1], path)[0] == 0 and path.read_text().startswith("0F0")


def test_torchtitan_gets_layers_by_name_where_numbers_would_give_another_partition():
    run = Run(8192, 1, 64, pp=4, v=5, schedule="interleaved", sharding=3)
    titan = tomllib.loads(TARGETS["torchtitan"].text(estimate(*CASE, run)))["parallelism"]
    assert "pipeline_parallel_layers_per_stage" not in titan
    parts = titan["module_fqns_per_model_part"]
    assert [sum(x.startswith("layers.") for x in p) for p in parts] == list(run.layers_of(32))
    assert parts[0][0] == "tok_embeddings" and parts[-1][-2:] == ["norm", "output"]


def test_for_torchtitan_never_recomputes_where_the_backward_is_split(capsys):
    words = [*PLAN, "--for", "torchtitan", "--pp", "4", "--margin", "0.5", "--json"]
    data = json.loads(_run(capsys, *words)[1])
    runs = [x["run"] for x in data["best"]]
    assert data["best"][0]["stack"] == "h100-torchtitan" and {x["sharding"] for x in runs} == {3}
    assert {x["schedule"] for x in runs} >= {"1f1b", "zb-v"}
    assert all(not x["recompute"] for x in runs if x["schedule"].startswith("zb"))


def test_for_hocket_only_pipelines_and_replicas_are_chosen(capsys):
    data = json.loads(_run(capsys, *PLAN, "--for", "hocket", "--json")[1])
    assert {(x["run"]["tp"], x["run"]["cp"], x["run"]["sharding"]) for x in data["best"]} == {
        (1, 1, 0)
    }
    compile(data["flags"], "train.py", "exec")
    status, _, err = _run(capsys, *PLAN, "--for", "hocket", "--tp", "2")
    assert (status, err) == (2, "hocket: hocket has no --tp; leave it out\n")


@pytest.mark.runtime
def test_the_script_for_hocket_trains(tmp_path):
    (tmp_path / "tiny.toml").write_text(
        'name = "tiny"\nlayers = 5\nhidden = 32\nheads = 4\nffn = 64\nvocab = 64\n'
    )
    model = load_model(str(tmp_path / "tiny.toml"))
    run = Run(16, 1, 8, pp=2, schedule="zb-h1", sharding=0, recompute=("full",),
              recompute_layers=(2, 0))  # fmt: skip
    one = estimate(model, cluster_of("h100", 4), STACK, run)
    (tmp_path / "train.py").write_text(TARGETS["hocket"].text(one))
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "train.py"]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    losses = [float(x.split()[1]) for x in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(losses) == 10 and 3.5 < min(losses) <= max(losses) < 6


# --- the order, the picture ----------------------------------------------------------------------


def test_the_order_is_planned_in_the_memory_that_is_left(capsys, tmp_path):
    path = tmp_path / "best.sched"
    words = [
        *PLAN,
        "--tp",
        "1",
        "--pp",
        "4",
        "--cp",
        "1",
        "--micro-batch",
        "1",
        "--schedule",
        "1f1b",
    ]
    plain = json.loads(_run(capsys, *words, "--json")[1])["best"][0]
    status, out, _ = _run(capsys, *words, "--order", "4", "-o", path, "--json")
    best = json.loads(out)["best"][0]
    assert status == 0 and best["step_s"] < plain["step_s"] and best["fits"]
    assert best["planned"] == str(path)
    schedule = loads(path.read_text())
    assert check(schedule).ok and schedule.p == 4
    err = _run(capsys, *words, "--for", "megatron", "--order", "4")[2]
    assert err == "hocket: megatron runs no order but those it has; leave out --order\n"


def test_the_picture_has_a_bar_for_each_part_and_a_point_for_each_simulation(found):
    figure = chart(found)
    root = ElementTree.fromstring(as_svg(figure))
    texts = [x.text for x in root.iter() if x.tag.endswith("text")]
    assert "limit 80 GB" in texts and "rank 0" in texts
    dots = [x for x in root.iter() if x.tag.endswith("circle")]
    near = [x for x in found.outcomes if x.parts and x.seconds < 3 * found.fastest.step]
    assert len(dots) == len(near) > 50


def test_a_picture_is_written_beside_the_answer(capsys, tmp_path):
    for name, start in (("a.svg", b"<svg"), ("a.pdf", b"%PDF")):
        words = [*PLAN, "--tp", "2", "--pp", "2", "-o", tmp_path / name]
        assert _run(capsys, *words)[1].endswith(f"written: {tmp_path / name}\n")
        assert (tmp_path / name).read_bytes().startswith(start)
    err = _run(capsys, *PLAN, "-o", tmp_path / "a.txt")[2]
    assert "without --for it must end in .sched, .svg or .pdf" in err


def test_the_stack_of_a_gpu_without_measurements_is_named_in_a_note():
    gpu = cluster_of("h800", 32)
    one = estimate(MODEL, gpu, stack_of(gpu.gpu), Run(8192, 1, 64, tp=2, pp=4, sp=True))
    assert one.notes == ("the stack was fitted on h100, not on H800",)


def test_outcomes_of_a_space_are_the_fastest_first():
    found = outcomes_of(*CASE, replace(SPACE, tp=(2,), pp=(2,)))
    steps = [x.seconds for x in found if x.fate in (Fate.KEPT, Fate.SLOWER)]
    assert steps == sorted(steps) and len(steps) > 20
