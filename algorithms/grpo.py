"""GRPO: ask several times, and let the answers' own mean reward be the baseline (arXiv 2402.03300).

RLOO (arXiv 2402.14740) and Dr. GRPO (arXiv 2503.20783) differ in the advantage and the normaliser only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, ClassVar

import asyncrlhf as rl
from asyncrlhf import ops

if TYPE_CHECKING:
    from torch import Tensor


class GRPOExperience(rl.Experience, frozen=True):
    advantages: rl.PerSample
    reference_logprobs: rl.PerToken | None


class GRPOLoss(ops.Loss, frozen=True):
    clip_low: float = 0.2
    """The ratio counts down to 1 - clip_low."""
    clip_high: float = 0.28
    """... and up to 1 + clip_high (DAPO's "clip higher", arXiv 2503.14476)."""
    kl: float = 0.0
    """Weight of the pull towards the reference policy; needs [groups.reference]."""

    @property
    def needs_groups(self) -> tuple[str, ...]:
        return ("reference",) if self.kl else ()

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.clip_low, self.clip_high

    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Tensor:
        ratio = (new.logprobs - batch.anchor_logprobs).exp()
        loss = -batch.weight * ops.clipped_gain(ratio, batch.advantages, self.clip_low, self.clip_high)
        return loss + self.kl * ops.k3(new.logprobs, batch.reference_logprobs) if self.kl else loss


@dataclass(kw_only=True)
class GRPO(rl.Algorithm):
    prompts: rl.PromptSource
    rollout: rl.RolloutGroup
    reward: rl.RewardGroup
    policy: rl.PolicyGroup
    coordinator: rl.Coordinator
    experience: rl.ExperienceQueue[GRPOExperience]
    reference: rl.ReferenceGroup | None = None
    loss: GRPOLoss = field(default_factory=GRPOLoss)
    minibatches: int = 1
    """Optimizer steps per train step."""

    async def generate(self) -> None:
        async for prompt in self.prompts:  # waits at the staleness gate
            rollout = await self.rollout.sample(prompt)
            rewards, reference = await rl.gather(self.reward.score(rollout), self.reference_logprobs(rollout))
            await self.experience.put(
                GRPOExperience(
                    rollout=rollout,
                    rewards=rewards,
                    advantages=self.advantages(rewards),
                    reference_logprobs=reference,
                    trainable=min(rewards) < max(rewards) or self.loss.kl > 0,
                )
            )

    async def train(self) -> None:
        async for batch in self.experience.batches():  # the bound is checked here
            for part in batch.minibatches(self.minibatches):
                await self.policy.step(part, self.loss)
            await self.coordinator.publish(self.policy)

    async def reference_logprobs(self, rollout: rl.Rollout) -> rl.PerToken | None:
        return await self.reference.logprobs(rollout) if self.reference else None

    def advantages(self, rewards: Sequence[float]) -> rl.PerSample:
        mean, deviation = fmean(rewards), pstdev(rewards)
        return tuple((reward - mean) / (deviation + 1e-4) for reward in rewards)


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
