"""Plans an order with hocket and trains torchtitan's debug model with it on two CPU ranks.

    pip install hocket torchtitan==0.3.0 triton      # torch 2.13 or newer is there
    python examples/torchtitan/run.py interleaved --folder /tmp/titan

The named schedule is exported as a CSV and started under the name that makes torchtitan place its
stages as the order has them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from hocket import build
from hocket.interop.torch.csv import titan_name, torch_order

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def main() -> int:
    """Returns the exit status of the training."""
    args = arguments()
    size = {"v": args.v} if args.v else {}
    order = torch_order(build(args.schedule, p=args.p, m=args.m, **size))
    name = titan_name(order.schedule)
    for note in order.notes:
        print(f"note: {note}")
    if name is None:
        print("torchtitan cannot place the stages of this order", file=sys.stderr)
        return 1
    if order.schedule.has_split_backward:
        print("note: switch activation checkpointing off for orders with I and W")
    folder = Path(args.folder)
    assets(folder)
    (folder / "order.csv").write_text(order.text)
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={args.p}",
            "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0",
            "--role=rank", "--tee=3", str(Path(__file__).parent.resolve() / "cpu.py"),
            "--module=llama3", "--config=llama3_debugmodel",
            "--training.seq_len=64", f"--training.local_batch_size={args.m}",
            f"--training.steps={args.steps}", "--training.disable_cuda_graphs",
            "--metrics.log_freq=1", "--debug.seed=7", "--dump_folder=out",
            f"--parallelism.pipeline_parallel_degree={args.p}",
            "--parallelism.pipeline_parallel_microbatch_size=1",
            f"--parallelism.pipeline_parallel_schedule={name}",
            *([] if args.own else ["--parallelism.pipeline_parallel_schedule_csv=order.csv"]),
            *args.more,
        ],
        cwd=folder, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"},
    ).returncode  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedule", help="a name from `hocket list`")
    parser.add_argument("-p", type=int, default=2, help="pipeline ranks")
    parser.add_argument("-m", type=int, default=4, help="microbatches")
    parser.add_argument("-v", type=int, help="stages per rank")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", default="titan", help="where everything is written")
    parser.add_argument("--own", action="store_true", help="torchtitan's own order of that name")
    parser.epilog = "further options of torchtitan come after --"
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    return parser.parse_args(sys.argv[1:at], argparse.Namespace(more=sys.argv[at + 1 :]))


def assets(folder: Path) -> None:
    """A tokenizer of a few words and a data set of random sentences, where torchtitan looks."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens, data = (folder / "tests" / "assets" / x for x in ("tokenizer", "c4_test"))
    for path in (tokens, data):
        path.mkdir(parents=True, exist_ok=True)
    known = ["<unk>", "<|begin_of_text|>", "<|end_of_text|>", *WORDS]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(known[:3])
    tokenizer.save(str(tokens / "tokenizer.json"))
    special = {"bos_token": known[1], "eos_token": known[2]}
    (tokens / "tokenizer_config.json").write_text(json.dumps(special))
    lines = [
        json.dumps({"text": " ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 90))})
        for i in range(1, 400)
    ]
    (data / "data.json").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
