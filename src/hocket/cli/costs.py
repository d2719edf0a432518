"""`hocket costs`."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.cli.arguments import Answer, Verb, option, part
from hocket.cli.configuration import Configuration
from hocket.cli.output import check_writable
from hocket.files import write


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket costs` takes."""

    configuration: Configuration = part(Configuration)
    output: str | None = option("-o, --output FILE", "where (default: it is printed)")


def run(options: Options) -> Answer:
    """The costs file; written where an output is named."""
    from hocket.cluster.report import costs_text

    check_writable(options.output)
    case, path = options.configuration.case(), options.output
    text = costs_text(*case)
    if path is not None:
        write(path, text)
    return Answer(
        _said(case.run.pp, path) if path else text.rstrip("\n"), lambda: _data(text, path)
    )


def _said(pp: int, path: str) -> str:
    return f"written: {path}; use it with -p {pp} --costs {path}"


def _data(text: str, path: str | None) -> dict[str, object]:
    import tomllib

    return tomllib.loads(text) | {"toml": text} | ({"output": path} if path else {})


VERB = Verb("costs", Options, run)
