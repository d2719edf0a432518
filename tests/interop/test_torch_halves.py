"""What torch's own I and W lose, as docs/torch.md says."""

import importlib.util
import re
from pathlib import Path

import pytest

import hocket
from hocket.interop.torch.check import check_torch
from hocket.interop.torch.csv import torch_order
from hocket.interop.torch.text import read_rows

HALVES = Path(__file__).parents[2] / "examples" / "torchtitan" / "halves.py"


def test_torch_loses_the_gradient_of_a_weight_that_was_resharded_before_I(capsys):
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("halves", HALVES)
    halves = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(halves)
    halves.main()
    rows = re.findall(r"reshards=(\w+) (\S+): (\S+) of", capsys.readouterr().out)
    assert len(rows) == 10
    missing = {(reshards, name): float(part) for reshards, name, part in rows}
    assert missing.pop(("True", "norm.weight")) == 1.0
    assert set(missing.values()) == {0.0}


@pytest.mark.parametrize(("name", "split"), [("zb-v", True), ("hanayo", False), ("1f1b", False)])
def test_an_order_with_I_and_W_in_its_last_stage_is_noted(name, split):
    notes = check_torch(read_rows(torch_order(hocket.build(name, p=2, m=4)).text)).notes
    assert any("has I and W: torch drops the gradients" in note for note in notes) is split
