"""The ledger over time: snapshots and resume, memory over 100,000 leases, 10,000 live at once."""

from __future__ import annotations

import pickle
import time
from typing import Any

import msgspec
import pytest

from asyncrlhf.flow.ledger import Ledger, LedgerState
from tests.contract.small import finish, launched, refill, run_to_end, train, uids


def resumed(ledger: Ledger, payloads: tuple[int, ...] = (), **others: Any) -> Ledger:
    """Through the bytes of a checkpoint, and with every engine serving V again."""
    keys = msgspec.structs.asdict(ledger.rules) | others
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(ledger.snapshot()), type=LedgerState)
    again = Ledger.restore(type(ledger.rules)(**keys), state, payloads)
    assert again.published is None
    assert refill(again) == []
    again.publish(again.version)
    again.check()
    return again


def busy(**others: Any) -> Ledger:
    """After one train step of B = 2, K = 2, D = 2: prompts in every state a checkpoint can meet."""
    ledger = launched(2, 2, 2, **others)
    for lease in refill(ledger)[:4]:
        finish(ledger, lease)
    ledger.drop(4, 1, "timeout", counts=True)
    ledger.settle(5, 1, "failed")
    train(ledger)
    running = refill(ledger)[0]
    ledger.report(running.uid, running.attempt, 0, 1, 8)
    return ledger


@pytest.mark.parametrize("encoding", [msgspec.msgpack, msgspec.json])
def test_a_snapshot_survives_the_checkpoint_file(encoding: Any) -> None:
    state = busy().snapshot()
    assert encoding.decode(encoding.encode(state), type=LedgerState) == state


def test_a_snapshot_is_a_value() -> None:
    ledger = busy()
    state, frozen = ledger.snapshot(), msgspec.msgpack.encode(ledger.snapshot())
    Ledger.restore(ledger.rules, state, ())
    run_to_end(ledger, steps=3)
    assert msgspec.msgpack.encode(state) == frozen


def test_ready_stays_iff_its_payload_was_saved_and_everything_else_is_leased_again() -> None:
    ledger = busy()
    assert {uid: lease.state for uid, lease in ledger.live.items()} == {
        2: "ready",
        3: "ready",
        4: "running",
        6: "running",
        7: "running",
        8: "running",
    }
    again = resumed(ledger, payloads=(3, 4))
    assert list(again.live) == [3]
    assert again.again == {2: (2, 1), 4: (3, 2), 6: (2, 1), 7: (2, 1), 8: (2, 1)}
    assert again.take_lost() == []
    assert (again.step, again.version, again.cursor, again.low_water) == (1, 1, 9, 2)
    before, after = ledger.account().tokens, again.account().tokens
    assert (after.generated, after.trained) == (before.generated, before.trained)
    assert (after.dropped, after.open) == (before.dropped + 10 + 8, 10)


@pytest.mark.parametrize(
    ("mode", "bound", "stays"), [("mask", 2, True), ("mask", 1, False), ("wait", 3, True), ("wait", 2, False)]
)
def test_ready_stays_iff_its_lag_fits(mode: str, bound: int, stays: bool) -> None:
    """Tokens of versions 0 and 1, saved before step 3: `mask` counts from the newest, `wait` from the oldest."""
    ledger = launched(1, 4, 1, at_deadline=mode)
    slow = refill(ledger)[0]
    ledger.report(slow.uid, 1, 0, 0, 5)
    for _ in range(3):
        finish(ledger, next(lease for lease in ledger.live.values() if lease is not slow))
        train(ledger)
        refill(ledger)
    finish(ledger, slow, 1)
    again = resumed(ledger, payloads=(slow.uid,), max_staleness=bound)
    assert (again.step, slow.uid in again.live, slow.uid in again.again) == (3, stays, not stays)


def test_R2_what_is_outstanding_after_a_resume_is_within_the_bound() -> None:
    ledger = busy()
    again = resumed(ledger, payloads=(2, 3))
    refill(again)
    assert len(again.live) == 2 * (2 + 1)
    again.check()


@pytest.mark.parametrize(
    ("others", "live"), [({"lookahead": 1}, 4), ({"lookahead": 0}, 2), ({"train_steps": 2}, 2), ({"train_steps": 1}, 0)]
)
def test_R2_resuming_with_less_room_leases_the_excess_again(others: dict[str, Any], live: int) -> None:
    ledger = launched(2, 2, 2)
    for lease in refill(ledger):
        finish(ledger, lease)
    train(ledger)
    for lease in refill(ledger):
        finish(ledger, lease)
    again = resumed(ledger, payloads=tuple(ledger.live), **others)
    assert list(again.live) == list(range(2, 2 + live))
    assert len(again.live) + len(again.again) == 6


def test_L13_a_checkpoint_at_an_epoch_boundary_resumes_with_the_next_epoch() -> None:
    """Two epochs of four rows are the ordinals 0..7."""
    ledger = launched(2, 0, 0, 8)
    assert run_to_end(ledger, steps=2) == [[0, 1], [2, 3]]
    assert ledger.low_water == 4
    again = resumed(ledger)
    assert run_to_end(again) == [[4, 5], [6, 7]]
    assert again.reason == "completed"


def test_prompts_to_be_leased_again_come_oldest_first_after_a_resume() -> None:
    ledger = launched(3, 1, 1)
    refill(ledger)
    for uid in (5, 0, 3):
        ledger.drop(uid, 1, "timeout", counts=True)
    assert [lease.uid for lease in refill(resumed(ledger))] == [0, 1, 2, 3, 4, 5]


def test_R1_the_prompts_trained_are_the_same_with_and_without_a_restart() -> None:
    whole, first = launched(2, 2, 1, 11), launched(2, 2, 1, 11)
    begun = run_to_end(first, steps=2)
    refill(first)
    first.drop(5, 1, "timeout", counts=True)
    again = resumed(first)
    trained = [uid for batch in begun + run_to_end(again) for uid in batch]
    assert sorted(trained) == sorted(uid for batch in run_to_end(whole) for uid in batch) == list(range(11))


def test_R1_a_dropped_rollout_does_not_pin_the_resume_point() -> None:
    ledger = launched(2, 1, 1, max_attempts=1)
    refill(ledger)
    ledger.drop(0, 1, "timeout", counts=True)
    for uid in (1, 2):
        finish(ledger, ledger.live[uid])
    train(ledger)
    assert ledger.low_water == 3
    assert not ledger.settled


def test_a_resume_after_a_run_that_trouble_ended_tries_again() -> None:
    ledger = launched(1, 1, 1, max_filtered=2)
    for lease in refill(ledger):
        ledger.settle(lease.uid, 1, "failed")
    assert ledger.reason == "exhausted"
    again = resumed(ledger)
    assert again.reason is None
    finish(again, refill(again)[0])
    assert uids(again.pop()) == [2]


def test_more_train_steps_continue_a_run_that_had_done_its_own() -> None:
    ledger = launched(1, 1, 1, train_steps=2)
    run_to_end(ledger)
    assert ledger.reason == "train_steps"
    assert run_to_end(resumed(ledger, train_steps=3)) == [[2]]


def test_memory_is_constant_over_100_000_leases() -> None:
    """State and internals, pickled: the same size after 20,000 leases and after 100,000, with some of each ending."""
    ledger = launched(50, 3, 2)
    sizes: list[int] = []
    for granted in (20_000, 100_000):
        while ledger.account().granted_leases < granted:
            for lease in refill(ledger):
                uid, attempt = lease.uid, lease.attempt
                ledger.report(uid, attempt, 0, lease.granted, 20)
                if uid % 10 == 0:
                    ledger.settle(uid, attempt, "filtered")
                elif uid % 10 == 1:
                    ledger.drop(uid, attempt, "timeout", counts=True)
                else:
                    ledger.ready(uid, attempt, byte_count=80)
            if ledger.pop() is not None:
                ledger.applied()
                ledger.publish(ledger.version)
            ledger.take_lost()
        sizes.append(len(pickle.dumps(ledger)))
        ledger.check()
    assert len(ledger.live) <= 150
    assert sizes[1] < 1.1 * sizes[0]


@pytest.mark.parametrize("mode", ["mask", "wait"])
def test_ten_thousand_live_leases(mode: str) -> None:
    ledger = launched(2500, 8, 3, at_deadline=mode)
    begun = time.monotonic()
    for _ in range(3):
        leases = refill(ledger)
        assert len(ledger.live) == 10_000
        for lease in leases:
            ledger.report(lease.uid, 1, 0, lease.granted, 100)
        for lease in list(ledger.live.values())[:2500]:
            assert ledger.pop() is None
            ledger.ready(lease.uid, 1, byte_count=400)
        assert len(train(ledger).leases) == 2500
    assert time.monotonic() - begun < 10.0
