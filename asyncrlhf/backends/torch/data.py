"""From a TrainBatch to what one forward reads: micro-batches of similar length, padded or packed, on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrlhf.messages import Array, TrainBatch
from asyncrlhf.ops import MicroBatch

__all__ = ("Cut", "Forward", "Rows", "ranges", "split_by_row")

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How rows become micro-batches."""

    tokens: int
    """Most tokens of a micro-batch, padding included."""
    rows: int = 0
    """Rows of a micro-batch instead, if above 0."""
    packed: bool = False
    """Rows end to end in one row, instead of side by side."""
    flash: bool = False
    """Tell rows of a packed batch apart by cumulative lengths instead of a mask."""

    def plan(self, lengths: Integers, rows: Integers) -> list[Integers]:
        """`rows` sorted by length and cut; every part holds a row, and each row is in one part."""
        order = rows[np.argsort(lengths[rows], kind="stable")]
        if self.rows:
            return [order[i : i + self.rows] for i in range(0, len(order), self.rows)]
        parts: list[Integers] = []
        start = total = 0
        for i, length in enumerate(lengths[order].tolist()):
            total = total + length if self.packed else length * (i - start + 1)
            if i > start and total > self.tokens:
                parts.append(order[start:i])
                start, total = i, length
        if start < len(order):
            parts.append(order[start:])
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One forward: arguments of `Model.token_stats`, and the response tokens it gives values for."""

    rows: Integers
    """Rows of the batch, in the order they are laid out."""
    tokens: Integers
    """[T] which response tokens of the batch (all rows end to end) these are."""
    arguments: dict[str, Any] = field(repr=False)


class Rows:
    """A TrainBatch end to end in flat arrays, its columns as float32 tensors on the device."""

    def __init__(self, batch: TrainBatch, device: torch.device) -> None:
        """Raises ValueError for a row without a prompt token, or a column whose lengths are not those of the rows."""
        self.batch, self.device = batch, device
        self.prompt_lengths = np.asarray(batch.prompt_lengths, dtype=np.int64)
        self.lengths = np.asarray(batch.response_lengths, dtype=np.int64)
        if len(self.lengths) and self.prompt_lengths.min() < 1:
            raise ValueError(f"row {int(self.prompt_lengths.argmin())} has no prompt token to predict its answer from")
        self._token_starts = _starts(self.lengths)
        self._sequence_starts = _starts(self.prompt_lengths + self.lengths)
        self._ids = self._flat("token_ids", np.int64, self.prompt_lengths + self.lengths)
        mask = self._flat("mask", np.float32, self.lengths)
        self.mask: NDArray[np.float32] = mask
        """[T] 1.0 where a token may enter a gradient."""
        self.unmasked = np.add.reduceat(np.append(mask, 0.0), self._token_starts) if len(self.lengths) else mask
        self.unmasked = np.where(self.lengths > 0, self.unmasked, 0.0).astype(np.int64)
        """[R] unmasked tokens of each row."""

    def columns(self) -> dict[str, Tensor]:
        """Every column but the token ids: [T] per token, [R] under "sample:" names. At masked tokens values that are
        not finite become 0, so that no product with them can reach a gradient."""
        found: dict[str, Tensor] = {}
        for name, column in self.batch.columns.items():
            if column.level == "token":
                found[name] = self._to_device(_finite_where(self._flat(name, np.float32, self.lengths), self.mask == 0))
            elif column.level == "sample":
                values = self._flat(name, np.float32, np.ones_like(self.lengths))
                found[f"sample:{name}"] = self._to_device(_finite_where(values, self.unmasked == 0))
        return found

    def forwards(self, cut: Cut, rows: Integers | None = None) -> Iterator[Forward]:
        """One Forward per micro-batch of `rows` (all of them by default) that have a response token."""
        chosen = np.arange(len(self.lengths)) if rows is None else rows
        chosen = chosen[self.lengths[chosen] > 0]
        for part in cut.plan(self.prompt_lengths + self.lengths - 1, chosen):
            yield self._forward(cut, part)

    def pick(self, columns: dict[str, Tensor], forward: Forward) -> dict[str, Tensor]:
        """The columns of the tokens and rows of one forward, to make a MicroBatch of."""
        tokens, rows = self._to_device(forward.tokens), self._to_device(forward.rows)
        return {
            name: column.index_select(0, rows if name.startswith("sample:") else tokens)
            for name, column in columns.items()
        }

    def micro_batch(self, columns: dict[str, Tensor], forward: Forward | None = None) -> MicroBatch:
        """The MicroBatch of one forward, or of all rows in their order."""
        lengths = self.lengths if forward is None else self.lengths[forward.rows]
        return MicroBatch(self._to_device(lengths), columns)

    def _forward(self, cut: Cut, rows: Integers) -> Forward:
        prompts, lengths = self.prompt_lengths[rows], self.lengths[rows]
        inputs = prompts + lengths - 1
        source = ranges(self._sequence_starts[rows], inputs)
        arguments: dict[str, Any] = {}
        if cut.packed:
            starts = _starts(inputs)
            ids = self._ids[source][None]
            arguments["position_ids"] = self._to_device(ranges(np.zeros_like(inputs), inputs)[None])
            arguments |= self._flash_arguments(inputs) if cut.flash else {"attention_mask": self._block_mask(inputs)}
        else:
            width = int(inputs.max())
            starts = np.arange(len(rows)) * width
            ids = np.zeros((len(rows), width), dtype=np.int64)
            ids[np.arange(width) < inputs[:, None]] = self._ids[source]
        arguments["input_ids"] = self._to_device(ids)
        arguments["hidden_index"] = self._to_device(ranges(starts + prompts - 1, lengths))
        arguments["targets"] = self._to_device(self._ids[ranges(self._sequence_starts[rows] + prompts, lengths)])
        return Forward(rows=rows, tokens=ranges(self._token_starts[rows], lengths), arguments=arguments)

    def _block_mask(self, lengths: Integers) -> Tensor:
        """bool [1, 1, S, S]: causal within each row, nothing across rows."""
        row = self._to_device(np.repeat(np.arange(len(lengths)), lengths))
        return torch.tril(row[:, None] == row[None, :])[None, None]

    def _flash_arguments(self, lengths: Integers) -> dict[str, Any]:
        ends = self._to_device(np.append(0, np.cumsum(lengths)).astype(np.int32))
        longest = int(lengths.max())
        return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}

    def _flat(self, name: str, dtype: Any, lengths: Integers) -> NDArray[Any]:
        rows = self.batch.columns[name].fetch()
        flat = np.concatenate(rows).astype(dtype, copy=False) if len(rows) else np.empty(0, dtype)
        if len(rows) != len(lengths) or len(flat) != lengths.sum():
            raise ValueError(
                f"column {name!r} has {len(rows)} rows and {len(flat)} values; the batch has {len(lengths)} rows and "
                f"{int(lengths.sum())} places for it"
            )
        return flat

    def _to_device(self, values: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def split_by_row(values: Array, lengths: Sequence[int]) -> list[Array]:
    """[T] values of all rows end to end, as one array per row."""
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


def ranges(starts: Integers, lengths: Integers) -> Integers:
    """start, start + 1, ... (`lengths` of them) for every start, end to end."""
    return np.repeat(starts - _starts(lengths), lengths) + np.arange(lengths.sum())


def _starts(lengths: Integers) -> Integers:
    return np.cumsum(lengths) - lengths


def _finite_where(values: NDArray[np.float32], chosen: NDArray[np.bool_]) -> NDArray[np.float32]:
    bad = chosen & ~np.isfinite(values)
    return np.where(bad, np.float32(0), values) if bad.any() else values
