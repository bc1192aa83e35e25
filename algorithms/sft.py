"""SFT: supervised fine-tuning on the data set's own answers (`data.response`), through the same queue and clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import asyncrlhf as rl
from asyncrlhf import ops

if TYPE_CHECKING:
    from torch import Tensor


class SFTLoss(ops.Loss, frozen=True):
    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Tensor:
        return -new.logprobs


@dataclass(kw_only=True)
class SFT(rl.Algorithm):
    requires: ClassVar = ("data.response",)

    prompts: rl.PromptSource
    policy: rl.PolicyGroup
    coordinator: rl.Coordinator
    experience: rl.ExperienceQueue[rl.Experience]
    loss: SFTLoss = field(default_factory=SFTLoss)

    async def generate(self) -> None:
        async for prompt in self.prompts:
            await self.experience.put(rl.Experience(rollout=rl.Rollout.from_data(prompt), rewards=None))

    async def train(self) -> None:
        async for batch in self.experience.batches():
            await self.policy.step(batch, self.loss)
            await self.coordinator.publish(self.policy)
