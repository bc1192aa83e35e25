"""Which models the torch engines take, how they read them, and which they refuse by name."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM

from asyncrlhf.backends.torch import attention
from asyncrlhf.backends.torch.options import ScorerOptions, TrainerOptions
from asyncrlhf.backends.torch.score import TorchScorer
from asyncrlhf.backends.torch.train import TorchTrainer
from asyncrlhf.errors import ConfigError
from asyncrlhf.messages import ArrayColumn, TrainBatch, pack
from asyncrlhf.ops.advantages import GAE
from tests.integration.torch_scene import (
    ConstantLoss,
    PolicyLoss,
    ValueLoss,
    WrongShape,
    make_batch,
    make_model,
    reference_logprobs,
    trainer,
    weights,
    with_behaviour,
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_n5_trainer_scorer_and_a_plain_forward_agree(model: str, layout: str, temperature: float) -> None:
    batch = make_batch()
    options: dict[str, Any] = {"temperature": temperature, "layout": layout, "micro_batch_tokens": 50}
    found = trainer(model, **options).logprobs(batch)
    scored = TorchScorer(ScorerOptions(model=model, device="cpu", **options)).logprobs(batch)
    module = AutoModelForCausalLM.from_pretrained(model)
    for i, (start, ids) in enumerate(zip(batch.prompt_lengths, batch.columns["token_ids"].fetch(), strict=True)):
        expected = reference_logprobs(module, ids[:start].tolist(), ids[start:].tolist(), temperature)
        assert found[i].dtype == np.float32
        np.testing.assert_allclose(found[i], expected, atol=1e-5)
        np.testing.assert_allclose(scored[i], expected, atol=1e-5)


def test_a_reference_needs_nothing_but_the_tokens(model: str) -> None:
    batch = make_batch()
    scorer = TorchScorer(ScorerOptions(model=model, device="cpu", layout="shared"))
    expected = scorer.logprobs(batch)
    found = scorer.logprobs(dataclasses.replace(batch, columns={"token_ids": batch.columns["token_ids"]}))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_rows_without_an_answer_and_without_a_prompt(model: str) -> None:
    ids = tuple(np.arange(2, 2 + n, dtype=np.int32) for n in (3, 5, 4))
    batch = TrainBatch(
        train_step=0,
        prompt_lengths=(3, 2, 4),
        response_lengths=(0, 3, 0),
        unmasked=(0, 3, 0),
        rollouts=(0, 1, 2),
        columns={"token_ids": ArrayColumn("sequence", ids)},
    )
    for layout in ("padded", "packed", "shared"):
        found = TorchScorer(ScorerOptions(model=model, device="cpu", layout=layout)).logprobs(batch)
        assert [len(row) for row in found] == [0, 3, 0]
    with pytest.raises(ValueError, match="row 1 has no prompt token"):
        trainer(model).logprobs(dataclasses.replace(batch, prompt_lengths=(3, 0, 4), response_lengths=(0, 5, 0)))
    with pytest.raises(ValueError, match="column 'token_ids' has 3 rows and 12 values"):
        trainer(model).logprobs(dataclasses.replace(batch, response_lengths=(0, 2, 0)))


@pytest.mark.parametrize("split", [{"micro_batch_rows": 1}, {"micro_batch_rows": 4}, {"layout": "packed"}])
def test_a_critic_starts_at_zero_gives_gae_and_learns_its_returns(model: str, split: dict[str, Any]) -> None:
    critic = trainer(model, head="value", **split)
    batch = make_batch()
    columns = critic.apply(pack(GAE(gamma=0.9, lam=0.8, whiten=False)), batch)
    assert columns.keys() == {"advantages", "returns", "values", "explained_variance"}
    assert abs(columns.pop("explained_variance")) < 1e-6, "values are 0: they explain nothing"
    for row, reward in enumerate(batch.columns["rewards"].fetch()):
        assert not columns["values"][row].any()
        length = batch.response_lengths[row]
        expected = reward[0] * 0.72 ** np.arange(length - 1, -1, -1)
        np.testing.assert_allclose(columns["advantages"][row], expected, rtol=1e-4, atol=1e-6)
    batch = batch.with_columns(**{n: ArrayColumn("token", tuple(c)) for n, c in columns.items()})
    results = [critic.step(batch, pack(ValueLoss())) for _ in range(25)]
    assert all(r.applied for r in results)
    assert results[-1].metrics["loss"] < 0.5 * results[0].metrics["loss"]
    assert results[0].metrics.keys() == {"loss", "grad_norm", "learning_rate"}
    with pytest.raises(ValueError, match="has no log-probs"):
        critic.logprobs(batch)


def test_apply_keeps_rows_apart_and_in_order(model: str) -> None:
    batch = make_batch()
    batch = batch.with_columns(token_rewards=batch.columns["advantages"])
    engine = trainer(model, head="value", micro_batch_rows=2)
    values = trainer(model, head="value").apply(pack(GAE(gamma=0.0, whiten=False)), batch)["returns"]
    found = engine.apply(pack(GAE(gamma=0.0, whiten=False)), batch)["returns"]
    for row, rewards in enumerate(batch.columns["advantages"].fetch()):
        np.testing.assert_allclose(found[row], rewards, rtol=1e-5)
        np.testing.assert_allclose(values[row], rewards, rtol=1e-5)


OTHERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gpt_neox": {"num_key_value_heads": None, "tie_word_embeddings": False},
    "opt": {
        "intermediate_size": None,
        "num_key_value_heads": None,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "dropout": 0.5,
        "attention_dropout": 0.5,
    },
}


@pytest.mark.parametrize("model_type", OTHERS)
def test_other_architectures_train_and_score_without_dropout(tmp_path: Path, model_type: str) -> None:
    directory = make_model(tmp_path, model_type=model_type, **OTHERS[model_type])
    batch = make_batch(rows=5)
    module = AutoModelForCausalLM.from_pretrained(directory)
    expected = [
        reference_logprobs(module, ids[:start].tolist(), ids[start:].tolist())
        for start, ids in zip(batch.prompt_lengths, batch.columns["token_ids"].fetch(), strict=True)
    ]
    for layout in ("padded", "packed", "shared"):
        found = trainer(directory, layout=layout).logprobs(batch)
        for mine, reference in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, reference, atol=1e-5)
    batch = with_behaviour(batch, [e.numpy() for e in expected])
    for checkpointing in (False, True):
        result = trainer(directory, gradient_checkpointing=checkpointing).step(batch, pack(PolicyLoss()))
        assert result.applied
        assert result.metrics["logprob_gap"] < 1e-5


def test_checkpointed_layers_are_computed_again_in_the_backward_pass(model: str) -> None:
    calls = {}
    for checkpointing in (False, True):
        engine = trainer(model, gradient_checkpointing=checkpointing, micro_batch_rows=100)
        seen: list[int] = []
        engine._model.module.model.layers[0].input_layernorm.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        engine.step(make_batch(), pack(PolicyLoss()))
        calls[checkpointing] = len(seen)
    assert calls == {False: 1, True: 2}


def test_an_architecture_that_ignores_masks_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ignores(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        return attention.attend(module, query, key, value, None, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, attention.ATTENTION, ignores)
    trainer(model)
    for layout in ("packed", "shared"):
        with pytest.raises(ConfigError, match=f"qwen2 does not work with layout = '{layout}'"):
            trainer(model, layout=layout)


def test_a_directory_that_lacks_weights_is_refused(model: str, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "less")
    stored = load_file(tmp_path / "less" / "model.safetensors")
    del stored["model.norm.weight"]
    save_file(stored, tmp_path / "less" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights of Qwen2ForCausalLM, among them 'model\.norm\.weight'"):
        trainer(str(tmp_path / "less"))


def test_bfloat16_trains_float32_weights(model: str) -> None:
    engine = trainer(model, dtype="bfloat16")
    batch = make_batch()
    gap = max(np.abs(a - b).max() for a, b in zip(engine.logprobs(batch), trainer(model).logprobs(batch), strict=True))
    assert 0 < gap < 0.3
    assert engine.step(batch, pack(PolicyLoss())).applied
    assert {w.dtype for w in weights(engine).values()} == {torch.float32}


def test_what_cannot_work_is_refused_by_name(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        trainer(str(tmp_path))
    with pytest.raises(ConfigError, match="need cuda:3, have 0 GPUs"):
        TorchScorer(ScorerOptions(model=model, device="cuda:3"))
    sliding = make_model(
        tmp_path / "sliding",
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention"],
    )
    with pytest.raises(ConfigError, match="layers of type sliding_attention"):
        trainer(sliding)
    with pytest.raises(ValueError, match=r"gave shape \(\)"):
        trainer(model).step(make_batch(), pack(WrongShape()))
    unbounded = TorchTrainer(TrainerOptions(model=model, device="cpu"))
    with pytest.raises(ConfigError, match="max_response_tokens"):
        unbounded.step(make_batch(), pack(ConstantLoss()))
