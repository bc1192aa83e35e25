"""The torch trainer: an objective that no split can change, steps that can be refused, and states that are exact."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrlhf.backends.torch.options import OptimizerOptions, ScorerOptions, TrainerOptions
from asyncrlhf.backends.torch.score import TorchScorer
from asyncrlhf.backends.torch.train import TorchTrainer
from asyncrlhf.errors import CheckpointError, ConfigError, PublishRefused
from asyncrlhf.messages import ArrayColumn, TrainBatch, pack
from asyncrlhf.ops import Loss
from asyncrlhf.ops.advantages import GAE
from asyncrlhf.weights.checksum import checksum
from asyncrlhf.weights.inproc import InprocTransfer
from tests.integration.torch_scene import (
    CHARACTERS,
    ConstantLoss,
    EntropyLoss,
    KLLoss,
    PolicyLoss,
    RawRatioLoss,
    SequenceMeanLoss,
    SequenceRatioLoss,
    ValueLoss,
    WrongShape,
    make_batch,
    make_model,
    reference_logprobs,
    replace_token,
    with_behaviour,
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("policy"))


def trainer(model: str, **options: Any) -> TorchTrainer:
    options.setdefault("optimizer", OptimizerOptions(learning_rate=1e-3, max_grad_norm=1e9))
    return TorchTrainer(TrainerOptions(model=model, device="cpu", max_response_tokens=12, **options))


def weights(engine: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine._model.parameters().items()}


def gradients(engine: TorchTrainer, batch: TrainBatch, loss: Loss) -> dict[str, torch.Tensor]:
    """Gradients of one step, caught where the optimizer would take them."""
    caught: dict[str, torch.Tensor] = {}

    def keep(train_step: int, norm: float) -> float:
        caught.update({n: p.grad.clone() for n, p in engine._model.parameters().items() if p.grad is not None})
        return 0.0

    original, engine._optimizer.step = engine._optimizer.step, keep  # type: ignore[method-assign]
    assert engine.step(batch, pack(loss)).applied
    engine._optimizer.step = original  # type: ignore[method-assign]
    engine._optimizer.zero_grad()
    return caught


def tensors_of(engine: TorchTrainer) -> list[torch.Tensor]:
    """Copies of the optimizer's moments and step counts."""
    leaves = torch.utils._pytree.tree_leaves(engine._optimizer.state())
    return [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of a tensor."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - e).norm() / e.norm().clamp(min=1e-12)) for n, e in expected.items())


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
    assert math.isnan(second["logprob_gap"])  # the weights have moved within this train step
    none_current = batch.with_columns(
        versions=ArrayColumn("token", tuple(np.zeros(n, np.int32) for n in batch.response_lengths))
    )
    assert math.isnan(trainer(model).step(none_current, pack(PolicyLoss())).metrics["logprob_gap"])


def test_a_saved_state_gives_exactly_the_next_step(model: str, tmp_path: Path) -> None:
    engine = trainer(model)
    for step in range(2):
        engine.step(make_batch(seed=step), pack(PolicyLoss()))
    engine.save_state(tmp_path)
    expected_random = torch.rand(1)
    engine.step(make_batch(seed=7), pack(PolicyLoss()))
    other = trainer(model)
    other.load_state(tmp_path)
    assert torch.equal(torch.rand(1), expected_random)
    other.step(make_batch(seed=7), pack(PolicyLoss()))
    assert distance(weights(other), weights(engine)) == 0


def test_a_state_that_is_missing_torn_or_of_another_model_is_refused(model: str, tmp_path: Path) -> None:
    engine = trainer(model)
    with pytest.raises(CheckpointError, match="cannot be read"):
        engine.load_state(tmp_path / "nowhere")
    engine.save_state(tmp_path)
    before = weights(engine)
    other = trainer(make_model(tmp_path / "larger", hidden_size=64))
    with pytest.raises(CheckpointError, match="of another model"):
        other.load_state(tmp_path)
    (tmp_path / "trainer.pt").write_bytes((tmp_path / "trainer.pt").read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        engine.load_state(tmp_path)
    assert distance(weights(engine), before) == 0


@pytest.mark.parametrize("tied", [True, False])
def test_n16_a_saved_model_is_the_same_hugging_face_directory(tmp_path: Path, tied: bool) -> None:
    source = make_model(tmp_path / "source", tie_word_embeddings=tied)
    engine = trainer(source)
    engine.step(make_batch(), pack(PolicyLoss()))
    engine.save_model(tmp_path / "saved")
    original, saved = (AutoModelForCausalLM.from_pretrained(d) for d in (source, tmp_path / "saved"))
    assert original.state_dict().keys() == saved.state_dict().keys()
    assert _stored_keys(Path(source)) == _stored_keys(tmp_path / "saved")
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        index = torch.arange(ids.shape[1])
        torch.testing.assert_close(engine._model.forward(ids, index), saved(ids).logits[0], atol=1e-6, rtol=0)
        assert (original(ids).logits - saved(ids).logits).abs().max() > 1e-4
    before, after = (AutoTokenizer.from_pretrained(d) for d in (source, tmp_path / "saved"))
    assert before.encode(CHARACTERS) == after.encode(CHARACTERS) == list(range(2, 2 + len(CHARACTERS)))
    chat = [{"role": "user", "content": "ab"}]
    assert before.apply_chat_template(chat, tokenize=False) == after.apply_chat_template(chat, tokenize=False) == "ab>"
    assert (before.eos_token_id, before.pad_token_id) == (after.eos_token_id, after.pad_token_id) == (0, 0)


def _stored_keys(directory: Path) -> set[str]:
    raw = (directory / "model.safetensors").read_bytes()
    return set(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])) - {"__metadata__"}


def test_the_checksum_changes_if_and_only_if_a_parameter_does(model: str) -> None:
    engine = trainer(model)
    first, again = engine.export(0), engine.export(1)
    assert (first.changed, again.changed) == (True, False)
    assert first.checksum == again.checksum
    assert again.payload == first.payload  # whoever joins now still finds the bytes
    engine.step(make_batch(masked=1.0), pack(PolicyLoss()))
    assert not engine.export(2).changed
    engine.step(make_batch(), pack(PolicyLoss()))
    stepped = engine.export(3)
    assert stepped.changed
    assert stepped.checksum != first.checksum
    assert stepped.byte_count == sum(w.nbytes for w in weights(engine).values())
    assert checksum(dict(InprocTransfer().receive(stepped.payload))) == stepped.checksum
    for name, parameter in engine._model.parameters().items():
        with torch.no_grad():
            parameter.view(-1)[-1] = torch.nextafter(parameter.view(-1)[-1], torch.tensor(10.0))
        assert engine.export(4).changed, name


def test_a_checksum_sees_order_names_and_single_bits() -> None:
    one = {"a": torch.arange(6.0), "b": torch.ones(3)}
    assert checksum(one) == checksum(dict(reversed(one.items())))
    others = [
        {"a": torch.arange(6.0).flip(0), "b": torch.ones(3)},
        {"b": torch.arange(6.0), "a": torch.ones(3)},
        {"a": torch.arange(6.0), "b": torch.ones(4)},
        {"a": torch.arange(6.0), "b": torch.tensor([1.0, 1.0, 1.0000001])},
        {"a": torch.arange(6.0), "b": torch.ones(3, dtype=torch.bfloat16)},
    ]
    assert len({checksum(one), *map(checksum, others)}) == 6
    large = torch.zeros(3_000_000)
    seen = {checksum({"a": large})}
    for place in (0, 1_048_575, 1_048_576, 2_999_999):
        changed = large.clone()
        changed[place] = -0.0
        seen.add(checksum({"a": changed}))
    assert len(seen) == 5


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_n7_weights_that_are_not_finite_are_not_published(model: str, bad: float) -> None:
    engine = trainer(model)
    handle = engine.export(0)
    with torch.no_grad():
        engine._model.module.model.layers[1].mlp.up_proj.weight[0, 0] = bad
    with pytest.raises(PublishRefused, match=r"layers\.1\.mlp\.up_proj"):
        engine.export(1)
    assert checksum(dict(InprocTransfer().receive(handle.payload))) == handle.checksum


def test_bytes_stay_until_the_next_but_one_send(model: str) -> None:
    engine = trainer(model)
    handles = []
    for version in range(3):
        handles.append(engine.export(version))
        engine.step(make_batch(seed=version), pack(PolicyLoss()))
    receiver = InprocTransfer()
    assert [checksum(dict(receiver.receive(h.payload))) for h in handles[1:]] == [h.checksum for h in handles[1:]]
    with pytest.raises(PublishRefused, match="weights of version 0 are gone"):
        dict(receiver.receive(handles[0].payload))
    payload = handles[2].payload
    del engine
    with pytest.raises(PublishRefused, match="are gone"):
        dict(receiver.receive(payload))


@pytest.mark.parametrize("split", [{"micro_batch_rows": 1}, {"micro_batch_rows": 4}, {"layout": "packed"}])
def test_a_critic_starts_at_zero_gives_gae_and_learns_its_returns(model: str, split: dict[str, Any]) -> None:
    critic = trainer(model, head="value", **split)
    batch = make_batch()
    columns = critic.apply(pack(GAE(gamma=0.9, lam=0.8, whiten=False)), batch)
    assert columns.keys() == {"advantages", "returns", "values"}
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


def test_a_saved_critic_keeps_its_head(model: str, tmp_path: Path) -> None:
    critic = trainer(model, head="value")
    batch = make_batch()
    batch = batch.with_columns(returns=ArrayColumn("sample", tuple(np.ones(1, np.float32) for _ in range(len(batch)))))
    for _ in range(3):
        critic.step(batch, pack(ValueLoss()))
    critic.save_model(tmp_path)
    again = trainer(str(tmp_path), head="value")
    assert distance(weights(again), weights(critic)) == 0
    transform = pack(GAE(whiten=False))
    np.testing.assert_array_equal(
        again.apply(transform, batch)["values"][0], critic.apply(transform, batch)["values"][0]
    )


def test_apply_keeps_rows_apart_and_in_order(model: str) -> None:
    batch = make_batch()
    batch = batch.with_columns(token_rewards=batch.columns["advantages"])
    engine = trainer(model, head="value", micro_batch_rows=2)
    values = trainer(model, head="value").apply(pack(GAE(gamma=0.0, whiten=False)), batch)["returns"]
    found = engine.apply(pack(GAE(gamma=0.0, whiten=False)), batch)["returns"]
    for row, rewards in enumerate(batch.columns["advantages"].fetch()):
        np.testing.assert_allclose(found[row], rewards, rtol=1e-5)
        np.testing.assert_allclose(values[row], rewards, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt_neox"])
def test_other_architectures_train_and_score(tmp_path: Path, model_type: str) -> None:
    directory = make_model(tmp_path, model_type=model_type) if model_type != "gpt_neox" else _gpt_neox(tmp_path)
    batch = make_batch(rows=5)
    module = AutoModelForCausalLM.from_pretrained(directory)
    for layout in ("padded", "packed", "shared"):
        found = trainer(directory, layout=layout).logprobs(batch)
        for i, (start, ids) in enumerate(zip(batch.prompt_lengths, batch.columns["token_ids"].fetch(), strict=True)):
            expected = reference_logprobs(module, ids[:start].tolist(), ids[start:].tolist())
            np.testing.assert_allclose(found[i], expected, atol=1e-5)
    assert trainer(directory).step(batch, pack(PolicyLoss())).applied


def _gpt_neox(directory: Path) -> str:
    from asyncrlhf.backends.torch.scratch import write_model

    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return str(write_model(directory, model_type="gpt_neox", characters=CHARACTERS, config=config))


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
    with pytest.raises(ConfigError, match="sees 0 GPUs"):
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
