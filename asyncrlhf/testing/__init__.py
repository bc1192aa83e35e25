"""Fakes, a virtual clock and conformance suites, for tests of algorithms, runtimes and backends. Torch-free.

Example: simulate(GRPO, Scenario(max_staleness=2, train_steps=3)) runs a whole training loop in virtual time.
"""

from asyncrlhf.testing.clock import Deadlock as Deadlock
from asyncrlhf.testing.clock import VirtualClockLoop as VirtualClockLoop
from asyncrlhf.testing.clock import run_virtual as run_virtual
from asyncrlhf.testing.run import Run as Run
from asyncrlhf.testing.run import Saved as Saved
from asyncrlhf.testing.runtime import FakeRuntime as FakeRuntime
from asyncrlhf.testing.runtime import Fault as Fault
from asyncrlhf.testing.runtime import Timing as Timing
from asyncrlhf.testing.sampler import FakeSampler as FakeSampler
from asyncrlhf.testing.sampler import FakeSamplerOptions as FakeSamplerOptions
from asyncrlhf.testing.sampler import fake_logprobs as fake_logprobs
from asyncrlhf.testing.scenario import Scenario as Scenario
from asyncrlhf.testing.sources import FakeReward as FakeReward
from asyncrlhf.testing.sources import FakeRows as FakeRows
from asyncrlhf.testing.trainer import FakeScorer as FakeScorer
from asyncrlhf.testing.trainer import FakeTrainer as FakeTrainer
from asyncrlhf.testing.trainer import FakeTrainerOptions as FakeTrainerOptions
from asyncrlhf.testing.trainer import FakeTransfer as FakeTransfer
from asyncrlhf.testing.world import build_run as build_run
from asyncrlhf.testing.world import simulate as simulate
