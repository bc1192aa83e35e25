"""What a finished run measured: its events.jsonl and metrics.jsonl become a pipeline that the simulator can vary.

Answers and rewards are drawn from those that were seen; seconds of decoding and training are fitted to what engines
reported. Everything is of the steady state: train steps without their first fifth, and without the last `lookahead`,
for which no others are generated ahead.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean, median, pstdev
from typing import Any, cast

import msgspec
from msgspec import structs

from asyncrlhf.errors import CheckpointError, ConfigError
from asyncrlhf.flow.ledger import LedgerRules
from asyncrlhf.observe.events import AnyEvent, EngineBusy, Granted, Popped, Published, RunStarted, Sampled, Scored
from asyncrlhf.observe.log import read_events
from asyncrlhf.placement.arrange import READING
from asyncrlhf.placement.decoding import fit_decode
from asyncrlhf.placement.pipeline import Pipeline
from asyncrlhf.placement.turning import Turning, measured_turning, turns_of_both, usual_turning
from asyncrlhf.placement.workload import Workload

__all__ = ("MeasuredRun", "read_run", "steady_of")

TOGETHER = ("async", "colocate", "flattening", "interleaving", "alternating")
"""Strategies that put all trained models on the same devices."""
LOADING = ("prepare", "commit", "probe")
"""What an engine that follows does for a publish."""
FEWEST = 3
"""Train steps of the steady state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Facts of a run, in seconds."""

    directory: str
    prompts_per_step: int
    answers_per_prompt: int
    max_staleness: int
    lookahead: int
    publish_every: int
    at_deadline: str
    order: str
    publish_mode: str
    engines: int
    slots: int
    trainers: int
    """Devices of the engines that take optimizer steps, as the run's placement counts them."""
    shared: bool = False
    """Rollout engines and trainers took turns on the same devices, as the run's events say."""
    steps: int
    step_s: float
    """On average, without checkpoints."""
    median_s: float
    """The same, in the median."""
    lengths: tuple[int, ...]
    """Tokens of the answers that were trained on, in the order of the pops."""
    rewards_s: tuple[float, ...]
    """Latencies of scoring, per rollout in the order of admission; empty: a model scores, see `score_s`."""
    score_s: tuple[float, ...]
    """Seconds per rollout of each model that only reads, on devices of its own."""
    read_s: float = 0.0
    """Seconds per rollout of those that took turns with generation and training."""
    read_turns: float = 0.0
    """Changes of turns to models that read, per train step; without turns: as many as there are such models."""
    decode: tuple[float, float]
    """o0, o1: a decode step takes o0 + o1 * active answers."""
    separable: bool
    """The run's answers differ enough to tell o0 from o1."""
    train_token_s: float
    """In the median, with everything that a train step does between the pop and the publish."""
    publish_s: float
    """From the end of a train step to the engines' commit, without a change of turns."""
    export_s: float
    """Of it, what a trainer's engine does."""
    load_s: float
    """Of it, what a rollout engine stands still for."""
    overlap: bool
    """Publishes go on beside training where there is a lookahead and no turns."""
    turning: Turning
    """What a change of turns takes: measured, where the run had some; else by formula, where memory stays."""
    weight_bytes: int
    """Of a publish."""
    lease_s: float
    """Mean from grant to scored."""
    generate_s: float
    """Busy seconds of one rollout engine per train step."""
    train_s: float

    @property
    def bound(self) -> float:
        """What overlap can gain at most, with the busy seconds of both pools."""
        return (self.generate_s + self.train_s) / max(self.generate_s, self.train_s, 1e-12)

    def workload(self, work: Workload) -> Workload:
        """`work` with the lengths of answers and latencies of rewards that were seen."""
        response = structs.replace(work.response, observed=_spread(self.lengths), max=max(self.lengths))
        if not self.rewards_s:
            return structs.replace(work, response=response)
        mean = fmean(self.rewards_s)
        return structs.replace(
            work, response=response, reward_seconds=mean, reward_cv=pstdev(self.rewards_s) / mean if mean else 0.0
        )

    def rules(self, **changes: Any) -> LedgerRules:
        """Those of the run, or with some of them changed. Raises ConfigError as a configuration would."""
        values: dict[str, Any] = {
            "prompts_per_step": self.prompts_per_step,
            "answers_per_prompt": self.answers_per_prompt,
            "max_staleness": self.max_staleness,
            "lookahead": self.lookahead,
            "publish_every": self.publish_every,
            "at_deadline": self.at_deadline,
            "order": self.order,
        }
        return LedgerRules(**(values | changes))

    def pipeline(
        self,
        rules: LedgerRules | None = None,
        *,
        strategy: str | None = None,
        engines: int | None = None,
        reward_scale: float = 1.0,
        length_scale: float = 1.0,
        offload: bool = False,
    ) -> Pipeline:
        """As it ran, or another way. `strategy`: "async" (pools of their own), "alternating" (all engines of both pools
        generate and train their share in turn) or "colocate" (one pool of the trainers' devices); of a run whose pools
        were shared only itself is known. Models that read do so beside generation, or in turn where devices are shared;
        `offload`: who leaves takes its memory along. Raises ConfigError."""
        rules = rules or self.rules()
        if engines is not None and (strategy == "colocate" or self.shared):
            self._require_engines(engines, strategy)
        engines = self.engines if engines is None else engines
        shared = self.shared if strategy is None else strategy != "async"
        share, turning = 1.0, self.turning
        if offload and (self.shared or not shared):
            what = f"{self.directory} took turns" if self.shared else "nobody takes turns"
            raise ConfigError(
                f'offload is for strategy = "alternating" or "colocate" of a run with pools of their own, and {what}; '
                "leave it out"
            )
        if offload:
            turning = usual_turning(self.weight_bytes, offload=True)
        if strategy is None:
            pass
        elif self.shared:
            raise ConfigError(
                f'strategy = "{strategy}" takes a run with pools of their own, and {self.directory} shared them; '
                'calibrate with a run of "async"'
            )
        elif strategy == "alternating":
            share = self.trainers / (engines + self.trainers) * turning.uneven
            engines += self.trainers
        elif strategy == "colocate":
            engines = self.trainers
        elif strategy != "async":
            raise ConfigError(f'strategy = "{strategy}" cannot be simulated; use async, alternating or colocate')
        base, slope = self.decode
        reading = self.read_s + (sum(self.score_s) if shared and not self.shared else 0.0)
        return Pipeline(
            rules=rules,
            engines=engines,
            slots=self.slots,
            length=_Replay(self.lengths, length_scale),
            decode=lambda active: base + slope * active,
            reward=_Replay(self.rewards_s or (0.0,), reward_scale),
            score=[] if shared and not self.shared else [seconds * reward_scale for seconds in self.score_s],
            read=reading * reward_scale * rules.prompts_per_step + turning.to_read * self.read_turns if shared else 0.0,
            train=lambda random, tokens: self.train_token_s * tokens * share,
            publish=self.publish_s,
            export=self.export_s,
            load=self.load_s,
            overlap=self.overlap and rules.lookahead > 0,
            mode="drain" if self.publish_mode == "drain" else "in_flight",
            shared=shared,
            to_train=turning.to_train + turning.cold_train,
            to_generate=turning.to_generate + turning.cold_generate,
        )

    def _require_engines(self, engines: int, strategy: str | None) -> None:
        """Raises ConfigError for another number than there is on shared devices."""
        there = self.trainers if strategy == "colocate" and not self.shared else self.engines
        if engines != there:
            how = f"{self.directory} shared them" if self.shared else 'strategy = "colocate" has those of the trainers'
            raise ConfigError(
                f"replicas = {engines} on devices that trainers share, of which there are {there}: {how}; use "
                f"replicas = {there}, or leave it out"
            )


def _spread(lengths: Sequence[int], most: int = 1024) -> list[int]:
    """At most so many of the lengths, evenly from the shortest to the longest."""
    ordered = sorted(max(1, length) for length in lengths)
    if len(ordered) <= most:
        return ordered
    return [ordered[i * (len(ordered) - 1) // (most - 1)] for i in range(most)]


class _Replay:
    """Draws what was observed, in its order from a random place on: what was slow together stays together."""

    def __init__(self, values: Sequence[float], scale: float) -> None:
        self._values, self._scale, self._next = values, scale, -1

    def __call__(self, random: Random) -> float:
        if self._next < 0:
            self._next = random.randrange(len(self._values))
        value = self._values[self._next]
        self._next = (self._next + 1) % len(self._values)
        return value * self._scale


def read_run(directory: str | Path) -> MeasuredRun:
    """Raises ConfigError, which names the directory, for one without a run that generated and trained."""
    path = Path(directory)
    try:
        rows = [msgspec.json.decode(line) for line in (path / "metrics.jsonl").read_bytes().splitlines()]
        events = list(read_events(path / "events.jsonl"))
    except (OSError, CheckpointError, msgspec.DecodeError) as problem:
        raise ConfigError(f"{path} is not the directory of a run: {problem}; name a run_dir") from None
    started = next((event for event in events if isinstance(event, RunStarted)), None)
    if started is None or len(rows) < 5:
        raise ConfigError(f"{path}: {len(rows)} train steps are too few to calibrate from; it takes 5 or more")
    return _measure(path, rows, events, started)


def _measure(
    path: Path, rows: Sequence[Mapping[str, Any]], events: Sequence[AnyEvent], started: RunStarted
) -> MeasuredRun:
    steady = steady_of(rows, started.lookahead)
    if len(steady) < FEWEST:
        takes = next(n for n in count(len(rows)) if n - n // 5 - started.lookahead >= FEWEST)
        raise ConfigError(
            f"{path}: of {len(rows)} train steps with lookahead = {started.lookahead}, {len(steady)} are left without "
            f"the first fifth and the last {started.lookahead}, where it takes {FEWEST}; run {takes} steps or more"
        )
    first, last = int(steady[0]["train_step"]), int(steady[-1]["train_step"])
    popped = [event for event in events if isinstance(event, Popped) and first <= event.train_step <= last]
    since, until = (popped[0].t, popped[-1].t) if popped else (0.0, 0.0)
    sampled = [event for event in events if isinstance(event, Sampled) and since <= event.t <= until]
    scored = [event for event in events if isinstance(event, Scored) and since <= event.t <= until]
    if not popped or not sampled:
        raise ConfigError(f"{path}: no answers were sampled, so there is nothing to place; name a run that generates")
    busy = [event for event in events if isinstance(event, EngineBusy) and since <= event.start <= until]
    roles = {name: shape.role for name, shape in started.groups.items()}
    config = _config(path)
    rules = {name for name in roles if _get(config, "", "groups", name, "backend") == "rules"}
    lengths = [length for event in popped for length in event.response_lengths]
    rollout = next((name for name, role in roles.items() if role == "rollout"), "rollout")
    trained = {name: shape.ranks for name, shape in started.groups.items() if shape.role in ("policy", "critic")}
    all_turns = turns_of_both(events, rollout, trained)
    turns, shared = [event for event in all_turns if since <= event.t <= until], bool(all_turns)
    in_turn = {event.group for event in all_turns if event.group != rollout and event.group not in trained}
    frozen = [name for name, role in roles.items() if role in READING and name not in rules]
    reads = {name: _reading(busy, name) for name in frozen}
    rollouts = max(1, sum(len(event.uids) for event in popped[1:]))  # the first batch was read before it was popped
    score_s = tuple(s / rollouts for name, s in reads.items() if s and name not in in_turn)
    published = [event for event in events if isinstance(event, Published) and event.t >= since]
    weights = max((event.byte_count for event in published), default=0)
    turning = measured_turning(turns, rollout, trained) if shared else usual_turning(weights, offload=False)
    costs = [_number(row, "time/step") for row in steady]
    training = [
        max(0.0, cost - _number(row, "time/wait_batch") - _number(row, "time/exposed_sync") - turning.to_train * shared)
        for row, cost in zip(steady, costs, strict=True)
    ]
    tokens_of = {event.train_step: sum(event.response_lengths) for event in popped}
    granted = {(event.uid, event.attempt): event.t for event in events if isinstance(event, Granted)}
    ends: Sequence[Sampled | Scored] = scored or sampled
    leases = [e.t - granted[e.uid, e.attempt] for e in ends if (e.uid, e.attempt) in granted]
    _require_generation(path, events, busy, rollout, first, last)
    decode, separable = fit_decode(busy, rollout, sampled, popped, started.answers_per_prompt)
    return MeasuredRun(
        directory=str(path),
        prompts_per_step=started.prompts_per_step,
        answers_per_prompt=started.answers_per_prompt,
        max_staleness=started.max_staleness,
        lookahead=started.lookahead,
        publish_every=_get(config, 1, "publish", "every"),
        at_deadline=_get(config, "mask", "at_deadline"),
        order=_get(config, "ready", "order"),
        publish_mode=_get(config, "in_flight", "publish", "mode"),
        engines=started.groups[rollout].ranks if rollout in started.groups else 1,
        slots=_get(config, 256, "groups", rollout, "concurrency"),
        trainers=_trainers(config, trained),
        shared=shared,
        steps=len(steady),
        step_s=fmean(costs),
        median_s=median(costs),
        lengths=tuple(lengths),
        rewards_s=()
        if any(reads[name] for name in frozen if roles[name] == "reward")
        else tuple(e.seconds for e in sorted(scored, key=lambda e: (e.uid, e.attempt))),
        score_s=score_s,
        read_s=_covered(event for event in busy if event.group in in_turn and event.work not in LOADING) / rollouts,
        read_turns=sum(event.group in in_turn for event in turns) / max(1, len(popped) - 1) if shared else len(score_s),
        decode=decode,
        separable=separable,
        train_token_s=median(
            seconds / max(1, tokens_of.get(int(row["train_step"]), 0))
            for row, seconds in zip(steady, training, strict=True)
        ),
        publish_s=max(0.0, _median(event.seconds for event in published) - turning.to_generate * shared),
        export_s=_median(e.end - e.start for e in busy if e.group in trained and e.work == "export"),
        load_s=sum(_median(e.end - e.start for e in busy if e.group == rollout and e.work == work) for work in LOADING),
        overlap=_get(config, True, "publish", "overlap") is not False,
        turning=turning,
        weight_bytes=weights,
        lease_s=fmean(leases) if leases else 0.0,
        generate_s=sum(_number(row, "busy/generate") * _number(row, "time/step") for row in steady) / len(steady),
        train_s=sum(_number(row, "busy/train") * _number(row, "time/step") for row in steady) / len(steady),
    )


def steady_of(rows: Sequence[Mapping[str, Any]], lookahead: int) -> Sequence[Mapping[str, Any]]:
    """The rows of metrics.jsonl that are of the steady state; there may be none."""
    return rows[len(rows) // 5 : max(0, len(rows) - lookahead)]


def _trainers(config: dict[str, Any], trained: Mapping[str, int]) -> int:
    """Devices of the trained groups, which have so many ranks each: those of a set have the same ones."""
    sets = _get(config, [], "placement", "sets")
    if sets:
        listed = [[trained[name] for name in part if name in trained] for part in sets]
        alone = [ranks for name, ranks in trained.items() if not any(name in part for part in sets)]
        return max(1, sum(max(part, default=0) for part in listed) + sum(alone))
    if _get(config, "", "placement", "strategy") in TOGETHER:
        return max(1, *trained.values())
    return max(1, sum(trained.values()))


def _reading(busy: Sequence[EngineBusy], group: str) -> float:
    """Seconds in which a group read, on average over its ranks."""
    own = [event for event in busy if event.group == group and event.work not in LOADING]
    return sum(event.end - event.start for event in own) / max(1, len({event.rank for event in own}))


def _covered(busy: Iterable[EngineBusy]) -> float:
    """Seconds in which at least one of these was busy."""
    total, until = 0.0, 0.0
    for event in sorted(busy, key=lambda event: event.start):
        total += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return total


def _require_generation(
    path: Path, events: Sequence[AnyEvent], busy: Sequence[EngineBusy], rollout: str, first: int, last: int
) -> None:
    """Raises ConfigError if no engine generated in the train steps that count."""

    def slices(found: Iterable[AnyEvent]) -> list[EngineBusy]:
        own = [event for event in found if isinstance(event, EngineBusy) and event.group == rollout]
        return [event for event in own if event.work == "generate" and event.end > event.start]

    if not slices(busy):
        raise ConfigError(
            f"{path}: 0 of {len(slices(events))} slices of generation lie in train steps {first}-{last}; run more steps"
        )


def _median(values: Iterable[float]) -> float:
    return median(found) if (found := list(values)) else 0.0


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return value if isinstance(value, int | float) else 0.0


def _config(path: Path) -> dict[str, Any]:
    """The resolved configuration beside the run; empty where there is none."""
    try:
        return tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return {}


def _get(config: dict[str, Any], default: Any, *keys: str) -> Any:
    found: Any = config
    for key in keys:
        if not isinstance(found, dict):
            return default
        found = cast("dict[str, Any]", found).get(key, default)
    return found
