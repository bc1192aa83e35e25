"""CPU time of the controller per rollout, by the number of live leases: GRPO, real controller, fake engines.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.controller [--live 100 1000 10000] [--runtimes fake local ray]
        [--rounds 3] [--tokens 64] [--lookahead 19] [--profile]

A rollout is all 8 answers to one prompt, of about `tokens` tokens each. Live leases are prompts_per_step * (lookahead +
1), of which those that a train step holds are not live. Every run writes events.jsonl, metrics.jsonl, summary.json and
trace.json. `time.process_time()` of the controller's process is read at the end of train steps: of half a generation
of leases nothing counts, then come as many train steps as it takes to replace all leases once. Runs are interleaved,
medians over rounds. Two ways of having engines that compute nothing:

`fake`: asyncrlhf.testing, all in one process. The gate, ledger, groups, queue, coordinator, event log and its views are
those of every run; the clock is virtual, so that nobody waits, which process_time() does not know. The time inside the
methods of the fake engines is measured with the same clock, call by call, and left out. What stands for a runtime (its
handles and timers) and the fake reward count as the controller's.

`local` and `ray`: the whole product as a user starts it, its engines in processes of their own, so that nothing is
left out: also prompts drawn and encoded, answers decoded for the reward function, messages written and read, and under
Ray the threads of Ray in the controller's process.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import functools
import json
import os
import pstats
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from algorithms.grpo import GRPO
from asyncrlhf.backends.torch.options import SamplerOptions, TrainerOptions
from asyncrlhf.messages import GenerateRequest, WeightHandle
from asyncrlhf.observe import Event, Observer, StepEnded
from asyncrlhf.runtimes.garbage import left_alone
from asyncrlhf.testing import FakeSamplerOptions, FakeTrainerOptions, Run, Scenario, Timing, run_virtual
from asyncrlhf.testing.sampler import FakeSampler
from asyncrlhf.testing.trainer import FakeTrainer
from asyncrlhf.testing.world import build_run

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = 8
STATES = ("running", "scoring", "ready")
VERBS = {
    FakeSampler: ("add", "step", "abort", "prepare", "commit", "probe"),
    FakeTrainer: ("step", "export"),
}
CONFIG = """
algorithm = "algorithms.grpo:GRPO"
train_steps = {steps}
prompts_per_step = {prompts}
answers_per_prompt = 8
run_dir = "run"
runtime = "{runtime}"
max_staleness = {K}
lookahead = {D}
off_policy = "decoupled"
[data]
source = "asyncrlhf.data.tasks:reverse"
options = {{ length = 10 }}
[groups.policy.scratch]
characters = "abcdefghijklmnopqrstuvwxyz>"
config = {{ vocab_size = 64, hidden_size = 16, intermediate_size = 32, num_hidden_layers = 1, \
num_attention_heads = 2, num_key_value_heads = 1, max_position_embeddings = 8192, tie_word_embeddings = true }}
[groups.policy.optimizer]
learning_rate = 1e-3
[groups.rollout]
max_tokens = {tokens}
max_sequence_tokens = {longest}
concurrency = {slots}
[groups.reward]
function = "tests.benchmarks.controller:length"
concurrency = 65536
[checkpoint]
every = 0
payloads = false
[observe]
console = "off"
"""


class Meter:
    """A view of the event log that reads the CPU seconds of this process, less those inside fake engines."""

    def __init__(self, lookahead: int, stop: Callable[[], object], profile: bool) -> None:
        """`stop`: called when all has been measured."""
        self.inside = 0.0
        self._first, self._last = (lookahead + 1) // 2, (lookahead + 1) // 2 + lookahead + 1
        self._stop, self._began, self._states = stop, (0.0, 0.0), Counter[str]()
        self._profiler = cProfile.Profile(time.process_time) if profile else None
        self.result: dict[str, float] = {}

    def see(self, event: Event, *, live: bool) -> None:
        if not isinstance(event, StepEnded) or self.result:
            return
        step = event.train_step + 1
        if step > self._first:
            self._states.update({state: event.leases[state] for state in STATES})
        if step == self._first:
            self._began = time.process_time(), self.inside
            if self._profiler is not None:
                self._profiler.enable()
        elif step == self._last:
            seconds, inside = time.process_time() - self._began[0], self.inside - self._began[1]
            steps = self._last - self._first
            self.result = {"seconds": seconds - inside, "left_out": inside, "steps": steps}
            self.result |= {state: self._states[state] / steps for state in STATES}
            if self._profiler is not None:
                self._profiler.disable()
                pstats.Stats(self._profiler, stream=sys.stderr).sort_stats("tottime").print_stats(45)
            self._stop()

    def close(self) -> None:
        pass

    def leave_out(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any) -> Any:
            started = time.process_time()
            try:
                return function(*arguments)
            finally:
                self.inside += time.process_time() - started

        return timed


# ---- all in one process ----------------------------------------------------------------------------------------------
def scenario(live: int, lookahead: int, tokens: int) -> Scenario:
    """Training is what the others wait for: leases are sampled for a third of their lives, scored for about as long,
    and then wait."""
    steps = lookahead + 1
    return Scenario(
        prompts_per_step=live // steps,
        answers_per_prompt=ANSWERS,
        max_staleness=2 * lookahead,
        lookahead=lookahead,
        train_steps=10 * steps,
        rows=None,
        max_tokens=8 * tokens,
        timing=Timing(pace=1.0, verbs={"step": 4.0 * tokens / steps, "commit": 0.1}),
        sampler=FakeSamplerOptions(slots=live * ANSWERS, length=tokens, sigma=0.5),
        trainer=FakeTrainerOptions(history=False),
        reward={"seconds": (0.5 * tokens, 2.0 * tokens)},
        lease_timeout=1e6,
        stall_timeout=1e6,
        payloads=False,
    )


def run_fake(live: int, lookahead: int, tokens: int, profile: bool) -> Meter:
    runs: list[Run[GRPO]] = []
    meter = Meter(lookahead, lambda: runs[0].coordinator.stop(), profile)
    FakeSampler._why_not = QuickSampler._why_not
    for kind, verbs in VERBS.items():
        for verb in verbs:
            setattr(kind, verb, meter.leave_out(getattr(kind, verb)))

    async def main(directory: Path) -> None:
        observer = Observer(directory, console="off", clock=asyncio.get_running_loop().time)
        observer.log.subscribe(meter)
        run = await build_run(GRPO, scenario(live, lookahead, tokens), keep=False, log=observer.log)
        runs.append(run)
        with left_alone():
            reason = await run.main()
        observer.close()
        assert reason == "stopped", (reason, run.error)

    with TemporaryDirectory() as directory:
        run_virtual(main(Path(directory)))
    return meter


# ---- the product, engines in processes -------------------------------------------------------------------------------
def length(prompt: str, response: str, ground_truth: str) -> float:
    return len(response) % 9 / 8


class QuickSampler(FakeSampler):
    """As many answers at once as are asked for; takes any weights."""

    Options: Any = SamplerOptions

    def __init__(self, options: SamplerOptions) -> None:
        tokens = int(os.environ["BENCHMARK_TOKENS"])
        super().__init__(FakeSamplerOptions(slots=options.slots, length=tokens, sigma=0.5))

    def prepare(self, weights: WeightHandle) -> None:
        self._prepared = weights

    def _why_not(self, request: GenerateRequest) -> str:
        """Spared: it looks through all that wait."""
        return ""


class QuickTrainer(FakeTrainer):
    """Its steps take no time."""

    Options: Any = TrainerOptions

    def __init__(self, options: TrainerOptions) -> None:
        super().__init__(FakeTrainerOptions(history=False))


def run_product(config: Path, lookahead: int, profile: bool) -> Meter:
    from asyncrlhf import build, session
    from asyncrlhf.config.groups import TorchRollout, TorchTrain
    from asyncrlhf.config.load import load
    from asyncrlhf.launch import run

    build.ENGINES[TorchRollout] = "tests.benchmarks.controller:QuickSampler"
    build.ENGINES[TorchTrain] = "tests.benchmarks.controller:QuickTrainer"
    meter = Meter(lookahead, lambda: os.kill(os.getpid(), signal.SIGTERM), profile)

    class MeteredObserver(Observer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.log.subscribe(meter)

    session.Observer = MeteredObserver
    run(load(config))
    return meter


def child(runtime: str, live: int, lookahead: int, tokens: int, profile: bool) -> None:
    """One run in this process; the last line that it prints is what was measured."""
    if runtime == "fake":
        meter = run_fake(live, lookahead, tokens, profile)
    else:
        text = CONFIG.format(
            steps=10 * (lookahead + 1),
            prompts=live // (lookahead + 1),
            runtime=runtime,
            K=2 * lookahead,
            D=lookahead,
            tokens=8 * tokens,
            longest=8 * tokens + 64,
            slots=live * ANSWERS,
        )
        Path("run.toml").write_text(text)
        meter = run_product(Path("run.toml"), lookahead, profile)
    print(json.dumps(meter.result))


def measure(runtime: str, live: int, arguments: argparse.Namespace) -> dict[str, float]:
    options = [f"--{name}={getattr(arguments, name)}" for name in ("tokens", "lookahead")]
    options += ["--profile"] if arguments.profile else []
    with TemporaryDirectory() as directory:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment["BENCHMARK_TOKENS"] = str(arguments.tokens)
        command = [sys.executable, "-m", "tests.benchmarks.controller", f"--child={runtime}", f"--live={live}"]
        done = subprocess.run([*command, *options], cwd=directory, env=environment, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    rollouts = found["steps"] * (live // (arguments.lookahead + 1))
    milliseconds = {name: 1e3 * found[name] / rollouts for name in ("seconds", "left_out")}
    return {**found, **milliseconds, "rollouts": rollouts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child")
    parser.add_argument("--live", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--runtimes", nargs="+", default=["fake", "local", "ray"])
    parser.add_argument("--lookahead", type=int, default=19)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.live[0], arguments.lookahead, arguments.tokens, arguments.profile)
        return 0
    results: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for runtime in arguments.runtimes:
            for live in arguments.live:
                found = measure(runtime, live, arguments)
                results.setdefault((runtime, live), []).append(found)
                print(f"{runtime} {live}: {found['seconds']:.3f} ms a rollout", file=sys.stderr, flush=True)
    print("runtime  leases  ms a rollout  (of each run)           left out  rollouts  running  scoring  ready")
    for (runtime, live), runs in results.items():
        each = [run["seconds"] for run in runs]
        last = runs[-1]
        print(
            f"{runtime:7} {live:7} {statistics.median(each):13.3f}  {' '.join(f'{x:.3f}' for x in each):22}"
            f"{statistics.median(run['left_out'] for run in runs):10.3f} {last['rollouts']:9.0f}"
            f"{last['running']:9.0f}{last['scoring']:9.0f}{last['ready']:7.0f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
