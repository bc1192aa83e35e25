"""From a forward of packed rows to what one rank reads of it: its context parallel places, and what they are asked."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrlhf.backends.megatron.cpu import import_quietly
from asyncrlhf.backends.megatron.layers import own_places
from asyncrlhf.backends.megatron.parallel import Standing
from asyncrlhf.backends.torch.data import Forward

__all__ = ("MicroBatch", "grain", "micro_batch", "width_of")

PackedSeqParams = import_quietly("megatron.core.packed_seq_params").PackedSeqParams


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward on one rank. T of its tokens are asked about, of which this rank has some."""

    forward: Forward
    ids: Tensor = field(repr=False)
    """int64 [1, W / context parallel ranks]."""
    positions: Tensor = field(repr=False)
    """int64, of the same shape, unused by rotary models."""
    packed: Any = field(repr=False)
    """Where each row ends."""
    selected: Tensor = field(repr=False)
    """int64 [S] places of `ids`, after which the tokens asked about follow."""
    targets: Tensor = field(repr=False)
    """int64 [S] those tokens."""
    numbers: Tensor = field(repr=False)
    """int64 [S] which of the forward's T tokens they are."""
    count: int
    """T."""


def grain(standing: Standing, sequence_parallel: bool) -> tuple[int, int]:
    """Places that a row, and that all rows together, are multiples of."""
    row = 2 * standing.context.size() if standing.context.size() > 1 else 1
    return row, row * (standing.tensor.size() if sequence_parallel else 1)


def width_of(forward: Forward, multiple: int) -> int:
    """Places of a forward, filled up to a multiple."""
    return -(-forward.arguments["input_ids"].shape[1] // multiple) * multiple


def micro_batch(forward: Forward, standing: Standing, width: int) -> MicroBatch:
    """This rank's part of a forward, filled up to `width` places behind its last row."""
    arguments = forward.arguments
    ids: Tensor = arguments["input_ids"]
    ids = F.pad(ids, (0, width - ids.shape[1]))
    ends: list[int] = arguments["cu_seq_lens_q"].tolist() if "cu_seq_lens_q" in arguments else [0, width]
    ends[-1] = width
    wanted: Tensor = arguments["hidden_index"]
    numbers = torch.arange(len(wanted), device=ids.device)
    targets: Tensor = arguments["targets"]
    if (ranks := standing.context.size()) > 1:
        own = own_places(ends, standing.context.rank(), ranks).to(ids.device)
        where = torch.full((width,), -1, device=ids.device)
        where[own] = torch.arange(len(own), device=ids.device)
        numbers = (where[wanted] >= 0).nonzero()[:, 0]
        ids, wanted, targets = ids[:, own], where[wanted[numbers]], targets[numbers]
    cumulative = torch.tensor(ends, dtype=torch.int32, device=ids.device)
    longest = max(end - start for start, end in itertools.pairwise(ends))
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        cu_seqlens_q_padded=cumulative,
        cu_seqlens_kv_padded=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return MicroBatch(
        forward=forward,
        ids=ids,
        positions=torch.zeros_like(ids),
        packed=packed,
        selected=wanted,
        targets=targets,
        numbers=numbers,
        count=len(arguments["targets"]),
    )
