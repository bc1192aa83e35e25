"""Weights made from layouts, the pairs of layouts that the issue asks for, and memory that torch takes."""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrlhf.errors import PublishRefused
from asyncrlhf.messages import Probe, WeightHandle
from asyncrlhf.weights.layout import Holding, Layout, places
from asyncrlhf.weights.megatron_layout import MegatronParallel, megatron_layout
from asyncrlhf.weights.publish import ShardPublisher
from asyncrlhf.weights.regions import allocate, dtype_of, region
from asyncrlhf.weights.shapes import ModelShape
from asyncrlhf.weights.torch_layout import fsdp_layout
from asyncrlhf.weights.vllm_layout import VllmParallel, vllm_layout
from asyncrlhf.weights.zero_redundancy import Regrouping, regrouped_layout

RANKS = 4
DENSE = ModelShape(
    hidden=64, layers=4, heads=8, kv_heads=2, head_dim=8, ff=96, vocab=1003, tied=True, qkv_bias=True, dtype="float32"
)
"""Two key/value heads, so that four ranks share them; a vocabulary that no padding fits; tied embeddings."""
MIXTURE = ModelShape(
    hidden=64, layers=2, heads=8, kv_heads=2, head_dim=8, ff=32, vocab=515, experts=4, qk_norm=True, dtype="bfloat16"
)

SOURCES: Mapping[str, tuple[ModelShape, MegatronParallel]] = {
    "tp2pp2": (DENSE, MegatronParallel(tensor=2, pipeline=2)),
    "tp4": (replace(DENSE, tied=False), MegatronParallel(tensor=4)),
    "pp4": (DENSE, MegatronParallel(pipeline=4)),
    "tp2dp2": (DENSE, MegatronParallel(tensor=2)),
    "ep2dp2": (MIXTURE, MegatronParallel(expert=2)),
}
TENSOR_SIZES = (1, 2, 4)
"""Engines: tp1 x 4, tp2 x 2, tp4 x 1."""
PROBE = Probe(token_ids=(1, 2), logprobs=(-0.5,))


def pairs() -> Iterator[tuple[str, ModelShape, Layout, Layout, Regrouping | None]]:
    """Every pair on the same four ranks: engines of consecutive ranks, and regrouped where sizes divide."""
    where = places(RANKS)
    for name, (shape, parallel) in SOURCES.items():
        source = megatron_layout(shape, parallel, where)
        for tensor in TENSOR_SIZES:
            yield f"{name} tp{tensor}", shape, source, vllm_layout(shape, VllmParallel(tensor=tensor), where), None
            if parallel.tensor % tensor == 0:
                regrouping = Regrouping(
                    pipeline=parallel.pipeline,
                    tensor=parallel.tensor,
                    data=RANKS // parallel.pipeline // parallel.tensor,
                    generate_pipeline=1,
                    generate_tensor=tensor,
                )
                yield (
                    f"{name} tp{tensor} regrouped",
                    shape,
                    source,
                    regrouped_layout(shape, regrouping, where),
                    regrouping,
                )
    shards = fsdp_layout(replace(DENSE, dtype="float32"), places(3))  # to one engine apart from it, in another type
    yield (
        "fsdp3 tp1",
        DENSE,
        shards,
        vllm_layout(replace(DENSE, dtype="bfloat16"), VllmParallel(), places(1, first=3)),
        None,
    )


def weights(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    """By Hugging Face name, the same in every process."""
    found: dict[str, Tensor] = {}
    for parameter in shape.parameters():
        random = torch.Generator().manual_seed(zlib.crc32(parameter.name.encode()) + seed)
        found[parameter.name] = torch.randn(parameter.shape, generator=random).to(dtype_of(shape.dtype))
    return found


def held(holding: Holding | None, model: Mapping[str, Tensor], *, odd: bool = False) -> dict[str, Tensor]:
    """What a rank holds of a model, with padding of zeros; `odd`: matrices whose memory is in another order."""
    tensors = allocate(holding)
    if odd:
        tensors = {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in tensors.items()}
    for piece in () if holding is None else holding.slices:
        lengths = tuple(high - low for low, high in piece.box)
        full = model[piece.parameter][tuple(slice(low, high) for low, high in piece.box)]
        region(tensors[piece.tensor], piece.offset, lengths).copy_(full)
    return tensors


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


class MemoryTaken(TorchDispatchMode):
    """Bytes of all tensors made while it is entered, at most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given | self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class ShardTrainer:
    """Ranks in threads that hold the parts of `layout`."""

    def __init__(
        self, layout: Layout, transport: str = "asyncrlhf.weights.inproc:InprocTransfer", *, replicas: bool = False
    ) -> None:
        self.layout, self.size = layout, len(layout.holdings)
        self._barrier, self._said = threading.Barrier(self.size), [None] * self.size
        self.ranks = [
            ShardPublisher(transport, layout, rank, self._everyones(rank), replicas=replicas)
            for rank in range(self.size)
        ]

    def _everyones(self, rank: int) -> Callable[[Any], list[Any]]:
        def everyones(own: Any) -> list[Any]:
            self._said[rank] = own
            self._barrier.wait(30)
            found = list(self._said)
            self._barrier.wait(30)
            return found

        return everyones

    def export(self, version: int, model: Mapping[str, Tensor]) -> list[WeightHandle]:
        """Every rank's handle; a rank's error otherwise."""
        with ThreadPoolExecutor(self.size) as pool:
            calls = [
                pool.submit(rank.export, version, held(holding, dict(model)), lambda: PROBE)
                for rank, holding in zip(self.ranks, self.layout.holdings, strict=True)
            ]
        errors = [call.exception() for call in calls]
        if any(errors):
            assert all(isinstance(error, PublishRefused) for error in errors), "all ranks hear of it"
            raise next(error for error in errors if error)
        return [call.result() for call in calls]
