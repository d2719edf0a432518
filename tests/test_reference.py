"""The handbook's reference has every public name."""

import re
from pathlib import Path

import hocket
import hocket.errors
import hocket.runtime

PAGE = Path(__file__).parent.parent / "docs" / "reference.md"


def test_every_public_name_is_in_the_reference():
    shown = re.findall(r"^::: (\S+)$", PAGE.read_text(encoding="utf-8"), re.M)
    errors = {name for name in hocket.__all__ if name in vars(hocket.errors)}
    names = {f"hocket.{name}" for name in set(hocket.__all__) - errors}
    names |= {f"hocket.runtime.{name}" for name in hocket.runtime.__all__}
    assert set(shown) == names | {"hocket.errors"}
    assert len(shown) == len(set(shown))


def test_every_public_name_has_its_own_docstring():
    for name in hocket.__all__:
        first = (getattr(hocket, name).__doc__ or "").splitlines()[0]
        assert first.endswith((".", ":")) or len(first) > 20, name
        assert not first.startswith(name + "("), f"{name} has the docstring that a dataclass gets"
