"""RolloutGroup: engines that answer prompts, share the newest committed weights, and are fenced when they fail.

`sample` waits for all answers to one prompt. The engines queue what they cannot decode yet; a new request goes to the
serving engine with the fewest answers outstanding.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from asyncrlhf.abc import EngineHandle, EngineSpec, Runtime
from asyncrlhf.errors import AsyncRLHFError, GroupError, SampleError
from asyncrlhf.groups.group import Group, Request
from asyncrlhf.messages import (
    EngineEvent,
    Failed,
    Finished,
    GenerateRequest,
    Progress,
    Prompt,
    Rejected,
    Rollout,
    Sample,
    Segment,
    WeightHandle,
)
from asyncrlhf.observe.events import Restarted, Sampled
from asyncrlhf.observe.log import EventLog

__all__ = ("LeaseReports", "RolloutGroup", "Sampling", "answer_seed")


class LeaseReports(Protocol):
    """Whom the group tells what it knows about leases (the gate)."""

    def report(self, uid: int, attempt: int, answer: int, version: int, token_count: int) -> None: ...

    def score(self, prompt: Prompt) -> None: ...

    def drop(self, uid: int, attempt: int, reason: str, *, counts: bool = False) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample, from the configuration of the group and the run."""

    answers_per_prompt: int
    min_answers: int
    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int


@dataclass(slots=True, eq=False)
class _Task:
    """All answers to one prompt. `answers`: request id -> answer number, of those still outstanding."""

    prompt: Prompt
    lease: bool
    count: int
    temperature: float
    reply: asyncio.Future[Rollout]
    started: float
    answers: dict[str, int] = field(default_factory=dict[str, int])
    samples: dict[int, Sample] = field(default_factory=dict[int, Sample])
    rejected: list[str] = field(default_factory=list[str])


@dataclass(slots=True, eq=False)
class Replica:
    """One engine: `key` names it in the membership, `requests` are its answers outstanding."""

    key: str
    spec: EngineSpec
    handle: EngineHandle | None = None
    incarnation: int = 0
    restarts: int = 0
    serving: bool = False
    requests: dict[str, GenerateRequest] = field(default_factory=dict[str, GenerateRequest])
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class RolloutGroup(Group):
    """The generation pool."""

    def __init__(
        self,
        name: str,
        log: EventLog,
        runtime: Runtime,
        specs: Sequence[EngineSpec],
        sampling: Sampling,
        leases: LeaseReports,
        *,
        follows: str = "policy",
        kv: Literal["rebuild", "keep"] = "rebuild",
        max_restarts: int = 3,
    ) -> None:
        super().__init__(name, log)
        self.follows = follows
        self.sampling = sampling
        self.replicas = [Replica(f"{name}/{spec.rank}", spec) for spec in specs]
        self.on_failure: Callable[[Replica, str], None] = lambda replica, reason: None
        self.evaluation_tokens = 0
        self._runtime, self._leases, self._kv, self._max_restarts = runtime, leases, kv, max_restarts
        self._tasks: dict[str, _Task] = {}
        self._reported: dict[str, Counter[int]] = {}
        self._held_back: list[GenerateRequest] = []
        self._held = False
        self._numbers = 0

    async def start(self) -> None:
        """Spawn every engine. Raises GroupError with the original traceback."""
        async with asyncio.TaskGroup() as tasks:
            for replica in self.replicas:
                tasks.create_task(self.spawn(replica))

    async def spawn(self, replica: Replica) -> None:
        """Build the engine of a replica under its current incarnation."""
        incarnation = replica.incarnation

        def on_events(events: Sequence[EngineEvent]) -> None:
            self._on_events(replica, incarnation, events)

        replica.handle = await self._runtime.spawn(replica.spec, on_events)

    # ---- verbs -------------------------------------------------------------------------------------------------
    async def sample(self, prompt: Prompt) -> Rollout:
        """All answers to a prompt under its lease; their tokens and versions are reported to the ledger.

        Raises SampleError when fewer than `min_answers` answers could be sampled. Cancelling aborts the answers.
        """
        return await self._answers(prompt, self.sampling.answers_per_prompt, self.sampling.temperature, lease=True)

    async def evaluate(self, prompt: Prompt, temperature: float) -> Rollout:
        """One answer outside the ledger, for evaluation."""
        return await self._answers(prompt, 1, temperature, lease=False)

    async def _answers(self, prompt: Prompt, count: int, temperature: float, *, lease: bool) -> Rollout:
        reply: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        task = _Task(prompt, lease, count, temperature, reply, time.perf_counter())
        await self._inbox.put(Request("sample", (task,), reply))
        try:
            return await reply
        finally:
            if task.answers:
                await self._abandon(task)

    # ---- control lane: publishing --------------------------------------------------------------------------------
    async def prepare(self, replica: Replica, weights: WeightHandle) -> None:
        """First phase on one engine."""
        await self._engine(replica).call("prepare", weights)

    async def commit(self, replica: Replica, version: int) -> None:
        """Second phase on one engine, at its next token boundary."""
        await self._engine(replica).call("commit", version, self._kv)

    async def drained(self, replica: Replica) -> None:
        """Wait until an engine has no answer outstanding. Requests that come meanwhile wait for `release`."""
        self._held = True
        if replica.requests:
            replica.idle.clear()
            await replica.idle.wait()

    async def release(self) -> None:
        """Send what was held back while draining."""
        self._held = False
        waiting, self._held_back = self._held_back, []
        if waiting:
            await self._send(waiting)

    def fence(self, replica: Replica, reason: str) -> None:
        """Refuse everything this incarnation may still say; its leases are dropped and leased again."""
        replica.serving = False
        replica.incarnation += 1
        lost, replica.requests = replica.requests, {}
        replica.idle.set()
        for request_id in lost:
            task = self._tasks.get(request_id)
            if task is None:
                continue
            if task.lease:
                self._leases.drop(task.prompt.uid, task.prompt.attempt, "fenced")
            else:
                self._refuse(task, GroupError(f"{replica.key} was fenced: {reason}"))

    async def restart(self, replica: Replica, reason: str) -> None:
        """A fresh engine in a fenced one's place; it serves once the coordinator has it joined.

        Raises GroupError after `max_restarts`.
        """
        old, replica.handle = replica.handle, None
        if old is not None:
            await old.close()
        replica.restarts += 1
        if replica.restarts > self._max_restarts:
            raise GroupError(
                f"{replica.key} failed {replica.restarts} times, groups.{self.name}.max_restarts = "
                f"{self._max_restarts}; the last time: {reason}"
            )
        await self.spawn(replica)
        self.emit(Restarted(group=self.name, rank=replica.spec.rank, incarnation=replica.incarnation))

    # ---- the actor -----------------------------------------------------------------------------------------------
    async def handle(self, requests: list[Request]) -> None:
        outgoing: list[GenerateRequest] = []
        for request in requests:
            outgoing += self._split(request.arguments[0])
        if self._held:
            self._held_back += outgoing
        else:
            await self._send(outgoing)

    def _split(self, task: _Task) -> Iterable[GenerateRequest]:
        sampling, prompt, self._numbers = self.sampling, task.prompt, self._numbers + 1
        for number in range(task.count):
            request_id = f"{self._numbers}.{prompt.uid}.{prompt.attempt}.{number}"
            task.answers[request_id] = number
            self._tasks[request_id] = task
            self._reported[request_id] = Counter()
            yield GenerateRequest(
                request_id=request_id,
                prompt_token_ids=prompt.token_ids,
                max_tokens=sampling.max_tokens,
                temperature=task.temperature,
                stop_token_ids=sampling.stop_token_ids,
                seed=answer_seed(sampling.seed, prompt.uid, prompt.attempt, number),
            )

    async def _send(self, requests: list[GenerateRequest]) -> None:
        batches: dict[str, list[GenerateRequest]] = {}
        replicas = {replica.key: replica for replica in self.replicas if replica.serving}
        for request in requests:
            if request.request_id not in self._tasks:
                continue
            if not replicas:
                self._held_back.append(request)
                continue
            replica = min(replicas.values(), key=lambda r: len(r.requests))
            replica.requests[request.request_id] = request
            batches.setdefault(replica.key, []).append(request)
        for key, batch in batches.items():
            replica, incarnation = replicas[key], replicas[key].incarnation
            try:
                await self._engine(replica).call("add", batch)
            except GroupError as error:
                if replica.incarnation == incarnation:
                    self.on_failure(replica, str(error))

    async def _abandon(self, task: _Task) -> None:
        """The caller is gone or was refused: abort what is left of its answers, and account for their tokens."""
        for replica in self.replicas:
            ids = [i for i in task.answers if replica.requests.pop(i, None) is not None]
            if not ids or replica.handle is None:
                continue
            try:
                for partial in await asyncio.shield(replica.handle.call("abort", ids)):
                    self._settle_tokens(partial.request_id, partial.segments)
            except GroupError:
                pass  # a broken engine is fenced by its Failed event
            if not replica.requests:
                replica.idle.set()
        for request_id in list(task.answers):
            self._forget(task, request_id)

    def _on_events(self, replica: Replica, incarnation: int, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if self.emit_busy(replica.spec.rank, event) or incarnation != replica.incarnation:
                continue
            match event:
                case Progress():
                    self._report(event.request_id, event.version, event.token_count)
                case Finished():
                    self._settle_tokens(event.request_id, event.sample.segments)
                    self._finish(replica, event.request_id, event.sample)
                case Rejected():
                    self._finish(replica, event.request_id, event.reason)
                case Failed():
                    self.on_failure(replica, event.reason)
                case _:
                    raise TypeError(f"{replica.key} sent {type(event).__name__}, which no rollout engine may send")

    def _report(self, request_id: str, version: int, token_count: int) -> None:
        task = self._tasks.get(request_id)
        if task is None or token_count <= 0:
            return
        self._reported[request_id][version] += token_count
        if task.lease:
            prompt = task.prompt
            self._leases.report(prompt.uid, prompt.attempt, task.answers[request_id], version, token_count)
        else:
            self.evaluation_tokens += token_count

    def _settle_tokens(self, request_id: str, segments: Sequence[Segment]) -> None:
        """Report what has not been reported yet, so that every sampled token is counted exactly once."""
        totals: Counter[int] = Counter()
        for segment in segments:
            if segment.source == "model":
                totals[segment.version] += segment.token_count
        for version in sorted(totals):
            already = self._reported[request_id][version] if request_id in self._reported else 0
            self._report(request_id, version, totals[version] - already)

    def _finish(self, replica: Replica, request_id: str, outcome: Sample | str) -> None:
        replica.requests.pop(request_id, None)
        if not replica.requests:
            replica.idle.set()
        task = self._tasks.get(request_id)
        if task is None:
            return
        if isinstance(outcome, Sample):
            task.samples[task.answers[request_id]] = outcome
        else:
            task.rejected.append(outcome)
        self._forget(task, request_id)
        if not task.answers and not task.reply.done():
            self._complete(task)

    def _complete(self, task: _Task) -> None:
        prompt = task.prompt
        needed = self.sampling.min_answers if task.lease else 1
        if len(task.samples) < needed:
            message = (
                f"uid {prompt.uid}: {len(task.samples)} of {task.count} answers were sampled and "
                f"limits.min_answers = {needed}; the engine said: {task.rejected[0]}"
            )
            self._refuse(task, SampleError(message))
            return
        samples = tuple(task.samples[number] for number in sorted(task.samples))
        if task.lease:
            self._leases.score(prompt)
            versions = [segment.version for sample in samples for segment in sample.segments]
            self.emit(
                Sampled(
                    uid=prompt.uid,
                    attempt=prompt.attempt,
                    token_count=sum(len(sample.token_ids) for sample in samples),
                    oldest_version=min(versions),
                    newest_version=max(versions),
                    seconds=time.perf_counter() - task.started,
                )
            )
        task.reply.set_result(Rollout(prompt=prompt, samples=samples))

    @staticmethod
    def _refuse(task: _Task, error: AsyncRLHFError) -> None:
        if not task.reply.done():
            task.reply.set_exception(error)

    def _forget(self, task: _Task, request_id: str) -> None:
        task.answers.pop(request_id, None)
        self._tasks.pop(request_id, None)
        self._reported.pop(request_id, None)

    def _engine(self, replica: Replica) -> EngineHandle:
        if replica.handle is None:
            raise GroupError(f"{replica.key} has no engine: it was fenced and has not been restarted yet")
        return replica.handle


def answer_seed(run: int, uid: int, attempt: int, number: int) -> int:
    """A 63-bit seed for one answer, equal in every run of the same seed and different for every answer of a run."""
    mixed = run
    for part in (uid, attempt, number):
        mixed = (mixed * 6364136223846793005 + part + 1442695040888963407) & (2**64 - 1)
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)  # the finalizer of splitmix64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
        mixed ^= mixed >> 31
    return mixed >> 1
