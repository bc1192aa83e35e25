"""Algorithm: two coroutines, one for each pool, and what a run is: their TaskGroup and how it ends.

`generate` workers wait at the prompts' gate, `train` waits for batches; neither knows the other. The run ends when
`train` returns; a worker's exception costs its lease, a group's failure costs the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar, cast, overload

import msgspec

from asyncrlhf.errors import AsyncRLHFError, DataLost, LeaseLost, SampleError, Stalled
from asyncrlhf.flow.gate import Gate
from asyncrlhf.flow.holding import oldest

__all__ = ("Algorithm", "Stage", "cause_of", "gather", "run_algorithm", "state_numbers")

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
Stage = Callable[[], Awaitable[None]]
LAST_SECONDS = 30.0
"""Seconds that services have to end after training; what still waits for an engine then is cancelled."""
IDLE_RETURNS = 1000
"""Returns of a worker in a row, while no prompt is taken, that end the run."""


@overload
async def gather(first: Awaitable[A], second: Awaitable[B], /) -> tuple[A, B]: ...
@overload
async def gather(first: Awaitable[A], second: Awaitable[B], third: Awaitable[C], /) -> tuple[A, B, C]: ...
@overload
async def gather(*awaitables: Awaitable[A]) -> tuple[A, ...]: ...
async def gather(*awaitables: Awaitable[Any]) -> tuple[Any, ...]:
    """Await all at once; if one fails, the others are cancelled and its failure is raised."""

    async def awaited(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    task = asyncio.current_task()
    assert task is not None
    cancelling = task.cancelling()
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [
                tasks.create_task(awaitable if asyncio.iscoroutine(awaitable) else awaited(awaitable))
                for awaitable in awaitables
            ]
    except BaseExceptionGroup as errors:
        while task.cancelling() > cancelling:  # by the TaskGroup, which forgets it up to Python 3.12
            task.uncancel()
        raise errors.exceptions[0] from None
    return tuple(done.result() for done in started)


class Algorithm(ABC):
    """Subclass it as a keyword-only dataclass whose fields are the groups, queues and settings it needs.

    The launcher reads the fields: a group is built from `[groups.<field>]`, a queue from its type, and everything else
    is a setting that `[settings]` may change.
    """

    requires: ClassVar[tuple[str, ...]] = ()
    """Configuration keys that must be set, dotted, for example ("data.response",)."""
    state: Any = None
    """What the algorithm learns about itself (an adaptive coefficient, running statistics): a field
    `state: MyState`, a frozen Struct with a default. It is saved with the weights and restored on resume; its numbers
    are in metrics.jsonl, as "state/<field>"."""

    @abstractmethod
    async def generate(self) -> None:
        """Turn prompts into experience: `async for prompt in self.prompts: ... await self.experience.put(...)`.
        Runs as many workers as leases may be live."""

    @abstractmethod
    async def train(self) -> None:
        """Turn experience into weights: `async for batch in self.experience.batches(): ...` and, last in its body,
        `await self.coordinator.publish(...)`. Runs once."""

    def stages(self) -> Sequence[Stage]:
        """Further coroutines between the two, each run with as many workers as `generate`."""
        return ()


def state_numbers(state: object) -> dict[str, float]:
    """The numbers in an algorithm's state by field name, those of a Struct inside it as "field/inner"."""
    found: dict[str, float] = {}
    for name in state.__struct_fields__ if isinstance(state, msgspec.Struct) else ():
        value = getattr(state, name)
        if isinstance(value, int | float):
            found[name] = float(value)
        found |= {f"{name}/{inner}": number for inner, number in state_numbers(value).items()}
    return found


async def run_algorithm(
    algorithm: Algorithm,
    gate: Gate,
    *,
    workers: int,
    services: Sequence[Stage],
    start: Stage,
    finish: Stage,
    close: Sequence[Callable[[], None]],
    stall_timeout: float,
    waits: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Run until `train` returns, then end the workers and services.

    `services` (group actors, coordinator) run beside it; `start` commits the first weights before any lease is
    granted; `finish` awaits what is still under way when training is over; `close` ends the services; `waits` says, a
    line each, who waits for whom. Raises what ended the run: a RunEnded, a GroupError, or the error of `train`.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_service(service), name=_name(service)) for service in services]
            callbacks = tasks.create_task(_watch_callbacks(), name="callback watch")
            await start()
            watch = tasks.create_task(_watch(gate, stall_timeout, waits), name="stall watch")
            pool = [
                tasks.create_task(_work(stage, gate), name=f"{_name(stage)}-{number}")
                for stage in (algorithm.generate, *algorithm.stages())
                for number in range(workers)
            ]
            await algorithm.train()
            gate.require_closed()
            gate.stop()
            watch.cancel()
            for worker in pool:
                worker.cancel()
            await asyncio.wait(pool)
            await finish()
            for function in close:
                function()
            if running:
                _, hanging = await asyncio.wait(running, timeout=LAST_SECONDS)
                for service in hanging:
                    service.cancel()
            callbacks.cancel()
    except BaseExceptionGroup as errors:
        raise cause_of(errors) from errors


async def _work(stage: Stage, gate: Gate) -> None:
    """One worker. Consumes leases through the iterators of its stage; waits at the gate; ends with the run.

    The stage runs in a task of its own, which the gate cancels when its lease is lost: that is data, and the worker
    goes on. Whoever cancels the worker itself ends both.
    """
    idle_returns, granted = 0, gate.granted
    while not gate.ended:
        task = await _run_alone(stage)
        error = RuntimeError("cancelled by something it awaits") if task.cancelled() else task.exception()
        if isinstance(error, BaseExceptionGroup):  # of a TaskGroup of the stage's own
            error = cause_of(cast("BaseExceptionGroup[BaseException]", error))
        if gate.was_lost(task) or isinstance(error, LeaseLost):
            gate.filter_held(task)
        elif error is None:
            gate.filter_held(task)
            idle_returns, granted = (idle_returns + 1 if granted == gate.granted else 0), gate.granted
            if idle_returns > IDLE_RETURNS:
                raise RuntimeError(
                    f"{_name(stage)}() has returned {idle_returns} times, and nobody takes a prompt; loop over "
                    "`async for prompt in self.prompts` until it ends"
                )
        elif _ends_the_run(error) or not gate.fail(task, error):
            raise error
        await asyncio.sleep(0)


def _ends_the_run(error: BaseException) -> bool:
    """Else it is the lease's own failure, or that of what was sampled under it: counted and named, and the worker goes
    on."""
    return isinstance(error, AsyncRLHFError) and not isinstance(error, SampleError | DataLost)


async def _run_alone(stage: Stage) -> asyncio.Task[None]:
    """The stage's task, done; cancelling the caller cancels and awaits it. Not in a TaskGroup, which would take its
    error for the run's."""
    task = asyncio.create_task(_service(stage), name=f"{_name(stage)} of a worker")
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # the caller's end is what counts, not this one's
        raise
    return task


async def _service(service: Stage) -> None:
    await service()


async def _watch(gate: Gate, stall_timeout: float, waits: Callable[[], Sequence[str]]) -> None:
    """Raises Stalled when the trainer waits and nothing has moved for `stall_timeout` seconds; it says who waits for
    whom."""
    loop = asyncio.get_running_loop()
    while True:
        since = gate.stands_since
        quiet = 0.0 if since is None else loop.time() - max(since, gate.last_moved)
        if quiet >= stall_timeout:
            raise Stalled(
                f"train step {gate.ledger.step} waits, and nothing has moved for {quiet:.0f} s "
                + "\n".join([f"(limits.stall_timeout = {stall_timeout:g} s); {oldest(gate.unfinished())}", *waits()])
            )
        await asyncio.sleep(stall_timeout - quiet)


async def _watch_callbacks() -> None:
    """Raises what a callback of the event loop raised (an engine's events, a timer): nobody else awaits those."""
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()
    before = loop.get_exception_handler()

    def caught(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" in context and isinstance(error, Exception) and not failed.done():
            failed.set_exception(error)
        elif before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(caught)
    try:
        await failed
    finally:
        loop.set_exception_handler(before)


def _name(stage: Stage) -> str:
    return getattr(stage, "__qualname__", repr(stage))


def cause_of(error: BaseException) -> BaseException:
    """Of all the errors in a group the one that names the end best: asyncrlhf's own first, then the first of all."""
    leaves = list(_leaves(error))
    named = [leaf for leaf in leaves if isinstance(leaf, AsyncRLHFError) and not isinstance(leaf, SampleError)]
    return (named or leaves)[0]


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _leaves(inner)
    else:
        yield error
