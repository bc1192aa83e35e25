"""Layers that megatron-core has only with Transformer Engine, for its local specification: attention over packed rows
and context parallel ranks, a norm that knows sequence parallelism; and the value head, which it does not have."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from asyncrlhf.backends.megatron.cpu import import_quietly

__all__ = ("Norm", "PackedAttention", "ValueHead", "own_places")

parallel_state = import_quietly("megatron.core.parallel_state")
tensor_parallel = import_quietly("megatron.core.tensor_parallel")
make_sharded = import_quietly("megatron.core.transformer.utils").make_sharded_tensors_for_checkpoint


def own_places(ends: list[int], rank: int, ranks: int) -> Tensor:
    """int64: which places of packed rows a context parallel rank has. `ends`: 0, then where each row ends; rows are cut
    into 2 * ranks stretches, of which a rank takes one from the front and its mirror image from the back."""
    found: list[Tensor] = []
    for start, end in itertools.pairwise(ends):
        size = (end - start) // (2 * ranks)
        found.append(torch.arange(start + rank * size, start + (rank + 1) * size))
        found.append(torch.arange(end - (rank + 1) * size, end - rank * size))
    return torch.cat(found)


class _EveryPlace(torch.autograd.Function):
    """[T / ranks, ...] of each context parallel rank -> [T, ...] in the order of the rows, on all of them. The gradient
    is summed over ranks, since each uses all places."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ends: list[int], group: Any) -> Tensor:
        ctx.ends, ctx.group = ends, group
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        found = own.new_empty(len(own) * group.size(), *own.shape[1:])
        for rank, part in enumerate(parts):
            found[own_places(ends, rank, group.size()).to(own.device)] = part
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        places = own_places(ctx.ends, ctx.group.rank(), ctx.group.size())
        return total[places.to(total.device)], None, None


class PackedAttention(nn.Module):
    """Causal attention within packed rows. In the place of megatron-core's DotProductAttention."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **options: Any
    ) -> None:
        super().__init__()
        self._scale = options.get("softmax_scale")
        self._group = getattr(options.get("pg_collection"), "cp", None) or parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """`query` [T, H, D], `key` and `value` [T, K, D], this rank's places; gives [T, H * D]. Waits for the other
        context parallel ranks."""
        ends: list[int] = packed_seq_params.cu_seqlens_q.tolist()
        ranks = self._group.size()
        if ranks > 1:
            key, value = (_EveryPlace.apply(whole, ends, self._group) for whole in (key, value))
        found: list[Tensor] = []
        for start, end in itertools.pairwise(ends):
            own = slice(start // ranks, end // ranks)
            mask = self._mask(end - start, query.device) if ranks > 1 else None
            found.append(self._attend(query[own], key[start:end], value[start:end], mask))
        return torch.cat(found).flatten(1)

    def _mask(self, length: int, device: torch.device) -> Tensor:
        own = own_places([0, length], self._group.rank(), self._group.size()).to(device)
        return own[:, None] >= torch.arange(length, device=device)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[Q, H, D] of queries, [L, K, D] of keys and values of one row -> [Q, H, D]."""
        heads = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        found = F.scaled_dot_product_attention(
            *heads, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return found[0].transpose(0, 1)


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467), whose gradients are summed over tensor parallel ranks if these split tokens."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__()
        self._eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return self.weight * wide.to(hidden.dtype)


class ValueHead(nn.Module):
    """One value per token, in the place of the output layer; every tensor parallel rank has all of it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, weight: None = None, runtime_gather_output: None = None) -> tuple[Tensor, None]:
        """[T, 1, hidden size] -> [T, 1, 1], float32."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float()), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        return make_sharded(self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets)
