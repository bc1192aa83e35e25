"""Queue[T]: a bounded, typed, closable channel between stages. `put` waits for room, `get` waits for an item."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, NamedTuple, TypeVar

from asyncrlhf.errors import QueueClosed, WrongItem

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
    """First in, first out, for the items and for those who wait on either side: a latecomer never overtakes.

    Both sides see `close()`: putters are refused at once, getters drain what is left first. A cancelled `put` adds
    nothing, a cancelled `get` takes nothing. Raises ValueError for a capacity below 1.
    """

    def __init__(self, capacity: int, item_type: type[T], *, name: str = "queue") -> None:
        if capacity < 1:
            raise ValueError(f"queue {name!r}: capacity must be at least 1, got {capacity}")
        self.name = name
        self.capacity = capacity
        self.item_type = item_type
        self.closed = False
        self._items: deque[T] = deque()
        self._room, self._filled = _Turns(capacity), _Turns(0)
        self._count_put = self._count_taken = 0

    def statistics(self) -> QueueStatistics:
        return QueueStatistics(
            len(self._items), self.capacity, self._count_put, self._count_taken, len(self._room), len(self._filled)
        )

    async def put(self, item: T) -> None:
        """Wait for room, then add. Raises WrongItem for an item of another type, QueueClosed after `close()`."""
        self._check(item)
        await self._room.take()
        if self.closed:
            raise QueueClosed(f"queue {self.name!r} is closed; nothing more can be put into it")
        self._items.append(item)
        self._count_put += 1
        self._filled.give()

    async def get(self) -> T:
        """Wait for an item. Raises QueueClosed once the queue is closed and empty."""
        if not await self._filled.take():
            raise QueueClosed(f"queue {self.name!r} is closed and empty")
        return self._pop()

    async def get_all(self) -> list[T]:
        """Wait for an item, then take all that nobody else waits for. Raises QueueClosed once closed and empty."""
        found = [await self.get()]
        while self._filled.take_now():
            found.append(self._pop())
        return found

    def close(self) -> None:
        """Refuse further puts and wake everybody. Closing twice does nothing."""
        self.closed = True
        self._room.close()
        self._filled.close()

    def _check(self, item: object) -> None:
        if not isinstance(item, self.item_type):
            raise WrongItem(
                f"queue {self.name!r} carries {self.item_type.__name__}, not {type(item).__name__}; "
                f"put a {self.item_type.__name__} or annotate the queue as Queue[{type(item).__name__}]"
            )

    def _pop(self) -> T:
        self._count_taken += 1
        self._room.give()
        return self._items.popleft()


class _Turns:
    """A number of turns, taken one at a time in the order of asking. Closed: nobody waits for one any more."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._closed = False
        self._waiters: deque[asyncio.Future[bool]] = deque()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiters)

    def take_now(self) -> bool:
        """A turn if one is free and nobody waits for it."""
        if not self._count:
            return False
        self._count -= 1
        return True

    async def take(self) -> bool:
        """Wait for a turn; False if there will be none. A turn that comes with a cancellation goes to the next."""
        if self._closed or self._count:
            return self.take_now()
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.cancelled() and waiter.result():
                self.give()
            raise

    def give(self) -> None:
        """One more turn, for the first who waits or for whoever asks next."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():  # else it is being cancelled
                waiter.set_result(True)
                return
        self._count += 1

    def close(self) -> None:
        self._closed = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(False)
        self._waiters.clear()
