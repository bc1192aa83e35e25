"""A check at start: does an architecture give, the way the engines call it, what transformers gives by itself?

Configurations cannot tell everything (attention biases, sinks, caches of their own), so a few tokens are tried.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncrlhf.backends.torch.attention import SlotCache
from asyncrlhf.backends.torch.layout import Layout
from asyncrlhf.backends.torch.model import Model
from asyncrlhf.errors import ConfigError

__all__ = ("require_all_learn", "require_cache_works", "require_layout_works")

TOKENS = 6
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of log-probs, in units of their spread."""


@torch.no_grad()
def require_cache_works(model: Model) -> None:
    """Prefill some tokens into a SlotCache and decode the rest. Raises ConfigError if log-probs come out different."""
    ids, plain = _plain(model)
    every = torch.arange(TOKENS, device=model.device)
    cache, row = SlotCache(1, TOKENS), every[:1]
    known = TOKENS // 2
    cache.begin_prefill(row, row, known)
    options: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
    found = [model.forward(ids[:, :known], every[:known], position_ids=every[None, :known], **options)]
    for place in range(known, TOKENS):
        cache.begin_decode(row, every[place : place + 1], place + 1)
        mask = torch.zeros(1, 1, 1, place + 1, dtype=model.module.dtype, device=model.device)
        options["attention_mask"] = mask
        found.append(
            model.forward(ids[:, place : place + 1], row, position_ids=every[None, place : place + 1], **options)
        )
    _compare(model, torch.cat(found), plain, "the sampler's KV cache")


@torch.no_grad()
def require_layout_works(model: Model, layout: Layout) -> None:
    """Lay some tokens out beside padding, or twice in one row. Raises ConfigError if log-probs come out different."""
    ids, plain = _plain(model)
    every = torch.arange(TOKENS, device=model.device)
    if layout == "padded":
        found = model.forward(torch.cat([ids, ids[:, :2]], 1), every, use_cache=False)
        _compare(model, found, plain, "rows that are padded on the right")
        return
    block = torch.tril(torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=model.device))
    options: dict[str, Any] = {"attention_mask": torch.block_diag(block, block)[None, None]}
    if model.uses_flash:
        ends = torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32, device=model.device)
        options = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": TOKENS, "max_length_k": TOKENS}
    positions = torch.cat([every, every])[None]
    found = model.forward(torch.cat([ids, ids], 1), every + TOKENS, position_ids=positions, use_cache=False, **options)
    _compare(model, found, plain, f"layout = {layout!r}, in which rows share a forward")


def require_all_learn(model: Model) -> None:
    """Ranks that share gradients wait for one of every parameter. Raises ConfigError if some get none."""
    with model.last_of_step(False):
        output = model.forward(_ids(model), torch.arange(TOKENS, device=model.device), use_cache=False)
        output.sum().backward()
    without = [name for name, parameter in model.parameters().items() if parameter.grad is None]
    model.module.zero_grad()
    if without:
        raise ConfigError(
            f"{model.module.config.model_type} has {len(without)} parameters that its output does not depend on, among "
            f"them {without[0]!r}, and replicas wait for each one's gradient; use sharding = 'full' or one rank"
        )


def _ids(model: Model) -> Tensor:
    step = max(1, model.vocabulary_size // (TOKENS + 1))
    return (torch.arange(1, TOKENS + 1, device=model.device) * step % model.vocabulary_size)[None]


def _plain(model: Model) -> tuple[Tensor, Tensor]:
    """Some token ids [1, TOKENS], and head outputs of a forward with transformers' own attention and masks."""
    ids = _ids(model)
    attention = model.module.config._attn_implementation
    model.module.set_attn_implementation("sdpa")
    try:
        every = torch.arange(TOKENS, device=model.device)
        return ids, model.forward(ids, every, attention_mask=torch.ones_like(ids), use_cache=False)
    finally:
        model.module.set_attn_implementation(attention)


def _compare(model: Model, found: Tensor, plain: Tensor, what: str) -> None:
    found, plain = (torch.log_softmax(x.float(), -1) if model.head == "lm" else x.float() for x in (found, plain))
    difference = float((found - plain).abs().max())
    spread = max(1.0, float(plain.max() - plain.min()))
    if not difference <= TOLERANCE[model.compute_dtype] * spread:
        raise ConfigError(
            f"{model.module.config.model_type} does not work with {what}: log-probs are off by {difference:.2g}. The "
            "torch backend serves decoders with plain causal attention; use another backend for this architecture"
        )
