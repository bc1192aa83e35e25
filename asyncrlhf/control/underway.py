"""UnderWay: the publish that goes on beside the next train step. There is one at most: whoever needs it over, to begin
another one, to save or to end the run, waits here for it, and it knows how long they did."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ("UnderWay",)


class UnderWay:
    """At most one task, and who waits for it."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now`: seconds, from a clock that only rises."""
        self._now = now
        self._task: asyncio.Task[None] | None = None
        self._waits_since: float | None = None

    def __bool__(self) -> bool:
        return self._task is not None and not self._task.done()

    def begin(self, tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in a TaskGroup, which its failure ends."""
        assert not self, "a publish is under way already"
        self._task = tasks.create_task(work, name="publish")

    async def over(self) -> None:
        """Wait until none is under way. Raises what it failed with."""
        if (task := self._task) is None:
            return
        self._waits_since = self._now()
        try:
            await asyncio.wait([task])
        finally:
            self._waits_since = None
        self._task = None
        if not task.cancelled():  # else its TaskGroup has ended, for another reason
            task.result()

    def forget(self) -> None:
        """Its TaskGroup has ended, and raised what it failed with: nobody who comes later hears of that again."""
        self._task = None

    def waited(self, since: float = 0.0) -> float:
        """Seconds after `since` that somebody has waited for it by now."""
        return 0.0 if self._waits_since is None else self._now() - max(since, self._waits_since)
