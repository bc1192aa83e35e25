"""A run that has lost a trained model goes on, also when the cluster has too little at first."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrlhf import launch
from asyncrlhf.control.signals import StopSignals
from asyncrlhf.errors import CheckpointError, ConfigError

LACKING = ConfigError("pools.training needs 2 devices, the cluster has 1")


def outcome(monkeypatch: pytest.MonkeyPatch, *ends: object, restarts: int = 3) -> tuple[int, list[float]]:
    """The exit code of a run whose sessions end like this, and for how long it has waited in between."""
    directory = SimpleNamespace(path="run", resume=lambda kind: None, newest=lambda kind: None)
    config = SimpleNamespace(limits=SimpleNamespace(max_restarts=restarts))
    stage: Any = SimpleNamespace(config=config, directory=directory, wiring=SimpleNamespace(experience_type=None))
    coming: Iterator[Any] = iter(ends)
    waited: list[float] = []

    def session(*arguments: object) -> Any:
        end = next(coming)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(launch, "_session", session)
    monkeypatch.setattr(launch, "prepare", lambda config: stage)
    monkeypatch.setattr(launch.time, "sleep", waited.append)
    code = launch._train(stage, StopSignals())
    assert next(coming, None) is None, "every session has begun"
    return code, waited


def test_it_waits_for_a_node_within_its_restarts(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    code, waited = outcome(monkeypatch, "policy/0 is lost", LACKING, LACKING, 0)
    assert (code, len(waited)) == (0, 2)
    assert "needs 2 devices, the cluster has 1" in capfd.readouterr().err


def test_it_ends_when_its_restarts_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    code, waited = outcome(monkeypatch, "policy/0 is lost", LACKING, LACKING, restarts=1)
    assert (code, len(waited)) == (1, 1)


def test_it_does_not_wait_for_what_no_node_can_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(monkeypatch, "policy/0 is lost", CheckpointError("torn")) == (1, [])
