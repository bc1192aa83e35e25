"""Megatron layouts without megatron: which part of which Hugging Face tensor lies where, and sizes that do not fit."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrlhf.backends.megatron import families
from asyncrlhf.backends.megatron.families import Part, Piece
from asyncrlhf.backends.megatron.options import MegatronOptions
from asyncrlhf.backends.megatron.sizes import require_fits
from asyncrlhf.backends.torch.layout import Cut
from asyncrlhf.config.convert import convert
from asyncrlhf.config.groups import ROLES, MegatronTrain
from asyncrlhf.errors import ConfigError


def config(**changes: Any) -> Any:
    fields = {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 200,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    return SimpleNamespace(**fields | changes)


def parameters(ranks: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a rank's parameters of `config()`."""
    yield "embedding.word_embeddings.weight", (256 // ranks, 32)
    yield "output_layer.weight", (256 // ranks, 32)
    yield "decoder.final_layernorm.weight", (32,)
    layer = "decoder.layers.0."
    yield layer + "self_attention.linear_qkv.weight", (64 // ranks, 32)
    yield layer + "self_attention.linear_qkv.bias", (64 // ranks,)
    yield layer + "self_attention.linear_qkv.layer_norm_weight", (32,)
    yield layer + "self_attention.linear_proj.weight", (32, 32 // ranks)
    yield layer + "mlp.linear_fc1.weight", (96 // ranks, 32)
    yield layer + "mlp.linear_fc2.weight", (32, 48 // ranks)


WHOLE = {
    "model.embed_tokens.weight": 200,
    "lm_head.weight": 200,
    "model.norm.weight": 32,
    "model.layers.3.self_attn.q_proj.weight": 32,
    "model.layers.3.self_attn.k_proj.weight": 16,
    "model.layers.3.self_attn.v_proj.weight": 16,
    "model.layers.3.self_attn.q_proj.bias": 32,
    "model.layers.3.self_attn.k_proj.bias": 16,
    "model.layers.3.self_attn.v_proj.bias": 16,
    "model.layers.3.input_layernorm.weight": 32,
    "model.layers.3.self_attn.o_proj.weight": 32,
    "model.layers.3.mlp.gate_proj.weight": 48,
    "model.layers.3.mlp.up_proj.weight": 48,
    "model.layers.3.mlp.down_proj.weight": 48,
}
"""Hugging Face tensors -> their length along the dimension that is cut."""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_place_of_every_tensor_lies_on_one_rank(ranks: int, tied: bool) -> None:
    found: dict[str, set[tuple[int, int]]] = {}
    for rank in range(ranks):
        part = Part(rank=rank, ranks=ranks, config=config(tie_word_embeddings=tied))
        for name, shape in parameters(ranks):
            pieces = families.pieces(name, shape, part, lambda layer: layer + 3)
            places = sorted((piece.local, piece.local + piece.stop - piece.start) for piece in pieces)
            assert all(a[1] <= b[0] for a, b in pairwise(places)), name
            assert all(end <= shape[piece.dim] for piece in pieces for _, end in places), name
            for piece in pieces:
                found.setdefault(piece.name, set()).add((piece.start, piece.stop))
    expected = {name: size for name, size in WHOLE.items() if not (tied and name == "lm_head.weight")}
    for name, parts in found.items():
        whole = {(0, WHOLE[name])} if "norm" in name else parts
        assert parts == whole
        assert [start for start, _ in sorted(parts)] == [0, *(stop for _, stop in sorted(parts))][:-1]
        assert max(stop for _, stop in parts) == WHOLE[name]
    assert found.keys() == expected.keys()


def test_queries_keys_and_values_of_a_head_lie_together() -> None:
    part = Part(rank=1, ranks=2, config=config())
    q, k, v = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")
    assert families.pieces("decoder.layers.0.self_attention.linear_qkv.weight", (32, 32), part, int) == [
        Piece(q, 0, 16, 24, 0),
        Piece(k, 0, 8, 12, 8),
        Piece(v, 0, 8, 12, 12),
        Piece(q, 0, 24, 32, 16),
        Piece(k, 0, 12, 16, 24),
        Piece(v, 0, 12, 16, 28),
    ]


@pytest.mark.parametrize("name", ["local_experts.1.linear_fc1.weight", "linear_fc1.weight1"])
def test_experts_are_counted_over_all_ranks(name: str) -> None:
    part = Part(rank=0, ranks=1, config=config(model_type="qwen3_moe"))
    pieces = families.pieces(f"decoder.layers.0.mlp.experts.{name}", (24, 32), part, int, first_expert=2)
    assert pieces == [
        Piece("model.layers.0.mlp.experts.3.gate_proj.weight", 0, 0, 12, 0),
        Piece("model.layers.0.mlp.experts.3.up_proj.weight", 0, 0, 12, 12),
    ]


def test_an_architecture_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no table for model_type = 'mine'; it has llama, qwen2, qwen3, qwen3_moe"):
        families.fields(config(model_type="mine"))
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    families.register("mine", families.Family(fields=lambda config: {"add_qkv_bias": True}))
    assert families.fields(config(model_type="mine"))["add_qkv_bias"]


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({}, {"tensor_parallel": 3}, "tensor_parallel = 3 does not divide 4 key/value heads; use 1 or 2 or 4"),
        ({"intermediate_size": 45}, {"tensor_parallel": 2}, "does not divide 45 places of intermediate_size"),
        ({}, {"pipeline_parallel": 3}, "pipeline_parallel = 3 does not divide 4 layers; use 1 or 2 or 4"),
        (
            {},
            {"pipeline_parallel": 2, "virtual_pipeline": 4},
            r"pipeline_parallel \* virtual_pipeline = 8 does not divide 4 layers",
        ),
        ({}, {"expert_parallel": 2}, "expert_parallel = 2 does not divide 1 experts; use 1"),
        ({"num_experts": 4}, {"tensor_parallel": 2}, "4 experts takes sequence_parallel = true"),
        ({"model_type": "qwen3", "attention_bias": True}, {}, "attention_bias = True of this qwen3 model"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, {}, "rope_type = 'yarn'"),
        ({"hidden_act": "gelu"}, {}, "hidden_act = 'gelu'"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused(
    changes: dict[str, Any], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        require_fits(MegatronOptions(model="m", **sizes), config(**changes))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"sequence_parallel": True}, "tensor_parallel = 1 ranks; raise that"),
        ({"virtual_pipeline": 2}, "virtual_pipeline = 2 cuts the stages of pipeline_parallel = 1"),
        ({"data_parallel": 3, "expert_parallel": 2}, "expert_parallel = 2 does not divide the 3 ranks"),
        ({"tensor_parallel": 0}, "tensor_parallel = 0"),
        ({"tensor_paralel": 2}, "did you mean groups.policy.tensor_parallel"),
        ({"scratch": {"characters": "ab"}}, "model, scratch: both are set"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert({"backend": "megatron", "model": "m", **table}, ROLES["policy"], "groups.policy")


def test_the_table_of_the_readme_is_one() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    section = text[text.index("## Models too large for one rank") :]
    block = tomllib.loads(section[section.index("```toml") + 7 : section.index("```", section.index("```toml") + 7)])
    table = convert(block["groups"]["policy"], ROLES["policy"], "groups.policy")
    assert table.ranks == 8
    critic = convert(block["groups"]["policy"], ROLES["critic"], "groups.critic")
    assert critic.head == "value"


def test_a_table_says_how_many_ranks_it_takes() -> None:
    table = MegatronTrain(model="m", tensor_parallel=2, pipeline_parallel=2, data_parallel=3, expert_parallel=6)
    assert table.ranks == 12
    assert MegatronOptions(model="m", tensor_parallel=2, pipeline_parallel=2, data_parallel=3).ranks == 12


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    multiple=st.sampled_from([1, 2, 4, 8]),
    tokens=st.integers(1, 60),
)
def test_rows_may_be_filled_up_to_a_multiple(lengths: list[tuple[int, int]], multiple: int, tokens: int) -> None:
    prompts, answers = (np.asarray(column) for column in zip(*lengths, strict=True))
    parts = Cut(tokens=tokens, layout="packed", multiple=multiple).plan(prompts, answers, np.arange(len(lengths)))
    assert sorted(row for part in parts for row in part.rows) == list(range(len(lengths)))
    for part in parts:
        ends = [*part.start, part.width]
        needed = prompts[part.rows] + answers[part.rows] - 1
        for (start, end), length in zip(pairwise(ends), needed, strict=True):
            assert end - start == -(-length // multiple) * multiple
        assert len(part.rows) == 1 or part.width <= tokens
