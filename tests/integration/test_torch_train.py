"""The torch trainer: an objective that no split can change, and steps that can be refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrlhf.backends.torch.options import OptimizerOptions
from asyncrlhf.messages import ArrayColumn, pack
from asyncrlhf.ops import Loss
from tests.integration.torch_scene import (
    ConstantLoss,
    EntropyLoss,
    KLLoss,
    PolicyLoss,
    RawRatioLoss,
    SequenceMeanLoss,
    SequenceRatioLoss,
    distance,
    gradients,
    make_batch,
    make_model,
    replace_token,
    tensors_of,
    trainer,
    weights,
    with_behaviour,
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("policy"))


SPLITS: dict[str, dict[str, Any]] = {
    "rows-1": {"micro_batch_rows": 1},
    "rows-2": {"micro_batch_rows": 2},
    "rows-8": {"micro_batch_rows": 8},
    "tokens-40": {"micro_batch_tokens": 40},
    "packed": {"layout": "packed"},
    "packed-30": {"layout": "packed", "micro_batch_tokens": 30},
    "shared": {"layout": "shared"},
    "shared-40": {"layout": "shared", "micro_batch_tokens": 40},
    "shared-rows-2": {"layout": "shared", "micro_batch_rows": 2},
    "checkpointed": {"gradient_checkpointing": True},
}


@pytest.fixture(scope="session")
def whole_gradients(model: str) -> dict[str, dict[str, torch.Tensor]]:
    """Of one padded batch, in float64 where it matters: the loss written out by hand."""
    return {
        kind.__name__: gradients(trainer(model, micro_batch_rows=100), make_batch(), kind())
        for kind in (PolicyLoss, SequenceMeanLoss, ConstantLoss, SequenceRatioLoss, EntropyLoss)
    }


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", [PolicyLoss, SequenceMeanLoss, ConstantLoss, SequenceRatioLoss, EntropyLoss])
def test_n6_gradients_do_not_depend_on_the_split(
    model: str, whole_gradients: dict[str, dict[str, torch.Tensor]], split: str, kind: type[Loss]
) -> None:
    found = gradients(trainer(model, **SPLITS[split]), make_batch(), kind())
    assert distance(found, whole_gradients[kind.__name__]) < 1e-5


@pytest.mark.parametrize("kind", [PolicyLoss, SequenceMeanLoss, ConstantLoss])
def test_n6_the_objective_is_the_one_written_out_by_hand(model: str, kind: type[PolicyLoss]) -> None:
    batch = make_batch()
    module = AutoModelForCausalLM.from_pretrained(model)
    total = torch.zeros(())
    unmasked, rows = sum(batch.unmasked), sum(n > 0 for n in batch.unmasked)
    columns = {name: column.fetch() for name, column in batch.columns.items()}
    for i, (start, length) in enumerate(zip(batch.prompt_lengths, batch.response_lengths, strict=True)):
        ids = torch.from_numpy(columns["token_ids"][i].astype(np.int64))
        logits = module(ids[None]).logits[0, start - 1 : -1]
        new = torch.log_softmax(logits, -1).gather(1, ids[start:, None])[:, 0]
        ratio = (new - torch.from_numpy(columns["behaviour_logprobs"][i])).exp()
        gain = torch.from_numpy(columns["advantages"][i])
        value = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        kept = value[torch.from_numpy(columns["mask"][i]) > 0]
        if kind.reduction == "token_mean":
            total = total + kept.sum() / unmasked
        elif kind.reduction == "constant":
            total = total + kept.sum() / (len(batch) * 12)
        elif len(kept):
            total = total + kept.mean() / rows
        assert length == len(value)
    total.backward()
    engine = trainer(model)
    result = engine.step(batch, pack(kind()))
    expected = {n: p.grad for n, p in module.named_parameters()}
    found = gradients(trainer(model), batch, kind())
    assert result.metrics["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert distance(found, expected) < 1e-5


def test_n5_on_policy_ratio_is_one_whatever_the_micro_batches(model: str) -> None:
    batch = make_batch(masked=0.0)
    old = trainer(model, micro_batch_rows=1).logprobs(batch)
    result = trainer(model, micro_batch_tokens=64).step(with_behaviour(batch, old), pack(PolicyLoss()))
    assert result.applied
    assert result.metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert result.metrics["logprob_gap"] < 1e-5
    assert abs(result.metrics["kl_behaviour"]) < 1e-5


def test_the_entropy_is_that_of_the_whole_distribution(model: str) -> None:
    batch = make_batch(rows=2, masked=0.0, shared=1)
    result = trainer(model).step(batch, pack(EntropyLoss()))
    module = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.from_numpy(batch.columns["token_ids"].fetch()[0].astype(np.int64))
    with torch.no_grad():
        logits = module(ids[None]).logits[0, batch.prompt_lengths[0] - 1 : -1]
    expected = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert result.metrics["entropy"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("column", ["behaviour_logprobs", "advantages"])
@pytest.mark.parametrize("kind", [PolicyLoss, SequenceRatioLoss])
def test_n7_a_masked_token_may_hold_anything(model: str, kind: type[Loss], column: str, bad: float) -> None:
    batch = make_batch()
    masks = batch.columns["mask"].fetch()
    row, place = next((i, int(np.argmin(m))) for i, m in enumerate(masks) if m.any() and not m.all())
    found = gradients(trainer(model), replace_token(batch, column, row, place, bad), kind())
    assert distance(found, gradients(trainer(model), batch, kind())) < 1e-6


def test_n7_what_a_loss_makes_of_a_masked_token_is_selected_away(model: str) -> None:
    batch = make_batch()
    masks = batch.columns["mask"].fetch()
    row, place = next((i, int(np.argmin(m))) for i, m in enumerate(masks) if m.any() and not m.all())
    exploding = replace_token(batch, "behaviour_logprobs", row, place, -1e5)
    expected = gradients(trainer(model), batch, RawRatioLoss())
    assert distance(gradients(trainer(model), exploding, RawRatioLoss()), expected) < 1e-6
    metrics = trainer(model).step(exploding, pack(RawRatioLoss())).metrics
    assert metrics == pytest.approx(trainer(model).step(batch, pack(RawRatioLoss())).metrics)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_n8_a_step_that_is_not_finite_changes_nothing(model: str, bad: float) -> None:
    engine = trainer(model)
    batch = make_batch(masked=0.0)
    assert engine.step(batch, pack(PolicyLoss())).applied
    before, moments = weights(engine), tensors_of(engine)
    refused = engine.step(replace_token(batch, "advantages", 0, 0, bad), pack(PolicyLoss()))
    assert (refused.applied, refused.reason) == (False, "not_finite")
    assert not math.isfinite(refused.metrics["grad_norm"])
    assert "learning_rate" not in refused.metrics
    assert distance(weights(engine), before) == 0
    after = tensors_of(engine)
    assert len(after) == len(moments) > 0
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    other = trainer(model)
    for one in (engine, other):
        if one is other:
            one.step(batch, pack(PolicyLoss()))
        one.step(batch, pack(PolicyLoss()))
    assert distance(weights(engine), weights(other)) == 0


def test_n8_a_batch_without_an_unmasked_token_changes_nothing(model: str) -> None:
    engine = trainer(model)
    before = weights(engine)
    result = engine.step(make_batch(masked=1.0), pack(PolicyLoss()))
    assert (result.applied, result.reason) == (False, "empty")
    assert distance(weights(engine), before) == 0


def test_n9_a_gap_of_fifty_gives_a_finite_step(model: str) -> None:
    batch = make_batch(masked=0.0)
    far = tuple(np.full(n, -50.0, np.float32) for n in batch.response_lengths)
    batch = batch.with_columns(reference_logprobs=ArrayColumn("token", far))
    for off_policy, loss in (("none", KLLoss()), ("none", PolicyLoss()), ("decoupled", PolicyLoss())):
        engine = trainer(model, off_policy=off_policy)
        result = engine.step(with_behaviour(batch, far), pack(loss))
        assert result.applied, (off_policy, loss)
        assert result.metrics["ratio_max"] > 1e15


def test_n11_the_schedule_is_a_function_of_the_train_step(model: str) -> None:
    options = OptimizerOptions(learning_rate=1e-3, schedule="cosine", warmup_steps=2, total_steps=10, min_ratio=0.25)
    engine = trainer(model, optimizer=options)
    rates = {
        step: engine.step(make_batch(rows=3, train_step=step, shared=1), pack(PolicyLoss())).metrics["learning_rate"]
        for step in (0, 1, 2, 6, 9, 12, 0)
    }
    assert rates[0] == pytest.approx(5e-4)
    assert rates[1] == rates[2] == 1e-3
    assert 2.5e-4 < rates[6] < 1e-3
    assert rates[9] == rates[12] == 0.25 * 1e-3


def test_masked_rows_are_skipped_unless_a_loss_needs_them(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trainer(model)
    seen: list[int] = []
    original = engine._model.token_stats
    monkeypatch.setattr(engine._model, "token_stats", lambda **k: (seen.append(len(k["targets"])), original(**k))[1])
    batch = make_batch()
    lengths = batch.response_lengths
    engine.step(batch, pack(PolicyLoss()))
    assert sum(seen) == sum(n for n, unmasked in zip(lengths, batch.unmasked, strict=True) if unmasked)
    assert sum(seen) < sum(lengths)
    seen.clear()
    monkeypatch.setattr(PolicyLoss, "uses_masked_rows", True)
    engine.step(batch, pack(PolicyLoss()))
    assert sum(seen) == sum(lengths)


@pytest.mark.parametrize("off_policy", ["truncated_is", "masked_is", "decoupled"])
def test_the_correction_uses_the_current_policy_unless_the_batch_brings_one(model: str, off_policy: str) -> None:
    batch = make_batch(masked=0.0)
    current = trainer(model).logprobs(batch)
    brought = batch.with_columns(proximal_logprobs=ArrayColumn("token", tuple(current)))
    assert (
        distance(
            gradients(trainer(model, off_policy=off_policy), batch, PolicyLoss()),
            gradients(trainer(model, off_policy=off_policy), brought, PolicyLoss()),
        )
        < 1e-4
    )  # a ratio that sits on the clip may fall either side of it by rounding


def test_columns_of_the_batch_win_over_the_engine_s_correction(model: str) -> None:
    batch = make_batch(masked=0.0)
    ones = tuple(np.ones(n, np.float32) for n in batch.response_lengths)
    brought = batch.with_columns(
        anchor_logprobs=ArrayColumn("token", tuple(batch.columns["behaviour_logprobs"].fetch())),
        weight=ArrayColumn("token", ones),
    )
    plain = gradients(trainer(model, off_policy="none"), batch, PolicyLoss())
    assert distance(gradients(trainer(model, off_policy="decoupled"), brought, PolicyLoss()), plain) < 1e-6


def test_the_log_prob_gap_is_that_of_tokens_of_this_very_version(model: str) -> None:
    batch = make_batch(masked=0.0, train_step=3)
    engine = trainer(model)
    current = [x.copy() for x in engine.logprobs(batch)]
    current[2][0] += 0.5
    stale = [np.full(n, 3, np.int32) for n in batch.response_lengths]
    stale[0][:] = 2
    current[0] -= 4.0
    batch = with_behaviour(batch, current).with_columns(versions=ArrayColumn("token", tuple(stale)))
    first, second = (engine.step(batch, pack(PolicyLoss())).metrics for _ in range(2))
    assert first["logprob_gap"] == pytest.approx(0.5, abs=1e-4)
    assert first["ratio_max"] == pytest.approx(math.exp(4.0), rel=1e-3)
    assert "logprob_gap" not in second  # the weights have moved within this train step
    none_current = batch.with_columns(
        versions=ArrayColumn("token", tuple(np.zeros(n, np.int32) for n in batch.response_lengths))
    )
    assert "logprob_gap" not in trainer(model).step(none_current, pack(PolicyLoss())).metrics


def test_norms_and_biases_do_not_decay(model: str) -> None:
    engine = trainer(model, optimizer=OptimizerOptions(learning_rate=1e-3, weight_decay=100.0))
    before = weights(engine)
    still = {n: p for n, p in engine._model.parameters().items() if p.dim() < 2}
    assert still
    engine.step(make_batch(), pack(PolicyLoss()))
    after = weights(engine)
    for name, old in before.items():
        change = float((after[name] - old).norm() / old.norm())
        assert change < 0.05 if name in still else change > 0.05, name
