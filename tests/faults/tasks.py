"""Rewards and an algorithm that misbehave, some always and some on prompts that their text picks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import re
import subprocess
import threading
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from algorithms.grpo import GRPO, GRPOExperience
from asyncrlhf.errors import GroupError, PublishRefused
from tests.integration.tiny import graded as graded

KINDS = 9
HELD = "beg>"
"""The prompt whose reward holds the interpreter."""


def leave(name: str) -> None:
    """A file in the current directory, for a test to see."""
    Path(name).touch()


def kind(prompt: str) -> int:
    """Which of KINDS kinds a prompt is; nearly equally many are of each."""
    return zlib.crc32(prompt.encode()) % KINDS


async def mixed(prompt: str, response: str, ground_truth: str) -> Any:
    """Raises, gives None or NaN for one kind of prompts each; the others are graded, some after a while."""
    match kind(prompt):
        case 0:
            raise ValueError(f"no grade for {prompt}")
        case 1:
            return None
        case 2:
            return math.nan
        case 3:
            await asyncio.sleep(0.05)
        case _:
            await asyncio.sleep(0.005)
    return graded(prompt, response, ground_truth)


def fails(prompt: str, response: str, ground_truth: str) -> float:
    """Never gives a reward."""
    raise RuntimeError("the grader is out of order")


def hangs(prompt: str, response: str, ground_truth: str) -> float:
    """Never comes back for one kind of prompts."""
    if kind(prompt) == 0:
        threading.Event().wait()
    return graded(prompt, response, ground_truth)


async def slow(prompt: str, response: str, ground_truth: str) -> float:
    """Long enough for something to happen meanwhile."""
    await asyncio.sleep(0.3)
    return graded(prompt, response, ground_truth)


def until_told(prompt: str, response: str, ground_truth: str) -> float:
    """Grades some answers at once, and the others when there is a file "go"."""
    return _some_until("go", graded(prompt, response, ground_truth))


def until_back(prompt: str, response: str, ground_truth: str) -> float:
    """Grades some answers at once, and the others when there is a file "back"."""
    return _some_until("back", graded(prompt, response, ground_truth))


def _some_until(name: str, grade: float) -> float:
    if next(GRADES) >= 48:
        while not Path(name).exists():
            time.sleep(0.02)
    return grade


def nothing(prompt: str, response: str, ground_truth: str) -> Any:
    return None


def not_a_number(prompt: str, response: str, ground_truth: str) -> float:
    return math.nan


@dataclass(kw_only=True)
class Picky(GRPO):
    """Filters one kind of prompts, as dynamic sampling does."""

    async def generate(self) -> None:
        async for prompt in self.prompts:
            rollout = await self.rollout.sample(prompt)
            if kind(prompt.text) == 4:
                continue
            rewards = await self.reward.score(rollout)
            await self.experience.put(
                GRPOExperience(
                    rollout=rollout, rewards=rewards, advantages=self.advantages(rewards), reference_logprobs=None
                )
            )


class Steps(msgspec.Struct, frozen=True):
    """What an algorithm learns about itself."""

    count: int = 0


@dataclass(kw_only=True)
class Counting(GRPO):
    """Counts its train steps in its state."""

    state: Steps = field(default_factory=Steps)

    async def train(self) -> None:
        async for batch in self.experience.batches():
            await self.policy.step(batch, self.loss)
            self.state = Steps(self.state.count + 1)
            await self.coordinator.publish(self.policy)


@dataclass(kw_only=True)
class Demanding(GRPO):
    """Has a setting without a default."""

    beta: float


def terminal(prompt: str) -> str:
    """How a prompt ends under `Picky` and `mixed`."""
    return {0: "failed", 1: "failed", 2: "failed", 4: "filtered"}.get(kind(prompt), "consumed")


async def marks_long_words(prompt: str, response: str, ground_truth: str) -> float:
    """Says so when it is given a word of the evaluation, and takes its time."""
    if len(ground_truth) > 3:
        leave("evaluating")
        await asyncio.sleep(0.5)
    return graded(prompt, response, ground_truth)


async def blocks_the_loop(prompt: str, response: str, ground_truth: str) -> float:
    """What an async function must not do."""
    leave("blocked")
    threading.Event().wait(30)
    return 0.0


GRADES = itertools.count()


def fails_later(prompt: str, response: str, ground_truth: str) -> float:
    """Grades the answers to a few prompts, then never again in this process."""
    if next(GRADES) >= 24:
        raise RuntimeError("the grader is out of order")
    return graded(prompt, response, ground_truth)


def odd_rows() -> list[dict[str, Any]]:
    """Rows with a column that no file can hold."""
    words = ("abc", "bcd", "cde", "def", "efg", "fgh")
    return [{"prompt": f"{word}>", "answer": word[::-1], "odd": threading.Lock()} for word in words]


def counted(prompt: str, response: str, ground_truth: str, **columns: Any) -> float:
    """Adds a byte to a file for every answer."""
    with open("scores", "ab", buffering=0) as file:
        file.write(b".")
    return graded(prompt, response, ground_truth)


def holds(prompt: str, response: str, ground_truth: str) -> float:
    """Holds the interpreter for ever with one prompt: a regular expression that backtracks."""
    if prompt == HELD:
        re.match(r"(a+)+$", "a" * 64 + "b")
    return graded(prompt, response, ground_truth)


def starts_a_process(prompt: str, response: str, ground_truth: str) -> float:
    """Leaves a process running, as a sandbox does, and another one that is a copy of its own."""
    with contextlib.suppress(FileExistsError):
        Path("starting").mkdir()
        sleeper, copied = subprocess.Popen(["sleep", "600"]).pid, os.fork()
        if not copied:
            time.sleep(600)
            os._exit(0)
        Path("started").write_text(f"{sleeper} {copied}")
    time.sleep(0.05)
    return graded(prompt, response, ground_truth)


def terminates_a_process(prompt: str, response: str, ground_truth: str) -> float:
    """Ends what it has started, as a sandbox with a limit does."""
    sleeper = subprocess.Popen(["sleep", "600"])
    sleeper.terminate()
    sleeper.wait(timeout=2)
    return graded(prompt, response, ground_truth)


class Refused(GRPO):
    """Whoever reads the weights of a trainer that has failed may say so before the step that failed does."""

    async def train(self) -> None:
        try:
            await super().train()
        except GroupError:
            raise PublishRefused("weights of version 1 are gone") from None
