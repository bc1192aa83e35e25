"""The base of losses and column transforms: frozen coefficients plus `__call__`, so that they travel as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from asyncrlhf.ops.batch import MicroBatch, TokenStats

__all__ = ("Level", "Loss", "Reduction", "Transform", "clipped_gain", "k3", "outside", "ratio")

Level = Literal["token", "sequence", "rollout"]

Reduction = Literal["token_mean", "sequence_mean", "constant"]
"""How per-token values become one number, over all rows of an optimizer step:
"token_mean"     sum over unmasked tokens / number of unmasked tokens (DAPO, arXiv 2503.14476 eq. 8)
"sequence_mean"  mean over rows (with an unmasked token) of the mean over their unmasked tokens (GRPO, arXiv 2402.03300)
"constant"       sum over unmasked tokens / (rows * max_tokens) (Dr. GRPO, arXiv 2503.20783)
"""


class Loss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A loss: subclass it frozen, give it coefficients as fields, and return one value per token from `__call__`.

    The engine multiplies by nothing but masks and global denominators; a token with mask 0 may hold any value, even
    inf or nan, without reaching the gradient.
    """

    reduction: ClassVar[Reduction] = "token_mean"
    level: ClassVar[Level] = "token"
    """"sequence": the value of one token depends on all tokens of its row (GSPO). "rollout": on those of all rows of
    its rollout, which then stay in one micro-batch (Bradley-Terry, DPO). Both refuse at_deadline = "mask"."""
    uses_masked_rows: ClassVar[bool] = False
    """True: rows without an unmasked token are forwarded all the same."""
    after_token: ClassVar[bool] = False
    """True: `new.values` are read after each token, as the score of a reward model is; False: before it, as a critic's
    are."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Extra statistics to compute with these coefficients: "entropy"."""
        return ()

    @property
    def needs_groups(self) -> tuple[str, ...]:
        """Group fields that must be configured for these coefficients, for example ("reference",)."""
        return ()

    def __call__(self, new: TokenStats, batch: MicroBatch) -> Tensor:
        """[T] loss of every response token of the micro-batch."""
        raise TypeError(f"{type(self).__name__} must define __call__(self, new, batch) -> Tensor [T]")

    def measures(self, new: TokenStats, batch: MicroBatch) -> Mapping[str, Tensor]:
        """What to show of an optimizer step, by name: values [T], of which the mean over unmasked tokens is taken, with
        the weights that `reduction` gives them. Called without gradients."""
        return {}


class Transform(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A column transform (GAE, whitening): runs beside the data, over all rows of a batch at once."""

    needs_forward: ClassVar[bool] = False
    """True: `new` holds the model's statistics (values for a critic), computed without gradients; else it is None."""

    def __call__(self, new: TokenStats | None, batch: MicroBatch) -> Mapping[str, Tensor]:
        """New columns by name, each [T]. A tensor without dimensions is no column but a measure of the batch, shown in
        metrics.jsonl as "<group>/<name>"."""
        raise TypeError(f"{type(self).__name__} must define __call__(self, new, batch) -> dict of Tensors [T]")


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """[T] unbiased, non-negative estimate of KL(new || reference) per token: r - 1 - log r with r = reference/new
    (Schulman, "Approximating KL divergence", 2020, estimator k3). The log-ratio is clamped to +-20, so that a gap of
    50 gives a finite value and gradient."""
    gap = (reference - new).clamp(-20.0, 20.0)
    return gap.exp() - gap - 1


def ratio(new: TokenStats, batch: MicroBatch) -> Tensor:
    """[T] probability of each token under the new policy over that under the anchor (see `ops.corrections`)."""
    return (new.logprobs - batch.anchor_logprobs).exp()


def outside(ratio: Tensor, low: float, high: float) -> Tensor:
    """[T] 1.0 where a ratio is outside 1 - low .. 1 + high; its mean is the clip fraction."""
    return ((ratio < 1 - low) | (ratio > 1 + high)).to(ratio.dtype)


def clipped_gain(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """[T] min(r A, clip(r, 1 - low, 1 + high) A): PPO's pessimistic gain (arXiv 1707.06347 eq. 7), to be maximised."""
    return (ratio * advantages).minimum(ratio.clamp(1 - low, 1 + high) * advantages)
