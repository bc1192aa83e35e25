"""What becomes of a reward before advantages are taken: scaled, and less a penalty for leaving the reference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from asyncrlhf.messages import PerSample, PerToken, Rollout, Statistics, total
from asyncrlhf.ops.advantages import on_last_token
from asyncrlhf.ops.losses import Transform

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from asyncrlhf.ops.batch import MicroBatch, TokenStats

__all__ = ("KLControl", "RewardScale", "TokenRewards", "sequence_kl")

Amount = Annotated[float, Meta(ge=0)]


class RewardScale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How large rewards are made."""

    normalise: bool = True
    """Subtract the mean of all rewards seen so far, and divide by their deviation."""
    clip: Amount = 5.0
    """Then cut them to -clip .. clip; 0: not at all."""


class TokenRewards(Transform, frozen=True, kw_only=True):
    """The column `token_rewards`: a row's scaled reward at its last token, and with `kl_in` "reward" the penalty
    -kl (behaviour - reference log-prob) at every token (Ziegler et al. 2019, arXiv 1909.08593 eq. 2), which reads the
    column `reference_logprobs`. With `kl_in` "loss", a column `kl_weight` says how much the loss is to weigh a KL of
    its own. The measure `scaled_reward` is the mean of the scaled rewards.
    """

    scale: RewardScale
    seen: Statistics
    """Of all rewards so far."""
    kl: Amount = 0.0
    """Coefficient of the penalty; 0: there is none, and no column for it."""
    kl_in: Literal["reward", "loss"] = "reward"

    def __call__(self, new: TokenStats | None, batch: MicroBatch) -> Mapping[str, Tensor]:
        rewards, bound = batch.rewards, self.scale.clip or math.inf
        if self.scale.normalise:
            rewards = (rewards - self.seen.mean) / (self.seen.deviation + 1e-8)
        rewards = on_last_token(rewards.clamp(-bound, bound), batch.lengths)
        found = {"token_rewards": rewards, "scaled_reward": rewards.sum() / max(1, int((batch.lengths > 0).sum()))}
        if self.kl and self.kl_in == "loss":
            found["kl_weight"] = rewards.new_full(rewards.shape, self.kl)
        elif self.kl:
            found["token_rewards"] = rewards - self.kl * (batch.behaviour_logprobs - batch.reference_logprobs)
        return found


class KLControl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The coefficient of a KL penalty: fixed, or led so that the KL comes to a target (Ziegler et al. 2019, arXiv
    1909.08593 section 2.2)."""

    coefficient: Amount = 0.05
    """Where it stays, or with a target begins; 0: no penalty."""
    target: Amount = 0.0
    """KL to the reference per answer, in nats; 0: the coefficient stays."""
    gain: Amount = 0.1
    """How fast it moves: K of the paper, for one train step."""

    @property
    def needs_groups(self) -> tuple[str, ...]:
        return ("reference",) if self.coefficient else ()

    def start(self, last: float) -> float:
        """For the batch at hand; `last`: what `next` gave after the batch before it, 0 when there was none."""
        return last if last and self.target and self.coefficient else self.coefficient

    def next(self, coefficient: float, kl: float) -> float:
        """For the batch after one that had `coefficient` and a mean KL of `kl`.

        coefficient (1 + gain error), error = clip(kl / target - 1, -0.2, 0.2); without a target it stays.
        """
        if not self.target or math.isnan(kl):
            return coefficient
        return coefficient * (1 + self.gain * min(max(kl / self.target - 1, -0.2), 0.2))


def sequence_kl(rollout: Rollout, reference_logprobs: PerToken) -> PerSample:
    """For each answer, in nats, the sum over its tokens of behaviour - reference log-prob: the mean over answers is an
    unbiased estimate of KL(behaviour || reference) (Schulman, "Approximating KL divergence", 2020, estimator k1)."""
    rows = zip(rollout.samples, reference_logprobs, strict=True)
    return tuple(total(sample.logprobs) - total(reference) for sample, reference in rows)
