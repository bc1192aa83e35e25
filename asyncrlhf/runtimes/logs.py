"""What a process printed last."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ("last_lines",)

LINES = 12
BYTES = 16384


def last_lines(log: Path, start: int = 0) -> str:
    """The last lines of a log from byte `start` on, each on an indented line of its own; " nothing" if there are none
    or the file cannot be read."""
    lines: list[str] = []
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-LINES:]
    return "".join(f"\n  {line}" for line in lines) or " nothing"
