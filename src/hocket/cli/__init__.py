"""The command line: a table of verbs. Each is a module with its options and its function.

Only the module of the verb that runs is imported; heavy ones are imported inside its function.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any

from hocket import __version__
from hocket.cli import output
from hocket.cli.arguments import Parser, Verb
from hocket.errors import CostError, HocketError, TextError, UsageError
from hocket.words import hint

# The module of each verb, and what it does.
VERBS = {
    "list": (
        "list_",
        "Every schedule, what it needs, its weights and source; or models, GPUs, stacks.",
    ),
    "show": ("show", "Draw a schedule, or print its text."),
    "check": ("check", "Find every fault of a schedule before it runs."),
    "simulate": ("simulate", "Predict time, bubble, memory and critical path."),
    "compare": ("compare", "Every schedule that fits, in one table."),
    "plan": ("plan", "The best schedule for these costs under a limit."),
    "explain": ("explain", "Where the bubble is, why, what would help."),
    "diagnose": ("diagnose", "Why the steps of a run are slow, or why it hangs."),
    "estimate": (
        "estimate",
        "Predict step time, memory and MFU of one configuration of a model on a cluster.",
    ),
    "costs": (
        "costs",
        "Write the costs of a model's stages on a cluster, for every other command.",
    ),
    "calibrate": ("calibrate", "Fit a stack's numbers to runs that you measured."),
    "view": ("view", "The interactive page: tiles, memory, chains."),
    "export": ("export", "Write a schedule for torch or Megatron-LM."),
    "import": ("import_", "Read torch's CSV, real traces, or a Megatron-LM layout."),
    "run": ("run", "Train a real model with exactly this schedule."),
    "profile": ("profile", "Measure the costs of a real model."),
    "demo": ("demo", "A tour: compare, draw, trace, and train a small model."),
}


def load(name: str) -> Verb[Any]:
    """The verb of this name."""
    return import_module(f"hocket.cli.{VERBS[name][0]}").VERB


def parser(names: Collection[str] = tuple(VERBS)) -> Parser:
    """The parser of all verbs; only those of these names get their options."""
    out = Parser(
        prog="hocket",
        description="Pipeline-parallel training schedules: generate, check, predict, see, run.",
    )
    out.add_argument("--version", action="version", version=f"hocket {__version__}")
    commands = out.add_subparsers(title="commands", metavar="COMMAND")
    for name, (_, what) in VERBS.items():
        brief = what[0].lower() + what[1:].removesuffix(".")
        own = commands.add_parser(name, help=brief, description=what)
        if name in names:
            load(name).add_to(own)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 cannot run, 2 wrong use or unreadable."""
    output.prepare()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except HocketError as error:
        if "--json" in words:
            print(json.dumps({"problems": [one._asdict() for one in error.problems]}))
        output.warn(str(error))
        return 2 if isinstance(error, UsageError | TextError | CostError) else 1
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        output.drop()
        return 0
    except KeyboardInterrupt:
        output.warn("stopped")
        return 130
    except OSError as error:  # a full disk under the output, say
        output.drop()
        output.warn(f"cannot write: {error.strerror}")
        return 1


def _run(words: Sequence[str]) -> int:
    if not words:
        parser(()).print_help()
        return 2
    if words[0] not in VERBS and not words[0].startswith("-"):
        raise UsageError(f"there is no command {words[0]!r}; {hint(words[0], VERBS)}")
    values = parser([word for word in words if word in VERBS][:1]).read(words)
    verb = values["verb"]
    answer = verb.run(verb.read(values))
    if isinstance(answer, int):
        return answer
    print(json.dumps(answer.data()) if values["json"] else answer.text)
    return answer.status
