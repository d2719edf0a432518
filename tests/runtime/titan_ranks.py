"""Trains torchtitan's debug model on four local ranks, in one launch for many cases.

Importing torchtitan takes seconds, so one process imports it and forks the ranks.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

SIZE, MICROBATCHES, LAYERS = 4, 8, 6
EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan"


class Case(NamedTuple):
    """One run. order: hocket's, None for torchtitan's own of the name `own`.

    load: the number of an earlier case whose checkpoint of step 2 this one continues.
    change: settings of torchtitan, as "section.name" and value. replicas: ranks per pipeline rank.
    """

    p: int
    order: Any = None
    v: int | None = None
    own: str = "1F1B"
    load: int | None = None
    change: tuple[tuple[str, Any], ...] = ()
    replicas: int = 1


class Outcome(NamedTuple):
    """By step: loss and norm of the gradients; validated: losses. refused: the error instead."""

    steps: dict[int, tuple[float, float]]
    validated: dict[int, float]
    restored: bool
    refused: str = ""


def on_four_ranks(cases: list[Case], seconds: float = 900) -> list[list[Outcome]]:
    """The outcomes, by case and rank."""
    with tempfile.TemporaryDirectory(prefix="hocket-titan-") as folder:
        jobs = [(tuple(case), _free_port()) for case in cases]
        Path(folder, "jobs").write_bytes(pickle.dumps(jobs))
        done = subprocess.run(
            [sys.executable, __file__, folder],
            capture_output=True, text=True, timeout=seconds, check=False, cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-20000:]
        ranks = [pickle.loads(Path(folder, f"rank{r}").read_bytes()) for r in range(SIZE)]
        return [
            [Outcome(*rank[i]) for rank in ranks if rank[i] is not None] for i in range(len(cases))
        ]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def serve(folder: str) -> int:
    """Forks the ranks, once torchtitan is imported; 0 when all of them ended well."""
    sys.path.insert(0, str(EXAMPLE))
    import cpu
    import run
    import torch

    torch.set_num_threads(1)
    run.assets(Path(folder))
    cpu.stand_in_device()
    cpu.stand_in_torch()
    cpu.stand_in_attention()
    import torchtitan.models.llama3.config_registry
    import torchtitan.trainer

    import hocket.torchtitan  # noqa: F401

    torchtitan.trainer.time = SimpleNamespace(  # it sleeps 2 s at the end
        perf_counter=time.perf_counter, sleep=lambda seconds: None
    )
    children = [_fork(rank, folder) for rank in range(SIZE)]
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def _fork(rank: int, folder: str) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        jobs = pickle.loads(Path(folder, "jobs").read_bytes())
        outcomes = [_outcome(i, Case(*case), port, rank) for i, (case, port) in enumerate(jobs)]
        Path(folder, f"rank{rank}").write_bytes(pickle.dumps(outcomes))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _outcome(number: int, case: Case, port: int, rank: int) -> Any:
    """What a case showed on a rank, as a tuple; None where it has no part in it."""
    from torch import distributed
    from torchtitan.distributed import pipeline_parallel
    from torchtitan.trainer import Trainer

    import hocket.torchtitan
    from hocket.errors import HocketError

    if rank >= case.p * case.replicas:
        return None
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(case.p * case.replicas),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip

    def own() -> list[Any]:
        return [Trainer.__init__, *vars(pipeline_parallel).values()]

    before, installed, refused = own(), None, ""
    steps: dict[int, tuple[float, float]] = {}
    validated: dict[int, float] = {}
    try:
        if case.order is not None:
            installed = hocket.torchtitan.use(case.order, v=case.v)
            assert len(installed.replaced) == 4
            try:
                hocket.torchtitan.use(case.order, v=case.v)
            except HocketError as error:
                assert "restore() it first" in str(error)
            else:
                raise AssertionError("a second order was installed")
        trainer = _config(number, case).build()
        seen = trainer.metrics_processor
        seen.log = lambda step, loss, _, norm, **more: steps.update({step: (loss, norm)})
        seen.log_validation = lambda loss, step, *more: validated.update({step: loss})
        trainer.train()
        trainer.close()
    except HocketError as error:
        refused = str(error)
    finally:
        if installed is not None:
            installed.restore()
        if distributed.is_initialized():
            distributed.destroy_process_group()
    return steps, validated, before == own(), refused


def _config(number: int, case: Case) -> Any:
    """The debug model, small, with its default checkpointing of activations."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    settings = {
        "training.seq_len": 16, "training.local_batch_size": MICROBATCHES, "training.steps": 3,
        "training.max_norm": 0.5, "training.disable_cuda_graphs": True, "debug.seed": 7,
        "dump_folder": f"out{number}", "checkpoint.enable": True, "checkpoint.interval": 2,
        "checkpoint.last_save_model_only": False,
        "parallelism.pipeline_parallel_degree": case.p,
        "parallelism.pipeline_parallel_microbatch_size": 1,
        "parallelism.pipeline_parallel_schedule": case.own,
        "validator.enable": True, "validator.freq": 3, "validator.steps": 1,
        "validator.dataloader.dataset": "c4_test",
    } | dict(case.change)  # fmt: skip
    if case.load is not None:
        settings["checkpoint.initial_load_path"] = os.path.abspath(
            f"out{case.load}/checkpoint/step-2"
        )
        settings["checkpoint.initial_load_model_only"] = False
        settings["checkpoint.load_only"] = True
    for name, value in settings.items():
        *sections, last = name.split(".")
        at = config
        for section in sections:
            at = getattr(at, section)
        setattr(at, last, value)
    return config


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
