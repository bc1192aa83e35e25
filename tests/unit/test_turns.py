"""One set of devices: changes that are cut short or refused, and what they leave to whoever comes next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from asyncrlhf.abc import EngineSpec
from asyncrlhf.control.turns import Turns
from asyncrlhf.errors import GroupError, PublishRefused
from asyncrlhf.groups import PolicyGroup, RolloutGroup
from asyncrlhf.groups.frozen import FrozenEngine
from asyncrlhf.groups.rollout import Sampling
from asyncrlhf.messages import WeightHandle
from asyncrlhf.observe import EventLog
from asyncrlhf.testing import FakeTrainerOptions
from tests.unit.virtual import Scene, settle, virtual

SAMPLING = Sampling(answers_per_prompt=1, min_answers=1, max_tokens=1, temperature=1.0, stop_token_ids=(), seed=0)


class Slow:
    """An engine that takes ten seconds for everything, one after another, whether its caller still waits or not."""

    address = "127.0.0.1"

    def __init__(self, group: str) -> None:
        self.spec = EngineSpec(group=group, rank=0, engine="x:X", options=FakeTrainerOptions())
        self.done: list[str] = []
        self.refuses: list[PublishRefused] = []
        """What it answers to `wake`."""
        self.asleep = self.closed = False
        self._free = asyncio.Lock()

    async def call(self, verb: str, *arguments: Any) -> Any:
        return await asyncio.shield(asyncio.ensure_future(self._do(verb)))

    async def _do(self, verb: str) -> None:
        async with self._free:
            await asyncio.sleep(10.0)
            if verb == "wake":
                if not self.asleep:
                    raise GroupError("wake came while the engine is awake")
                if self.refuses:
                    raise self.refuses.pop(0)
            self.asleep = {"sleep": True, "offload": True, "wake": False, "onload": False}.get(verb, self.asleep)
            self.done.append(verb)

    async def close(self, *, at_once: bool = False) -> None:
        self.closed = True


class Table:
    """A sampler that has the devices, a frozen model and a policy."""

    def __init__(self) -> None:
        log = EventLog(None, asyncio.get_running_loop().time)
        self.failures: list[str] = []
        self.sampler, self.reads, self.trains = Slow("rollout"), Slow("reference"), Slow("policy")
        gate: Any = Scene().gate
        self.rollout = RolloutGroup("rollout", log, None, [self.sampler.spec], SAMPLING, gate)  # type: ignore[arg-type]
        self.rollout.replicas[0].handle, self.rollout.replicas[0].serving = self.sampler, True
        self.rollout.on_failure = lambda replica, reason: self.failures.append(reason)
        self.version = 0
        self.rollout.newest = lambda: WeightHandle(
            version=self.version, checksum=0, changed=True, byte_count=8, transport="", payload={}
        )
        self.turns = Turns("set", gate, log)
        self.reference = FrozenEngine(log, runtime(self.reads), self.reads.spec)
        self.policy = PolicyGroup("policy", log, runtime(self.trains), [self.trains.spec])
        for name, tenant in (("rollout", self.rollout), ("reference", self.reference), ("policy", self.policy)):
            self.turns.seat(name, tenant)

    async def begin(self) -> None:
        """The frozen model is there, and sleeps; the sampler is awake."""
        await self.reference.start()
        async with self.rollout.turn.taken():
            pass
        self.reads.done.clear()

    async def cut_short(self, claim: Callable[[], Any], after: float) -> None:
        task = asyncio.ensure_future(claim())
        await asyncio.sleep(after)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def runtime(handle: Slow) -> Any:
    class One:
        async def spawn(self, spec: EngineSpec, on_events: Any) -> Slow:
            return handle

    return One()


@virtual
async def test_a_sampler_that_was_told_to_leave_has_left_before_another_comes() -> None:
    """Whoever told it has been cancelled meanwhile."""
    table = Table()
    await table.begin()
    await table.cut_short(lambda: table.reference.call("logprobs"), 3.0)
    reading = asyncio.ensure_future(table.reference.call("logprobs"))
    while "onload" not in table.reads.done:
        await asyncio.sleep(1.0)
        assert not table.reads._free.locked() or table.sampler.asleep, "both have the devices"
    await reading
    assert not table.failures


@pytest.mark.parametrize("back", [False, True])
@virtual
async def test_a_sampler_whose_return_was_cut_short_leaves_and_comes_back(back: bool) -> None:
    table = Table()
    await table.begin()
    await table.reference.call("logprobs")
    assert table.sampler.asleep

    async def sample() -> None:
        async with table.rollout.turn.taken():
            pass

    await table.cut_short(sample, 13.0)  # once the frozen model has left
    if back:
        await sample()
        assert not table.sampler.asleep
        assert not table.rollout.replicas[0].asleep
    else:
        await table.reference.call("logprobs")
        assert table.sampler.asleep
    assert not table.failures


@virtual
async def test_refused_weights_are_an_error_of_their_own_and_newer_ones_are_taken() -> None:
    table = Table()
    await table.begin()
    await table.reference.call("logprobs")
    table.sampler.refuses = [PublishRefused("version 0 is gone")]
    with pytest.raises(PublishRefused, match="version 0"):
        async with table.rollout.turn.taken():
            pass
    table.sampler.refuses = [PublishRefused("version 0 is gone")]
    asyncio.get_running_loop().call_later(5.0, lambda: setattr(table, "version", 1))
    async with table.rollout.turn.taken():
        assert table.rollout.replicas[0].version == 1


@virtual
async def test_a_request_has_been_sent_when_the_engine_has_been_told() -> None:
    """Not while its group waits for its turn."""
    table = Table()
    await table.policy.start()
    serving = asyncio.ensure_future(table.policy.serve())
    async with table.rollout.turn.taken():
        asked = asyncio.ensure_future(table.policy.ask_export(0))
        await asyncio.sleep(100.0)
        assert not asked.done()
    reply = await asked
    assert not reply.done()
    await reply
    assert table.trains.done[-1] == "export"
    table.policy.close()
    await serving


@virtual
async def test_an_engine_that_comes_to_serve_waits_for_its_turn() -> None:
    """Its group has answers to go on with from then on."""
    table = Table()
    await table.begin()
    notes: list[bool] = []

    class Noted:
        shared = True

        def note(self) -> None:
            notes.append(table.rollout.wants)

    table.rollout.turn = Noted()  # type: ignore[assignment]
    table.rollout.replicas[0].serving = False
    table.rollout._held_back = [object()]  # type: ignore[list-item]
    table.rollout.replicas[0].serving, table.rollout.replicas[0].asleep = True, True
    table.rollout.flush()
    await settle()
    assert notes == [True]
