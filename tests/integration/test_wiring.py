"""Rules between an algorithm's fields and a configuration, whatever its fields are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrlhf.config.load import load
from asyncrlhf.errors import ConfigError
from asyncrlhf.wiring import wire
from tests.integration.tiny import grpo

STALE = "train_steps = 2\nprompts_per_step = 2\nanswers_per_prompt = 2\nmax_staleness = 2\noff_policy = 'decoupled'\n"


def wiring_of(directory: Path, algorithm: str, top: str = "") -> object:
    path = directory / "config.toml"
    path.write_text(grpo(algorithm=f"tests.integration.odd_algorithms:{algorithm}", top=STALE + top))
    return wire(load(str(path)))


def test_any_sequence_level_loss_refuses_mask(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="settings.second_loss .* whole sequences"):
        wiring_of(tmp_path, "BySequence")
    assert wiring_of(tmp_path, "BySequence", "at_deadline = 'wait'\n")


def test_a_default_coefficient_needs_its_group_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"settings.loss needs a group 'reference'.*\[groups.reference\]"):
        wiring_of(tmp_path, "Anchored")


def test_an_algorithm_names_the_keys_it_requires(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        "algorithm = 'algorithms.sft:SFT'\nrun_dir = 'run'\ntrain_steps = 1\nprompts_per_step = 1\n"
        "[data]\nsource = 'asyncrlhf.data.tasks:reverse'\n[groups.policy]\nmodel = 'nowhere'\n"
    )
    with pytest.raises(ConfigError, match="data.response is missing; algorithms.sft:SFT needs it"):
        wire(load(str(path)))


def test_vllm_would_raise_a_temperature_of_the_evaluation_too(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(grpo(top=STALE))
    vllm, source = "groups.rollout.backend=vllm", "evaluation.source=asyncrlhf.data.tasks:reverse"
    evaluated = [source, "evaluation.every=1"]
    with pytest.raises(ConfigError, match=r'evaluation.temperature = 0.009, and groups.rollout.backend = "vllm"'):
        wire(load(str(path), [vllm, *evaluated, "evaluation.temperature=0.009"]))
    for lowest in ("0", "0.01"):
        assert wire(load(str(path), [vllm, *evaluated, f"evaluation.temperature={lowest}"]))
    assert wire(load(str(path), [*evaluated, "evaluation.temperature=0.009"]))
    assert wire(load(str(path), [vllm, "evaluation.temperature=0.009"]))


PPO = grpo(algorithm="algorithms.ppo:PPO", top=STALE, groups="[groups.critic]\nmodel = 'rm'\n")


def test_a_penalty_needs_a_reference_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(PPO)
    with pytest.raises(ConfigError, match=r"settings.kl needs a group 'reference'.*\[groups.reference\]"):
        wire(load(str(path)))
    with pytest.raises(ConfigError, match=r"settings.kl_in = \"both\" is not a choice"):
        wire(load(str(path), ["settings.kl_in=both"]))
    assert wire(load(str(path), ["settings.kl.coefficient=0"])).of_role("reference") == []
    assert wire(load(str(path), ["groups.reference={}"])).of_role("reference") == ["reference"]


def test_a_rejected_answer_needs_a_better_one(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(PPO)
    with pytest.raises(ConfigError, match=r'data.rejected = "b" has no answer to be worse than; set response as well'):
        load(str(path), ["data.rejected=b"])


def test_m3_every_group_has_a_memory_budget_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(grpo(top=STALE, groups="[groups.reference]\n"))
    wanted = {
        "policy": ("micro_batch_tokens", 111),
        "reference": ("micro_batch_tokens", 222),
        "rollout": ("concurrency", 3),
    }
    wiring = wire(load(str(path), [f"groups.{name}.{key}={value}" for name, (key, value) in wanted.items()]))
    for name, (key, value) in wanted.items():
        assert getattr(wiring.tables[name], key) == value
    plain = wire(load(str(path), ["groups.policy.micro_batch_tokens=111"]))
    assert plain.tables["reference"] == wire(load(str(path))).tables["reference"]
