"""Advantages computed per token: generalised advantage estimation, and whitening."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from asyncrlhf.ops.losses import Transform

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from asyncrlhf.ops.batch import MicroBatch, TokenStats

__all__ = ("GAE", "gae", "on_last_token", "whiten")


class GAE(Transform, frozen=True, kw_only=True):
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438 eq. 16) with a critic's values.

    Returns the columns `advantages`, `returns` (the critic's target, advantages before whitening + values) and
    `values`, and the measure `explained_variance` = 1 - Var(returns - values) / Var(returns) of unmasked tokens, if
    there are two. The reward of a token is the column `token_rewards` if there is one; else the row's reward falls on
    its last token. All tokens count, masked ones too: masks apply to gradients only.
    """

    needs_forward: ClassVar[bool] = True

    gamma: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Discount per token."""
    lam: Annotated[float, Meta(ge=0, le=1)] = 0.95
    """0: one-step advantages, little variance; 1: the whole return, no bias."""
    whiten: bool = True
    """Shift and scale the advantages of unmasked tokens to mean 0 and deviation 1, over the whole batch."""

    def __call__(self, new: TokenStats | None, batch: MicroBatch) -> Mapping[str, Tensor]:
        """Raises ValueError if the model has no value head."""
        if new is None or new.values is None:
            raise ValueError("GAE needs values; apply it to a group whose model has head = 'value'")
        values = new.values.detach()
        rewards = batch.token_rewards if "token_rewards" in batch else on_last_token(batch.rewards, batch.lengths)
        advantages = gae(rewards, values, batch.lengths, self.gamma, self.lam)
        found = {"advantages": advantages, "returns": advantages + values, "values": values}
        kept = batch.mask > 0
        if kept.sum() > 1:
            found["explained_variance"] = 1 - advantages[kept].var() / found["returns"][kept].var().clamp(min=1e-8)
        if self.whiten:
            found["advantages"] = whiten(advantages, batch.mask)
        return found


def gae(rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float) -> Tensor:
    """float32 [T] advantages of rows end to end; `rewards`, `values` float32 [T], `lengths` int64 [R].

    A_t = delta_t + gamma lam A_(t+1), delta_t = r_t + gamma V_(t+1) - V_t; behind a row's last token A and V are 0.
    The recurrence is unrolled by doubling (Hillis and Steele 1986): after k rounds every A_t has its next 2^k terms,
    so rows of L tokens take log2 L operations on [T].
    """
    import torch

    if not values.numel():
        return torch.zeros_like(values)
    left = torch.repeat_interleave(torch.cumsum(lengths, 0), lengths) - torch.arange(len(values), device=values.device)

    def ahead(column: Tensor, distance: int) -> Tensor:
        """What stands `distance` tokens further in the same row; 0 behind its end."""
        moved = torch.cat([column[distance:], column.new_zeros(min(distance, len(column)))])
        return moved.masked_fill(left <= distance, 0.0)

    advantages = rewards + gamma * ahead(values, 1) - values
    distance, longest = 1, int(lengths.max())
    while distance < longest:
        advantages = advantages + (gamma * lam) ** distance * ahead(advantages, distance)
        distance *= 2
    return advantages


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """[T] values shifted and scaled so that those with mask > 0 have mean 0 and deviation 1; masked ones move along.

    With fewer than two unmasked values nothing can be scaled: they are only shifted.
    """
    chosen = values[mask > 0]
    if not len(chosen):
        return values
    centred = values - chosen.mean()
    if len(chosen) < 2:
        return centred
    return centred / (chosen.std() + 1e-8)


def on_last_token(rewards: Tensor, lengths: Tensor) -> Tensor:
    """[T] rewards that repeat their row's number at each of its tokens -> 0 but at the last token of each row."""
    last = lengths.cumsum(0)[lengths > 0] - 1
    return rewards.new_zeros(rewards.shape).index_copy(0, last, rewards[last])
