"""Group: a model group as an async actor. A verb is a put into its bounded inbox plus an awaited reply.

Callers wait for room in the inbox and then for the reply; the actor (`serve`) waits for requests and for its engines.
Control messages (publish, checkpoint) do not queue behind data: they go to the engines directly.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from asyncrlhf.abc import EngineHandle, EngineSpec, OnEvents, Runtime
from asyncrlhf.errors import ConfigError, GroupError, QueueClosed
from asyncrlhf.flow.queue import Queue, QueueStatistics
from asyncrlhf.messages import EngineEvent
from asyncrlhf.messages.engines import Busy
from asyncrlhf.observe.events import EngineBusy
from asyncrlhf.observe.log import EventLog

__all__ = ("Group", "Request", "TooLate", "answer", "emit_busy", "refuse", "spawned", "within")

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Request:
    """One verb on its way through an inbox."""

    verb: str
    arguments: tuple[Any, ...]
    reply: asyncio.Future[Any]
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by a trained group when it goes to the engine."""


class Group(ABC):
    """Base of the typed handles. `serve` runs in the run's TaskGroup until `close`."""

    def __init__(self, name: str, log: EventLog, *, inbox: int = 1024) -> None:
        self.name = name
        self.log = log
        self.emit = log.emit
        self._inbox = Queue(inbox, Request, name=f"{name}.inbox")

    def statistics(self) -> QueueStatistics:
        """How full the inbox is, and who waits for it."""
        return self._inbox.statistics()

    def close(self) -> None:
        """Take no further requests; `serve` ends when the inbox is empty."""
        self._inbox.close()

    async def serve(self) -> None:
        """Consumes requests, produces replies; waits for the inbox, unblocked by callers and by `close`."""
        while True:
            try:
                requests = await self._inbox.get_all()
            except QueueClosed:
                return
            await self.handle([request for request in requests if not request.reply.done()])

    @abstractmethod
    async def handle(self, requests: list[Request]) -> None:
        """Answer these requests, in order."""

    def beside(self, tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None], request: Request) -> None:
        """Answer a request beside the others; cancelling the caller cancels the work."""
        task = tasks.create_task(work, name=f"{self.name}.{request.verb}")
        request.reply.add_done_callback(lambda reply: task.cancel() if reply.cancelled() else None)

    async def ask(self, verb: str, *arguments: Any) -> Any:
        """Put a request and await its reply; cancelling the caller cancels the request."""
        return await (await self.put(verb, *arguments)).reply

    async def put(self, verb: str, *arguments: Any) -> Request:
        """Put a request, whose reply is to be awaited; cancelling that cancels the request."""
        request = Request(verb, arguments, asyncio.get_running_loop().create_future())
        await self._inbox.put(request)
        return request

    def emit_busy(self, rank: int, event: EngineEvent) -> bool:
        """Log an engine's compute time; True if the event was one."""
        return emit_busy(self.log, self.name, rank, event)


def emit_busy(log: EventLog, group: str, rank: int, event: EngineEvent) -> bool:
    """Log an engine's compute time; True if the event was one."""
    if not isinstance(event, Busy):
        return False
    log.emit(
        EngineBusy(
            group=group,
            rank=rank,
            start=log.elapsed(event.start),
            end=log.elapsed(event.end),
            work=event.work,
            token_count=event.token_count,
        )
    )
    return True


class TooLate(GroupError):
    """An engine has not answered in time."""


async def within(
    seconds: float | None,
    call: Awaitable[T],
    what: str,
    *,
    after: asyncio.Future[Any] | None = None,
    limit_is: str = "limits.stall_timeout =",
) -> T:
    """Await an engine at most `seconds` (None: for ever), counted from when `after` is done. Raises TooLate, naming
    `what` and what the `limit_is`, when it takes longer."""
    loop, open_ = asyncio.get_running_loop(), True
    try:
        async with asyncio.timeout(None) as limit:

            def begin(_: object) -> None:
                if open_ and seconds is not None:
                    limit.reschedule(loop.time() + seconds)

            if after is None or after.done():
                begin(after)
            else:
                after.add_done_callback(begin)
            try:
                return await call
            finally:
                open_ = False
    except TimeoutError:
        raise TooLate(
            f"{what} has not come back within {limit_is} {seconds:g} s; its engine hangs, or the limit is "
            "too low for this model"
        ) from None


async def spawned(runtime: Runtime, spec: EngineSpec, on_events: OnEvents, seconds: float | None) -> EngineHandle:
    """A new engine, within `seconds` (None: however long it takes). Raises GroupError with the original traceback,
    TooLate, or ConfigError, which then names the group."""
    try:
        return await within(
            seconds, runtime.spawn(spec, on_events), f"group {spec.group!r}, rank {spec.rank}: its start"
        )
    except ConfigError as error:
        raise ConfigError(f"group {spec.group!r}: {error}") from error


def answer(request: Request, result: Any) -> None:
    """Give the caller its result, if it still waits."""
    if not request.reply.done():
        request.reply.set_result(result)


def refuse(request: Request, error: BaseException) -> None:
    """Give the caller an error, if it still waits."""
    if not request.reply.done():
        request.reply.set_exception(error)
