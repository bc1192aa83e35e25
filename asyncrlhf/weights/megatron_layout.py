"""Layout of a megatron-core GPTModel: tensor x pipeline (x virtual pipeline) x expert x data parallelism.

Ranks are ordered as megatron-core does by default, tp-cp-ep-dp-pp with tp fastest. Local tensors carry the names of
`torch.nn.ModuleList(chunks).named_parameters()`, so that the first word is the chunk (0 without virtual stages).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from asyncrlhf.errors import ConfigError
from asyncrlhf.messages.samples import Message
from asyncrlhf.weights.layout import Holding, Layout, Place, Shelf, share
from asyncrlhf.weights.shapes import ModelShape, Parameter, Part

__all__ = ("MegatronParallel", "megatron_layout", "padded_vocabulary")

VOCABULARY_GRAIN = 128
"""The vocabulary is filled up to a multiple of this, whatever the layout, so that checkpoints fit into others."""


def padded_vocabulary(size: int, tensor_parallel: int) -> int:
    """Rows of the embedding, padding included."""
    grain = math.lcm(VOCABULARY_GRAIN, tensor_parallel)
    return -(-size // grain) * grain


class MegatronParallel(Message, frozen=True):
    """How one megatron-core model is spread. Data parallelism is what remains of the ranks."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    """Model chunks per pipeline rank (interleaved schedule)."""
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    """Tensor parallelism inside an expert."""
    padded_vocab: int = 0
    """Rows of the embedding with padding; 0: `padded_vocabulary`."""
    transformer_engine: bool = False
    """Layer norms are part of the linear layer after them, and carry its name."""
    grouped_experts: bool = False
    """Experts of a rank lie in one module with numbered weights (TEGroupedMLP), not in one module each."""

    @property
    def name(self) -> str:
        pairs = (("tp", self.tensor), ("pp", self.pipeline), ("vpp", self.virtual_pipeline), ("ep", self.expert))
        return "megatron " + (" ".join(f"{word}{size}" for word, size in pairs if size > 1) or "dp")


_LAYER_NAMES = {
    Part.INPUT_NORM: "input_layernorm",
    Part.QUERY: "self_attention.linear_qkv",
    Part.KEY: "self_attention.linear_qkv",
    Part.VALUE: "self_attention.linear_qkv",
    Part.QUERY_NORM: "self_attention.q_layernorm",
    Part.KEY_NORM: "self_attention.k_layernorm",
    Part.OUTPUT: "self_attention.linear_proj",
    Part.POST_NORM: "pre_mlp_layernorm",
    Part.ROUTER: "mlp.router",
    Part.GATE: "mlp.linear_fc1",
    Part.UP: "mlp.linear_fc1",
    Part.DOWN: "mlp.linear_fc2",
}


def megatron_layout(shape: ModelShape, parallel: MegatronParallel, places: Sequence[Place]) -> Layout:
    """Raises ConfigError when sizes do not divide."""
    stage_ranks = share("ranks of a megatron trainer over its pipeline stages", len(places), parallel.pipeline)
    share("ranks of a pipeline stage over tensor x context", stage_ranks, parallel.tensor * parallel.context)
    if shape.experts:
        experts = parallel.expert_tensor * parallel.expert
        share("ranks of a pipeline stage over expert tensor x expert", stage_ranks, experts)
    elif parallel.expert > 1:
        raise ConfigError(f"expert parallelism of {parallel.expert} needs a model with experts; this one has none")
    parameters = shape.parameters()
    holdings = tuple(
        _Rank(shape, parallel, index % parallel.tensor, index // stage_ranks, index % stage_ranks).hold(
            parameters, place
        )
        for index, place in enumerate(places)
    )
    data = stage_ranks // (parallel.tensor * parallel.context)
    return Layout(f"{parallel.name} dp{data}", {p.name: p for p in parameters}, holdings)


class _Rank:
    """One rank's part of every parameter."""

    def __init__(self, shape: ModelShape, parallel: MegatronParallel, tp: int, pp: int, in_stage: int) -> None:
        self.shape, self.parallel, self.tp, self.pp = shape, parallel, tp, pp
        self.expert_tensor = parallel.expert_tensor
        self.etp = in_stage % self.expert_tensor
        local_experts = share("experts", shape.experts, parallel.expert)
        first = in_stage // self.expert_tensor % parallel.expert * local_experts
        self.experts = range(first, first + local_experts)
        chunks = parallel.pipeline * parallel.virtual_pipeline
        self.chunk_layers = share("layers over pipeline x virtual pipeline", shape.layers, chunks)
        self.padded_vocab = parallel.padded_vocab or padded_vocabulary(shape.vocab, parallel.tensor)
        if self.padded_vocab < shape.vocab:
            raise ConfigError(f"padded_vocab = {self.padded_vocab} is less than the vocabulary of {shape.vocab}")

    def hold(self, parameters: Sequence[Parameter], place: Place) -> Holding:
        shelf = Shelf(place)
        for parameter in parameters:
            if parameter.layer < 0:
                self._outside(shelf, parameter)
            else:
                chunk, stage = divmod(parameter.layer // self.chunk_layers, self.parallel.pipeline)
                if stage == self.pp:
                    self._layer(shelf, parameter, f"{chunk}.decoder.layers.{parameter.layer % self.chunk_layers}.")
        return shelf.holding()

    def _outside(self, shelf: Shelf, parameter: Parameter) -> None:
        first, last = self.pp == 0, self.pp == self.parallel.pipeline - 1
        last_chunk = self.parallel.virtual_pipeline - 1
        if parameter.part is Part.FINAL_NORM:
            if last:
                shelf.whole(parameter, f"{last_chunk}.decoder.final_layernorm.weight")
            return
        names = list[str]()
        embeds = parameter.part is Part.EMBEDDING
        if embeds and first:
            names.append("0.embedding.word_embeddings.weight")
        # mcore keeps a second copy of a tied embedding where the head is on another stage than the embedding
        if last and (not embeds or (self.shape.tied and self.parallel.pipeline > 1)):
            names.append(f"{last_chunk}.output_layer.weight")
        for name in names:
            shelf.vocabulary(parameter, name, self.padded_vocab, self.tp, self.parallel.tensor)

    def _layer(self, shelf: Shelf, parameter: Parameter, prefix: str) -> None:
        part = parameter.part
        name = f"{prefix}{self._layer_name(parameter)}"
        if parameter.expert >= 0 and parameter.expert not in self.experts:
            return
        rank, ranks = (self.etp, self.expert_tensor) if parameter.expert >= 0 else (self.tp, self.parallel.tensor)
        if part in (Part.GATE, Part.UP):
            width = share(parameter.name, self.shape.ff, ranks)
            shelf.rows(parameter, rank * width, width, name, 2 * width, width if part is Part.UP else 0)
        elif part in (Part.OUTPUT, Part.DOWN):
            shelf.split(parameter, name, 1, rank, ranks)
        elif part in (Part.QUERY, Part.KEY, Part.VALUE):
            total = (self.shape.heads + 2 * self.shape.kv_heads) * self.shape.head_dim
            width = share(f"rows of {name}", total, ranks)
            for first, count, start in self._qkv(part):
                low, high = max(start, rank * width), min(start + count, (rank + 1) * width)
                if low < high:
                    shelf.rows(parameter, first + low - start, high - low, name, width, low - rank * width)
        else:
            shelf.whole(parameter, name)

    def _layer_name(self, parameter: Parameter) -> str:
        part, kind = parameter.part, parameter.kind
        if self.parallel.transformer_engine:
            if part is Part.INPUT_NORM:
                return "self_attention.linear_qkv.layer_norm_weight"
            if part is Part.POST_NORM and not self.shape.experts:
                return "mlp.linear_fc1.layer_norm_weight"
        name = _LAYER_NAMES[part]
        if parameter.expert < 0:
            return f"{name}.{kind}"
        local = parameter.expert - self.experts.start
        linear = name.removeprefix("mlp.")
        if self.parallel.grouped_experts:
            return f"mlp.experts.{linear}.{kind}{local}"
        return f"mlp.experts.local_experts.{local}.{linear}.{kind}"

    def _qkv(self, part: Part) -> Iterator[tuple[int, int, int]]:
        """(first row in the parameter, rows, first row in the fused tensor) for every key/value head: the fused tensor
        is the queries of a head's group, its key, its value, then the next head's."""
        dim, group = self.shape.head_dim, self.shape.heads // self.shape.kv_heads
        before = {Part.QUERY: 0, Part.KEY: group, Part.VALUE: group + 1}[part]
        count = group * dim if part is Part.QUERY else dim
        for head in range(self.shape.kv_heads):
            yield head * count, count, (head * (group + 2) + before) * dim
