"""The plainest algorithm there is, and how to run it without any engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import asyncrlhf as rl
from asyncrlhf.algorithm import run_algorithm
from asyncrlhf.flow.experience import ExperienceQueue
from asyncrlhf.flow.prompts import PromptSource
from asyncrlhf.messages import Experience, Prompt
from tests.unit.virtual import Scene, experience


@dataclass(kw_only=True)
class Plain(rl.Algorithm):
    """Answers come from `answer`; a train step takes a second and is always applied."""

    scene: Scene
    prompts: PromptSource
    experience: ExperienceQueue[Experience]
    answer: Callable[[Prompt], Awaitable[Experience | None]]
    forgets_publish: bool = False
    steps: int = 0

    async def generate(self) -> None:
        async for prompt in self.prompts:
            found = await self.answer(prompt)
            if found is not None:
                await self.experience.put(found)

    async def train(self) -> None:
        async for _ in self.experience.batches():
            await asyncio.sleep(1)
            self.steps += 1
            if not self.forgets_publish:
                self.scene.gate.applied()
                self.scene.gate.publish(self.scene.ledger.version)


async def at_once(prompt: Prompt) -> Experience:
    return experience(prompt)


def plain(
    scene: Scene, answer: Callable[[Prompt], Awaitable[Any]] = at_once, kind: type[Plain] = Plain, **more: Any
) -> Plain:
    return kind(
        scene=scene,
        prompts=PromptSource(scene.gate),
        experience=ExperienceQueue(Experience, scene.gate, scene.events.append),
        answer=answer,
        **more,
    )


async def run(algorithm: Plain, *, workers: int = 2, stall_timeout: float = 1000.0, **parts: Any) -> None:
    scene = algorithm.scene

    async def start() -> None:
        scene.gate.publish(0)

    async def finish() -> None:
        pass

    defaults: dict[str, Any] = {"services": [], "start": start, "finish": finish, "close": []}
    await run_algorithm(algorithm, scene.gate, workers=workers, stall_timeout=stall_timeout, **defaults | parts)


def trained(scene: Scene) -> int:
    return scene.ledger.account().counts["consumed"]
