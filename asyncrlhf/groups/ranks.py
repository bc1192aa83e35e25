"""Ranks: the engines of one trained model, called as if they were one.

A call waits for all ranks. When one fails the others may be waiting for it inside the computation, where nobody can
reach them: they get a moment to say what they know, and are then ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrlhf.abc import EngineHandle, EngineSpec, Runtime
from asyncrlhf.errors import AsyncRLHFError, ConfigError, DataLost, EngineLost, GroupError
from asyncrlhf.groups.group import spawned, within
from asyncrlhf.groups.protocols import protocol
from asyncrlhf.messages import EngineEvent
from asyncrlhf.messages.layout import ParallelLayout

__all__ = ("VERBS", "Ranks", "start_ranks")

VERBS: Mapping[str, str] = {
    "step": "3d",
    "logprobs": "3d",
    "scores": "3d",
    "apply": "lead",
    "export": "announce",
    "offload": "lead",
    "onload": "lead",
    "finish": "lead",
    "save_model": "lead",
    "save_state": "lead",
    "load_state": "lead",
}
"""How each verb of a TrainEngine goes to its ranks: the name of a transfer protocol, or an import path."""
PATIENCE = 10.0
"""Seconds that the other ranks have to come back after one has failed."""
NO_LIMIT = 10 * 365 * 86400.0
"""Seconds that ranks wait for each other where the group sets no limit."""


async def start_ranks(
    runtime: Runtime,
    specs: Sequence[EngineSpec],
    layout: ParallelLayout,
    on_events: Callable[[int, Sequence[EngineEvent]], None],
    seconds: float | None,
    verbs: Mapping[str, str] = VERBS,
) -> EngineHandle:
    """Spawn the engines of one model and bring them together; one alone needs nobody. Raises as `spawned` does."""
    starting = [spawned(runtime, spec, partial(on_events, spec.rank), seconds) for spec in specs]
    outcome = await _together(starting, patience=0.0)
    if outcome.error is not None:
        await _end(handle for handle in outcome.results if handle is not None)
        raise outcome.error
    if len(specs) == 1:
        return outcome.results[0]
    ranks = Ranks(outcome.results, layout, verbs)
    group = f"group {specs[0].group!r}"
    try:
        await within(seconds, ranks.join(seconds), f"{group}: the meeting of its {len(specs)} ranks")
    except BaseException as error:
        await ranks.close(at_once=True)
        if isinstance(error, ConfigError):
            raise ConfigError(f"{group}: {error}") from error
        raise
    return ranks


async def _end(handles: Iterable[EngineHandle], *, at_once: bool = True) -> None:
    async with asyncio.TaskGroup() as tasks:
        for handle in handles:
            tasks.create_task(handle.close(at_once=at_once))


class Ranks:
    """An EngineHandle whose verbs go to all ranks, each by its protocol."""

    def __init__(
        self, handles: Sequence[EngineHandle], layout: ParallelLayout, verbs: Mapping[str, str] = VERBS
    ) -> None:
        """`handles`: by rank. `verbs`: further or other protocols than VERBS. Raises ConfigError if there is no such
        protocol."""
        if len(handles) != layout.ranks:
            raise GroupError(f"{len(handles)} engines for {layout.ranks} ranks of {layout}")
        self.layout = layout
        self.closed = False
        self._handles = handles
        self._verbs = {verb: protocol(name) for verb, name in {**VERBS, **verbs}.items()}

    @property
    def spec(self) -> EngineSpec:
        """Of rank 0."""
        return self._handles[0].spec

    @property
    def address(self) -> str:
        """Of rank 0."""
        return self._handles[0].address

    async def join(self, seconds: float | None) -> None:
        """Bring the engines together, at rank 0; they give each other up after `seconds`."""
        host, count = self.address, len(self._handles)
        port = await self._handles[0].call("rendezvous", host, count)
        patience = NO_LIMIT if seconds is None else seconds
        await self._ask("join", [(host, port, rank, count, patience) for rank in range(count)])

    async def call(self, verb: str, *arguments: Any) -> Any:
        found = self._verbs.get(verb)
        if found is None:
            raise GroupError(f"{verb!r} has no transfer protocol; give Ranks one beside {', '.join(self._verbs)}")
        results = await self._ask(verb, found.distribute(self.layout, arguments))
        return found.collect(self.layout, arguments, results)

    async def close(self, *, at_once: bool = False) -> None:
        self.closed = True
        await _end(self._handles, at_once=at_once)

    async def _ask(self, verb: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = [handle.call(verb, *own) for handle, own in zip(self._handles, arguments, strict=True)]
        outcome = await _together(calls, patience=PATIENCE)
        error = outcome.error
        if error is None:
            return outcome.results
        same_for_all = len(outcome.errors) == len(calls) and all(isinstance(e, DataLost) for e in outcome.errors)
        if outcome.missing or (isinstance(error, GroupError) and not same_for_all):
            await self.close(at_once=True)
        if outcome.missing and not isinstance(error, EngineLost):
            where = f"group {self.spec.group!r}: {verb} of ranks {outcome.missing} was still open {PATIENCE:g} s after"
            raise EngineLost(f"{where} another had failed: {error}") from error
        raise error


@dataclass(slots=True)
class _Outcome:
    results: list[Any]
    errors: list[AsyncRLHFError]
    missing: list[int]
    """Calls given up."""

    @property
    def error(self) -> AsyncRLHFError | None:
        """What says most about why calls have failed: the end of a process, else whatever came first."""
        lost = (error for error in self.errors if isinstance(error, EngineLost))
        return next(lost, self.errors[0] if self.errors else None)


async def _together(calls: Sequence[Awaitable[Any]], *, patience: float) -> _Outcome:
    """Await all calls, but once one has failed the others for no longer than `patience` seconds."""
    outcome = _Outcome([None] * len(calls), [], [])
    failed = asyncio.Event()

    async def one(number: int, call: Awaitable[Any]) -> None:
        try:
            outcome.results[number] = await call
        except AsyncRLHFError as error:
            outcome.errors.append(error)
            failed.set()

    async def watch(running: Sequence[asyncio.Task[None]]) -> None:
        await failed.wait()
        await asyncio.sleep(patience)
        for number, call in enumerate(running):
            if call.cancel():
                outcome.missing.append(number)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(number, call)) for number, call in enumerate(calls)]
        watching = tasks.create_task(watch(running))
        await asyncio.wait(running)
        watching.cancel()
    return outcome
