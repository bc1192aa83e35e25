"""What the caller's side of every engine keeps, on the event loop: calls in flight, and how the engine ended."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from asyncrlhf.abc import EngineSpec, InFlight, OnEvents
from asyncrlhf.errors import AsyncRLHFError, ConfigError, EngineLost, GroupError, SampleError
from asyncrlhf.messages import EngineEvent, Failed

__all__ = ("Calls", "Startable", "started", "unsendable")


class Calls:
    """Replies by key. Once the engine has failed or was closed nothing more is passed on, and every call is refused."""

    def __init__(self, spec: EngineSpec, on_events: OnEvents) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._spec, self._on_events = spec, on_events
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._asked: dict[int, InFlight] = {}
        self._numbers = itertools.count()
        self._failure: AsyncRLHFError | None = None

    @property
    def was_built(self) -> bool:
        return self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None

    @property
    def ended(self) -> bool:
        return self._failure is not None

    def open(self, verb: str) -> tuple[int, asyncio.Future[Any]]:
        """A new call's key and reply. Raises GroupError when the engine has ended."""
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        loop = asyncio.get_running_loop()
        key, reply = next(self._numbers), loop.create_future()
        self._open[key] = reply
        self._asked[key] = InFlight(f"{self._spec.group}/{self._spec.rank}", verb, loop.time())

        def forget(_: object) -> None:
            del self._open[key], self._asked[key]

        reply.add_done_callback(forget)
        return key, reply

    def in_flight(self) -> list[InFlight]:
        """The calls that have not been answered yet."""
        return list(self._asked.values())

    def built(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def result(self, key: int, value: Any) -> None:
        if key in self._open and not self._open[key].done():
            self._open[key].set_result(value)

    def error(self, key: int, error: AsyncRLHFError) -> None:
        if key in self._open and not self._open[key].done():
            self._open[key].set_exception(error)

    def events(self, events: Sequence[EngineEvent]) -> None:
        """Nothing that an engine says after its end is passed on."""
        if self._failure is None:
            self._on_events(events)

    def fail(self, error: AsyncRLHFError) -> None:
        """The engine is broken: so are its calls in flight. The first failure is what counts."""
        first = self._failure is None
        self._failure = self._failure or error
        was_built = self.was_built
        if not self.ready.done():
            self.ready.set_exception(error)
        self._fail_calls(error)
        if first and was_built:
            self._on_events([Failed(reason=str(error), lost=isinstance(error, EngineLost))])

    def close(self) -> bool:
        """Refuse everything from now on; False if the engine has ended before."""
        first = self._failure is None
        message = f"group {self._spec.group!r}, rank {self._spec.rank}: the engine has been closed"
        self._failure = self._failure or GroupError(message)
        self._fail_calls(self._failure)
        return first

    def _fail_calls(self, error: AsyncRLHFError) -> None:
        for reply in list(self._open.values()):
            if not reply.done():
                reply.set_exception(error)


class Startable(Protocol):
    """A handle before its engine is built."""

    spec: EngineSpec
    calls: Calls

    async def start(self) -> None:
        """Wait until the engine is built. Raises what its constructor raised."""
        ...

    async def close(self, *, at_once: bool = False) -> None: ...


async def started(engine: Startable, others: Iterable[Startable]) -> None:
    """Start it, or leave nothing of it when the caller is cancelled. A configuration that another engine was built from
    is not what is wrong: raises GroupError then, and else what the constructor raised."""
    try:
        await engine.start()
    except asyncio.CancelledError:
        await engine.close()
        raise
    except ConfigError as error:
        spec = engine.spec
        if any(other.spec == spec and other.calls.was_built for other in others):
            raise GroupError(f"group {spec.group!r}, rank {spec.rank}: {error}") from error
        raise


def unsendable(spec: EngineSpec, verb: str, error: Exception) -> SampleError:
    """The error of arguments that cannot be pickled."""
    return SampleError(
        f"group {spec.group!r}: what {verb} is given cannot be sent to another process "
        f"({type(error).__name__}: {error}); use plain data"
    )
