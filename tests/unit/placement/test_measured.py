"""Calibration from a run: what is read from its files, and that the simulator then gives back the run it came from."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from asyncrlhf.errors import ConfigError
from asyncrlhf.flow.ledger import LedgerRules
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
from asyncrlhf.placement.advice import warnings
from asyncrlhf.placement.earlier import facts_before
from asyncrlhf.placement.measured import MeasuredRun, read_run, steady_of
from asyncrlhf.placement.predict import as_text, facts_of, predictions
from asyncrlhf.placement.simulate import simulate
from asyncrlhf.placement.turning import usual_turning
from asyncrlhf.placement.workload import Workload

BASE, SLOPE, TRAIN, REWARD, PUBLISH = 0.010, 0.002, 1e-3, 0.2, 0.05
"""Seconds of a decode step and of each sequence in it, of training a token, of a reward, of a publish."""
EXPORT, LOAD = 0.02, 0.01
"""Of a publish."""
PROMPTS, STEPS = 4, 30


def write_run(directory: Path, to_train: float = 0.0, to_generate: float = 0.0, critic: bool = False) -> float:
    """A synchronous run, as it would be logged, of an engine and a trainer that cost exactly the above; its step. With
    seconds to change turns, if any."""
    now = 0.0
    log = EventLog(directory, clock=lambda: now)
    metrics = Metrics(directory)
    log.subscribe(metrics)
    groups = {name: GroupShape(role, 1) for name, role in (("rollout", "rollout"), ("policy", "policy"))}
    groups |= {"critic": GroupShape("critic", 1)} if critic else {}
    random, lengths_of = Random(1), [10, 20, 40, 80]
    log.emit(
        RunStarted(
            resumed_from=None,
            algorithm="algorithms.grpo:GRPO",
            seed=0,
            max_staleness=0,
            lookahead=0,
            prompts_per_step=PROMPTS,
            answers_per_prompt=1,
            train_steps=STEPS,
            groups=groups,
        )
    )
    tokens = 0
    for step in range(STEPS):
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
            if now > start:
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
    return now / STEPS


@pytest.fixture
def run(tmp_path: Path) -> MeasuredRun:
    write_run(tmp_path)
    return read_run(tmp_path)


def test_what_the_engines_cost_is_found_again(run: MeasuredRun) -> None:
    assert run.separable
    assert run.decode == pytest.approx((BASE, SLOPE), rel=0.15)
    assert run.train_token_s == pytest.approx(TRAIN, rel=1e-6)
    assert run.publish_s == pytest.approx(PUBLISH, rel=1e-6)
    assert (run.export_s, run.load_s) == (pytest.approx(EXPORT, rel=1e-6), pytest.approx(LOAD, rel=1e-6))
    assert set(run.rewards_s) == {REWARD}
    assert set(run.lengths) == {10, 20, 40, 80}
    assert (run.prompts_per_step, run.engines, run.trainers, run.steps) == (PROMPTS, 1, 1, 24)


def test_the_simulator_gives_back_the_run_and_predicts_others(run: MeasuredRun, tmp_path: Path) -> None:
    """Truth for the others: the costs that the run was made of, put into the simulator directly."""
    assert simulate(run.pipeline(), 60).step == pytest.approx(run.step_s, rel=0.1)
    for staleness, prompts in ((1, 4), (4, 4), (0, 8), (2, 8)):
        rules = LedgerRules(prompts_per_step=prompts, max_staleness=staleness, lookahead=(staleness + 1) // 2)
        true = replace(
            run.pipeline(rules),
            decode=lambda active: BASE + SLOPE * active,
            train=lambda random, tokens: TRAIN * tokens,
            publish=PUBLISH,
            reward=lambda random: REWARD,
        )
        assert simulate(run.pipeline(rules), 200).step == pytest.approx(simulate(true, 200).step, rel=0.05)


def test_predictions_in_words(run: MeasuredRun) -> None:
    text = as_text(run, predictions(run, {}))
    for setting in ("as it ran", "max_staleness=1", "max_staleness=4", "strategy=alternating"):
        assert setting in text
    assert "predictions, not measured" in text
    found = predictions(run, {"max_staleness": 2, "prompts_per_step": 8})
    assert found[1].name == "max_staleness=2 prompts_per_step=8"
    assert found[1].result.lag_max <= 2
    with pytest.raises(ConfigError, match="prompts_per_stp is not a key; did you mean prompts_per_step"):
        predictions(run, {"prompts_per_stp": 8})
    with pytest.raises(ConfigError, match='strategy = "split" cannot be simulated'):
        predictions(run, {"strategy": "split"})


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
        "turning": usual_turning(2.4e6),
        "lease_s": 0.3,
        "generate_s": 0.28,
        "train_s": 0.56,
    }
    return MeasuredRun(**(values | changes))  # type: ignore[arg-type]


def test_strategies_are_ranked_as_they_were_measured() -> None:
    """Instant rewards on two equal cores: alternating beats two pools, which beat one core doing both (measured: 0.49,
    0.57 and 0.84 s). Long tails and slow rewards: pools with a lag beat everything synchronous, by far."""

    def step(run: MeasuredRun, strategy: str, staleness: int) -> float:
        rules = run.rules(max_staleness=staleness, lookahead=(staleness + 1) // 2)
        return simulate(run.pipeline(rules, strategy=strategy), 60).step

    common = small_machine()
    alternating, pools, one = (step(common, *how) for how in (("alternating", 0), ("async", 1), ("colocate", 0)))
    assert alternating == pytest.approx(0.49, rel=0.15)
    assert pools == pytest.approx(0.57, rel=0.15)
    assert one == pytest.approx(0.84, rel=0.15)
    assert alternating < pools < one

    random = Random(0)
    tails = small_machine(
        lengths=tuple(min(256, max(1, round(random.lognormvariate(math.log(24), 1)))) for _ in range(2048)),
        rewards_s=tuple(max(random.lognormvariate(math.log(0.3), 1) for _ in range(8)) for _ in range(512)),
    )
    assert step(tails, "async", 8) < 0.5 * step(tails, "alternating", 0)
    assert step(tails, "async", 8) < step(tails, "async", 1) < step(tails, "async", 0)


def test_a_plan_takes_lengths_and_latencies_from_a_run(run: MeasuredRun) -> None:
    work = run.workload(Workload(prompts_per_step=32))
    assert work.response.quantiles(4) == tuple(sorted(run.lengths)[len(run.lengths) * i // 8] for i in (1, 3, 5, 7))
    assert work.mean_response == pytest.approx(sum(run.lengths) / len(run.lengths), rel=0.02)
    assert (work.reward_seconds, work.reward_cv) == (pytest.approx(REWARD), pytest.approx(0))
    assert work.prompts_per_step == 32


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the directory of a run"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(ConfigError, match="0 train steps are too few"):
        read_run(tmp_path)


def test_an_earlier_run_advises_the_next(run: MeasuredRun, tmp_path: Path) -> None:
    """Leases take about 1 s and training 0.15 s: one train step ahead is too few, and the fix is named."""
    facts = facts_before(tmp_path, lookahead=1, max_staleness=2)
    assert facts.generate_s == pytest.approx(run.generate_s, rel=1e-6)
    assert facts.lease_s == pytest.approx(run.lease_s, rel=0.2), "newest leases against all of the steady state"
    (text,) = warnings(facts)
    assert "lookahead = 1 is below lease time / step time" in text
    assert "set lookahead = 2 and max_staleness = 4" in text
    assert warnings(facts_before(tmp_path, lookahead=2, max_staleness=4)) == []
    assert warnings(facts_before(tmp_path, lookahead=0, max_staleness=0)) == []
    assert facts_of(run).train_s == pytest.approx(facts.train_s, rel=1e-6)


def test_without_an_earlier_run_nothing_is_said(tmp_path: Path) -> None:
    facts = facts_before(tmp_path / "never", lookahead=4, max_staleness=8)
    assert (facts.generate_s, facts.train_s, facts.lease_s, facts.host_need) == (None, None, None, None)
    assert warnings(facts) == []


def test_a_run_that_chose_its_lookahead_keeps_it_under_another_bound(tmp_path: Path) -> None:
    """8 with 2 ahead is a choice, 8 with 4 is what a configuration says when nobody has chosen."""
    write_run(tmp_path)
    run = read_run(tmp_path)
    own, usual = replace(run, max_staleness=8, lookahead=2), replace(run, max_staleness=8, lookahead=4)
    for measured, bound, expected in ((own, 6, 2), (own, 1, 1), (usual, 6, 3), (usual, 1, 1)):
        found = predictions(measured, {"max_staleness": bound, "steps": 20})[1]
        assert (found.max_staleness, found.lookahead) == (bound, expected)
    table = as_text(run, predictions(run, {})).splitlines()
    header = next(line for line in table if line.startswith("setting"))
    assert header.split()[1:3] == ["K/D", "devices"]
    as_it_ran, alternating = (next(x for x in table if x.startswith(name)) for name in ("as it ran", "strategy="))
    assert as_it_ran.split()[3:5] == ["0/0", "2"]
    assert alternating.split()[1:3] == ["0/0", "2"]


def test_a_run_on_shared_devices_is_replayed_on_them(tmp_path: Path) -> None:
    """Half of its step is generation and half is training, on one device; without a bound they still take turns."""
    write_run(tmp_path)
    apart = read_run(tmp_path)
    (tmp_path / "config.toml").write_text('[placement]\nstrategy = "colocate"\n')
    together = read_run(tmp_path)
    assert (apart.shared, together.shared) == (False, True)
    found = predictions(together, {"max_staleness": 2, "steps": 30})
    assert [each.devices for each in found] == [1, 1]
    assert found[1].result.generate + found[1].result.train < 1.02
    assert predictions(apart, {"max_staleness": 2, "steps": 30})[1].result.step < found[1].result.step
    assert not any("alternating" in each.name for each in predictions(together, {}))
    with pytest.raises(ConfigError, match='strategy = "async" takes a run with pools of their own'):
        predictions(together, {"strategy": "async"})


def test_what_turns_cost_is_read_from_a_run_that_took_them(tmp_path: Path) -> None:
    step = write_run(tmp_path, to_train=0.3, to_generate=0.4)
    (tmp_path / "config.toml").write_text('[placement]\nstrategy = "colocate"\n')
    run = read_run(tmp_path)
    assert (run.turning.to_train, run.turning.to_generate) == (0.3, 0.4)
    assert run.publish_s == pytest.approx(PUBLISH, rel=1e-6)
    assert run.train_token_s == pytest.approx(TRAIN, rel=1e-6)
    assert simulate(run.pipeline(), 60).step == pytest.approx(step, rel=0.1)
    assert "300.0 ms before training, 400.0 ms before generation, as measured" in as_text(run, predictions(run, {}))


def test_publishes_go_on_beside_training_where_the_product_would_have_them(run: MeasuredRun) -> None:
    """With a lookahead, no turns, and unless the configuration says no."""
    ahead = run.rules(max_staleness=2, lookahead=1)
    assert run.pipeline(ahead).overlap
    assert not run.pipeline(run.rules()).overlap
    assert not replace(run, overlap=False).pipeline(ahead).overlap
    hidden = simulate(replace(run, publish_s=0.5).pipeline(ahead), 60).step
    exposed = simulate(replace(run, publish_s=0.5, overlap=False).pipeline(ahead), 60).step
    assert hidden < exposed


def test_the_last_steps_of_a_run_that_looks_ahead_are_not_its_steady_state() -> None:
    """Nothing is generated ahead for steps that will not come, so the last ones wait for the longest answers."""
    rows = [{"train_step": step} for step in range(20)]
    assert [row["train_step"] for row in steady_of(rows, 4)] == list(range(4, 16))
    assert [row["train_step"] for row in steady_of(rows, 0)] == list(range(4, 20))
    assert len(steady_of(rows, 30)) == 1


def test_devices_are_counted_as_the_placement_counts_them(tmp_path: Path) -> None:
    """A critic has the policy's devices with "async", and its own where nobody says."""
    write_run(tmp_path, critic=True)
    assert read_run(tmp_path).trainers == 2
    (tmp_path / "config.toml").write_text('[placement]\nstrategy = "async"\n')
    run = read_run(tmp_path)
    assert run.trainers == 1
    assert predictions(run, {"strategy": "alternating", "steps": 10})[1].devices == 2
