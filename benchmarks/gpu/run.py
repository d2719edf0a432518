"""What to run where one GPU is at hand. Untested: written without one.

    python benchmarks/gpu/run.py            a minute; one JSON object, with the card's name

Several ranks share the GPU over gloo with CUDA tensors (copied through the CPU). Checked: losses
and gradients equal those of the unpipelined model. Measured: the step predicted from its own
actions against the measured one, the split backward's time (I + W against B) and the memory that a
stage holds after F and after I.
"""

from __future__ import annotations

import json
from statistics import median
from time import perf_counter
from typing import Any

import hocket
from hocket.train.launch import launch

P, M, STEPS = 4, 8, 8
MODEL = {"layers": 8, "width": 512, "heads": 8, "seq": 256}


def on_rank(name: str) -> dict[str, Any] | None:
    """Trains under one schedule; the launcher's group is gloo, the tensors are on the GPU."""
    import torch

    from hocket.demo import gpt
    from hocket.runtime import Pipeline
    from hocket.train.profile import own_costs, typical
    from hocket.train.report import comparison, flat, one_by_one

    rank, device = torch.distributed.get_rank(), torch.device("cuda", 0)
    schedule = hocket.build(name, p=P, m=M)
    n = schedule.placement.n_stages
    stages = {
        s: gpt.build(s, n, **MODEL).to(device) for s in schedule.placement.stages_of_rank[rank]
    }
    pipeline = Pipeline(schedule, stages, gpt.loss, device=device, verify=True)
    timelines, losses = [], []
    for step in range(STEPS):
        losses.append(float(pipeline.step(*gpt.batch(step, 2 * M, seq=MODEL["seq"]))))
        timelines.append(flat(pipeline.gather_timeline()))
        for stage in stages.values():
            stage.zero_grad()
    if rank:
        return None
    seen = typical(timelines[2:])
    predicted = hocket.simulate(one_by_one(schedule), own_costs(timelines[2:], seen))
    return {"schedule": name, "losses": losses, **comparison(predicted, seen)}


def split_backward() -> dict[str, Any]:
    """Times and bytes of B against I and W on a stage of transformer blocks."""
    import torch

    from hocket.demo import gpt
    from hocket.runtime import split

    device = torch.device("cuda", 0)
    module = gpt.build(1, 3, layers=12, width=1024, heads=16, seq=512).to(device)
    x = torch.randn(4, 512, 1024, device=device, requires_grad=True)
    out: dict[str, Any] = {"card": torch.cuda.get_device_name(device), "torch": torch.__version__}
    with split.prepare(module) as plan:
        times: dict[str, list[float]] = {"F": [], "B": [], "I": [], "W": []}
        for turn in range(12):
            for whole in (True, False):
                torch.cuda.synchronize()
                clocks = [perf_counter()]
                before = torch.cuda.memory_allocated()
                y = module(x)
                _tick(clocks)
                after_f = torch.cuda.memory_allocated() - before
                gradient = torch.ones_like(y)
                if whole:
                    y.backward(gradient)
                    _tick(clocks)
                    kinds = ("F", "B")
                else:
                    with plan.input_backward() as pending:
                        y.backward(gradient)
                    _tick(clocks)
                    out |= {"bytes_after_F": after_f, "bytes_held_for_W": pending.nbytes}
                    pending.run()
                    _tick(clocks)
                    kinds = ("F", "I", "W")
                if turn >= 2:
                    for kind, a, b in zip(kinds, clocks, clocks[1:], strict=False):
                        times[kind].append((b - a) * 1e3)
                module.zero_grad()
                x.grad = None
    out |= {f"{kind}_ms": median(values) for kind, values in times.items()}
    out["I_plus_W_to_B"] = (out["I_ms"] + out["W_ms"]) / out["B_ms"]
    return out


def _tick(clocks: list[float]) -> None:
    import torch

    torch.cuda.synchronize()
    clocks.append(perf_counter())


def on_gpu_rank(name: str) -> dict[str, Any] | None:
    """`on_rank` after this process has chosen the one GPU."""
    import torch

    torch.cuda.set_device(0)
    return on_rank(name)


def main() -> None:
    # The ranks are forked from a server that has not touched the driver, so each may use the GPU.
    found: dict[str, Any] = {"split": launch(split_backward, 1)[0], "runs": []}
    for name in ("1f1b", "zb-h1", "dualpipev", "chimera"):
        found["runs"].append(launch(on_gpu_rank, P, (name,))[0])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
