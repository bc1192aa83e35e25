"""Shapes: counts by arithmetic, from names and from Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrlhf.errors import ConfigError
from asyncrlhf.placement.models import SHAPES, ModelSpec, Shape, named, read_directory


@pytest.mark.parametrize(
    ("name", "params", "kib"),
    [("llama-7b", 6.74e9, 512), ("llama-13b", 13.02e9, 800), ("llama-34b", 33.74e9, 192), ("llama-70b", 68.98e9, 320)],
)
def test_row_1_parameters_and_kv_bytes(name: str, params: float, kib: int) -> None:
    """Source: arithmetic (placement.md 3.1). Exact to the digits it gives."""
    shape = SHAPES[name]
    assert round(shape.params / 1e9, 2) == params / 1e9
    assert shape.kv_bytes == kib * 1024
    layers, h, i, kv = shape.layers, shape.hidden, shape.ffn, shape.kv_heads
    head = h // shape.heads
    assert shape.params == layers * (2 * h * h + 2 * h * kv * head + 3 * h * i) + 2 * shape.vocab * h


@pytest.mark.parametrize(
    ("name", "params", "active"), [("qwen3-235b-a22b", 235e9, 22e9), ("qwen3-30b-a3b", 30.5e9, 3.3e9)]
)
def test_mixtures_of_experts_have_the_size_in_their_name(name: str, params: float, active: float) -> None:
    shape = SHAPES[name]
    assert shape.params == pytest.approx(params, rel=0.01)
    assert shape.active_params + 2 * shape.embedding_params == pytest.approx(active, rel=0.03)
    assert shape.touched_params(1) < shape.touched_params(64) < shape.params
    assert shape.touched_params(1e6) == pytest.approx(shape.params - shape.embedding_params, rel=1e-6)


def test_a_value_head_replaces_the_logits() -> None:
    shape = SHAPES["llama-13b"]
    critic = ModelSpec(role="critic", shape=shape)
    policy = ModelSpec(role="policy", shape=shape)
    assert policy.params - critic.params == shape.vocab * shape.hidden
    assert critic.forward_flops(2048) < policy.forward_flops(2048)


def test_adapters_train_a_small_part() -> None:
    shape = SHAPES["llama-7b"]
    adapters = ModelSpec(role="policy", shape=shape, lora_rank=16)
    # per layer: q, k, v, o of 4096 x 4096 and gate, up, down of 4096 x 11008
    assert adapters.trained_params == 32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    assert ModelSpec(role="reference", shape=shape).trained_params == 0


def test_a_directory_says_its_shape(tmp_path: Path) -> None:
    keys = {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    }
    (tmp_path / "config.json").write_text(json.dumps(keys))
    assert read_directory("models.policy.directory", str(tmp_path)).params == SHAPES["qwen2.5-7b"].params

    moe = keys | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(moe))
    shape = read_directory("models.policy.directory", str(tmp_path))
    assert (shape.experts, shape.experts_active, shape.ffn) == (8, 2, 512)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "does not say a shape"),
        ("not json", "does not say a shape"),
        (
            '{"num_hidden_layers":2,"hidden_size":8,"intermediate_size":8,"num_attention_heads":2,"vocab_size":9,'
            '"kv_lora_rank":4}',
            "kv_lora_rank = 4",
        ),
        (None, "cannot be read"),
    ],
)
def test_a_directory_without_a_shape_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=says) as refused:
        read_directory("models.policy.directory", str(tmp_path))
    assert "models.policy.directory" in str(refused.value)


def test_unknown_names_and_impossible_shapes() -> None:
    with pytest.raises(ConfigError, match='"llama-13B" is not a known shape; did you mean "llama-13b"?'):
        named("models.policy.name", "llama-13B")
    with pytest.raises(ConfigError, match="heads = 3 do not divide hidden = 8"):
        Shape(layers=1, hidden=8, ffn=8, heads=3, kv_heads=3)
    with pytest.raises(ConfigError, match="kv_heads = 3 do not divide heads = 4"):
        Shape(layers=1, hidden=8, ffn=8, heads=4, kv_heads=3)
    with pytest.raises(ConfigError, match="experts_active = 0 of experts = 4"):
        Shape(layers=1, hidden=8, ffn=8, heads=4, kv_heads=4, experts=4)
