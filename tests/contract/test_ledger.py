"""Admission and the pop, step by step: the contract's worked examples and both edges of the bound."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrlhf.errors import ConfigError
from asyncrlhf.flow.ledger import Lease, Ledger, LedgerRules
from tests.contract.small import finish, launched, refill, rules, run_to_end, train, uids

# ---- admission


def test_worked_example_with_lookahead_1() -> None:
    ledger = launched(2, 1, 1)
    assert [lease.uid for lease in refill(ledger)] == [0, 1, 2, 3]
    for uid in (0, 1):
        finish(ledger, ledger.live[uid])
    assert uids(ledger.pop()) == [0, 1]
    assert len(ledger.live) == 2
    assert refill(ledger) == []
    ledger.applied()
    assert refill(ledger) == []
    ledger.publish(1)
    assert [lease.uid for lease in refill(ledger)] == [4, 5]


def test_A6_synchronous_runs_admit_nothing_between_pop_and_publish() -> None:
    ledger = launched(2, 0, 0)
    for step in range(5):
        leases = refill(ledger)
        assert len(leases) == 2
        for lease in leases:
            finish(ledger, lease)
        batch = ledger.pop()
        assert batch is not None
        assert batch.trained == {step: 20}
        assert refill(ledger) == []
        ledger.applied()
        assert refill(ledger) == []
        ledger.publish(step + 1)


def test_A4_no_version_is_published_within_a_synchronous_rollout() -> None:
    ledger = launched(2, 0, 0)
    first, second = refill(ledger)
    finish(ledger, first)
    assert ledger.pop() is None
    with pytest.raises(ValueError, match=r"version 1 cannot be published.*the trainer holds 0"):
        ledger.publish(1)
    finish(ledger, second)
    assert uids(ledger.pop()) == [0, 1]


def test_A11_depth_and_bound_are_separate_knobs() -> None:
    """B = 2, K = 4, D = 1 with two stragglers: never more than 4 live, two fresh ones per publish, no overlap left."""
    ledger = launched(2, 4, 1)
    stragglers = refill(ledger)[:2]
    fresh = list(ledger.live.values())[2:]
    for _ in range(6):
        for lease in fresh:
            finish(ledger, lease)
        train(ledger)
        fresh = refill(ledger)
        assert len(fresh) == 2
        assert len(ledger.live) == 4
    assert all(lease.state == "running" for lease in stragglers)


@pytest.mark.parametrize("staleness", range(5))
def test_A5_cold_start_works_for_every_lookahead_and_publish_interval(staleness: int) -> None:
    for lookahead in range(staleness + 1):
        for every in range(1, lookahead + 2):
            ledger = Ledger(rules(2, staleness, lookahead, publish_every=every), 12)
            assert refill(ledger) == []
            assert ledger.room() == 0
            ledger.publish(0)
            assert run_to_end(ledger) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_A9_a_publish_before_the_reaping_does_not_stop_production() -> None:
    """70 finish, the trainer takes 64 of them, the weights move: 6 are outstanding and the rest is refilled."""
    ledger = launched(64, 1, 1)
    for _ in range(70):
        lease = ledger.grant()
        assert lease is not None
        finish(ledger, lease)
    train(ledger)
    assert len(ledger.live) == 6
    assert len(refill(ledger)) == 128 - 6


def test_A10_a_full_queue_makes_the_producer_wait_and_every_rollout_is_somewhere() -> None:
    ledger = launched(3, 2, 2)
    for lease in refill(ledger):
        finish(ledger, lease)
    assert ledger.account().counts["ready"] == 9
    assert ledger.grant() is None
    train(ledger)
    ledger.drop(3, 1, "timeout", again=False, counts=True)
    counts = ledger.account().counts
    assert counts["admitted"] == counts["consumed"] + counts["ready"] + counts["dropped(timeout)"] == 9


def test_the_byte_limit_is_soft_and_spares_the_first_batch() -> None:
    ledger = launched(2, 3, 3, byte_limit=200)
    leases = [ledger.grant() for _ in range(3)]
    for lease in leases[:2]:
        assert lease is not None
        finish(ledger, lease)
    assert ledger.grant() is None
    train(ledger)
    assert len(refill(ledger)) == 7


def test_no_more_is_generated_than_the_train_steps_take() -> None:
    ledger = launched(2, 4, 4, train_steps=3)
    assert len(refill(ledger)) == 6
    for lease in list(ledger.live.values()):
        finish(ledger, lease)
    ledger.pop()
    ledger.void("not_finite")
    assert [lease.uid for lease in refill(ledger)] == [6, 7]
    for uid in (6, 7):
        finish(ledger, ledger.live[uid])
    assert [train(ledger).step for _ in range(3)] == [0, 1, 2]
    assert ledger.reason == "train_steps"
    assert refill(ledger) == []
    assert ledger.pop() is None
    assert ledger.account().tokens.open == 0


# ---- consumption


def test_A4_a_token_of_lag_K_trains_and_one_of_lag_K_plus_1_is_masked() -> None:
    ledger = launched(1, 2, 2)
    old = refill(ledger)[0]
    ledger.report(old.uid, 1, 0, 0, 10)
    for _ in range(3):
        fresh = next(lease for lease in ledger.live.values() if lease is not old)
        finish(ledger, fresh)
        train(ledger)
        refill(ledger)
    finish(ledger, old, 1, 3, tokens=7)
    batch = ledger.pop()
    assert batch is not None
    assert (batch.step, uids(batch)) == (3, [0])
    assert batch.masked == {0: 10}
    assert batch.trained == {1: 7, 3: 7}


def test_A1_a_rollout_across_six_publishes_trains_no_token_older_than_the_bound() -> None:
    ledger = launched(1, 2, 1)
    long = refill(ledger)[0]
    for version in range(7):
        ledger.report(long.uid, 1, 0, version, 4)
        if version < 6:
            fresh = next(lease for lease in ledger.live.values() if lease is not long)
            finish(ledger, fresh)
            train(ledger)
            refill(ledger)
    ledger.ready(long.uid, 1, byte_count=1)
    batch = ledger.pop()
    assert batch is not None
    assert batch.leases == (long,)
    assert batch.trained == {4: 4, 5: 4, 6: 4}
    assert batch.masked == {0: 4, 1: 4, 2: 4, 3: 4}


@pytest.mark.parametrize(("newest", "state"), [(1, "training"), (0, "dropped(expired)")])
def test_a_rollout_whose_newest_token_has_lag_K_takes_its_place_and_one_of_K_plus_1_expires(
    newest: int, state: str
) -> None:
    ledger = launched(2, 1, 1)
    slow, *others = refill(ledger)
    ledger.report(slow.uid, 1, 0, 0, 5)
    for lease in others[:2]:
        finish(ledger, lease)
    train(ledger)
    if newest:
        ledger.report(slow.uid, 1, 0, newest, 5)
    for lease in (others[2], refill(ledger)[0]):
        finish(ledger, lease)
    train(ledger)
    ledger.ready(slow.uid, 1, byte_count=1)
    finish(ledger, refill(ledger)[0])
    ledger.pop()
    assert slow.state == state
    assert ledger.again == ({} if state == "training" else {slow.uid: (2, 2)})
    assert [lease.uid for lease in ledger.take_lost()] == ([] if state == "training" else [slow.uid])


def test_wait_leaves_no_more_leases_at_a_deadline_than_the_coming_steps_can_take() -> None:
    """K = D = 1, B = 2: four leases are due at step 1; two ready ones of a later birth must not go first."""
    ledger = launched(2, 1, 1, at_deadline="wait")
    a, b, c, d = refill(ledger)
    finish(ledger, a)
    finish(ledger, b)
    train(ledger)
    e, f = refill(ledger)
    finish(ledger, e)
    finish(ledger, f)
    finish(ledger, c)
    assert ledger.pop() is None
    finish(ledger, d)
    assert uids(ledger.pop()) == [c.uid, d.uid]


@pytest.mark.parametrize("mode", ["wait", "drop"])
def test_unfinished_leases_are_cancelled_when_the_rest_cannot_be_in_time(mode: str) -> None:
    ledger = launched(2, 1, 1, at_deadline=mode)
    a, b, c, d = refill(ledger)
    finish(ledger, a)
    finish(ledger, b)
    train(ledger)
    for lease in refill(ledger):
        finish(ledger, lease)
    ledger.score(c.uid, 1)
    batch = ledger.pop(timed_out=mode == "wait")
    assert uids(batch) == [4, 5]
    assert [(lease.uid, lease.state) for lease in ledger.take_lost()] == [(2, "dropped(late)"), (3, "dropped(late)")]
    assert ledger.take_lost() == []
    assert ledger.again == {c.uid: (2, 2), d.uid: (2, 2)}
    ledger.check()


def test_head_lag_K_is_consumed_in_wait_mode_and_never_more() -> None:
    ledger = launched(1, 2, 1, at_deadline="wait")
    slow = refill(ledger)[0]
    ledger.report(slow.uid, 1, 0, 0, 5)
    for _ in range(2):
        finish(ledger, next(lease for lease in ledger.live.values() if lease is not slow))
        train(ledger)
        refill(ledger)
    finish(ledger, next(lease for lease in ledger.live.values() if lease is not slow))
    assert ledger.pop() is None
    ledger.ready(slow.uid, 1, byte_count=1)
    batch = ledger.pop()
    assert batch is not None
    assert batch.step - slow.birth(ledger.rules) == 2
    assert batch.trained == {0: 5}


def test_birth_is_the_granted_version_until_every_answer_has_reported() -> None:
    ledger = launched(1, 2, 1, answers_per_prompt=2)
    lease = refill(ledger)[1]
    finish(ledger, ledger.live[0])
    ledger.pop()
    ledger.applied()
    ledger.report(lease.uid, 1, 0, 1, 3)
    assert lease.birth(ledger.rules) == 0
    ledger.report(lease.uid, 1, 1, 1, 3)
    assert lease.birth(ledger.rules) == 1
    assert lease.deadline(ledger.rules) == 3


def test_admission_order_waits_for_the_oldest() -> None:
    ledger = launched(2, 1, 1, order="admission")
    a, b, c, _ = refill(ledger)
    finish(ledger, c)
    finish(ledger, b)
    assert ledger.pop() is None
    finish(ledger, a)
    assert uids(ledger.pop()) == [a.uid, b.uid]


def test_ready_order_takes_the_earliest_deadline_then_the_earliest_admission() -> None:
    ledger = launched(2, 2, 2)
    leases = refill(ledger)
    for lease in reversed(leases):
        finish(ledger, lease)
    assert uids(ledger.pop()) == [0, 1]


def late_starter(**others: Any) -> tuple[Ledger, Lease, Lease]:
    """B = 1, before step 2: lease 2, granted at P = 0, began at version 2; lease 3, granted at P = 1, began at once."""
    ledger = launched(1, 4, 2, **others)
    first, second, late = refill(ledger)
    finish(ledger, first)
    train(ledger)
    (early,) = refill(ledger)
    ledger.report(early.uid, 1, 0, 1, 5)
    finish(ledger, second)
    train(ledger)
    ledger.report(late.uid, 1, 0, 2, 5)
    return ledger, early, late


def test_the_earliest_deadline_goes_first_even_if_admitted_later() -> None:
    ledger, early, late = late_starter()
    for lease in (late, early):
        ledger.ready(lease.uid, 1, byte_count=1)
    assert ledger.pop() is not None
    assert (early.state, late.state) == ("training", "ready")


def test_the_earliest_deadline_is_cancelled_first_even_if_admitted_later() -> None:
    ledger, early, late = late_starter(at_deadline="drop")
    for _ in range(4):
        finish(ledger, refill(ledger)[-1])
        if ledger.pop() is None:
            break
        ledger.applied()
        ledger.publish(ledger.version)
    assert [lease.uid for lease in ledger.take_lost()][:1] == [early.uid]
    assert late.state == "running"


# ---- rules


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lookahead": 3}, r"lookahead = 3 is more than max_staleness = 2; lower lookahead to 2"),
        ({"publish_every": 3}, r"publish\.every = 3 is more than lookahead \+ 1 = 2.*raise lookahead to 2"),
        (
            {"order": "admission", "at_deadline": "wait"},
            r'leaves at_deadline = "wait".*lookahead = 1.*max_staleness = 2',
        ),
        ({"order": "admission", "at_deadline": "drop"}, r'set at_deadline = "mask" or order = "ready"'),
        ({"prompts_per_step": 0}, r"prompts_per_step = 0 must be at least 1"),
        ({"max_attempts": 0}, r"max_attempts = 0 must be at least 1"),
        ({"byte_limit": -1}, r"byte_limit = -1 must be at least 0"),
    ],
)
def test_rules_that_exclude_each_other_are_refused(keys: dict[str, Any], message: str) -> None:
    known: dict[str, Any] = {"prompts_per_step": 2, "max_staleness": 2, "lookahead": 1}
    with pytest.raises(ConfigError, match=message):
        LedgerRules(**known | keys)
