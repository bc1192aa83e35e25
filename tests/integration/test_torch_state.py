"""What a torch trainer gives away: states, Hugging Face directories, and published weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrlhf.errors import CheckpointError, PublishRefused
from asyncrlhf.messages import ArrayColumn, pack
from asyncrlhf.ops.advantages import GAE
from asyncrlhf.weights.checksum import checksum
from asyncrlhf.weights.inproc import InprocTransfer
from tests.integration.torch_scene import (
    CHARACTERS,
    PolicyLoss,
    ValueLoss,
    distance,
    make_batch,
    make_model,
    trainer,
    weights,
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("policy"))


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
