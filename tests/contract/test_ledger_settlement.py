"""How leases and runs end: filters, failures, lost attempts, void steps, the end of the data."""

from __future__ import annotations

import pytest

from tests.contract.small import finish, launched, refill, run_to_end, train, uids

# ---- settlement


def test_A2_a_filter_that_rejects_everything_refills_and_then_ends_the_run_by_name() -> None:
    ledger = launched(2, 1, 1, max_filtered=9)
    for _ in range(2):
        leases = refill(ledger)
        assert len(leases) == 4
        for lease in leases:
            ledger.settle(lease.uid, 1, "filtered")
    finish(ledger, refill(ledger)[0])
    for uid in (9, 10, 11):
        ledger.settle(uid, 1, "failed")
    for _ in range(2):
        assert ledger.reason is None
        for lease in refill(ledger):
            ledger.settle(lease.uid, 1, "filtered")
    assert ledger.reason == "exhausted"
    assert (ledger.account().counts["filtered"], ledger.account().counts["failed"]) == (14, 3)
    assert refill(ledger) == []


def test_A7_filtering_half_of_the_rollouts_for_100_steps_keeps_the_capacity() -> None:
    ledger = launched(4, 2, 1)
    for step in range(100):
        while ledger.account().counts["ready"] < 4:
            lease = next(lease for lease in (*refill(ledger), *ledger.live.values()) if lease.state == "running")
            if lease.uid % 2:
                ledger.settle(lease.uid, 1, "filtered")
            else:
                finish(ledger, lease)
        refill(ledger)
        assert len(ledger.live) == 8, f"at step {step}"
        train(ledger)


def test_A8_a_batch_without_a_trainable_token_is_void_and_gives_its_places_back() -> None:
    ledger = launched(2, 1, 1)
    for lease in refill(ledger):
        finish(ledger, lease, trainable=False)
    batch = ledger.pop()
    assert batch is not None
    assert (batch.trained, batch.masked) == ({}, {0: 20})
    ledger.void("no_signal")
    assert (ledger.step, ledger.version, ledger.published) == (0, 0, 0)
    assert [lease.uid for lease in refill(ledger)] == [4, 5]
    assert ledger.account().counts["dropped(void)"] == 2
    assert not ledger.again
    assert ledger.take_lost() == []


@pytest.mark.parametrize(
    ("reasons", "ending"),
    [
        (["no_signal"] * 3, "no_signal"),
        (["no_signal", "not_finite", "no_signal"], "diverged"),
        (["not_finite", "not_finite", "applied", "no_signal", "no_signal", "no_signal"], "no_signal"),
    ],
)
def test_too_many_void_steps_in_a_row_end_the_run_by_name(reasons: list[str], ending: str) -> None:
    ledger = launched(1, 0, 0, max_void_steps=3)
    for reason in reasons:
        assert ledger.reason is None
        for lease in refill(ledger):
            finish(ledger, lease)
        assert ledger.pop() is not None
        if reason == "applied":
            ledger.applied()
            ledger.publish(ledger.version)
        else:
            ledger.void(reason)
    assert ledger.reason == ending


def test_failed_and_filtered_prompts_never_come_again() -> None:
    ledger = launched(1, 1, 1, 3)
    ledger.grant()
    ledger.grant()
    assert ledger.settle(0, 1, "failed")
    assert ledger.settle(1, 1, "filtered")
    assert not ledger.settle(1, 1, "failed")
    assert [lease.uid for lease in refill(ledger)] == [2]
    assert ledger.low_water == 2


def test_only_attempts_that_the_prompt_lost_are_used_up() -> None:
    ledger = launched(1, 0, 0, max_attempts=2)
    losses = [("fenced", False), ("timeout", True), ("restart", False), ("late", True)]
    for attempt, (reason, counts) in enumerate(losses, start=1):
        lease = ledger.grant()
        assert lease is not None
        assert (lease.uid, lease.attempt) == (0, attempt)
        assert ledger.drop(0, attempt, reason, counts=counts)
        ledger.check()
    assert not ledger.again
    assert ledger.low_water == 1
    account = ledger.account()
    assert account.counts["dropped(late)"] == 1
    assert account.leased_again == {"fenced": 1, "timeout": 1, "restart": 1}
    assert account.granted_leases == 4
    assert ledger.data_left()


def test_a_prompt_leased_again_comes_before_fresh_ones_oldest_first() -> None:
    ledger = launched(2, 1, 1)
    refill(ledger)
    for uid in (3, 1):
        ledger.drop(uid, 1, "timeout", counts=True)
    assert ledger.account().counts["waiting"] == 2
    again = refill(ledger)
    assert [(lease.uid, lease.attempt, lease.tries, lease.index) for lease in again] == [(1, 2, 2, 4), (3, 2, 2, 5)]


def test_late_results_are_refused_and_their_tokens_close_the_account() -> None:
    ledger = launched(1, 1, 1)
    ledger.grant()
    assert ledger.report(0, 1, 0, 0, 5)
    ledger.drop(0, 1, "timeout", counts=True)
    ledger.grant()
    assert not ledger.report(0, 1, 0, 0, 7)
    assert not ledger.score(0, 1)
    assert not ledger.ready(0, 1, byte_count=1)
    assert not ledger.drop(0, 1, "late")
    finish(ledger, ledger.live[0])
    assert not ledger.report(0, 2, 0, 0, 3)
    tokens = ledger.account().tokens
    assert (tokens.generated, tokens.dropped, tokens.open) == (25, 15, 10)
    ledger.check()


@pytest.mark.parametrize(
    ("version", "count", "message"),
    [
        (0, 1, "version 0 reported; after version 1, and while the trainer holds 1"),
        (2, 1, "version 2 reported"),
        (1, -1, "-1 tokens"),
    ],
)
def test_impossible_reports_are_errors(version: int, count: int, message: str) -> None:
    ledger = launched(1, 1, 1)
    finish(ledger, refill(ledger)[0])
    train(ledger)
    ledger.report(1, 1, 0, 1, 4)
    with pytest.raises(ValueError, match=message):
        ledger.report(1, 1, 0, version, count)
    ledger.check()


# ---- ends of a run


def test_L2_a_data_set_shorter_than_the_run_ends_it_by_name() -> None:
    ledger = launched(2, 2, 1, 5, train_steps=100)
    assert run_to_end(ledger) == [[0, 1], [2, 3], [4]]
    assert ledger.reason == "completed"
    assert ledger.low_water == 5


def test_the_last_rollouts_can_be_dropped_instead() -> None:
    ledger = launched(2, 2, 1, 5, last="drop")
    assert run_to_end(ledger) == [[0, 1], [2, 3]]
    assert ledger.reason == "completed"
    assert ledger.account().counts["dropped(end)"] == 1
    assert [lease.uid for lease in ledger.take_lost()] == [4]


def test_a_short_batch_waits_for_every_live_lease_and_every_prompt_to_come_again() -> None:
    ledger = launched(3, 0, 0, 2)
    a, b = refill(ledger)
    finish(ledger, a)
    assert ledger.pop() is None
    ledger.drop(b.uid, 1, "timeout", counts=True)
    assert ledger.pop() is None
    finish(ledger, refill(ledger)[0])
    assert uids(ledger.pop()) == [0, 1]


def test_the_end_of_a_stream_may_be_learned_late() -> None:
    ledger = launched(2, 1, 1)
    for lease in refill(ledger)[:3]:
        finish(ledger, lease)
    ledger.settle(3, 1, "filtered")
    train(ledger)
    assert ledger.pop() is None
    with pytest.raises(ValueError, match="end after 3 prompts, but 4 have been granted"):
        ledger.end_data(3)
    ledger.end_data(4)
    assert not ledger.data_left()
    assert refill(ledger) == []
    assert uids(ledger.pop()) == [2]
    ledger.applied()
    assert ledger.pop() is None
    assert ledger.reason == "completed"


def test_transactions_out_of_order_are_errors() -> None:
    ledger = launched(1, 1, 1)
    with pytest.raises(RuntimeError, match="no batch is training"):
        ledger.applied()
    finish(ledger, refill(ledger)[0])
    ledger.pop()
    for forbidden in (ledger.pop, ledger.snapshot):
        with pytest.raises(RuntimeError, match="step 0 is"):
            forbidden()
    ledger.applied()
    ledger.publish(1)
    with pytest.raises(ValueError, match=r"version 0 cannot be published: P = 1 never falls"):
        ledger.publish(0)
