"""From a Hugging Face configuration to megatron-core modules, empty, on the device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from asyncrlhf.backends.megatron import families
from asyncrlhf.backends.megatron.cpu import import_quietly
from asyncrlhf.backends.megatron.layers import Norm, PackedAttention, ValueHead
from asyncrlhf.backends.megatron.options import MegatronOptions
from asyncrlhf.weights.megatron_layout import padded_vocabulary

__all__ = ("build",)


def build(options: MegatronOptions, config: Any, device: torch.device) -> tuple[Any, list[Any]]:
    """(TransformerConfig, chunks): this rank's GPTModel, or several with a virtual pipeline, not initialised."""
    _name_missing_kernel()
    state = import_quietly("megatron.core.parallel_state")
    transformer = import_quietly("megatron.core.transformer").TransformerConfig(**_fields(options, config))
    chunks: list[Any] = []
    for chunk in range(options.virtual_pipeline):
        stage = chunk if options.virtual_pipeline > 1 else None
        first = state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        chunks.append(_chunk(options, config, transformer, device, stage, first=first, last=last))
    return transformer, chunks


def _fields(options: MegatronOptions, config: Any) -> dict[str, Any]:
    dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
    several = options.virtual_pipeline > 1
    found: dict[str, Any] = {
        **families.fields(config),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method": _leave,  # not perform_initialization = False, which would leave parameters without their marks
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "bf16": options.dtype == "bfloat16",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": options.tensor_parallel,
        "pipeline_model_parallel_size": options.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": options.virtual_pipeline if several else None,
        "context_parallel_size": options.context_parallel,
        "expert_model_parallel_size": options.expert_parallel,
        "expert_tensor_parallel_size": 1,  # experts are whole: more of them to a rank, or fewer, with expert_parallel
        "sequence_parallel": options.sequence_parallel,
        "variable_seq_lengths": options.pipeline_parallel > 1 and not several,
        "overlap_p2p_comm": several,  # with the default the interleaved schedule gives wrong numbers
        "batch_p2p_comm": not several,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": _uses_transformer_engine(options) and hasattr(config, "num_experts"),
    }
    if options.recompute == "full":
        found |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif options.recompute == "selective":
        found |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return found


@cache
def _name_missing_kernel() -> None:
    """Without Transformer Engine the router of experts asks for a function by a name that it does not have (0.16.1)."""
    routing = import_quietly("megatron.core.transformer.moe.moe_utils")
    if not hasattr(routing, "te_general_gemm"):
        routing.te_general_gemm = None


def _leave(parameter: Tensor) -> Tensor:
    """Weights are read later."""
    return parameter


def _uses_transformer_engine(options: MegatronOptions) -> bool:
    """Its attention reads packed rows in bfloat16 only; elsewhere megatron-core's own layers do, with ours."""
    return options.dtype == "bfloat16" and bool(import_quietly("megatron.core.models.gpt.gpt_layer_specs").HAVE_TE)


def _chunk(
    options: MegatronOptions,
    config: Any,
    transformer: Any,
    device: torch.device,
    stage: int | None,
    *,
    first: bool,
    last: bool,
) -> Any:
    model = import_quietly("megatron.core.models.gpt").GPTModel(
        config=transformer,
        transformer_layer_spec=_specification(options, transformer, stage),
        vocab_size=padded_vocabulary(config.vocab_size, options.tensor_parallel),
        max_sequence_length=config.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=bool(config.tie_word_embeddings) and options.head == "lm",
        position_embedding_type="rope",
        vp_stage=stage,
        **families.rotary(config),
    )
    if last and options.head == "value":
        model.output_layer = ValueHead(transformer)
    return model.to(device)  # in training mode, without which nothing is recomputed; there is no dropout to turn off


def _specification(options: MegatronOptions, transformer: Any, stage: int | None) -> Any:
    """Layers of one chunk, with attention and norms of our own where those of Transformer Engine are not used."""
    specs = import_quietly("megatron.core.models.gpt.gpt_layer_specs")
    engine = _uses_transformer_engine(options)
    block = specs.get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=engine, normalization="RMSNorm", vp_stage=stage
    )
    if engine:
        return block
    block.layer_norm = Norm
    block.layer_specs = _own(block.layer_specs)
    return block


def _own(layers: Sequence[Any]) -> list[Any]:
    """Copies of layer specifications."""
    found: list[Any] = []
    for layer in layers:
        own = copy.deepcopy(layer)
        parts, attention = own.submodules, own.submodules.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        attention.core_attention = PackedAttention
        if isinstance(attention.q_layernorm, type) and attention.q_layernorm.__name__ != "IdentityOp":
            attention.q_layernorm = attention.k_layernorm = Norm
        found.append(own)
    return found
