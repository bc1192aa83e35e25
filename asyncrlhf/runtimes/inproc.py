"""The in-process runtime: every engine in a thread of its own. For tests, debugging and small runs.

A caller waits on the event loop for its reply; the engine's thread waits for commands while it has no work, and calls
`step` between commands while it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from asyncrlhf.abc import Engine, EngineHandle, EngineSpec, GenerateEngine, OnEvents
from asyncrlhf.errors import AsyncRLHFError, ConfigError, GroupError
from asyncrlhf.messages import Busy, EngineEvent, Failed, import_object

__all__ = ("InprocRuntime", "ThreadEngine")

Command = tuple[str, tuple[Any, ...], asyncio.Future[Any]]
RETURNS_EVENTS = ("add", "commit")
BUILDING = threading.Lock()
"""Engines of one process are built one after another: model loaders change process-wide state while they work."""


class InprocRuntime:
    """Spawns ThreadEngines. `grace`: seconds that closing an engine waits for what its thread is doing."""

    def __init__(self, *, grace: float = 5.0) -> None:
        self._engines: list[ThreadEngine] = []
        self._grace = grace

    async def spawn(self, spec: EngineSpec, on_events: OnEvents) -> EngineHandle:
        engine = ThreadEngine(spec, on_events, grace=self._grace)
        self._engines.append(engine)
        try:
            await engine.ready
        except asyncio.CancelledError:
            await engine.close()
            raise
        except ConfigError as error:
            if any(other.spec == spec and other.was_built for other in self._engines):  # it is not the configuration
                raise GroupError(f"group {spec.group!r}, rank {spec.rank}: {error}") from error
            raise
        return engine

    async def close(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(engine.close())


class ThreadEngine:
    """One engine and its thread. A thread that hangs cannot be killed: `close` abandons it (it is a daemon)."""

    def __init__(self, spec: EngineSpec, on_events: OnEvents, *, grace: float = 5.0) -> None:
        self.spec = spec
        self._on_events, self._grace = on_events, grace
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._open: set[asyncio.Future[Any]] = set()
        self._failure: str | None = None
        self._busy: tuple[float, float, int] | None = None
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name=f"{spec.group}/{spec.rank}", daemon=True)
        self._thread.start()

    @property
    def was_built(self) -> bool:
        return self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None

    async def call(self, verb: str, *arguments: Any) -> Any:
        if self._failure is not None:
            raise GroupError(self._failure)
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._open.add(reply)
        reply.add_done_callback(self._open.discard)
        self._commands.put((verb, arguments, reply))
        return await reply

    async def close(self) -> None:
        if self._failure is None:
            self._failure = f"group {self.spec.group!r}, rank {self.spec.rank}: the engine has been closed"
            self._commands.put(None)
        for reply in list(self._open):
            self._set_error(reply, GroupError(self._failure))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._ended), timeout=self._grace)
            self._thread.join(timeout=1.0)

    # ---- on the event loop -------------------------------------------------------------------------------------
    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function, *arguments)

    def _tell(self, events: Sequence[EngineEvent]) -> None:
        """Nothing that a closed engine still says is passed on."""
        if self._failure is None:
            self._on_events(events)

    @staticmethod
    def _set_result(future: asyncio.Future[Any], result: Any) -> None:
        if not future.done():
            future.set_result(result)

    @staticmethod
    def _set_error(future: asyncio.Future[Any], error: BaseException) -> None:
        if not future.done():
            future.set_exception(error)

    def _fail(self, error: AsyncRLHFError) -> None:
        first = self._failure is None
        self._failure = self._failure or str(error)
        self._set_error(self.ready, error)
        for reply in list(self._open):
            self._set_error(reply, error)
        if first and self.was_built:
            self._on_events([Failed(reason=str(error))])

    # ---- in the engine's thread --------------------------------------------------------------------------------
    def _main(self) -> None:
        engine: Engine | None = None
        try:
            if self.spec.core is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {self.spec.core})
            with BUILDING:
                kind = import_object(self.spec.engine)
                kind.use_threads(self.spec.threads)
                try:
                    engine = built = kind(self.spec.options)
                except ConfigError as error:
                    self._post(self._fail, error)
                    return
            self._post(self._set_result, self.ready, None)
            self._loop_forever(built)
        except BaseException as error:  # the boundary of the thread: everything becomes a message
            self._post(self._fail, self._group_error(error))
        finally:
            try:
                if engine is not None:
                    engine.close()
            except Exception as error:  # nobody awaits it any more: the loop's handler logs it
                context = {"message": f"{self.spec.group}/{self.spec.rank} could not be closed", "exception": error}
                self._post(self._loop.call_exception_handler, context)
            self._post(self._set_result, self._ended, None)

    def _loop_forever(self, engine: Engine) -> None:
        sampler = engine if isinstance(engine, GenerateEngine) else None
        while True:
            works = sampler is not None and sampler.has_work
            if not works:
                self._flush_busy()
            while True:
                try:
                    command = self._commands.get(block=not works)
                except queue.Empty:
                    break
                if command is None:
                    return
                self._execute(engine, command)
                works = sampler is not None and sampler.has_work
            assert sampler is not None
            started = time.perf_counter()
            events = sampler.step()
            self._add_busy(started, time.perf_counter())
            if events:
                self._flush_busy(events)

    def _execute(self, engine: Engine, command: Command) -> None:
        verb, arguments, reply = command
        started = time.perf_counter()
        try:
            result = getattr(engine, verb)(*arguments)
        except AsyncRLHFError as error:
            self._post(self._set_error, reply, error)
            return
        except Exception as error:
            failure = self._group_error(error)
            self._post(self._set_error, reply, failure)
            raise failure from error
        self._flush_busy([Busy(start=started, end=time.perf_counter(), work=verb)])
        if verb in RETURNS_EVENTS:
            self._post(self._tell, list(result))
            result = None
        self._post(self._set_result, reply, result)

    def _add_busy(self, start: float, end: float) -> None:
        """Decoding steps that follow each other within a millisecond are one slice."""
        if self._busy is not None and start - self._busy[1] < 1e-3 and end - self._busy[0] < 0.25:
            self._busy = (self._busy[0], end, self._busy[2] + 1)
        else:
            self._flush_busy()
            self._busy = (start, end, 1)

    def _flush_busy(self, events: Sequence[EngineEvent] = ()) -> None:
        out: list[EngineEvent] = []
        if self._busy is not None and (not events or self._busy[1] - self._busy[0] > 0.1):
            out.append(Busy(start=self._busy[0], end=self._busy[1], work="generate"))
            self._busy = None
        out += events
        if out:
            self._post(self._tell, out)

    def _group_error(self, error: BaseException) -> GroupError:
        if isinstance(error, GroupError):
            return error
        trace = "".join(traceback.format_exception(error))
        return GroupError(f"group {self.spec.group!r}, rank {self.spec.rank}: {type(error).__name__}: {error}\n{trace}")
