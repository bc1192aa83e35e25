"""The scoring engine of the torch backend: log-probs or scores of answers under a frozen model, with the trainer's
forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from asyncrlhf.abc import ScoreEngine
from asyncrlhf.backends.torch.away import give_back
from asyncrlhf.backends.torch.data import Rows, split_by_row
from asyncrlhf.backends.torch.engine import TorchEngine
from asyncrlhf.backends.torch.layout import Cut
from asyncrlhf.backends.torch.model import Model
from asyncrlhf.backends.torch.options import ScorerOptions
from asyncrlhf.backends.torch.probe import require_layout_works
from asyncrlhf.messages import Array, TrainBatch

__all__ = ("ScorerOptions", "TorchScorer", "response_logprobs", "response_scores")


class TorchScorer(TorchEngine, ScoreEngine):
    """A frozen Hugging Face model: a causal language model, such as the reference of a KL penalty, or one with a value
    head, such as a reward model."""

    Options = ScorerOptions
    headless: ClassVar[bool] = False
    """Whether the model's value head may be missing."""

    def __init__(self, options: ScorerOptions) -> None:
        self.options = options
        packed = options.layout == "packed"
        self._model = Model(
            options.model,
            dtype=options.dtype,
            device=options.device,
            head=options.head,
            packed=packed,
            attention=options.attention,
            headless=self.headless,
        )
        require_layout_works(self._model, options.layout)
        self._cut = self._model.cut(options)

    def offload(self) -> None:
        """With device = "cpu" the weights stay where they are, since they would move there."""
        self._model.offload()
        give_back()

    def onload(self) -> None:
        self._model.onload()

    def logprobs(self, batch: TrainBatch) -> Sequence[Array]:
        return response_logprobs(self._model, batch, self._cut, self.options.temperature)

    def scores(self, batch: TrainBatch) -> list[float]:
        return response_scores(self._model, batch, self._cut)


@torch.no_grad()
def response_logprobs(model: Model, batch: TrainBatch, cut: Cut, temperature: float) -> list[Array]:
    """Log-prob of every response token, float32 [response length] per row, in the order of the rows.

    Raises ValueError for a model with a value head.
    """
    if model.head != "lm":
        raise ValueError(f"{str(model.directory)!r} was loaded with a value head, which has no log-probs")
    rows = Rows(batch, model.device)
    found = np.zeros(batch.token_count, dtype=np.float32)
    for forward in rows.forwards(cut, flash=model.uses_flash, rounds=model.rounds):
        stats = model.token_stats(**forward.arguments, temperature=temperature)
        found[forward.tokens] = stats.logprobs.cpu().numpy()
    return split_by_row(found, batch.response_lengths)


@torch.no_grad()
def response_scores(model: Model, batch: TrainBatch, cut: Cut) -> list[float]:
    """Value after the last response token of every row, in the order of the rows; nan for a row without one.

    Raises ValueError for a model without a value head.
    """
    if model.head != "value":
        raise ValueError(f"{str(model.directory)!r} was loaded without a value head, which scores come from")
    rows = Rows(batch, model.device)
    found = np.zeros(batch.token_count, dtype=np.float32)
    for forward in rows.forwards(cut, flash=model.uses_flash, after=True, rounds=model.rounds):
        values = model.token_stats(**forward.arguments, temperature=1.0).values
        assert values is not None
        found[forward.tokens] = values.cpu().numpy()
    return [float(row[-1]) if len(row) else math.nan for row in split_by_row(found, batch.response_lengths)]
