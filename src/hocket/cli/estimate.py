"""`hocket estimate`."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.cli.arguments import Answer, Verb, option, part
from hocket.cli.configuration import Configuration


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hocket estimate` takes."""

    configuration: Configuration = part(Configuration)
    flops: str = option(
        "--flops CONVENTION", "what the MFU counts: causal attention, full, or 6N "
        "(default: causal)", of=("causal", "full", "6N"), default="causal",
    )  # fmt: skip


def run(options: Options) -> Answer:
    """The estimate; the status is 1 where it does not fit in memory."""
    from hocket.cluster import estimate
    from hocket.cluster.reasons import helps
    from hocket.cluster.report import as_json, as_text, helps_json

    found = estimate(*options.configuration.case(), convention=options.flops)
    remedies = helps(found)
    data = {"would_help": helps_json(remedies)}
    return Answer(as_text(found, remedies), lambda: as_json(found) | data, 0 if found.fits else 1)


VERB = Verb("estimate", Options, run)
