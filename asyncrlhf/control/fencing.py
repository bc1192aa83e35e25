"""Fencing: an engine that fails is refused from then on, started again, and joins at the newest weights.

A restart waits for its delay, the new engine, and the weights; `one_serves` waits until any engine serves. What fails
before there are weights to come back with is started again as soon as there are. Whoever sends weights to an engine
sends them to the incarnation that was there when it began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from asyncrlhf.control.announced import Announced
from asyncrlhf.control.membership import Membership
from asyncrlhf.errors import GroupError, PublishRefused
from asyncrlhf.groups.answers import Replica
from asyncrlhf.groups.follower import Follower
from asyncrlhf.messages import WeightHandle
from asyncrlhf.observe.events import Fenced
from asyncrlhf.observe.log import EventLog

__all__ = ("Fencing",)


class Fencing:
    """The engines that follow one policy clock, and which of them serve."""

    def __init__(
        self, followers: Sequence[Follower], version: int, log: EventLog, *, timeout: float, probe_gap: float
    ) -> None:
        """`version`: what every engine serves from the launch on. `timeout`, `probe_gap`: as the Coordinator's."""
        self.engines = [(follower, replica) for follower in followers for replica in follower.replicas]
        self.members = Membership((replica.key for _, replica in self.engines), version)
        self.announced = Announced()
        self.fenced: list[str] = []
        """Since the publish under way began."""
        self.largest_gap = 0.0
        self._emit = log.emit
        self._timeout, self._probe_gap = timeout, probe_gap
        self._joined = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._restarts: dict[str, asyncio.Task[None]] = {}
        self._reasons: dict[str, str] = {}
        self._launched = False
        for follower in followers:
            follower.on_failure = self._failed(follower)
            follower.newest = partial(self.announced.whole, follower.follows)

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """From now on restarts are tasks of this group; one that is given up raises GroupError there."""
        self._tasks = tasks

    def close(self) -> None:
        """No restart begins or goes on."""
        self._tasks = None
        for restart in self._restarts.values():
            restart.cancel()

    async def launch(self) -> None:
        """Bring the first weights to every engine; returns when each has them or has been fenced. Raises
        PublishRefused."""
        self._launched = True
        async with asyncio.TaskGroup() as tasks:
            for follower, replica in self.engines:
                if replica.key in self.members.serving:
                    tasks.create_task(self._serve_first(follower, replica))
                else:
                    self._begin_again(follower, replica)

    async def _serve_first(self, follower: Follower, replica: Replica) -> None:
        incarnation = self.members.incarnation[replica.key]
        try:
            await self.send(follower, replica)
        except GroupError as error:
            self.fence(follower, replica, incarnation, str(error))
        if replica.key in self.members.serving:  # it has not failed since
            replica.serving = True
            follower.flush()

    async def one_serves(self) -> None:
        """Wait until an engine serves."""
        while not self.members.serving:
            self._joined.clear()
            await self._joined.wait()

    async def send(self, follower: Follower, replica: Replica) -> int:
        """Both phases for an engine that does not serve yet; gives the version it then holds. Raises GroupError, also
        when it has been fenced meanwhile."""
        weights, incarnation = follower.newest(), self.members.incarnation[replica.key]
        assert weights is not None
        try:
            async with follower.turn.taken(), asyncio.timeout(self._timeout):
                self._require(replica, incarnation)
                await follower.prepare(replica, weights)
                self._require(replica, incarnation)
                await follower.commit(replica, weights.version)
                await self.probe(follower, replica, weights)
        except TimeoutError:
            raise GroupError(
                f"{replica.key} did not take version {weights.version} within publish.timeout = {self._timeout:g} s"
            ) from None
        return weights.version

    def _require(self, replica: Replica, incarnation: int) -> None:
        """Raises GroupError when it is another one by now: its restart brings that one the weights."""
        if self.members.incarnation[replica.key] != incarnation:
            raise GroupError(f"{replica.key} has been fenced meanwhile: {self._reasons[replica.key]}")

    async def probe(self, follower: Follower, replica: Replica, weights: WeightHandle) -> None:
        """Raises GroupError when an engine does not compute with the weights it has committed."""
        if not self._probe_gap:
            return
        gap = await follower.probe(replica, weights)
        self.largest_gap = max(self.largest_gap, gap)
        if not gap <= self._probe_gap:
            raise GroupError(
                f"{replica.key} has committed version {weights.version}, and differs from its trainer by {gap:.3g} "
                f"nats on fixed tokens (publish.probe_gap = {self._probe_gap:g}): it computes with other weights, "
                "or in another precision"
            )

    # ---- engines that fail ---------------------------------------------------------------------------------------
    def _failed(self, follower: Follower) -> Callable[[Replica, str], None]:
        return lambda replica, reason: self.fence(follower, replica, self.members.incarnation[replica.key], reason)

    def fence(self, follower: Follower, replica: Replica, incarnation: int, reason: str) -> None:
        """Whatever this incarnation still says is refused; another one is started, if nobody is at that already."""
        if incarnation != self.members.incarnation[replica.key]:
            return
        reason = reason or "it gave no reason"
        self.members.fence(replica.key)
        self.fenced.append(replica.key)
        self._reasons[replica.key] = reason
        first_line = (reason.splitlines() or [""])[0]
        self._emit(Fenced(group=follower.name, rank=replica.spec.rank, incarnation=incarnation, reason=first_line))
        follower.fence(replica)
        if self._launched:
            self._begin_again(follower, replica)

    def _begin_again(self, follower: Follower, replica: Replica) -> None:
        if replica.key not in self._restarts and self._tasks is not None:
            task = self._tasks.create_task(self._revive(follower, replica), name=f"restart {replica.key}")
            self._restarts[replica.key] = task

    async def _revive(self, follower: Follower, replica: Replica) -> None:
        """Restart an engine until it takes the weights, and let it join. Raises GroupError after `max_restarts`."""
        loop, budget, incarnation = asyncio.get_running_loop(), replica.budget, -1
        while incarnation != self.members.incarnation[replica.key]:
            delay = budget.failed(loop.time())
            if delay is None:
                raise GroupError(
                    f"{replica.key} failed {len(budget.failures)} times, groups.{follower.name}.max_restarts = "
                    f"{budget.limit}; the last time: {self._reasons[replica.key]}"
                )
            incarnation = self.members.incarnation[replica.key]
            try:
                await follower.restart(replica, delay)
                await self._catch_up(follower, replica)
            except GroupError as error:
                self.fence(follower, replica, incarnation, str(error))
        del self._restarts[replica.key]
        self.members.join(replica.key)
        budget.serves(loop.time())
        replica.serving = True
        self._joined.set()
        follower.flush()

    async def _catch_up(self, follower: Follower, replica: Replica) -> None:
        """Bring an engine to the newest version, or to the one in flight once a publish has begun."""
        version = -1
        while version < self.members.target:
            newest = self.announced.last[follower.follows].version
            try:
                version = await self.send(follower, replica)
            except PublishRefused:
                if self.announced.last[follower.follows].version == newest:
                    raise  # not because newer weights have taken their place
