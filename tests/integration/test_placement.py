"""PPO with five models under every placement: the same weights without staleness, and one group at a time on shared
devices."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from asyncrlhf.backends.torch.options import TrainerOptions
from asyncrlhf.backends.torch.scratch import write_model
from asyncrlhf.backends.torch.train import TorchTrainer
from asyncrlhf.observe import EngineBusy
from tests.integration.placement_scene import MODEL, busy, finished, initial, metrics, turns, weights

Weights = dict[str, np.ndarray]
EVERYTHING = ("rollout", "policy", "critic", "reference", "reward")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a reward model in judge/, whose head is random."""
    directory = tmp_path_factory.mktemp("placement")
    write_model(directory / "plain", characters="abcdefgh>", config=MODEL, seed=5)
    (directory / "judge").mkdir()
    trainer = TorchTrainer(TrainerOptions(model=str(directory / "plain"), head="value", device="cpu"))
    trainer.save_model(directory / "judge")
    file = directory / "judge" / "model.safetensors"
    tensors = load_file(file)
    head = np.random.default_rng(0).normal(size=tensors["score.weight"].shape)
    save_file({**tensors, "score.weight": head.astype(np.float32)}, file, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def expected(workplace: Path) -> Weights:
    """The weights of a run in which every group has its own engine thread, and nobody takes turns."""
    before = Path.cwd()
    os.chdir(workplace)
    try:
        finished()
        return weights()
    finally:
        os.chdir(before)


@pytest.fixture(autouse=True)
def inside(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)


def require_same(found: Weights, expected: Weights) -> None:
    """Up to a hundredth of the way from the start; where a gradient is 0 but for rounding, Adam makes steps of it."""
    start = initial()
    assert found.keys() == expected.keys() == start.keys()
    for group in ("policy", "critic"):
        names = [name for name in expected if name.startswith(group)]
        way, gap = (
            np.sqrt(sum(float(np.square(expected[name] - other[name]).sum()) for name in names))
            for other in (start, found)
        )
        assert way > 0.1
        assert gap < 0.01 * way, f"{group} is {gap:.3g} away, and has gone {way:.3g}"


def overlapping(*groups: str) -> list[tuple[EngineBusy, EngineBusy]]:
    """Moments at which two of these groups computed at once. Taking and giving up answers is no computing."""
    events = [event for event in busy() if event.work not in ("add", "abort")]
    return [
        (a, b)
        for one, two in combinations(groups, 2)
        for a in events
        if a.group == one
        for b in events
        if b.group == two and a.start < b.end and b.start < a.end
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("strategy", "in_turn", "offload"),
    [
        ("colocate", EVERYTHING, "always"),
        ("flattening", EVERYTHING, "never"),
        ("alternating", EVERYTHING, "always"),
        ("alternating", EVERYTHING, "never"),
        ("interleaving", EVERYTHING[:4], "always"),
        ("split", ("rollout", "policy", "reference"), "always"),
        ("standalone", ("rollout", "policy"), "never"),
        ("async", (), "auto"),
        ("separation", (), "auto"),
    ],
)
def test_every_strategy_trains_the_same_weights(
    strategy: str, in_turn: tuple[str, ...], offload: str, expected: Weights
) -> None:
    finished(f"placement.strategy={strategy}", f"placement.offload={offload}")
    require_same(weights(), expected)
    assert not overlapping(*in_turn)
    assert {event.group for event in turns()} >= set(in_turn)
    require_moves(offload == "always")


def require_moves(moves: bool) -> None:
    """Whether those that had their turn took their memory along."""
    works = {event.work for event in busy()}
    assert {"sleep", "wake", "offload", "onload"} & works == (
        {"sleep", "wake", "offload", "onload"} if moves else set()
    )


@pytest.mark.parametrize("offload", ["always", "auto"])
def test_a_shared_shadow_takes_turns_with_the_rollout_engine(offload: str, expected: Weights) -> None:
    shared = ("placement.strategy=separation", "placement.shared_shadow=true", "groups.shadow_critic.replicas=2")
    finished(*shared, f"placement.offload={offload}")
    require_same(weights(), expected)
    require_moves(offload == "always")
    assert not overlapping("rollout", "shadow_critic")
    rows = metrics()
    assert [row["shadow_critic/version"] for row in rows] == [row["train_step"] for row in rows]
    assert not [event for event in busy() if event.group == "critic" and event.work == "logprobs"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("offload", ["always", "never"])
def test_alternating_interrupts_answers_and_goes_on_with_new_weights(offload: str) -> None:
    ahead = ("max_staleness=2", "lookahead=1", "off_policy=decoupled", "order=ready")
    finished("placement.strategy=alternating", f"placement.offload={offload}", *ahead)
    require_moves(offload == "always")
    assert not overlapping(*EVERYTHING)
    assert [row["train_step"] for row in metrics()] == list(range(6))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("runtime", "strategy", "offload"),
    [
        ("local", "colocate", "always"),
        ("local", "separation", "auto"),
        ("ray", "colocate", "always"),
        ("ray", "colocate", "auto"),
    ],
)
def test_processes_take_turns_as_threads_do(runtime: str, strategy: str, offload: str, expected: Weights) -> None:
    finished(f"runtime={runtime}", f"placement.strategy={strategy}", f"placement.offload={offload}")
    require_same(weights(), expected)
    if strategy == "colocate":
        assert not overlapping(*EVERYTHING)
