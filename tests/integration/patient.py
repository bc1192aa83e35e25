"""Engines that meet while weights are published: a sampler prepares a version until the train step after it is done."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrlhf.backends.torch.sample import TorchSampler
from asyncrlhf.backends.torch.train import TorchTrainer
from asyncrlhf.errors import GroupError
from asyncrlhf.messages import EngineEvent, Finished, Packed, StepResult, TrainBatch, WeightHandle

__all__ = ("ANSWERS", "DEATH", "STEPS", "PatientSampler", "TellingTrainer")

STEPS, ANSWERS = 5, 16
"""Train steps, and answers in each."""
DEATH = 3
"""The version whose publish the first engine does not survive."""
PATIENCE = 200.0


def wait_until(there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not there():
        if time.monotonic() > deadline:
            raise GroupError(f"{what} has not come within {PATIENCE:g} s")
        time.sleep(0.01)


class TellingTrainer(TorchTrainer):
    """Says that a train step is done, and goes on when the answers of the next one are there: a sampler samples nothing
    while it prepares."""

    def step(self, batch: TrainBatch, loss: Packed) -> StepResult:
        result = super().step(batch, loss)
        Path(f"step-{batch.train_step}").touch()
        needed = min(STEPS, batch.train_step + 2) * ANSWERS
        wait_until(lambda: Path("answers").stat().st_size >= needed, f"answer {needed}")
        return result


class PatientSampler(TorchSampler):
    """Takes as long to prepare as the trainer for the step that follows; dies once when it has waited."""

    def step(self) -> Sequence[EngineEvent]:
        events = super().step()
        with Path("answers").open("ab") as file:
            file.write(b"." * sum(isinstance(event, Finished) for event in events))
        return events

    def prepare(self, weights: WeightHandle) -> None:
        super().prepare(weights)
        if 0 < weights.version < STEPS:
            wait_until(Path(f"step-{weights.version}").exists, f"train step {weights.version}")
        if weights.version == DEATH and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
