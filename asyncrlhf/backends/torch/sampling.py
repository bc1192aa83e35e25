"""Sampling one token per row: inverse CDF, with one uniform number per row that depends on nothing but its request.

The numbers come from a counter-based generator (splitmix64: Steele, Lea, Flood 2014, "Fast splittable pseudorandom
number generators"): number i of a stream is a hash of (seed, i), so that an answer depends neither on the other rows
of the batch nor on where it was interrupted and continued.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ("choose", "stream_key", "uniforms")

Keys = NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def stream_key(seed: int) -> int:
    """The 64-bit key of a request's stream; any integer seed will do."""
    return _mix_one((seed & _MASK) + _GOLDEN)


def uniforms(keys: Keys, places: NDArray[np.int64]) -> NDArray[np.float32]:
    """float32 [n] in [0, 1) on a grid of 2^-23: number `places[i]` of stream `keys[i]`."""
    mixed = keys + (places.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


def choose(logits: Tensor, temperatures: NDArray[np.float32], numbers: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """One token (int64 [n]) per row and its log-prob (float32 [n]) over the full vocabulary, at the row's temperature.

    `logits` [n, V]. Temperature 0 takes the likeliest token, with its log-prob at temperature 1. A token of
    probability 0 is never taken.
    """
    logits = logits.float()
    greedy = temperatures == 0
    if (temperatures != 1).any():
        scale = torch.from_numpy(np.where(greedy, np.float32(1), temperatures)).to(logits.device)
        logits = logits / scale[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    cumulative = logprobs.exp().cumsum(-1)
    target = torch.from_numpy(numbers).to(logits.device)[:, None] * cumulative[:, -1:]
    tokens = (cumulative <= target).sum(-1).clamp_(max=logits.shape[1] - 1)
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(logits.device), logprobs.argmax(-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    if chosen.isneginf().any():  # a cumulative sum in parallel is not quite monotone
        likeliest = logprobs.max(-1)
        tokens = torch.where(chosen.isneginf(), likeliest.indices, tokens)
        chosen = torch.where(chosen.isneginf(), likeliest.values, chosen)
    return tokens, chosen


def _mix_one(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
