"""What is checked while a run goes: after every event, and whenever the clock is about to move."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from algorithms.grpo import GRPO
from asyncrlhf.algorithm import Algorithm
from asyncrlhf.flow.holding import oldest
from asyncrlhf.messages import Experience
from asyncrlhf.observe import Event, Granted, Popped, Settled, StepEnded
from asyncrlhf.testing import FakeSampler, Run, Saved, Scenario, VirtualClockLoop, build_run, fake_logprobs, simulate


class Crash(BaseException):
    """Everything but the checkpoint is lost."""


class WatchedLoop(VirtualClockLoop):
    """Checks before each jump of the clock; crashes at a given iteration; gives up on a run that does not end."""

    def __init__(self, crash_at: int | None, most: int) -> None:
        super().__init__()
        self.run_watched: Run[Any] | None = None
        self.ticks, self._crash_at, self._most = 0, crash_at, most

    def jump(self) -> None:
        if self.run_watched is not None and not self.run_watched.crashed:
            check_work_conserving(self.run_watched)
        super().jump()

    def _run_once(self) -> None:
        self.ticks += 1
        run = self.run_watched
        if run is not None and not run.crashed:
            assert self.ticks < self._most, f"endless: {self.ticks} iterations, {oldest(run.gate.unfinished())}"
            if self.ticks == self._crash_at:
                run.crashed = True
                raise Crash
        super()._run_once()


class Inspector:
    """Books kept from the event log alone, compared with the ledger's (invariants 1, 3, 6, 10)."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.training: dict[int, int] = {}
        self.attempts: dict[int, int] = {}
        self.waiting: set[int] = set()
        self.ended: Counter[str] = Counter()
        self.published = 0

    def resume(self, run: Run[Any]) -> None:
        ledger = run.ledger
        counts = ledger.account().counts
        self.live = {uid: lease.attempt for uid, lease in ledger.live.items()}
        self.waiting = set(ledger.again)
        self.attempts = self.live | {uid: attempt - 1 for uid, (attempt, _) in ledger.again.items()}
        states = ("consumed", "filtered", "failed")
        self.ended = +Counter({s: n for s, n in counts.items() if s in states or s.startswith("dropped(")})

    def __call__(self, run: Run[Any], event: Event) -> None:
        if run.crashed:
            return
        ledger = run.ledger
        ledger.check()
        assert run.gate.payloads.keys() == {uid for uid, lease in ledger.live.items() if lease.state == "ready"} or (
            isinstance(event, Settled)
        )
        published = -1 if ledger.published is None else ledger.published
        assert self.published <= published <= ledger.version or published == -1
        self.published = max(self.published, published)
        match event:
            case Granted():
                self.granted(run, event)
            case Settled():
                self.settled(run, event)
            case Popped():
                assert not self.training
                self.training = {uid: self.live.pop(uid) for uid in event.uids}
            case StepEnded():
                self.step_ended(event)
            case _:
                pass

    def granted(self, run: Run[Any], event: Granted) -> None:
        scenario, ledger = run.scenario, run.ledger
        popped = () if ledger.training is None else ledger.training.leases
        before = len(self.live.keys() - {lease.uid for lease in popped})
        assert event.uid not in self.live.keys() | self.training.keys()
        assert event.attempt == self.attempts.get(event.uid, 0) + 1
        self.waiting.discard(event.uid)
        self.live[event.uid] = self.attempts[event.uid] = event.attempt
        assert ledger.published == event.version
        steps = event.version + scenario.ahead - ledger.step + 1
        assert before + 1 <= scenario.prompts_per_step * steps
        if scenario.train_steps is not None:
            assert before + 1 <= scenario.prompts_per_step * (scenario.train_steps - ledger.step)
        ready = sum(lease.byte_count for lease in ledger.live.values() if lease.state == "ready")
        limit = scenario.byte_limit
        assert limit is None or before < scenario.prompts_per_step or ready < limit

    def settled(self, run: Run[Any], event: Settled) -> None:
        place = self.training if event.uid in self.training else self.live
        assert place.pop(event.uid, None) == event.attempt, f"{event} settles a lease that is not open"
        assert (place is self.training) is (event.state in ("consumed", "dropped(void)"))
        if event.uid in run.ledger.again:
            self.waiting.add(event.uid)
        else:
            self.ended[event.state] += 1
            del self.attempts[event.uid]

    def step_ended(self, event: StepEnded) -> None:
        assert not self.training
        leases, tokens = event.leases, event.tokens
        assert leases["admitted"] == len(self.live) + len(self.waiting) + self.ended.total()
        assert leases["running"] + leases["scoring"] + leases["ready"] == len(self.live)
        assert (leases["waiting"], leases["training"]) == (len(self.waiting), 0)
        states = ("consumed", "filtered", "failed")
        assert +Counter({s: n for s, n in leases.items() if s in states or s.startswith("dropped(")}) == self.ended
        spent = tokens["trained"] + tokens["masked"] + tokens["dropped"] + tokens["open"]
        assert tokens["generated"] == spent
        assert min(tokens.values()) >= 0
        assert event.policy_version == event.train_step + (not event.void)
        assert event.published_version <= event.policy_version


def check_work_conserving(run: Run[Any]) -> None:
    """Invariant 11: whenever everybody waits, no admissible prompt does."""
    ledger = run.ledger
    left = (
        ledger.again
        or (ledger.data_count is None and run.rows.has(ledger.cursor))
        or (ledger.data_count is not None and ledger.cursor < ledger.data_count)
    )
    assert run.gate.ended or not ledger.admits() or not left, "room for a prompt, a prompt, and nobody takes it"


def go(
    algorithm: type[Algorithm],
    scenario: Scenario,
    *,
    resume: Saved | None = None,
    crash_at: int | None = None,
    most: int = 400_000,
    inspect: bool = True,
    **settings: Any,
) -> Run[Any]:
    """Run under inspection to the end, or to the crash."""
    inspector = Inspector()
    found: list[Run[Any]] = []

    async def main() -> None:
        run = await build_run(algorithm, scenario, resume=resume, watch=watch, **settings)
        found.append(run)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WatchedLoop)
        loop.run_watched = run
        if resume is not None:
            inspector.resume(run)
        await run.main()
        loop.run_watched = None

    def watch(run: Run[Any], event: Event) -> None:
        if inspect and found:
            inspector(run, event)

    try:
        with asyncio.Runner(loop_factory=lambda: WatchedLoop(crash_at, most)) as runner:
            runner.run(main())
    except Crash:
        pass
    run = found[0]
    if isinstance(run.error, AssertionError | KeyError | TypeError | AttributeError):
        raise run.error
    return run


def check_batches(run: Run[Any], *, least: int | None = None, most: int | None = None) -> None:
    """Invariants 2, 5, 6, 8 on what was handed to the trainer. `least`, `most`: answers of a rollout."""
    scenario = run.scenario
    most = scenario.answers_per_prompt if most is None else most
    least = least or scenario.min_answers or scenario.answers_per_prompt
    for popped in run.popped:
        for experience in popped.experiences:
            samples = experience.rollout.samples
            assert least <= len(samples) <= most
            check_versions(run, experience, popped.batch.step)
        if not popped.batch.leases:
            continue
        assert len(popped.experiences) <= scenario.prompts_per_step
    for group in ("policy", "critic"):
        if group in run.groups:
            check_masks(run, group)


def check_versions(run: Run[Any], experience: Experience, step: int) -> None:
    scenario, exported = run.scenario, run.trainer().exported
    birth = min(s.version for sample in experience.rollout.samples for s in sample.segments)
    assert birth >= experience.prompt.version
    assert scenario.at_deadline == "mask" or step - birth <= scenario.max_staleness
    for sample in experience.rollout.samples:
        versions = sample.versions()
        assert list(versions) == sorted(versions)
        assert versions[-1] <= step
        if scenario.kv == "keep" or not all(version in exported for version in versions):
            continue
        for place, version in enumerate(versions):
            whole = fake_logprobs(exported[version], experience.prompt.token_ids, sample.token_ids[: place + 1])
            assert sample.logprobs[place] == whole[-1], (
                "a stored log-prob is not the one of the version that sampled it"
            )


def check_masks(run: Run[Any], group: str) -> None:
    """At the engine: every token that may enter a gradient is within the bound, every other one within it is not."""
    bound = run.scenario.max_staleness
    for batch in run.trainer(group).batches:
        masks, versions = batch.columns["mask"].fetch(), batch.columns["versions"].fetch()
        for mask, row in zip(masks, versions, strict=True):
            lags = batch.train_step - row
            assert (lags >= 0).all()
            assert not np.any((mask > 0) & (lags > bound))
            assert not mask.any() or np.array_equal(mask > 0, lags <= bound)


def settled(run: Run[Any], state: str) -> list[Settled]:
    """The leases that ended in this state."""
    return [event for event in run.events_of(Settled) if event.state == state]


def simulate_with(engine: type[FakeSampler], scenario: Scenario) -> Run[Any]:
    """GRPO with another class of sampler in the place of the fake one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncrlhf.testing.sampler.FakeSampler", engine)
        return simulate(GRPO, scenario)
