"""PPO (arXiv 1707.06347) for language models (arXiv 1909.08593, 2203.02155): a critic learns what reward to expect, and
the policy is pushed towards what beat it, but not far from a reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

import asyncrlhf as rl
from asyncrlhf import ops

if TYPE_CHECKING:
    from torch import Tensor


class PPOExperience(rl.Experience, frozen=True):
    reference_logprobs: rl.PerToken | None
    kl: rl.PerSample | None


class PPOLoss(ops.Loss, frozen=True):
    clip: float = 0.2
    """The ratio counts within 1 - clip .. 1 + clip."""
    entropy: float = 0.0
    """Weight of a bonus for entropy."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("entropy",) if self.entropy else ()

    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Tensor:
        loss = -batch.weight * ops.clipped_gain(ops.ratio(new, batch), batch.advantages, self.clip, self.clip)
        loss = loss - self.entropy * new.entropy if self.entropy else loss
        if "kl_weight" in batch:
            loss = loss + batch.kl_weight * ops.k3(new.logprobs, batch.reference_logprobs)
        return loss

    def measures(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Mapping[str, Tensor]:
        return {"clip_fraction": ops.outside(ops.ratio(new, batch), self.clip, self.clip)}


class ValueLoss(ops.Loss, frozen=True):
    clip: float = 0.2
    """A value gains nothing by moving further than this from where it was before the train step; 0: it is free."""

    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Tensor:
        bound = self.clip or math.inf
        near = batch.values + (new.values - batch.values).clamp(-bound, bound)
        return 0.5 * (new.values - batch.returns).square().maximum((near - batch.returns).square())

    def measures(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Mapping[str, Tensor]:
        return {"clip_fraction": ((new.values - batch.values).abs() > (self.clip or math.inf)).float()}


class PPOState(msgspec.Struct, frozen=True):
    kl: float = 0.0  # to the reference, of the newest batch, in nats per answer
    kl_coefficient: float = 0.0  # for the batch after it; 0 before the first
    rewards: rl.Statistics = rl.Statistics()  # all so far


@dataclass(kw_only=True)
class PPO(rl.Algorithm):
    prompts: rl.PromptSource
    rollout: rl.RolloutGroup
    reward: rl.RewardGroup
    policy: rl.PolicyGroup
    critic: rl.CriticGroup
    coordinator: rl.Coordinator
    experience: rl.ExperienceQueue[PPOExperience]
    reference: rl.ReferenceGroup | None = None
    loss: PPOLoss = field(default_factory=PPOLoss)
    value_loss: ValueLoss = field(default_factory=ValueLoss)
    scale: ops.RewardScale = field(default_factory=ops.RewardScale)
    advantage: ops.GAE = field(default_factory=ops.GAE)
    kl: ops.KLControl = field(default_factory=ops.KLControl)
    kl_in: Literal["reward", "loss"] = "reward"  # the penalty is in the rewards of tokens, or in the loss
    minibatches: int = 4
    epochs: int = 1
    critic_warmup: int = 0  # train steps at the start that train the critic only
    state: PPOState = field(default_factory=PPOState)

    async def generate(self) -> None:
        async for prompt in self.prompts:  # waits at the staleness gate
            rollout = await self.rollout.sample(prompt)
            rewards, reference = await rl.gather(self.reward.score(rollout), self.reference_logprobs(rollout))
            kl = ops.sequence_kl(rollout, reference) if reference else None
            item = PPOExperience(rollout=rollout, rewards=rewards, reference_logprobs=reference, kl=kl)
            await self.experience.put(item)

    async def train(self) -> None:
        async for batch in self.experience.batches():  # the bound is checked here
            kl = batch.statistics("kl").mean if self.reference else 0.0
            now, seen = self.kl.start(self.state.kl_coefficient), self.state.rewards + batch.statistics("rewards")
            learns = batch.train_step >= self.critic_warmup
            self.state = PPOState(kl=kl, kl_coefficient=self.kl.next(now, kl) if learns else now, rewards=seen)
            rewards = ops.TokenRewards(scale=self.scale, seen=seen, kl=now, kl_in=self.kl_in)
            batch = await self.critic.apply(self.advantage, await self.critic.apply(rewards, batch))
            parts = batch.minibatches(self.minibatches, epochs=self.epochs)
            steps = [self.critic.step(part, self.value_loss) for part in parts]
            if learns:
                steps += [self.policy.step(part, self.loss) for part in parts]
            await rl.gather(*steps)  # those of a group one after another, without a pause
            await self.coordinator.publish(self.policy, self.critic)

    async def reference_logprobs(self, rollout: rl.Rollout) -> rl.PerToken | None:
        return await self.reference.logprobs(rollout) if self.reference else None
