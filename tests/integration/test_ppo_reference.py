"""PPO's losses, rewards and advantages, and the Bradley-Terry loss, against float64 written down from the papers, row
by row and token by token: for ragged batches, and for every layout and size of micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from algorithms.ppo import PPOLoss, ValueLoss
from algorithms.reward_model import BradleyTerryLoss
from asyncrlhf import ops
from asyncrlhf.backends.torch.options import ScorerOptions
from asyncrlhf.backends.torch.score import TorchScorer
from asyncrlhf.messages import ArrayColumn, Statistics, TrainBatch, pack
from tests.integration.test_torch_train import SPLITS
from tests.integration.torch_scene import distance, gradients, make_batch, make_model, trainer

GAE = ops.GAE(gamma=0.98, lam=0.9)
SEEN = Statistics(count=9, mean=0.3, deviation=0.7)
SCALE = ops.RewardScale(clip=1.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def critic(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose value head is not zero."""
    engine, directory = trainer(model, head="value"), tmp_path_factory.mktemp("critic")
    with torch.no_grad():
        torch.manual_seed(0)
        for parameter in engine._model.module.score.parameters():
            parameter.normal_(0, 0.3)
    engine.save_model(directory)
    return str(directory)


def answered(batch: TrainBatch) -> TrainBatch:
    """With log-probs of a reference."""
    random = np.random.default_rng(5)
    rows = [(row + random.normal(0, 0.5, len(row))).astype(np.float32) for row in fetch(batch, "behaviour_logprobs")]
    return batch.with_columns(reference_logprobs=ArrayColumn("token", tuple(rows)))


def paired() -> TrainBatch:
    """Six pairs of answers; those of the second one are masked."""
    batch = make_batch(rows=12, shared=2, masked=0.0)
    masks = [np.full(n, float(row not in (2, 3)), np.float32) for row, n in enumerate(batch.response_lengths)]
    sign = ArrayColumn("sample", tuple(np.array([1.0 - 2 * (row % 2)], np.float32) for row in range(12)))
    batch = replace(batch, unmasked=tuple(int(mask.sum()) for mask in masks))
    return batch.with_columns(mask=ArrayColumn("token", tuple(masks)), sign=sign)


def fetch(batch: TrainBatch, name: str) -> list[Any]:
    return list(batch.columns[name].fetch())


def column(batch: TrainBatch, name: str) -> list[Tensor]:
    return [torch.from_numpy(row.astype(np.float64)) for row in fetch(batch, name)]


def sequences(batch: TrainBatch) -> list[tuple[Tensor, int]]:
    """(token ids int64 [prompt + response], prompt length) of every row."""
    ids = [torch.from_numpy(row.astype(np.int64)) for row in fetch(batch, "token_ids")]
    return list(zip(ids, batch.prompt_lengths, strict=True))


def slow_values(module: Any, batch: TrainBatch) -> list[Tensor]:
    return [module(ids[None]).logits[0, start - 1 : -1, 0] for ids, start in sequences(batch)]


def slow_token_rewards(batch: TrainBatch, kl: float) -> list[Tensor]:
    """R(x, y) = r(x, y) at the last token, and -kl log(pi(y_t) / pi_ref(y_t)) at each (arXiv 1909.08593 eq. 2)."""
    found = []
    for reward, new, old in zip(
        column(batch, "rewards"), column(batch, "behaviour_logprobs"), column(batch, "reference_logprobs"), strict=True
    ):
        row = [-kl * (float(a) - float(b)) for a, b in zip(new, old, strict=True)]
        row[-1] += min(max((float(reward) - SEEN.mean) / SEEN.deviation, -SCALE.clip), SCALE.clip)
        found.append(torch.tensor(row, dtype=torch.float64))
    return found


def slow_gae(rewards: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    """A_t = sum over l of (gamma lam)^l delta_(t+l) (arXiv 1506.02438 eq. 16)."""
    found = []
    for reward, value in zip(rewards, values, strict=True):
        following = [*value[1:].tolist(), 0.0]
        delta = [float(r) + GAE.gamma * v - float(now) for r, v, now in zip(reward, following, value, strict=True)]
        row = [
            sum((GAE.gamma * GAE.lam) ** (later - t) * delta[later] for later in range(t, len(delta)))
            for t in range(len(delta))
        ]
        found.append(torch.tensor(row, dtype=torch.float64))
    return found


def slow_columns(critic: str, batch: TrainBatch, kl: float) -> dict[str, list[Tensor]]:
    module = AutoModelForTokenClassification.from_pretrained(critic).double()
    with torch.no_grad():
        values = slow_values(module, batch)
    rewards = slow_token_rewards(batch, kl)
    advantages = slow_gae(rewards, values)
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    chosen = torch.cat([a[m > 0] for a, m in zip(advantages, column(batch, "mask"), strict=True)])
    mean, deviation = chosen.mean(), chosen.std()
    white = [(a - mean) / deviation for a in advantages]
    return {"token_rewards": rewards, "values": values, "returns": returns, "advantages": white}


def with_tensors(batch: TrainBatch, columns: dict[str, list[Tensor]]) -> TrainBatch:
    return batch.with_columns(
        **{
            name: ArrayColumn("token", tuple(row.numpy().astype(np.float32) for row in rows))
            for name, rows in columns.items()
        }
    )


def slow_gradients(module: Any, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: p.grad.float() for name, p in module.named_parameters() if p.grad is not None}


def mean_of_unmasked(values: list[Tensor], batch: TrainBatch) -> Tensor:
    kept = [v[m > 0] for v, m in zip(values, column(batch, "mask"), strict=True)]
    return torch.cat(kept).sum() / sum(len(row) for row in kept)


def slow_policy_loss(model: str, batch: TrainBatch, *, clip: float, entropy: float, kl: float) -> dict[str, Tensor]:
    """-L^CLIP (arXiv 1707.06347 eq. 7) - entropy S (eq. 9), with the estimator k3 of KL(new || reference)."""
    module = AutoModelForCausalLM.from_pretrained(model).double()
    names = ("behaviour_logprobs", "advantages", "reference_logprobs")
    losses = []
    for (ids, start), old, gain, reference in zip(sequences(batch), *(column(batch, n) for n in names), strict=True):
        distribution = torch.log_softmax(module(ids[None]).logits[0, start - 1 : -1], -1)
        new = distribution.gather(1, ids[start:, None])[:, 0]
        ratio = (new - old).exp()
        loss = -torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
        loss = loss + entropy * (distribution.exp() * distribution).sum(-1)
        inverse = (reference - new).exp()
        losses.append(loss + kl * (inverse - 1 - inverse.log()))
    return slow_gradients(module, mean_of_unmasked(losses, batch))


def slow_value_loss(critic: str, batch: TrainBatch, clip: float) -> dict[str, Tensor]:
    module = AutoModelForTokenClassification.from_pretrained(critic).double()
    losses = []
    for new, old, target in zip(
        slow_values(module, batch), column(batch, "values"), column(batch, "returns"), strict=True
    ):
        near = torch.minimum(torch.maximum(new, old - clip), old + clip)
        losses.append(0.5 * torch.maximum((new - target) ** 2, (near - target) ** 2))
    return slow_gradients(module, mean_of_unmasked(losses, batch))


def slow_preference_loss(critic: str, batch: TrainBatch, centre: float) -> tuple[float, float, dict[str, Tensor]]:
    """-log sigmoid(r(x, chosen) - r(x, rejected)) (arXiv 2203.02155 eq. 1) + centre r^2: loss, accuracy, gradients."""
    module = AutoModelForTokenClassification.from_pretrained(critic).double()
    scores = [module(ids[None]).logits[0, -1, 0] for ids, _ in sequences(batch)]
    pairs = [(scores[row], scores[row + 1]) for row in range(0, len(scores), 2) if batch.unmasked[row]]
    losses = [-torch.sigmoid(a - b).log() + centre * (a**2 + b**2) / 2 for a, b in pairs]
    loss = torch.stack(losses).mean()
    accuracy = sum(float(a > b) for a, b in pairs) / len(pairs)
    return loss.item(), accuracy, slow_gradients(module, loss)


@pytest.mark.parametrize("split", SPLITS)
def test_rewards_with_a_kl_penalty_and_their_advantages(critic: str, split: str) -> None:
    batch = answered(make_batch())
    expected = slow_columns(critic, batch, kl=0.2)
    engine = trainer(critic, head="value", **SPLITS[split])
    found = engine.apply(pack(ops.TokenRewards(scale=SCALE, seen=SEEN, kl=0.2)), batch)
    scaled = [
        min(max((float(r) - SEEN.mean) / SEEN.deviation, -SCALE.clip), SCALE.clip) for r in column(batch, "rewards")
    ]
    assert found.pop("scaled_reward") == pytest.approx(np.mean(scaled), rel=1e-5)
    batch = batch.with_columns(**{name: ArrayColumn("token", tuple(rows)) for name, rows in found.items()})
    found |= engine.apply(pack(GAE), batch)
    returns, values = (
        torch.cat([row[m > 0] for row, m in zip(expected[n], column(batch, "mask"), strict=True)])
        for n in ("returns", "values")
    )
    explained = 1 - float((returns - values).var() / returns.var())
    assert found.pop("explained_variance") == pytest.approx(explained, rel=1e-4)
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        for mine, row in zip(found[name], rows, strict=True):
            np.testing.assert_allclose(mine, row.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("entropy", "kl"), [(0.0, 0.0), (0.02, 0.1)])
def test_the_policy_loss(model: str, critic: str, split: str, entropy: float, kl: float) -> None:
    batch = answered(make_batch())
    batch = with_tensors(batch, slow_columns(critic, batch, kl=0.0))
    expected = slow_policy_loss(model, batch, clip=0.3, entropy=entropy, kl=kl)
    if kl:
        rewards = ops.TokenRewards(scale=SCALE, seen=SEEN, kl=kl, kl_in="loss")
        weight = trainer(critic, head="value").apply(pack(rewards), batch)["kl_weight"]
        batch = batch.with_columns(kl_weight=ArrayColumn("token", tuple(weight)))
    found = gradients(trainer(model, **SPLITS[split]), batch, PPOLoss(clip=0.3, entropy=entropy))
    assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("clip", [0.1, 0.0])
def test_the_value_loss(critic: str, split: str, clip: float) -> None:
    batch = answered(make_batch())
    columns = slow_columns(critic, batch, kl=0.2)
    random = np.random.default_rng(3)
    columns["values"] = [v + torch.from_numpy(random.normal(0, 0.2, len(v))) for v in columns["values"]]
    batch = with_tensors(batch, columns)
    expected = slow_value_loss(critic, batch, clip or math.inf)
    engine = trainer(critic, head="value", **SPLITS[split])
    assert distance(gradients(engine, batch, ValueLoss(clip=clip)), expected) < 1e-5
    if clip:
        old = trainer(critic, head="value").apply(pack(ops.GAE(whiten=False)), batch)["values"]
        gaps = [torch.from_numpy(a).double() - b for a, b in zip(old, column(batch, "values"), strict=True)]
        outside = mean_of_unmasked([(gap.abs() > clip).double() for gap in gaps], batch)
        assert engine.step(batch, pack(ValueLoss(clip=clip))).metrics["clip_fraction"] == pytest.approx(float(outside))


@pytest.mark.parametrize("split", SPLITS)
def test_the_preference_loss(critic: str, split: str) -> None:
    batch = paired()
    # The head's bias is moved by the centring alone: with a small weight its gradient is rounding of what cancels.
    function = BradleyTerryLoss(centre=0.1)
    loss, accuracy, expected = slow_preference_loss(critic, batch, centre=0.1)
    engine = trainer(critic, head="value", **SPLITS[split])
    assert distance(gradients(engine, batch, function), expected) < 1e-5
    metrics = engine.step(batch, pack(function)).metrics
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(accuracy)


def test_rows_of_a_rollout_are_never_apart(critic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trainer(critic, head="value", micro_batch_rows=1)
    seen: list[int] = []
    original = engine._model.token_stats
    monkeypatch.setattr(engine._model, "token_stats", lambda **k: (seen.append(len(k["input_ids"])), original(**k))[1])
    engine.step(paired(), pack(BradleyTerryLoss()))
    assert seen == [2] * 5
    seen.clear()
    engine.step(
        answered(make_batch()).with_columns(
            returns=make_batch().columns["advantages"], values=make_batch().columns["advantages"]
        ),
        pack(ValueLoss()),
    )
    assert set(seen) == {1}


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_scores_are_those_of_plain_transformers_after_the_last_token(critic: str, layout: str) -> None:
    batch = make_batch()
    module = AutoModelForTokenClassification.from_pretrained(critic)
    with torch.no_grad():
        expected = [float(module(ids[None]).logits[0, -1, 0]) for ids, _ in sequences(batch)]
    options: dict[str, Any] = {"layout": layout, "micro_batch_tokens": 50}
    scorer = TorchScorer(ScorerOptions(model=critic, head="value", device="cpu", **options))
    np.testing.assert_allclose(scorer.scores(batch), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trainer(critic, head="value", **options).scores(batch), expected, rtol=1e-4, atol=1e-5)


def test_what_a_head_can_say_and_how_it_starts(model: str, critic: str) -> None:
    batch = make_batch(rows=2)
    with pytest.raises(ValueError, match="without a value head"):
        TorchScorer(ScorerOptions(model=model, device="cpu")).scores(batch)
    with pytest.raises(ValueError, match="has no log-probs"):
        TorchScorer(ScorerOptions(model=critic, device="cpu", head="value")).logprobs(batch)
    with pytest.raises(ValueError, match=r"lacks 1 weights of .*'score\.weight'"):
        TorchScorer(ScorerOptions(model=model, device="cpu", head="value"))
    assert any(trainer(critic, head="value").scores(batch))
    assert not any(trainer(critic, head="value", new_head=True).scores(batch))


def test_a_model_that_classifies_sequences_is_a_reward_model(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(1)
    module = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    module.save_pretrained(tmp_path)
    batch = make_batch(rows=4)
    with torch.no_grad():
        expected = [float(module(ids[None]).logits) for ids, _ in sequences(batch)]
    scorer = TorchScorer(ScorerOptions(model=str(tmp_path), head="value", device="cpu"))
    np.testing.assert_allclose(scorer.scores(batch), expected, rtol=1e-4, atol=1e-5)
