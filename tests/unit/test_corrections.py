"""Off-policy corrections: what each kind fills in, and that nothing is ever infinite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrlhf.ops import clipped_gain
from asyncrlhf.ops.corrections import fill

KINDS = ("none", "truncated_is", "masked_is", "decoupled")
PROXIMAL = torch.tensor([-1.0, -1.0, -1.0, -1.0])
BEHAVIOUR = torch.tensor([-1.0, -3.0, -1.5, -4.0])  # ratios 1, e^2, e^0.5, e^3


def test_none_leaves_the_ratio_to_the_loss() -> None:
    anchor, weight = fill("none", 2.0, PROXIMAL, BEHAVIOUR)
    assert torch.equal(anchor, BEHAVIOUR)
    assert torch.equal(weight, torch.ones(4))


def test_truncated_is_caps_the_ratio_that_the_loss_carries() -> None:
    anchor, weight = fill("truncated_is", 2.0, PROXIMAL, BEHAVIOUR)
    ratio = (PROXIMAL - BEHAVIOUR).exp()
    assert torch.equal(anchor, BEHAVIOUR)
    torch.testing.assert_close(ratio * weight, ratio.clamp(max=2.0))


def test_masked_is_drops_tokens_that_moved_too_far_either_way() -> None:
    both = torch.tensor([0.0, 0.6, 0.8, -0.6, -0.8])  # ln 2 = 0.693
    anchor, weight = fill("masked_is", 2.0, both, torch.zeros(5))
    assert torch.equal(anchor, torch.zeros(5))
    assert weight.tolist() == [1.0, 1.0, 0.0, 1.0, 0.0]


def test_decoupled_anchors_at_the_proximal_policy() -> None:
    anchor, weight = fill("decoupled", 2.0, PROXIMAL, BEHAVIOUR)
    assert torch.equal(anchor, PROXIMAL)
    torch.testing.assert_close(weight, (PROXIMAL - BEHAVIOUR).exp().clamp(max=2.0))


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_every_kind_is_the_plain_loss(kind: str) -> None:
    anchor, weight = fill(kind, 2.0, PROXIMAL, PROXIMAL.clone())
    assert torch.equal(anchor, PROXIMAL)
    assert torch.equal(weight, torch.ones(4))


@pytest.mark.parametrize("kind", KINDS)
@given(
    proximal=st.lists(st.floats(-200, 0, width=32), min_size=1, max_size=8),
    behaviour=st.floats(-200, 0, width=32),
    advantage=st.sampled_from([-2.0, 0.0, 2.0]),
)
def test_n9_any_gap_gives_finite_values_and_gradients(
    kind: str, proximal: list[float], behaviour: float, advantage: float
) -> None:
    new = torch.tensor(proximal, requires_grad=True)
    anchor, weight = fill(kind, 2.0, new.detach(), torch.full((len(proximal),), behaviour))
    gain = weight * clipped_gain((new - anchor).exp(), torch.full_like(anchor, advantage), 0.2, 0.28)
    gain.sum().backward()
    assert weight.min() >= 0
    assert gain.isfinite().all()
    assert new.grad is not None
    assert new.grad.isfinite().all()
    assert new.grad.norm().isfinite()


def test_an_anchor_infinitely_far_away_is_brought_near() -> None:
    anchor, weight = fill("none", 2.0, torch.tensor([-1.0]), torch.tensor([-torch.inf]))
    assert anchor.tolist() == [-21.0]
    assert weight.tolist() == [1.0]


def test_unknown_kinds_and_caps_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="off_policy = 'vtrace'"):
        fill("vtrace", 2.0, PROXIMAL, BEHAVIOUR)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="off_policy_cap = 0.5"):
        fill("none", 0.5, PROXIMAL, BEHAVIOUR)
