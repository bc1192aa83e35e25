"""Learning rates: a pure function of the train step, above 0 at the first and exact at the last."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from asyncrlhf.backends.torch.optimizer import Optimizer, learning_rate
from asyncrlhf.backends.torch.options import OptimizerOptions

PEAK = 3e-4


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    more=st.integers(1, 50),
    min_ratio=st.floats(0, 1),
)
def test_n11_rates_start_above_zero_peak_and_end_exactly(
    schedule: str, warmup: int, more: int, min_ratio: float
) -> None:
    total = warmup + more
    options = OptimizerOptions(
        learning_rate=PEAK,
        schedule=schedule,  # type: ignore[arg-type]
        warmup_steps=warmup,
        total_steps=total,
        min_ratio=min_ratio,
    )
    rates = [learning_rate(options, step) for step in range(total + 3)]
    assert rates[0] > 0
    assert max(rates) == PEAK
    assert rates[:warmup] == sorted(rates[:warmup])
    assert all(0 <= rate <= PEAK for rate in rates)
    if schedule == "constant":
        assert set(rates[warmup:]) == {PEAK}
    elif more > 1:
        assert rates[total - 1 :] == [PEAK * min_ratio] * 4
        assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_cosine_and_linear_at_half_way() -> None:
    for schedule in ("linear", "cosine"):
        options = OptimizerOptions(learning_rate=1.0, schedule=schedule, total_steps=11, min_ratio=0.2)  # type: ignore[arg-type]
        assert learning_rate(options, 5) == pytest.approx(0.6)
        assert learning_rate(options, 0) == 1.0


def test_a_run_of_one_step_runs_at_the_peak() -> None:
    options = OptimizerOptions(learning_rate=1.0, schedule="linear", total_steps=1, min_ratio=0.0)
    assert learning_rate(options, 0) == 1.0


def test_a_decay_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"total_steps \(10\) above warmup_steps \(10\)"):
        OptimizerOptions(schedule="cosine", warmup_steps=10, total_steps=10)


def test_m2_the_optimizer_holds_its_memory_from_the_start_and_steps_as_a_plain_one_does() -> None:
    options = OptimizerOptions(learning_rate=0.1, weight_decay=0.1, max_grad_norm=0.0)
    start = {"matrix": torch.randn(3, 4), "vector": torch.randn(5)}
    ours, plain = ({name: nn.Parameter(value.clone()) for name, value in start.items()} for _ in range(2))
    optimizer = Optimizer(ours, options)
    held = optimizer.state()["state"]
    assert [state["exp_avg"].shape for state in held.values()] == [(3, 4), (5,)]
    assert [state["exp_avg_sq"].shape for state in held.values()] == [(3, 4), (5,)]
    places = [state["exp_avg"].data_ptr() for state in held.values()]
    reference = torch.optim.AdamW(
        [{"params": [plain["matrix"]]}, {"params": [plain["vector"]], "weight_decay": 0.0}],
        lr=0.1,
        betas=options.betas,
        weight_decay=0.1,
        fused=True,
    )
    for step in range(3):
        for name in start:
            gradient = torch.randn(start[name].shape)
            ours[name].grad, plain[name].grad = gradient.clone(), gradient.clone()
        optimizer.step(step, optimizer.gradient_norm())
        reference.step()
        for name in start:
            assert torch.equal(ours[name], plain[name])
    assert [state["exp_avg"].data_ptr() for state in optimizer.state()["state"].values()] == places
