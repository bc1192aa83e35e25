"""A second algorithm shape: two trained models, several optimizer steps per train step, a scoring stage with a queue
of its own, and a state that is checkpointed. Used by test_second_algorithm.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

import asyncrlhf as rl
from asyncrlhf import ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Learnt(msgspec.Struct, frozen=True):
    train_steps: int = 0
    mean_reward: float = 0.0


class ClippedLoss(ops.Loss, frozen=True):
    clip: float = 0.2

    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Tensor:
        ratio = (new.logprobs - batch.anchor_logprobs).exp()
        return -batch.weight * ops.clipped_gain(ratio, batch.advantages, self.clip, self.clip)


class ValueLoss(ops.Loss, frozen=True):
    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Tensor:
        assert new.values is not None
        return 0.5 * (new.values - batch.returns).square()


@dataclass(kw_only=True)
class ActorCritic(rl.Algorithm):
    prompts: rl.PromptSource
    rollout: rl.RolloutGroup
    reward: rl.RewardGroup
    policy: rl.PolicyGroup
    critic: rl.CriticGroup
    coordinator: rl.Coordinator
    answers: rl.StageQueue[rl.Rollout]
    experience: rl.ExperienceQueue[rl.Experience]
    policy_loss: ClippedLoss = field(default_factory=ClippedLoss)
    value_loss: ValueLoss = field(default_factory=ValueLoss)
    advantage: ops.GAE = field(default_factory=ops.GAE)
    minibatches: int = 2
    epochs: int = 2
    state: Learnt = field(default_factory=Learnt)

    async def generate(self) -> None:
        async for prompt in self.prompts:
            await self.answers.put(await self.rollout.sample(prompt))

    async def score(self) -> None:
        async for rollout in self.answers:
            rewards = await self.reward.score(rollout)
            mean = 0.9 * self.state.mean_reward + 0.1 * fmean(rewards)
            self.state = replace(self.state, mean_reward=mean)
            await self.experience.put(rl.Experience(rollout=rollout, rewards=rewards))

    def stages(self) -> Sequence[rl.Stage]:
        return (self.score,)

    async def train(self) -> None:
        async for batch in self.experience.batches():
            batch = await self.critic.apply(self.advantage, batch)
            for part in batch.minibatches(self.minibatches, epochs=self.epochs):
                await rl.gather(
                    self.policy.step(part, self.policy_loss),
                    self.critic.step(part, self.value_loss),
                )
            self.state = replace(self.state, train_steps=self.state.train_steps + 1)
            await self.coordinator.publish(self.policy, self.critic)
