"""Algorithms that ask for something a configuration may lack. Used by test_wiring.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from algorithms.grpo import GRPO, GRPOLoss
from asyncrlhf import ops

if TYPE_CHECKING:
    from torch import Tensor


class SequenceLoss(ops.Loss, frozen=True):
    level: ClassVar[Literal["token", "sequence"]] = "sequence"

    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Tensor:
        return -batch.sum_by_sequence(new.logprobs)


@dataclass(kw_only=True)
class BySequence(GRPO):
    second_loss: SequenceLoss = field(default_factory=SequenceLoss)


@dataclass(kw_only=True)
class Anchored(GRPO):
    loss: GRPOLoss = field(default_factory=lambda: GRPOLoss(kl=0.1))
