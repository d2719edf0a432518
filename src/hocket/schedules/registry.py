"""The registry of schedule generators: names, constraints, options, and `build`."""

from __future__ import annotations

import inspect
import operator
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

from hocket import limits
from hocket.costs import Costs, Number, fused_rule
from hocket.errors import HocketError, UsageError
from hocket.ir import Schedule
from hocket.words import hint

Generator = Callable[..., Schedule]

_REACH = 4096  # how far settings that fit are looked for


class Rule(NamedTuple):
    """One constraint: how it is written, and the test; settings come as keyword arguments."""

    text: str
    holds: Callable[..., bool]


class Formula(NamedTuple):
    """A published closed form: how it is written, where it holds, the test and the value.

    `when` and `value` take any of p, m, v, the options, and the times of equal stages F, I, W,
    B, R, FB and latency, by name. metric: "makespan" or "span".
    """

    text: str
    range: str
    when: Callable[..., bool]
    value: Callable[..., Any]
    metric: str = "makespan"


@dataclass(frozen=True)
class Entry:
    """One registered schedule."""

    name: str
    make: Generator
    source: str
    rules: tuple[Rule, ...]
    stages_per_rank: int
    weights: str
    use: str
    formula: Formula | None
    searches: bool = False
    foreign: bool = False

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The keyword-only parameters of the generator with their defaults, v among them."""
        signature = inspect.signature(self.make)
        return {
            p.name: p.default for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY
        }

    @property
    def options(self) -> dict[str, Any]:
        """The options beside p, m and v, with their defaults."""
        return {k: d for k, d in self.parameters.items() if k != "v"}

    @property
    def takes_v(self) -> bool:
        """True when the number of stages per rank can be chosen."""
        return "v" in self.parameters

    def is_number(self, option: str) -> bool:
        """True when an option is a whole number (or left out)."""
        return str(inspect.signature(self.make).parameters[option].annotation).startswith("int")

    @property
    def summary(self) -> str:
        """First line of the generator's docstring."""
        return (inspect.getdoc(self.make) or "").partition("\n")[0]

    def extent(self, settings: dict[str, Any]) -> tuple[int, int, int]:
        """How many stages, microbatches and slices these settings make, about."""
        each = {key: settings.get(key) for key in ("v", "layers", "slices")}
        v, layers, slices = (x if isinstance(x, int) and x > 0 else 1 for x in each.values())
        stages = settings["p"] * layers * (v if self.takes_v else self.stages_per_rank)
        return stages, settings["m"], slices

    def broken(self, settings: dict[str, Any]) -> list[Rule]:
        """The rules that these settings break."""
        return [rule for rule in self.rules if not _holds(rule, settings)]


_entries: dict[str, Entry] = {}


def register(
    name: str,
    *,
    source: str,
    rules: tuple[tuple[str, Callable[..., bool]], ...] = (),
    stages_per_rank: int = 1,
    weights: str = "1x",
    use: str = "",
    formula: Formula | None = None,
    searches: bool = False,
) -> Callable[[Generator], Generator]:
    """Registers a generator `make(p, m, *, v=..., option=...) -> Schedule` under a name.

    rules: (text, test) pairs; a test takes p, m and any of the options by name. stages_per_rank:
    for generators without a parameter v. weights: copies of the weights; use: when to take it;
    both for people. formula: the published closed form, if there is one. searches: it looks for
    its order, which takes a while for many ranks.
    """

    def keep(make: Generator) -> Generator:
        if name in _entries:
            raise UsageError(f"a schedule named {name!r} is registered already")
        _entries[name] = Entry(
            name,
            make,
            source,
            tuple(Rule(*r) for r in rules),
            stages_per_rank,
            weights,
            use,
            formula,
            searches,
        )
        return make

    return keep


@cache
def _import_generators() -> None:
    package = import_module("hocket.schedules")
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"hocket.schedules.{module.name}")


def entries() -> Iterator[Entry]:
    """Every registered schedule, by name."""
    _import_generators()
    return iter(sorted(_entries.values(), key=lambda e: e.name))


def entry(name: str) -> Entry:
    """The schedule of this name, or the function `module:function` of your own.

    Raises: UsageError with the file of that name here, or the nearest names.
    """
    _import_generators()
    if ":" in name:
        return _foreign(name)
    if name not in _entries:
        file = f"{name}.sched"
        near = hint(name, _entries, "`hocket list` shows all")
        if Path(file).is_file():
            near = f"did you mean {file}?"
        raise UsageError(f"there is no schedule {name!r}; {near}")
    return _entries[name]


def _foreign(name: str) -> Entry:
    """A user's own generator `make(p, m, *, options) -> Schedule`, registered or not."""
    module_name, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the folder the command was started in
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{name}: there is no module {error.name!r} here") from None
    except Exception as error:
        raise UsageError(
            f"{name}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from None
    make = getattr(module, function, None)
    if not inspect.isfunction(make):
        raise UsageError(f"{name}: module {module_name!r} has no function {function!r}")
    if list(inspect.signature(make).parameters)[:2] != ["p", "m"]:
        raise UsageError(f"{name}: a generator is called as {function}(p, m, *, options)")
    known = next((e for e in _entries.values() if e.make is make), None)
    return known or Entry(
        name=name, make=make, source=module_name, rules=(), stages_per_rank=1, weights="",
        use="", formula=None, foreign=True,
    )  # fmt: skip


def build(name: str, *, p: int, m: int, v: int | None = None, **options: Any) -> Schedule:
    """The schedule of this name for p ranks, m microbatches and v stages per rank.

    Raises: UsageError for an unknown name or option, and for settings the schedule does not
    allow: the rule, the values, and the nearest legal settings.
    """
    found = entry(name)
    settings = settings_of(found, p, m, v, options)
    limits.check_schedule(name, settings["p"], *found.extent(settings))
    broken = found.broken(settings)
    if broken:
        raise UsageError(_refusal(found, settings, broken))
    if not found.foreign:
        return found.make(settings["p"], settings["m"], **_rest(settings))
    schedule = _call_foreign(found, settings)
    if not isinstance(schedule, Schedule):
        raise UsageError(f"{name} returned {type(schedule).__name__}; it must return a Schedule")
    if schedule.p != settings["p"]:
        raise UsageError(f"{name} returned a schedule of {schedule.p} ranks, not of p={p}")
    return schedule


def settings_of(
    found: Entry, p: int, m: int, v: int | None, options: dict[str, Any]
) -> dict[str, Any]:
    """All settings of a call, defaults filled in, types checked.

    Raises: UsageError.
    """
    p, m, v = _size("p", p), _size("m", m), None if v is None else _size("v", v)
    unknown = sorted(set(options) - set(found.options))
    if unknown:
        known = ", ".join(found.options) or "none"
        raise UsageError(f"{found.name} has no option {unknown[0]!r}; its options: {known}")
    for key, value in options.items():
        if found.is_number(key) and (isinstance(value, bool) or not isinstance(value, int)):
            raise UsageError(f"{key} is {value!r}; it must be a whole number")
    settings = {"p": p, "m": m, **found.parameters, **options}
    if v is not None and found.takes_v:
        settings["v"] = v
    elif v is not None and not found.foreign and v != found.stages_per_rank:
        raise UsageError(
            f"{found.name} has {found.stages_per_rank} stage(s) per rank; v={v} is not possible"
        )
    return settings


def closed_form(found: Entry, settings: dict[str, Any], costs: Costs) -> Number | None:
    """The value of a schedule's formula under costs of equal stages; None where it does not apply.

    settings: p, m, v and the options, as `settings_of` gives them.
    """
    formula, times = found.formula, _equal_stages(costs)
    if formula is None or times is None:
        return None
    known = {"v": found.stages_per_rank, **settings, **times}
    return call(formula.value, known) if call(formula.when, known) else None


def _equal_stages(costs: Costs) -> dict[str, Any] | None:
    """Times by name, or None where stages differ or messages take more than a latency."""
    per_stage: dict[str, Any] = {name: costs.time(name) for name in "FIWBR"}
    for name, value in per_stage.items():
        distinct = set(value) if isinstance(value, tuple) else {value}
        if len(distinct) > 1:
            return None
        per_stage[name] = distinct.pop()
    apart = costs.p2p_overhead, costs.bandwidth, costs.slice, costs.microbatch, costs.speed
    if any(x is not None for x in apart):
        return None
    f: Any = per_stage["F"]
    b: Any = per_stage["B"]
    rule, number = fused_rule(costs.FB)
    fused = {"sum": f + b, "max": max(f, b), "scale": (f + b) * number, "number": number}
    return {**per_stage, "FB": fused[rule], "latency": costs.latency}


def _size(key: str, value: Any) -> int:
    """A number of ranks, microbatches or stages, as an int."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UsageError(f"{key} is {value!r}; it must be a whole number")
    if value < 1:
        raise UsageError(f"{key} is {value}; it must be 1 or more")
    return operator.index(value)


def call(function: Callable[..., Any], settings: dict[str, Any]) -> Any:
    """The function's value, its parameters taken from the settings by name."""
    return function(**{k: settings[k] for k in inspect.signature(function).parameters})


def _holds(rule: Rule, settings: dict[str, Any]) -> bool:
    return bool(call(rule.holds, settings))


def _refusal(found: Entry, settings: dict[str, Any], broken: list[Rule]) -> str:
    given = " ".join(f"{k}={v}" for k, v in settings.items() if v is not None)
    rules = " and ".join(rule.text for rule in broken)
    near = _nearest(found, settings)
    advice = f"nearest that fit: {', '.join(near)}" if near else "no near setting fits"
    return f"{found.name} needs {rules}; given {given}; {advice}"


def _nearest(found: Entry, settings: dict[str, Any]) -> list[str]:
    """Settings that fit and differ in one number, nearest first, at most four; else in p and m."""
    out = []
    numbers = [k for k, v in settings.items() if isinstance(v, int) and not isinstance(v, bool)]
    reach = min(4 * max(settings["p"], settings["m"], 8), _REACH)
    for key in numbers:
        value = settings[key]
        for step in (-1, 1):
            for other in range(value + step, max(value + step * reach, 0), step):
                if not found.broken({**settings, key: other}):
                    out.append((abs(other - value) / max(value, 1), f"{key}={other}"))
                    break
    return [text for _, text in sorted(out)[:4]] or _nearest_pair(found, settings, reach)


def _nearest_pair(found: Entry, settings: dict[str, Any], reach: int) -> list[str]:
    """p and m that fit together, p as near as can be, then m."""
    p, m = settings["p"], settings["m"]
    mbs = sorted(range(max(1, m - reach), m + reach), key=lambda x: abs(x - m))
    ranks = sorted(range(max(1, p - reach), p + 9), key=lambda x: abs(x - p))
    for near_p, near_m in islice(product(ranks, mbs), 10 * _REACH):
        if not found.broken({**settings, "p": near_p, "m": near_m}):
            return [f"p={near_p} m={near_m}"]
    return []


def _call_foreign(found: Entry, settings: dict[str, Any]) -> Any:
    """What a user's own generator returns; its exceptions become one sentence."""
    try:
        return found.make(settings["p"], settings["m"], **_rest(settings))
    except HocketError:
        raise
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = ""
        if trace is not None:
            where = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
        raise UsageError(f"{found.name} failed: {type(error).__name__}: {error}{where}") from None


def _rest(settings: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if k not in ("p", "m")}
