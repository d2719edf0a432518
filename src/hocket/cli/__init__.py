"""The command line: a table of verbs. Each is a module with its options and its function.

Heavy modules are imported inside the function of the verb that needs them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from hocket import __version__
from hocket.cli import (
    calibrate,
    check,
    compare,
    costs,
    demo,
    estimate,
    explain,
    export,
    import_,
    list_,
    output,
    plan,
    profile,
    run,
    show,
    simulate,
    view,
)
from hocket.cli.arguments import Parser, Verb
from hocket.errors import CostError, HocketError, TextError, UsageError
from hocket.words import hint

VERBS: tuple[Verb[Any], ...] = (
    list_.VERB, show.VERB, check.VERB, simulate.VERB, compare.VERB, plan.VERB, explain.VERB,
    estimate.VERB, costs.VERB, calibrate.VERB,
    view.VERB, export.VERB, import_.VERB, run.VERB, profile.VERB, demo.VERB,
)  # fmt: skip


def parser() -> Parser:
    """The parser of all verbs."""
    out = Parser(
        prog="hocket",
        description="Pipeline-parallel training schedules: generate, check, predict, see, run.",
    )
    out.add_argument("--version", action="version", version=f"hocket {__version__}")
    commands = out.add_subparsers(title="commands", metavar="COMMAND")
    for verb in VERBS:
        what = verb.options.__doc__
        brief = what[0].lower() + what[1:].removesuffix(".")
        verb.add_to(commands.add_parser(verb.name, help=brief, description=what))
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
        parser().print_help()
        return 2
    names = [verb.name for verb in VERBS]
    if words[0] not in names and not words[0].startswith("-"):
        raise UsageError(f"there is no command {words[0]!r}; {hint(words[0], names)}")
    values = parser().read(words)
    verb = values["verb"]
    answer = verb.run(verb.read(values))
    if isinstance(answer, int):
        return answer
    print(json.dumps(answer.data()) if values["json"] else answer.text)
    return answer.status
