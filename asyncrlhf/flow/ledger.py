"""The staleness ledger: who may generate, what may be trained. Pure: every method is one transaction, nothing waits.

Words as in the contract: B rollouts per train step, K = max_staleness, D = lookahead, n = next train step to pop,
P = published version, V = version the trainer holds. Live = running + scoring + ready.

A lease's life:  grant -> report... -> score -> ready -> (pop) training -> consumed
                 and out of it: filtered, failed, dropped(reason), the last either final or leased again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Literal

from asyncrlhf.flow.census import Census
from asyncrlhf.flow.leases import Account as Account
from asyncrlhf.flow.leases import Batch as Batch
from asyncrlhf.flow.leases import Books
from asyncrlhf.flow.leases import Lease as Lease
from asyncrlhf.flow.leases import LedgerRules as LedgerRules
from asyncrlhf.flow.leases import LedgerState as LedgerState
from asyncrlhf.flow.leases import Reason as Reason
from asyncrlhf.flow.leases import TokenAccount as TokenAccount

__all__ = ("Account", "Batch", "Lease", "Ledger", "LedgerRules", "LedgerState", "Reason", "TokenAccount")

LIVE = ("running", "scoring", "ready")


class Ledger:
    """Admission, settlement, the pop, void steps, end of data and resume of one policy's experience queue."""

    def __init__(self, rules: LedgerRules, data_count: int | None = None) -> None:
        self.rules = rules
        self.data_count = data_count
        """Prompts in the data stream; None while its end is unknown."""
        self.step = 0
        """n: the next train step to pop; t + 1 while step t trains."""
        self.published: int | None = None
        """P; None, and nothing is admitted, before the first commit."""
        self.training: Batch | None = None
        """Popped, and neither applied nor void yet."""
        self.again: dict[int, tuple[int, int]] = {}
        """uid -> (attempt, tries) of the next lease of a prompt that lost one."""
        self.cursor = 0
        """The next fresh prompt; every uid below it has been granted."""
        self.low_water = 0
        """Every uid below it is in a terminal state."""
        self.settled: dict[int, str] = {}
        """uid -> terminal state, above the low-water mark only."""
        self._census = Census(rules)
        self._reason: Reason | None = None
        self._index = 0
        self._again_heap: list[int] = []  # the keys of `again`
        self._lost: list[Lease] = []
        self._books = Books()
        self._filtered_row = self._void_row = 0
        self._void_not_finite = False

    @property
    def live(self) -> Mapping[int, Lease]:
        """uid -> lease that is running, scoring or ready, in the order of admission."""
        return self._census.by_uid

    @property
    def version(self) -> int:
        """V: train steps contained in the trainer's weights."""
        return self.step if self.training is None else self.training.step

    @property
    def reason(self) -> Reason | None:
        """How the run ends, None while it goes on."""
        total = self.rules.train_steps
        if total is not None and self.training is None and self.step >= total:
            return "train_steps"
        return self._reason

    # ---- admission

    def room(self) -> int:
        """How many leases may be live: B (P + D - n + 1), and no more than the remaining train steps take."""
        if self.published is None:
            return 0
        rules = self.rules
        steps = self.published + rules.lookahead - self.step + 1
        if rules.train_steps is not None:
            steps = min(steps, rules.train_steps - self.step)
        return rules.prompts_per_step * steps

    def admits(self) -> bool:
        """May one more lease be live? Says nothing about whether a prompt is left."""
        live, limit = len(self.live), self.rules.byte_limit
        below_limit = limit is None or live < self.rules.prompts_per_step or self._census.ready_bytes < limit
        return self.reason is None and live + 1 <= self.room() and below_limit

    @property
    def ready_count(self) -> int:
        """Rollouts that wait for a pop."""
        return self._census.count("ready")

    @property
    def sampled_count(self) -> int:
        """Rollouts whose answers are all there, ready or not."""
        return self._census.count("scoring") + self.ready_count

    def data_left(self) -> bool:
        """Is a prompt left, fresh or to be leased again?"""
        return bool(self.again) or self.data_count is None or self.cursor < self.data_count

    def end_data(self, count: int) -> None:
        """The data stream holds exactly `count` prompts. Raises ValueError if more of them have been granted."""
        if count < self.cursor:
            raise ValueError(f"the data is said to end after {count} prompts, but {self.cursor} have been granted")
        self.data_count = count

    def grant(self) -> Lease | None:
        """A lease for the oldest prompt to be leased again, else for the next fresh one; None: no room or no prompt."""
        if self.published is None or not self.admits() or not self.data_left():
            return None
        if self._again_heap:
            uid = heapq.heappop(self._again_heap)
            attempt, tries = self.again.pop(uid)
        else:
            uid, attempt, tries = self.cursor, 1, 1
            self.cursor += 1
        lease = Lease(uid=uid, attempt=attempt, tries=tries, index=self._index, granted=self.published)
        self._census.enter(lease)
        self._index += 1
        self._books.granted_leases += 1
        return lease

    # ---- a lease's life. False: refused, the attempt is old or the lease has settled

    def report(self, uid: int, attempt: int, answer: int, version: int, count: int) -> bool:
        """`count` further model tokens of one answer were sampled by `version`. Refused tokens count as dropped.

        Raises ValueError if the version falls within the answer, or does not lie in P at the grant .. V.
        """
        if count < 0:
            raise ValueError(f"prompt {uid}, answer {answer}: {count} tokens reported; a report adds 0 or more")
        lease = self._find(uid, attempt, "running")
        if lease is None:
            self._books.generated += count
            self._books.dropped += count
            return False
        if count:
            oldest = lease.newest.get(answer, lease.granted)
            if not oldest <= version <= self.version:
                raise ValueError(
                    f"prompt {uid}, answer {answer}: tokens of version {version} reported; after version {oldest}, and "
                    f"while the trainer holds {self.version}, it has to lie between the two"
                )
            self._census.add_tokens(lease, answer, version, count)
            self._books.generated += count
        return True

    def reopen(self, uid: int, attempt: int) -> int | None:
        """More answers are to be sampled under this lease; gives the first number free for them. None: refused."""
        lease = self._find(uid, attempt, "running", "scoring")
        if lease is None:
            return None
        if lease.state == "scoring":
            self._census.move(lease, "running")
        return max(lease.newest, default=-1) + 1

    def discard(self, uid: int, attempt: int, tokens: Mapping[int, int]) -> None:
        """Version -> tokens of a lease that will not be trained on: they count as dropped, the lease lives on."""
        lease = self._find(uid, attempt, "running", "scoring")
        if lease is not None:
            self._census.remove_tokens(lease, tokens)
            self._books.dropped += sum(tokens.values())

    def score(self, uid: int, attempt: int) -> bool:
        """Every answer is complete; rewards are pending."""
        lease = self._find(uid, attempt, "running")
        if lease is None:
            return False
        self._census.move(lease, "scoring")
        return True

    def ready(self, uid: int, attempt: int, *, byte_count: int, trainable: bool = True) -> bool:
        """The one put of a lease. `trainable` False: it takes its place in a batch with every token masked."""
        lease = self._find(uid, attempt, "running", "scoring")
        if lease is None:
            return False
        lease.byte_count, lease.trainable = byte_count, trainable
        self._census.move(lease, "ready")
        self._filtered_row = 0
        return True

    def settle(self, uid: int, attempt: int, state: Literal["filtered", "failed"]) -> bool:
        """Terminal for the prompt; it is never leased again."""
        lease = self._find(uid, attempt, "running", "scoring")
        if lease is None:
            return False
        self._census.leave(lease)
        self._end(lease, state)
        self._count_fruitless()
        return True

    def drop(
        self, uid: int, attempt: int, reason: str, *, again: bool = True, counts: bool = False, fruitless: bool = False
    ) -> bool:
        """`dropped(reason)`. `again`: lease the prompt again; `counts`: the prompt lost this attempt, and after
        `max_attempts` of them the drop is terminal; `fruitless`: it counts among the filtered and failed in a row."""
        lease = self._find(uid, attempt, *LIVE)
        if lease is None:
            return False
        self._census.leave(lease)
        self._lost.append(lease)
        if fruitless:
            self._count_fruitless()
        tries = lease.tries + counts
        if again and tries <= self.rules.max_attempts:
            lease.state = f"dropped({reason})"
            self._books.dropped += lease.token_count
            self._books.lease_again(reason)
            self.again[uid] = (attempt + 1, tries)
            heapq.heappush(self._again_heap, uid)
        else:
            self._end(lease, f"dropped({reason})")
        return True

    def _count_fruitless(self) -> None:
        self._filtered_row += 1
        if self._filtered_row >= self.rules.filtered_limit:
            self._reason = "exhausted"

    def take_lost(self) -> list[Lease]:
        """Leases dropped since the last call, by the pop too; whoever still works on them should stop."""
        lost, self._lost = self._lost, []
        return lost

    # ---- the pop

    def pop(self, *, timed_out: bool = False) -> Batch | None:
        """The batch of step n; None while the trainer has to wait or once the run has ended (see `reason`).

        `timed_out`: the trainer has waited `wait_timeout`, so `wait` does as `drop` would.
        """
        if self.training is not None:
            raise RuntimeError(f"step {self.training.step} is still training: report it applied or void before a pop")
        if self.reason is not None:
            return None
        rules, size = self.rules, self.rules.prompts_per_step
        if rules.at_deadline == "mask":
            for lease in self._census.ready_older_than(self.step - rules.max_staleness):
                self.drop(lease.uid, lease.attempt, "expired", counts=True)
        if self._census.count("ready") < size and not self._last_batch():
            return None
        if rules.order == "admission":
            chosen = list(islice(self.live.values(), size))
            if any(lease.state != "ready" for lease in chosen):
                return None
        elif rules.at_deadline == "mask" or self._rest_is_feasible(timed_out=timed_out):
            chosen = heapq.nsmallest(size, self._census.ready(), key=self._urgency)
        else:
            return None
        return self._train(chosen)

    def _last_batch(self) -> bool:
        """Has the data ended, with fewer than B rollouts left to train? Ends the run if none is."""
        if self.data_left() or self._census.count("ready") < len(self.live):
            return False
        if self.rules.last == "drop":
            for lease in list(self.live.values()):
                self.drop(lease.uid, lease.attempt, "end", again=False)
        if not self.live:
            self._reason = "completed"
        return bool(self.live)

    def _rest_is_feasible(self, *, timed_out: bool) -> bool:
        """Can steps n + 1, n + 2, ... take, B a step, every lease that this pop leaves, each by its deadline? Where the
        rules say so, unfinished leases are cancelled, earliest deadline first, until they can."""
        rest = self._census.births_left_by(self.rules.prompts_per_step)
        if self._feasible(rest):
            return True
        if self.rules.at_deadline == "wait" and not timed_out:
            return False
        for lease in sorted(self._census.unfinished(), key=self._urgency):
            rest[lease.birth(self.rules)] -= 1
            self.drop(lease.uid, lease.attempt, "late", counts=True)
            if self._feasible(rest):
                return True
        return False

    def _feasible(self, births: Mapping[int, int]) -> bool:
        """In the order of deadlines, j <= B (deadline_j - n) for the j-th lease."""
        passed = 0
        for birth in sorted(births):
            passed += births[birth]
            if passed > self.rules.prompts_per_step * (birth + self.rules.max_staleness - self.step):
                return False
        return True

    def _train(self, chosen: list[Lease]) -> Batch:
        oldest = self.step - self.rules.max_staleness
        trained: Counter[int] = Counter()
        masked: Counter[int] = Counter()
        for lease in chosen:
            self._census.leave(lease)
            lease.state = "training"
            for version, count in lease.tokens.items():
                (trained if lease.trainable and version >= oldest else masked)[version] += count
        self.training = Batch(step=self.step, leases=tuple(chosen), trained=dict(trained), masked=dict(masked))
        self.step += 1
        return self.training

    # ---- the end of a train step

    def applied(self) -> None:
        """The step changed some trained model: V = n."""
        batch = self._close_training()
        for lease in batch.leases:
            self._end(lease, "consumed")
        self._books.trained += sum(batch.trained.values())
        self._books.masked += sum(batch.masked.values())
        self._void_row, self._void_not_finite = 0, False

    def void(self, reason: Literal["not_finite", "no_signal"]) -> None:
        """No optimizer step of any trained model was applied: n returns to t, and the batch is lost."""
        batch = self._close_training()
        self.step = batch.step
        for lease in batch.leases:
            self._end(lease, "dropped(void)")
        self._void_row += 1
        self._void_not_finite |= reason == "not_finite"
        if self._void_row >= self.rules.max_void_steps:
            self._reason = "diverged" if self._void_not_finite else "no_signal"

    def due(self) -> bool:
        """Does the step that has just been applied move weights?"""
        return self.step % self.rules.publish_every == 0

    def publish(self, version: int) -> None:
        """Every serving engine has committed `version`: P. Raises ValueError if P would fall or pass V."""
        least = 0 if self.published is None else self.published
        if not least <= version <= self.version:
            raise ValueError(
                f"version {version} cannot be published: P = {least} never falls, and the trainer holds {self.version}"
            )
        self.published = version

    def _close_training(self) -> Batch:
        if self.training is None:
            raise RuntimeError(f"no batch is training; pop step {self.step} first")
        batch, self.training = self.training, None
        return batch

    # ---- terms of one lease

    def _find(self, uid: int, attempt: int, *states: str) -> Lease | None:
        lease = self.live.get(uid)
        return lease if lease is not None and lease.attempt == attempt and lease.state in states else None

    def _urgency(self, lease: Lease) -> tuple[int, int]:
        return lease.deadline(self.rules), lease.index

    def _end(self, lease: Lease, state: str) -> None:
        """A terminal state."""
        lease.state = state
        self._books.end(state)
        if state != "consumed":
            self._books.dropped += lease.token_count
        self.settled[lease.uid] = state
        while self.low_water in self.settled:
            del self.settled[self.low_water]
            self.low_water += 1

    # ---- resume

    def snapshot(self) -> LedgerState:
        """The state at a train-step boundary, as a value. Raises RuntimeError while a batch is training."""
        if self.training is not None:
            raise RuntimeError(f"step {self.training.step} is training; a snapshot is taken at a train-step boundary")
        return LedgerState(
            step=self.step,
            data_count=self.data_count,
            cursor=self.cursor,
            index=self._index,
            low_water=self.low_water,
            settled=dict(self.settled),
            again=dict(self.again),
            leases=tuple(lease.copy() for lease in self.live.values()),
            books=self._books.copy(),
            filtered_row=self._filtered_row,
            void_row=self._void_row,
            void_not_finite=self._void_not_finite,
        )

    @classmethod
    def restore(cls, rules: LedgerRules, state: LedgerState, payloads: Collection[int]) -> Ledger:
        """Continue from `state`; `payloads`: uids of the ready leases whose rollout was saved. A ready lease stays iff
        it is among them and its lag fits; the others are `dropped(restart)` and leased again. P is undefined until
        the first publish.

        `rules` may differ from those the state was saved under: ready leases that the new ones have no place for are
        leased again too, and a row of filtered prompts or void steps that is too long already starts over.
        """
        self = cls(rules, state.data_count)
        self.step, self.cursor, self.low_water = state.step, state.cursor, state.low_water
        self.settled, self.again = dict(state.settled), dict(state.again)
        self._again_heap = sorted(state.again)
        self._index, self._books = state.index, state.books.copy()
        if state.filtered_row < rules.filtered_limit:
            self._filtered_row = state.filtered_row
        if state.void_row < rules.max_void_steps:
            self._void_row, self._void_not_finite = state.void_row, state.void_not_finite
        leases = [lease.copy() for lease in state.leases]
        for lease in leases:
            self._census.enter(lease)
        kept = self._still_fitting(lease for lease in leases if lease.state == "ready" and lease.uid in payloads)
        for lease in leases:
            if lease.uid not in kept:
                self.drop(lease.uid, lease.attempt, "restart")
        self.take_lost()
        return self

    def _still_fitting(self, ready: Iterable[Lease]) -> set[int]:
        """uids of the ready leases, earliest deadline first, whose lag fits at step n and for which there is room."""
        rules, kept = self.rules, set[int]()
        steps = rules.lookahead + 1
        if rules.train_steps is not None:
            steps = min(steps, rules.train_steps - self.step)
        for lease in sorted(ready, key=self._urgency):
            if rules.at_deadline == "mask":
                places = steps if self.step - lease.last <= rules.max_staleness else 0
            else:
                places = min(steps, lease.deadline(rules) - self.step + 1)
            if len(kept) < rules.prompts_per_step * places:
                kept.add(lease.uid)
        return kept

    # ---- the books

    def account(self) -> Account:
        """Where every admitted prompt and every generated model token is; both sums close. O(1)."""
        return Account(
            tokens=self._books.tokens(),
            counts={
                "admitted": self.cursor,
                "waiting": len(self.again),
                **{state: self._census.count(state) for state in LIVE},
                "training": 0 if self.training is None else len(self.training.leases),
                **dict.fromkeys(("consumed", "filtered", "failed"), 0),
                **self._books.ended,
            },
            granted_leases=self._books.granted_leases,
            leased_again=dict(self._books.leased_again),
        )

    def check(self) -> None:
        """Assert the contract's invariants 1, 3 and 10, and that every running count is right. O(live)."""
        training = () if self.training is None else self.training.leases
        account = self.account()
        admitted, *elsewhere = account.counts.values()
        assert admitted == sum(elsewhere), f"{admitted} prompts admitted, {sum(elsewhere)} found: {account.counts}"
        ended = sum(self._books.ended.values())
        assert ended == self.low_water + len(self.settled), (
            f"{ended} ended, {self.low_water} + {len(self.settled)} kept"
        )
        leases = len(self.live) + len(training) + ended + sum(account.leased_again.values())
        assert account.granted_leases == leases, f"{account.granted_leases} leases granted, {leases} found"
        opened = sum(lease.token_count for lease in (*self.live.values(), *training))
        assert account.tokens.open == opened, f"{account.tokens.open} tokens open on the books, {opened} in leases"
        capacity = self.rules.prompts_per_step * (self.rules.lookahead + 1)
        assert len(self.live) <= capacity, f"{len(self.live)} leases live, capacity {capacity}"
        if self.published is not None:
            assert self.published <= self.version, f"P = {self.published} is past V = {self.version}"
            assert len(self.live) <= self.room(), f"{len(self.live)} leases live, room for {self.room()}"
        assert sorted(self.again) == sorted(self._again_heap), "the heap of prompts to lease again is out of step"
        self._census.check()
