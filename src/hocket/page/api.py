"""What the served page asks for, and the answers: from words to a schedule to the page's data.

The words come from a web page: they name registered schedules and built-in profiles, never files
or modules.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from hocket.costs import Costs, costs_from, costs_toml, load_costs, profiles
from hocket.costs.scaling import fitted_together, refitted
from hocket.errors import CostError, UsageError
from hocket.files import read_text
from hocket.ir import Schedule
from hocket.page.document import page_data, trace_bytes
from hocket.recognise import Match, recognise
from hocket.schedules import build, entries, entry, settings_of
from hocket.simulator import simulate
from hocket.timeline import Timeline
from hocket.words import options_text, size

GIVEN = "(given)"  # the schedule of the command line, where it is no registered one
MEASURED = "(measured)"  # the measured timeline of the command line
MOST_ACTIONS = 400_000  # more take the page too long to be looked at while typing

RANK = Costs(per="rank")  # where nothing else is said
Words = Mapping[str, str]


@dataclass(frozen=True)
class Given:
    """What the command line gave: the schedules, the costs, the limit in bytes, a trace.

    costs: a path or a built-in profile. measured: the timeline of a trace, `read` the costs that
    were read from it, `label` and `notes` the words about it.
    """

    schedule: Schedule
    costs: str | None = None
    limit: float | None = None
    beside: Schedule | None = None
    measured: Timeline | None = None
    read: Costs | None = None
    label: str = "measured"
    notes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_trace(cls, found: Any, costs: str | None = None, limit: float | None = None) -> Given:
        """What traces say (a `Loaded` of interop): times above what their costs predict."""
        match = _recognised(found.schedule)
        said = [*([] if match is None else [str(match)]), *found.notes]
        label = "measured" if found.spread or found.schedule.name == "measured" else "trace"
        own = _registered(found.schedule)
        schedule = found.schedule if own is None else found.schedule.renamed(own.name)
        if found.timeline is None:
            return cls(schedule, costs, limit, notes={schedule.name: "; ".join(said)})
        return cls(
            schedule, costs, limit, measured=found.timeline, read=found.costs, label=label,
            notes={label: "; ".join(said)},
        )  # fmt: skip

    def known_costs(self) -> Costs:
        """Those of --costs, else those of the trace, else all the same."""
        if self.costs is not None:
            return load_costs(self.costs)
        return RANK if self.read is None else self.read

    def words(self) -> dict[str, str]:
        """The same as the form's words."""
        out = {"schedule": GIVEN, "p": "", "m": "", "v": "", "options": "", "beside": ""}
        match = _registered(self.schedule)
        if match is not None:
            plain = {k: str(x) for k, x in match.settings.items()}
            out |= {"schedule": match.name, **{k: plain.pop(k, "") for k in "pmv"}}
            out["options"] = " ".join(f"{k}={x}" for k, x in plain.items())
        if self.measured is not None:
            out["beside"] = MEASURED
        elif self.beside is not None:
            near = _registered(self.beside)
            out["beside"] = f"{GIVEN} beside" if near is None else near.name
        out["costs"] = self._costs_text()
        out["limit"] = "" if self.limit is None else f"{self.limit:g}"
        return out

    def _costs_text(self) -> str:
        """The profile's name, or the text of the costs."""
        source = self.costs
        if source is None:
            return "" if self.read is None else costs_toml(self.read)
        if source in profiles() and not Path(source).exists():
            return source
        return read_text(source)


@lru_cache(maxsize=4)
def _recognised(schedule: Schedule) -> Match | None:
    """Asked several times of one order: to find the nearest takes seconds."""
    return recognise(schedule)


def _registered(schedule: Schedule) -> Match | None:
    """The registered schedule that this is exactly, numbers of microbatches included."""
    match = _recognised(schedule)
    return match if match is not None and match.is_same and not match.renamed else None


def served(given: Given) -> dict[str, Any]:
    """What the form starts with: its words, the schedules to choose from, what each takes."""
    words = given.words()
    choices = [[e.name, e.name] for e in entries()]
    if words["schedule"] == GIVEN:
        choices.insert(0, [GIVEN, given.schedule.name])
    if given.measured is not None:
        choices.insert(0, [MEASURED, given.label])
    elif words["beside"].startswith(GIVEN) and given.beside is not None:
        choices.insert(0, [words["beside"], given.beside.name])
    takes = {
        e.name: {"v": e.takes_v, "options": list(e.options), "needs": [r.text for r in e.rules]}
        for e in entries()
    }
    return {"asked": words, "schedules": choices, "takes": takes}


def answer(given: Given, words: Words) -> dict[str, Any]:
    """The page's data for the form's words.

    Raises: HocketError, to be shown as it is.
    """
    limit = _limit(words.get("limit", ""))
    return page_data(timelines(given, words), limit=limit, notes=given.notes)


def trace(given: Given, words: Words) -> bytes:
    """The trace of one of the timelines, `view` says which."""
    named = list(timelines(given, words).items())
    index = _whole("view", words, "view") or 0
    if index >= len(named):
        raise UsageError(f"there is no view {index}")
    return trace_bytes(*named[index])


def timelines(given: Given, words: Words) -> dict[str, Timeline]:
    """The schedules of the form under its costs, by label."""
    first, costs = _schedule(given, words), _costs(words.get("costs", ""))
    if words.get("beside") == MEASURED and given.measured is not None:
        return _with_trace(given, first, costs)
    return simulated(first, _beside(given, words, first), costs)


def shown(given: Given) -> dict[str, Timeline]:
    """What the command line asks for, by label."""
    costs = given.known_costs()
    if given.measured is not None:
        return _with_trace(given, given.schedule, costs)
    return simulated(given.schedule, given.beside, costs)


def _with_trace(given: Given, schedule: Schedule, costs: Costs) -> dict[str, Timeline]:
    """The trace, and below it what the costs of its stages predict for a schedule."""
    assert given.measured is not None
    same = schedule.renamed(given.schedule.name) == given.schedule
    fitted = refitted(costs, given.schedule.placement, schedule.placement)
    label = "predicted" if same else f"{schedule.name}, predicted"
    return {given.label: given.measured, label: simulate(schedule, fitted)}


def simulated(first: Schedule, other: Schedule | None, costs: Costs) -> dict[str, Timeline]:
    """One or two schedules of one model under the same costs, by label."""
    shown = {first.name: first}
    if other is not None:
        shown[other.name if other.name != first.name else f"{other.name} (beside)"] = other
    each = fitted_together(costs, [s.placement for s in shown.values()])
    return {label: simulate(s, c) for (label, s), c in zip(shown.items(), each, strict=True)}


def _schedule(given: Given, words: Words) -> Schedule:
    name = words.get("schedule", GIVEN)
    if name == GIVEN:
        return given.schedule
    p, m = (_needed(what, words, key) for what, key in (("ranks", "p"), ("microbatches", "m")))
    v = _whole("v", words, "v") if entry_of(name).takes_v else None
    return _built(name, p, m, v, options_text(words.get("options", "")))


def _beside(given: Given, words: Words, first: Schedule) -> Schedule | None:
    name = words.get("beside", "")
    if not name:
        return None
    if name.startswith(GIVEN):
        return given.beside if given.beside is not None else given.schedule
    v = max(first.placement.n_stages // first.p, 1)
    m = first.m // first.placement.slices
    return _built(name, first.p, m, v if v > 1 and entry_of(name).takes_v else None, {})


def entry_of(name: str) -> Any:
    """The registered schedule; a function `module:function` is not taken from a web page."""
    if ":" in name:
        raise UsageError(f"{name}: a function can be given on the command line only")
    return entry(name)


def _built(name: str, p: int, m: int, v: int | None, options: dict[str, Any]) -> Schedule:
    found = entry_of(name)
    settings = settings_of(found, p, m, v, options)
    size = 3 * prod(found.extent(settings))
    if size > MOST_ACTIONS:
        raise UsageError(
            f"p={p} m={m} has about {size:,} actions; the page shows at most {MOST_ACTIONS:,}"
        )
    return build(name, p=p, m=m, v=v, **options)


def _costs(text: str) -> Costs:
    text = text.strip()
    if not text:
        return RANK
    if text in profiles():
        return load_costs(text)
    try:
        return costs_from(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        known = ", ".join(profiles())
        raise CostError(f"costs: not TOML, and no profile ({known}): {error}") from None


def _needed(what: str, words: Words, key: str) -> int:
    found = _whole(key, words, key)
    if found is None:
        raise UsageError(f"the number of {what} is missing: give {key}")
    return found


def _whole(what: str, words: Words, key: str) -> int | None:
    text = words.get(key, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise UsageError(f"{what} is {text!r}; it must be a whole number")
    return int(text)


def _limit(text: str) -> float | None:
    """The memory limit, `80GB` or a number; None where none is given. Raises: UsageError."""
    if not text.strip():
        return None
    try:
        return size(text)
    except UsageError as error:
        raise UsageError(f"the memory limit: {error}") from None
