"""Several ranks train one model: an objective, weights, columns and files that their number cannot change."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from algorithms.reward_model import BradleyTerryLoss
from asyncrlhf.backends.torch.model import Model
from asyncrlhf.backends.torch.options import OptimizerOptions
from asyncrlhf.backends.torch.probe import require_all_learn
from asyncrlhf.backends.torch.replica import Replica
from asyncrlhf.errors import ConfigError, EngineLost, GroupError, PublishRefused
from asyncrlhf.groups.protocols import shares
from asyncrlhf.messages import ArrayColumn, TrainBatch, pack
from asyncrlhf.ops import Loss
from asyncrlhf.ops.advantages import GAE
from asyncrlhf.weights.checksum import checksum
from tests.integration.crew import Crew
from tests.integration.torch_scene import (
    ConstantLoss,
    EntropyLoss,
    PolicyLoss,
    SequenceMeanLoss,
    SequenceRatioLoss,
    ValueLoss,
    distance,
    gradients,
    make_batch,
    make_model,
    replace_token,
    trainer,
    weights,
)

pytestmark = pytest.mark.timeout(600)
SHARDINGS = ["none", "full"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew(4)
    yield crew
    crew.close()


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_n6_gradients_do_not_depend_on_the_ranks(crew: Crew, model: str, ranks: int, sharding: str) -> None:
    batch = make_batch()
    cuts: list[dict[str, Any]] = [
        {"micro_batch_rows": 1},
        {"micro_batch_rows": 2},
        {"micro_batch_rows": 8, "layout": "shared"},
        {"layout": "packed", "gradient_checkpointing": True},
    ]
    expected = {
        kind: gradients(trainer(model, micro_batch_rows=100), batch, kind())
        for kind in (PolicyLoss, SequenceMeanLoss, ConstantLoss, SequenceRatioLoss, EntropyLoss)
    }
    for cut in cuts:
        crew.become(model, ranks, sharding=sharding, **cut)
        for kind, whole in expected.items():
            assert distance(crew.gradients(batch, kind()), whole) < 1e-5, (kind, cut)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_n6_bfloat16_is_that_of_one_rank(crew: Crew, model: str, sharding: str) -> None:
    """A row gives the same products whoever computes them: only the order of float32 sums differs."""
    batch, options = make_batch(masked=0.0), {"dtype": "bfloat16", "micro_batch_rows": 1}
    expected = gradients(trainer(model, **options), batch, PolicyLoss())
    exact = gradients(trainer(model), batch, PolicyLoss())
    crew.become(model, 2, sharding=sharding, gradient_checkpointing=sharding == "full", **options)
    found = crew.gradients(batch, PolicyLoss())
    assert distance(found, expected) < 1e-2 * distance(expected, exact)


def with_returns(batch: TrainBatch) -> TrainBatch:
    random = np.random.default_rng(5)
    rows = tuple(random.normal(0, 1, n).astype(np.float32) for n in batch.response_lengths)
    return batch.with_columns(returns=ArrayColumn("token", rows))


def pairs(batch: TrainBatch) -> TrainBatch:
    """Rows two and two, the first of them preferred."""
    count = len(batch) // 2 * 2
    batch = batch.take(range(count))
    signs = tuple(np.full(1, 1.0 - 2 * (row % 2), np.float32) for row in range(count))
    masks = tuple(np.ones(n, np.float32) for n in batch.response_lengths)
    columns = {"sign": ArrayColumn("sample", signs), "mask": ArrayColumn("token", masks)}
    return TrainBatch(
        train_step=3,
        prompt_lengths=batch.prompt_lengths,
        response_lengths=batch.response_lengths,
        unmasked=batch.response_lengths,
        rollouts=tuple(row // 2 for row in range(count)),
        columns={**batch.columns, **columns},
    )


SCENES: dict[str, tuple[dict[str, Any], Loss]] = {
    "policy": ({}, PolicyLoss()),
    "entropy": ({"layout": "shared"}, EntropyLoss()),
    "critic": ({"head": "value"}, ValueLoss()),
    "pairs": ({"head": "value"}, BradleyTerryLoss()),
}


def batches(scene: str, rows: int = 11) -> list[TrainBatch]:
    found = [with_returns(make_batch(rows=rows, seed=seed)) for seed in range(3)]
    return [pairs(batch) for batch in found] if scene == "pairs" else found


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("scene", SCENES)
def test_n6_three_steps_give_the_weights_and_measures_of_one_rank(
    crew: Crew, model: str, scene: str, ranks: int, sharding: str
) -> None:
    options, loss = SCENES[scene]
    # Adam's first steps are signs of gradients: one in round-off is amplified, unless eps is above it.
    options = options | {"optimizer": OptimizerOptions(learning_rate=1e-2, eps=1e-3, max_grad_norm=0.5)}
    alone, together = trainer(model, **options), crew.become(model, ranks, sharding=sharding, **options)
    for batch in batches(scene):
        expected, found = alone.step(batch, pack(loss)), together.step(batch, loss)
        assert found.applied == expected.applied
        assert found.metrics == pytest.approx(dict(expected.metrics), rel=1e-4, abs=1e-6)
    torch.testing.assert_close(crew.weights(), weights(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(("rows", "ranks"), [(9, 4), (2, 4), (1, 2)])
def test_n12_every_rank_steps_whatever_rows_there_are(
    crew: Crew, model: str, rows: int, ranks: int, sharding: str
) -> None:
    batch = make_batch(rows=max(rows, 2)).take(range(rows))
    alone, together = trainer(model), crew.become(model, ranks, sharding=sharding)
    assert min(map(len, shares(batch, ranks))) == (0 if rows < ranks else 2)
    expected = alone.step(batch, pack(PolicyLoss()))
    every = crew.each("step", [(part, pack(PolicyLoss())) for part in parts(batch, ranks)])
    for found in every:
        assert found == every[0]
        assert found.metrics == pytest.approx(dict(expected.metrics), rel=1e-4, abs=1e-6)
    probed = together.call("logprobs", batch)
    for ours, theirs in zip(probed, alone.logprobs(batch), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def parts(batch: TrainBatch, ranks: int) -> list[TrainBatch]:
    return [batch.take(rows).without_origin() for rows in shares(batch, ranks)]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_n8_a_gradient_that_is_not_finite_on_one_rank_makes_all_skip(crew: Crew, model: str, sharding: str) -> None:
    batch = make_batch(masked=0.0)
    crew.become(model, 2, sharding=sharding)
    before = crew.weights()
    bad = replace_token(batch, "advantages", 0, 0, math.nan)
    every = crew.each("step", [(part, pack(PolicyLoss())) for part in parts(bad, 2)])
    assert [(found.applied, found.reason) for found in every] == [(False, "not_finite")] * 2
    assert distance(crew.weights(), before) == 0
    assert crew.step(make_batch(masked=1.0), PolicyLoss()).reason == "empty"
    assert crew.step(batch, PolicyLoss()).applied
    assert distance(crew.weights(), before) > 0


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_transform_sees_all_rows_and_the_values_of_every_rank(crew: Crew, model: str, sharding: str) -> None:
    batch = make_batch()
    alone, together = trainer(model, head="value"), crew.become(model, 4, head="value", sharding=sharding)
    for seed in range(2):  # the head starts at 0
        alone.step(with_returns(make_batch(seed=seed)), pack(ValueLoss()))
        together.step(with_returns(make_batch(seed=seed)), ValueLoss())
    transform = pack(GAE(gamma=0.99, lam=0.9))
    rewards = ArrayColumn("token", tuple(np.ones(n, np.float32) for n in batch.response_lengths))
    batch = batch.with_columns(token_rewards=rewards)
    expected, found = alone.apply(transform, batch), together.call("apply", transform, batch)
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        ours, theirs = (np.hstack([value] if isinstance(value, float) else value) for value in (found[name], column))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(together.call("scores", batch), alone.scores(batch), rtol=1e-4, atol=1e-5)


def test_a_sharded_rank_keeps_its_part_only(crew: Crew, model: str) -> None:
    whole = sum(crew.become(model, 2).call("kept_numbers"))
    parts = crew.become(model, 2, sharding="full").call("kept_numbers")
    assert sum(parts) < 0.51 * whole
    assert max(parts) < 1.2 * min(parts)


def test_M1_parts_whose_memory_was_another_s_for_a_while_train_on_alike(crew: Crew, model: str) -> None:
    first, second = make_batch(seed=1), make_batch(seed=2)
    found: list[dict[str, torch.Tensor]] = []
    for goes in (False, True):
        crew.become(model, 2, sharding="full")
        assert crew.step(first, PolicyLoss()).applied
        if goes:
            assert crew.call("go_and_come_back") == [0, 0]
        assert crew.step(second, PolicyLoss()).applied
        found.append(crew.weights())
    for name, stayed in found[0].items():
        torch.testing.assert_close(found[1][name], stayed, rtol=1e-4, atol=1e-6)


def test_a_parameter_that_nothing_depends_on_is_named_before_replicas_wait_for_it(model: str) -> None:
    found = Model(model, device="cpu", trained=True)
    require_all_learn(found)
    assert all(parameter.grad is None for parameter in found.parameters().values())
    found.module.register_parameter("idle", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(ConfigError, match="qwen2 has 1 parameters .* among them 'idle'"):
        require_all_learn(found)


LAYOUTS = [(1, "none"), (2, "none"), (2, "full"), (4, "full")]


def test_a_state_goes_on_in_any_layout(crew: Crew, model: str, tmp_path: Path) -> None:
    """Saved by each, loaded by each: the next step is that of the one which saved, bit for bit in the same layout."""

    def become(ranks: int, sharding: str) -> Any:
        if ranks > 1:
            return crew.become(model, ranks, sharding=sharding)
        return Alone(trainer(model))

    saved: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for layout in LAYOUTS:
        engine = become(*layout)
        for seed in range(2):
            engine.step(make_batch(seed=seed), PolicyLoss())
        engine.call("save_state", tmp_path / f"{layout}")
        engine.step(make_batch(seed=7), PolicyLoss())
        saved[layout] = engine.weights()
    for target in LAYOUTS:
        for source in LAYOUTS:
            engine = become(*target)
            engine.call("load_state", tmp_path / f"{source}")
            engine.step(make_batch(seed=7), PolicyLoss())
            assert distance(engine.weights(), saved[source]) < (1e-12 if source == target else 1e-5), (source, target)


class Alone:
    """One rank, called as a Crew is."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def call(self, verb: str, *arguments: Any) -> Any:
        return getattr(self.engine, verb)(*arguments)

    def step(self, batch: TrainBatch, loss: Loss) -> Any:
        return self.engine.step(batch, pack(loss))

    def weights(self) -> dict[str, torch.Tensor]:
        return weights(self.engine)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("tied", [True, False])
def test_what_ranks_publish_and_write_is_the_model(crew: Crew, tmp_path: Path, tied: bool, sharding: str) -> None:
    source = make_model(tmp_path / "source", tie_word_embeddings=tied)
    transport = "asyncrlhf.weights.shared:SharedMemoryTransfer"
    crew.become(source, 2, sharding=sharding, transport=transport)
    alone = trainer(source, transport=transport)
    first, expected = crew.call("export", 0), alone.export(0)
    assert (first.checksum, first.byte_count) == (expected.checksum, expected.byte_count)
    assert first.probe is not None
    assert expected.probe is not None
    assert first.probe.token_ids == expected.probe.token_ids
    np.testing.assert_allclose(first.probe.logprobs, expected.probe.logprobs, atol=1e-5)
    crew.step(make_batch(), PolicyLoss())
    handle = crew.call("export", 1)
    assert handle.changed
    assert handle.checksum != first.checksum
    read = {name: torch.from_numpy(array) for name, array in crew.call("read", handle).items()}
    assert checksum(read) == handle.checksum
    assert distance(crew.weights(), read) == 0
    assert not crew.call("export", 2).changed
    crew.call("save_model", tmp_path / "saved")
    again = trainer(str(tmp_path / "saved"))
    assert distance(weights(again), read) == 0
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == sorted(p.name for p in Path(source).iterdir())
    assert (tmp_path / "saved/config.json").read_text() == (Path(source) / "config.json").read_text()
    assert stored(tmp_path / "saved") == stored(Path(source))


def stored(directory: Path) -> set[str]:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_n7_all_ranks_refuse_to_publish_weights_that_are_not_finite(crew: Crew, model: str, sharding: str) -> None:
    crew.become(model, 2, sharding=sharding, optimizer=OptimizerOptions(learning_rate=1e38, max_grad_norm=0.0))
    crew.step(make_batch(), PolicyLoss())
    crew.step(make_batch(), PolicyLoss())
    with pytest.raises(PublishRefused, match="not finite"):
        crew.call("export", 1)
    crew.become(model, 2)  # all of them are still there


def test_a_rank_that_dies_before_engines_have_read_leaves_them_the_old_weights(model: str) -> None:
    """kill -9 between what it has put and the commit."""
    transport = "asyncrlhf.weights.shared:SharedMemoryTransfer"
    follower = Model(model, device="cpu")
    replica, two = Replica(follower, transport), Crew(2)
    try:
        two.become(model, 2, sharding="full", transport=transport)
        replica.prepare(two.call("export", 0))
        replica.commit(0)
        before = {name: parameter.detach().clone() for name, parameter in follower.parameters().items()}
        assert distance(before, two.weights()) == 0
        two.step(make_batch(), PolicyLoss())
        handle = two.call("export", 1)
        os.kill(handle.payload["shards"][1]["pid"], signal.SIGKILL)
        with pytest.raises(EngineLost):
            two.call("step", make_batch(), pack(PolicyLoss()))
        with pytest.raises(GroupError, match="weights of version 1 are gone"):
            replica.prepare(handle)
        with pytest.raises(ValueError, match="without prepare"):
            replica.commit(1)
        assert distance(dict(follower.parameters()), before) == 0
    finally:
        two.close()
