"""What the runtimes cost: generation and training overlapped (K = D = 1) on a short-answer workload, instant rewards.

    python -m tests.benchmarks.overlap [--rounds 3] [--runtimes local inproc ray] [--settings 1:1 0:0] [--steps 40]

16 prompts x 8 answers of at most 64 tokens a step, a 0.6M-parameter model, one optimizer step. `step / bound` is the
length of a step over max(busy generate, busy train) of the same run: 1.00 is perfect overlap. `most` is what overlap
alone can gain over taking turns, (g + t) / max(g, t). Runtimes and settings K:D are interleaved; medians over rounds.
`--spin MS`: every reward holds the interpreter for so many milliseconds. A run takes about half a minute on two idle
cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
algorithm = "algorithms.grpo:GRPO"
train_steps = {steps}
prompts_per_step = 16
answers_per_prompt = 8
run_dir = "run"
runtime = "{runtime}"
max_staleness = {K}
lookahead = {D}
off_policy = "decoupled"
[data]
source = "asyncrlhf.data.tasks:reverse"
options = {{ length = 12 }}
[groups.policy]
micro_batch_tokens = 1024
layout = "shared"
[groups.policy.scratch]
characters = "abcdefghijklmnopqrstuvwxyz>"
config = {{ vocab_size = 128, hidden_size = 128, intermediate_size = 352, num_hidden_layers = 3, \
num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 128, tie_word_embeddings = true }}
[groups.policy.optimizer]
learning_rate = 1e-5
[groups.rollout]
max_tokens = 64
max_sequence_tokens = 80
[groups.reward]
function = "tests.benchmarks.overlap:vowels"
[checkpoint]
every = 0
[observe]
console = "off"
trace = false
"""


def vowels(prompt: str, response: str, ground_truth: str) -> float:
    """Share of vowels, after SPIN_MS of pure Python."""
    until = time.perf_counter() + float(os.environ.get("SPIN_MS", "0")) / 1000
    while time.perf_counter() < until:
        pass
    return sum(response.count(vowel) for vowel in "aeiou") / max(1, len(response))


def measure(runtime: str, setting: str, steps: int, spin: float) -> dict[str, float]:
    """Medians over the steps of one run, without its first fifth."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "overlap.toml"
        K, D = setting.split(":")
        config.write_text(CONFIG.format(runtime=runtime, K=K, D=D, steps=steps))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SPIN_MS": str(spin)}
        command = [sys.executable, "-m", "asyncrlhf", str(config)]
        subprocess.run(command, cwd=directory, env=environment, check=True)
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines][steps // 5 :]
    seconds = sum(row["time/step"] for row in rows)
    generate, train = (sum(row[f"busy/{pool}"] * row["time/step"] for row in rows) for pool in ("generate", "train"))
    return {
        "step": seconds / len(rows),
        "generate": generate / len(rows),
        "train": train / len(rows),
        "ratio": seconds / max(generate, train),
        "most": (generate + train) / max(generate, train),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--spin", type=float, default=0.0)
    parser.add_argument("--runtimes", nargs="+", default=["local", "inproc"])
    parser.add_argument("--settings", nargs="+", default=["1:1"], metavar="K:D")
    arguments = parser.parse_args()
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for runtime, setting in itertools.product(arguments.runtimes, arguments.settings):
            print(f"{runtime} {setting}: {arguments.steps} train steps ...", file=sys.stderr, flush=True)
            found = measure(runtime, setting, arguments.steps, arguments.spin)
            results.setdefault((runtime, setting), []).append(found)
    print("runtime  K:D   s/step  busy generate  busy train  step / bound  most")
    for (runtime, setting), runs in results.items():
        step, generate, train, ratio, most = (
            statistics.median(run[key] for run in runs) for key in ("step", "generate", "train", "ratio", "most")
        )
        print(f"{runtime:8} {setting:4} {step:7.3f} {generate:14.3f} {train:11.3f} {ratio:13.3f} {most:5.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
