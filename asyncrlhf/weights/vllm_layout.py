"""Layout of vLLM engines: tensor x pipeline parallelism, with vLLM's fused tensors, any number of engines.

Queries, keys and values lie in one tensor, gate and up in another, all experts of a rank in two. With more tensor
ranks than key/value heads each of these heads is held by several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrlhf.errors import ConfigError
from asyncrlhf.messages.samples import Message
from asyncrlhf.weights.layout import Holding, Layout, Place, Shelf, full_box, share
from asyncrlhf.weights.shapes import ModelShape, Parameter, Part

__all__ = ("VllmParallel", "vllm_holding", "vllm_layout")


class VllmParallel(Message, frozen=True):
    """How one engine is spread."""

    tensor: int = 1
    pipeline: int = 1
    expert: bool = False
    """Whole experts on each tensor rank, instead of a part of every expert."""
    vocab_multiple: int = 64
    """The vocabulary is padded to a multiple of this."""
    experts_name: str = "mlp.experts.routed_experts"
    """Module of a layer that holds `w13_weight` and `w2_weight`."""

    @property
    def name(self) -> str:
        return f"vllm tp{self.tensor}" + (f" pp{self.pipeline}" if self.pipeline > 1 else "")


def vllm_layout(shape: ModelShape, parallel: VllmParallel, places: Sequence[Place]) -> Layout:
    """Engines of tensor x pipeline consecutive ranks each. Raises ConfigError when sizes do not divide."""
    engine_ranks = parallel.tensor * parallel.pipeline
    engines = share("ranks of vLLM engines", len(places), engine_ranks)
    holdings = tuple(
        vllm_holding(shape, parallel, place, index % parallel.tensor, index % engine_ranks // parallel.tensor)
        for index, place in enumerate(places)
    )
    return Layout(f"{parallel.name} x {engines}", {p.name: p for p in shape.parameters()}, holdings)


def vllm_holding(shape: ModelShape, parallel: VllmParallel, place: Place, tp: int, pp: int) -> Holding:
    """What tensor rank `tp` of pipeline stage `pp` holds."""
    share("attention heads over tensor parallelism", shape.heads, parallel.tensor)
    if parallel.tensor % shape.kv_heads and shape.kv_heads % parallel.tensor:
        raise ConfigError(
            f"tensor parallelism of {parallel.tensor} neither divides {shape.kv_heads} key/value heads nor is a "
            "multiple of them"
        )
    shelf = Shelf(place)
    layers = _stage_layers(shape.layers, parallel.pipeline, pp)
    for parameter in shape.parameters():
        if parameter.layer < 0:
            _outside(shelf, shape, parallel, parameter, tp, pp)
        elif parameter.layer in layers:
            _layer(shelf, shape, parallel, parameter, tp)
    return shelf.holding()


def _stage_layers(layers: int, stages: int, stage: int) -> range:
    """What does not divide goes to the stages before the last, from the back."""
    counts = [layers // stages] * stages
    for index in range(layers % stages):
        counts[stages - 2 - index] += 1
    first = sum(counts[:stage])
    return range(first, first + counts[stage])


def _outside(shelf: Shelf, shape: ModelShape, parallel: VllmParallel, parameter: Parameter, tp: int, pp: int) -> None:
    first, last = pp == 0, pp == parallel.pipeline - 1
    if parameter.part is Part.FINAL_NORM:
        if last:
            shelf.whole(parameter, parameter.name)
    elif (last and (shape.tied or parameter.part is Part.HEAD)) or (first and parameter.part is Part.EMBEDDING):
        padded = -(-shape.vocab // parallel.vocab_multiple) * parallel.vocab_multiple
        shelf.vocabulary(parameter, parameter.name, padded, tp, parallel.tensor)


def _layer(shelf: Shelf, shape: ModelShape, parallel: VllmParallel, parameter: Parameter, tp: int) -> None:
    part, size = parameter.part, parallel.tensor
    prefix = f"model.layers.{parameter.layer}."
    if parameter.expert >= 0:
        _expert(shelf, shape, parallel, parameter, tp, prefix + parallel.experts_name)
    elif part in (Part.QUERY, Part.KEY, Part.VALUE):
        queries = shape.heads // size * shape.head_dim
        keys = max(1, shape.kv_heads // size) * shape.head_dim
        sharing = max(1, size // shape.kv_heads)
        first, count, offset = {
            Part.QUERY: (tp * queries, queries, 0),
            Part.KEY: (tp // sharing * keys, keys, queries),
            Part.VALUE: (tp // sharing * keys, keys, queries + keys),
        }[part]
        shelf.rows(parameter, first, count, f"{prefix}self_attn.qkv_proj.{parameter.kind}", queries + 2 * keys, offset)
    elif part in (Part.GATE, Part.UP):
        width = share(parameter.name, shape.ff, size)
        offset = width if part is Part.UP else 0
        shelf.rows(parameter, tp * width, width, f"{prefix}mlp.gate_up_proj.weight", 2 * width, offset)
    elif part in (Part.OUTPUT, Part.DOWN):
        shelf.split(parameter, parameter.name, 1, tp, size)
    else:
        shelf.whole(parameter, parameter.name)


def _expert(shelf: Shelf, shape: ModelShape, parallel: VllmParallel, parameter: Parameter, tp: int, name: str) -> None:
    if parallel.expert:
        whole, rest = divmod(shape.experts, parallel.tensor)
        first, count, rank, ranks = tp * whole + min(tp, rest), whole + (tp < rest), 0, 1
    else:
        first, count, rank, ranks = 0, shape.experts, tp, parallel.tensor
    if not first <= parameter.expert < first + count:
        return
    width = share(parameter.name, shape.ff, ranks)
    box, mine = full_box(parameter.shape), (rank * width, (rank + 1) * width)
    local = parameter.expert - first
    if parameter.part is Part.DOWN:
        shelf.put(parameter, (box[0], mine), f"{name}.w2_weight", (count, shape.hidden, width), (local, 0, 0))
    else:
        offset = (local, width if parameter.part is Part.UP else 0, 0)
        shelf.put(parameter, (mine, box[1]), f"{name}.w13_weight", (count, 2 * width, shape.hidden), offset)
