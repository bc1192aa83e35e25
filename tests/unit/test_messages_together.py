"""What leaves together: an answer with the events before it, and the calls that are made before the loop goes round."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import ray

from asyncrlhf.abc import EngineSpec
from asyncrlhf.errors import AsyncRLHFError, GroupError, SampleError
from asyncrlhf.messages import Busy, EngineEvent, Failed, GenerateRequest
from asyncrlhf.runtimes.child import Channel
from asyncrlhf.runtimes.frames import OUT_OF_BAND
from asyncrlhf.runtimes.inproc import ThreadEngine
from asyncrlhf.runtimes.loop import Call, Commands, EngineLoop
from asyncrlhf.runtimes.lots import RayLot
from asyncrlhf.runtimes.parcel import opened, packed
from asyncrlhf.runtimes.ray import ActorEngine
from asyncrlhf.testing.conformance.engines import Ticking, TickingOptions

SPEC = EngineSpec(group="g", rank=0, engine="none:None", options=msgspec.defstruct("Nothing", [])())


# ---- an engine's answers -------------------------------------------------------------------------------------------
class Outbox:
    """Keeps what an engine's loop says, one entry a message."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any, list[EngineEvent]]] = []

    def result(self, key: Any, value: Any, events: Sequence[EngineEvent] = ()) -> None:
        self.said.append(("result", key, list(events)))

    def error(self, key: Any, error: AsyncRLHFError) -> None:
        self.said.append(("error", key, []))

    def events(self, events: Sequence[EngineEvent]) -> None:
        self.said.append(("events", None, list(events)))


class Interrupted(Ticking):
    """Is called as it takes its first step, and ended as it takes its second."""

    commands: Commands

    def step(self) -> Sequence[EngineEvent]:
        super().step()
        self.commands.put(Call("asked", "probe_me", ()) if self.steps == 1 else None)
        return []

    def probe_me(self) -> int:
        return self.steps


def test_an_answer_comes_with_what_the_engine_did_before_in_the_order_it_did_it() -> None:
    engine, commands, outbox = Interrupted(TickingOptions()), Commands(), Outbox()
    engine.commands = commands
    request = GenerateRequest(
        request_id="r", prompt_token_ids=(9,), max_tokens=10**5, temperature=1.0, stop_token_ids=(0,), seed=1
    )
    commands.put(Call("added", "add", ([request],)))
    EngineLoop(SPEC, engine, commands, outbox).run()
    answered = {key: events for kind, key, events in outbox.said if kind == "result"}
    assert list(answered) == ["added", "asked"]
    assert [event.work for event in answered["added"] if isinstance(event, Busy)] == ["add"]
    slices = [event for event in answered["asked"] if isinstance(event, Busy)]
    assert [slice_.work for slice_ in slices] == ["generate", "probe_me"]
    assert slices[0].end <= slices[1].start


def test_a_process_sends_an_answer_and_the_events_before_it_at_once() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps what was sent at once together
    with ours, theirs:
        theirs.setblocking(False)
        Channel(ours).result(3, "done", [Busy(start=1.0, end=2.0, work="step")])
        frames, (left, right) = theirs.recv(1 << 16), socket.socketpair()
        with pytest.raises(BlockingIOError):
            theirs.recv(1 << 16)
    with left, right:
        left.sendall(frames)
        reader = Channel(right)
        (events, said), (result, value) = reader.receive(), reader.receive()
    assert (events.kind, said) == ("events", [Busy(start=1.0, end=2.0, work="step")])
    assert (result.kind, result.key, value) == ("result", 3, "done")


# ---- calls to an actor ---------------------------------------------------------------------------------------------
class Actor:
    """Notes what it is sent: the number of the first command, and all of them."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, list[Any]]] = []
        self.put = SimpleNamespace(remote=self._put)

    def _put(self, number: int, parcels: Sequence[Any]) -> None:
        for parcel in parcels:
            if not isinstance(parcel, bytes) and hasattr(parcel.arguments[0], "write"):
                raise TypeError("cannot pickle an open file")
        self.sent.append((number, [opened(parcel).arguments[0] for parcel in parcels]))


async def test_the_first_of_many_calls_goes_at_once_and_the_others_follow_together(tmp_path: Path) -> None:
    actor = Actor()
    engine = ActorEngine(SPEC, actor, tmp_path / "log", lambda events: None)
    made = [asyncio.ensure_future(engine.call("echo", number)) for number in range(5)]
    await asyncio.sleep(0)
    assert actor.sent == [(0, [0])], "before the loop goes round"
    await asyncio.sleep(0)
    assert actor.sent == [(0, [0]), (1, [1, 2, 3, 4])]
    later = asyncio.ensure_future(engine.call("echo", "later"))
    await asyncio.sleep(0)
    assert actor.sent[2:] == [(5, ["later"])]
    engine.calls.close()
    await asyncio.gather(*made, later, return_exceptions=True)


async def test_a_call_that_cannot_be_pickled_fails_alone(tmp_path: Path) -> None:
    actor = Actor()
    engine = ActorEngine(SPEC, actor, tmp_path / "log", lambda events: None)
    with (tmp_path / "open").open("w") as file:
        before = asyncio.ensure_future(engine.call("echo", "before"))
        bad = asyncio.ensure_future(engine.call("echo", file))
        after = asyncio.ensure_future(engine.call("echo", "after"))
        with pytest.raises(SampleError, match="echo is given cannot be sent to another process .*open file"):
            await bad
    await asyncio.sleep(0)
    assert actor.sent == [(0, ["before"]), (1, ["after"])]
    engine.calls.close()
    await asyncio.gather(before, after, return_exceptions=True)


# ---- parcels -------------------------------------------------------------------------------------------------------
def test_small_messages_are_bytes_and_arrive_as_they_were() -> None:
    thing = [Call(7, "step", (Busy(start=0.0, end=1.0, work="step"), "x"))]
    parcel = packed(thing)
    assert isinstance(parcel, bytes)
    (arrived,) = opened(parcel)
    assert (arrived.key, arrived.verb, arrived.arguments) == (7, "step", thing[0].arguments)


def test_what_ray_has_to_see_or_moves_better_stays_as_it_is() -> None:
    claimed, unclaimed = RayLot(4), RayLot(5)
    claimed.reference = object()
    large = np.zeros(OUT_OF_BAND, np.int8)
    stored = ray.ObjectRef(bytes(28))
    for thing in ([claimed], [large], [lambda: None], [stored], {"payload": {"bucket": [stored]}}):
        assert packed(thing) is thing
        assert opened(thing) is thing
    assert opened(packed([unclaimed]))[0].number == 5
    assert np.array_equal(opened(packed([large[1:]]))[0], large[1:])


def test_a_class_of_the_main_module_goes_by_value() -> None:
    kind = type("Own", (), {"__module__": "__main__"})
    vars(sys.modules["__main__"])["Own"] = kind
    try:
        thing = [kind()]
        assert packed(thing) is thing
    finally:
        del vars(sys.modules["__main__"])["Own"]


# ---- the end of an engine ------------------------------------------------------------------------------------------
async def test_who_called_hears_that_an_engine_has_broken_when_its_group_does() -> None:
    """Not before, or another failure that follows from this one could be heard first."""
    heard: list[str] = []

    def events(events: Sequence[EngineEvent]) -> None:
        heard.extend(event.reason for event in events if isinstance(event, Failed))

    ticking = EngineSpec(
        group="g", rank=0, engine="asyncrlhf.testing.conformance.engines:Ticking", options=TickingOptions()
    )
    engine = ThreadEngine(ticking, events)
    await engine.start()
    try:
        with pytest.raises(GroupError, match="no attribute 'missing'") as caught:
            await engine.call("missing")
        assert heard == [str(caught.value)]
    finally:
        await engine.close()
