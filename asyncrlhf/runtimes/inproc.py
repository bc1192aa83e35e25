"""The in-process runtime: every engine in a thread of its own. For tests, debugging and small runs.

A caller waits on the event loop for its reply; the engine's thread runs its EngineLoop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from asyncrlhf.abc import Engine, EngineHandle, EngineSpec, InFlight, OnEvents, Place
from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.messages import EngineEvent
from asyncrlhf.runtimes.handle import Calls, started
from asyncrlhf.runtimes.loop import Call, Cancel, Commands, EngineLoop, build, described

__all__ = ("InprocRuntime", "ThreadEngine")

BUILDING = threading.Lock()
"""Engines of one process are built one after another: model loaders change process-wide state while they work."""


class InprocRuntime:
    """Spawns ThreadEngines. `grace`: seconds that closing an engine waits for what its thread is doing."""

    transport = "asyncrlhf.weights.inproc:InprocTransfer"

    def __init__(self, *, grace: float = 5.0) -> None:
        self._engines: list[ThreadEngine] = []
        self._grace = grace

    def expect(self, places: Sequence[Place]) -> None:
        """Threads need no head start."""

    async def spawn(self, spec: EngineSpec, on_events: OnEvents) -> EngineHandle:
        engine = ThreadEngine(spec, on_events, grace=self._grace)
        self._engines.append(engine)
        await started(engine, self._engines)
        return engine

    def in_flight(self) -> list[InFlight]:
        return [call for engine in self._engines for call in engine.calls.in_flight()]

    async def close(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(engine.close())

    def kill(self) -> None:
        """Threads end with their process."""


class ThreadEngine:
    """One engine and its thread. A thread that hangs cannot be killed: `close` abandons it (it is a daemon)."""

    address = "127.0.0.1"

    def __init__(self, spec: EngineSpec, on_events: OnEvents, *, grace: float = 5.0) -> None:
        self.spec = spec
        self.calls = Calls(spec, on_events)
        self._grace = grace
        self._loop = asyncio.get_running_loop()
        self._commands: Commands = Commands()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name=f"{spec.group}/{spec.rank}", daemon=True)
        self._thread.start()

    async def start(self) -> None:
        await self.calls.ready

    async def call(self, verb: str, *arguments: Any) -> Any:
        key, reply = self.calls.open(verb)
        self._commands.put(Call(key, verb, arguments))
        try:
            return await reply
        except asyncio.CancelledError:
            self._commands.put(Cancel(key))
            raise

    async def close(self, *, at_once: bool = False) -> None:
        if self.calls.close():
            self._commands.put(None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._ended), timeout=0.0 if at_once else self._grace)
            self._thread.join(timeout=1.0)

    # ---- in the engine's thread --------------------------------------------------------------------------------
    def _main(self) -> None:
        engine: Engine | None = None
        try:
            with BUILDING:
                engine = built = build(self.spec)
            self._post(self.calls.built)
            EngineLoop(self.spec, built, self._commands, self).run()
        except BaseException as error:  # the boundary of the thread: everything becomes a message
            self._post(self.calls.fail, described(self.spec, error))
        finally:
            try:
                if engine is not None:
                    engine.close()
            except Exception as error:  # nobody awaits it any more: the loop's handler logs it
                context = {"message": f"{self.spec.group}/{self.spec.rank} could not be closed", "exception": error}
                self._post(self._loop.call_exception_handler, context)
            self._post(_set, self._ended)

    def result(self, key: Any, value: Any, events: Sequence[EngineEvent] = ()) -> None:
        if events:
            self._post(self.calls.events, events)
        self._post(self.calls.result, key, value)

    def error(self, key: Any, error: AsyncRLHFError) -> None:
        self._post(self.calls.error, key, error)

    def events(self, events: Sequence[EngineEvent]) -> None:
        self._post(self.calls.events, events)

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function, *arguments)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
