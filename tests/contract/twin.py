"""Product and reference in lock-step: drop-in twins for the reference simulation that compare after every event."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import partial
from operator import eq

import msgspec

from asyncrlhf.control.membership import Membership
from asyncrlhf.flow.ledger import Ledger, LedgerRules, LedgerState
from tests.contract.reference import ledger as reference
from tests.contract.reference import membership as reference_membership
from tests.contract.reference import sim
from tests.contract.reference.ledger import Config


def rules_of(config: Config, train_steps: int | None = None) -> LedgerRules:
    return LedgerRules(
        prompts_per_step=config.B,
        max_staleness=config.K,
        lookahead=config.D,
        publish_every=config.every,
        byte_limit=None if config.byte_limit == float("inf") else int(config.byte_limit),
        at_deadline=config.at_deadline,
        order=config.order,
        answers_per_prompt=config.answers,
        max_attempts=config.max_attempts,
        max_filtered=config.max_filtered,
        max_void_steps=config.max_void_steps,
        last=config.last,
        train_steps=train_steps,
    )


class TwinLedger(reference.Ledger):
    """The reference, which the simulation drives, and the product beside it.

    Added to the reference, which has neither: `train_steps` at admission, and a data end that is learned only when the
    last prompt has been granted (`late_end`).
    """

    product: Ledger | None = None

    def __init__(self, config, data=None, *, train_steps=None, late_end=False):
        super().__init__(config, data)
        self.train_steps, self.late_end = train_steps, late_end
        self.refused_tokens = 0
        self.void_reasons = []
        self.dropped_before = 0
        self.product = Ledger(rules_of(config, train_steps), None if late_end else data)
        self.compare()

    @property
    def published(self):
        return self._published

    @published.setter
    def published(self, version):
        self._published = version
        if self.product is not None:
            self.product.publish(version)
            self.compare()

    def admits(self):
        left = self.train_steps is None or len(self.live) + 1 <= self.config.B * (self.train_steps - self.step)
        return super().admits() and left

    def grant(self):
        return self.both(super().grant, lambda product: product.grant(), self.same_lease)

    def report(self, key, attempt, answer, version, count):
        arguments = (key, attempt, answer, version, count)
        if self.find(key, attempt, "running") is None:
            self.refused_tokens += count
        return self.both(partial(super().report, *arguments), lambda product: product.report(*arguments))

    def score(self, key, attempt):
        return self.both(partial(super().score, key, attempt), lambda product: product.score(key, attempt))

    def ready(self, key, attempt, size=1, zero_variance=False):
        return self.both(
            partial(super().ready, key, attempt, size, zero_variance),
            lambda product: product.ready(key, attempt, byte_count=size, trainable=not zero_variance),
        )

    def settle(self, key, attempt, state):
        return self.both(
            partial(super().settle, key, attempt, state), lambda product: product.settle(key, attempt, state)
        )

    def drop(self, key, attempt, reason, again=True, counts=False):
        return self.both(
            partial(super().drop, key, attempt, reason, again, counts),
            lambda product: product.drop(key, attempt, reason, again=again, counts=counts),
        )

    def pop(self, timed_out=False):
        return self.both(
            partial(super().pop, timed_out), lambda product: product.pop(timed_out=timed_out), self.same_batch
        )

    def applied(self):
        self.void_reasons = []
        self.both(super().applied, lambda product: product.applied())

    def void(self):
        reason = "not_finite" if self.training.trained else "no_signal"
        self.void_reasons.append(reason)
        self.both(super().void, lambda product: product.void(reason))

    def snapshot(self):
        with self.alone() as product:
            saved = super().snapshot()
        saved.product_state = msgspec.msgpack.encode(product.snapshot())
        return saved

    @classmethod
    def restore(cls, snapshot, payloads):
        ledger = super().restore(snapshot, payloads)
        state = msgspec.msgpack.decode(snapshot.product_state, type=LedgerState)
        saved = [lease.uid for lease in state.leases if lease.state == "ready"] if payloads else ()
        ledger.product = Ledger.restore(rules_of(ledger.config, ledger.train_steps), state, saved)
        ledger.dropped_before = ledger.dropped()
        ledger.compare()
        return ledger

    # ---- lock-step

    @contextmanager
    def alone(self):
        """The reference, with the product out of the way."""
        product, self.product = self.product, None
        try:
            yield product
        finally:
            self.product = product

    def both(self, ours, theirs, same=eq):
        """One transaction of the reference, and the same one of the product unless a transaction is under way."""
        with self.alone() as product:
            done = ours()
        if product is not None:
            answer = theirs(product)
            assert same(done, answer), (done, answer)
            self.compare()
        return done

    def compare(self):
        """The complete observable state."""
        product = self.product
        if self.late_end and product.data_count is None and self.data is not None and self.cursor >= self.data:
            product.end_data(self.data)
        product.check()
        assert list(product.live) == list(self.live)
        for ours, theirs in zip(self.live.values(), product.live.values(), strict=True):
            assert self.same_lease(ours, theirs), (ours, theirs)
        assert self.same_batch(self.training, product.training)
        assert (product.step, product.published) == (self.step, self.published)
        assert (product.cursor, product.low_water) == (self.cursor, self.low_water)
        assert product.again == self.again
        assert product.settled == self.done
        assert product.data_left() == self.data_left()
        assert product.admits() == self.admits()
        assert product.due() == self.due()
        assert product.reason == self.expected_reason()
        self.compare_books()

    def compare_books(self):
        account = self.product.account()
        counted = Counter({state: count for state, count in account.counts.items() if state in self.count})
        counted.update({f"dropped({reason})": count for reason, count in account.leased_again.items()})
        counted["admitted"] = account.granted_leases
        assert +counted == +self.count
        states = Counter(lease.state for lease in self.live.values())
        assert all(account.counts[state] == states[state] for state in ("running", "scoring", "ready"))
        tokens = account.tokens
        assert tokens.generated == self.tokens["generated"] + self.refused_tokens
        assert tokens.dropped == self.tokens["dropped"] + self.refused_tokens
        assert (tokens.trained, tokens.masked) == (self.tokens["trained"], self.tokens["masked"])
        lost = self.product.take_lost()
        assert all(lease.state.startswith("dropped(") for lease in lost)
        assert len(lost) == self.dropped() - self.dropped_before
        self.dropped_before = self.dropped()

    def dropped(self):
        """Leases dropped while live, ever."""
        return sum(n for state, n in self.count.items() if state.startswith("dropped(") and state != "dropped(void)")

    def expected_reason(self):
        if self.train_steps is not None and self.training is None and self.step >= self.train_steps:
            return "train_steps"
        if self.reason == "diverged" and "not_finite" not in self.void_reasons:
            return "no_signal"
        return self.reason

    def same_lease(self, ours, theirs):
        if ours is None or theirs is None:
            return ours is theirs
        rules = self.product.rules if self.product else rules_of(self.config)
        return (
            (ours.key, ours.attempt, ours.tries, ours.index, ours.granted, ours.state)
            == (theirs.uid, theirs.attempt, theirs.tries, theirs.index, theirs.granted, theirs.state)
            and (dict(ours.tokens), ours.newest, ours.size) == (theirs.tokens, theirs.newest, theirs.byte_count)
            and ours.zero_variance is not theirs.trainable
            and ours.birth(self.config) == theirs.birth(rules)
            and self.deadline(ours) == theirs.deadline(rules)
        )

    def same_batch(self, ours, theirs):
        if ours is None or theirs is None:
            return ours is theirs
        return (
            ours.step == theirs.step
            and len(ours.leases) == len(theirs.leases)
            and all(map(self.same_lease, ours.leases, theirs.leases))
            and (ours.trained, ours.masked) == (theirs.trained, theirs.masked)
        )


class TwinMembership(reference_membership.Membership):
    """The reference membership, and the product beside it."""

    def __init__(self, engines, version):
        super().__init__(engines, version)
        self.product = Membership(engines, version)
        self.compare()

    def prepare(self, version):
        super().prepare(version)
        self.product.prepare(version)
        self.compare()

    def ack(self, engine):
        self.refuse_old(engine)
        prepared = super().ack(engine)
        assert self.product.acknowledge(engine, self.incarnation[engine])
        self.compare()
        return prepared

    def commit(self, engine):
        self.refuse_old(engine)
        super().commit(engine)
        assert self.product.commit(engine, self.incarnation[engine])
        self.compare()

    def fence(self, engine):
        super().fence(engine)
        assert self.product.fence(engine) == self.incarnation[engine]
        self.refuse_old(engine)
        self.compare()

    def join(self, engine):
        super().join(engine)
        assert self.product.join(engine) == self.incarnation[engine]
        self.compare()

    def refuse_old(self, engine):
        for old in range(self.incarnation[engine]):
            assert not self.product.acknowledge(engine, old)
            assert not self.product.commit(engine, old)

    def compare(self):
        product = self.product
        assert (product.published, product.target) == (self.published, self.target)
        assert (product.serving, product.incarnation) == (self.version, self.incarnation)
        assert product.prepared == (bool(self.version) and self.prepared())


class TwinSimulation(sim.Simulation):
    """The reference simulation with both twins in it."""

    def __init__(self, config, world, **options):
        super().__init__(config, world, lambda c, data: TwinLedger(c, data, **options))

    def start(self):
        alone, sim.Membership = sim.Membership, TwinMembership
        try:
            super().start()
        finally:
            sim.Membership = alone
