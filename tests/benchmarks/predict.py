"""The simulator against reality: calibrated on one run, how far off is it at other settings?

    python -m tests.benchmarks.predict [--steps 60] [--settings K=0 K=4 batch=8 batch=32 rewards=4 replicas=2]

The calibration run has K = D = 1, 16 prompts x 8 answers of up to 64 tokens (an untrained model ends them anywhere)
and rewards that take 0.1 s in the median (log-normal, sigma 1, all concurrent). Every setting is then run and
predicted. Run it on an idle machine: the error includes what other processes do to the measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

from asyncrlhf.placement.measured import MeasuredRun, read_run
from asyncrlhf.placement.predict import predictions

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
algorithm = "algorithms.grpo:GRPO"
answers_per_prompt = 8
run_dir = "run"
[data]
source = "asyncrlhf.data.tasks:reverse"
options = { length = 12 }
[groups.policy]
micro_batch_tokens = 1024
layout = "shared"
[groups.policy.scratch]
characters = "abcdefghijklmnopqrstuvwxyz>"
config = { vocab_size = 128, hidden_size = 128, intermediate_size = 352, num_hidden_layers = 3, \
num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 128, tie_word_embeddings = true }
[groups.policy.optimizer]
learning_rate = 1e-6
[groups.rollout]
max_tokens = 64
max_sequence_tokens = 80
[groups.reward]
function = "tests.benchmarks.predict:late"
concurrency = 4096
[checkpoint]
every = 0
[observe]
console = "off"
trace = false
"""


async def late(prompt: str, response: str, ground_truth: str) -> float:
    """Share of vowels, late."""
    seconds = Random(f"{prompt}/{response}").lognormvariate(math.log(0.1), 1)
    await asyncio.sleep(seconds * float(os.environ.get("REWARD_SCALE", "1")))
    return sum(response.count(vowel) for vowel in "aeiou") / max(1, len(response))


def run(setting: str, steps: int) -> MeasuredRun:
    """One run, e.g. of "K=4" or "batch=8"."""
    key, _, value = setting.partition("=")
    staleness = int(value) if key == "K" else 1
    words = [f"train_steps={steps}", f"max_staleness={staleness}", f"lookahead={(staleness + 1) // 2}"]
    words += ["off_policy=decoupled", f"prompts_per_step={value if key == 'batch' else 16}"]
    words += [f"groups.rollout.replicas={value}"] if key == "replicas" else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"REWARD_SCALE": value} if key == "rewards" else {}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "run.toml").write_text(CONFIG)
        command = [sys.executable, "-m", "asyncrlhf", "run.toml", *words]
        subprocess.run(command, cwd=directory, env=environment, check=True)
        return read_run(Path(directory) / "run")


def changes(setting: str) -> dict[str, int | float]:
    """The setting as a prediction's table."""
    key, _, value = setting.partition("=")
    names = {"K": "max_staleness", "batch": "prompts_per_step", "rewards": "reward_scale", "replicas": "replicas"}
    return {names[key]: float(value) if key == "rewards" else int(value)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    default = ["K=0", "K=4", "batch=8", "batch=32", "rewards=4", "replicas=2"]
    parser.add_argument("--settings", nargs="+", default=default)
    arguments = parser.parse_args()
    base = run("K=1", arguments.steps)
    print(f"calibrated: {base.step_s:.3f} s a step, decode {base.decode}, separable {base.separable}")
    print("setting      measured s  predicted s   error")
    for setting in ("K=1", *arguments.settings):
        measured = base if setting == "K=1" else run(setting, arguments.steps)
        predicted = predictions(base, changes(setting))[1].result.step
        error = predicted / measured.step_s - 1
        print(f"{setting:<12} {measured.step_s:>10.3f} {predicted:>12.3f} {error:>+7.1%}", flush=True)


if __name__ == "__main__":
    main()
