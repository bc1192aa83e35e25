"""Layouts: the names and shapes of transformers' own models, and where megatron-core and vLLM put each parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from asyncrlhf.errors import ConfigError
from asyncrlhf.weights.layout import Layout, places
from asyncrlhf.weights.megatron_layout import MegatronParallel, megatron_layout
from asyncrlhf.weights.shapes import ModelShape, Part, model_shape, register_family
from asyncrlhf.weights.torch_layout import fsdp_layout, replicated_layout
from asyncrlhf.weights.vllm_layout import VllmParallel, vllm_layout
from tests.unit.reshard_scene import DENSE, MIXTURE, full, held
from tests.unit.test_torch_imports import python

NUMBERS = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_names_and_shapes_are_those_of_transformers(family: str, tied: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: dict[str, Any] = {**NUMBERS, **(MIXED if family == "qwen3_moe" else {}), "tie_word_embeddings": tied}
    known = AutoConfig.for_model(family, **config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for read in ({"model_type": family, **config}, known.to_dict()):
        (holding,) = replicated_layout(model_shape(read), places(1)).holdings
        assert {name: tensor.shape for name, tensor in holding.tensors.items()} == expected


def test_layouts_and_plans_load_no_torch() -> None:
    code = """
import sys
import asyncrlhf.weights.torch_layout, asyncrlhf.weights.megatron_layout, asyncrlhf.weights.zero_redundancy
import asyncrlhf.weights.plan
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""
    assert python(code) == "[]"


def holdings(layout: Layout, shape: ModelShape) -> list[dict[str, Any]]:
    model = full(shape)
    return [held(holding, model) for holding in layout.holdings]


def test_fsdp_shards_rows_unevenly_and_some_ranks_get_none() -> None:
    shards = holdings(fsdp_layout(DENSE, places(6), shards=3), DENSE)
    norm, embedding = "model.norm.weight", "model.embed_tokens.weight"
    assert [shard[embedding].shape for shard in shards[:3]] == [(44, 16), (44, 16), (43, 16)]
    assert (np.concatenate([shard[embedding] for shard in shards[:3]]) == full(DENSE)[embedding]).all()
    assert all((a[name] == b[name]).all() for a, b in zip(shards[:3], shards[3:], strict=True) for name in a)
    tiny = "model.layers.0.self_attn.q_norm.weight"  # 2 rows over 3 shards
    assert [shard[tiny].shape for shard in shards[:3]] == [(1,), (1,), (0,)]
    padded = holdings(fsdp_layout(DENSE, places(3), padded=True), DENSE)
    assert padded[2][embedding].shape == (44, 16)
    assert (padded[2][embedding][-1] == -1).all()
    assert [shard[norm].shape for shard in padded] == [(6,), (6,), (6,)]


def test_fsdp_shards_experts_by_expert() -> None:
    shards = holdings(fsdp_layout(MIXTURE, places(2)), MIXTURE)
    model, prefix = full(MIXTURE), "model.layers.1.mlp.experts."
    both = np.concatenate([shard[prefix + "gate_up_proj"] for shard in shards])
    for expert in range(4):
        gate, up = (model[f"{prefix}{expert}.{name}_proj.weight"] for name in ("gate", "up"))
        assert (both[expert] == np.concatenate([gate, up])).all()


def test_megatron_fuses_queries_keys_and_values_per_key_value_head() -> None:
    layout = megatron_layout(DENSE, MegatronParallel(tensor=2, pipeline=2), places(4))
    first, second, last, _ = holdings(layout, DENSE)
    model, name = full(DENSE), "self_attn.{}_proj.{}"
    q, k, v = (model["model.layers.0." + name.format(letter, "weight")] for letter in "qkv")
    fused = [np.concatenate([q[4 * g : 4 * g + 4], k[2 * g : 2 * g + 2], v[2 * g : 2 * g + 2]]) for g in range(4)]
    local = "0.decoder.layers.0.self_attention.linear_qkv.weight"
    assert (first[local] == np.concatenate(fused[:2])).all()
    assert (second[local] == np.concatenate(fused[2:])).all()
    gate, up = (model[f"model.layers.2.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert (last["0.decoder.layers.0.mlp.linear_fc1.weight"] == np.concatenate([gate[:12], up[:12]])).all()
    assert first["0.embedding.word_embeddings.weight"].shape == (128, 16)  # 131 rows padded to 256
    assert (second["0.embedding.word_embeddings.weight"][3:] == -1).all()
    assert "0.output_layer.weight" in last
    assert "0.output_layer.weight" not in first


def test_megatron_splits_a_group_when_there_are_more_tensor_ranks_than_key_value_heads() -> None:
    wide = holdings(megatron_layout(DENSE, MegatronParallel(tensor=8), places(8)), DENSE)
    whole = holdings(megatron_layout(DENSE, MegatronParallel(), places(1)), DENSE)
    name = "0.decoder.layers.3.self_attention.linear_qkv.weight"
    assert (np.concatenate([rank[name] for rank in wide]) == whole[0][name]).all()


def test_megatron_keeps_a_tied_embedding_on_the_first_and_the_last_stage() -> None:
    tied = replace(DENSE, tied=True)
    first, last = holdings(megatron_layout(tied, MegatronParallel(pipeline=2), places(2)), tied)
    assert (first["0.embedding.word_embeddings.weight"] == last["0.output_layer.weight"]).all()
    (only,) = holdings(megatron_layout(tied, MegatronParallel(), places(1)), tied)
    assert "0.output_layer.weight" not in only


def test_megatron_interleaves_virtual_stages() -> None:
    layout = megatron_layout(DENSE, MegatronParallel(pipeline=2, virtual_pipeline=2), places(2))
    first, last = holdings(layout, DENSE)
    model, norm = full(DENSE), "decoder.layers.0.input_layernorm.weight"
    found = [first["0." + norm], last["0." + norm], first["1." + norm], last["1." + norm]]
    for layer, weight in enumerate(found):
        assert (weight == model[f"model.layers.{layer}.input_layernorm.weight"]).all()
    assert "0.embedding.word_embeddings.weight" in first
    assert "1.output_layer.weight" in last


def test_megatron_places_experts_apart_from_data_parallel_ranks() -> None:
    parallel = MegatronParallel(expert=2)
    ranks = holdings(megatron_layout(MIXTURE, parallel, places(4)), MIXTURE)
    model, local = full(MIXTURE), "0.decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"
    for rank, expert in enumerate((1, 3, 1, 3)):
        assert (ranks[rank][local] == model[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"]).all()
    grouped = holdings(megatron_layout(MIXTURE, replace(parallel, grouped_experts=True), places(4)), MIXTURE)
    assert (grouped[3]["0.decoder.layers.0.mlp.experts.linear_fc2.weight1"] == ranks[3][local]).all()


def test_transformer_engine_moves_norms_into_the_next_linear_layer() -> None:
    for shape, after in ((DENSE, "mlp.linear_fc1.layer_norm_weight"), (MIXTURE, "pre_mlp_layernorm.weight")):
        layout = megatron_layout(shape, MegatronParallel(transformer_engine=True), places(1))
        (names,) = (holding.tensors for holding in layout.holdings)
        assert "0.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
        assert f"0.decoder.layers.0.{after}" in names


def test_vllm_fuses_and_replicates_key_value_heads() -> None:
    ranks = holdings(vllm_layout(DENSE, VllmParallel(tensor=8), places(8)), DENSE)
    model, prefix = full(DENSE), "model.layers.1.self_attn."
    q, k, v = (model[f"{prefix}{letter}_proj.weight"] for letter in "qkv")
    for rank, tensors in enumerate(ranks):
        head = rank // 2
        expected = [q[2 * rank : 2 * rank + 2], k[2 * head : 2 * head + 2], v[2 * head : 2 * head + 2]]
        assert (tensors[f"{prefix}qkv_proj.weight"] == np.concatenate(expected)).all()
    assert ranks[0]["lm_head.weight"].shape == (24, 16)  # 131 rows padded to 192
    assert (ranks[6]["lm_head.weight"] == -1).all()


def test_vllm_holds_a_tied_embedding_on_the_last_stage_too() -> None:
    tied = replace(DENSE, tied=True)
    first, last = holdings(vllm_layout(tied, VllmParallel(pipeline=2), places(2)), tied)
    assert (first["model.embed_tokens.weight"] == last["model.embed_tokens.weight"]).all()
    assert "lm_head.weight" not in last
    open_first, open_last = holdings(vllm_layout(DENSE, VllmParallel(pipeline=2), places(2)), DENSE)
    assert "model.embed_tokens.weight" not in open_last
    assert "lm_head.weight" not in open_first


@pytest.mark.parametrize("expert", [False, True])
def test_vllm_stacks_experts(expert: bool) -> None:
    ranks = holdings(vllm_layout(MIXTURE, VllmParallel(tensor=2, expert=expert), places(2)), MIXTURE)
    model, prefix = full(MIXTURE), "model.layers.0.mlp.experts."
    gate, up, down = (model[f"{prefix}3.{name}_proj.weight"] for name in ("gate", "up", "down"))
    w13, w2 = (ranks[1][f"{prefix}routed_experts.{name}_weight"] for name in ("w13", "w2"))
    if expert:
        assert (w13[1] == np.concatenate([gate, up])).all()
        assert (w2[1] == down).all()
    else:
        assert (w13[3] == np.concatenate([gate[4:], up[4:]])).all()
        assert (w2[3] == down[:, 4:]).all()


def test_vllm_stages_that_do_not_divide() -> None:
    shape = replace(DENSE, layers=7)
    layout = vllm_layout(shape, VllmParallel(pipeline=4), places(4))
    counts = [sum(name.endswith("mlp.down_proj.weight") for name in holding.tensors) for holding in layout.holdings]
    assert counts == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: megatron_layout(DENSE, MegatronParallel(tensor=3), places(4)), "4 does not divide into 3"),
        (lambda: megatron_layout(DENSE, MegatronParallel(pipeline=3), places(3)), "layers .*4 does not divide into 3"),
        (lambda: megatron_layout(DENSE, MegatronParallel(expert=2), places(2)), "needs a model with experts"),
        (lambda: megatron_layout(MIXTURE, MegatronParallel(expert=3), places(3)), "experts: 4 .* 3 equal"),
        (lambda: megatron_layout(DENSE, MegatronParallel(padded_vocab=130), places(1)), "130 is less than .* 131"),
        (lambda: vllm_layout(DENSE, VllmParallel(tensor=3), places(3)), "attention heads .*8 does not divide into 3"),
        (lambda: vllm_layout(replace(DENSE, heads=36, kv_heads=6), VllmParallel(tensor=4), places(4)), "4 neither"),
        (lambda: fsdp_layout(DENSE, places(4), shards=3), "4 does not divide into 3"),
        (lambda: replace(DENSE, heads=6), "6 attention heads are not a multiple of 4"),
        (lambda: model_shape({"model_type": "unknown"}), "known are llama, qwen2"),
        (lambda: model_shape({"model_type": "llama", **NUMBERS, "attention_bias": True}), "attention_bias"),
        (lambda: model_shape({"model_type": "qwen3_moe", **NUMBERS, "decoder_sparse_step": 2}), "sparse_step = 2"),
    ],
)
def test_sizes_that_do_not_fit_are_named(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_family_is_added_with_one_call() -> None:
    register_family("narrow", lambda config, dtype: replace(DENSE, layers=int(config["depth"]), dtype=dtype))
    shape = model_shape({"model_type": "narrow", "depth": 3}, "float16")
    assert sum(parameter.part is Part.DOWN for parameter in shape.parameters()) == 3
    assert {parameter.dtype for parameter in shape.parameters()} == {"float16"}
