"""Turns: the groups of one set of devices, of which one computes while the others sleep, or stand still there.

A group that asks (training, reading, publishing) waits for the group that has the turn, and whoever samples keeps it
until it has nothing left to do or others are due: a trained model at once, between two tokens; a model that reads
answers when what waits for it makes a batch. From the pop of a batch to the next one the sampler does not come back but
to take weights. Answers of an evaluation keep the others waiting, at most `evaluation.max_hold` seconds. Nobody holds a
turn while it waits for anything but an engine, so nobody waits in a circle. Whoever cannot leave the devices ends the
run, or is started again; who comes next only waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice

from asyncrlhf.flow.gate import Gate
from asyncrlhf.groups import Group, ReferenceGroup, RewardGroup, RolloutGroup, TrainGroup
from asyncrlhf.groups.follower import Follower
from asyncrlhf.groups.frozen import FrozenEngine
from asyncrlhf.groups.turn import Tenant
from asyncrlhf.observe.events import TurnTaken
from asyncrlhf.observe.log import EventLog
from asyncrlhf.observe.waits import Wait

__all__ = ("Turns", "engine_of", "take_turns")


@dataclass(eq=False)
class Seat:
    """A group's place at the table, and the Turn that it is given."""

    turns: Turns
    name: str
    tenant: Tenant
    lane: str
    """Seats of different lanes are on different devices of the set; "" is on all of them."""
    shared: bool = True
    awake: bool | None = False
    """None: a switch was cut short, and nobody knows."""
    holders: int = 0
    keeps: asyncio.Event | None = None
    """Set to have the sampler leave; None: it does not keep the turn."""

    @property
    def offload(self) -> bool:
        return self.turns.offload

    def taken(self) -> AbstractAsyncContextManager[None]:
        return self.turns.held(self, None)

    def kept(self, leave: asyncio.Event) -> AbstractAsyncContextManager[None]:
        return self.turns.held(self, leave)

    def note(self) -> None:
        self.turns.advance()

    def meets(self, other: Seat) -> bool:
        """Whether the two share a device."""
        return self is not other and not (self.lane and other.lane and self.lane != other.lane)

    @property
    def sampler(self) -> RolloutGroup | None:
        return self.tenant if isinstance(self.tenant, RolloutGroup) else None


@dataclass(eq=False)
class _Waiter:
    seat: Seat
    leave: asyncio.Event | None
    since: float
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Turns:
    """One set of devices. Created on the event loop; every call happens there."""

    def __init__(self, name: str, gate: Gate, log: EventLog, *, offload: bool = True) -> None:
        """`offload`: who leaves takes its memory along; else all stay where they are, and the sampler stands still."""
        self.name, self.offload = name, offload
        self._gate, self._log = gate, log
        self._seats: list[Seat] = []
        self._waiting: dict[tuple[Seat, bool], dict[_Waiter, None]] = {}
        """By seat, and whether it is to be kept; those of one seat are given it together. The longest waiting first."""
        self._switching = asyncio.Lock()
        self._advancing = False

    def seat(self, name: str, tenant: Tenant, lane: str = "") -> None:
        """From now on this tenant takes turns with the others. Before its engines are started."""
        seat = Seat(self, name, tenant, lane)
        self._seats.append(seat)
        tenant.turn = seat

    def waits(self, now: float) -> Iterator[Wait]:
        """Who waits for its turn, and for whom."""
        for waiter in (waiter for waiters in self._waiting.values() for waiter in waiters):
            holders = [seat.name for seat in self._seats if seat.holders and seat.meets(waiter.seat)]
            if not self._wanted(waiter):
                continue
            whom = f"group {holders[0]}" if holders else "the train step" if waiter.leave else "the sampler"
            yield Wait(f"group {waiter.seat.name}", whom, f"its turn on {self.name}", now - waiter.since, kind="turns")

    def holders(self) -> Iterator[str]:
        """Who has a turn."""
        for seat in self._seats:
            if seat.holders:
                yield f"group {seat.name} has its turn on {self.name}"

    def advance(self) -> None:
        """Give the turn to whoever is next; ask a sampler to leave that others are due after. Looks at seats, however
        many wait for each: this follows every move of a lease."""
        if self._advancing:
            return
        self._advancing = True
        try:
            ahead: list[Seat] = []
            for seat, keeps in list(self._waiting):
                if not (self._sampler_is_due(seat) if keeps else self._is_due(seat)):
                    continue
                before = [other for other in self._seats if other.holders and seat.meets(other)]
                if not before and (seat.holders or not any(seat.meets(other) for other in ahead)):
                    self._grant(seat, keeps)
                    continue
                ahead.append(seat)
                for other in before:
                    if other.keeps is not None and other.sampler is not None and not other.sampler.must_go_on:
                        other.keeps.set()
            self._note_waits()
        finally:
            self._advancing = False

    def _grant(self, seat: Seat, keeps: bool) -> None:
        for waiter in self._waiting.pop((seat, keeps)):
            if not waiter.granted.done():  # else it was cancelled, and is about to see it
                seat.holders += 1
                seat.keeps = seat.keeps or waiter.leave
                waiter.granted.set_result(None)

    def _note_waits(self) -> None:
        """Who waits for his turn is not silent for his own sake. Behind answers that must go on training waits for
        others, and a run in which nothing moves is stalled. An evaluation's time to keep it waiting begins."""
        if any(isinstance(seat.tenant, FrozenEngine) for seat, _ in self._waiting):
            live = self._gate.ledger.live
            self._gate.silence.pause(
                self.name, lambda: {uid for uid, lease in live.items() if lease.state == "scoring"}
            )
        else:
            self._gate.silence.go_on(self.name)
        for seat, keeps in self._waiting:
            if not keeps and self._reads_now(seat):
                for sampler in self._in_the_way(seat):
                    sampler.outside.hold_up()
        waiting = [seat for seat, _ in self._waiting if isinstance(seat.tenant, TrainGroup)]
        if any(sampler.must_go_on for seat in waiting for sampler in self._samplers(seat)):
            self._gate.held_up.setdefault(self.name, asyncio.get_running_loop().time())
        else:
            self._gate.held_up.pop(self.name, None)

    @asynccontextmanager
    async def held(self, seat: Seat, leave: asyncio.Event | None) -> AsyncGenerator[None, None]:
        """The turn of a seat, once it has come; `leave`: see Turn.kept."""
        waiter, key = _Waiter(seat, leave, asyncio.get_running_loop().time()), (seat, leave is not None)
        self._waiting.setdefault(key, {})[waiter] = None
        self.advance()
        try:
            await waiter.granted
            await self._switch(seat)
            yield
        finally:
            if waiter.granted.done() and not waiter.granted.cancelled():
                seat.holders -= 1
                if leave is not None:
                    seat.keeps = None
            else:
                waiter.granted.cancel()
                if waiters := self._waiting.get(key):
                    waiters.pop(waiter, None)
                    if not waiters:
                        del self._waiting[key]
            self.advance()

    # ---- who is next ---------------------------------------------------------------------------------------------
    def _is_due(self, seat: Seat) -> bool:
        """Whether it may have the turn as soon as nobody else has it, and not to keep it."""
        return self._reads_now(seat) and not self._in_the_way(seat)

    def _reads_now(self, seat: Seat) -> bool:
        """False for a model that reads answers while a sampler can bring the batch nearer."""
        return (
            not isinstance(seat.tenant, FrozenEngine)
            or self._batch_is_near()
            or not any(self._may_sample(other) for other in self._seats if other.meets(seat))
        )

    def _in_the_way(self, seat: Seat) -> list[RolloutGroup]:
        """Samplers that share devices with it, and whose answers somebody waits for."""
        return [sampler for sampler in self._samplers(seat) if sampler.must_go_on]

    def _samplers(self, seat: Seat) -> list[RolloutGroup]:
        """Those that share devices with it."""
        return [sampler for other in self._seats if other.meets(seat) and (sampler := other.sampler) is not None]

    def _may_sample(self, seat: Seat) -> bool:
        """Whether it brings the batch nearer, now or as soon as nobody else has the turn."""
        sampler = seat.sampler
        return sampler is not None and sampler.wants and (seat.keeps is not None or self._sampler_is_due(seat))

    def _sampler_is_due(self, seat: Seat) -> bool:
        sampler = seat.sampler
        if sampler is None or not sampler.wants:
            return False
        trains = any(isinstance(other.tenant, TrainGroup) for other in self._seats)
        waits = self._gate.pops() and self._gate.ledger.training is None
        return sampler.must_go_on or (not seat.holders and (waits or not trains))

    def _batch_is_near(self) -> bool:
        """Whether the rollouts that a train step takes have been sampled."""
        ledger, size = self._gate.ledger, self._gate.ledger.rules.prompts_per_step
        if ledger.sampled_count < size or ledger.rules.order != "admission":
            return ledger.sampled_count >= size
        return all(lease.state != "running" for lease in islice(ledger.live.values(), size))

    def _wanted(self, waiter: _Waiter) -> bool:
        sampler = waiter.seat.sampler
        return waiter.leave is None or (sampler is not None and sampler.wants)

    # ---- changing over -------------------------------------------------------------------------------------------
    async def _switch(self, seat: Seat) -> None:
        """All that share devices with this seat leave them, then it comes. Whoever is cancelled on the way leaves it to
        the next one."""
        async with self._switching:
            if seat.awake and not any(other.awake is not False for other in self._seats if other.meets(seat)):
                return
            began = self._log.elapsed()
            for other in self._seats:
                if other.meets(seat) and other.awake is not False:
                    other.awake = None
                    await other.tenant.rest()
                    other.awake = False
            if not seat.awake:
                seat.awake = None
                await seat.tenant.resume()
                seat.awake = True
            self._log.emit(TurnTaken(devices=self.name, group=seat.name, seconds=self._log.elapsed() - began))


def take_turns(
    sets: Mapping[str, Sequence[tuple[str, str]]],
    groups: Mapping[str, Group],
    gate: Gate,
    log: EventLog,
    *,
    offload: bool = True,
) -> list[Turns]:
    """The turns of every set, by its name: (group, lane) of those in it. Groups without engines of their own on the
    set's devices (reward functions) take none. `offload`: see Turns."""
    found: list[Turns] = []
    for name, members in sets.items():
        turns = Turns(name, gate, log, offload=offload)
        for group, lane in members:
            if (tenant := tenant_of(groups[group])) is not None:
                turns.seat(group, tenant, lane)
        found.append(turns)
    before = gate.on_moved

    def moved() -> None:
        before()
        for turns in found:
            turns.advance()

    gate.on_moved = moved
    return found


def tenant_of(group: Group) -> Tenant | None:
    """What of a group takes turns; None: nothing."""
    return group if isinstance(group, TrainGroup | Follower) else engine_of(group)


def engine_of(group: Group) -> FrozenEngine | None:
    """The frozen model of a group, if it has one."""
    return group.engine if isinstance(group, ReferenceGroup | RewardGroup) else None
