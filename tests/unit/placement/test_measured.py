"""Calibration from a run: what is read from its files, and that the simulator then gives back the run it came from."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from asyncrlhf.errors import ConfigError
from asyncrlhf.flow.ledger import LedgerRules
from asyncrlhf.placement.advice import warnings
from asyncrlhf.placement.earlier import facts_before
from asyncrlhf.placement.measured import MeasuredRun, read_run, steady_of
from asyncrlhf.placement.predict import as_text, facts_of, predictions
from asyncrlhf.placement.simulate import simulate
from asyncrlhf.placement.workload import Workload
from tests.unit.placement.run_scene import (
    BASE,
    EXPORT,
    LOAD,
    PROMPTS,
    PUBLISH,
    REWARD,
    SLOPE,
    TRAIN,
    small_machine,
    write_run,
)


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


def test_with_long_tails_and_slow_rewards_pools_with_a_lag_win_by_far() -> None:
    def step(run: MeasuredRun, strategy: str, staleness: int) -> float:
        rules = run.rules(max_staleness=staleness, lookahead=(staleness + 1) // 2)
        return simulate(run.pipeline(rules, strategy=strategy), 60).step

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


def test_a_run_that_is_too_short_for_its_lookahead_says_how_long_it_takes(tmp_path: Path) -> None:
    """Of 9 steps the first and the last six go; of 11, two and six. The latter are enough."""
    write_run(tmp_path / "short", lookahead=6, steps=9)
    with pytest.raises(ConfigError, match=r"short: of 9 train steps with lookahead = 6, 2 are left .* run 11 steps"):
        read_run(tmp_path / "short")
    write_run(tmp_path / "enough", lookahead=6, steps=11)
    assert read_run(tmp_path / "enough").steps == 3


def test_a_run_whose_engines_were_not_seen_generating_is_refused(tmp_path: Path) -> None:
    """They were in its first steps only, which do not count."""
    write_run(tmp_path, steps=10, busy_steps=1)
    with pytest.raises(ConfigError, match=r"0 of [1-4] slices of generation lie in train steps 2-9; run more steps"):
        read_run(tmp_path)


def test_too_few_simulated_steps_are_refused(run: MeasuredRun) -> None:
    with pytest.raises(ConfigError, match="steps"):
        predictions(run, {"steps": 4})


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
    assert len(steady_of(rows, 30)) == 0


def test_devices_are_counted_as_the_placement_counts_them(tmp_path: Path) -> None:
    """A critic has the policy's devices with "async", and its own where nobody says."""
    write_run(tmp_path, critic=True)
    assert read_run(tmp_path).trainers == 2
    (tmp_path / "config.toml").write_text('[placement]\nstrategy = "async"\n')
    run = read_run(tmp_path)
    assert run.trainers == 1
    assert predictions(run, {"strategy": "alternating", "steps": 10})[1].devices == 2
