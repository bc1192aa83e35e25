"""Stand still at a chosen place until a test says go."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrlhf.messages import import_object

__all__ = ("GO", "HALTED", "halt")

HALTED, GO = Path("halted"), Path("go")
"""In the current directory: made by the one who halts, and by the one who lets it go on."""


def halt(place: str, seconds: float = 30) -> None:
    """From now on the first call of `place` ("module:Class.method") stands still until GO exists."""
    owner, _, name = place.rpartition(".")
    kind = import_object(owner)
    original: Callable[..., Any] = getattr(kind, name)

    def halting(*arguments: Any, **named: Any) -> Any:
        deadline = time.monotonic() + seconds
        if not HALTED.exists():
            HALTED.touch()
            while not GO.exists() and time.monotonic() < deadline:
                time.sleep(0.005)
        return original(*arguments, **named)

    setattr(kind, name, halting)
