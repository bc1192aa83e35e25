"""Coordinator: the version clock. Closes train steps and publishes weights in two phases.

A publish waits for the trained model's weights and then for every serving engine: all prepare side by side, and commit
at once or one after another. An engine that fails or is late is fenced, restarted, and joins at the newest version.
`publish` waits for its publish to end; where publishes overlap with training it asks for the weights, behind the steps
that made them, and waits only for the publish before. `serve` runs publishes of that kind and restarts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Literal

from asyncrlhf.control.closing import step_ended
from asyncrlhf.control.evaluation import Evaluator
from asyncrlhf.control.fencing import Fencing
from asyncrlhf.control.underway import UnderWay
from asyncrlhf.control.waiting import Waiting
from asyncrlhf.errors import GroupError, PublishRefused
from asyncrlhf.flow.gate import Gate
from asyncrlhf.groups import TrainGroup
from asyncrlhf.groups.answers import Replica
from asyncrlhf.groups.follower import Follower
from asyncrlhf.messages import WeightHandle
from asyncrlhf.observe.events import Measured, Published
from asyncrlhf.observe.log import EventLog

__all__ = ("Coordinator",)

Phase = Literal["prepare", "commit"]


class Coordinator:
    """One per policy clock."""

    def __init__(
        self,
        gate: Gate,
        trained: Sequence[TrainGroup],
        followers: Sequence[Follower],
        log: EventLog,
        *,
        mode: Literal["in_flight", "drain"] = "in_flight",
        rolling: bool = False,
        overlap: bool = False,
        timeout: float = 300.0,
        probe_gap: float = 0.0,
        evaluator: Evaluator | None = None,
        after_step: Callable[[int], Awaitable[None]] | None = None,
        state: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`rolling`: engines commit one after another. `overlap`: training goes on meanwhile; not where a trained group
        takes turns with one that follows. `timeout`: seconds an engine may take for one phase. `probe_gap`: nats by
        which an engine that has committed weights may differ from the trainer before it is fenced; 0: it is not asked.
        `after_step(version)` is awaited at each boundary. `state`: the algorithm's numbers, reported then."""
        self.publish_count = 0
        self.waits = Waiting()
        self._gate, self._trained, self._followers = gate, trained, followers
        self._emit, self._elapsed = log.emit, log.elapsed
        self._rolling = rolling
        self._overlap = overlap and bool(followers)
        self._under_way = UnderWay(self._elapsed)
        self._closed: list[int] = []  # versions that evaluations have not been asked about yet
        self._mode, self._timeout, self._evaluator, self._after_step = mode, timeout, evaluator, after_step
        self._probe_gap, self._state = probe_gap, state
        self._fencing = Fencing(followers, gate.ledger.step, log, timeout=timeout, probe_gap=probe_gap)
        self._members = self._fencing.members
        self._step_began = self._elapsed()
        self._settling = 0.0  # seconds of waits for publishes, in all
        self._tasks: asyncio.TaskGroup | None = None
        self._stop = asyncio.Event()
        self._stopped = False  # by the user
        gate.whereabouts = lambda uid, attempt: ", ".join(k for f in followers for k in f.engines_of(uid, attempt))

    @property
    def version(self) -> int:
        """V: train steps contained in the trained weights."""
        return self._gate.ledger.step - (self._gate.ledger.training is not None)

    @property
    def publishing(self) -> bool:
        """Whether a publish is under way beside training."""
        return bool(self._under_way)

    async def serve(self) -> None:
        """Runs publishes beside training, restarts and evaluations until `close`."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._fencing.open(self._tasks)
                try:
                    await self._stop.wait()
                finally:
                    self._tasks = None
                    self._fencing.close()
        finally:
            self._under_way.forget()

    def stop(self) -> None:
        """The user wants an end: finish the train step under way, and wait for nothing else."""
        self._stopped = True
        self._gate.stop()
        if self._evaluator is not None:
            self._evaluator.cancel("by the end of the run")

    async def finish(self) -> None:
        """Training is over: let the last publish and an evaluation under way end."""
        await self.settled()
        if self._evaluator is not None:
            await self._evaluator.finish()

    def close(self) -> None:
        self._stop.set()

    async def start(self) -> None:
        """Launch or resume: commit V to every engine before the first lease. One that fails is fenced and restarted,
        as later; this waits until one serves. Raises what the export of a trained model raises."""
        version = self.version
        self._remember(await asyncio.gather(*(group.export(version) for group in self._sources)))
        await self._fencing.launch()
        await self._one_serves()
        self._gate.publish(version)
        if self._evaluator is not None and self._tasks is not None:  # a resume forgets the one that came after its step
            self._evaluator.start(version, version, self._tasks)
        self._step_began = self._elapsed()

    async def publish(self, *groups: TrainGroup) -> None:
        """Close train step t, once: void if no optimizer step of any trained model was applied, else V = t + 1.

        Then, if `publish.every` says so, bring the weights of all followed groups to the engines that follow them;
        weights that have not changed go as a header. Returns when all have committed; where publishes overlap, when the
        publish before is over and the trainers have been asked for the weights, and P rises while the next step trains.
        `groups` are those that the step was meant to train. Raises ValueError for a group that is not trained here,
        PublishRefused when weights fail the gate, GroupError when an engine is lost; `serve` raises these two for a
        publish beside training.
        """
        for group in groups:
            if group not in self._trained:
                raise ValueError(f"publish({group.name}): this run trains {', '.join(g.name for g in self._trained)}")
        training = self._gate.ledger.training
        if training is None:
            raise RuntimeError("publish() closes a train step, and none is open: call it once per batch")
        closed = [group.closed_step() for group in self._trained]
        if not any(applied for applied, _ in closed):
            reasons = [reason for _, rejected in closed for reason in rejected]
            reason = "not_finite" if "not_finite" in reasons else "no_signal"
            self._gate.void(reason)
            self._end_step(training.step, void=reason)
            return
        self._gate.applied()
        if self._gate.ledger.due():
            await self._publish(self.version)
        version = self.version
        self._end_step(training.step)
        self._closed.append(version)
        if not self._under_way:
            self._evaluate()
        if self._after_step is not None:
            settling = self._settling
            await self._after_step(version)  # in no step's time, save for what is exposed of a publish
            self._step_began = self._elapsed() - (self._settling - settling)

    async def settled(self) -> None:
        """Wait until no publish is under way, and P is what the steps so far make it: a checkpoint is taken then."""
        began = self._elapsed()
        with self._gate.trainer_waits() if self._under_way else nullcontext():
            await self._under_way.over()
        self._settling += self._elapsed() - began

    def _evaluate(self) -> None:
        """Start the evaluations that are due, on what is published."""
        for version in self._closed:
            if self._evaluator is not None and self._tasks is not None and not self._stopped:
                self._evaluator.start(version, self._members.published, self._tasks)
        self._closed.clear()

    # ---- moving weights ----------------------------------------------------------------------------------------
    @property
    def _sources(self) -> list[TrainGroup]:
        """The groups that somebody follows."""
        followed = {follower.follows for follower in self._followers}
        return [group for group in self._trained if group.name in followed]

    async def _publish(self, version: int) -> None:
        await self.settled()
        began = self._elapsed()
        asked = [await group.ask_export(version) for group in self._sources]
        if self._overlap and self._tasks is not None:
            self._under_way.begin(self._tasks, self._beside(version, asked, began))
            return
        moved = await asyncio.gather(*asked)
        await self._hold()
        with self._gate.trainer_waits():
            await self._move(version, moved)
        self._published(version, moved, began, self._elapsed() - began)

    async def _beside(self, version: int, asked: Sequence[Awaitable[WeightHandle]], began: float) -> None:
        """A publish while the next step trains: behind the export, which keeps the trainers' engines from it unless
        they have no batch, until the trainer comes to wait."""
        moved = await asyncio.gather(*asked)
        exported, idle = self._elapsed(), 0.0
        if self._gate.pops() and (since := self._gate.trainer_waits_since) is not None:
            idle = asyncio.get_running_loop().time() - since
        await self._hold()
        await self._move(version, moved)
        exposed = max(0.0, exported - began - idle) + self._under_way.waited(exported)
        self._published(version, moved, began, exposed)
        self._evaluate()

    async def _hold(self) -> None:
        """For an evaluation of the version before."""
        if self._evaluator is not None:
            with self.waits.on("the evaluation", "at most evaluation.max_hold"):
                await self._evaluator.hold()

    async def _move(self, version: int, moved: Sequence[WeightHandle]) -> None:
        """Bring the weights to every serving engine."""
        self._remember(moved)
        if not self._followers:
            return
        self._members.prepare(version)
        self._fencing.fenced, self._fencing.largest_gap = [], 0.0
        try:
            await self._side_by_side("prepare")
            if self._rolling:
                await self._one_after_another("commit")
            else:
                await self._side_by_side("commit")
            await self._one_serves()
        finally:
            if self._mode == "drain":
                for follower in self._followers:
                    follower.release()

    async def _one_serves(self) -> None:
        if self._followers and not self._members.serving:
            with self.waits.on("a rollout engine", "that serves"):
                await self._fencing.one_serves()

    def _published(self, version: int, moved: Sequence[WeightHandle], began: float, exposed: float) -> None:
        """P rises."""
        self.publish_count += 1
        self._emit(
            Published(
                version=version,
                changed=any(handle.changed for handle in moved),
                byte_count=sum(handle.byte_count for handle in moved if handle.changed),
                seconds=self._elapsed() - began,
                exposed=exposed,
                fenced=tuple(self._fencing.fenced),
                probe_gap=self._fencing.largest_gap if self._probe_gap else None,
            )
        )
        self._gate.publish(self._members.published if self._followers else version)

    def _behind(self) -> list[tuple[Follower, Replica]]:
        """The serving engines that have not committed the version under way."""
        members, engines = self._members, self._fencing.engines
        return [(f, r) for f, r in engines if r.serving and members.serving.get(r.key, members.target) < members.target]

    async def _side_by_side(self, phase: Phase) -> None:
        async with asyncio.TaskGroup() as tasks:
            for follower, replica in self._behind():
                tasks.create_task(self._one(phase, follower, replica), name=f"{phase} {replica.key}")

    async def _one_after_another(self, phase: Phase) -> None:
        """While one is at it the others sample on; P rises with the last."""
        for follower, replica in self._behind():
            if replica.serving:  # it may have been fenced meanwhile
                await self._one(phase, follower, replica)
                follower.release(replica)

    async def _one(self, phase: Phase, follower: Follower, replica: Replica) -> None:
        incarnation = self._members.incarnation[replica.key]
        weights = self._fencing.announced.last[follower.follows]
        try:
            if phase == "commit" and self._mode == "drain":
                with self.waits.on(replica.key, 'its answers, publish.mode = "drain"'):
                    # a lost answer ends at its lease's time-out
                    await follower.drained(replica, alone=self._rolling)
            if phase == "prepare" and follower.takes_as_it_wakes(replica):
                self._members.acknowledge(replica.key, incarnation)
                return
            async with follower.turn.taken(), asyncio.timeout(self._timeout):
                if self._members.incarnation[replica.key] != incarnation:  # its restart brings the weights
                    return
                if phase == "prepare":
                    await follower.prepare(replica, weights)
                    self._members.acknowledge(replica.key, incarnation)
                else:
                    await follower.commit(replica, weights.version)
                    await self._fencing.probe(follower, replica, weights)
                    self._members.commit(replica.key, incarnation)
        except PublishRefused:
            raise
        except TimeoutError:
            self._fencing.fence(
                follower, replica, incarnation, f"no answer to {phase} within publish.timeout = {self._timeout} s"
            )
        except GroupError as error:
            self._fencing.fence(follower, replica, incarnation, str(error))

    def _remember(self, moved: Sequence[WeightHandle]) -> None:
        """What engines that come to serve are sent from now on."""
        for group, weights in zip(self._sources, moved, strict=True):
            self._fencing.announced.take(group.name, weights)

    def _end_step(self, step: int, *, void: str = "") -> None:
        now = self._elapsed()
        if numbers := self._state():
            self._emit(Measured(group="state", train_step=step, metrics=numbers))
        self._emit(step_ended(self._gate.ledger, step, void, self.publish_count, now - self._step_began))
        self._step_began = now
