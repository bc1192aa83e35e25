"""What an optimizer step measures on its way, kept on the device until the end."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from asyncrlhf.ops import MicroBatch, TokenStats

__all__ = ("Measures",)


class Measures:
    """Sums and maxima over the unmasked tokens of an optimizer step."""

    def __init__(self, *, first: bool, train_step: int) -> None:
        """`first`: no optimizer step of this train step was applied yet, so new tokens should be on-policy."""
        self._first, self._train_step = first, train_step
        self._sums: list[Tensor] = []
        self._maxima: list[Tensor] = []
        self._has_entropy = False

    @torch.no_grad()
    def add(self, objective: Tensor, new: TokenStats, batch: MicroBatch, keep: Tensor) -> None:
        """Take in one micro-batch; `keep` bool [T] are its unmasked tokens."""
        zero = objective.new_zeros(())
        self._has_entropy = new.entropy is not None
        entropy = zero if new.entropy is None else new.entropy.masked_fill(~keep, 0.0).sum()
        if new.values is not None:
            self._sums.append(torch.stack([objective, keep.sum().float(), entropy, zero]))
            return
        gap = (new.logprobs - batch.behaviour_logprobs).masked_fill(~keep, 0.0)
        self._sums.append(torch.stack([objective, keep.sum().float(), entropy, -gap.sum()]))
        largest = gap.masked_fill(~keep, -math.inf).max()
        current = keep & (batch.versions == self._train_step)
        self._maxima.append(torch.stack([largest, gap.abs().masked_fill(~current, -math.inf).max()]))

    def result(self) -> dict[str, float]:
        """loss, and for a language model: kl_behaviour = mean(behaviour - new), ratio_max = max exp(new - behaviour),
        logprob_gap = max |new - behaviour| of tokens sampled by this very version, nan if there are none or the
        weights have moved since; entropy if the loss needs it."""
        loss, count, entropy, divergence = cast("list[float]", torch.stack(self._sums).sum(0).tolist())
        found = {"loss": loss}
        if self._maxima:
            largest, gap = cast("list[float]", torch.stack(self._maxima).amax(0).tolist())
            found["kl_behaviour"] = divergence / count
            found["ratio_max"] = math.exp(min(largest, 700.0))
            found["logprob_gap"] = gap if self._first and gap >= 0 else math.nan
        if self._has_entropy:
            found["entropy"] = entropy / count
        return found
