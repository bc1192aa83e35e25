"""What a model weighs: parameters, KV bytes and work per token, from its shape. Pure arithmetic."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncrlhf.config.bounds import Count, Name, Positive
from asyncrlhf.errors import ConfigError

__all__ = ("SHAPES", "ModelSpec", "Role", "Shape", "named", "read_directory", "shape_of")

Role = Literal["policy", "critic", "reference", "reward"]
TRAINED: tuple[Role, ...] = ("policy", "critic")


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A decoder-only transformer with gated feed-forward layers, grouped-query attention and, maybe, experts.

    Example: Shape(name="llama-7b", layers=32, hidden=4096, ffn=11008, heads=32, kv_heads=32) has 6.74e9 parameters and
    524,288 bytes (512 KiB) of KV cache per token in 16 bits.
    """

    name: Name = "custom"
    layers: Positive
    hidden: Positive
    """Width of the residual stream, h."""
    ffn: Positive
    """Inner width of the feed-forward layer, of one expert where there are any."""
    heads: Positive
    kv_heads: Positive
    vocab: Positive = 32000
    head_dim: Positive | None = None
    """Left out: hidden / heads."""
    experts: Count = 0
    """Routed experts per layer; 0: a dense model."""
    experts_active: Count = 0
    """Experts that one token visits, shared ones included."""
    tied: bool = False
    """Input and output embedding are one matrix."""

    def __post_init__(self) -> None:
        if self.head_dim is None and self.hidden % self.heads:
            raise ConfigError(f"heads = {self.heads} do not divide hidden = {self.hidden} of {self.name}; set head_dim")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"kv_heads = {self.kv_heads} do not divide heads = {self.heads} of {self.name}; correct one of the two"
            )
        if (self.experts > 0) != (self.experts_active > 0) or self.experts_active > self.experts:
            raise ConfigError(
                f"experts_active = {self.experts_active} of experts = {self.experts} in {self.name}; set both to 0, or "
                "the first to at most the second"
            )

    @cached_property
    def width_kv(self) -> int:
        """Columns of the key (or value) projection."""
        return self.kv_heads * (self.head_dim or self.hidden // self.heads)

    @cached_property
    def attention_params(self) -> int:
        """Of one layer: 2 h^2 + 2 h kv d where heads * d = h."""
        width = self.heads * (self.head_dim or self.hidden // self.heads)
        return 2 * self.hidden * width + 2 * self.hidden * self.width_kv

    @cached_property
    def expert_params(self) -> int:
        """Of one expert (or the one feed-forward) of one layer: 3 h i."""
        return 3 * self.hidden * self.ffn

    @cached_property
    def embedding_params(self) -> int:
        return self.vocab * self.hidden

    @cached_property
    def routed_params(self) -> int:
        """All that expert parallelism can split; 0 for a dense model."""
        return self.layers * self.experts * self.expert_params

    @cached_property
    def params(self) -> int:
        """P, norms left out: L (2 h^2 + 2 h kv d + 3 h i) + 2 V h; with experts, all of them and their router."""
        inner = self.experts * (self.expert_params + self.hidden) if self.experts else self.expert_params
        embeddings = self.embedding_params * (1 if self.tied else 2)
        return self.layers * (self.attention_params + inner) + embeddings

    @cached_property
    def active_params(self) -> int:
        """Parameters that one token meets in a matrix product, without both embeddings."""
        inner = max(1, self.experts_active) * self.expert_params + self.experts * self.hidden
        return self.layers * (self.attention_params + inner)

    @cached_property
    def kv_bytes(self) -> int:
        """Of KV cache per token, in 16 bits: 4 L kv d."""
        return 4 * self.layers * self.width_kv

    def touched_params(self, tokens: float) -> float:
        """Parameters read to decode `tokens` sequences one token: with experts, those that at least one is sent to."""
        dense = self.layers * (self.attention_params + self.experts * self.hidden) + self.embedding_params
        if not self.experts:
            return dense + self.layers * self.expert_params
        missed = (1 - self.experts_active / self.experts) ** tokens
        return dense + self.routed_params * (1 - missed)


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A model in its role. Example: ModelSpec(role="critic", shape=SHAPES["llama-13b"]) is trained and gives values."""

    role: Role
    shape: Shape
    lora_rank: int = 0
    """Rank of adapters that are trained instead of the weights; 0: the weights are."""

    @property
    def trained(self) -> bool:
        return self.role in TRAINED

    @property
    def scalar(self) -> bool:
        """One value per token instead of logits."""
        return self.role in ("critic", "reward")

    @cached_property
    def params(self) -> int:
        """P of this role: a value head replaces the output embedding."""
        shape = self.shape
        return shape.params - (shape.embedding_params if self.scalar and not shape.tied else 0)

    @cached_property
    def trained_params(self) -> int:
        """Those with a gradient and optimizer state: adapters count two matrices of `lora_rank` per projection."""
        if not self.trained:
            return 0
        if not self.lora_rank:
            return self.params
        shape = self.shape
        width = shape.attention_params // (2 * shape.hidden) - shape.width_kv  # columns of the query projection
        attention = 2 * (shape.hidden + width) + 2 * (shape.hidden + shape.width_kv)
        inner = max(1, shape.experts) * 3 * (shape.hidden + shape.ffn)
        return shape.layers * self.lora_rank * (attention + inner)

    def forward_flops(self, length: float) -> float:
        """Per token at sequence length `length`, causal attention: 2 (P - V h) + 2 L h s."""
        shape = self.shape
        head = 0 if self.scalar else shape.embedding_params
        return 2 * (shape.active_params + head) + 2 * shape.layers * shape.hidden * length


def _shape(name: str, *sizes: int, **others: Any) -> Shape:
    layers, hidden, ffn, heads, kv_heads = sizes
    return Shape(name=name, layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, **others)


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        _shape("llama-7b", 32, 4096, 11008, 32, 32),
        _shape("llama-13b", 40, 5120, 13824, 40, 40),
        _shape("llama-34b", 48, 8192, 22016, 64, 8),
        _shape("llama-70b", 80, 8192, 28672, 64, 8),
        _shape("qwen2.5-0.5b", 24, 896, 4864, 14, 2, vocab=151936, tied=True),
        _shape("qwen2.5-1.5b", 28, 1536, 8960, 12, 2, vocab=151936, tied=True),
        _shape("qwen2.5-7b", 28, 3584, 18944, 28, 4, vocab=152064),
        _shape("qwen2.5-14b", 48, 5120, 13824, 40, 8, vocab=152064),
        _shape("qwen2.5-32b", 64, 5120, 27648, 40, 8, vocab=152064),
        _shape("qwen2.5-72b", 80, 8192, 29568, 64, 8, vocab=152064),
        _shape("qwen3-30b-a3b", 48, 2048, 768, 32, 4, head_dim=128, vocab=151936, experts=128, experts_active=8),
        _shape("qwen3-235b-a22b", 94, 4096, 1536, 64, 4, head_dim=128, vocab=151936, experts=128, experts_active=8),
        _shape("moe-400b", 52, 6144, 2560, 96, 8, head_dim=128, vocab=151936, experts=160, experts_active=8),
    )
}
"""Shapes by name. `moe-400b` is of no released model: a mixture of experts of 403e9 parameters, 30e9 of them active."""


def named(key: str, name: str) -> Shape:
    """The shape called `name`. Raises ConfigError, which names `key` and the nearest known name."""
    if name in SHAPES:
        return SHAPES[name]
    close = difflib.get_close_matches(name, SHAPES, 1)
    hint = f'did you mean "{close[0]}"?' if close else f"known: {', '.join(SHAPES)}; or set `directory`, or `shape`"
    raise ConfigError(f'{key} = "{name}" is not a known shape; {hint}')


class _File(msgspec.Struct, kw_only=True):
    """The keys of a Hugging Face config.json that say the shape."""

    model_type: str = "custom"
    num_hidden_layers: Annotated[int, Meta(ge=1)]
    hidden_size: Annotated[int, Meta(ge=1)]
    intermediate_size: Annotated[int, Meta(ge=1)]
    num_attention_heads: Annotated[int, Meta(ge=1)]
    vocab_size: Annotated[int, Meta(ge=1)]
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    n_shared_experts: int | None = None
    moe_intermediate_size: int | None = None
    tie_word_embeddings: bool = False
    kv_lora_rank: int | None = None


def read_directory(key: str, directory: str) -> Shape:
    """The shape in the config.json of a Hugging Face directory. Raises ConfigError, which names `key`, for a file that
    is not there, is not of a decoder-only transformer, or describes compressed KV (not modelled)."""
    path = os.path.join(directory, "config.json")
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError as problem:
        raise ConfigError(f'{key} = "{directory}": {path} cannot be read ({problem.strerror})') from None
    return shape_of(f"{key}: {path}", raw)


def shape_of(source: str, raw: bytes) -> Shape:
    """The shape that the JSON text of a Hugging Face configuration says. Raises ConfigError, which names `source`."""
    try:
        found = msgspec.json.decode(raw, type=_File)
    except msgspec.DecodeError as problem:
        raise ConfigError(f"{source} does not say a shape ({problem}); set `shape`") from None
    if found.kv_lora_rank:
        raise ConfigError(
            f"{source} has kv_lora_rank = {found.kv_lora_rank}, and compressed KV (latent attention) is not modelled; "
            "set `shape` to a transformer of the same size"
        )
    experts = found.num_experts or found.num_local_experts or found.n_routed_experts or 0
    shared = found.n_shared_experts or 0
    return Shape(
        name=found.model_type,
        layers=found.num_hidden_layers,
        hidden=found.hidden_size,
        ffn=(found.moe_intermediate_size if experts else None) or found.intermediate_size,
        heads=found.num_attention_heads,
        kv_heads=found.num_key_value_heads or found.num_attention_heads,
        head_dim=found.head_dim,
        vocab=found.vocab_size,
        experts=experts + shared if experts else 0,
        experts_active=(found.num_experts_per_tok or 1) + shared if experts else 0,
        tied=found.tie_word_embeddings,
    )
