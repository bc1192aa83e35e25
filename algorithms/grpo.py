"""GRPO: ask several times, and let the answers' own mean reward be the baseline (arXiv 2402.03300)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

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

    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Tensor:
        gain = ops.clipped_gain(ops.ratio(new, batch), batch.advantages, self.clip_low, self.clip_high)
        loss = -batch.weight * gain
        return loss + self.kl * ops.k3(new.logprobs, batch.reference_logprobs) if self.kl else loss

    def measures(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Mapping[str, Tensor]:
        return {"clip_fraction": ops.outside(ops.ratio(new, batch), self.clip_low, self.clip_high)}


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
            steps = [self.policy.step(part, self.loss) for part in batch.minibatches(self.minibatches)]
            await rl.gather(*steps)  # one after another, without a pause
            await self.coordinator.publish(self.policy)

    async def reference_logprobs(self, rollout: rl.Rollout) -> rl.PerToken | None:
        return await self.reference.logprobs(rollout) if self.reference else None

    def advantages(self, rewards: Sequence[float]) -> rl.PerSample:
        mean, deviation = fmean(rewards), pstdev(rewards)
        return tuple((reward - mean) / (deviation + 1e-4) for reward in rewards)
