"""Discrete-event simulation of the contract: fake engines, rewards, trainer and crashes around the pure ledger.

One integer virtual clock, no threads. `World` says what happens, `Simulation(config, world).run()` says how it ended.
A heap that runs dry before the run has ended is a deadlock: the run ends with reason "stalled".
"""

import heapq
from dataclasses import dataclass
from random import Random

from tests.contract.reference.ledger import Ledger
from tests.contract.reference.membership import Membership


@dataclass(frozen=True)
class World:
    """Workload, faults and timing. Probabilities are per lease (filter, fail, zero) or per step (void)."""

    seed: int = 0
    timing: int = 0  # seed of the durations only: permutes completion order, not contents
    replicas: int = 2
    slots: int = 4  # answers one engine decodes at once
    length: float = 8.0  # median answer length, tokens
    sigma: float = 0.0  # log-normal spread of lengths
    pace: int = 1  # a token takes 1..pace ticks, constant within an answer
    reward: tuple = (0, 0)  # ticks, uniform
    train: int = 5  # ticks per train step
    sync: int = 1  # ticks an engine pauses to swap weights
    latency: int = 2  # prepare and commit messages take 0..latency ticks
    mode: str = "in_flight"  # | "drain" (engine finishes what it decodes) | "drain_granted" (all granted leases)
    p_filter: float = 0.0
    p_fail: float = 0.0
    p_zero: float = 0.0
    p_void: float = 0.0
    deaths: int = 0
    report_late: bool = False  # engines report an answer's tokens when it finishes, not as they are sampled
    continuation: bool = True  # answers of a fenced engine continue elsewhere; False: their leases are dropped
    crashes: tuple = ()  # event numbers at which everything but the checkpoint is lost
    checkpoint_every: int = 1
    payloads: bool = True
    data: int | None = None
    train_steps: int = 10**9
    wait_timeout: int | None = None


class Answer:
    """One answer of a lease on its way through the engines."""

    def __init__(self, lease, number, left, pace):
        self.lease, self.number, self.left, self.pace = lease, number, left, pace
        self.last, self.stamp, self.since, self.reported = lease.granted, 0, None, 0
        self.unsent = []  # (version, count) not yet reported


class Simulation:
    def __init__(self, config, world, ledger=Ledger):
        self.config, self.world, self.ledger = config, world, ledger(config, world.data)
        self.clock = self.events = self.sequence = self.refused = 0
        self.random = Random(f"{world.seed}/{world.timing}")
        self.batches, self.voids = [], 0
        self.max_token_lag = self.max_head_lag = 0
        self.busy_train = 0
        self.saved = (self.ledger.snapshot(), 0)
        self.start()

    # ---- clock -------------------------------------------------------------------------------------------------
    def after(self, delay, action, *args):
        self.sequence += 1
        heapq.heappush(self.heap, (self.clock + delay, self.sequence, action, args))

    def run(self, max_events=200_000):
        crashes = sorted(self.world.crashes)
        while self.ended() is None:
            if not self.heap:
                return "stalled"
            self.clock, _, action, args = heapq.heappop(self.heap)
            action(*args)
            self.settle()
            self.ledger.check()
            self.events += 1
            if self.events > max_events:
                return "endless"
            if crashes and self.events >= crashes[0] and self.ended() is None:
                crashes.pop(0)
                snapshot, length = self.saved
                self.ledger = type(self.ledger).restore(snapshot, self.world.payloads)
                del self.batches[length:]
                self.start()
        return self.ended()

    def ended(self):
        return self.ledger.reason or (
            "train_steps"
            if self.ledger.training is None and self.idle and self.ledger.step >= self.world.train_steps
            else None
        )

    def start(self):
        """Launch or resume: V is committed to every engine before the first lease."""
        engines = range(self.world.replicas)
        self.heap, self.waiting, self.idle, self.phase, self.waited = [], [], True, None, None
        self.members = Membership(engines, self.ledger.step)
        self.running = {e: [] for e in engines}
        self.paused, self.draining = set(), set()
        self.ledger.published = self.members.published
        for _ in range(self.world.deaths):
            self.after(self.random.randint(1, 120), self.die, self.random.choice(engines))
        self.after(0, lambda: None)

    def settle(self):
        """After any event: refill, place answers, let the trainer look; repeat until nothing moves (invariant 11)."""
        while True:
            moved = False
            while lease := self.ledger.grant():
                moved = True
                self.begin(lease)
            self.place()
            if self.idle and self.ended() is None and self.try_pop():
                moved = True
            if not moved and not (self.ledger.admits() and self.ledger.data_left()):
                return

    # ---- generation --------------------------------------------------------------------------------------------
    def draw(self, *what):
        return Random(f"{self.world.seed}/{what}")

    def begin(self, lease):
        for number in range(self.config.answers):
            w = self.world
            length = max(1, round(w.length * self.draw("length", lease.key, number).lognormvariate(0, w.sigma)))
            self.waiting.append(Answer(lease, number, length, self.random.randint(1, w.pace)))

    def current(self, answer):
        return self.ledger.live.get(answer.lease.key) is answer.lease

    def place(self):
        self.waiting = [a for a in self.waiting if self.current(a)]
        for engine in self.running:
            self.running[engine] = [a for a in self.running[engine] if self.current(a)]
        for answer in list(self.waiting):
            free = [
                e
                for e, v in self.members.version.items()
                if e not in self.paused
                and e not in self.draining
                and len(self.running[e]) < self.world.slots
                and v >= answer.last
            ]
            if free:
                engine = min(free, key=lambda e: len(self.running[e]))
                self.waiting.remove(answer)
                self.running[engine].append(answer)
                self.decode(engine, answer)
        for engine in list(self.draining):
            self.try_drained(engine)

    def decode(self, engine, answer):
        """The first token comes at once, the others one per `pace` ticks."""
        answer.stamp += 1
        answer.since, answer.reported = self.clock, 0
        if answer.left:
            self.tell(engine, answer, 1)
        message = (engine, self.members.incarnation[engine], answer, answer.stamp)
        self.after(answer.left * answer.pace, self.finish, *message)

    def tell(self, engine, answer, count):
        if count:
            version = self.members.version[engine]
            answer.unsent.append((version, count))
            answer.last = version
            answer.reported += count
            if not self.world.report_late:
                self.send(answer)

    def send(self, answer):
        for version, count in answer.unsent:
            assert self.ledger.report(answer.lease.key, answer.lease.attempt, answer.number, version, count)
        answer.unsent.clear()

    def interrupt(self, engine, answer):
        """Stop at a token boundary and account for the tokens sampled since `decode`."""
        if answer.since is None:
            return
        done = min(answer.left, 1 + (self.clock - answer.since) // answer.pace)
        self.tell(engine, answer, done - answer.reported)
        answer.left -= done
        answer.stamp += 1
        answer.since = None

    def finish(self, engine, incarnation, answer, stamp):
        if not self.current(answer):  # an old attempt: the ledger itself refuses it
            assert not self.ledger.report(answer.lease.key, answer.lease.attempt, answer.number, 10**6, 1)
            self.refused += 1
            return
        if incarnation != self.members.incarnation[engine] or stamp != answer.stamp:
            self.refused += 1
            return
        self.tell(engine, answer, answer.left - answer.reported)
        self.send(answer)
        self.running[engine].remove(answer)
        lease, w = answer.lease, self.world
        if self.draw("fail", lease.key, lease.attempt, answer.number).random() < w.p_fail:
            self.ledger.settle(lease.key, lease.attempt, "failed")
            return
        lease.finished = getattr(lease, "finished", 0) + 1
        if lease.finished == self.config.answers:
            self.ledger.score(lease.key, lease.attempt)
            self.after(self.random.randint(*w.reward), self.scored, lease)

    def scored(self, lease):
        if self.ledger.live.get(lease.key) is not lease:
            assert not self.ledger.ready(lease.key, lease.attempt)
            self.refused += 1
        elif self.draw("filter", lease.key).random() < self.world.p_filter:
            self.ledger.settle(lease.key, lease.attempt, "filtered")
        else:
            zero = self.draw("zero", lease.key).random() < self.world.p_zero
            self.ledger.ready(lease.key, lease.attempt, lease.tokens.total(), zero)

    # ---- faults ------------------------------------------------------------------------------------------------
    def die(self, engine):
        """Fenced at once; it may still be running and deliver late (its finish events stay in the heap)."""
        if engine not in self.members.version:
            return
        for answer in self.running[engine]:
            if not self.current(answer):
                continue
            self.interrupt(engine, answer)
            if self.world.continuation:
                self.waiting.append(answer)
            else:
                self.ledger.drop(answer.lease.key, answer.lease.attempt, "fenced")
        self.running[engine] = []
        self.paused.discard(engine)
        self.draining.discard(engine)
        self.members.fence(engine)
        self.after(self.random.randint(1, 30), self.rejoin, engine)
        self.advance()

    def rejoin(self, engine):
        self.members.join(engine)
        self.advance()

    # ---- training and publishing -------------------------------------------------------------------------------
    def try_pop(self):
        live = len(self.ledger.live)
        late = (
            self.world.wait_timeout is not None
            and self.waited is not None
            and self.clock - self.waited >= self.world.wait_timeout
        )
        batch = self.ledger.pop(timed_out=late)
        if batch is None:
            if self.waited is None:
                self.waited = self.clock
                if self.world.wait_timeout is not None:
                    self.after(self.world.wait_timeout, lambda: None)
            return len(self.ledger.live) != live
        self.waited, self.idle = None, False
        self.measure(batch)
        self.busy_train += self.world.train
        self.after(self.world.train, self.trained, batch)
        return True

    def measure(self, batch):
        """Invariants 2 and 5."""
        K, t = self.config.K, batch.step
        assert all(0 <= t - v <= K for v in batch.trained), f"token lag {t - min(batch.trained)} > K = {K}"
        for lease in batch.leases:
            head = t - min(lease.tokens)
            assert self.config.at_deadline == "mask" or head <= K, f"head lag {head} > K = {K} at step {t}"
            self.max_head_lag = max(self.max_head_lag, head)
        if batch.trained:
            self.max_token_lag = max(self.max_token_lag, t - min(batch.trained))

    def trained(self, batch):
        if self.random.random() < self.world.p_void or not batch.trained:
            self.ledger.void()
            self.voids += 1
            self.idle = True
            return
        self.ledger.applied()
        self.batches.append((batch.step, tuple((x.key, dict(x.tokens)) for x in batch.leases)))
        if self.ledger.step % self.world.checkpoint_every == 0:
            self.saved = (self.ledger.snapshot(), len(self.batches))
        if not self.ledger.due():
            self.idle = True
            return
        self.phase = "prepare"
        self.members.prepare(self.ledger.step)
        for engine in self.members.version:
            self.after(self.random.randint(0, self.world.latency), self.ack, engine, self.members.incarnation[engine])
        self.advance()

    def ack(self, engine, incarnation):
        if incarnation == self.members.incarnation[engine]:
            self.members.ack(engine)
            self.advance()

    def advance(self):
        """Two phases over the current membership; the trainer goes on when P has reached the target."""
        m, w = self.members, self.world
        if self.phase == "prepare" and m.version and m.prepared():
            self.phase = "commit"
            for engine, version in m.version.items():
                if version < m.target:
                    self.after(self.random.randint(0, w.latency), self.swap, engine, m.incarnation[engine])
        self.ledger.published = m.published
        if self.phase == "commit" and m.version and m.published == m.target:
            self.phase, self.idle = None, True

    def swap(self, engine, incarnation):
        if incarnation != self.members.incarnation[engine]:
            return
        if self.world.mode == "in_flight":
            self.paused.add(engine)
            for answer in [a for a in self.running[engine] if self.current(a)]:
                self.interrupt(engine, answer)
            self.after(self.world.sync, self.resume, engine, incarnation)
        else:
            if self.world.mode == "drain":
                self.draining.add(engine)
            self.try_drained(engine)

    def try_drained(self, engine):
        open_work = self.running[engine]
        if self.world.mode == "drain_granted":
            open_work = self.waiting or any(self.running.values())
            if open_work:
                self.after(1, self.swap, engine, self.members.incarnation[engine])
                return
        if not open_work and engine not in self.paused:
            self.draining.discard(engine)
            self.paused.add(engine)
            self.after(self.world.sync, self.resume, engine, self.members.incarnation[engine])

    def resume(self, engine, incarnation):
        if incarnation != self.members.incarnation[engine]:
            return
        self.paused.discard(engine)
        self.members.commit(engine)
        for answer in [a for a in self.running[engine] if self.current(a)]:
            self.decode(engine, answer)
        self.advance()
