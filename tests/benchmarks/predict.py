"""The simulator against reality: calibrated on one run, how far off is it at other settings?

    python -m tests.benchmarks.predict [--workload late|common|tails] [--steps 60] [--settings K=0 alternating ...]

The calibration run has K = D = 1 and 16 prompts x 8 answers: of up to 64 tokens (an untrained model ends them anywhere)
and rewards that take 0.1 s in the median (log-normal, sigma 1, all concurrent) in `late`, at once in `common`; of up to
256 (log-normal, median 24, sigma 1) and 0.3 s in `tails`. Every setting is then run and predicted; `alternating` is
K = 0 with two rollout engines and two ranks that take turns on the cores that one of each had. Run it on an idle
machine: the error includes what other processes do to the measurement.
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
num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 512, tie_word_embeddings = true }
[groups.policy.optimizer]
learning_rate = 1e-6
[groups.rollout]
max_tokens = 64
max_sequence_tokens = 80
concurrency = 256
[groups.reward]
function = "tests.benchmarks.predict:late"
concurrency = 4096
[checkpoint]
every = 0
[observe]
console = "off"
trace = false
"""


MEDIAN = {"late": 0.1, "common": 0.0, "tails": 0.3}
"""Seconds of a reward, by workload."""


async def late(prompt: str, response: str, ground_truth: str) -> float:
    """Share of vowels, late."""
    median = float(os.environ["REWARD_MEDIAN"])
    if median:
        await asyncio.sleep(Random(f"{prompt}/{response}").lognormvariate(math.log(median), 1))
    return sum(response.count(vowel) for vowel in "aeiou") / max(1, len(response))


def run(workload: str, setting: str, steps: int) -> MeasuredRun:
    """One run, e.g. of "K=4", "batch=8" or "alternating"."""
    key, _, value = setting.partition("=")
    staleness = int(value) if key == "K" else int(key != "alternating")
    words = [f"train_steps={steps}", f"max_staleness={staleness}", f"lookahead={(staleness + 1) // 2}"]
    words += ["off_policy=decoupled", f"prompts_per_step={value if key == 'batch' else 16}"]
    words += [f"groups.rollout.replicas={value}"] if key == "replicas" else []
    words += ["placement.strategy=alternating", "groups.policy.data_parallel=2"] if key == "alternating" else []
    words += ["groups.rollout.max_tokens=256", "groups.rollout.max_sequence_tokens=272"] if workload == "tails" else []
    median = MEDIAN[workload] * (float(value) if key == "rewards" else 1.0)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "REWARD_MEDIAN": str(median)}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "run.toml").write_text(CONFIG)
        command = [sys.executable, "-m", "tests.benchmarks.predict", "--workload", workload, "--child", *words]
        subprocess.run(command, cwd=directory, env=environment, check=True)
        return read_run(Path(directory) / "run")


def child(workload: str, words: list[str]) -> int:
    """The run itself, in ./run."""
    from asyncrlhf import build, launch
    from asyncrlhf.config.groups import TorchRollout
    from asyncrlhf.config.load import load

    if workload == "tails":
        build.ENGINES[TorchRollout] = "tests.benchmarks.tails:TailSampler"
    return launch.run(load("run.toml", words))


def changes(setting: str) -> dict[str, int | float | str]:
    """The setting as a prediction's table."""
    if setting == "alternating":
        return {"strategy": setting, "max_staleness": 0}
    key, _, value = setting.partition("=")
    names = {"K": "max_staleness", "batch": "prompts_per_step", "rewards": "reward_scale", "replicas": "replicas"}
    return {names[key]: float(value) if key == "rewards" else int(value)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=MEDIAN, default="late")
    parser.add_argument("--steps", type=int, default=60)
    default = ["K=0", "K=4", "batch=8", "batch=32", "rewards=4", "replicas=2", "alternating"]
    parser.add_argument("--settings", nargs="+", default=default)
    parser.add_argument("--child", nargs="+")
    arguments = parser.parse_args()
    if arguments.child:
        sys.exit(child(arguments.workload, arguments.child))
    base = run(arguments.workload, "K=1", arguments.steps)
    print(f"calibrated: {base.step_s:.3f} s a step, decode {base.decode}, separable {base.separable}")
    print("setting      measured s  predicted s   error")
    for setting in ("K=1", *arguments.settings):
        measured = base if setting == "K=1" else run(arguments.workload, setting, arguments.steps)
        predicted = predictions(base, changes(setting))[1].result.step
        error = predicted / measured.step_s - 1
        print(f"{setting:<12} {measured.step_s:>10.3f} {predicted:>12.3f} {error:>+7.1%}", flush=True)


if __name__ == "__main__":
    main()
