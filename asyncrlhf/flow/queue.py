"""Queue[T]: a bounded, typed, closable channel between stages. `put` waits for room, `get` waits for an item."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, NamedTuple, TypeVar

from asyncrlhf.errors import QueueClosed

__all__ = ("Queue", "QueueStatistics")

T = TypeVar("T")


class QueueStatistics(NamedTuple):
    """Items now, the most it may hold, how many went in and came out, and who waits on either side."""

    items: int
    capacity: int
    put: int
    taken: int
    waiting_putters: int
    waiting_getters: int


class Queue(Generic[T]):
    """First in, first out. Both sides see `close()`: putters are refused at once, getters drain what is left first.

    Raises ValueError for a capacity below 1.
    """

    def __init__(self, capacity: int, item_type: type[T], *, name: str = "queue") -> None:
        if capacity < 1:
            raise ValueError(f"queue {name!r}: capacity must be at least 1, got {capacity}")
        self.name = name
        self.capacity = capacity
        self.item_type = item_type
        self.closed = False
        self._items: deque[T] = deque()
        self._putters: deque[asyncio.Future[None]] = deque()
        self._getters: deque[asyncio.Future[None]] = deque()
        self._count_put = self._count_taken = 0

    def statistics(self) -> QueueStatistics:
        return QueueStatistics(
            len(self._items), self.capacity, self._count_put, self._count_taken, len(self._putters), len(self._getters)
        )

    async def put(self, item: T) -> None:
        """Wait for room, then add. Raises TypeError for an item of another type, QueueClosed after `close()`."""
        self._check(item)
        while len(self._items) >= self.capacity and not self.closed:
            await self._wait(self._putters)
        if self.closed:
            self._wake(self._putters)
            raise QueueClosed(f"queue {self.name!r} is closed; nothing more can be put into it")
        self._items.append(item)
        self._count_put += 1
        self._wake(self._getters)

    async def get(self) -> T:
        """Wait for an item. Raises QueueClosed once the queue is closed and empty."""
        await self._filled()
        return self._pop()

    async def get_all(self) -> list[T]:
        """Wait for an item, then take everything there is. Raises QueueClosed once closed and empty."""
        await self._filled()
        return [self._pop() for _ in range(len(self._items))]

    def close(self) -> None:
        """Refuse further puts and wake everybody. Closing twice does nothing."""
        self.closed = True
        for waiters in (self._putters, self._getters):
            while waiters:
                self._wake(waiters)

    def _check(self, item: object) -> None:
        if not isinstance(item, self.item_type):
            raise TypeError(
                f"queue {self.name!r} carries {self.item_type.__name__}, not {type(item).__name__}; "
                f"put a {self.item_type.__name__} or annotate the queue as Queue[{type(item).__name__}]"
            )

    async def _filled(self) -> None:
        while not self._items:
            if self.closed:
                self._wake(self._getters)
                raise QueueClosed(f"queue {self.name!r} is closed and empty")
            await self._wait(self._getters)

    def _pop(self) -> T:
        item = self._items.popleft()
        self._count_taken += 1
        self._wake(self._putters)
        if self._items:
            self._wake(self._getters)
        return item

    async def _wait(self, waiters: deque[asyncio.Future[None]]) -> None:
        waiter = asyncio.get_running_loop().create_future()
        waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._wake(waiters)  # the wake-up was ours; pass it on
            raise
        finally:
            if waiter in waiters:
                waiters.remove(waiter)

    @staticmethod
    def _wake(waiters: deque[asyncio.Future[None]]) -> None:
        while waiters:
            waiter = waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
