"""An evaluation prompt that cannot be scored is left out; an engine that has failed is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrlhf.algorithm import cause_of
from asyncrlhf.control.evaluation import Evaluator
from asyncrlhf.errors import GroupError, SampleError
from asyncrlhf.groups.answers import Outside
from asyncrlhf.groups.turn import ALONE
from asyncrlhf.messages import PerSample, Prompt, Rollout
from asyncrlhf.observe import EventLog
from asyncrlhf.testing import run_virtual
from tests.unit.test_model_scorer import rollout


class Answers:
    turn, outside = ALONE, Outside(lambda: None)

    async def evaluate(self, prompt: Prompt, temperature: float) -> Rollout:
        return rollout(prompt.uid, (1,))


class Scores:
    def __init__(self, error: Exception | None) -> None:
        self.error = error

    async def score(self, rollout: Rollout) -> PerSample:
        await asyncio.sleep(1.0)
        if self.error is not None:
            raise self.error
        return (0.5,)


def evaluate(**errors: Exception | None) -> Any:
    async def main() -> Any:
        scorers: Any = {name: Scores(error) for name, error in errors.items()}
        answers: Any = Answers()
        log = EventLog(None, asyncio.get_running_loop().time)
        evaluator = Evaluator(
            answers, scorers.pop("reward"), [], log, every=1, temperature=0.0, max_hold=1.0, judges=scorers
        )
        return await evaluator._one(rollout(-1, (1,)).prompt)

    return run_virtual(main())


def test_a_bad_sample_is_left_out() -> None:
    assert evaluate(reward=None, judge=None)[1] == {"reward": 0.5, "judge": 0.5}
    assert evaluate(reward=SampleError("no reward"), judge=None) is None
    assert evaluate(reward=SampleError("no reward"), judge=SampleError("no judgement")) is None


@pytest.mark.parametrize("order", [("reward", "judge"), ("judge", "reward")])
def test_a_bad_sample_does_not_hide_an_engine_that_has_failed(order: tuple[str, str]) -> None:
    bad, failed = order
    with pytest.raises(ExceptionGroup) as caught:
        evaluate(**{bad: SampleError("no reward"), failed: GroupError("it is gone")})
    assert isinstance(cause_of(caught.value), GroupError)
