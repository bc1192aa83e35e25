"""From a TrainBatch to what one forward reads: micro-batches of similar length, padded or packed, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrlhf.backends.torch.layout import Cut, Integers, Part, ranges, starts_of
from asyncrlhf.messages import Array, TrainBatch
from asyncrlhf.ops import MicroBatch

__all__ = ("Forward", "Rows", "split_by_row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One forward: arguments of `Model.token_stats`, and the response tokens it gives values for."""

    rows: Integers
    """Rows of the batch, in the order they are laid out."""
    tokens: Integers
    """[T] which response tokens of the batch (all rows end to end) these are."""
    arguments: dict[str, Any] = field(repr=False)
    last: bool = True
    """Whether no other follows in this call."""

    @property
    def idle(self) -> bool:
        """Whether it is about nothing: made because other ranks make one."""
        return not len(self.tokens)


class Rows:
    """A TrainBatch end to end in flat arrays, its columns as float32 tensors on the device."""

    def __init__(self, batch: TrainBatch, device: torch.device) -> None:
        """Raises ValueError for a row without a prompt token, or a column whose lengths are not those of the rows."""
        self.batch, self.device = batch, device
        self.prompt_lengths = np.asarray(batch.prompt_lengths, dtype=np.int64)
        self.lengths = np.asarray(batch.response_lengths, dtype=np.int64)
        self.rollouts = np.asarray(batch.rollouts, dtype=np.int64)
        if len(self.lengths) and self.prompt_lengths.min() < 1:
            raise ValueError(f"row {int(self.prompt_lengths.argmin())} has no prompt token to predict its answer from")
        self._token_starts = starts_of(self.lengths)
        self._sequence_starts = starts_of(self.prompt_lengths + self.lengths)
        self._ids = self._flat("token_ids", np.int64, self.prompt_lengths + self.lengths)
        whole = "mask" not in batch.columns
        mask = np.ones(batch.token_count, np.float32) if whole else self._flat("mask", np.float32, self.lengths)
        self.mask: NDArray[np.float32] = mask
        """[T] 1.0 where a token may enter a gradient; everywhere, if the batch has no such column."""
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

    def forwards(
        self,
        cut: Cut,
        rows: Integers | None = None,
        *,
        flash: bool = False,
        whole_rollouts: bool = False,
        after: bool = False,
        rounds: Callable[[int], int] = int,
    ) -> Iterator[Forward]:
        """One Forward per micro-batch of `rows` (all of them by default) that have a response token.

        `flash`: rows of a packed bin are told apart by their cumulative lengths instead of a mask. `whole_rollouts`:
        rows of one rollout stay in one micro-batch. `after`: what is asked of a token is read after it, not before.
        `rounds`: how many forwards to make for so many micro-batches; those beyond are idle.
        """
        chosen = np.arange(len(self.lengths)) if rows is None else rows
        chosen = chosen[self.lengths[chosen] > 0]
        together = self.rollouts if whole_rollouts else None
        keys = () if cut.layout != "shared" else self._prompt_keys() if together is None else together.tolist()
        parts = cut.plan(self.prompt_lengths, self.lengths + after, chosen, keys, together) if len(chosen) else []
        count = rounds(len(parts))
        for number, part in enumerate(parts, 1):
            yield self._forward(part, flash, int(after), last=number == count)
        for number in range(len(parts) + 1, count + 1):
            yield self._idle(last=number == count)

    def pick(self, columns: dict[str, Tensor], forward: Forward) -> dict[str, Tensor]:
        """The columns of the tokens and rows of one forward, to make a MicroBatch of."""
        tokens, rows = self._to_device(forward.tokens), self._to_device(forward.rows)
        return {
            name: column.index_select(0, rows if name.startswith("sample:") else tokens)
            for name, column in columns.items()
        }

    def micro_batch(self, columns: dict[str, Tensor], forward: Forward | None = None) -> MicroBatch:
        """The MicroBatch of one forward, or of all rows in their order."""
        rows = np.arange(len(self.lengths)) if forward is None else forward.rows
        rollouts = np.unique(self.rollouts[rows], return_inverse=True)[1]
        return MicroBatch(self._to_device(self.lengths[rows]), columns, self._to_device(rollouts))

    def _prompt_keys(self) -> list[bytes]:
        ends = self._sequence_starts + self.prompt_lengths
        places = zip(self._sequence_starts.tolist(), ends.tolist(), strict=True)
        return [self._ids[start:end].tobytes() for start, end in places]

    def _idle(self, *, last: bool) -> Forward:
        """A forward of one token, of which nothing is asked: its gradients are zeros."""
        none = np.empty(0, dtype=np.int64)
        arguments = {
            "input_ids": self._to_device(np.zeros((1, 1), dtype=np.int64)),
            "hidden_index": self._to_device(none),
            "targets": self._to_device(none),
        }
        return Forward(rows=none, tokens=none, arguments=arguments, last=last)

    def _forward(self, part: Part, flash: bool, after: int, *, last: bool) -> Forward:
        rows = part.rows
        prompts, lengths = self.prompt_lengths[rows], self.lengths[rows]
        own_prompts = np.where(part.brings_prompt, prompts, 0)
        own = own_prompts + lengths - 1 + after
        places = ranges(part.bin * part.width + part.start, own)
        shape = (part.bins, part.width)
        ids = np.zeros(shape, dtype=np.int64)
        skipped = prompts - own_prompts
        ids.ravel()[places] = self._ids[ranges(self._sequence_starts[rows] + skipped, own)]
        hidden = ranges(part.bin * part.width + part.start + own_prompts - 1 + after, lengths)
        if not after:
            hidden[starts_of(lengths)] = part.bin * part.width + part.prompt_start + prompts - 1
        arguments = {
            "input_ids": self._to_device(ids),
            "hidden_index": self._to_device(hidden),
            "targets": self._to_device(self._ids[ranges(self._sequence_starts[rows] + prompts, lengths)]),
        }
        if not part.alone:
            positions = np.zeros(shape, dtype=np.int64)
            positions.ravel()[places] = ranges(skipped, own)
            arguments["position_ids"] = self._to_device(positions)
            arguments |= self._flash_arguments(part) if flash else {"attention_mask": self._mask(part, places, own)}
        tokens = ranges(self._token_starts[rows], lengths)
        return Forward(rows=rows, tokens=tokens, arguments=arguments, last=last)

    def _mask(self, part: Part, places: Integers, own: Integers) -> Tensor:
        """bool [bins, 1, width, width]: every token sees its prompt and what came before it in its own answer."""
        shape = (part.bins, part.width)
        unit, answer = np.full(shape, -1), np.zeros(shape, dtype=np.int64)
        unit.ravel()[places] = np.repeat(np.cumsum(part.brings_prompt), own)
        within = ranges(np.zeros_like(own), own)
        prompts = np.where(part.brings_prompt, self.prompt_lengths[part.rows], 0)
        in_answer = within >= np.repeat(prompts, own)
        answer.ravel()[places] = np.where(in_answer, np.repeat(np.arange(1, len(own) + 1), own), 0)
        units, answers = self._to_device(unit), self._to_device(answer)
        same_unit = units[:, :, None] == units[:, None, :]
        visible = (answers[:, None, :] == 0) | (answers[:, :, None] == answers[:, None, :])
        return torch.tril(same_unit & visible)[:, None]

    def _flash_arguments(self, part: Part) -> dict[str, Any]:
        places = np.append(part.start, part.width)
        ends, longest = self._to_device(places.astype(np.int32)), int(np.diff(places).max())
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


def _finite_where(values: NDArray[np.float32], chosen: NDArray[np.bool_]) -> NDArray[np.float32]:
    bad = chosen & ~np.isfinite(values)
    return np.where(bad, np.float32(0), values) if bad.any() else values
