"""A reward model from preferences: of two answers to a prompt the chosen one is to score higher (Bradley, Terry 1952,
"Rank analysis of incomplete block designs"; for language models Ouyang et al. 2022, arXiv 2203.02155 eq. 1).

Data: a prompt, which may be empty, the chosen answer (`data.response`) and the other one (`data.rejected`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import asyncrlhf as rl
from asyncrlhf import ops

if TYPE_CHECKING:
    from torch import Tensor


class Preference(rl.Experience, frozen=True):
    sign: rl.PerSample = (1.0, -1.0)
    """1: the chosen answer, -1: the rejected one."""


class BradleyTerryLoss(ops.Loss, frozen=True):
    """-log sigmoid(score of the chosen answer - score of the rejected one), mean over pairs."""

    level: ClassVar[ops.Level] = "rollout"
    reduction: ClassVar[ops.Reduction] = "sequence_mean"
    after_token: ClassVar[bool] = True

    centre: float = 0.002
    """Weight of score^2, which keeps scores round 0: preferences say nothing about their level."""

    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Tensor:
        score, margin = self.score_and_margin(new, batch)
        return (-margin).logaddexp(margin.new_zeros(())) + self.centre * score.square()

    def measures(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Mapping[str, Tensor]:
        score, margin = self.score_and_margin(new, batch)
        return {"accuracy": (1 + margin.sign()) / 2, "margin": margin, "score": score}

    def score_and_margin(self, new: ops.TokenStats, batch: ops.MicroBatch) -> tuple[Tensor, Tensor]:
        score = batch.last_of_sequence(new.values)
        return score, 2 * batch.sign * (score - batch.mean_by_rollout(score))  # either row's distance to their middle


@dataclass(kw_only=True)
class RewardModel(rl.Algorithm):
    requires: ClassVar = ("data.response", "data.rejected")

    prompts: rl.PromptSource
    reward_model: rl.CriticGroup
    coordinator: rl.Coordinator
    experience: rl.ExperienceQueue[Preference]
    loss: BradleyTerryLoss = field(default_factory=BradleyTerryLoss)

    async def generate(self) -> None:
        async for prompt in self.prompts:
            await self.experience.put(Preference(rollout=rl.Rollout.pair_from_data(prompt), rewards=None))

    async def train(self) -> None:
        async for batch in self.experience.batches():
            await self.reward_model.step(batch, self.loss)
            await self.coordinator.publish(self.reward_model)
