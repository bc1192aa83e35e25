"""Stand still at a chosen place until a test says go, or break there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrlhf.messages import import_object

__all__ = ("GO", "HALTED", "break_once", "halt")

HALTED, GO = Path("halted"), Path("go")
"""In the current directory: made by the one who halts, and by the one who lets it go on."""


def halt(place: str, seconds: float = 120) -> None:
    """A call of `place` ("module:Class.method", the first one, or "module:Class.method#3") stands still until GO
    exists."""
    place, _, number = place.partition("#")
    wanted = int(number or 1)

    def before(count: int) -> None:
        if count == wanted:
            HALTED.touch()
            deadline = time.monotonic() + seconds
            while not GO.exists() and time.monotonic() < deadline:
                time.sleep(0.005)

    _wrap(place, before)


def break_once(place: str) -> None:
    """The second call of `place` raises."""

    def before(count: int) -> None:
        if count == 2:
            raise OSError(f"{place} broke, as the test has asked for")

    _wrap(place, before)


def _wrap(place: str, before: Callable[[int], None]) -> None:
    owner, _, name = place.rpartition(".")
    kind = import_object(owner)
    original: Callable[..., Any] = getattr(kind, name)
    calls = itertools.count(1)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        before(next(calls))
        return original(*arguments, **named)

    setattr(kind, name, wrapped)
