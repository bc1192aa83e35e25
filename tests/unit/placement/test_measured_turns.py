"""Calibration from a run in which generation, reading and training took turns on the same devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrlhf.errors import ConfigError
from asyncrlhf.placement.measured import MeasuredRun, read_run
from asyncrlhf.placement.predict import as_text, predictions
from asyncrlhf.placement.simulate import simulate
from asyncrlhf.placement.turning import Turning, usual_turning
from tests.unit.placement.run_scene import PROMPTS, PUBLISH, TRAIN, small_machine, write_run

COLOCATE = 'strategy = "colocate"'
SETS = 'sets = [["rollout", "policy", "reference"]]'
"""Of `[placement]`: what "auto" may write, too."""


def taken(directory: Path, placement: str, **costs: float) -> tuple[MeasuredRun, float]:
    """A run that took turns, and its step."""
    step = write_run(directory, **({"to_train": 0.3, "to_generate": 0.4} | costs))  # type: ignore[arg-type]
    (directory / "config.toml").write_text(f"[placement]\n{placement}\n")
    return read_run(directory), step


@pytest.mark.parametrize("placement", [COLOCATE, SETS])
def test_a_run_on_shared_devices_is_replayed_on_them(tmp_path: Path, placement: str) -> None:
    """Half of its step is generation and half is training, on one device; without a bound they still take turns."""
    write_run(tmp_path / "apart")
    apart = read_run(tmp_path / "apart")
    together, _ = taken(tmp_path / "together", placement, to_train=1e-4, to_generate=1e-4)
    assert (apart.shared, together.shared) == (False, True)
    found = predictions(together, {"max_staleness": 2, "steps": 30})
    assert [each.devices for each in found] == [1, 1]
    assert found[1].result.generate + found[1].result.train < 1.02
    assert predictions(apart, {"max_staleness": 2, "steps": 30})[1].result.step < found[1].result.step
    assert not any("alternating" in each.name for each in predictions(together, {}))
    with pytest.raises(ConfigError, match='strategy = "async" takes a run with pools of their own'):
        predictions(together, {"strategy": "async"})


def test_who_shares_devices_is_not_what_the_strategy_is_called(tmp_path: Path) -> None:
    """The files of a run that never took a turn, whatever its configuration calls it."""
    write_run(tmp_path)
    (tmp_path / "config.toml").write_text(f'[placement]\n{COLOCATE}\nturns = "none"\n')
    assert not read_run(tmp_path).shared


@pytest.mark.parametrize(
    ("sets", "devices"),
    [('[["rollout", "policy", "critic"]]', 1), ('[["rollout", "policy"], ["critic"]]', 2), ('[["rollout"]]', 2)],
)
def test_models_of_a_set_are_trained_on_the_same_devices(tmp_path: Path, sets: str, devices: int) -> None:
    write_run(tmp_path, critic=True)
    (tmp_path / "config.toml").write_text(f"[placement]\nsets = {sets}\n")
    assert read_run(tmp_path).trainers == devices


def test_what_turns_cost_is_read_from_a_run_that_took_them(tmp_path: Path) -> None:
    run, step = taken(tmp_path, COLOCATE)
    assert (run.turning.to_train, run.turning.to_generate) == (0.3, 0.4)
    assert run.publish_s == pytest.approx(PUBLISH, rel=1e-6)
    assert run.train_token_s == pytest.approx(TRAIN, rel=1e-6)
    assert simulate(run.pipeline(), 60).step == pytest.approx(step, rel=0.1)
    assert "300.0 ms before training, 400.0 ms before generation, as measured" in as_text(run, predictions(run, {}))


@pytest.mark.parametrize("placement", [COLOCATE, SETS])
def test_a_model_that_reads_on_shared_devices_does_so_after_generation(tmp_path: Path, placement: str) -> None:
    """Its two ranks read 2 s of every batch at once, and its own turn is neither training's nor generation's."""
    run, step = taken(tmp_path, placement, read=2.0, to_read=0.1)
    turning = run.turning
    assert (turning.to_train, turning.to_generate, turning.to_read, run.read_turns) == (0.3, 0.4, 0.1, 1.0)
    assert run.read_s == pytest.approx(2.0 / PROMPTS)
    assert run.score_s == ()
    assert run.train_token_s == pytest.approx(TRAIN, rel=1e-6)
    assert simulate(run.pipeline(), 60).step == pytest.approx(step, rel=0.05)
    assert "400.0 ms before generation, 100.0 ms before reading, as measured" in as_text(run, predictions(run, {}))


EIGHT_SECONDS = {
    **{"max_staleness": 0, "lookahead": 0, "prompts_per_step": 8, "answers_per_prompt": 1, "lengths": (80,)},
    **{"decode": (0.1, 0.0), "train_token_s": 4.0 / 640, "publish_s": 0.0, "export_s": 0.0, "load_s": 0.0},
    "turning": Turning(to_train=0.25, to_generate=0.5, to_read=0.1),
}
"""80 tokens of 0.1 s each, of all 8 answers at once; 4 s of training."""


def test_generation_reading_and_training_in_turn_are_added_up() -> None:
    """8 s of generation, 8 times 0.9 s of reading in two turns, 4 s of training, and the switches."""
    run = small_machine(**EIGHT_SECONDS, shared=True, read_s=0.9, read_turns=2.0)
    assert simulate(run.pipeline(), 20).step == pytest.approx(8 + 7.2 + 4 + 0.25 + 0.5 + 2 * 0.1)
    longer = run.rules(prompts_per_step=4)
    assert simulate(run.pipeline(longer), 20).step == pytest.approx(8 + 3.6 + 2 + 0.25 + 0.5 + 2 * 0.1)


def test_a_model_that_read_on_its_own_devices_reads_in_turn_where_all_are_on_the_same() -> None:
    """Beside generation it is hidden by a lag of one step, except that training waits for nothing else."""
    run = small_machine(**EIGHT_SECONDS, score_s=(0.9,), read_turns=1.0)
    found = simulate(run.pipeline(strategy="colocate"), 20).step
    assert found == pytest.approx(8 + 7.2 + 4 + 0.25 + 0.5 + 0.1)
    ahead = run.rules(max_staleness=2, lookahead=1)
    assert simulate(run.pipeline(ahead), 40).step < 0.8 * found


def test_memory_that_moves_makes_a_step_longer_by_formula() -> None:
    """8 s of generation and 4 s of training, and what turns cost with so many bytes of weights."""
    run = small_machine(**EIGHT_SECONDS, weight_bytes=100_000_000)
    moves = usual_turning(1e8, offload=True)
    costs = moves.to_train + moves.cold_train + moves.to_generate + moves.cold_generate
    assert simulate(run.pipeline(strategy="colocate"), 20).step == pytest.approx(8 + 4 + 0.25 + 0.5)
    assert simulate(run.pipeline(strategy="colocate", offload=True), 20).step == pytest.approx(8 + 4 + costs)
    found = predictions(run, {"strategy": "colocate", "max_staleness": 0, "offload": True, "steps": 20})
    assert found[1].result.step == pytest.approx(8 + 4 + costs)


def test_only_turns_that_were_not_taken_have_a_formula() -> None:
    with pytest.raises(ConfigError, match="offload is for .* and nobody takes turns; leave it out"):
        small_machine().pipeline(offload=True)
    with pytest.raises(ConfigError, match="offload is for .* and runs/one took turns; leave it out"):
        small_machine(shared=True, directory="runs/one").pipeline(offload=True)


def test_engines_on_shared_devices_are_as_many_as_there_are() -> None:
    run = small_machine()
    with pytest.raises(ConfigError, match=r'replicas = 3 .* there are 1: strategy = "colocate" .* use replicas = 1'):
        run.pipeline(strategy="colocate", engines=3)
    assert run.pipeline(strategy="colocate", engines=1).engines == 1
    assert run.pipeline(strategy="alternating", engines=3).engines == 4
    with pytest.raises(ConfigError, match=r"replicas = 2 .* there are 1: runs/one shared them; use replicas = 1"):
        small_machine(shared=True, directory="runs/one").pipeline(engines=2)
