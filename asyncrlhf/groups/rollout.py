"""RolloutGroup: engines that answer prompts, share the newest committed weights, and are fenced when they fail.

`sample` waits for all answers to one prompt. The engines queue what they cannot decode yet; a new request goes to the
serving engine with the fewest answers outstanding. Answers to a prompt that is as long as they may become go to one
engine together, which computes their common prefix once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Literal

from asyncrlhf.abc import EngineHandle, EngineSpec, Runtime
from asyncrlhf.errors import AsyncRLHFError, PublishRefused, SampleError
from asyncrlhf.groups.answers import LeaseReports as LeaseReports
from asyncrlhf.groups.answers import Outside, Task
from asyncrlhf.groups.answers import Replica as Replica
from asyncrlhf.groups.answers import Sampling as Sampling
from asyncrlhf.groups.answers import answer_seed as answer_seed
from asyncrlhf.groups.follower import Follower
from asyncrlhf.groups.group import Request
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
from asyncrlhf.observe.events import Sampled
from asyncrlhf.observe.log import EventLog

__all__ = ("LeaseReports", "Replica", "RolloutGroup", "Sampling", "answer_seed")


LAST_WORDS = 5.0
"""Seconds that a group which has been closed waits for the aborts still under way."""


class RolloutGroup(Follower):
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
        reply_timeout: float = 300.0,
        start_timeout: float | None = None,
    ) -> None:
        """`reply_timeout`: seconds an engine may take to accept or to give back answers before it is fenced.
        `start_timeout`: seconds it may take to start; None: for ever."""
        super().__init__(
            name,
            log,
            runtime,
            specs,
            follows=follows,
            kv=kv,
            max_restarts=max_restarts,
            reply_timeout=reply_timeout,
            start_timeout=start_timeout,
        )
        self.sampling = sampling
        self.evaluation_tokens = 0
        self._leases = leases
        self._calls: set[asyncio.Task[None]] = set()
        self._background: asyncio.TaskGroup | None = None
        self._tasks: dict[str, Task] = {}
        self._reported: dict[str, dict[int, int]] = {}  # plain ones: the garbage collector passes them over
        self._held_back: list[GenerateRequest] = []
        self._held = False
        self._numbers = 0
        self._resting = False
        self.outside = Outside(self._note_turn)
        self._has_work, self._leave = asyncio.Event(), asyncio.Event()

    # ---- verbs -------------------------------------------------------------------------------------------------
    async def sample(self, prompt: Prompt) -> Rollout:
        """All answers to a prompt under its lease; their tokens and versions are reported to the ledger.

        Under one lease it may be asked again, for further answers. Raises SampleError when fewer than `min_answers`
        answers could be sampled, LeaseLost if the lease is gone. Cancelling aborts the answers.
        """
        return await self._answers(prompt, self.sampling.answers_per_prompt, self.sampling.temperature, lease=True)

    def engines_of(self, uid: int, attempt: int) -> list[str]:
        """The engines that have answers to this lease outstanding."""
        ids = {i for i, t in self._tasks.items() if t.lease and (t.prompt.uid, t.prompt.attempt) == (uid, attempt)}
        return [replica.key for replica in self.replicas if ids & replica.requests.keys()]

    async def evaluate(self, prompt: Prompt, temperature: float) -> Rollout:
        """One answer outside the ledger, for evaluation."""
        return await self._answers(prompt, 1, temperature, lease=False)

    async def _answers(self, prompt: Prompt, count: int, temperature: float, *, lease: bool) -> Rollout:
        reply: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        first = self._leases.sample_more(prompt) if lease else 0
        task = Task(prompt, lease, count, temperature, reply, self.log.elapsed(), first)
        await self._inbox.put(Request("sample", (task,), reply))
        try:
            return await reply
        finally:
            if task.answers:
                self._abandon(task)

    # ---- control lane: publishing --------------------------------------------------------------------------------
    async def drained(self, replica: Replica, *, alone: bool = False) -> None:
        """Wait until an engine has no answer to a lease outstanding (evaluations are swapped in flight). Requests that
        come meanwhile wait for `release`, or if it is drained `alone` go to the others."""
        self._held = self._held or not alone
        replica.draining = True
        replica.idle.clear()
        self._note_idle(replica)
        await replica.idle.wait()

    def release(self, *replicas: Replica) -> None:
        """Draining is over, of these engines or (none given) of all: send what was held back."""
        self._held = self._held and bool(replicas)
        for replica in replicas or self.replicas:
            replica.draining = False
        self.flush()

    def flush(self) -> None:
        """An engine has come to serve: send what had none to go to, unless all are being drained."""
        self._note_silence()
        waiting, self._held_back = self._held_back, []
        self._dispatch(waiting)
        self._note_turn()

    def fence(self, replica: Replica) -> None:
        """Refuse everything this incarnation may still say. Its leases are dropped, to be leased again; its other
        answers begin anew elsewhere."""
        super().fence(replica)
        lost, replica.requests = replica.requests, {}
        replica.idle.set()
        for request_id, request in lost.items():
            task = self._tasks.get(request_id)
            if task is not None and task.lease:
                self._leases.drop(task.prompt.uid, task.prompt.attempt, "fenced")
            elif task is not None:
                self._reported[request_id] = {}
                self._dispatch([request])
        self._note_silence()
        self._note_turn()

    def _note_silence(self) -> None:
        """Leases do not age while their answers rest, or no engine serves that could go on with them."""
        if self._resting or not any(replica.serving for replica in self.replicas):
            self._leases.silence.pause(self.name, lambda: {t.prompt.uid for t in self._tasks.values() if t.lease})
        else:
            self._leases.silence.go_on(self.name)

    # ---- the actor -----------------------------------------------------------------------------------------------
    async def serve(self) -> None:
        """Consumes requests, gives them to engines; their events complete the replies. Waits for the inbox, not for
        engines: calls to those run beside it."""
        async with asyncio.TaskGroup() as self._background:
            keeper = self._background.create_task(self._keep_turn(), name=f"{self.name}.turn")
            try:
                await super().serve()
                if self._calls:
                    _, unanswered = await asyncio.wait(self._calls, timeout=LAST_WORDS)
                    for call in unanswered:
                        call.cancel()
            finally:
                keeper.cancel()
                self._background = None

    # ---- devices that are shared ---------------------------------------------------------------------------------
    @property
    def wants(self) -> bool:
        """Whether there are answers to go on with, and an engine that could."""
        serving = [replica for replica in self.replicas if replica.serving]
        return any(replica.requests for replica in serving) or bool(serving and self._held_back and not self._held)

    @property
    def must_go_on(self) -> bool:
        """Whether somebody waits for these answers who keeps training waiting: an evaluation, a drain."""
        return self.wants and (self.outside.must_go_on or any(replica.draining for replica in self.replicas))

    @property
    def sleeps(self) -> tuple[str, str]:
        return ("sleep", "wake") if self.turn.offload else ("pause", "go_on")

    async def rest(self) -> None:
        self._resting = True
        self._note_silence()
        await super().rest()

    async def resume(self) -> None:
        await super().resume()
        self._resting = False
        self._note_silence()

    def takes_as_it_wakes(self, replica: Replica) -> bool:
        return replica.asleep

    async def _wake(self, replica: Replica, handle: EngineHandle) -> None:
        """With the newest weights; its answers go on. Raises PublishRefused, unless there are newer ones by then."""
        while (weights := self.newest()) is not None:
            try:
                if await self._wake_with(replica, handle, weights):
                    replica.asleep, replica.version = False, weights.version
                return
            except PublishRefused:
                if (newest := self.newest()) is None or newest.version == weights.version:
                    raise

    async def _wake_with(self, replica: Replica, handle: EngineHandle, weights: WeightHandle) -> bool:
        """Whether it has; one that stands still with its memory takes them before it goes on."""
        if self.turn.offload:
            return await self._change(replica, handle, "wake", weights)
        taken = replica.version == weights.version or (
            await self._change(replica, handle, "prepare", weights)
            and await self._change(replica, handle, "commit", weights.version, self._kv)
        )
        return taken and await self._change(replica, handle, "go_on")

    async def _keep_turn(self) -> None:
        """Waits for answers to go on with, then for the turn; has it until there are none, or others are due."""
        while self.turn.shared:
            await self._has_work.wait()
            self._leave.clear()
            async with self.turn.kept(self._leave):
                await self._leave.wait()

    def _note_turn(self) -> None:
        if self.turn.shared:
            if self.wants:
                self._has_work.set()
            else:
                self._has_work.clear()
                self._leave.set()
            self.turn.note()

    async def handle(self, requests: list[Request]) -> None:
        self._dispatch([answer for request in requests for answer in self._split(request.arguments[0])])
        self._note_turn()

    def _split(self, task: Task) -> Iterable[GenerateRequest]:
        sampling, prompt, self._numbers = self.sampling, task.prompt, self._numbers + 1
        for number in range(task.first, task.first + task.count):
            request_id = f"{self._numbers}.{prompt.uid}.{prompt.attempt}.{number}"
            task.answers[request_id] = number
            self._tasks[request_id] = task
            self.outside.begin(not task.lease)
            self._reported[request_id] = {}
            yield GenerateRequest(
                request_id=request_id,
                prompt_token_ids=prompt.token_ids,
                max_tokens=sampling.max_tokens,
                temperature=task.temperature,
                stop_token_ids=sampling.stop_token_ids,
                seed=answer_seed(sampling.seed, prompt.uid, prompt.attempt, number),
            )

    def _dispatch(self, requests: list[GenerateRequest]) -> None:
        """To the serving engine with the fewest answers outstanding, one that leaves an abort unanswered last, or where
        others of their long prompt are; kept while there is none or all are drained."""
        serving = [r for r in self.replicas if r.serving and not r.draining and not r.asleep]
        if self._held or not serving:
            self._held_back += requests
            return
        batches: dict[str, list[GenerateRequest]] = {}
        for request in requests:
            if (task := self._tasks.get(request.request_id)) is not None:
                replica = min(serving, key=lambda r: (r.aborting > 0, len(r.requests)))
                if len(request.prompt_token_ids) >= request.max_tokens:
                    replica = next((r for r in serving if r.requests.keys() & task.answers.keys()), replica)
                replica.requests[request.request_id] = request
                batches.setdefault(replica.key, []).append(request)
        for replica in serving:
            if replica.key in batches:
                self._start(self._call(replica, replica.incarnation, "add", batches[replica.key]))

    def _abandon(self, task: Task) -> None:
        """The caller is gone: abort what is left of its answers, and account for their tokens."""
        left = set(task.answers)
        for replica in self.replicas:
            ids = [i for i in task.answers if replica.requests.pop(i, None) is not None]
            if ids and self._start(self._abort(replica, replica.incarnation, task, ids)):
                left -= set(ids)
            self._note_idle(replica)
        for request_id in left:
            self._forget(task, request_id)
        self._note_turn()

    def _note_idle(self, replica: Replica) -> None:
        """Tell a drain when the last answer to a lease is in."""
        if replica.draining and not any((t := self._tasks.get(i)) is not None and t.lease for i in replica.requests):
            replica.idle.set()

    async def _abort(self, replica: Replica, incarnation: int, task: Task, ids: list[str]) -> None:
        replica.aborting += 1
        try:
            for partial in await self._call(replica, incarnation, "abort", ids) or ():
                self._settle_tokens(partial.request_id, partial.segments)
        finally:
            replica.aborting -= 1
            for request_id in ids:
                self._forget(task, request_id)

    def _start(self, call: Coroutine[Any, Any, None]) -> bool:
        """Run a call to an engine beside the actor; False when the actor has ended."""
        if self._background is None:
            call.close()
            return False
        task = self._background.create_task(call, name=f"{self.name}.call")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return True

    def _on_events(self, replica: Replica, incarnation: int, events: Sequence[EngineEvent]) -> None:
        with self._leases.together():
            for event in events:
                if not self.emit_busy(replica.spec.rank, event) and incarnation == replica.incarnation:
                    self._on_event(replica, event)

    def _on_event(self, replica: Replica, event: EngineEvent) -> None:
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
        reported = self._reported[request_id]
        reported[version] = reported.get(version, 0) + token_count
        if task.lease:
            prompt = task.prompt
            self._leases.report(prompt.uid, prompt.attempt, task.answers[request_id], version, token_count)
        else:
            self.evaluation_tokens += token_count
            self._leases.alive()

    def _settle_tokens(self, request_id: str, segments: Sequence[Segment]) -> None:
        """Report what has not been reported yet, so that every sampled token is counted exactly once."""
        totals: Counter[int] = Counter()
        for segment in segments:
            if segment.source == "model":
                totals[segment.version] += segment.token_count
        for version in sorted(totals):
            already = self._reported.get(request_id, {}).get(version, 0)
            self._report(request_id, version, totals[version] - already)

    def _finish(self, replica: Replica, request_id: str, outcome: Sample | str) -> None:
        replica.requests.pop(request_id, None)
        self._note_idle(replica)
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
        self._note_turn()

    def _complete(self, task: Task) -> None:
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
                    seconds=self.log.elapsed() - task.started,
                )
            )
        task.reply.set_result(Rollout(prompt=prompt, samples=samples))

    @staticmethod
    def _refuse(task: Task, error: AsyncRLHFError) -> None:
        if not task.reply.done():
            task.reply.set_exception(error)

    def _forget(self, task: Task, request_id: str) -> None:
        task.answers.pop(request_id, None)
        if self._tasks.pop(request_id, None) is not None:
            self.outside.end(not task.lease)
        self._reported.pop(request_id, None)
