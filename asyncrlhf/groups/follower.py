"""Follower: a group whose engines compute with the weights that another group publishes.

The coordinator brings them weights in two phases, one engine at a time or all; an engine that fails is fenced,
restarted, and serves again once it has the newest weights. Control messages go to the engines directly.
"""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from asyncrlhf.abc import EngineHandle, EngineSpec, Runtime
from asyncrlhf.errors import ConfigError, DataLost, GroupError, PublishRefused
from asyncrlhf.groups.answers import Replica
from asyncrlhf.groups.group import Group, spawned
from asyncrlhf.groups.supervisor import RestartBudget
from asyncrlhf.groups.turn import ALONE, Turn
from asyncrlhf.messages import EngineEvent, WeightHandle
from asyncrlhf.observe.events import Restarted
from asyncrlhf.observe.log import EventLog

__all__ = ("Follower",)


class Follower(Group):
    """Base of the groups that follow."""

    def __init__(
        self,
        name: str,
        log: EventLog,
        runtime: Runtime,
        specs: Sequence[EngineSpec],
        *,
        follows: str,
        kv: str = "rebuild",
        max_restarts: int = 3,
        reply_timeout: float = 300.0,
        start_timeout: float | None = None,
    ) -> None:
        """`reply_timeout`: seconds an engine may take to change over, or to accept what it is given, before it is
        fenced. `start_timeout`: seconds it may take to start; None: for ever."""
        super().__init__(name, log)
        self.follows = follows
        self.replicas = [Replica(f"{name}/{spec.rank}", spec, RestartBudget(limit=max_restarts)) for spec in specs]
        self.on_failure: Callable[[Replica, str], None] = lambda replica, reason: None
        self.turn: Turn = ALONE
        self.newest: Callable[[], WeightHandle | None] = lambda: None
        """The weights to come back with."""
        self._runtime, self._kv = runtime, kv
        self._reply_timeout, self._start_timeout = reply_timeout, start_timeout

    async def start(self) -> None:
        """Spawn every engine. Raises GroupError with the original traceback."""
        async with self.turn.taken(), asyncio.TaskGroup() as tasks:
            for replica in self.replicas:
                tasks.create_task(self.spawn(replica))

    async def spawn(self, replica: Replica) -> None:
        """Build the engine of a replica under its current incarnation."""
        incarnation = replica.incarnation

        def on_events(events: Sequence[EngineEvent]) -> None:
            self._on_events(replica, incarnation, events)

        replica.handle = await spawned(self._runtime, replica.spec, on_events, self._start_timeout)
        replica.asleep = replica.changing = False
        replica.version = replica.prepared = -1

    # ---- publishing ----------------------------------------------------------------------------------------------
    async def prepare(self, replica: Replica, weights: WeightHandle) -> None:
        """First phase on one engine."""
        if replica.version != weights.version:
            await self._engine(replica).call("prepare", weights)
            replica.prepared = weights.version

    async def commit(self, replica: Replica, version: int) -> None:
        """Second phase on one engine, between two tokens or requests."""
        if replica.version == version:  # it has woken up with it
            return
        if replica.prepared != version and (newest := self.newest()) is not None:
            await self.prepare(replica, newest)
        await self._engine(replica).call("commit", version, self._kv)
        replica.version = version

    async def probe(self, replica: Replica, weights: WeightHandle) -> float:
        """Largest difference, in nats, between what one engine says about the probe of the weights that it has
        committed and what it should say: NaN if one is not finite, 0 without a probe."""
        if weights.probe is None:
            return 0.0
        said: Sequence[float] = await self._engine(replica).call("probe", weights.probe.token_ids)
        gaps = [abs(a - b) for a, b in zip(said, weights.probe.logprobs, strict=True)]
        return max(gaps) if all(map(math.isfinite, gaps)) else math.nan

    def takes_as_it_wakes(self, replica: Replica) -> bool:
        """Whether an engine that sleeps need not be woken to be told of new weights: it comes back with the newest."""
        return False

    def engines_of(self, uid: int, attempt: int) -> list[str]:
        """The engines that have work for this lease outstanding."""
        return []

    async def drained(self, replica: Replica, *, alone: bool = False) -> None:
        """Wait until an engine may take weights that its work of before shall not see. `alone`: others go on."""

    def release(self, *replicas: Replica) -> None:
        """Draining is over, of these engines or (none given) of all."""

    @abstractmethod
    def flush(self) -> None:
        """An engine has come to serve: give it what waits."""

    def fence(self, replica: Replica) -> None:
        """Refuse everything this incarnation may still say."""
        replica.serving = False
        replica.incarnation += 1

    async def restart(self, replica: Replica, delay: float) -> None:
        """A fresh engine in a fenced one's place, after `delay` seconds; it serves once the coordinator has it joined.
        Raises GroupError, for a ConfigError too: the machine refuses (memory not free yet), and may not next time."""
        old, replica.handle = replica.handle, None
        if old is not None:
            await old.close()
        await asyncio.sleep(delay)
        try:
            async with self.turn.taken():
                await self.spawn(replica)
        except ConfigError as error:
            raise GroupError(str(error)) from error
        self.emit(Restarted(group=self.name, rank=replica.spec.rank, incarnation=replica.incarnation))

    # ---- devices that are shared ---------------------------------------------------------------------------------
    @property
    def sleeps(self) -> tuple[str, str]:
        """Verbs with which an engine leaves its devices to others and comes back."""
        return ("offload", "onload") if self.turn.offload else ("finish", "finish")

    async def rest(self) -> None:
        """Every engine leaves its devices at its next token or request; one that does not is ended and fenced."""
        async with asyncio.TaskGroup() as tasks:
            for replica in self.replicas:
                if replica.handle is not None and (replica.changing or not replica.asleep):
                    replica.asleep = True
                    tasks.create_task(self._change(replica, replica.handle, self.sleeps[0]))

    async def resume(self) -> None:
        """Every engine that sleeps comes back. Raises PublishRefused."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for replica in self.replicas:
                    if replica.handle is not None and replica.asleep:
                        tasks.create_task(self._come_back(replica, replica.handle))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self.flush()

    async def _come_back(self, replica: Replica, handle: EngineHandle) -> None:
        """An engine whose last change was cut short may be awake, and is not woken twice."""
        if not replica.changing or await self._change(replica, handle, self.sleeps[0]):
            await self._wake(replica, handle)

    async def _wake(self, replica: Replica, handle: EngineHandle) -> None:
        if await self._change(replica, handle, self.sleeps[1]):
            replica.asleep = False

    async def _change(self, replica: Replica, handle: EngineHandle, verb: str, *arguments: object) -> bool:
        """Whether the engine has done so; else it is gone. It is `changing` until it has answered, also if the caller
        is cancelled."""
        incarnation, replica.changing = replica.incarnation, True
        try:
            async with asyncio.timeout(self._reply_timeout):
                await handle.call(verb, *arguments)
            replica.changing = False
            return True
        except PublishRefused:
            replica.changing = False
            raise
        except TimeoutError:
            reason = f"no answer to {verb} within {self._reply_timeout:g} s"
        except GroupError as error:
            reason = str(error)
        replica.changing = False
        await handle.close(at_once=True)
        if replica.incarnation == incarnation:
            self.on_failure(replica, reason)
        return False

    # ---- for those that derive from it ---------------------------------------------------------------------------
    @abstractmethod
    def _on_events(self, replica: Replica, incarnation: int, events: Sequence[EngineEvent]) -> None:
        """What an engine of this incarnation says."""

    async def _call(self, replica: Replica, incarnation: int, verb: str, *arguments: object) -> Any:
        """One call to an engine, unless it was fenced meanwhile. One that fails or is not answered has it fenced.
        Raises DataLost, which is not the engine's loss."""
        if replica.incarnation != incarnation:
            return None
        try:
            async with asyncio.timeout(self._reply_timeout):
                return await self._engine(replica).call(verb, *arguments)
        except DataLost:
            raise
        except TimeoutError:
            reason = f"no answer to {verb} within {self._reply_timeout:g} s"
        except GroupError as error:
            reason = str(error)
        if replica.incarnation == incarnation:
            self.on_failure(replica, reason)
        return None

    def _engine(self, replica: Replica) -> EngineHandle:
        if replica.handle is None:
            raise GroupError(f"{replica.key} has no engine: it was fenced and has not been restarted yet")
        return replica.handle
