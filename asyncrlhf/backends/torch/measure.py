"""What an optimizer step measures on its way, kept on the device until the end."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrlhf.ops import MicroBatch, TokenStats

__all__ = ("Measures",)


class Measures:
    """Sums and maxima over the unmasked tokens of an optimizer step."""

    def __init__(self, *, first: bool, train_step: int, clip: tuple[float, float] | None) -> None:
        """`first`: no optimizer step of this train step was applied yet, so new tokens should be on-policy. `clip`:
        the loss's clip_range."""
        self._first, self._train_step, self._clip = first, train_step, clip
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
            self._sums.append(torch.stack([objective, keep.sum().float(), entropy, zero, zero, zero]))
            return
        sampled = keep & (batch.versions >= 0)
        gap = (new.logprobs - batch.behaviour_logprobs).masked_fill(~sampled, 0.0)
        clipped = self._clipped(new, batch, keep)
        self._sums.append(
            torch.stack([objective, keep.sum().float(), entropy, -gap.sum(), clipped, sampled.sum().float()])
        )
        largest = gap.masked_fill(~sampled, -math.inf).max()
        current = keep & (batch.versions == self._train_step)
        self._maxima.append(torch.stack([largest, gap.abs().masked_fill(~current, -math.inf).max()]))

    def _clipped(self, new: TokenStats, batch: MicroBatch, keep: Tensor) -> Tensor:
        """How many unmasked tokens have a ratio outside the loss's clip range."""
        if self._clip is None:
            return new.logprobs.new_zeros(())
        low, high = self._clip
        ratio = (new.logprobs - batch.anchor_logprobs).exp()
        return (keep & ((ratio < 1 - low) | (ratio > 1 + high))).sum().float()

    def result(self) -> dict[str, float]:
        """The loss. Where a policy sampled the tokens: kl_behaviour = mean(behaviour - new), ratio_max = max exp(new -
        behaviour), and logprob_gap = max |new - behaviour| of tokens sampled by this very version (left out if there
        are none or the weights have moved since). clip_fraction if the loss clips, entropy if it needs it."""
        sums: list[float] = torch.stack(self._sums).sum(0).tolist()
        loss, count, entropy, divergence, clipped, sampled = sums
        found = {"loss": loss}
        if sampled:
            maxima: list[float] = torch.stack(self._maxima).amax(0).tolist()
            largest, gap = maxima
            found["kl_behaviour"] = divergence / sampled
            found["ratio_max"] = math.exp(min(largest, 700.0))
            if self._first and not gap < 0:
                found["logprob_gap"] = gap
        if self._clip is not None:
            found["clip_fraction"] = clipped / count
        if self._has_entropy:
            found["entropy"] = entropy / count
        return found
