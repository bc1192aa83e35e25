"""Off-policy corrections: which policy a loss takes its ratio against, and how much each token weighs.

Three policies play a part for a token that was sampled some versions ago: the behaviour policy that sampled it, the
proximal policy that the train step starts from, and the new one being optimised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("MAX_LOG_RATIO", "OffPolicy", "fill")

OffPolicy = Literal["none", "truncated_is", "masked_is", "decoupled"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this, so that a gap of 50 still gives finite ratios and gradients."""


def fill(kind: OffPolicy, cap: float, proximal: Tensor, behaviour: Tensor) -> tuple[Tensor, Tensor]:
    """Columns `anchor_logprobs` and `weight`, float32 [T] each, from two detached log-probs [T] of the same tokens.

    With r = proximal / behaviour per token:

    "none"          anchor behaviour, weight 1: the ratio of the loss is the whole correction (PPO, arXiv 1707.06347).
    "truncated_is"  anchor behaviour, weight min(1, cap / r): the importance weight that the ratio of the loss carries
                    is truncated at `cap` (Ionides 2008, "Truncated importance sampling"; IMPALA, arXiv 1802.01561).
    "masked_is"     anchor behaviour, weight 1 where 1 / cap <= r <= cap, else 0: tokens that have moved too far do not
                    train.
    "decoupled"     anchor proximal, weight min(r, cap): the trust region is round the proximal policy and staleness is
                    corrected apart from it (Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298).

    An anchor further than e^20 from the proximal policy is moved to that distance. Raises ValueError for another kind
    or a cap below 1.
    """
    if cap < 1:
        raise ValueError(f"off_policy_cap = {cap}; a cap on importance weights is 1 or more")
    gap = proximal - behaviour
    log_ratio = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    anchor = behaviour.where(gap == log_ratio, proximal - log_ratio)
    ratio = log_ratio.exp()
    if kind == "none":
        return anchor, ratio.new_ones(ratio.shape)
    if kind == "truncated_is":
        return anchor, (cap / ratio).clamp(max=1.0)
    if kind == "masked_is":
        return anchor, ((ratio <= cap) & (ratio * cap >= 1)).to(ratio.dtype)
    if kind == "decoupled":
        return proximal, ratio.clamp(max=cap)
    raise ValueError(f"off_policy = {kind!r}; use 'none', 'truncated_is', 'masked_is' or 'decoupled'")
