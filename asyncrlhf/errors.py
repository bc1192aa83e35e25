"""Every error asyncrlhf raises on purpose.

AsyncRLHFError
  ConfigError          the run cannot start as configured               (also a ValueError)
  DataError            a data set cannot be read                        (also a ValueError)
  SampleError          one prompt cannot be answered or scored          (also a ValueError)
  LeaseLost            a late result: its lease was dropped or leased again
  QueueClosed          the other side has finished
  WrongItem            a queue was given an item of another type        (also a TypeError)
  CheckpointError      a checkpoint is missing, torn or does not fit    (also an OSError)
  GroupError           an engine of a group failed: group, rank, cause  (also a RuntimeError)
    EngineLost         its process has ended: signal or exit code, last lines of its log
      DataLost         what a message refers to is gone, with the machine that held it
  RunEnded             the run ends before its train steps, by name
    Exhausted          too many prompts in a row gave nothing to train on
    Diverged           too many train steps in a row were not finite
    NoSignal           too many train steps in a row held no unmasked token
    PublishRefused     weights failed the publish gate
    Stalled            nothing has moved for `limits.stall_timeout` seconds

Each message says what happened, both numbers where two disagree, and how to fix it. All of them pickle.
"""

from __future__ import annotations

__all__ = (
    "AsyncRLHFError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DataLost",
    "Diverged",
    "EngineLost",
    "Exhausted",
    "GroupError",
    "LeaseLost",
    "NoSignal",
    "PublishRefused",
    "QueueClosed",
    "RunEnded",
    "SampleError",
    "Stalled",
    "WrongItem",
)


class AsyncRLHFError(Exception):
    """Base of every error raised on purpose by asyncrlhf. One without words says its name."""

    def __str__(self) -> str:
        return super().__str__() or type(self).__name__


class ConfigError(AsyncRLHFError, ValueError):
    """The run cannot start as configured."""


class DataError(AsyncRLHFError, ValueError):
    """A data set cannot be read."""


class SampleError(AsyncRLHFError, ValueError):
    """One prompt cannot be answered or scored; the run goes on without it, and counts it."""


class LeaseLost(AsyncRLHFError):
    """The lease behind this result was dropped, cancelled or granted again; the result is refused."""


class QueueClosed(AsyncRLHFError):
    """The other side of the queue has finished."""


class WrongItem(AsyncRLHFError, TypeError):
    """A queue was given an item of another type than its annotation names; the run ends."""


class CheckpointError(AsyncRLHFError, OSError):
    """A checkpoint is missing, torn, or does not fit this run."""


class GroupError(AsyncRLHFError, RuntimeError):
    """An engine of a model group failed; the message names group and rank."""


class EngineLost(GroupError):
    """The process behind an engine has ended; a fresh one may do better."""


class DataLost(EngineLost):
    """What a message refers to is gone: a rollout that waits is sampled again, and a run whose train step needs it goes
    on from its newest checkpoint."""


class RunEnded(AsyncRLHFError):
    """The run ends before its train steps are done; the class name is the reason in summary.json."""


class Exhausted(RunEnded):
    """Too many prompts in a row were filtered or failed (`limits.max_filtered`)."""


class Diverged(RunEnded):
    """Too many train steps in a row had no finite optimizer step (`limits.max_void_steps`)."""


class NoSignal(RunEnded):
    """Too many train steps in a row held no unmasked token (`limits.max_void_steps`)."""


class PublishRefused(RunEnded):
    """Weights failed the publish gate: not finite, or not the bytes the trainer announced."""


class Stalled(RunEnded):
    """Nothing has moved for `limits.stall_timeout` seconds."""
