"""Silence: which unfinished leases nothing has been heard of for too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import takewhile

__all__ = ("Silence",)


@dataclass(slots=True)
class _Pause:
    concerns: Callable[[], Container[int]]
    since: float


class Silence:
    """Keeps the last sign of life of every unfinished lease, and calls `on_due` when one has been silent for `limit`
    seconds (0: never)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: float, on_due: Callable[[], None]) -> None:
        self._loop, self._limit, self._on_due = loop, limit, on_due
        self._heard_of: dict[int, float] = {}  # the longest silent first
        self._last_token_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._pauses: dict[str, _Pause] = {}

    def pause(self, whom: str, concerns: Callable[[], Container[int]]) -> None:
        """Until `go_on` nobody works on the leases that `concerns` gives, and their time stands still."""
        self._pauses.setdefault(whom, _Pause(concerns, self._loop.time()))

    def go_on(self, whom: str) -> None:
        """The pause is over, if there was one."""
        if (pause := self._pauses.pop(whom, None)) is not None:
            self._leave_out(pause)

    def begin(self, uid: int) -> None:
        """A lease was granted."""
        self._heard_of[uid] = self._loop.time()
        self._arm()

    def hear(self, uid: int, *, tokens: bool = False) -> None:
        """A sign of life. `tokens`: it was tokens, so that engines are at work."""
        if tokens:
            self._last_token_at = self._loop.time()
        if self._heard_of.pop(uid, None) is not None:
            self._heard_of[uid] = self._loop.time()

    def end(self, uid: int) -> None:
        """The lease is finished or gone."""
        self._heard_of.pop(uid, None)

    def take_due(self, has_tokens: Callable[[int], bool]) -> list[int]:
        """The leases that count as lost. One without a token yet may be queueing for a decoding slot: it is lost only
        if no other lease gets tokens either."""
        for pause in self._pauses.values():
            self._leave_out(pause)
        now, limit = self._loop.time(), self._limit
        silent = [uid for uid, _ in takewhile(lambda item: item[1] + limit <= now, self._heard_of.items())]
        if self._last_token_at + limit > now:
            for uid in [uid for uid in silent if not has_tokens(uid)]:
                silent.remove(uid)
                del self._heard_of[uid]
                self._heard_of[uid] = self._last_token_at
        return silent

    def _leave_out(self, pause: _Pause) -> None:
        """The pause so far, or since the last time, does not count as silence."""
        now, concerned = self._loop.time(), pause.concerns()
        for uid, at in self._heard_of.items():
            if uid in concerned:
                self._heard_of[uid] = at + now - max(at, pause.since)
        self._heard_of = dict(sorted(self._heard_of.items(), key=lambda item: item[1]))
        pause.since = now

    def _arm(self) -> None:
        if self._timer is None and self._limit > 0 and self._heard_of:
            self._timer = self._loop.call_at(next(iter(self._heard_of.values())) + self._limit, self._due)

    def _due(self) -> None:
        self._timer = None
        self._on_due()
        self._arm()
