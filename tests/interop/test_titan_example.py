"""The example that trains torchtitan's debug model: its command line."""

import importlib.util
import sys
from pathlib import Path

RUN = Path(__file__).parents[2] / "examples" / "torchtitan" / "run.py"


def test_options_after_two_dashes_reach_torchtitan(monkeypatch):
    spec = importlib.util.spec_from_file_location("titan_run", RUN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    words = ["zb-v", "--own", "--folder", "X", "--", "--opt", "--more=1"]
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    args = module.arguments()
    assert (args.schedule, args.own, args.folder) == ("zb-v", True, "X")
    assert args.more == ["--opt", "--more=1"]
    monkeypatch.setattr(sys, "argv", ["run.py", "zb-v"])
    assert module.arguments().more == []
