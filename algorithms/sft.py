"""SFT: supervised fine-tuning on the data set's own answers (`data.response`), through the same queue and clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

import msgspec

import asyncrlhf as rl
from asyncrlhf import ops

if TYPE_CHECKING:
    from torch import Tensor

RECENT = 4


class SFTLoss(ops.Loss, frozen=True):
    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Tensor:
        return -new.logprobs


class SFTState(msgspec.Struct, frozen=True):
    losses: tuple[float, ...] = ()
    """Of the last RECENT train steps."""


@dataclass(kw_only=True)
class SFT(rl.Algorithm):
    requires: ClassVar = ("data.response",)

    prompts: rl.PromptSource
    policy: rl.PolicyGroup
    coordinator: rl.Coordinator
    experience: rl.ExperienceQueue[rl.Experience]
    loss: SFTLoss = field(default_factory=SFTLoss)
    target_loss: float = 0.0
    """End before train_steps once the mean loss of RECENT steps is at most this, in nats per token; 0: never."""
    state: SFTState = field(default_factory=SFTState)

    async def generate(self) -> None:
        async for prompt in self.prompts:
            await self.experience.put(rl.Experience(rollout=rl.Rollout.from_data(prompt), rewards=None))

    async def train(self) -> None:
        async for batch in self.experience.batches():
            result = await self.policy.step(batch, self.loss)
            if result.applied:
                self.state = SFTState(losses=(*self.state.losses, result.metrics["loss"])[-RECENT:])
            await self.coordinator.publish(self.policy)
            if len(self.state.losses) == RECENT and fmean(self.state.losses) <= self.target_loss:
                return
