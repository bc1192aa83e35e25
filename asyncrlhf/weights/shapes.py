"""What parameters a model has, from a few numbers: Hugging Face names, full shapes, and how each may be split.

A family that is not here is one call: `register_family("my_model", reader)`, where `reader` makes a ModelShape (or a
subclass with its own `parameters`) of what stands in the model's config.json.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Literal

from msgspec.structs import replace

from asyncrlhf.errors import ConfigError
from asyncrlhf.messages.samples import Message

__all__ = ("BYTES", "Dtype", "ModelShape", "Parameter", "Part", "model_shape", "register_family")

Dtype = Literal["float32", "bfloat16", "float16"]
BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element."""


class Part(enum.Enum):
    """What a parameter is for, which decides how an engine splits it and what it is fused with."""

    EMBEDDING = "embedding"
    HEAD = "head"
    FINAL_NORM = "final_norm"
    INPUT_NORM = "input_norm"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    QUERY_NORM = "query_norm"
    KEY_NORM = "key_norm"
    OUTPUT = "output"
    POST_NORM = "post_norm"
    ROUTER = "router"
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    OTHER = "other"
    """Said by an engine that knows its own parameters, and asks for no split."""


class Parameter(Message, frozen=True):
    """One tensor of a Hugging Face checkpoint.

    Example: Parameter(name="model.layers.3.mlp.gate_proj.weight", shape=(1728, 640), dtype="bfloat16",
    part=Part.GATE, layer=3).
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    part: Part
    layer: int = -1
    """Which layer it belongs to; -1: before or after all of them."""
    expert: int = -1
    """Which expert of its layer it belongs to; -1: to none."""

    @property
    def kind(self) -> str:
        """The last word of its name, "weight" or "bias"."""
        return self.name.rpartition(".")[2]

    @property
    def byte_count(self) -> int:
        count = BYTES[self.dtype]
        for length in self.shape:
            count *= length
        return count


class ModelShape(Message, frozen=True):
    """The numbers that decide every parameter of a decoder of the Llama kind, dense or with experts in every layer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    """Width of the feed-forward layer; with experts, of each of them."""
    vocab: int
    """Rows of the embedding in the checkpoint; engines may add padding, which no checkpoint holds."""
    tied: bool = False
    """The head is the embedding."""
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    """Experts in every layer; 0: a dense model."""
    dtype: Dtype = "bfloat16"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} attention heads are not a multiple of {self.kv_heads} key/value heads, as grouped-query "
                "attention needs"
            )

    @property
    def byte_count(self) -> int:
        """M: bytes of all parameters, each once."""
        return sum(parameter.byte_count for parameter in self.parameters())

    def parameters(self) -> tuple[Parameter, ...]:
        """In the order of the computation, which is also the order in which they are moved."""
        embedding = self._parameter("model.embed_tokens.weight", Part.EMBEDDING, self.vocab, self.hidden)
        found = [embedding]
        for layer in range(self.layers):
            found += self._layer(layer)
        found.append(self._parameter("model.norm.weight", Part.FINAL_NORM, self.hidden))
        if not self.tied:
            found.append(self._parameter("lm_head.weight", Part.HEAD, self.vocab, self.hidden))
        return tuple(found)

    def _parameter(self, name: str, part: Part, *shape: int, layer: int = -1, expert: int = -1) -> Parameter:
        return Parameter(name=name, shape=shape, dtype=self.dtype, part=part, layer=layer, expert=expert)

    def _layer(self, layer: int) -> list[Parameter]:
        prefix, found = f"model.layers.{layer}.", list[Parameter]()

        def add(name: str, part: Part, *shape: int, expert: int = -1) -> None:
            found.append(self._parameter(prefix + name, part, *shape, layer=layer, expert=expert))

        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        add("input_layernorm.weight", Part.INPUT_NORM, self.hidden)
        for letter, part, rows in (("q", Part.QUERY, queries), ("k", Part.KEY, keys), ("v", Part.VALUE, keys)):
            add(f"self_attn.{letter}_proj.weight", part, rows, self.hidden)
            if self.qkv_bias:
                add(f"self_attn.{letter}_proj.bias", part, rows)
        if self.qk_norm:
            add("self_attn.q_norm.weight", Part.QUERY_NORM, self.head_dim)
            add("self_attn.k_norm.weight", Part.KEY_NORM, self.head_dim)
        add("self_attn.o_proj.weight", Part.OUTPUT, self.hidden, queries)
        add("post_attention_layernorm.weight", Part.POST_NORM, self.hidden)
        if self.experts:
            add("mlp.gate.weight", Part.ROUTER, self.experts, self.hidden)
        for expert in range(self.experts) if self.experts else (-1,):
            inside = f"mlp.experts.{expert}." if self.experts else "mlp."
            add(inside + "gate_proj.weight", Part.GATE, self.ff, self.hidden, expert=expert)
            add(inside + "up_proj.weight", Part.UP, self.ff, self.hidden, expert=expert)
            add(inside + "down_proj.weight", Part.DOWN, self.hidden, self.ff, expert=expert)
        return found


Reader = Callable[[Mapping[str, Any], Dtype], ModelShape]
"""Makes a shape of a config.json and the type that the parameters are moved in."""
_FAMILIES: dict[str, Reader] = {}


def register_family(model_type: str, reader: Reader) -> None:
    """Teach every layout a family: `model_type` is the one of its config.json."""
    _FAMILIES[model_type] = reader


def model_shape(config: Mapping[str, Any], dtype: Dtype = "bfloat16") -> ModelShape:
    """The shape of the model that this config.json describes. Raises ConfigError for a family nobody registered."""
    model_type = str(config.get("model_type", ""))
    if model_type not in _FAMILIES:
        raise ConfigError(
            f"model_type = {model_type!r} has no table of parameters; known are {', '.join(sorted(_FAMILIES))}. "
            "Others are added with asyncrlhf.weights.shapes.register_family"
        )
    return _FAMILIES[model_type](config, dtype)


def _decoder(config: Mapping[str, Any], dtype: Dtype) -> ModelShape:
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ConfigError(f"{key} = true has no place in the table of {config['model_type']}; register a family")
    heads = int(config["num_attention_heads"])
    return ModelShape(
        hidden=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        ff=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=dtype,
    )


def _mixture(config: Mapping[str, Any], dtype: Dtype) -> ModelShape:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            f"mlp_only_layers = {config.get('mlp_only_layers')} and decoder_sparse_step = "
            f"{config.get('decoder_sparse_step')} mix dense layers with experts; the table has experts in every layer"
        )
    experts = config.get("num_experts") or config["num_local_experts"]  # the latter is what transformers 5 writes
    width = int(config["moe_intermediate_size"])
    return replace(_decoder(config, dtype), qk_norm=True, experts=int(experts), ff=width)


register_family("llama", _decoder)
register_family("qwen2", lambda config, dtype: replace(_decoder(config, dtype), qkv_bias=True))
register_family("qwen3", lambda config, dtype: replace(_decoder(config, dtype), qk_norm=True))
register_family("qwen3_moe", _mixture)
