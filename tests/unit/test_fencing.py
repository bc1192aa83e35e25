"""Fencing: which incarnation of an engine is sent weights, and which one joins."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from asyncrlhf.abc import EngineSpec
from asyncrlhf.control.fencing import Fencing
from asyncrlhf.errors import EngineLost, GroupError
from asyncrlhf.groups.answers import Replica
from asyncrlhf.groups.follower import Follower
from asyncrlhf.groups.turn import ALONE, Turn
from asyncrlhf.messages import EngineEvent, Failed, WeightHandle
from asyncrlhf.observe import EventLog, Fenced
from asyncrlhf.runtimes.handle import Calls
from tests.unit.virtual import settle, virtual

SPEC = EngineSpec(group="rollout", rank=0, engine="", options=None)
WEIGHTS = WeightHandle(version=0, checksum=1, changed=True, byte_count=4, transport="", payload={})


class Handle:
    """One process of the engine, which says what it is asked."""

    def __init__(self, faults: list[GroupError]) -> None:
        self.verbs: list[str] = []
        self._faults = faults
        self._closed = asyncio.Event()

    async def call(self, verb: str, *arguments: Any) -> None:
        self.verbs.append(verb)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._closed.wait()
                raise GroupError("closed")
        if self._faults:
            raise self._faults.pop(0)

    async def close(self, *, at_once: bool = False) -> None:
        self._closed.set()


class Handles:
    """A runtime. `faults`: what its calls raise, one after another."""

    def __init__(self, *faults: GroupError) -> None:
        self.handles: list[Handle] = []
        self._faults = list(faults)

    async def spawn(self, spec: EngineSpec, on_events: Any) -> Handle:
        self.handles.append(Handle(self._faults))
        return self.handles[-1]


class Engines(Follower):
    """The least that follows."""

    flushes = 0

    def flush(self) -> None:
        self.flushes += 1

    async def handle(self, request: Any) -> None:
        raise AssertionError("nobody asks these engines")

    def _on_events(self, replica: Replica, incarnation: int, events: Sequence[EngineEvent]) -> None:
        raise AssertionError("these engines say nothing")


class Turns:
    """A turn that somebody else has until it is `free`."""

    shared = True

    def __init__(self) -> None:
        self.free = asyncio.Event()

    def taken(self) -> AbstractAsyncContextManager[None]:
        @asynccontextmanager
        async def when_free() -> Any:
            await self.free.wait()
            yield

        return when_free()

    kept: Any = None

    def note(self) -> None:
        """It is told when."""


class Scene:
    """One engine that follows, and what the log says."""

    def __init__(self, runtime: Handles) -> None:
        self.runtime: Any = runtime
        self.events: list[Any] = []
        self.log = EventLog(None, asyncio.get_running_loop().time)
        self.log.subscribe(self)
        self.group = Engines("rollout", self.log, self.runtime, [SPEC], follows="policy")
        self.fencing = Fencing([self.group], 0, self.log, timeout=60.0, probe_gap=0.0)
        self.fencing.announced.take("policy", WEIGHTS)
        self.replica = self.group.replicas[0]

    def see(self, event: Any, *, live: bool) -> None:
        self.events.append(event)

    def close(self) -> None:
        """Nothing to release."""

    async def launch(self, then: Callable[[], None] = lambda: None, turn: Turn = ALONE) -> None:
        """`then`: what happens while the first weights are on their way. `turn`: of the group, once it is started."""
        async with asyncio.TaskGroup() as tasks:
            await self.group.start()
            self.group.turn = turn
            self.fencing.open(tasks)
            launched = tasks.create_task(self.fencing.launch())
            await settle()
            then()
            await launched
            await self.fencing.one_serves()


@virtual
async def test_an_engine_that_fails_without_words_is_started_again_and_named() -> None:
    scene = Scene(Handles(EngineLost(""), EngineLost("")))
    await scene.launch()
    assert [handle.verbs for handle in scene.runtime.handles] == [["prepare"], ["prepare"], ["prepare", "commit"]]
    assert [event.reason for event in scene.events if isinstance(event, Fenced)] == ["EngineLost", "EngineLost"]
    assert scene.replica.serving


@virtual
async def test_an_engine_that_says_nothing_when_it_fails_is_started_again() -> None:
    scene = Scene(Handles())
    await scene.launch(lambda: scene.group.on_failure(scene.replica, ""))
    assert scene.runtime.handles[-1].verbs == ["prepare", "commit"]
    assert [event.reason for event in scene.events if isinstance(event, Fenced)] == ["it gave no reason"]
    assert scene.replica.serving


@virtual
async def test_one_that_fails_again_and_again_without_words_ends_the_run_by_name() -> None:
    scene = Scene(Handles(*[EngineLost("")] * 5))
    with pytest.raises(ExceptionGroup) as raised:
        await scene.launch()
    assert "rollout/0 failed 4 times, groups.rollout.max_restarts = 3; the last time: EngineLost" in str(
        raised.value.exceptions[0]
    )


@virtual
async def test_one_that_is_fenced_before_its_turn_has_only_its_successor_prepared_and_once() -> None:
    scene, turns = Scene(Handles()), Turns()

    def lost_meanwhile() -> None:
        scene.group.on_failure(scene.replica, "killed")
        turns.free.set()

    await scene.launch(lost_meanwhile, turns)
    assert [handle.verbs for handle in scene.runtime.handles] == [[], ["prepare", "commit"]]
    assert len([event for event in scene.events if isinstance(event, Fenced)]) == 1


@virtual
async def test_the_end_of_an_engine_is_told_by_its_name_where_it_has_no_words() -> None:
    events: list[EngineEvent] = []
    calls = Calls(SPEC, events.extend)
    calls.built()
    calls.fail(EngineLost(""))
    assert events == [Failed(reason="EngineLost", lost=True)]
