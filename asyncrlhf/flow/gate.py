"""The asyncio face of the ledger: who waits for a lease, who waits for a batch, and whose lease was lost.

Prompt iterators wait for room; the trainer waits for a batch; both are unblocked by whatever moves the ledger (a put,
a settlement, a publish, a drop). Every method is one transaction on the event loop: nothing is awaited inside, so no
lock is held while anybody waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from asyncrlhf.errors import Diverged, Exhausted, LeaseLost, NoSignal, RunEnded, SampleError
from asyncrlhf.flow.ledger import Batch, Ledger
from asyncrlhf.messages import Experience, Prompt
from asyncrlhf.observe.events import Event, Granted, Settled

__all__ = ("Gate", "Holder", "Popped", "PromptRows")


class PromptRows(Protocol):
    """The data set as the gate reads it: rows by uid, encoded."""

    def has(self, uid: int) -> bool:
        """Whether the stream reaches this far."""
        ...

    def prompt(self, uid: int, attempt: int, version: int) -> Prompt:
        """Raises SampleError for a row that cannot be used."""
        ...

    def release(self, uid: int) -> None:
        """This row will not be asked for again."""
        ...


class Holder:
    """One side of an iterator that holds at most one lease for the worker task it runs in."""

    __slots__ = ("prompt", "task")

    def __init__(self) -> None:
        self.prompt: Prompt | None = None
        self.task: asyncio.Task[object] | None = None


class Popped(NamedTuple):
    """A batch as the ledger counted it, its experiences in pop order, and how long the trainer waited, in seconds."""

    batch: Batch
    experiences: list[Experience]
    waited: float


class Gate:
    """One owner of the ledger. Created on the event loop; every call happens there."""

    def __init__(
        self,
        ledger: Ledger,
        rows: PromptRows,
        emit: Callable[[Event], None],
        *,
        lease_timeout: float = 0.0,
        wait_timeout: float = 60.0,
    ) -> None:
        """`lease_timeout`, `wait_timeout`: seconds; a lease_timeout of 0 never expires."""
        self.ledger = ledger
        self.payloads: dict[int, Experience] = {}
        self.stopping = False
        self.last_moved = 0.0
        self.last_error = ""
        self._rows, self._emit = rows, emit
        self._lease_timeout, self._wait_timeout = lease_timeout, wait_timeout
        self._loop = asyncio.get_running_loop()
        self._holders: dict[int, Holder | None] = {}
        self._granted_at: dict[int, float] = {}
        self._expiries: deque[tuple[float, int, int]] = deque()
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._waiters: deque[asyncio.Future[Prompt | None]] = deque()
        self._trainer: asyncio.Future[Popped | None] | None = None
        self._trainer_since = 0.0
        self._timed_out = False
        self._lost_tasks: set[asyncio.Task[object]] = set()
        self._advancing = False

    # ---- state -------------------------------------------------------------------------------------------------
    @property
    def ended(self) -> bool:
        """No further lease will be granted and no further batch popped."""
        return self.stopping or self.ledger.reason is not None

    @property
    def trainer_waits_since(self) -> float | None:
        """Loop time since when the trainer waits for a batch; None while it does not."""
        return self._trainer_since if self._trainer is not None else None

    def is_current(self, prompt: Prompt) -> bool:
        """Whether this prompt's lease is still the one that may bring a result."""
        lease = self.ledger.live.get(prompt.uid)
        return lease is not None and lease.attempt == prompt.attempt and lease.state != "ready"

    def oldest(self) -> str:
        """The oldest live lease in words, for messages about runs that do not move."""
        if not self._granted_at:
            return "no lease is live"
        uid = min(self._granted_at, key=self._granted_at.__getitem__)
        lease = self.ledger.live[uid]
        age = self._loop.time() - self._granted_at[uid]
        return f"the oldest lease is uid {uid} (attempt {lease.attempt}, {lease.state}), granted {age:.1f} s ago"

    # ---- workers -----------------------------------------------------------------------------------------------
    async def next_prompt(self, holder: Holder) -> Prompt | None:
        """Wait for a lease. None when the run has ended. The holder's former lease, if still held, is filtered."""
        self.release(holder)
        if self.ended:
            return None
        waiter: asyncio.Future[Prompt | None] = self._loop.create_future()
        self._waiters.append(waiter)
        self._advance()
        try:
            prompt = await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and (granted := waiter.result()) is not None:
                self.drop(granted.uid, granted.attempt, "restart")
            raise
        if prompt is not None:
            self.hold(prompt, holder)
        return prompt

    def hold(self, prompt: Prompt, holder: Holder) -> None:
        """From now on `holder` answers for this lease."""
        holder.prompt, holder.task = prompt, asyncio.current_task()
        self._holders[prompt.uid] = holder

    def hand_over(self, prompt: Prompt) -> None:
        """The lease moves on inside a message. Raises LeaseLost if it is no longer current."""
        if not self.is_current(prompt):
            raise LeaseLost(f"the lease of uid {prompt.uid}, attempt {prompt.attempt}, is no longer live")
        self._holders[prompt.uid] = None

    def release(self, holder: Holder) -> None:
        """A holder asks for its next item: what it still holds gave nothing, and settles as filtered."""
        self._settle_held(holder, "filtered", "")

    def fail(self, task: asyncio.Task[object], error: BaseException) -> bool:
        """An exception left a worker: settle what the worker held as failed. False if it held nothing."""
        held = [h for h in self._holders.values() if h is not None and h.task is task and h.prompt is not None]
        self.last_error = f"{type(error).__name__}: {error}"
        for holder in held:
            self._settle_held(holder, "failed", self.last_error)
        return bool(held)

    def filter_held(self, task: asyncio.Task[object]) -> bool:
        """A worker's coroutine returned: what it still held gave nothing. False if it held nothing."""
        held = [h for h in self._holders.values() if h is not None and h.task is task]
        for holder in held:
            self._settle_held(holder, "filtered", "")
        return bool(held)

    def was_lost(self, task: asyncio.Task[object]) -> bool:
        """Whether this task was cancelled because its lease was lost; asking forgets it."""
        lost = task in self._lost_tasks
        self._lost_tasks.discard(task)
        return lost

    # ---- a lease's life ----------------------------------------------------------------------------------------
    def report(self, uid: int, attempt: int, answer: int, version: int, token_count: int) -> None:
        """Model tokens of one answer; those of a lease that is gone count as dropped."""
        self.ledger.report(uid, attempt, answer, version, token_count)
        self._moved()

    def score(self, prompt: Prompt) -> None:
        """Generation is over."""
        self.ledger.score(prompt.uid, prompt.attempt)
        self._moved()

    def ready(self, experience: Experience) -> None:
        """The one put of a lease. Raises LeaseLost if the lease is no longer current."""
        prompt = experience.prompt
        self.hand_over(prompt)
        if not self.ledger.live[prompt.uid].tokens:
            for number, sample in enumerate(experience.rollout.samples):
                for segment in (s for s in sample.segments if s.source != "environment"):
                    self.ledger.report(prompt.uid, prompt.attempt, number, segment.version, segment.token_count)
        self.ledger.ready(
            prompt.uid, prompt.attempt, byte_count=_byte_count(experience), trainable=experience.trainable
        )
        self.payloads[prompt.uid] = experience
        self._forget(prompt.uid)
        self._moved()

    def drop(self, uid: int, attempt: int, reason: str, *, counts: bool = False) -> None:
        """Cancel a lease; its prompt is leased again. `counts`: as an attempt that the prompt lost."""
        self.ledger.drop(uid, attempt, reason, counts=counts)
        self._moved()

    # ---- the trainer -------------------------------------------------------------------------------------------
    async def pop(self) -> Popped | None:
        """Wait for the batch of the next train step. None when the run is done or stopping.

        Raises Exhausted, Diverged or NoSignal when the ledger ends the run, RuntimeError if the last batch is open.
        """
        if self.ledger.training is not None:
            raise RuntimeError(
                f"train step {self.ledger.training.step} is not closed: `await self.coordinator.publish(...)` must end "
                "the body of `async for batch in self.experience.batches()`"
            )
        if self._trainer is not None:
            raise RuntimeError("two coroutines pop batches; a run has one train()")
        if (error := self._end_error()) is not None:
            raise error
        if self.ended:
            return None
        self._trainer = self._loop.create_future()
        self._trainer_since, self._timed_out = self._loop.time(), False
        timer = self._loop.call_later(self._wait_timeout, self._wait_is_over)
        self._advance()
        try:
            return await self._trainer
        finally:
            timer.cancel()
            self._trainer = None

    def applied(self) -> None:
        """The step changed a trained model: its rollouts are consumed."""
        training = self.ledger.training
        assert training is not None
        self.ledger.applied()
        for lease in training.leases:
            self._emit(
                Settled(uid=lease.uid, attempt=lease.attempt, state="consumed", token_count=lease.token_count)
            )
            self._rows.release(lease.uid)
        self._moved()

    def void(self, reason: str) -> None:
        """No optimizer step was applied ("not_finite" or "no_signal"): the batch is lost, the step is tried again."""
        training = self.ledger.training
        assert training is not None
        self.ledger.void("not_finite" if reason == "not_finite" else "no_signal")
        for lease in training.leases:
            tokens = lease.token_count
            self._emit(Settled(uid=lease.uid, attempt=lease.attempt, state="dropped(void)", token_count=tokens))
            self._rows.release(lease.uid)
        self._moved()

    def publish(self, version: int) -> None:
        """Every serving engine has committed `version`."""
        self.ledger.publish(version)
        self._moved()

    def stop(self) -> None:
        """Grant nothing more and pop nothing more; what is in training may finish."""
        self.stopping = True
        self._moved()

    # ---- inside a transaction ----------------------------------------------------------------------------------
    def _moved(self) -> None:
        self.last_moved = self._loop.time()
        self._advance()

    def _advance(self) -> None:
        """Refill, let the trainer look, cancel the lost; repeat until nothing moves (invariant 11)."""
        if self._advancing:
            return
        self._advancing = True
        try:
            moved = True
            while moved:
                moved = False
                while self._admit():
                    moved = True
                if self._trainer is not None and not self._trainer.done() and self._try_pop(self._trainer):
                    moved = True
                if self._cancel_lost():
                    moved = True
        finally:
            self._advancing = False
        if self.ended:
            self._wake_all()

    def _admit(self) -> bool:
        while self._waiters and self._waiters[0].done():
            self._waiters.popleft()
        if not self._waiters or self.ended or not self.ledger.admits():
            return False
        if not self.ledger.again and self.ledger.data_count is None and not self._rows.has(self.ledger.cursor):
            self.ledger.end_data(self.ledger.cursor)
        lease = self.ledger.grant()
        if lease is None:
            return False
        self._emit(Granted(uid=lease.uid, attempt=lease.attempt, version=lease.granted))
        now = self.last_moved = self._loop.time()
        self._granted_at[lease.uid] = now
        try:
            prompt = self._rows.prompt(lease.uid, lease.attempt, lease.granted)
        except SampleError as error:
            self.last_error = str(error)
            self._settle(lease.uid, lease.attempt, "failed", str(error))
            return True
        self._holders[lease.uid] = None
        if self._lease_timeout > 0:
            self._expiries.append((now + self._lease_timeout, lease.uid, lease.attempt))
            self._arm_expiry()
        self._waiters.popleft().set_result(prompt)
        return True

    def _try_pop(self, trainer: asyncio.Future[Popped | None]) -> bool:
        batch = self.ledger.pop(timed_out=self._timed_out)
        if batch is None:
            return False
        experiences = [self.payloads.pop(lease.uid) for lease in batch.leases]
        trainer.set_result(Popped(batch, experiences, self._loop.time() - self._trainer_since))
        return True

    def _cancel_lost(self) -> bool:
        lost = self.ledger.take_lost()
        for lease in lost:
            self.payloads.pop(lease.uid, None)
            holder = self._holders.get(lease.uid)
            self._forget(lease.uid)
            self._emit(
                Settled(
                    uid=lease.uid,
                    attempt=lease.attempt,
                    state=lease.state,
                    token_count=lease.token_count,
                )
            )
            if lease.uid not in self.ledger.again:
                self._rows.release(lease.uid)
            if holder is not None:
                holder.prompt = None
                if holder.task is not None and not holder.task.done():
                    self._lost_tasks.add(holder.task)
                    holder.task.cancel()
        return bool(lost)

    def _settle_held(self, holder: Holder, state: str, error: str) -> None:
        prompt, holder.prompt = holder.prompt, None
        if prompt is not None and self._holders.get(prompt.uid) is holder and self.is_current(prompt):
            self._settle(prompt.uid, prompt.attempt, state, error)

    def _settle(self, uid: int, attempt: int, state: str, error: str) -> None:
        tokens = sum(self.ledger.live[uid].tokens.values())
        self.ledger.settle(uid, attempt, "failed" if state == "failed" else "filtered")
        self._forget(uid)
        self._rows.release(uid)
        self._emit(Settled(uid=uid, attempt=attempt, state=state, token_count=tokens, error=error))
        self._moved()

    def _forget(self, uid: int) -> None:
        self._holders.pop(uid, None)
        self._granted_at.pop(uid, None)

    def _wait_is_over(self) -> None:
        self._timed_out = True
        self._advance()

    def _arm_expiry(self) -> None:
        if self._expiry_timer is None and self._expiries:
            self._expiry_timer = self._loop.call_at(self._expiries[0][0], self._expire)

    def _expire(self) -> None:
        self._expiry_timer = None
        now = self._loop.time()
        while self._expiries and self._expiries[0][0] <= now:
            _, uid, attempt = self._expiries.popleft()
            lease = self.ledger.live.get(uid)
            if lease is not None and lease.attempt == attempt and lease.state != "ready":
                self.drop(uid, attempt, "timeout", counts=True)
        self._arm_expiry()

    def _end_error(self) -> RunEnded | None:
        rules = self.ledger.rules
        if self.ledger.reason == "exhausted":
            limit = rules.max_filtered if rules.max_filtered is not None else 20 * rules.prompts_per_step
            last = f"; the last failure was {self.last_error}" if self.last_error else ""
            return Exhausted(
                f"{limit} prompts in a row were filtered or failed (limits.max_filtered = {limit}) without one rollout "
                f"to train on{last}"
            )
        if self.ledger.reason == "diverged":
            return Diverged(
                f"{rules.max_void_steps} train steps in a row had no finite optimizer step "
                f"(limits.max_void_steps = {rules.max_void_steps}); lower the learning rate or the staleness"
            )
        if self.ledger.reason == "no_signal":
            return NoSignal(
                f"{rules.max_void_steps} train steps in a row held no token to train on (limits.max_void_steps = "
                f"{rules.max_void_steps}): every answer to a prompt earned the same reward, or all tokens were masked"
            )
        return None

    def _wake_all(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
        trainer = self._trainer
        if trainer is not None and not trainer.done():
            error = self._end_error()
            if error is not None:
                trainer.set_exception(error)
            else:
                trainer.set_result(None)


def _byte_count(experience: Experience) -> int:
    """Roughly what an experience occupies as arrays: prompt ids, and per response token id, version and columns."""
    rollout = experience.rollout
    tokens = sum(len(sample.token_ids) for sample in rollout.samples)
    return 4 * len(rollout.prompt.token_ids) * len(rollout.samples) + 24 * tokens
