"""Discrete-event simulation of one policy's asynchronous pipeline, on the product's own ledger.

Engines decode, rewards take their time, batches are read and trained, weights are published: durations are given, and
everything that decides (who may generate, what may be trained, what is masked or dropped) is `flow.ledger`. One clock,
no threads. Generation waits for admission, the trainer for a pop and for the engines that share its devices to leave
them, the publish for the engines' commit, the next publish for the one before.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from statistics import fmean, median

from asyncrlhf.flow.ledger import Batch, Lease, Ledger
from asyncrlhf.placement.pipeline import Pipeline, Simulated

__all__ = ("Simulation", "simulate")


@dataclass(slots=True)
class _Answer:
    lease: Lease
    number: int
    left: int
    """Tokens not yet reported."""
    version: int = 0


@dataclass(slots=True)
class _Engine:
    version: int = 0
    count: float = 0.0
    """Decode steps done."""
    at: float = 0.0
    """When `count` was true."""
    ending: list[tuple[float, int, _Answer]] = field(default_factory=list[tuple[float, int, "_Answer"]])
    """(count at which it ends, sequence number, answer)"""
    still: bool = False
    """Loads weights, or the trainer has the devices."""
    draining: bool = False
    stamp: int = 0
    busy: float = 0.0


def simulate(pipeline: Pipeline, steps: int, *, check: bool = False) -> Simulated:
    """Run until `steps` train steps are applied. `check`: assert the ledger's invariants after every event."""
    return Simulation(pipeline, steps, check=check).run()


class Simulation:
    """One run; `ledger` is the product's."""

    def __init__(self, pipeline: Pipeline, steps: int, *, check: bool = False) -> None:
        self.pipeline, self.steps, self._check = pipeline, steps, check
        self.ledger = Ledger(pipeline.rules)
        self.clock = 0.0
        self._random = Random(pipeline.seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._engines = [_Engine() for _ in range(pipeline.engines)]
        self._waiting: deque[_Answer] = deque()
        self._unfinished: dict[int, int] = {}
        self._granted: dict[int, float] = {}
        self._leases: list[float] = []
        self._free_at = [0.0] * len(pipeline.score)
        self._ends: list[float] = []
        self._series: list[tuple[float, int, int, int, float, float]] = []
        self._wait_since: float | None = 0.0
        self._waited = self._train_busy = 0.0
        self._lags: Counter[int] = Counter()
        self._head_lags: Counter[int] = Counter()
        self._masked = 0
        self._open = False  # a train step goes on, or what ends it
        self._publishing = False
        self._next_waits = False  # another publish waits for that one
        self._version = 0  # that is published
        self._exported = 0.0  # when the trainer's engines have exported it
        self._trainers_turn = False
        self._coming = -1.0  # when engines that have been asked back are there

    def run(self) -> Simulated:
        """Raises RuntimeError if everything waits: the pipeline's rules deadlock."""
        self.ledger.publish(0)
        self._settle()
        while self.ledger.reason is None and len(self._ends) < self.steps:
            if not self._heap:
                raise RuntimeError(f"the pipeline stands still after {len(self._ends)} of {self.steps} train steps")
            self.clock, _, action = heapq.heappop(self._heap)
            action()
            self._settle()
            if self._check:
                self.ledger.check()
        self.ledger.check()
        return self._result()

    def _after(self, delay: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.clock + delay, self._sequence, action))

    def _settle(self) -> None:
        """Admit all that may be, place what waits, let the trainer look."""
        moved = True
        while moved:
            moved = False
            while (lease := self.ledger.grant()) is not None:
                moved = True
                self._granted[lease.uid] = self.clock
                answers = self.pipeline.rules.answers_per_prompt
                self._unfinished[lease.uid] = answers
                for number in range(answers):
                    length = max(1, round(self.pipeline.length(self._random)))
                    self._waiting.append(_Answer(lease, number, length))
            moved |= self._place()
            if not self._open and (batch := self.ledger.pop()) is not None:
                moved = True
                self._train(batch)
            for lost in self.ledger.take_lost():
                self._forget(lost)
        if self._trainers_turn and not self._open and self._coming < self.clock:
            self._coming = self.clock + self.pipeline.to_generate
            self._after(self.pipeline.to_generate, self._come_back)

    # ---- generation

    def _place(self) -> bool:
        placed = False
        while self._waiting:
            free = [e for e in self._engines if not e.still and not e.draining and len(e.ending) < self.pipeline.slots]
            if not free:
                break
            engine = min(free, key=lambda e: len(e.ending))
            answer = self._waiting.popleft()
            if self.ledger.live.get(answer.lease.uid) is not answer.lease:
                continue
            self._advance(engine)
            answer.version, end = engine.version, engine.count + answer.left
            engine.count -= self.pipeline.prefill / self.pipeline.decode(len(engine.ending) + 1)
            self._sequence += 1
            heapq.heappush(engine.ending, (end, self._sequence, answer))
            self._next(engine)
            placed = True
        return placed

    def _advance(self, engine: _Engine) -> None:
        """Bring the engine's count of decode steps up to the clock."""
        if engine.ending and not engine.still:
            elapsed = self.clock - engine.at
            engine.count += elapsed / self.pipeline.decode(len(engine.ending))
            engine.busy += elapsed
        engine.at = self.clock

    def _next(self, engine: _Engine) -> None:
        """Wake up when the shortest answer ends."""
        engine.stamp += 1
        if not engine.ending or engine.still:
            return
        stamp = engine.stamp
        left = max(0.0, engine.ending[0][0] - engine.count) * self.pipeline.decode(len(engine.ending))

        def ended() -> None:
            if engine.stamp == stamp:
                self._advance(engine)
                self._end_first(engine)

        self._after(left, ended)

    def _end_first(self, engine: _Engine) -> None:
        engine.count = max(engine.count, engine.ending[0][0])
        while engine.ending and engine.ending[0][0] <= engine.count + 1e-9:
            answer = heapq.heappop(engine.ending)[2]
            self._report(answer, answer.left)
            self._finished(answer)
        if engine.draining and not engine.ending:
            self._drained(engine)
        self._next(engine)

    def _report(self, answer: _Answer, count: int) -> None:
        lease = answer.lease
        self.ledger.report(lease.uid, lease.attempt, answer.number, answer.version, count)
        answer.left -= count

    def _finished(self, answer: _Answer) -> None:
        lease = answer.lease
        if self.ledger.live.get(lease.uid) is not lease:
            return
        self._unfinished[lease.uid] -= 1
        if self._unfinished[lease.uid] or not self.ledger.score(lease.uid, lease.attempt):
            return
        ready = self.clock + max(0.0, self.pipeline.reward(self._random))
        for i, seconds in enumerate(self.pipeline.score):
            self._free_at[i] = max(self._free_at[i], self.clock) + seconds
            ready = max(ready, self._free_at[i])
        self._after(ready - self.clock, lambda: self._ready(lease))

    def _ready(self, lease: Lease) -> None:
        if self.ledger.ready(lease.uid, lease.attempt, byte_count=0):
            self._leases.append(self.clock - self._granted[lease.uid])

    def _forget(self, lease: Lease) -> None:
        """Answers of a lost lease leave their engines."""
        for engine in self._engines:
            if any(answer.lease is lease for _, _, answer in engine.ending):
                self._advance(engine)
                engine.ending = [entry for entry in engine.ending if entry[2].lease is not lease]
                heapq.heapify(engine.ending)
                self._next(engine)

    def _stand_still(self, still: bool) -> None:
        for engine in self._engines:
            self._advance(engine)
            engine.still = still
            self._next(engine)

    # ---- training and publishing

    def _train(self, batch: Batch) -> None:
        tokens = sum(lease.token_count for lease in batch.leases)
        for version, count in batch.trained.items():
            self._lags[batch.step - version] += count
        self._head_lags.update(batch.step - min(lease.tokens) for lease in batch.leases)
        self._masked += sum(batch.masked.values())
        if self._wait_since is not None:
            self._waited += self.clock - self._wait_since
            self._wait_since = None
        self._open = True
        begin = max(self.clock, self._exported)
        if self.pipeline.shared:
            self._stand_still(True)
            if not self._trainers_turn or self._coming > self.clock:
                begin = max(begin, self._coming) + self.pipeline.to_train
            self._trainers_turn = True
            begin += self.pipeline.read
        seconds = self.pipeline.train(self._random, tokens)
        self._train_busy += seconds
        self._after(begin - self.clock + seconds, self._trained)

    def _come_back(self) -> None:
        """The trainer waits for a batch, and nothing is published: the engines have the devices, unless it has come."""
        if not self._open:
            self._trainers_turn = False
            self._stand_still(False)

    def _trained(self) -> None:
        self.ledger.applied()
        if not self.ledger.due():
            self._step_ended()
        elif self._publishing:
            self._next_waits = True
        else:
            self._publish()

    def _publish(self) -> None:
        pipeline = self.pipeline
        self._publishing, self._next_waits, self._version = True, False, self.ledger.version
        switch = pipeline.to_generate if pipeline.shared else 0.0
        self._after(max(0.0, pipeline.publish - pipeline.load) + switch, self._transferred)
        if pipeline.overlap and not pipeline.shared:
            self._exported = self.clock + pipeline.export
            self._step_ended()

    def _transferred(self) -> None:
        """Weights are beside the engines: they swap at a token boundary, or once they have run empty."""
        if self.pipeline.mode == "drain" and not self.pipeline.shared:
            for engine in self._engines:
                engine.draining = True
            for engine in self._engines:
                if not engine.ending:
                    self._drained(engine)
        else:
            self._load()

    def _drained(self, engine: _Engine) -> None:
        engine.draining, engine.still = False, True
        if all(each.still for each in self._engines):
            self._load()

    def _load(self) -> None:
        if self.pipeline.load and not self.pipeline.shared:
            self._stand_still(True)
        self._after(self.pipeline.load, self._committed)

    def _committed(self) -> None:
        version = self._version
        for engine in self._engines:
            self._advance(engine)
            for end, _, answer in engine.ending:
                done = min(answer.left - 1, int(answer.left - (end - engine.count)))
                if done > 0 and self.ledger.live.get(answer.lease.uid) is answer.lease:
                    self._report(answer, done)
                answer.version = version
            engine.version = version
        self.ledger.publish(version)
        self._publishing = self._trainers_turn = False
        self._stand_still(False)
        if self._next_waits:
            self._publish()
        elif self._open and not (self.pipeline.overlap and not self.pipeline.shared):
            self._step_ended()

    def _step_ended(self) -> None:
        self._open = False
        account = self.ledger.account().tokens
        self._ends.append(self.clock)
        for engine in self._engines:
            self._advance(engine)
            self._next(engine)
        busy = fmean(engine.busy for engine in self._engines)
        self._series.append((self.clock, account.trained, account.dropped, account.generated, busy, self._train_busy))
        self._wait_since = self.clock

    def _result(self) -> Simulated:
        count = len(self._series)
        skipped = max(1, count // 5)
        first, last = self._series[skipped - 1], self._series[-1]
        elapsed = max(last[0] - first[0], 1e-12)
        popped = self._lags.total() + self._masked
        account = self.ledger.account().tokens
        return Simulated(
            step=elapsed / max(1, count - skipped),
            median=median([b - a for a, b in pairwise(self._ends[skipped - 1 :])] or [elapsed]),
            steps=count,
            tokens_s=(last[1] - first[1]) / elapsed,
            masked=self._masked / max(1, popped),
            dropped=account.dropped / max(1, account.generated),
            lag_mean=_mean(self._lags),
            lag_max=max(self._lags, default=0),
            head_lag_mean=_mean(self._head_lags),
            head_lag_max=max(self._head_lags, default=0),
            lease=fmean(self._leases) if self._leases else 0.0,
            generate=min(1.0, (last[4] - first[4]) / elapsed),
            train=min(1.0, (last[5] - first[5]) / elapsed),
            wait=self._waited / max(self.clock, 1e-12),
            reason=self.ledger.reason or "",
        )


def _mean(counts: Counter[int]) -> float:
    return sum(value * count for value, count in counts.items()) / max(1, counts.total())
