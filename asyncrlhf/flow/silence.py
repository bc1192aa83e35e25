"""Silence: which unfinished leases nothing has been heard of for too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import takewhile

__all__ = ("Silence",)


class Silence:
    """Keeps the last sign of life of every unfinished lease, and calls `on_due` when one has been silent for `limit`
    seconds (0: never)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: float, on_due: Callable[[], None]) -> None:
        self._loop, self._limit, self._on_due = loop, limit, on_due
        self._heard_of: dict[int, float] = {}  # the longest silent first
        self._last_token_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

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
        now, limit = self._loop.time(), self._limit
        silent = [uid for uid, _ in takewhile(lambda item: item[1] + limit <= now, self._heard_of.items())]
        if self._last_token_at + limit > now:
            for uid in [uid for uid in silent if not has_tokens(uid)]:
                silent.remove(uid)
                del self._heard_of[uid]
                self._heard_of[uid] = self._last_token_at
        return silent

    def _arm(self) -> None:
        if self._timer is None and self._limit > 0 and self._heard_of:
            self._timer = self._loop.call_at(next(iter(self._heard_of.values())) + self._limit, self._due)

    def _due(self) -> None:
        self._timer = None
        self._on_due()
        self._arm()
