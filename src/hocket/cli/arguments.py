"""The arguments of a verb, declared as the fields of a frozen dataclass and read into it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Generic, NoReturn, TypeVar

from hocket.errors import UsageError
from hocket.words import hint, number, whole

Given = TypeVar("Given")

_READERS: dict[str, Callable[[str], Any]] = {"int": whole, "float": number}  # by annotation


@dataclass(frozen=True)
class Verb(Generic[Given]):
    """A command: what it does in a line, its options, and the function that runs it.

    `options` is a frozen dataclass of fields made by `option` and `part`, and of `json: bool`,
    which every command has. `run` returns the exit status.
    """

    name: str
    text: str
    options: type[Given]
    run: Callable[[Given], int]

    def read(self, values: Mapping[str, Any]) -> Given:
        """The options with these values, by the names of the fields."""
        return _read(self.options, values)

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options to a parser."""
        parser.set_defaults(verb=self)
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        groups: dict[str, Any] = {"": parser}
        for one, heading in _arguments(self.options):
            if heading not in groups:
                groups[heading] = parser.add_argument_group(heading)
            _add(groups[heading], one)


def option(
    spec: str,
    text: str,
    *,
    default: Any = None,
    read: Callable[[str], Any] | None = None,
    of: Mapping[str, Any] | Sequence[str] = (),
) -> Any:
    """A field that is an argument of a command; text: its help.

    spec: the names and what stands for the value: `-o, --output FILE`, `SCHEDULE`, `--why`. With
    `...` after it, it may be repeated; with `+`, one or more values follow. A word is read by
    `read`, or is one of the words `of` (their values, of a mapping), else as the annotation says.
    What has no default must be given.
    """
    names = [word.strip(",") for word in spec.split() if word.startswith("-")]
    what = "{" + ",".join(of) + "}" if of else spec.split()[-1]
    if what.endswith(("...", "+")):
        default = ()
    elif not names:
        default = MISSING
    more = {"names": names, "what": what, "text": text, "read": _one_of(of) if of else read}
    return field(default=default, metadata=more)


def part(kind: type, under: str = "") -> Any:
    """A field that holds more options, a dataclass of its own; under: their heading."""
    return field(metadata={"part": kind, "under": under})


def _one_of(words: Mapping[str, Any] | Sequence[str]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if text not in words:
            raise UsageError(f"{text!r} is none of these; {hint(text, words)}")
        return words[text] if isinstance(words, Mapping) else text

    return read


def _add(group: Any, one: Field[Any]) -> None:
    """Adds the argument of a field to a parser or a group of one."""
    names, what, default = one.metadata["names"], one.metadata["what"], one.default
    how: dict[str, Any] = {"help": one.metadata["text"]}
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
    if names and default is MISSING:
        how |= {"dest": one.name, "required": True}
    elif names:
        how |= {"dest": one.name, "default": [] if default == () else default}
    group.add_argument(*(names or [one.name]), **how)


def _typed(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader whose UsageError argparse reports with the name of the argument."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


def _arguments(kind: type, under: str = "") -> Iterator[tuple[Field[Any], str]]:
    """The fields of a dataclass and of its parts that are arguments, and their headings."""
    for one in fields(kind):  # ty: ignore[invalid-argument-type]
        if "part" in one.metadata:
            yield from _arguments(one.metadata["part"], one.metadata["under"] or under)
        elif one.metadata:
            yield one, under


def _read(kind: type[Given], values: Mapping[str, Any]) -> Given:
    out: dict[str, Any] = {}
    for one in fields(kind):  # ty: ignore[invalid-argument-type]
        inner = one.metadata.get("part")
        found = values[one.name] if inner is None else _read(inner, values)
        out[one.name] = tuple(found) if isinstance(found, list) else found
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
        known = [n for one, _ in _arguments(found.verb.options) for n in one.metadata["names"]]
        raise UsageError(f"{verb} has no option {word}; {hint(word, ['--json', *known])}")
