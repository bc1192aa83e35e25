"""The loss of one optimizer step, micro-batch by micro-batch: masks, denominators and the off-policy correction are
applied here, so that neither micro-batches nor ranks can change it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from asyncrlhf.backends.torch.data import Forward, Rows
from asyncrlhf.backends.torch.measure import Measures
from asyncrlhf.config.bounds import Correction
from asyncrlhf.errors import ConfigError
from asyncrlhf.ops import Loss, TokenStats
from asyncrlhf.ops.corrections import fill

__all__ = ("Counts", "Objective")


class Settings(Protocol):
    """Options of a trainer that its objective depends on."""

    @property
    def max_response_tokens(self) -> int: ...

    @property
    def off_policy(self) -> Correction: ...

    @property
    def off_policy_cap(self) -> float: ...


class Counts(NamedTuple):
    """Of the batch of a step, over all ranks."""

    rows: int
    unmasked_rows: int
    """Rows with an unmasked token."""
    tokens: int
    """Unmasked ones."""

    @classmethod
    def of(cls, rows: Rows) -> Counts:
        """Those of the rows at hand."""
        return cls(len(rows.lengths), int(np.count_nonzero(rows.unmasked)), int(rows.unmasked.sum()))


class Objective:
    """The objective of a step: the sum of what it gives for all micro-batches of all ranks."""

    def __init__(self, function: Loss, rows: Rows, counts: Counts, settings: Settings, measures: Measures) -> None:
        """`rows`: of this rank; `counts`: of all. Raises ConfigError for reduction "constant" without
        `max_response_tokens`."""
        self.measures = measures
        self._function, self._rows, self._settings = function, rows, settings
        self._columns = rows.columns()
        coefficients = _coefficients(function, rows, counts, settings.max_response_tokens)
        self._columns["coefficient"] = torch.from_numpy(coefficients).to(rows.device)

    def __call__(self, forward: Forward, new: TokenStats) -> Tensor:
        """float32 []: the part of one micro-batch, with gradients. Raises ValueError for a loss that does not give one
        value per token."""
        columns = self._rows.pick(self._columns, forward)
        keep = columns["mask"] > 0
        if new.values is not None:
            new = TokenStats(logprobs=new.logprobs, values=_shield(new.values, keep))
        else:
            entropy = None if new.entropy is None else _shield(new.entropy, keep)
            new = TokenStats(logprobs=_shield(new.logprobs, keep), entropy=entropy)
            self._correct(columns, new.logprobs.detach())
        batch = self._rows.micro_batch(columns, forward)
        values = self._function(new, batch)
        if values.shape != keep.shape:
            raise ValueError(
                f"{type(self._function).__name__} gave shape {tuple(values.shape)} for {len(keep)} tokens; a loss "
                "gives one value per response token and leaves masks and means to the engine"
            )
        objective = (values.masked_fill(~keep, 0.0) * columns["coefficient"]).sum()
        with torch.no_grad():
            own = self._function.measures(new, batch)
        self.measures.add(objective.detach(), new, batch, keep, own, columns["coefficient"])
        return objective

    def _correct(self, columns: dict[str, Tensor], current: Tensor) -> None:
        """Fill in the columns of the off-policy correction that the batch does not bring."""
        proximal = columns.setdefault("proximal_logprobs", current)
        if "anchor_logprobs" not in columns or "weight" not in columns:
            columns["anchor_logprobs"], columns["weight"] = fill(
                self._settings.off_policy, self._settings.off_policy_cap, proximal, columns["behaviour_logprobs"]
            )


def _coefficients(
    function: Loss, rows: Rows, counts: Counts, max_response_tokens: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[T] what the value of each token is multiplied with, so that the sum over all micro-batches of all ranks is the
    loss."""
    if function.reduction == "sequence_mean":
        per_row = 1.0 / np.maximum(rows.unmasked, 1) / counts.unmasked_rows
        return np.repeat(per_row, rows.lengths).astype(np.float32)
    if function.reduction == "token_mean":
        denominator = counts.tokens
    elif max_response_tokens < 1:
        raise ConfigError(
            f"{type(function).__name__} has reduction 'constant', which divides by rows * max_response_tokens; set "
            "max_response_tokens of this group to the most tokens of an answer"
        )
    else:
        denominator = counts.rows * max_response_tokens
    return np.full(len(rows.mask), 1.0 / denominator, dtype=np.float32)


def _shield(values: Tensor, keep: Tensor) -> Tensor:
    """The same values, but masked tokens are constants: whatever a loss makes of them, selection stops its gradient."""
    return values.where(keep, values.detach().nan_to_num(0.0, 0.0, 0.0))
