"""What it takes that groups which share devices change over: measured in a run that did, else a formula.

Its constants are of one class of machine, and measured there: the torch backend on 2 cores of an AMD EPYC (Zen 5, a
virtual machine). With `offload` its processes give their free memory back when they leave, which is most of what
leaving takes, and touch it anew in the turn that follows, whose stage is slower for it (`cold_*`). Medians of
"colocate" against no turns at all, at 2.4 and 39 MB of weights: the two parts of each line. Where memory stays a change
is two messages, whatever the weights. On GPUs nothing was measured, and they are wrong there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from asyncrlhf.observe.events import AnyEvent, TurnTaken

__all__ = ("Turning", "measured_turning", "turns_of_both", "usual_turning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turning:
    """Seconds per change."""

    to_train: float = 0.0
    """Rollout engines leave, trainers come."""
    to_generate: float = 0.0
    """Trainers leave, rollout engines come and take weights."""
    to_read: float = 0.0
    """A model that neither generates nor trains comes."""
    cold_train: float = 0.0
    """By which a train step is longer after it than where the trainer never leaves."""
    cold_generate: float = 0.0
    """The same of generation."""
    uneven: float = 1.0
    """By which a rank's part of a train step is longer than its share of the time that one rank takes for all of it:
    ranks wait for the one with the longest rows and for each other's gradients. Measured with two."""


def usual_turning(weights: float, *, offload: bool) -> Turning:
    """Of a run that took no turns, with so many bytes of weights."""
    if not offload:
        return Turning(to_train=0.0004, to_generate=0.0006, to_read=0.0004, uneven=1.1)
    return Turning(
        to_train=0.004 + 0.41e-9 * weights,
        to_generate=0.007 + 0.96e-9 * weights,
        to_read=0.004 + 0.41e-9 * weights,
        cold_train=0.029 + 0.4e-9 * weights,
        cold_generate=0.023 + 1.3e-9 * weights,
        uneven=1.1,
    )


def turns_of_both(events: Sequence[AnyEvent], rollout: str, trained: Collection[str]) -> list[TurnTaken]:
    """All changes on devices that both `rollout` and a group of `trained` took; none: the run had pools of its own."""
    turns = [event for event in events if isinstance(event, TurnTaken)]
    both = {e.devices for e in turns if e.group == rollout} & {e.devices for e in turns if e.group in trained}
    return [event for event in turns if event.devices in both]


def measured_turning(turns: Sequence[TurnTaken], rollout: str, trained: Collection[str]) -> Turning:
    """Of these, in the median. What is cold is in the run's stage times already."""
    coming = [event.seconds for event in turns if event.group in trained]
    going = [event.seconds for event in turns if event.group == rollout]
    reading = [event.seconds for event in turns if event.group != rollout and event.group not in trained]
    return Turning(
        to_train=median(coming or [0.0]), to_generate=median(going or [0.0]), to_read=median(reading or [0.0])
    )
