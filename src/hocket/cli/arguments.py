"""The arguments of a verb, declared as the fields of a frozen dataclass and read into it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from hocket.errors import UsageError
from hocket.formats import Format, Subject, formats
from hocket.words import hint, number, whole

Given = TypeVar("Given")

_READERS: dict[str, Callable[[str], Any]] = {"int": whole, "float": number}  # by annotation


class Answer(NamedTuple):
    """What a verb has to say: for people, and for --json; and the exit status."""

    text: Any
    data: Callable[[], Mapping[str, Any]]
    status: int = 0


@dataclass(frozen=True)
class Verb(Generic[Given]):
    """A command: its options, a frozen dataclass, and its function.

    The fields are made by `option` and `part`. A function that prints by itself returns the exit
    status; it finds the flag --json, which every command has, in a field `json: bool`.
    """

    name: str
    options: type[Given]
    run: Callable[[Given], Answer | int]

    def read(self, values: Mapping[str, Any]) -> Given:
        """The options with these values, by the names of the fields. Raises: UsageError."""
        _refuse_idle(self.options, values)
        return _read(self.options, values)

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options to a parser."""
        parser.set_defaults(verb=self)
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        group: Any = parser
        for one in _arguments(self.options):
            if one.metadata["heading"]:
                group = parser.add_argument_group(one.metadata["heading"])
            _add(group, one)


def option(
    spec: str,
    text: str,
    *,
    default: Any = None,
    read: Callable[[str], Any] | None = None,
    of: Mapping[str, Any] | Sequence[str] = (),
    heading: str = "",
    needs: str = "",
    without: str = "",
) -> Any:
    """A field that is an argument of a command; text: its help.

    spec: the names and what stands for the value: `-o, --output FILE`, `SCHEDULE`, `--why`. With
    `...` after it, it may be repeated; with `+`, one or more values follow. A word is read by
    `read`, or is one of the words `of` (their values, of a mapping), else as the annotation says.
    What has no default must be given. heading: in the help, above this and the following ones.
    needs: the option without which this one has no effect, `--trace`. without: those with which it
    has none, `--json --alone`. Such combinations are refused.
    """
    names = [word.strip(",") for word in spec.split() if word.startswith("-")]
    what = "{" + ",".join(of) + "}" if of else spec.split()[-1]
    if what.endswith(("...", "+")):
        default = ()
    elif not names:
        default = MISSING
    read = _one_of(of) if of else read
    more = {"names": names, "what": what, "text": text, "read": read, "heading": heading}
    return field(default=default, metadata=more | {"needs": needs, "without": without})


def part(kind: type) -> Any:
    """A field that holds more options, a dataclass of its own."""
    return field(metadata={"part": kind})


def taken(options: Any, form: Format, *subjects: Subject) -> dict[str, Any]:
    """The options that a format takes. Raises: UsageError for one that only others take."""
    known = formats(*subjects)
    for one in fields(options):
        takers = [other.name for other in known if one.name in other.takes]
        if takers and form.name not in takers and getattr(options, one.name) != one.default:
            raise UsageError(
                f"{one.metadata['names'][-1]} is for {' or '.join(takers)}, not for {form.name}; "
                "leave it out"
            )
    return {name: getattr(options, name) for name in form.takes}


def _one_of(words: Mapping[str, Any] | Sequence[str]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if text not in words:
            raise UsageError(f"{text!r} is none of these; {hint(text, words)}")
        return words[text] if isinstance(words, Mapping) else text

    return read


def _add(group: Any, one: Field[Any]) -> None:
    """Adds the argument of a field to a parser or a group of one."""
    names, what, default = one.metadata["names"], one.metadata["what"], one.default
    how: dict[str, Any] = {"help": one.metadata["text"].replace("%", "%%")}
    if one.type == "bool":
        how["action"] = "store_false" if default else "store_true"
    else:
        kind = str(one.type).removesuffix(" | None")
        how["metavar"] = what.removesuffix("...").removesuffix("+")
        how["type"] = _typed(one.metadata["read"] or _READERS.get(kind, str))
        if what.endswith("..."):
            how |= {"action": "append"} if names else {"nargs": "*"}
        elif what.endswith("+"):
            how["nargs"] = "+"
    if names:
        how["dest"], how["required"] = one.name, default is MISSING
        how["default"] = [] if default == () else None if default is MISSING else default
    group.add_argument(*(names or [one.name]), **how)


def _typed(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader whose UsageError argparse reports with the name of the argument."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


def _arguments(kind: type) -> Iterator[Field[Any]]:
    """The fields of a dataclass and of its parts that are arguments."""
    for one in fields(kind):  # ty: ignore[invalid-argument-type]
        if "part" in one.metadata:
            yield from _arguments(one.metadata["part"])
        elif one.metadata:
            yield one


def _refuse_idle(kind: type, values: Mapping[str, Any]) -> None:
    """Raises UsageError for an option that would have no effect beside the others."""
    known = {name: one for one in _arguments(kind) for name in one.metadata["names"]}

    def is_given(name: str) -> bool:
        if name not in known:
            return values[name.removeprefix("--")]  # a flag of every command
        value, default = values[known[name].name], known[name].default
        return value != ([] if default == () else default)

    for one in filter(lambda one: one.metadata["needs"] or one.metadata["without"], known.values()):
        name, needs = one.metadata["names"][-1], one.metadata["needs"]
        if not is_given(name):
            continue
        if needs and not is_given(needs):
            raise UsageError(f"{name} has no effect without {needs}; add {needs}, or leave it out")
        for other in filter(is_given, one.metadata["without"].split()):
            raise UsageError(f"{name} has no effect with {other}; leave one of them out")


def _read(kind: type[Given], values: Mapping[str, Any]) -> Given:
    out: dict[str, Any] = {}
    for one in fields(kind):  # ty: ignore[invalid-argument-type]
        inner = one.metadata.get("part")
        value = values[one.name] if inner is None else _read(inner, values)
        out[one.name] = tuple(value) if isinstance(value, list) else value
    return kind(**out)


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are UsageErrors, with the nearest option where one is unknown."""

    def error(self, message: str) -> NoReturn:
        """Raises: UsageError."""
        rest = message.removeprefix("argument ")  # then it names the argument
        raise UsageError(message + f" ({self.prog} --help)" if rest == message else rest)

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """The values of the words by name. Raises: UsageError."""
        found, left = self.parse_known_args(words)
        if not left:
            return vars(found)
        word, verb = left[0].partition("=")[0], f"hocket {found.verb.name}"
        if not word.startswith("-"):
            raise UsageError(f"{verb} has no use for {word!r} ({verb} --help)")
        known = [name for one in _arguments(found.verb.options) for name in one.metadata["names"]]
        raise UsageError(f"{verb} has no option {word}; {hint(word, ['--json', *known])}")
