"""What a loss or a transform sees: the response tokens of some rows, laid end to end, as tensors. [T]: T such tokens.

Torch is imported only when a method needs it, so that an algorithm file can be read without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("MicroBatch", "TokenStats")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """What the model being trained says about the response tokens of a micro-batch, with gradients."""

    logprobs: Tensor
    """[T] log-prob of each token at the run's temperature. Empty for a model with a value head."""
    entropy: Tensor | None = None
    """[T] entropy of the distribution each token came from; filled when the loss `needs` "entropy"."""
    values: Tensor | None = None
    """[T] value of the state each token was chosen in, or for a loss with `after_token` of the one it led to; filled
    for a model with a value head."""


class MicroBatch:
    """Response tokens of R rows end to end; every column is a float32 tensor [T] under its own name.

    Columns with one number per row read as that number at each of the row's tokens. `mask` is 1.0 where the token may
    enter a gradient; the engine applies it, so a loss need not. An unknown name raises AttributeError naming the
    columns there are.
    """

    __slots__ = ("_columns", "_rollout_of_row", "_sequence_of_token", "lengths")

    def __init__(self, lengths: Tensor, columns: Mapping[str, Tensor], rollouts: Tensor | None = None) -> None:
        """`lengths`: int64 [R]. `columns`: [T] per token, or [R] per row under a name that starts with "sample:".
        `rollouts`: int64 [R], equal for rows of one rollout, 0 or more; None: each row is one of its own."""
        import torch

        self.lengths = lengths
        """int64 [R]: response tokens of each row."""
        self._rollout_of_row = torch.arange(len(lengths), device=lengths.device) if rollouts is None else rollouts
        self._sequence_of_token = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        self._columns = {
            name.removeprefix("sample:"): column[self._sequence_of_token] if name.startswith("sample:") else column
            for name, column in columns.items()
        }

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self._columns[name]
        except KeyError:
            raise AttributeError(
                f"this batch has no column {name!r}; it has {', '.join(sorted(self._columns))}. A column is a field of "
                "the algorithm's Experience annotated PerSample or PerToken, or what a transform returned"
            ) from None

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def sum_by_sequence(self, per_token: Tensor) -> Tensor:
        """[T] -> [T]: every token gets the sum over its own row's unmasked tokens. Differentiable."""
        return self._row_sums(per_token)[self._sequence_of_token]

    def mean_by_sequence(self, per_token: Tensor) -> Tensor:
        """[T] -> [T]: every token gets the mean over its own row's unmasked tokens (0 for a row without one)."""
        return self.sum_by_sequence(per_token) / self.sum_by_sequence(self.mask).clamp(min=1.0)

    def last_of_sequence(self, per_token: Tensor) -> Tensor:
        """[T] -> [T]: every token gets the value at its own row's last token. Differentiable."""
        return per_token[self.lengths.cumsum(0)[self._sequence_of_token] - 1]

    def mean_by_rollout(self, per_token: Tensor) -> Tensor:
        """[T] -> [T]: every token gets the mean over its rollout's rows of each row's mean; rows without an unmasked
        token do not count. Differentiable; only a loss with level "rollout" sees all rows of a rollout at once."""
        counts = self._row_sums(self.mask)
        means, present = self._row_sums(per_token) / counts.clamp(min=1.0), (counts > 0).to(per_token.dtype)
        zeros = per_token.new_zeros(int(self._rollout_of_row.max()) + 1 if len(self.lengths) else 0)
        sums = zeros.index_add(0, self._rollout_of_row, means)
        rows = zeros.index_add(0, self._rollout_of_row, present)
        return (sums / rows.clamp(min=1.0))[self._rollout_of_row[self._sequence_of_token]]

    def _row_sums(self, per_token: Tensor) -> Tensor:
        """[T] -> [R]: sums over unmasked tokens."""
        masked = per_token.masked_fill(self.mask == 0, 0.0)
        return per_token.new_zeros(len(self.lengths)).index_add(0, self._sequence_of_token, masked)
