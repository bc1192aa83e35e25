"""The turn of a group that shares its devices with others: whoever computes there has it, and the others sleep.

A group waits for its turn before a call to its engines, and never while it holds another's. Who is next is not decided
here (control/turns.py).
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import NoReturn, Protocol

from asyncrlhf.errors import AsyncRLHFError

__all__ = ("ALONE", "Tenant", "Turn", "end_the_run")


class Turn(Protocol):
    """One group's side of it."""

    shared: bool
    """False: the devices are the group's own, and nobody ever waits."""

    @property
    def offload(self) -> bool:
        """Whether who leaves takes its memory along; else it only ends what it is at."""
        ...

    def taken(self) -> AbstractAsyncContextManager[None]:
        """Wait for the turn, and have it. Calls of one group share it."""
        ...

    def kept(self, leave: asyncio.Event) -> AbstractAsyncContextManager[None]:
        """Wait for the turn of a group that computes on its own, and have it until `leave` is set: by the group when it
        has nothing to do, or by the turns when others are due."""
        ...

    def note(self) -> None:
        """What the group wants has changed."""
        ...


class Alone:
    """Devices of one's own."""

    shared, offload = False, True

    def taken(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def kept(self, leave: asyncio.Event) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def note(self) -> None:
        """Nobody waits for it."""


ALONE = Alone()


class Tenant(Protocol):
    """What takes turns: a group's engines, all of them at once."""

    turn: Turn

    async def rest(self) -> None:
        """Leave the devices, also when an earlier `rest` or `resume` was cut short. An engine that cannot is ended.
        Whoever comes next awaits this, and is told of none of it: once the tenant serves, nothing is raised."""
        ...

    async def resume(self) -> None:
        """Come back. Engines that have not been started yet, or are gone, have nothing to come back with."""
        ...


async def end_the_run(error: AsyncRLHFError) -> NoReturn:
    """End the run with this error from a callback, and let whoever awaits this wait for that end: it has not failed."""
    loop = asyncio.get_running_loop()
    loop.call_soon(_raise, error)
    await loop.create_future()
    raise AssertionError("nothing completes it")


def _raise(error: AsyncRLHFError) -> NoReturn:
    raise error
