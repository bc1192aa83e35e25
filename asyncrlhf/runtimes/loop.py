"""What runs beside an engine in every runtime: it takes commands in order, answers them, and lets the engine work.

A thread (inproc) or a process (local) calls `EngineLoop.run`, which waits for commands while the engine has no work
and calls `step` between commands while it has. The verbs of a RewardEngine run side by side, on an event loop.
"""

from __future__ import annotations

import asyncio
import os
import queue
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from asyncrlhf.abc import Engine, EngineSpec, GenerateEngine, RewardEngine
from asyncrlhf.errors import AsyncRLHFError, GroupError
from asyncrlhf.messages import Busy, EngineEvent, import_object

__all__ = ("Call", "Cancel", "Command", "Commands", "EngineLoop", "Outbox", "build")

RETURNS_EVENTS = ("add", "commit", "sleep")
"""Verbs whose result is a list of events."""
WORTH_SAYING = 0.1
"""Seconds of decoding that are reported beside other events."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Run a method and answer under `key`, which only the runtime understands."""

    key: Any
    verb: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this call any more."""

    key: Any


Command = Call | Cancel
Commands = queue.SimpleQueue[Command | None]
"""None: end."""


class Outbox(Protocol):
    """Where an engine's loop puts what it has to say. Everything arrives in the order it was put."""

    def result(self, key: Any, value: Any, events: Sequence[EngineEvent] = ()) -> None:
        """The answer to a call, behind these events, in one message: who waits for it is not kept by what it cost."""
        ...

    def error(self, key: Any, error: AsyncRLHFError) -> None: ...

    def events(self, events: Sequence[EngineEvent]) -> None: ...


def build(spec: EngineSpec) -> Engine:
    """The engine of a spec, on its core and with its threads. Raises whatever its constructor raises."""
    if spec.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {spec.core})
    kind = import_object(spec.engine)
    kind.use_threads(spec.threads)
    return kind(spec.options)


def described(spec: EngineSpec, error: BaseException) -> AsyncRLHFError:
    """An error of an engine as callers see it: asyncrlhf's own as they are, others with group, rank and traceback."""
    if isinstance(error, AsyncRLHFError):
        return error
    trace = "".join(traceback.format_exception(error))
    return GroupError(f"group {spec.group!r}, rank {spec.rank}: {type(error).__name__}: {error}\n{trace}")


class EngineLoop:
    """One engine's life after it was built."""

    def __init__(self, spec: EngineSpec, engine: Engine, commands: Commands, outbox: Outbox) -> None:
        self._spec, self._engine, self._commands, self._outbox = spec, engine, commands, outbox
        self._busy: tuple[float, float, int] | None = None

    def run(self) -> None:
        """Until the command None. Raises what broke the engine, a GroupError: whoever runs this says so, to those whose
        calls are in flight and to their group at once."""
        if isinstance(self._engine, RewardEngine):
            asyncio.run(_serve(self._spec, self._engine, self._commands, self._outbox))
        else:
            self._work(self._engine if isinstance(self._engine, GenerateEngine) else None)

    def _work(self, sampler: GenerateEngine | None) -> None:
        while True:
            works = sampler is not None and sampler.has_work and not sampler.still
            if not works:
                self._flush_busy()
            while True:
                try:
                    command = self._commands.get(block=not works)
                except queue.Empty:
                    break
                if command is None:
                    return
                if isinstance(command, Call):  # one that runs cannot be cancelled
                    self._execute(command)
                works = sampler is not None and sampler.has_work and not sampler.still
            assert sampler is not None
            started = time.perf_counter()
            try:
                events = sampler.step()
            except Exception as error:
                raise described(self._spec, error) from error
            self._add_busy(started, time.perf_counter())
            if events:
                self._flush_busy(events)

    def _execute(self, call: Call) -> None:
        started = time.perf_counter()
        try:
            result = getattr(self._engine, call.verb)(*call.arguments)
        except AsyncRLHFError as error:
            self._outbox.error(call.key, error)
            return
        except Exception as error:
            raise described(self._spec, error) from error
        events: list[EngineEvent] = [Busy(start=started, end=time.perf_counter(), work=call.verb)]
        if call.verb in RETURNS_EVENTS:
            events, result = [*events, *result], None
        self._outbox.result(call.key, result, [*self._take_busy(), *events])

    def _add_busy(self, start: float, end: float) -> None:
        """Decoding steps that follow each other within a millisecond are one slice."""
        if self._busy is not None and start - self._busy[1] < 1e-3 and end - self._busy[0] < 0.25:
            self._busy = (self._busy[0], end, self._busy[2] + 1)
        else:
            self._flush_busy()
            self._busy = (start, end, 1)

    def _flush_busy(self, events: Sequence[EngineEvent] = ()) -> None:
        out = [*self._take_busy(WORTH_SAYING if events else 0.0), *events]
        if out:
            self._outbox.events(out)

    def _take_busy(self, at_least: float = 0.0) -> list[EngineEvent]:
        """The slice that is being added to, if it is of so many seconds."""
        if self._busy is None or self._busy[1] - self._busy[0] < at_least:
            return []
        start, end, _ = self._busy
        self._busy = None
        return [Busy(start=start, end=end, work="generate")]


async def _serve(spec: EngineSpec, engine: RewardEngine, commands: Commands, outbox: Outbox) -> None:
    """Verbs side by side; ends with the command None, giving up what still runs.

    None of them is Busy: a reward waits for a place, a thread, the interpreter or another machine, and nobody here can
    tell how much of its time was computing. `leases/scoring` shows whether a run waits for its rewards.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    tasks: dict[Any, asyncio.Task[None]] = {}
    broken: list[BaseException] = []

    def take(command: Command | None) -> None:
        if command is None:
            ended.set()
        elif isinstance(command, Cancel):
            if command.key in tasks:
                tasks[command.key].cancel()
        else:
            task = loop.create_task(answer(command))
            tasks[command.key] = task
            task.add_done_callback(lambda _: tasks.pop(command.key))

    async def answer(call: Call) -> None:
        try:
            result = getattr(engine, call.verb)(*call.arguments)
            if asyncio.iscoroutine(result):
                result = await cast("Any", result)
        except AsyncRLHFError as error:
            outbox.error(call.key, error)
        except Exception as error:
            outbox.error(call.key, described(spec, error))
            broken.append(error)
            ended.set()
        else:
            outbox.result(call.key, result)

    pump = loop.run_in_executor(None, _pump, commands, lambda command: loop.call_soon_threadsafe(take, command))
    await ended.wait()
    for task in list(tasks.values()):
        task.cancel()
    if tasks:
        await asyncio.wait(list(tasks.values()), timeout=1.0)
    if broken:
        commands.put(None)
        await pump
        raise described(spec, broken[0]) from broken[0]
    await pump


def _pump(commands: Commands, give: Callable[[Command | None], object]) -> None:
    while (command := commands.get()) is not None:
        give(command)
    give(None)
