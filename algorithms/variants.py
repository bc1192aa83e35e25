"""GRPO with another advantage or normaliser: RLOO (arXiv 2402.14740) and Dr. GRPO (arXiv 2503.20783)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import ClassVar

import asyncrlhf as rl
from algorithms.grpo import GRPO, GRPOLoss
from asyncrlhf import ops


class RLOO(GRPO):
    """Each answer against the mean of the others."""

    def advantages(self, rewards: Sequence[float]) -> rl.PerSample:
        others = max(1, len(rewards) - 1)
        return tuple(reward - (sum(rewards) - reward) / others for reward in rewards)


class DrGRPOLoss(GRPOLoss, frozen=True):
    reduction: ClassVar[ops.Reduction] = "constant"


@dataclass(kw_only=True)
class DrGRPO(GRPO):
    """No division by the deviation or by the answer's length."""

    loss: DrGRPOLoss = field(default_factory=DrGRPOLoss)

    def advantages(self, rewards: Sequence[float]) -> rl.PerSample:
        mean = fmean(rewards)
        return tuple(reward - mean for reward in rewards)
