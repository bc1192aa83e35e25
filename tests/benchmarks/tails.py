"""Where asynchrony pays: long-tailed answers and slow rewards, real engines, several staleness settings in one run.

    python -m tests.benchmarks.tails [--rounds 1] [--settings 0:0 8:4 4:4] [--runtime local]

Every setting K:D trains the same model on the same prompts: 16 prompts x 8 answers a step, lengths log-normal (median
24, sigma 1, at most 256 tokens), one reward latency per answer (log-normal, median 0.3 s, sigma 1), all concurrent.
Settings are interleaved, `rounds` times; ratios are against the first setting, medians over rounds. One round of the
three takes about three minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from msgspec.structs import replace

from asyncrlhf.backends.torch.sample import TorchSampler
from asyncrlhf.messages import EngineEvent, GenerateRequest

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
options = {{ length = 10 }}
[groups.policy]
micro_batch_tokens = 1024
layout = "shared"
[groups.policy.scratch]
characters = "abcdefghijklmnopqrstuvwxyz>"
config = {{ vocab_size = 128, hidden_size = 128, intermediate_size = 256, num_hidden_layers = 4, \
num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 512, tie_word_embeddings = true }}
[groups.policy.optimizer]
learning_rate = 1e-4
[groups.rollout]
max_tokens = 256
max_sequence_tokens = 272
concurrency = 256
[groups.reward]
function = "tests.benchmarks.tails:slow_reward"
concurrency = 4096
timeout = 120
[checkpoint]
every = 0
[observe]
console = "off"
"""
STEPS = {0: 12}
"""Train steps of a setting by K; the others have 80."""


class TailSampler(TorchSampler):
    """The torch sampler, told how long each answer is to be."""

    def add(self, requests: Sequence[GenerateRequest]) -> Sequence[EngineEvent]:
        return super().add([replace(r, max_tokens=_length(r.seed), stop_token_ids=()) for r in requests])


async def slow_reward(prompt: str, response: str, ground_truth: str) -> float:
    """Share of vowels, late."""
    await asyncio.sleep(Random(f"{prompt}/{response}").lognormvariate(math.log(0.3), 1.0))
    return sum(response.count(vowel) for vowel in "aeiou") / max(1, len(response))


def _length(seed: int) -> int:
    return min(256, max(1, int(Random(seed).lognormvariate(math.log(24), 1.0))))


def _child(config: str) -> int:
    from asyncrlhf import build
    from asyncrlhf.config.groups import TorchRollout
    from asyncrlhf.config.load import load
    from asyncrlhf.launch import run

    build.ENGINES[TorchRollout] = "tests.benchmarks.tails:TailSampler"
    return run(load(config))


def measure(runtime: str, K: int, D: int) -> dict[str, Any]:
    """summary.json of one run."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "tails.toml"
        config.write_text(CONFIG.format(runtime=runtime, steps=STEPS.get(K, 80), K=K, D=D))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.benchmarks.tails", "--child", str(config)]
        subprocess.run(command, cwd=directory, env=environment, check=True)
        return json.loads((Path(directory) / "run" / "summary.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--settings", nargs="+", default=["0:0", "8:4", "4:4"], metavar="K:D")
    parser.add_argument("--runtime", default="local")
    arguments = parser.parse_args()
    if arguments.child:
        return _child(arguments.child)
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for setting in arguments.settings:
            K, D = map(int, setting.split(":"))
            print(f"K={K} D={D}: {STEPS.get(K, 80)} train steps ...", file=sys.stderr, flush=True)
            results.setdefault(setting, []).append(measure(arguments.runtime, K, D))
    base = results[arguments.settings[0]]
    print("K:D   steps/s    x  trained tokens/s    x  lag mean/max  masked  expired  efficiency")
    for setting, runs in results.items():
        steps = statistics.median(r["rates"]["steps_s"] for r in runs)
        tokens = statistics.median(r["rates"]["trained_tokens_s"] for r in runs)
        steps_0 = statistics.median(r["rates"]["steps_s"] for r in base)
        tokens_0 = statistics.median(r["rates"]["trained_tokens_s"] for r in base)
        last = runs[-1]
        lag = last["staleness"]
        account = last["tokens"]
        parts = (account[name] for name in ("trained", "masked", "dropped", "open"))
        assert account["generated"] == sum(parts), account
        assert lag["max_token_lag"] <= lag["bound"], lag
        print(
            f"{setting:5} {steps:7.2f} {steps / steps_0:5.1f} {tokens:16,.0f} {tokens / tokens_0:5.1f}  "
            f"{lag['mean_token_lag']:6.2f} / {lag['max_token_lag']}  {lag['masked_fraction']:6.1%} "
            f"{lag['expired_fraction']:7.1%} {last['overlap_efficiency']:10.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
