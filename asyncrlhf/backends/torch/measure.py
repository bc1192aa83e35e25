"""What an optimizer step measures on its way, kept on the device until the end."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from asyncrlhf.backends.torch.world import World
from asyncrlhf.ops import MicroBatch, TokenStats

__all__ = ("Measures",)


class Measures:
    """Sums and maxima over the unmasked tokens of an optimizer step."""

    def __init__(self, *, first: bool, train_step: int) -> None:
        """`first`: no optimizer step of this train step was applied yet, so new tokens should be on-policy."""
        self._first, self._train_step = first, train_step
        self._sums: list[dict[str, Tensor]] = []
        self._maxima: list[Tensor] = []

    @torch.no_grad()
    def add(
        self,
        objective: Tensor,
        new: TokenStats,
        batch: MicroBatch,
        keep: Tensor,
        more: Mapping[str, Tensor],
        coefficients: Tensor,
    ) -> None:
        """Take in one micro-batch; `keep` bool [T] are its unmasked tokens, `more` the measures of the loss, and
        `coefficients` [T] what it multiplies the values of tokens with."""
        weights = coefficients.masked_fill(~keep, 0.0)
        sums = {"loss": objective, "count": keep.sum().float(), "weight": weights.sum()}
        sums |= {f"loss:{name}": (values.masked_fill(~keep, 0.0) * weights).sum() for name, values in more.items()}
        if new.entropy is not None:
            sums["entropy"] = new.entropy.masked_fill(~keep, 0.0).sum()
        if new.values is None:
            sampled = keep & (batch.versions >= 0)
            gap = (new.logprobs - batch.behaviour_logprobs).masked_fill(~sampled, 0.0)
            sums |= {"divergence": -gap.sum(), "sampled": sampled.sum().float()}
            largest = gap.masked_fill(~sampled, -math.inf).max()
            current = keep & (batch.versions == self._train_step)
            self._maxima.append(torch.stack([largest, gap.abs().masked_fill(~current, -math.inf).max()]))
        self._sums.append(sums)

    def result(self, world: World) -> dict[str, float]:
        """Over all ranks, and equal on them: the loss. Where a policy sampled the tokens: kl_behaviour = mean(behaviour
        - new), ratio_max = max exp(new - behaviour), and logprob_gap = max |new - behaviour| of tokens sampled by this
        very version (left out if there are none or the weights have moved since). The entropy if the loss needs it, and
        the loss's own measures."""
        sums: dict[str, float] = {}
        maxima: list[list[float]] = []
        for totals, largest in world.everyones(self._own()):
            maxima += largest
            for name, total in totals.items():
                sums[name] = sums.get(name, 0.0) + total
        found = {"loss": sums["loss"]}
        if sums.get("sampled"):
            ratio, gap = torch.tensor(maxima, dtype=torch.float64).amax(0).tolist()
            found["kl_behaviour"] = sums["divergence"] / sums["sampled"]
            found["ratio_max"] = math.exp(min(ratio, 700.0))
            if self._first and not gap < 0:
                found["logprob_gap"] = gap
        if "entropy" in sums:
            found["entropy"] = sums["entropy"] / sums["count"]
        own = {name: total for name, total in sums.items() if name.startswith("loss:")}
        return found | {name.removeprefix("loss:"): total / sums["weight"] for name, total in own.items()}

    def _own(self) -> tuple[dict[str, float], list[list[float]]]:
        """Sums and maxima of this rank; nothing if it had no tokens."""
        if not self._sums:
            return {}, []
        names = list(self._sums[0])
        totals = torch.stack([torch.stack([sums[name] for name in names]) for sums in self._sums]).sum(0).tolist()
        maxima = [torch.stack(self._maxima).amax(0).tolist()] if self._maxima else []
        return dict(zip(names, totals, strict=True)), maxima
