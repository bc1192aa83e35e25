"""What every weight transport owes: bit-exact bytes, two versions readable, stale ones refused, and few pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrlhf.errors import GroupError, PublishRefused

__all__ = ("WEIGHT_TRANSFER", "TransferSubject")


@dataclass(frozen=True, kw_only=True)
class TransferSubject:
    """A transport under test, and how to make, change and compare the weights that it carries."""

    make: Callable[[], Any]
    """A fresh WeightTransfer, for either side."""
    weights: Callable[[int], dict[str, Any]]
    """Weights by name, different for every seed."""
    change: Callable[[dict[str, Any]], None]
    """Overwrite weights where they are, as an optimizer step does."""
    equal: Callable[[Any, Any], bool]
    """Are two weights the same bytes?"""
    weight: Callable[[int], Any]
    """One weight of so many numbers, at least 1."""
    pieces: Callable[[Mapping[str, Any]], int] = lambda payload: 1
    """How many pieces a payload names that are moved one by one (remote calls, messages); 1: all at once."""
    keeps: bool = False
    """An announced version stays readable as long as somebody holds its payload; otherwise its memory is reused, and
    whoever comes too late is refused."""

    def require_equal(self, received: Mapping[str, Any], sent: Mapping[str, Any]) -> None:
        assert received.keys() == sent.keys(), f"{sorted(received)} arrived, {sorted(sent)} were sent"
        for name, weight in sent.items():
            assert self.equal(received[name], weight), f"{name} arrived changed"

    def require_gone(self, transfer: Any, payload: Mapping[str, Any], version: int, weights: Mapping[str, Any]) -> None:
        """Never other bytes than those announced."""
        if self.keeps:
            self.require_equal(dict(transfer.receive(payload)), weights)
        else:
            assert str(version) in _refused(transfer, payload, PublishRefused)


def _refused(transfer: Any, payload: Mapping[str, Any], *kinds: type[Exception]) -> str:
    try:
        list(transfer.receive(payload))
    except kinds as error:
        return str(error)
    raise AssertionError("weights that are gone were received")


def weights_arrive_bit_by_bit(subject: TransferSubject) -> None:
    sender, receiver = subject.make(), subject.make()
    payload = sender.send(0, subject.weights(1))
    subject.require_equal(dict(receiver.receive(payload)), subject.weights(1))
    subject.require_equal(dict(subject.make().receive(payload)), subject.weights(1))


def what_was_sent_stays_while_the_sender_trains_on(subject: TransferSubject) -> None:
    sender, weights = subject.make(), subject.weights(1)
    payload = sender.send(0, weights)
    subject.change(weights)
    subject.require_equal(dict(subject.make().receive(payload)), subject.weights(1))


def a_version_can_be_read_until_the_next_but_one_is_sent(subject: TransferSubject) -> None:
    sender, receiver = subject.make(), subject.make()
    payloads = [sender.send(version, subject.weights(version)) for version in (0, 1)]
    for version in (0, 1):
        subject.require_equal(dict(receiver.receive(payloads[version])), subject.weights(version))
    payloads.append(sender.send(2, subject.weights(2)))
    subject.require_gone(receiver, payloads[0], 0, subject.weights(0))
    for version in (1, 2):
        subject.require_equal(dict(receiver.receive(payloads[version])), subject.weights(version))


def many_versions_one_after_another_arrive(subject: TransferSubject) -> None:
    sender, receiver = subject.make(), subject.make()
    for version in range(7):
        payload = sender.send(version, subject.weights(version))
        subject.require_equal(dict(receiver.receive(payload)), subject.weights(version))


def two_senders_do_not_disturb_each_other(subject: TransferSubject) -> None:
    policy, critic, receiver = subject.make(), subject.make(), subject.make()
    first, second = policy.send(0, subject.weights(1)), critic.send(0, subject.weights(2))
    critic.send(1, subject.weights(3))
    critic.send(2, subject.weights(4))
    subject.require_equal(dict(receiver.receive(first)), subject.weights(1))
    subject.require_gone(receiver, second, 0, subject.weights(2))


def N14_a_slow_receiver_gets_every_byte_of_its_version(subject: TransferSubject) -> None:
    """It reads on while the trainer trains and sends the next one."""
    sender, weights = subject.make(), subject.weights(1)
    reading = subject.make().receive(sender.send(0, weights))
    received = dict([next(reading)])
    subject.change(weights)
    payload = sender.send(1, weights)
    received.update(reading)
    subject.require_equal(received, subject.weights(1))
    subject.require_equal(dict(subject.make().receive(payload)), weights)


def M5_pieces_grow_with_bytes_and_not_with_the_number_of_weights(subject: TransferSubject) -> None:
    sender = subject.make()
    few = sender.send(0, {"w": subject.weight(400)})
    weights = {f"w{number}": subject.weight(1) for number in range(400)}
    many = sender.send(1, weights)
    assert subject.pieces(many) <= subject.pieces(few) + 1
    subject.require_equal(dict(subject.make().receive(many)), weights)


def the_weights_of_a_sender_that_is_gone_are_refused(subject: TransferSubject) -> None:
    """Or it is the engine's failure, GroupError, which a lost trainer outdoes."""
    payload = subject.make().send(5, subject.weights(1))
    if subject.keeps:
        subject.require_equal(dict(subject.make().receive(payload)), subject.weights(1))
    else:
        assert "version 5" in _refused(subject.make(), payload, PublishRefused, GroupError)


WEIGHT_TRANSFER: tuple[Callable[[TransferSubject], None], ...] = (
    weights_arrive_bit_by_bit,
    what_was_sent_stays_while_the_sender_trains_on,
    a_version_can_be_read_until_the_next_but_one_is_sent,
    many_versions_one_after_another_arrive,
    two_senders_do_not_disturb_each_other,
    N14_a_slow_receiver_gets_every_byte_of_its_version,
    M5_pieces_grow_with_bytes_and_not_with_the_number_of_weights,
    the_weights_of_a_sender_that_is_gone_are_refused,
)
