"""A run as its files would say, made of costs that are known, and one of a small machine."""

from __future__ import annotations

from pathlib import Path
from random import Random

from asyncrlhf.observe import EventLog, Metrics
from asyncrlhf.observe.events import (
    EngineBusy,
    Granted,
    GroupShape,
    OptimizerStep,
    Popped,
    Published,
    RunEnded,
    RunStarted,
    Sampled,
    Scored,
    StepEnded,
    TurnTaken,
)
from asyncrlhf.placement.measured import MeasuredRun
from asyncrlhf.placement.turning import usual_turning

BASE, SLOPE, TRAIN, REWARD, PUBLISH = 0.010, 0.002, 1e-3, 0.2, 0.05
"""Seconds of a decode step and of each sequence in it, of training a token, of a reward, of a publish."""
EXPORT, LOAD = 0.02, 0.01
"""Of a publish."""
PROMPTS, STEPS = 4, 30


def write_run(
    directory: Path,
    *,
    to_train: float = 0.0,
    to_generate: float = 0.0,
    read: float = 0.0,
    to_read: float = 0.0,
    critic: bool = False,
    lookahead: int = 0,
    steps: int = STEPS,
    busy_steps: int = STEPS,
) -> float:
    """A synchronous run, as it would be logged, of an engine and a trainer that cost exactly the above; its step. With
    seconds to change turns, if any, and `read` seconds in which a reference reads each batch in turn with them; its
    `lookahead` is only said. After `busy_steps` nobody says any more when engines generate."""
    now = 0.0
    log = EventLog(directory, clock=lambda: now)
    metrics = Metrics(directory)
    log.subscribe(metrics)
    groups = {name: GroupShape(role, 1) for name, role in (("rollout", "rollout"), ("policy", "policy"))}
    groups |= {"critic": GroupShape("critic", 1)} if critic else {}
    groups |= {"reference": GroupShape("reference", 2)} if read else {}
    random, lengths_of = Random(1), [10, 20, 40, 80]
    log.emit(
        RunStarted(
            resumed_from=None,
            algorithm="algorithms.grpo:GRPO",
            seed=0,
            max_staleness=lookahead,
            lookahead=lookahead,
            prompts_per_step=PROMPTS,
            answers_per_prompt=1,
            train_steps=steps,
            groups=groups,
        )
    )
    tokens = 0
    for step in range(steps):
        begun = now
        uids = range(step * PROMPTS, (step + 1) * PROMPTS)
        lengths = [random.choice(lengths_of) for _ in uids]
        for uid in uids:
            log.emit(Granted(uid=uid, attempt=1, version=step))
        done, ends = 0, set[int]()
        for i, length in enumerate(sorted(lengths)):
            start = now
            now += (length - done) * (BASE + SLOPE * (PROMPTS - i))
            done = length
            if now > start and step < busy_steps:
                log.emit(EngineBusy(group="rollout", rank=0, start=start, end=now, work="generate", token_count=0))
            for uid in [u for u, own in zip(uids, lengths, strict=True) if own == length and u not in ends]:
                ends.add(uid)
                log.emit(
                    Sampled(
                        uid=uid,
                        attempt=1,
                        token_count=length,
                        oldest_version=step,
                        newest_version=step,
                        seconds=now - begun,
                    )
                )
        if read:
            now += to_read
            log.emit(TurnTaken(devices="shared", group="reference", seconds=to_read))
            for rank in range(2):
                log.emit(
                    EngineBusy(group="reference", rank=rank, start=now, end=now + read, work="score", token_count=0)
                )
            now += read
        now += REWARD
        for uid in uids:
            log.emit(Scored(uid=uid, attempt=1, rewards=(1.0,), seconds=REWARD))
        log.emit(
            Popped(
                train_step=step,
                uids=tuple(uids),
                reward_mean=1.0,
                rewards_std=0.0,
                waited=now - begun,
                trained_by_lag={0: sum(lengths)},
                masked_by_lag={},
                masked_untrainable=0,
                head_lags=(0,) * PROMPTS,
                queue_lags=(0,) * PROMPTS,
                response_lengths=tuple(lengths),
                masked_by_position=(0,) * 10,
                masked_by_length=(0,) * 10,
            )
        )
        if to_train:
            now += to_train
            log.emit(TurnTaken(devices="shared", group="policy", seconds=to_train))
        start, seconds = now, TRAIN * sum(lengths)
        now += seconds
        log.emit(EngineBusy(group="policy", rank=0, start=start, end=now, work="step", token_count=sum(lengths)))
        log.emit(
            OptimizerStep(
                group="policy",
                train_step=step,
                optimizer_step=step,
                applied=True,
                reason="",
                metrics={},
                seconds=seconds,
            )
        )
        publish = PUBLISH + to_generate
        for group, begin, work, took in (("policy", now, "export", EXPORT), ("rollout", now + EXPORT, "prepare", LOAD)):
            log.emit(EngineBusy(group=group, rank=0, start=begin, end=begin + took, work=work, token_count=0))
        now += publish
        if to_generate:
            log.emit(TurnTaken(devices="shared", group="rollout", seconds=to_generate))
        log.emit(Published(version=step + 1, changed=True, byte_count=1, seconds=publish, exposed=publish, fenced=()))
        tokens += sum(lengths)
        log.emit(
            StepEnded(
                train_step=step,
                void=False,
                reason="",
                policy_version=step + 1,
                published_version=step + 1,
                publish_count=step + 1,
                tokens={"generated": tokens, "trained": tokens, "masked": 0, "dropped": 0, "open": 0},
                leases={},
                seconds=now - begun,
            )
        )
    log.emit(RunEnded(status="completed", reason="train_steps", message=""))
    metrics.close()
    log.close()
    return now / steps


def small_machine(**changes: object) -> MeasuredRun:
    """Two cores, one engine on each, about as in our measurements of the common workload: 16 prompts x 8 answers of 64
    tokens, generation 0.28 s, training 0.56 s."""
    values: dict[str, object] = {
        "directory": "",
        "prompts_per_step": 16,
        "answers_per_prompt": 8,
        "max_staleness": 1,
        "lookahead": 1,
        "publish_every": 1,
        "at_deadline": "mask",
        "order": "ready",
        "publish_mode": "in_flight",
        "engines": 1,
        "slots": 256,
        "trainers": 1,
        "steps": 100,
        "step_s": 0.57,
        "median_s": 0.57,
        "lengths": (64,) * 128,
        "rewards_s": (0.0,),
        "score_s": (),
        "decode": (1e-3, 0.28 / (128 * 64) - 1e-3 / 128),
        "separable": True,
        "train_token_s": 0.56 / (128 * 64),
        "publish_s": 0.005,
        "export_s": 0.002,
        "load_s": 0.003,
        "overlap": True,
        "turning": usual_turning(2.4e6, offload=False),
        "weight_bytes": 2_400_000,
        "lease_s": 0.3,
        "generate_s": 0.28,
        "train_s": 0.56,
    }
    return MeasuredRun(**(values | changes))  # type: ignore[arg-type]
