"""`plan --calibrate RUN_DIR`: the simulator replays a finished run, then its settings changed one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrlhf.config.bounds import Count, Positive, PositiveAmount, Table
from asyncrlhf.config.convert import convert
from asyncrlhf.flow.ledger import LedgerRules
from asyncrlhf.placement.advice import Facts, warnings
from asyncrlhf.placement.measured import MeasuredRun
from asyncrlhf.placement.simulate import Simulated, simulate

__all__ = ("Prediction", "Setting", "as_json", "as_text", "facts_of", "predictions")

STEPS = 60


class Setting(Table, frozen=True, kw_only=True):
    """What to change. Keys left out stay as in the run."""

    max_staleness: Count | None = None
    lookahead: Count | None = None
    """Left out beside a max_staleness: ceil(K / 2)."""
    prompts_per_step: Positive | None = None
    answers_per_prompt: Positive | None = None
    at_deadline: str | None = None
    replicas: Positive | None = None
    """Rollout engines."""
    reward_scale: PositiveAmount = 1.0
    """Factor on the latency of rewards."""
    length_scale: PositiveAmount = 1.0
    """Factor on the length of answers."""
    strategy: str | None = None
    """async, alternating or colocate."""
    steps: Positive = STEPS
    """Train steps to simulate."""


@dataclass(frozen=True, slots=True)
class Prediction:
    name: str
    result: Simulated


def predictions(run: MeasuredRun, table: Mapping[str, Any]) -> list[Prediction]:
    """The run itself; then the setting in `table`, or, if it is empty, a few that differ in one thing each."""
    found = [Prediction("as it ran", _simulate(run, Setting()))]
    if table:
        words = " ".join(f"{key}={value}" for key, value in table.items())
        return [*found, Prediction(words, _simulate(run, convert(table, Setting)))]
    found += (
        Prediction(f"max_staleness={bound}", _simulate(run, Setting(max_staleness=bound)))
        for bound in (0, 1, 2, 4)
        if bound != run.max_staleness
    )
    found.append(Prediction("strategy=alternating", _simulate(run, Setting(max_staleness=0, strategy="alternating"))))
    return found


def _simulate(run: MeasuredRun, setting: Setting) -> Simulated:
    changes: dict[str, Any] = {
        key: value
        for key in ("max_staleness", "lookahead", "prompts_per_step", "answers_per_prompt", "at_deadline")
        if (value := getattr(setting, key)) is not None
    }
    if "max_staleness" in changes:
        changes.setdefault("lookahead", (changes["max_staleness"] + 1) // 2)
        changes["publish_every"] = min(run.publish_every, changes["lookahead"] + 1)
    rules: LedgerRules = run.rules(**changes)
    pipeline = run.pipeline(
        rules,
        strategy=setting.strategy or "async",
        engines=setting.replicas,
        reward_scale=setting.reward_scale,
        length_scale=setting.length_scale,
    )
    return simulate(pipeline, setting.steps)


def facts_of(run: MeasuredRun) -> Facts:
    """What is known of a run for `advice`."""
    return Facts(
        lookahead=run.lookahead,
        max_staleness=run.max_staleness,
        generate_s=run.generate_s,
        train_s=run.train_s,
        lease_s=run.lease_s,
    )


def as_text(run: MeasuredRun, found: Sequence[Prediction]) -> str:
    base, slope = run.decode
    lines = [
        f"measured in {run.directory}, {run.steps} train steps: {run.step_s:.3f} s each; an engine generates "
        f"{run.generate_s:.3f} s of it, training takes {run.train_s:.3f} s",
        f"  decode step {base * 1e3:.3f} ms + {slope * 1e3:.4f} ms per answer"
        + ("" if run.separable else " (this run cannot tell the two apart: other batch sizes are a guess)")
        + f"; training {run.train_token_s * 1e6:.1f} us per token; publish {run.publish_s * 1e3:.1f} ms; "
        f"a lease lasts {run.lease_s:.3f} s",
        f"  overlap can gain {run.bound:.2f} x at most",
        "",
        f"{'setting':<34} {'step s':>8} {'tokens/s':>10} {'lag':>11} {'over age':>9} {'gen':>5} {'train':>6}",
    ]
    for each in found:
        result = each.result
        lag = f"{result.lag_mean:.1f}/{result.lag_max}"
        lines.append(
            f"{each.name:<34} {result.step:>8.3f} {result.tokens_s:>10.0f} {lag:>11} {result.masked:>9.1%} "
            f"{result.generate:>5.0%} {result.train:>6.0%}"
        )
    error = found[0].result.step / run.step_s - 1
    lines.append(
        f"\nthe run itself is predicted {100 * error:+.1f} % off; the other rows are predictions, not measured"
    )
    lines += [f"warning: {text}" for text in warnings(facts_of(run))]
    return "\n".join(lines)


def as_json(run: MeasuredRun, found: Sequence[Prediction]) -> dict[str, Any]:
    return {
        "measured": {
            "step_s": run.step_s,
            "generate_s": run.generate_s,
            "train_s": run.train_s,
            "lease_s": run.lease_s,
            "decode_step_s": list(run.decode),
            "decode_separable": run.separable,
            "train_token_s": run.train_token_s,
            "publish_s": run.publish_s,
            "speedup_bound": run.bound,
        },
        "predictions": [
            {
                "setting": each.name,
                "step_s": each.result.step,
                "trained_tokens_s": each.result.tokens_s,
                "token_lag_mean": each.result.lag_mean,
                "token_lag_max": each.result.lag_max,
                "masked_fraction": each.result.masked,
                "dropped_fraction": each.result.dropped,
                "busy_generate": each.result.generate,
                "busy_train": each.result.train,
            }
            for each in found
        ],
        "warnings": warnings(facts_of(run)),
    }
