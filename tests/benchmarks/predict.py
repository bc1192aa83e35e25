"""The simulator against reality: calibrated on one run, how far off is it at other settings?

    python -m tests.benchmarks.predict [--workload common|late|tails] [--rounds N] [--steps N] [--settings K=0 ...]

The calibration run is "K=1": K = D = 1, pools of their own (strategy "async"), 16 prompts x 8 answers: of up to 64
tokens (an untrained model ends them anywhere) and rewards that come at once in `common`, and take 0.1 s in the median
(log-normal, sigma 1, all concurrent) in `late`; of up to 256 tokens (log-normal, median 24, sigma 1) and 0.3 s in
`tails`. Every setting is then run and predicted from that one run; settings are interleaved, `rounds` times, each round
with a calibration of its own, and the table has medians over rounds of the median steady step. `alternating` is K = 0
with two rollout engines and two ranks that take turns on the cores that one of each had, `colocate` K = 0 with one of
each on one core. Two pairs are ranked as measured if the slower one is so by more than 5 %, else they are called even.

An invocation takes three to six minutes on two idle cores. Run it on an idle machine: the errors include what other
processes do to the measurement. `--runs DIR` keeps the run directories, and measures only what is not there.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import median

import msgspec

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


BASE = "K=1"
"""Of which everything is predicted."""
TURNS = ("alternating", "colocate")
OFFLOAD = "+offload"
"""After one of TURNS: who leaves gives its memory back."""
MEDIAN = {"common": 0.0, "late": 0.1, "tails": 0.3}
"""Seconds of a reward, by workload."""
SETTINGS = {
    "common": ["K=0", "K=4", "batch=8", "batch=32", "replicas=2", *TURNS, f"alternating{OFFLOAD}"],
    "late": ["K=0", "K=4", "batch=8", "rewards=4", "alternating", "colocate"],
    "tails": ["K=0", "K=4", "K=8", "batch=8", "rewards=0.5", "alternating"],
}
ROUNDS = {"common": 2, "late": 1, "tails": 1}
STEPS = {"common": 24, "late": 24, "tails": 30}
STRATEGIES = {"K=0": "synchronous", "K=1": "async K=1", "K=4": "async K=4", "K=8": "async K=8"}
"""Settings that are ranked, besides those that take turns."""
EVEN = 0.05
SIMULATED = 200
"""Train steps."""


async def late(prompt: str, response: str, ground_truth: str) -> float:
    """Share of vowels, late."""
    median = float(os.environ["REWARD_MEDIAN"])
    if median:
        await asyncio.sleep(Random(f"{prompt}/{response}").lognormvariate(math.log(median), 1))
    return sum(response.count(vowel) for vowel in "aeiou") / max(1, len(response))


def run(workload: str, setting: str, steps: int, directory: Path) -> MeasuredRun:
    """One run, e.g. of "K=4", "batch=8" or "alternating", in a directory; the one that is there, if there is one."""
    if (directory / "run" / "summary.json").exists():
        return read_run(directory / "run")
    key, _, value = setting.removesuffix(OFFLOAD).partition("=")
    staleness = int(value) if key == "K" else int(key not in TURNS)
    if workload == "tails" and not staleness:
        steps = steps // 2  # of several seconds
    words = [f"train_steps={steps}", f"max_staleness={staleness}", f"lookahead={(staleness + 1) // 2}"]
    words += ["off_policy=decoupled", f"prompts_per_step={value if key == 'batch' else 16}"]
    words += [f"groups.rollout.replicas={value}"] if key == "replicas" else []
    words += [f"placement.strategy={key}"] if key in TURNS else []
    words += ["placement.offload=always"] if setting.endswith(OFFLOAD) else []
    words += ["groups.policy.data_parallel=2"] if key == "alternating" else []
    words += ["groups.rollout.max_tokens=256", "groups.rollout.max_sequence_tokens=272"] if workload == "tails" else []
    seconds = MEDIAN[workload] * (float(value) if key == "rewards" else 1.0)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "REWARD_MEDIAN": str(seconds)}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "tests.benchmarks.predict", "--workload", workload, "--child", *words]
    subprocess.run(command, cwd=directory, env=environment, check=True)
    return read_run(directory / "run")


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
    if (strategy := setting.removesuffix(OFFLOAD)) in TURNS:
        return {"strategy": strategy, "max_staleness": 0, "offload": setting.endswith(OFFLOAD)}
    key, _, value = setting.partition("=")
    names = {"K": "max_staleness", "batch": "prompts_per_step", "rewards": "reward_scale", "replicas": "replicas"}
    return {names[key]: float(value) if key == "rewards" else int(value)}


def recorded(base: MeasuredRun, measured: dict[str, float]) -> bytes:
    """JSON that a test can predict from; rounded, without where it was."""
    run = {**asdict(base), "directory": "", "rewards_s": [round(x, 4) for x in base.rewards_s]}
    del run["turning"]
    return msgspec.json.format(msgspec.json.encode({"run": run, "measured_median_s": measured}), indent=0)


def ranking(measured: dict[str, float], predicted: dict[str, float]) -> list[str]:
    """Lines: both orders, and the pairs that the prediction has the other way round."""
    names = {
        setting: STRATEGIES.get(setting, setting)
        for setting in measured
        if setting in STRATEGIES or setting.startswith(TURNS)
    }
    lines = [
        f"{what:<10} {' < '.join(names[s] for s in sorted(names, key=of.__getitem__))}"
        for what, of in (("measured", measured), ("predicted", predicted))
    ]
    for one, two in combinations(sorted(names, key=measured.__getitem__), 2):
        if predicted[one] > predicted[two]:
            apart = measured[two] / measured[one] - 1
            how = "even" if apart < EVEN else "ranked wrongly"
            lines.append(f"{how}: {names[one]} before {names[two]}, measured {apart:.1%} apart")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=MEDIAN, default="common")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--settings", nargs="+")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--record", type=Path, help="write the first calibration and what was measured, for tests")
    parser.add_argument("--child", nargs="+")
    arguments = parser.parse_args()
    workload = arguments.workload
    if arguments.child:
        sys.exit(child(workload, arguments.child))
    settings = [BASE, *(arguments.settings or SETTINGS[workload])]
    measured: dict[str, list[float]] = {setting: [] for setting in settings}
    predicted: dict[str, list[float]] = {setting: [] for setting in settings}
    means: dict[str, list[float]] = {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(arguments.rounds or ROUNDS[workload]):
            where = (arguments.runs or Path(temporary)) / str(number)
            base = run(workload, BASE, arguments.steps or STEPS[workload], where / BASE)
            for setting in settings:
                found = run(workload, setting, arguments.steps or STEPS[workload], where / setting)
                result = predictions(base, {**changes(setting), "steps": SIMULATED})[1].result
                measured[setting].append(found.median_s)
                predicted[setting].append(result.median)
                means[setting].append(result.step / found.step_s - 1)
            if number == 0 and arguments.record is not None:
                arguments.record.write_bytes(recorded(base, {s: x[0] for s, x in measured.items()}))
    print(f"{workload:<12} measured s  predicted s   error   of the mean   rounds")
    for setting in settings:
        seen, said = median(measured[setting]), median(predicted[setting])
        rounds = " ".join(f"{b / a - 1:+.1%}" for a, b in zip(measured[setting], predicted[setting], strict=True))
        print(
            f"{setting:<12} {seen:>10.3f} {said:>12.3f} {said / seen - 1:>+7.1%} {median(means[setting]):>+13.1%}   "
            f"{rounds}{'   calibrated here' if setting == BASE else ''}"
        )
    print("\n".join(ranking(*({s: median(x) for s, x in of.items()} for of in (measured, predicted)))))


if __name__ == "__main__":
    main()
