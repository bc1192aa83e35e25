"""Algorithms of other shapes than GRPO, for the contract tests: two models, an extra stage, filters, a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import msgspec
from msgspec.structs import replace

import asyncrlhf as rl
from algorithms.grpo import GRPO, GRPOExperience
from algorithms.ppo import PPO
from asyncrlhf import ops


class AnyLoss(ops.Loss, frozen=True):
    """The fakes do not look at losses."""


class AnyTransform(ops.Transform, frozen=True):
    """Nor at transforms."""


class Seen(msgspec.Struct, frozen=True):
    train_steps: int = 0


@dataclass(kw_only=True)
class TwoModels(rl.Algorithm):
    """PPO's shape: a critic that is trained too, several optimizer steps per train step, a state."""

    prompts: rl.PromptSource
    rollout: rl.RolloutGroup
    reward: rl.RewardGroup
    policy: rl.PolicyGroup
    critic: rl.CriticGroup
    coordinator: rl.Coordinator
    experience: rl.ExperienceQueue[rl.Experience]
    loss: AnyLoss = field(default_factory=AnyLoss)
    advantage: AnyTransform = field(default_factory=AnyTransform)
    warm_up: int = 0
    """Train steps in which only the critic is trained."""
    state: Seen = field(default_factory=Seen)

    async def generate(self) -> None:
        async for prompt in self.prompts:
            rollout = await self.rollout.sample(prompt)
            await self.experience.put(rl.Experience(rollout=rollout, rewards=await self.reward.score(rollout)))

    async def train(self) -> None:
        async for batch in self.experience.batches():
            batch = await self.critic.apply(self.advantage, batch)
            for part in batch.minibatches(2):
                await self.critic.step(part, self.loss)
                if batch.train_step >= self.warm_up:
                    await self.policy.step(part, self.loss)
            self.state = replace(self.state, train_steps=self.state.train_steps + 1)
            await self.coordinator.publish(self.policy, self.critic)


@dataclass(kw_only=True)
class Staged(rl.Algorithm):
    """Rewards in a pool of their own, behind a queue; rollouts below `least` are filtered there."""

    prompts: rl.PromptSource
    rollout: rl.RolloutGroup
    reward: rl.RewardGroup
    policy: rl.PolicyGroup
    coordinator: rl.Coordinator
    answered: rl.StageQueue[rl.Rollout]
    experience: rl.ExperienceQueue[rl.Experience]
    loss: AnyLoss = field(default_factory=AnyLoss)
    least: float = -1.0

    async def generate(self) -> None:
        async for prompt in self.prompts:
            await self.answered.put(await self.rollout.sample(prompt))

    async def score(self) -> None:
        async for rollout in self.answered:
            rewards = await self.reward.score(rollout)
            if fmean(rewards) >= self.least:
                await self.experience.put(rl.Experience(rollout=rollout, rewards=rewards))

    def stages(self) -> Sequence[rl.Stage]:
        return (self.score,)

    async def train(self) -> None:
        async for batch in self.experience.batches():
            await self.policy.step(batch, self.loss)
            await self.coordinator.publish(self.policy)


@dataclass(kw_only=True)
class Filtered(GRPO):
    """DAPO's dynamic sampling: rollouts whose answers all earn the same are filtered, and replaced."""

    async def generate(self) -> None:
        async for prompt in self.prompts:
            rollout = await self.rollout.sample(prompt)
            rewards = await self.reward.score(rollout)
            advantages = self.advantages(rewards)
            if any(advantages):
                experience = GRPOExperience(
                    rollout=rollout, rewards=rewards, advantages=advantages, reference_logprobs=None
                )
                await self.experience.put(experience)


SHAPES = (GRPO, PPO, TwoModels, Staged, Filtered)
