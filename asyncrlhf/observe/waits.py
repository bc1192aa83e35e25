"""Who waits for whom, since when: the text. Pure: it is given what was seen at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ("Wait", "wait_lines")

ALIKE = 8
"""Waits of one kind that are written out, the longest first."""


class Wait(NamedTuple):
    """Example: Wait("train step 12", "policy/0", "step", 34.2) is "train step 12 waits 34.2 s for policy/0: step"."""

    who: str
    whom: str
    what: str = ""
    seconds: float | None = None
    """None: since an unknown moment."""
    kind: str = ""
    """Waits that are alike; only the longest of them are shown. "": shown in any case."""

    def __str__(self) -> str:
        since = "" if self.seconds is None else f" {self.seconds:.1f} s"
        return f"{self.who} waits{since} for {self.whom}{self.what and ': '}{self.what}"


def wait_lines(waits: Sequence[Wait], notes: Iterable[str] = ()) -> list[str]:
    """Circles first, then all that wait, the longest first, then `notes`."""
    lines = [f"a circle: {' -> '.join((*circle, circle[0]))}; nobody in it can go on" for circle in _circles(waits)]
    shown: dict[str, int] = {}
    for wait in sorted(waits, key=lambda wait: -(wait.seconds or 0.0)):
        shown[wait.kind] = shown.get(wait.kind, 0) + 1
        if not wait.kind or shown[wait.kind] <= ALIKE:
            lines.append(str(wait))
    lines += [f"{count - ALIKE} more {kind}" for kind, count in shown.items() if kind and count > ALIKE]
    return [*lines, *notes] or ["nobody waits"]


def _circles(waits: Sequence[Wait]) -> Iterator[list[str]]:
    """Each once, from whoever comes first in `waits`."""
    after: dict[str, list[str]] = {}
    for wait in waits:
        after.setdefault(wait.who, []).append(wait.whom)
    done: set[str] = set()
    for start in after:
        if start in done:
            continue
        path, open_ = [start], [iter(after[start])]
        while open_:
            whom = next(open_[-1], None)
            if whom is None:
                open_.pop()
                done.add(path.pop())
            elif whom in path:
                yield path[path.index(whom) :]
            elif whom in after and whom not in done:
                path.append(whom)
                open_.append(iter(after[whom]))
