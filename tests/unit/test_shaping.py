"""What becomes of rewards, the KL control, statistics that add up, and what a loss over several rows is given."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrlhf import ops
from asyncrlhf.messages import ArrayColumn, Prompt, Rollout, Sample, Segment, Statistics, TrainBatch, pack, unpack

numbers = st.lists(st.floats(-100, 100), max_size=20)


@given(st.lists(numbers, min_size=1, max_size=5))
def test_statistics_add_up(parts: list[list[float]]) -> None:
    found = Statistics()
    for part in parts:
        if part:
            found += Statistics(count=len(part), mean=float(np.mean(part)), deviation=float(np.std(part)))
    everything = [number for part in parts for number in part]
    assert found.count == len(everything)
    if everything:
        assert found.mean == pytest.approx(np.mean(everything), abs=1e-9)
        assert found.deviation == pytest.approx(np.std(everything), abs=1e-6)


def test_statistics_of_a_column() -> None:
    batch = TrainBatch(
        train_step=0,
        prompt_lengths=(1, 1),
        response_lengths=(1, 1),
        unmasked=(1, 0),
        rollouts=(0, 1),
        columns={"kl": ArrayColumn("sample", (np.array([1.0], np.float32), np.array([4.0], np.float32)))},
    )
    assert batch.statistics("kl") == Statistics(count=2, mean=2.5, deviation=1.5)


def test_the_coefficient_of_a_fixed_penalty_stays_whatever_it_was_before() -> None:
    fixed, none = ops.KLControl(coefficient=0.1), ops.KLControl(coefficient=0.0, target=6.0)
    assert (fixed.start(0.0), fixed.start(0.7), fixed.next(0.1, 1e9)) == (0.1, 0.1, 0.1)
    assert (none.start(0.0), none.start(0.7), none.next(0.0, 100.0)) == (0.0, 0.0, 0.0)
    assert ops.KLControl(coefficient=0.0).needs_groups == ()
    assert ops.KLControl().needs_groups == ("reference",)


@pytest.mark.parametrize(("kl", "error"), [(6.0, 0.0), (6.6, 0.1), (60.0, 0.2), (0.0, -0.2), (math.nan, 0.0)])
def test_a_controlled_coefficient_moves_towards_the_target(kl: float, error: float) -> None:
    """e = clip((KL - target) / target, -0.2, 0.2), beta <- beta (1 + 0.1 e): arXiv 1909.08593 section 2.2."""
    control = ops.KLControl(coefficient=0.5, target=6.0)
    assert (control.start(0.0), control.start(0.2)) == (0.5, 0.2)
    assert control.next(0.2, kl) == pytest.approx(0.2 * (1 + 0.1 * error))


def test_a_loop_with_the_controller_comes_to_its_target() -> None:
    control, coefficient = ops.KLControl(coefficient=0.01, target=3.0, gain=0.5), 0.01
    for _ in range(300):
        kl = 1 / max(coefficient, 0.01)  # a policy that the penalty holds back
        coefficient = control.next(coefficient, kl)
    assert 1 / coefficient == pytest.approx(3.0, rel=0.01)


def micro_batch(**columns: torch.Tensor) -> ops.MicroBatch:
    """Rows of 2, 3, 1 and 2 tokens; the first two and the last two are rollouts. Row 2 is masked, and one of row 1."""
    mask = torch.tensor([1.0, 1, 1, 0, 1, 0, 1, 1])
    return ops.MicroBatch(torch.tensor([2, 3, 1, 2]), {"mask": mask, **columns}, torch.tensor([0, 0, 1, 1]))


def test_every_token_gets_the_value_at_the_end_of_its_row() -> None:
    x = torch.arange(8, dtype=torch.float64, requires_grad=True)
    found = micro_batch().last_of_sequence(x)
    assert found.tolist() == [1, 1, 4, 4, 4, 5, 7, 7]
    (found * found).sum().backward()
    assert x.grad is not None
    assert x.grad.nonzero().flatten().tolist() == [1, 4, 5, 7]


def test_every_token_gets_the_mean_over_the_rows_of_its_rollout() -> None:
    x = torch.arange(8, dtype=torch.float64, requires_grad=True)
    found = micro_batch().mean_by_rollout(x)
    assert found.tolist() == [(0.5 + 3) / 2] * 5 + [6.5] * 3
    assert torch.autograd.gradcheck(micro_batch().mean_by_rollout, x)
    alone = ops.MicroBatch(torch.tensor([2, 1]), {"mask": torch.ones(3)})
    assert alone.mean_by_rollout(torch.tensor([1.0, 2.0, 5.0])).tolist() == [1.5, 1.5, 5.0]


@pytest.mark.parametrize(
    ("scale", "ends"),
    [
        (ops.RewardScale(normalise=False, clip=0), [3.0, -9.0, 1.0, 0.0]),
        (ops.RewardScale(normalise=False, clip=2), [2.0, -2.0, 1.0, 0.0]),
        (ops.RewardScale(clip=2), [1.0, -2.0, 0.0, -0.5]),
    ],
)
def test_rewards_are_scaled_and_fall_on_last_tokens(scale: ops.RewardScale, ends: list[float]) -> None:
    batch = micro_batch(**{"sample:rewards": torch.tensor([3.0, -9.0, 1.0, 0.0])})
    transform = ops.TokenRewards(scale=scale, seen=Statistics(count=4, mean=1.0, deviation=2.0))
    found = unpack(pack(transform))(None, batch)
    assert found.keys() == {"token_rewards", "scaled_reward"}
    assert found["token_rewards"].tolist() == pytest.approx([0, ends[0], 0, 0, ends[1], ends[2], 0, ends[3]])
    assert float(found["scaled_reward"]) == pytest.approx(sum(ends) / 4)


def test_the_penalty_is_in_the_rewards_or_a_weight_for_the_loss() -> None:
    columns = {"behaviour_logprobs": torch.full((8,), -1.0), "reference_logprobs": torch.full((8,), -3.0)}
    batch = micro_batch(**{"sample:rewards": torch.zeros(4)}, **columns)
    scale = ops.RewardScale(normalise=False)
    inside = ops.TokenRewards(scale=scale, seen=Statistics(), kl=0.25)(None, batch)
    assert inside["token_rewards"].tolist() == [-0.5] * 8
    outside = ops.TokenRewards(scale=scale, seen=Statistics(), kl=0.25, kl_in="loss")(None, batch)
    assert (outside["token_rewards"].any(), outside["kl_weight"].tolist()) == (False, [0.25] * 8)


def test_the_kl_of_an_answer_is_the_sum_over_its_tokens() -> None:
    samples = tuple(
        Sample(token_ids=(1, 2), logprobs=p, segments=(Segment(version=0, token_count=2),), finish_reason="stop")
        for p in ((-1.0, -2.0), (-0.5, -0.5))
    )
    prompt = Prompt(uid=0, epoch=0, attempt=1, version=0, token_ids=(1,), text="a")
    assert ops.sequence_kl(Rollout(prompt=prompt, samples=samples), ((-2.0, -4.0), (-0.5, 0.0))) == (3.0, -0.5)
