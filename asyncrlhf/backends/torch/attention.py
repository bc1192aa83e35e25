"""Attention and KV cache of the torch engines: one attention function for every architecture, one static cache.

The cache belongs to the sampler: requests live in slots, the running ones are always the slots [0, n), and a forward
is either a prefill (whole sequences into new slots) or a decode (one token for each of the first n slots).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from asyncrlhf.backends.torch.guard import guard_companions

guard_companions()
from transformers import AttentionInterface  # noqa: E402
from transformers.cache_utils import Cache  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

__all__ = ("ATTENTION", "SlotCache")

ATTENTION = "asyncrlhf_sdpa"
"""Name under which transformers finds `attend`. It has no mask function there, so a mask passes through as given and
None means causal."""
GRAIN = 64
"""The KV cache grows by whole stretches of this many tokens."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' SDPA, except that one query token per row attends to its key/value heads without copying them.

    `query` [R, H, Q, D], `key` and `value` [R, K, E, D]; gives [R, Q, H, D]. With Q = 1 the H / K query heads of a
    key/value head stand in for the query length (grouped-query attention, arXiv 2305.13245).
    """
    rows, heads, length, size = query.shape
    groups = key.shape[1]
    if length != 1 or groups == heads or attention_mask is None or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    grouped = query.reshape(rows, groups, heads // groups, size)
    output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=options.get("scaling"))
    return output.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, attend)


class SlotCache(Cache):
    """Keys and values of all slots, [layer][slots, K, capacity, D] each. The capacity follows the longest sequence so
    far up to `max_tokens`; the tensors are made by the first forward."""

    def __init__(self, slots: int, max_tokens: int) -> None:
        super().__init__(layers=[])
        self.slots, self.max_tokens = slots, max_tokens
        self._capacity = min(max_tokens, GRAIN)
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._rows: Tensor | None = None
        self._source: Tensor | None = None
        self._positions: Tensor | None = None
        self._extent = 0

    def begin_prefill(self, rows: Tensor, source: Tensor, extent: int) -> None:
        """Next forward: row `source[i]` of the batch, at most `extent` tokens, is written into slot `rows[i]` (int64
        [N] both)."""
        self._reserve(extent)
        self._rows, self._source, self._positions = rows, source, None

    def begin_decode(self, rows: Tensor, positions: Tensor, extent: int) -> None:
        """Next forward: one token for each of the slots `rows` = 0..n-1 at `positions` (int64 [n] both), all of them
        below `extent`."""
        self._reserve(extent)
        self._rows, self._positions, self._extent = rows, positions, extent

    def move(self, source: Tensor, target: Tensor, extent: int) -> None:
        """Copy the first `extent` tokens of the slots `source` over the slots `target` (int64 [N] both, disjoint)."""
        for keys, values in self._layers:
            keys[target, :, :extent] = keys[source, :, :extent]
            values[target, :, :extent] = values[source, :, :extent]

    def release(self) -> None:
        """Free the memory; the next forward makes new."""
        self._capacity = min(self.max_tokens, GRAIN)
        self._layers.clear()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model in each layer, with [R, K, Q, D]; gives the keys and values to attend to."""
        if layer_idx == len(self._layers):
            self._layers.append((self._allocate(key_states), self._allocate(value_states)))
        keys, values = self._layers[layer_idx]
        if self._positions is None:
            length = key_states.shape[2]
            keys[self._rows, :, :length] = key_states[self._source]
            values[self._rows, :, :length] = value_states[self._source]
            return key_states, value_states
        keys[self._rows, :, self._positions] = key_states[:, :, 0]
        values[self._rows, :, self._positions] = value_states[:, :, 0]
        count = key_states.shape[0]
        return keys[:count, :, : self._extent], values[:count, :, : self._extent]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given, so nothing may be derived from this."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(key/value length, offset), for architectures that build a mask although one was given."""
        return (query_length if self._positions is None else self._extent), 0

    def _reserve(self, extent: int) -> None:
        """Make room for sequences of `extent` tokens."""
        if extent <= self._capacity:
            return
        wanted = max(2 * self._capacity, -(-extent // GRAIN) * GRAIN)
        self._capacity = min(self.max_tokens, wanted)
        for i, pair in enumerate(self._layers):
            keys, values = (self._allocate(old) for old in pair)
            keys[:, :, : pair[0].shape[2]], values[:, :, : pair[1].shape[2]] = pair
            self._layers[i] = keys, values

    def _allocate(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.slots, like.shape[1], self._capacity, like.shape[3])
