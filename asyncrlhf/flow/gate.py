"""The asyncio face of the ledger: who waits for a lease, who waits for a batch, and whose lease was lost.

Prompt iterators wait for room; the trainer waits for a batch; both are unblocked by whatever moves the ledger (a put,
a settlement, a publish, a drop). Every method is one transaction on the event loop: nothing is awaited inside, so no
lock is held while anybody waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from weakref import WeakSet

from asyncrlhf.errors import DataLost, LeaseLost, SampleError
from asyncrlhf.flow.counting import reconcile
from asyncrlhf.flow.ending import describe, end_error
from asyncrlhf.flow.holding import Holder as Holder
from asyncrlhf.flow.holding import Popped as Popped
from asyncrlhf.flow.holding import PromptRows as PromptRows
from asyncrlhf.flow.holding import Unfinished, byte_count, unfinished
from asyncrlhf.flow.ledger import Lease, Ledger
from asyncrlhf.flow.silence import Silence
from asyncrlhf.messages import Experience, Prompt
from asyncrlhf.observe.events import Event, Granted, Settled

__all__ = ("Gate", "Holder", "Popped", "PromptRows")


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
        """`lease_timeout`: seconds without a sign of life after which a lease is lost; 0: never. `wait_timeout`:
        seconds that a pop waits for unfinished rollouts before it does as at_deadline = "drop"."""
        self.ledger = ledger
        self.payloads: dict[int, Experience] = {}
        self.stopping = False
        self.last_moved = 0.0
        """Loop time of the last progress: tokens, a lease that finished a stage, a train step, a publish."""
        self.last_error = ""
        self.last_failure: BaseException | None = None
        self.whereabouts: Callable[[int, int], str] = lambda uid, attempt: ""
        """Where the answers of a lease (uid, attempt) are, in words; set by whoever sends them to engines."""
        self.held_up: dict[str, float] = {}
        """Devices -> loop time since when a trained model is kept from them by answers that somebody waits for."""
        self.on_moved: Callable[[], None] = lambda: None
        """Called behind every transaction."""
        self._rows, self._emit = rows, emit
        self._wait_timeout = wait_timeout
        self._loop = asyncio.get_running_loop()
        self._holders: dict[int, Holder | None] = {}
        self._granted_at: dict[int, float] = {}  # of unfinished leases, oldest first
        self.silence = Silence(self._loop, lease_timeout, self._expire)
        self._waiters: deque[asyncio.Future[Prompt | None]] = deque()
        self._trainer: asyncio.Future[Popped | None] | None = None
        self._trainer_since: float | None = None
        self._timed_out = False
        self._wait_timer: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None
        self._lost_tasks: WeakSet[asyncio.Task[object]] = WeakSet()
        self._advancing = False
        self._moved_within = False

    # ---- state -------------------------------------------------------------------------------------------------
    @property
    def ended(self) -> bool:
        """No further lease will be granted and no further batch popped."""
        return self.stopping or self.ledger.reason is not None or self._failure is not None

    @property
    def granted(self) -> int:
        """Leases granted since the run began."""
        return self.ledger.account().granted_leases

    @property
    def trainer_waits_since(self) -> float | None:
        """Loop time since when the trainer waits, for a batch or for engines to publish to; None while it does not."""
        return self._trainer_since

    @property
    def stands_since(self) -> float | None:
        """Loop time since when training waits for others: the trainer, or a trained model for its devices."""
        return min((x for x in (self._trainer_since, *self.held_up.values()) if x is not None), default=None)

    def pops(self) -> bool:
        """Whether the trainer waits for a batch."""
        return self._trainer is not None

    def waiting_workers(self) -> int:
        """Workers that wait for a lease."""
        return sum(not waiter.done() for waiter in self._waiters)

    @contextmanager
    def trainer_waits(self) -> Generator[None]:
        """Within this the trainer waits for others, and a run in which nothing moves is stalled."""
        self._trainer_since = self._loop.time()
        try:
            yield
        finally:
            self._trainer_since = None

    def is_current(self, prompt: Prompt) -> bool:
        """Whether this prompt's lease is still the one that may bring a result."""
        lease = self.ledger.live.get(prompt.uid)
        return lease is not None and lease.attempt == prompt.attempt and lease.state != "ready"

    def unfinished(self) -> list[Unfinished]:
        """The live leases that are not ready, the oldest first."""
        return unfinished(self._granted_at, self.ledger.live, self.whereabouts, self._loop.time())

    # ---- workers -----------------------------------------------------------------------------------------------
    async def next_prompt(self, holder: Holder) -> Prompt | None:
        """Wait for a lease. None when the run has ended. The holder's former lease, if still held, is filtered."""
        self.release(holder)
        while not self.ended:
            waiter: asyncio.Future[Prompt | None] = self._loop.create_future()
            self._waiters.append(waiter)
            self._advance()
            try:
                prompt = await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled() and (granted := waiter.result()) is not None:
                    self.drop(granted.uid, granted.attempt, "restart")
                raise
            if prompt is not None and self.is_current(prompt):  # it may have been dropped on its way here
                self.hold(prompt, holder)
                return prompt
        return None

    def hold(self, prompt: Prompt, holder: Holder) -> None:
        """From now on `holder` answers for this lease."""
        holder.prompt, holder.task = prompt, asyncio.current_task()
        self._holders[prompt.uid] = holder

    def require_current(self, prompt: Prompt) -> None:
        """Raises LeaseLost if the lease is no longer current."""
        if not self.is_current(prompt):
            raise LeaseLost(f"the lease of uid {prompt.uid}, attempt {prompt.attempt}, is no longer live")

    def hand_over(self, prompt: Prompt) -> None:
        """The lease moves on inside a message. Raises LeaseLost if it is no longer current."""
        self.require_current(prompt)
        self._holders[prompt.uid] = None

    def release(self, holder: Holder) -> None:
        """A holder asks for its next item: what it still holds gave nothing, and settles as filtered."""
        self._settle_held(holder, "filtered", "")

    def fail(self, task: asyncio.Task[object], error: BaseException) -> bool:
        """A worker's exception: what it held has failed, or is leased again (DataLost). False if it held nothing."""
        held = [h for h in self._holders.values() if h is not None and h.task is task and h.prompt is not None]
        self.last_error, self.last_failure = describe(error), error
        for holder in held:
            self._settle_held(holder, "lost" if isinstance(error, DataLost) else "failed", self.last_error)
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
        if self.ledger.report(uid, attempt, answer, version, token_count):
            self.silence.hear(uid, tokens=True)
            self._moved()

    def alive(self) -> None:
        """Tokens were sampled that no lease stands for."""
        self.last_moved = self._loop.time()

    def score(self, prompt: Prompt) -> None:
        """Generation is over."""
        if self.ledger.score(prompt.uid, prompt.attempt):
            self.silence.hear(prompt.uid)
            self._moved()

    def sample_more(self, prompt: Prompt) -> int:
        """Answers are about to be sampled under this lease: the first number free for them. Raises LeaseLost."""
        self.require_current(prompt)
        return self.ledger.reopen(prompt.uid, prompt.attempt) or 0

    def ready(self, experience: Experience) -> None:
        """The one put of a lease. Sampled tokens that are not in it count as dropped.

        Raises LeaseLost if the lease is no longer current, ValueError for tokens that were never sampled."""
        prompt = experience.prompt
        self.require_current(prompt)
        reconcile(self.ledger, experience)
        self.ledger.ready(prompt.uid, prompt.attempt, byte_count=byte_count(experience), trainable=experience.trainable)
        self.payloads[prompt.uid] = experience
        self._forget(prompt.uid)
        self._moved()

    def drop(self, uid: int, attempt: int, reason: str, *, counts: bool = False, fruitless: bool = False) -> None:
        """Cancel a lease; its prompt is leased again. `counts`, `fruitless`: see the ledger's `drop`."""
        self.ledger.drop(uid, attempt, reason, counts=counts, fruitless=fruitless)
        self._advance()

    # ---- the trainer -------------------------------------------------------------------------------------------
    async def pop(self) -> Popped | None:
        """Wait for the batch of the next train step. None when the run is done or stopping.

        Raises Exhausted, Diverged or NoSignal when the ledger ends the run, RuntimeError if the last batch is open.
        """
        self.require_closed()
        if self._trainer is not None:
            raise RuntimeError("two coroutines pop batches; a run has one train()")
        if (error := self._end_error()) is not None:
            raise error
        if self.ended:
            return None
        self._trainer, self._timed_out = self._loop.create_future(), False
        with self.trainer_waits():
            try:
                self._advance()
                return await self._trainer
            finally:
                if self._wait_timer is not None:
                    self._wait_timer.cancel()
                self._trainer = self._wait_timer = None

    def require_closed(self) -> None:
        """Raises RuntimeError if the last batch has not been closed by a publish."""
        if self.ledger.training is not None:
            raise RuntimeError(
                f"train step {self.ledger.training.step} is not closed: `await self.coordinator.publish(...)` must end "
                "the body of `async for batch in self.experience.batches()`"
            )

    def applied(self) -> None:
        """The step changed a trained model: its rollouts are consumed."""
        training = self.ledger.training
        assert training is not None
        self.ledger.applied()
        for lease in training.leases:
            self._emit(Settled(uid=lease.uid, attempt=lease.attempt, state="consumed", token_count=lease.token_count))
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
    @contextmanager
    def together(self) -> Generator[None]:
        """All that moves in this block, which does not await, is one transaction."""
        if self._advancing:
            yield
            return
        self._advancing, self._moved_within = True, False
        try:
            yield
        finally:
            self._advancing = False
            if self._moved_within:
                self._advance()

    def _moved(self) -> None:
        self.last_moved = self._loop.time()
        self._advance()

    def _advance(self) -> None:
        """Refill, let the trainer look, cancel the lost; repeat until nothing moves (invariant 11)."""
        self._moved_within = self._advancing
        if self._advancing:
            return
        self._advancing = True
        try:
            moved = True
            self._cancel_lost()  # before their prompts are granted again
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
        self.on_moved()

    def _admit(self) -> bool:
        while self._waiters and self._waiters[0].done():
            self._waiters.popleft()
        if not self._waiters or self.ended or not self.ledger.admits():
            return False
        lease: Lease | None = None
        try:
            if not self.ledger.again and self.ledger.data_count is None and not self._rows.has(self.ledger.cursor):
                self.ledger.end_data(self.ledger.cursor)
            lease = self.ledger.grant()
            if lease is None:
                return False
            self._granted_at[lease.uid] = self._loop.time()
            self.silence.begin(lease.uid)
            self._emit(Granted(uid=lease.uid, attempt=lease.attempt, version=lease.granted))
            prompt = self._rows.prompt(lease.uid, lease.attempt, lease.granted)
        except SampleError as error:
            assert lease is not None
            self.last_error, self.last_failure = describe(error), error
            self._settle(lease.uid, lease.attempt, "failed", str(error))
            return True
        except Exception as error:  # the data source broke: that ends the run, whoever's transaction this is
            self._failure = error
            return False
        self._holders[lease.uid] = None
        self._waiters.popleft().set_result(prompt)
        return True

    def _try_pop(self, trainer: asyncio.Future[Popped | None]) -> bool:
        batch = self.ledger.pop(timed_out=self._timed_out)
        if batch is None:
            held = self.ledger.ready_count >= self.ledger.rules.prompts_per_step
            if held and self._wait_timer is None and self.ledger.reason is None:
                self._wait_timer = self._loop.call_later(self._wait_timeout, self._wait_is_over)
            return False
        experiences = [self.payloads.pop(lease.uid) for lease in batch.leases]
        since = self._trainer_since
        assert since is not None
        trainer.set_result(Popped(batch, experiences, self._loop.time() - since))
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
                if holder.task is not None:
                    self._lost_tasks.add(holder.task)  # also if it is done, and its worker has yet to look
                    holder.task.cancel()
        return bool(lost)

    def _settle_held(self, holder: Holder, state: str, error: str) -> None:
        prompt, holder.prompt = holder.prompt, None
        if prompt is not None and self._holders.get(prompt.uid) is holder and self.is_current(prompt):
            self._settle(prompt.uid, prompt.attempt, state, error)

    def _settle(self, uid: int, attempt: int, state: str, error: str) -> None:
        if state == "lost":
            return self.drop(uid, attempt, state, fruitless=True)
        tokens = sum(self.ledger.live[uid].tokens.values())
        self.ledger.settle(uid, attempt, "failed" if state == "failed" else "filtered")
        self._forget(uid)
        self._rows.release(uid)
        self._emit(Settled(uid=uid, attempt=attempt, state=state, token_count=tokens, error=error))
        self._moved()

    def _forget(self, uid: int) -> None:
        self._holders.pop(uid, None)
        self._granted_at.pop(uid, None)
        self.silence.end(uid)

    def _wait_is_over(self) -> None:
        self._timed_out = True
        self._advance()

    def _expire(self) -> None:
        """Lease again what nothing was heard of for too long."""
        live = self.ledger.live
        for uid in self.silence.take_due(lambda uid: bool(live[uid].tokens)):
            self.ledger.drop(uid, live[uid].attempt, "timeout", counts=True, fruitless=True)
        self._advance()

    def _end_error(self) -> Exception | None:
        return self._failure or end_error(self.ledger, self.last_error, self.last_failure)

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
