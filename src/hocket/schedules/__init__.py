"""Every registered schedule by name. A new one is one function; nothing else is edited."""

from hocket.schedules.registry import Entry, build, entries, entry, register

__all__ = ["Entry", "build", "entries", "entry", "register"]
