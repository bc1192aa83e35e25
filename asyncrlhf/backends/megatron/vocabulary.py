"""Log-probs and entropy of tokens whose logits are spread over tensor parallel ranks, column by column.

No rank ever sees all logits of a token: two all-reduces bring together the largest one, and the sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ("token_stats",)


def token_stats(logits: Tensor, targets: Tensor, vocabulary: int, group: Any) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy), float32 [T] both, of `targets` (int64 [T]) under softmax of the logits of all ranks.

    `logits` [T, V / ranks]: this rank's columns, of which those from `vocabulary` on are padding. Waits for the other
    ranks of `group`.
    """
    return _TokenStats.apply(logits, targets, vocabulary, group)  # type: ignore[return-value]


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocabulary: int, group: Any) -> tuple[Tensor, Tensor]:
        width = logits.shape[-1]
        first = group.rank() * width
        real = min(max(vocabulary - first, 0), width)
        shifted = torch.full_like(logits, -torch.inf, dtype=torch.float32)
        shifted[:, :real] = logits[:, :real]
        largest = shifted.amax(-1)
        if group.size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted -= largest[:, None]
        own = (targets >= first) & (targets < first + real)
        column = (targets - first).clamp(0, width - 1)
        weights = shifted.exp()
        chosen = torch.where(own, shifted.gather(1, column[:, None])[:, 0], 0.0)
        energy = (weights * shifted.masked_fill(weights == 0, 0.0)).sum(-1)
        sums = torch.stack([weights.sum(-1), energy, chosen])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        total, energy, chosen = sums
        log_total = total.log()
        entropy = log_total - energy / total
        ctx.save_for_backward(shifted - log_total[:, None], own, column, entropy)
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None]:
        of_logprobs, of_entropy = gradients
        every_logprob, own, column, entropy = ctx.saved_tensors
        probabilities = every_logprob.exp()
        found = torch.zeros_like(probabilities)
        if of_logprobs is not None:
            found -= probabilities * of_logprobs[:, None]
            found.scatter_add_(1, column[:, None], torch.where(own, of_logprobs, 0.0)[:, None])
        if of_entropy is not None:
            logprobs = every_logprob.masked_fill(probabilities == 0, 0.0)
            found -= probabilities * (logprobs + entropy[:, None]) * of_entropy[:, None]
        return found.to(ctx.dtype), None, None, None
