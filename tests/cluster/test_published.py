"""A selection of published runs (each row names its source) against the predictions."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROWS = HERE / "data" / "published.jsonl"
SCRIPT = HERE.parents[1] / "benchmarks" / "published.py"


@pytest.fixture(scope="module")
def result():
    spec = importlib.util.spec_from_file_location("published", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["published"] = module
    spec.loader.exec_module(module)
    return module.report([json.loads(line) for line in ROWS.read_text().splitlines()], each=True)


def test_flops_are_those_that_megatron_bridge_nemo_and_automodel_report(result):
    for group in ("megatron_bridge", "nemo_2407", "nemo_automodel_h100"):
        assert result["groups"][group]["flops"]["worst"] < 0.01


def test_memory_of_b200_runs_is_within_two_percent_experts_and_long_sequences_included(result):
    assert result["groups"]["simumax_b200"]["memory"]["rows"] == 5
    assert result["groups"]["simumax_b200"]["memory"]["worst"] < 0.02


def test_memory_of_zero_bubble_runs(result):
    assert result["groups"]["zb_table4"]["memory"]["worst"] < 0.06


def test_step_times_of_dense_runs(result):
    groups = (
        "sc21_table1",
        "sc21_table2",
        "korthikanti_table5",
        "mcore_readme_h100",
        "nemo_2407",
        "vtrain_multi",
    )
    assert max(result["groups"][g]["worst"] for g in groups) < 0.12


def test_phases_of_a_stage(result):
    stage = result["groups"]["zb_table6_stage"]
    assert max(stage[phase]["worst"] for phase in ("F", "I", "W")) < 0.1


def test_four_schedules_are_ranked_as_measured(result):
    assert result["ranking"]["pairs"] == result["ranking"]["right"] == 6


def test_a_row_that_cannot_be_predicted_is_counted_with_its_reason(result):
    assert result["groups"]["moe_zoo_mixtral"] == {
        "rows": 0,
        "skipped": {"the layout is not printed": 1},
    }


def test_the_command_prints_one_json_object(tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text(ROWS.read_text().splitlines()[0])
    done = subprocess.run(
        [sys.executable, SCRIPT, few, "--json"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)["groups"]["sc21_table1"]
    assert {"rows", "median", "p90", "worst"} <= set(found)
