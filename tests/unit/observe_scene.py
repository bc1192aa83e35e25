"""A run on paper: a clock that only moves when told, and train steps with round numbers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from asyncrlhf.observe import (
    EngineBusy,
    GroupShape,
    Observer,
    OptimizerStep,
    Popped,
    Published,
    RunEnded,
    RunStarted,
    StepEnded,
)

TRAINED, OVER_AGE, UNTRAINABLE = 90, 6, 4


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Scene:
    """Steps of 2 s: 0.5 s of waiting, 1.2 s of training, generation 1.6 s and 0.2 s of weight swap, 0.1 s of exposed
    publish. A batch has 2 rollouts of 2 samples and 100 model tokens: 90 trained, 6 over age, 4 not trainable."""

    def __init__(
        self,
        directory: Path | None,
        *,
        steps: int = 0,
        resume: dict[str, int] | None = None,
        mode: str = "plain",
        output: io.StringIO | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.output = output or io.StringIO()
        self.directory = directory
        self.observer = Observer(directory, console=mode, stream=self.output, clock=self.clock)  # type: ignore[arg-type]
        self.done = 0
        self.voids = 0
        self.optimizer_steps = 0
        if resume is not None:
            self.observer.truncate(resume)
        self.start()
        for _ in range(steps):
            self.step()

    def start(self, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "resumed_from": None,
            "algorithm": "algorithms.grpo:GRPO",
            "seed": 0,
            "max_staleness": 2,
            "lookahead": 1,
            "prompts_per_step": 2,
            "answers_per_prompt": 2,
            "train_steps": 10,
            "groups": {name: GroupShape(name, 1) for name in ("policy", "rollout", "reward")},
        }
        self.observer.emit(RunStarted(**(fields | changes)))

    def pop(self, reward: float | None = None) -> None:
        self.observer.emit(
            Popped(
                train_step=self.done,
                uids=(2 * self.done, 2 * self.done + 1),
                reward_mean=self.done / 10 if reward is None else reward,
                rewards_std=0.25,
                waited=0.5,
                trained_by_lag={0: 40, 1: 40, 2: 10},
                masked_by_lag={3: OVER_AGE},
                masked_untrainable=UNTRAINABLE,
                head_lags=(1, 3),
                queue_lags=(0, 1),
                response_lengths=(20, 20, 20, 40),
                masked_by_position=(6, 0, 0, 0, 0, 0, 0, 0, 0, 0),
                masked_by_length=(0, 0, 0, 0, 0, 0, 0, 0, 0, 6),
            )
        )

    def optimize(self, *, applied: bool = True, group: str = "policy", **metrics: float) -> None:
        self.observer.emit(
            OptimizerStep(
                group=group,
                train_step=self.done,
                optimizer_step=self.optimizer_steps,
                applied=applied,
                reason="" if applied else "not_finite",
                metrics=metrics or {"loss": 1.0, "logprob_gap": 0.01},
                seconds=1.2,
            )
        )
        self.optimizer_steps += applied

    def busy(self, group: str, start: float, end: float, work: str, tokens: int = 0) -> None:
        at = self.observer.elapsed()
        self.observer.emit(
            EngineBusy(group=group, rank=0, start=at + start, end=at + end, work=work, token_count=tokens)
        )

    def step(self, *, reward: float | None = None, void: bool = False) -> None:
        """2 s of the clock. A void step pops, fails to optimize, and costs as much."""
        self.clock.now += 0.5
        self.pop(reward)
        self.clock.now += 1.4
        self.busy("rollout", -1.9, -0.3, "generate", 100)
        self.busy("policy", -1.4, -0.2, "step")
        self.optimize(applied=not void)
        self.busy("rollout", -0.2, 0.0, "swap")
        if not void:
            self.observer.emit(
                Published(version=self.done + 1, changed=True, byte_count=64, seconds=0.2, exposed=0.1, fenced=())
            )
        self.clock.now += 0.1
        self.done += not void
        self.voids += void
        batches = self.done + self.voids
        self.observer.emit(
            StepEnded(
                train_step=self.done - (not void),
                void=void,
                reason="not_finite" if void else "",
                policy_version=self.done,
                published_version=self.done,
                publish_count=self.done,
                tokens={
                    "generated": 100 * batches + 7,
                    "trained": TRAINED * self.done,
                    "masked": (OVER_AGE + UNTRAINABLE) * self.done,
                    "dropped": 100 * self.voids,
                    "open": 7,
                },
                leases={"running": 2, "scoring": 0, "ready": 1, "consumed": 2 * self.done, "dropped": 2 * self.voids},
                seconds=2.0,
            )
        )

    def end(self, status: str = "completed", reason: str = "", message: str = "") -> None:
        self.observer.emit(RunEnded(status=status, reason=reason, message=message))  # type: ignore[arg-type]
        self.observer.close()

    def rows(self) -> list[dict[str, Any]]:
        assert self.directory is not None
        text = (self.directory / "metrics.jsonl").read_text()
        return [json.loads(line, parse_constant=_refuse) for line in text.splitlines()]

    def json(self, name: str) -> dict[str, Any]:
        assert self.directory is not None
        return json.loads((self.directory / name).read_text(), parse_constant=_refuse)


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested objects and arrays as one level: pytest.approx compares those."""
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in flat(part, f"{name}.{key}").items()}
    if isinstance(value, list):
        return flat(dict(enumerate(value)), name)
    return {name: value}


def _refuse(name: str) -> float:
    raise AssertionError(f"{name} in a file")
