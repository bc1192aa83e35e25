"""How long planning takes on one core, and how many placements it compares.

    python -m tests.benchmarks.placement

Four and five models on 128 devices (budgets: 3 s and 10 s), all strategies, synchronous and asynchronous; then a
mixture of experts of 400e9 parameters on 10,000 devices with its scaling curve. Processor seconds.
"""

from __future__ import annotations

import time
from dataclasses import replace

from asyncrlhf.placement.scaling import as_text, curve
from asyncrlhf.placement.search import search
from asyncrlhf.placement.strategies import STRATEGIES
from asyncrlhf.placement.workload import Lengths, Workload
from tests.unit.placement.scene import model, problem


def main() -> None:
    for staleness in (0, 2):
        work = Workload(minibatches=8, max_staleness=staleness)
        four = problem(128, "llama-13b", strategies=STRATEGIES, work=work)
        five = replace(four, models={**four.models, "safety": model("llama-13b", "reward")})
        for name, asked, budget in (("4 models", four, 3), ("5 models", five, 10)):
            begun = time.process_time()
            outcome = search(asked)
            spent = time.process_time() - begun
            how = "exhaustive" if outcome.exhaustive else "not exhaustive"
            print(
                f"{name}, 128 devices, max_staleness {staleness}: {spent:.2f} s of {budget} s, {outcome.examined:,} "
                f"placements compared after pruning, {how}; best {outcome.candidates[0].strategy.label}"
            )
    large = problem(
        10_000,
        "moe-400b",
        roles=("policy", "reference"),
        node="H200",
        strategies=("colocate", "async", "auto"),
        work=Workload(
            prompts_per_step=512, answers_per_prompt=32, response=Lengths(mean=6000, cv=0.8, max=32768), max_staleness=2
        ),
    )
    begun = time.process_time()
    points = curve(large)
    print(f"10,000 devices: {time.process_time() - begun:.2f} s for {len(points)} points")
    print(as_text(points))


if __name__ == "__main__":
    main()
