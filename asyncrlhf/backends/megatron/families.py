"""Architectures: what megatron-core has to build for a Hugging Face configuration, and where each part of a parameter
lies in the Hugging Face tensors. Further ones are added with `register`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncrlhf.errors import ConfigError

__all__ = ("FAMILIES", "Family", "Part", "Piece", "family", "fields", "pieces", "register")


class Piece(NamedTuple):
    """A part of a Hugging Face tensor that lies in a parameter of a rank: along dimension `dim`, places `start` to
    `stop` of the former are places `local` and following of the latter; along all others both are whole.

    Example: Piece("model.layers.3.mlp.up_proj.weight", 0, 64, 128, 64): the second half of a gated projection.
    """

    name: str
    dim: int
    start: int
    stop: int
    local: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank holds of a parameter: tensor parallel part `rank` of `ranks`, of a model with this Hugging Face
    configuration."""

    rank: int
    ranks: int
    config: Any
    value_head: bool = False

    @property
    def head_size(self) -> int:
        return getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads

    def share(self, total: int) -> tuple[int, int]:
        """(first, end) of an even share of `total` places."""
        size = total // self.ranks
        return self.rank * size, (self.rank + 1) * size


Rule = Callable[[Part, tuple[int, ...], tuple[str, ...]], list[Piece]]
"""(part, shape of the parameter, Hugging Face names) -> pieces."""


def whole(part: Part, shape: tuple[int, ...], names: tuple[str, ...]) -> list[Piece]:
    """The same on every rank."""
    return [Piece(names[0], 0, 0, shape[0])]


def rows(part: Part, shape: tuple[int, ...], names: tuple[str, ...]) -> list[Piece]:
    """Tensors cut along dimension 0, one behind the other: gate and up projection."""
    size = shape[0] // len(names)
    return [
        Piece(name, 0, part.rank * size, (part.rank + 1) * size, number * size) for number, name in enumerate(names)
    ]


def columns(part: Part, shape: tuple[int, ...], names: tuple[str, ...]) -> list[Piece]:
    """A tensor cut along dimension 1."""
    return [Piece(names[0], 1, part.rank * shape[1], (part.rank + 1) * shape[1])]


def vocabulary(part: Part, shape: tuple[int, ...], names: tuple[str, ...]) -> list[Piece]:
    """One row per token, of which the last rank may have fewer, or none: the rest is padding."""
    start = part.rank * shape[0]
    stop = min(start + shape[0], part.config.vocab_size)
    return [Piece(names[0], 0, start, stop)] if start < stop else []


def attention(part: Part, shape: tuple[int, ...], names: tuple[str, ...]) -> list[Piece]:
    """Queries, key and value of one key/value head after those of another."""
    query, key, value = names
    size = part.head_size
    queries = part.config.num_attention_heads // part.config.num_key_value_heads * size
    found: list[Piece] = []
    place = 0
    for group in range(*part.share(part.config.num_key_value_heads)):
        for name, length in ((query, queries), (key, size), (value, size)):
            found.append(Piece(name, 0, group * length, (group + 1) * length, place))
            place += length
    return found


LAYER: Mapping[str, tuple[Rule, tuple[str, ...]]] = {
    "input_layernorm.weight": (whole, ("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": (whole, ("post_attention_layernorm.weight",)),
    "self_attention.linear_qkv.weight": (attention, tuple(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_qkv.bias": (attention, tuple(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "self_attention.q_layernorm.weight": (whole, ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": (whole, ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": (columns, ("self_attn.o_proj.weight",)),
    "mlp.linear_fc1.weight": (rows, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": (columns, ("mlp.down_proj.weight",)),
    "mlp.router.weight": (whole, ("mlp.gate.weight",)),
    "mlp.experts.linear_fc1.weight": (rows, ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")),
    "mlp.experts.linear_fc2.weight": (columns, ("mlp.experts.{}.down_proj.weight",)),
}
"""Parameter of a layer -> how it is cut, and the Hugging Face names within the layer; {} is the expert's number."""
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Names of norms that Transformer Engine keeps in the linear layer behind them."""
EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12])\.weight|(linear_fc[12])\.weight(\d+))")


def _dense(config: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture, by its Hugging Face `model_type`."""

    fields: Callable[[Any], dict[str, Any]] = _dense
    """Fields of megatron-core's TransformerConfig beside those all have. Raises ConfigError for what it cannot do."""
    layer: Mapping[str, tuple[Rule, tuple[str, ...]]] = field(default_factory=lambda: LAYER)


def _llama(config: Any) -> dict[str, Any]:
    _require(config, "mlp_bias", False)
    _require(config, "attention_bias", False)
    return {}


def _qwen2(config: Any) -> dict[str, Any]:
    return {"add_qkv_bias": True}


def _qwen3(config: Any) -> dict[str, Any]:
    _require(config, "attention_bias", False)
    return {"qk_layernorm": True}


def _qwen3_moe(config: Any) -> dict[str, Any]:
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
    layers = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(config.num_hidden_layers)]
    return {
        **_qwen3(config),
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_layer_freq": layers,
    }


FAMILIES: dict[str, Family] = {
    "llama": Family(fields=_llama),
    "qwen2": Family(fields=_qwen2),
    "qwen3": Family(fields=_qwen3),
    "qwen3_moe": Family(fields=_qwen3_moe),
}
"""By `model_type`; see `register`."""


def register(model_type: str, found: Family) -> None:
    """Add an architecture, or replace one."""
    FAMILIES[model_type] = found


def family(config: Any) -> Family:
    """The architecture of a Hugging Face configuration. Raises ConfigError for one that is not known."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"megatron has no table for model_type = {config.model_type!r}; it has {', '.join(sorted(FAMILIES))}. Add "
            'one with families.register, or use backend = "torch"'
        )
    return FAMILIES[config.model_type]


def fields(config: Any) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig that follow from a Hugging Face configuration. Raises ConfigError."""
    _require(config, "hidden_act", "silu")
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": Part(rank=0, ranks=1, config=config).head_size,
        "ffn_hidden_size": config.intermediate_size,
        "layernorm_epsilon": config.rms_norm_eps,
        **family(config).fields(config),
    }


def rotary(config: Any) -> dict[str, Any]:
    """Arguments of GPTModel about rotary positions. Raises ConfigError for a scaling it does not have."""
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    found: dict[str, Any] = {"rotary_base": parameters["rope_theta"]}
    if kind == "default":
        return found
    usual = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind != "llama3" or any(parameters.get(name) != value for name, value in usual.items()):
        raise ConfigError(
            f"rope_type = {kind!r} of this model is not among what megatron-core computes: plain positions, and llama3 "
            "with its usual frequencies; use another backend"
        )
    return found | {"rope_scaling": True, "rope_scaling_factor": parameters["factor"]}


def pieces(
    name: str, shape: tuple[int, ...], part: Part, layer: Callable[[int], int], first_expert: int = 0
) -> list[Piece]:
    """Where the parameter `name` of a rank lies in Hugging Face tensors. `layer`: number of a layer in the whole model
    by its number on this rank. `first_expert`: number of this rank's first expert. Raises ConfigError for a name that
    the architecture's table lacks."""
    outside = {
        "embedding.word_embeddings.weight": (vocabulary, "model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": (whole, "model.norm.weight"),
        "output_layer.weight": (vocabulary, "lm_head.weight"),
    }
    if part.value_head and name.startswith("output_layer."):
        return whole(part, shape, (name.replace("output_layer", "score"),))
    if name == "output_layer.weight" and part.config.tie_word_embeddings:
        name = "embedding.word_embeddings.weight"
    if name in outside:
        rule, target = outside[name]
        return rule(part, shape, (target,))
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    inner = FUSED_NORMS.get(found[2], found[2]) if found else ""
    expert = ""
    if match := EXPERT.fullmatch(inner):
        inner = f"mlp.experts.{match[2] or match[3]}.weight"
        expert = str(first_expert + int(match[1] or match[4]))
    table = family(part.config).layer
    if found is None or inner not in table:
        raise ConfigError(f"megatron's table for model_type = {part.config.model_type!r} lacks parameter {name!r}")
    rule, targets = table[inner]
    prefix = f"model.layers.{layer(int(found[1]))}."
    return rule(part, shape, tuple(prefix + target.replace("{}", expert) for target in targets))


def _require(config: Any, name: str, value: Any) -> None:
    if getattr(config, name, value) != value:
        raise ConfigError(
            f"{name} = {getattr(config, name)!r} of this {config.model_type} model; megatron's table takes {value!r}. "
            'Use backend = "torch"'
        )
