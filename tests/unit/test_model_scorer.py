"""A reward model as a scorer: rollouts that wait together are read in one forward, and nobody is forgotten."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from asyncrlhf.abc import EngineSpec
from asyncrlhf.errors import GroupError, SampleError
from asyncrlhf.groups.frozen import FrozenEngine
from asyncrlhf.groups.scorers import ModelScorer
from asyncrlhf.messages import Prompt, Rollout, Sample, Segment, TrainBatch
from asyncrlhf.observe import EventLog
from asyncrlhf.testing import FakeRuntime, FakeScorer, FakeTrainerOptions, Fault, Timing, run_virtual

SIZES: list[int] = []


class Counting(FakeScorer):
    """Scores as FakeScorer does, but nan where the answer ends in 99; notes how many rows each forward has."""

    def scores(self, batch: TrainBatch) -> list[float]:
        SIZES.append(len(batch))
        ends = [int(row[-1]) for row in batch.columns["token_ids"].fetch()]
        return [math.nan if end == 99 else score for end, score in zip(ends, super().scores(batch), strict=True)]


def rollout(uid: int, *answers: tuple[int, ...]) -> Rollout:
    prompt = Prompt(uid=uid, epoch=0, attempt=1, version=0, token_ids=(7, 8), text="a")
    return Rollout(
        prompt=prompt,
        samples=tuple(
            Sample(
                token_ids=tokens,
                logprobs=(0.0,) * len(tokens),
                segments=(Segment(version=0, token_count=len(tokens)),),
                finish_reason="stop",
            )
            for tokens in answers
        ),
    )


async def scorer(*faults: Fault, max_restarts: int = 3) -> ModelScorer:
    SIZES.clear()
    runtime = FakeRuntime(Timing(verbs={"scores": 1.0}), faults)
    options = FakeTrainerOptions()
    spec = EngineSpec(group="reward", rank=0, engine=f"{__name__}:Counting", options=options)
    loop = asyncio.get_running_loop()
    found = ModelScorer(FrozenEngine(EventLog(None, loop.time), runtime, spec, max_restarts=max_restarts))
    await found.start()
    return found


def test_rollouts_that_wait_together_are_read_in_one_forward() -> None:
    async def main() -> list[Any]:
        scores = await scorer()
        return await asyncio.gather(*(scores.score(rollout(i, (i, 1), (i, 1, 3))) for i in range(5)))

    assert run_virtual(main()) == [((i + 1) % 9 / 8, (i + 4) % 9 / 8) for i in range(5)]
    assert SIZES == [2, 8], "the first began at once, the others waited for it"


@pytest.mark.parametrize("cancelled", [[0], [1], [0, 1, 2]])
def test_a_cancelled_caller_leaves_the_others_served(cancelled: list[int]) -> None:
    async def main() -> list[Any]:
        scores = await scorer()
        tasks = [asyncio.ensure_future(scores.score(rollout(i, (i, 1)))) for i in range(4)]
        await asyncio.sleep(0.5)
        for i in cancelled:
            tasks[i].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert not scores._waiting
        return found

    found = run_virtual(main())
    later = {1, 2, 3} - {*cancelled}
    assert [1, len(later)] == SIZES, "who left before their turn is not read"
    for i, result in enumerate(found):
        if i in cancelled:
            assert isinstance(result, asyncio.CancelledError)
        else:
            assert result == ((i + 1) / 8,)


def test_a_score_that_is_not_a_number_fails_its_prompt_alone() -> None:
    async def main() -> list[Any]:
        scores = await scorer()
        rollouts = (rollout(1, (1,)), rollout(2, (2,), (99,)), rollout(3, (3,)))
        return await asyncio.gather(*map(scores.score, rollouts), return_exceptions=True)

    first, second, third = run_virtual(main())
    assert (first, third) == ((1 / 8,), (3 / 8,))
    assert isinstance(second, SampleError)
    assert str(second) == "uid 2, answer 1: the reward model gave nan"


def test_an_engine_that_fails_fails_every_caller() -> None:
    async def main() -> list[Any]:
        scores = await scorer(Fault(group="reward", verb="scores"))
        return await asyncio.gather(*(scores.score(rollout(i, (i, 1))) for i in range(3)), return_exceptions=True)

    assert all(isinstance(error, GroupError) for error in run_virtual(main()))
