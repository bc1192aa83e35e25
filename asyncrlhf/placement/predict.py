"""`plan --calibrate RUN_DIR`: the simulator replays a finished run, then its settings changed one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta

from asyncrlhf.config.bounds import Count, Positive, PositiveAmount, Table
from asyncrlhf.config.convert import convert
from asyncrlhf.flow.ledger import LedgerRules
from asyncrlhf.placement.advice import Facts, warnings
from asyncrlhf.placement.measured import MeasuredRun
from asyncrlhf.placement.pipeline import Simulated
from asyncrlhf.placement.simulate import simulate

__all__ = ("Prediction", "Setting", "as_json", "as_text", "facts_of", "predictions")

STEPS = 60


class Setting(Table, frozen=True, kw_only=True):
    """What to change. Keys left out stay as in the run."""

    max_staleness: Count | None = None
    lookahead: Count | None = None
    """Left out beside a max_staleness: the run's own if it had one, at most K; else ceil(K / 2)."""
    prompts_per_step: Positive | None = None
    answers_per_prompt: Positive | None = None
    at_deadline: str | None = None
    replicas: Positive | None = None
    """Rollout engines; of pools that share devices as many as there are."""
    reward_scale: PositiveAmount = 1.0
    """Factor on the latency of rewards."""
    length_scale: PositiveAmount = 1.0
    """Factor on the length of answers."""
    strategy: str | None = None
    """async, alternating or colocate, of a run whose pools were not shared; left out: as it was."""
    offload: bool = False
    """Whether a group that leaves shared devices takes its memory along; by formula, of a run whose pools were not
    shared."""
    steps: Annotated[int, Meta(ge=5)] = STEPS
    """Train steps to simulate; the first fifth is not counted."""


@dataclass(frozen=True, slots=True)
class Prediction:
    name: str
    result: Simulated
    max_staleness: int
    lookahead: int
    devices: int
    """That the pools have together, as the run counts them: an engine or a rank on each."""


def predictions(run: MeasuredRun, table: Mapping[str, Any]) -> list[Prediction]:
    """The run itself; then the setting in `table`, or, if it is empty, a few that differ in one thing each."""
    found = [_predict(run, "as it ran", Setting())]
    if table:
        words = " ".join(f"{key}={value}" for key, value in table.items())
        return [*found, _predict(run, words, convert(table, Setting))]
    found += (
        _predict(run, f"max_staleness={bound}", Setting(max_staleness=bound))
        for bound in (0, 1, 2, 4)
        if bound != run.max_staleness
    )
    if not run.shared:
        found.append(_predict(run, "strategy=alternating", Setting(max_staleness=0, strategy="alternating")))
    return found


def _predict(run: MeasuredRun, name: str, setting: Setting) -> Prediction:
    changes: dict[str, Any] = {
        key: value
        for key in ("max_staleness", "lookahead", "prompts_per_step", "answers_per_prompt", "at_deadline")
        if (value := getattr(setting, key)) is not None
    }
    if "max_staleness" in changes:
        changes.setdefault("lookahead", _lookahead(run, changes["max_staleness"]))
        changes["publish_every"] = min(run.publish_every, changes["lookahead"] + 1)
    rules: LedgerRules = run.rules(**changes)
    pipeline = run.pipeline(
        rules,
        strategy=setting.strategy,
        engines=setting.replicas,
        reward_scale=setting.reward_scale,
        length_scale=setting.length_scale,
        offload=setting.offload,
    )
    devices = max(pipeline.engines, run.trainers if run.shared else 0)
    devices += 0 if pipeline.shared else run.trainers
    return Prediction(name, simulate(pipeline, setting.steps), rules.max_staleness, rules.lookahead, devices)


def _lookahead(run: MeasuredRun, bound: int) -> int:
    """What the run chose, where it did; a resolved configuration says the default, too."""
    usual = (run.max_staleness + 1) // 2
    return min(run.lookahead, bound) if run.lookahead != usual else (bound + 1) // 2


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
        + ("" if run.separable else " (this run cannot tell the two apart: their ratio is the usual one)")
        + f"; training {run.train_token_s * 1e6:.1f} us per token; publish {run.publish_s * 1e3:.1f} ms, "
        f"{run.export_s * 1e3:.1f} of them in the trainer; a lease lasts {run.lease_s:.3f} s",
        f"  turns on shared devices {_turns(run)}",
        f"  overlap can gain {run.bound:.2f} x at most",
        "",
        f"{'setting':<24} {'K/D':>5} {'devices':>7} {'step s':>8} {'tokens/s':>9} {'lag':>7} {'over age':>9} "
        f"{'gen':>5} {'train':>6} {'bound':>6}",
    ]
    for each in found:
        result = each.result
        lag = f"{result.lag_mean:.1f}/{result.lag_max}"
        ahead = f"{each.max_staleness}/{each.lookahead}"
        lines.append(
            f"{each.name:<24} {ahead:>5} {each.devices:>7} {result.step:>8.3f} {result.tokens_s:>9.0f} {lag:>7} "
            f"{result.masked:>9.1%} {result.generate:>5.0%} {result.train:>6.0%} {result.bound:>6.2f}"
        )
    error = found[0].result.step / run.step_s - 1
    lines.append(
        f"\nthe run itself is predicted {100 * error:+.1f} % off; the other rows are predictions, not measured"
    )
    lines += [f"warning: {text}" for text in warnings(facts_of(run))]
    return "\n".join(lines)


def _turns(run: MeasuredRun) -> str:
    turning = run.turning
    to_train = (turning.to_train + turning.cold_train) * 1e3
    to_generate = (turning.to_generate + turning.cold_generate) * 1e3
    seen = "as measured" if run.shared else "by formula (CPUs; a run that takes turns measures them)"
    reading = f", {turning.to_read * run.read_turns * 1e3:.1f} ms before reading" if run.read_turns else ""
    return f"{to_train:.1f} ms before training, {to_generate:.1f} ms before generation{reading}, {seen}"


def as_json(run: MeasuredRun, found: Sequence[Prediction]) -> dict[str, Any]:
    return {
        "measured": {
            "step_s": run.step_s,
            "median_step_s": run.median_s,
            "generate_s": run.generate_s,
            "train_s": run.train_s,
            "lease_s": run.lease_s,
            "decode_step_s": list(run.decode),
            "decode_separable": run.separable,
            "train_token_s": run.train_token_s,
            "publish_s": run.publish_s,
            "export_s": run.export_s,
            "turns": asdict(run.turning) | {"measured": run.shared},
            "speedup_bound": run.bound,
        },
        "predictions": [
            {
                "setting": each.name,
                "max_staleness": each.max_staleness,
                "lookahead": each.lookahead,
                "devices": each.devices,
                "step_s": each.result.step,
                "median_step_s": each.result.median,
                "trained_tokens_s": each.result.tokens_s,
                "token_lag_mean": each.result.lag_mean,
                "token_lag_max": each.result.lag_max,
                "masked_fraction": each.result.masked,
                "dropped_fraction": each.result.dropped,
                "busy_generate": each.result.generate,
                "busy_train": each.result.train,
                "speedup_bound": each.result.bound,
            }
            for each in found
        ],
        "warnings": warnings(facts_of(run)),
    }
