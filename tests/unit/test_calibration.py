"""Answers that a reward model is measured against: rendered as in training, without rows that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrlhf.build import _calibration
from asyncrlhf.config.frozen import Calibration, TorchReward
from asyncrlhf.config.schema import Data
from asyncrlhf.data.prompts import PromptEncoder
from asyncrlhf.data.source import Dataset
from asyncrlhf.data.stream import PromptStream
from asyncrlhf.errors import DataError
from asyncrlhf.messages import Rollout
from tests.unit.test_data import Characters


def calibration(path: Path, rows: list[dict[str, Any]], *, chat: bool = False) -> tuple[list[Rollout], str]:
    path = path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    tokenizer: Any = Characters()

    def stream(dataset: Dataset, data: Data) -> PromptStream:
        return PromptStream(
            dataset, PromptEncoder(tokenizer, data), tokenizer, response=data.response, rejected=None, eos=1
        )

    config: Any = SimpleNamespace(seed=0, data=Data(path="x.jsonl", chat=chat))
    models: Any = SimpleNamespace(stream=stream)
    table = TorchReward(model="rm", calibrate=Calibration(path=str(path), response="text"))
    return _calibration(config, "groups.reward", table, models)


ROWS: list[dict[str, Any]] = [{"prompt": "a", "text": "b"}, {"prompt": "c", "text": "d"}]


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_are_rendered_as_in_training(tmp_path: Path, chat: bool) -> None:
    rollouts, warning = calibration(tmp_path, ROWS, chat=chat)
    assert [rollout.prompt.text for rollout in rollouts] == (
        ["<user>a<assistant>", "<user>c<assistant>"] if chat else ["a", "c"]
    )
    assert warning == ""


REFUSED: dict[str, Any] = {"prompt": [{"role": "system", "content": "x"}], "text": "y"}


def test_rows_that_cannot_be_read_are_left_out_and_the_log_will_say_so(tmp_path: Path) -> None:
    rollouts, warning = calibration(tmp_path, [ROWS[0], REFUSED, ROWS[1]], chat=True)
    assert [rollout.prompt.uid for rollout in rollouts] == [0, 2]
    assert warning == (
        "groups.reward.calibrate: 1 rows were left out, the first for: prompt 1: the chat template refuses its "
        "messages: system role not supported"
    )


def test_fewer_than_two_answers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"groups.reward.calibrate: 1 rows have no deviation; give 2 or more$"):
        calibration(tmp_path, ROWS[:1])
    with pytest.raises(DataError, match=r"give 2 or more \(1 rows were left out, the first for: prompt 1: the chat"):
        calibration(tmp_path, [ROWS[0], REFUSED], chat=True)
