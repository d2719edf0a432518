"""Every registered schedule by name. A new one is one function; nothing else is edited."""

from hocket.schedules.registry import (
    Entry,
    Formula,
    build,
    closed_form,
    entries,
    entry,
    register,
    settings_of,
)

__all__ = [
    "Entry",
    "Formula",
    "build",
    "closed_form",
    "entries",
    "entry",
    "register",
    "settings_of",
]
