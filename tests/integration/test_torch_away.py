"""The torch engines on devices that they share: memory that is given back, and what comes back with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncrlhf.abc import ScoreEngine
from asyncrlhf.backends.torch.away import Away
from asyncrlhf.backends.torch.options import ScorerOptions, ShadowOptions
from asyncrlhf.backends.torch.score import TorchScorer
from asyncrlhf.backends.torch.shadow import TorchShadow
from asyncrlhf.errors import GroupError
from asyncrlhf.messages import pack
from asyncrlhf.testing import FakeScorer, FakeTrainer, FakeTrainerOptions
from asyncrlhf.weights.inproc import InprocTransfer
from tests.integration.torch_sampling import Log, sampler
from tests.integration.torch_scene import PolicyLoss, make_batch, make_model, make_requests, trainer

INPROC = "asyncrlhf.weights.inproc:InprocTransfer"
SIZE = 2 * 3 * 256 * 12288 * 4
"""Bytes of the two layers of `large`, about."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("large"), hidden_size=256, intermediate_size=12288)


def resident() -> int:
    """Bytes of memory that this process has to itself."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def test_tensors_come_back_as_they_went() -> None:
    whole = torch.randn(6, 4)
    tensors = [whole, whole[2:], torch.arange(5), torch.empty(0)]
    before = [tensor.clone() for tensor in tensors]
    away = Away(tensors)
    assert sum(kept.nbytes() for _, kept in away._kept) == 6 * 4 * 4 + 5 * 8, "what two of them share is kept once"
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * 4
    away.back()
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(tensors, before, strict=True))
    assert whole[2:].data_ptr() == tensors[1].data_ptr()


def test_a_step_does_not_see_that_weights_and_moments_were_away(model: str) -> None:
    stayed, went = trainer(model), trainer(model)
    for engine in (stayed, went):
        assert engine.step(make_batch(seed=1), pack(PolicyLoss())).applied
    held = [*went._model.module.parameters(), *went._model.module.buffers()]
    held += [tensor for own in went._optimizer._adamw.state.values() for tensor in own.values()]
    away = Away(tensor.detach() for tensor in held)
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
    away.back()
    for engine in (stayed, went):
        assert engine.step(make_batch(seed=2), pack(PolicyLoss())).applied
    for name, parameter in stayed._model.parameters().items():
        torch.testing.assert_close(went._model.parameters()[name], parameter, rtol=1e-4, atol=1e-6)


def torch_scorer(model: str) -> ScoreEngine:
    return TorchScorer(ScorerOptions(model=model, device="cpu"))


@pytest.mark.parametrize("make", [trainer, torch_scorer, lambda _: FakeTrainer(FakeTrainerOptions()),
                                  lambda _: FakeScorer(FakeTrainerOptions())])  # fmt: skip
def test_M1_an_engine_that_is_offloaded_is_asked_for_nothing(model: str, make: Callable[[str], Any]) -> None:
    engine, batch = make(model), make_batch()
    verbs: list[Callable[[], Any]] = [lambda: engine.logprobs(batch)]
    if isinstance(engine, FakeTrainer | type(trainer(model))):
        verbs += [lambda: engine.step(batch, pack(PolicyLoss())), lambda: engine.export(1)]
    before = engine.logprobs(batch)
    engine.offload()
    engine.offload()
    for verb in verbs:
        with pytest.raises(GroupError, match="offloaded"):
            verb()
    engine.onload()
    engine.onload()
    for found, expected in zip(engine.logprobs(batch), before, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for verb in verbs:
        assert verb() is not None


def test_gradients_go_with_offload(model: str) -> None:
    engine = trainer(model)
    for parameter in engine._model.parameters().values():
        parameter.grad = torch.ones_like(parameter)
    engine.offload()
    engine.onload()
    assert all(parameter.grad is None for parameter in engine._model.parameters().values())


def test_M1_a_sampler_that_sleeps_has_no_weights(large: str) -> None:
    """Awake: two sets. Asleep: none. Woken: one."""
    log = Log(sampler(large))
    follows = trainer(large)
    first = follows.export(0)
    log.publish(first, 0)
    log.run(make_requests(8), steps=3)
    awake = resident()
    log.take(log.engine.sleep())
    asleep = resident()
    assert awake - asleep > 1.5 * SIZE
    assert not log.engine._cache._layers  # type: ignore[attr-defined]
    log.engine.wake(first)
    assert 0.5 * SIZE < resident() - asleep < 1.5 * SIZE
    assert len(log.run([])) == 8


def test_a_sleep_that_is_not_followed_by_other_weights_changes_no_answer(model: str) -> None:
    follows = trainer(model)
    first = follows.export(1)
    plain, sleepy = Log(sampler(model)), Log(sampler(model))
    for log in (plain, sleepy):
        log.publish(first, 1)
        log.run(make_requests(12, max_tokens=9), steps=4)
    sleepy.take(sleepy.engine.sleep())
    sleepy.engine.wake(first)
    expected, found = plain.run([]), sleepy.run([])
    for name, sample in expected.items():
        assert found[name].token_ids == sample.token_ids
        assert found[name].segments == sample.segments
        assert found[name].logprobs == pytest.approx(sample.logprobs, rel=1e-4, abs=1e-6)
    assert sleepy.reported == plain.reported


class Breaks:
    """A transport that is lost after the first tensor."""

    def send(self, version: int, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        raise OSError("not here")

    def receive(self, payload: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(InprocTransfer().receive(payload)))
        raise OSError("lost")


def test_M1_a_sampler_whose_weights_are_lost_as_it_wakes_holds_none_and_can_be_woken_again(model: str) -> None:
    log, follows = Log(sampler(model)), trainer(model)
    first = follows.export(0)
    log.take(log.engine.sleep())
    with pytest.raises(OSError, match="lost"):
        log.engine.wake(msgspec.structs.replace(first, transport=f"{__name__}:Breaks"))
    assert log.engine.asleep
    assert not any(parameter.numel() for parameter in log.engine._replica._parameters.values())
    log.engine.wake(first)
    assert len(log.run(make_requests(3))) == 3


def test_M1_a_shadow_that_is_offloaded_takes_no_weights(model: str) -> None:
    shadow = TorchShadow(ShadowOptions(model=model, device="cpu", head="value", transport=INPROC))
    follows = trainer(model, head="value")
    first = follows.export(0)
    shadow.offload()
    for verb in (lambda: shadow.prepare(first), lambda: shadow.commit(0, "rebuild")):
        with pytest.raises(GroupError, match="offloaded"):
            verb()
    shadow.onload()
    shadow.prepare(first)
    shadow.commit(0, "rebuild")
