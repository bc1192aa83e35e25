"""Generalised advantage estimation on ragged rows against a slow reference in float64, and whitening."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlhf.messages import pack, unpack
from asyncrlhf.ops import MicroBatch, TokenStats
from asyncrlhf.ops.advantages import GAE, gae, whiten


def slow_gae(rewards: np.ndarray, values: np.ndarray, lengths: list[int], gamma: float, lam: float) -> np.ndarray:
    """Row by row, token by token, from the back."""
    found = np.zeros(len(rewards))
    start = 0
    for length in lengths:
        following = following_value = 0.0
        for t in range(start + length - 1, start - 1, -1):
            delta = rewards[t] + gamma * following_value - values[t]
            following = delta + gamma * lam * following
            following_value = values[t]
            found[t] = following
        start += length
    return found


def make(lengths: list[int], seed: int = 0, **more: torch.Tensor) -> tuple[TokenStats, MicroBatch]:
    total = sum(lengths)
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(total, generator=random)
    columns = {
        "mask": torch.ones(total),
        "sample:rewards": torch.randn(len(lengths), generator=random),
        **more,
    }
    stats = TokenStats(logprobs=values.new_empty(0), values=values)
    return stats, MicroBatch(torch.tensor(lengths, dtype=torch.int64), columns)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 1000),
)
def test_gae_equals_a_slow_float64_reference(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    rewards, values = random.normal(size=sum(lengths)), random.normal(size=sum(lengths))
    found = gae(torch.tensor(rewards), torch.tensor(values), torch.tensor(lengths, dtype=torch.int64), gamma, lam)
    np.testing.assert_allclose(found.numpy(), slow_gae(rewards, values, lengths, gamma, lam), rtol=1e-10, atol=1e-12)


def test_the_reward_of_a_row_falls_on_its_last_token() -> None:
    stats, batch = make([3, 1, 4])
    found = GAE(gamma=0.9, lam=0.8, whiten=False)(stats, batch)
    rewards = np.zeros(8)
    rewards[[2, 3, 7]] = [batch.rewards[0], batch.rewards[3], batch.rewards[4]]
    expected = slow_gae(rewards, stats.values.double().numpy(), [3, 1, 4], 0.9, 0.8)
    np.testing.assert_allclose(found["advantages"].numpy(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["returns"], found["advantages"] + stats.values)
    assert torch.equal(found["values"], stats.values)


def test_rewards_per_token_take_the_place_of_the_row_reward() -> None:
    per_token = torch.tensor([0.0, 1.0, 0.0, -1.0])
    stats, batch = make([3, 1], token_rewards=per_token)
    found = GAE(gamma=1.0, lam=1.0, whiten=False)(stats, batch)
    torch.testing.assert_close(found["returns"], torch.tensor([1.0, 1.0, 0.0, -1.0]))


def test_returns_are_those_before_whitening() -> None:
    stats, batch = make([5, 2, 6], seed=1)
    plain = GAE(whiten=False)(stats, batch)
    white = GAE(whiten=True)(stats, batch)
    torch.testing.assert_close(plain["returns"], white["returns"])
    assert white["advantages"].mean().abs() < 1e-6
    assert white["advantages"].std() == pytest.approx(1.0, abs=1e-5)


def test_whitening_counts_unmasked_tokens_only() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 1000.0])
    white = whiten(values, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    torch.testing.assert_close(white[:3], torch.tensor([-1.0, 0.0, 1.0]))
    assert white.isfinite().all()


@pytest.mark.parametrize("mask", [[0.0, 0.0], [1.0, 0.0]])
def test_whitening_nearly_nothing_stays_finite(mask: list[float]) -> None:
    assert whiten(torch.tensor([3.0, 4.0]), torch.tensor(mask)).isfinite().all()


def test_masks_do_not_change_advantages() -> None:
    stats, batch = make([4, 3])
    _, masked = make([4, 3], mask=torch.tensor([1.0, 0, 0, 1, 0, 0, 1]))
    everything = GAE(whiten=False)(stats, batch)["advantages"]
    assert torch.equal(everything, GAE(whiten=False)(stats, masked)["advantages"])


def test_gae_needs_values_and_travels() -> None:
    _, batch = make([2])
    transform = unpack(pack(GAE(gamma=0.5)))
    assert transform == GAE(gamma=0.5)
    assert transform.needs_forward
    with pytest.raises(ValueError, match="head = 'value'"):
        transform(TokenStats(logprobs=torch.zeros(2)), batch)
