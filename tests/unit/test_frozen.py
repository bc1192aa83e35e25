"""Engines that are started again: how often, by whom, for whom; and the prompts that take a reward's process down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrlhf.abc import EngineHandle, EngineSpec, OnEvents
from asyncrlhf.errors import EngineLost, GroupError, SampleError
from asyncrlhf.groups import ReferenceGroup, RewardGroup
from asyncrlhf.groups.frozen import FrozenEngine
from asyncrlhf.groups.scorers import PATIENCE, ModelScorer, RuleScorer
from asyncrlhf.groups.supervisor import RestartBudget
from asyncrlhf.messages import PerSample, ScoreRequest, TrainBatch
from asyncrlhf.observe import EventLog, Restarted, Warned
from asyncrlhf.testing import FakeRuntime, FakeTrainerOptions, Fault, Timing, run_virtual
from tests.unit.test_model_scorer import rollout
from tests.unit.virtual import settle

SPEC = EngineSpec(
    group="reference", rank=0, engine="asyncrlhf.testing.trainer:FakeScorer", options=FakeTrainerOptions()
)


# ---- the budget ------------------------------------------------------------------------------------------------------
@given(st.integers(0, 5), st.lists(st.tuples(st.floats(0, 2000), st.booleans()), max_size=40))
def test_a_budget_allows_its_limit_within_any_hour_and_forgets_what_it_forgives(
    limit: int, failures: list[tuple[float, bool]]
) -> None:
    budget, now, counted = RestartBudget(limit=limit), 0.0, list[float]()
    for gap, forgiven in failures:
        now += gap
        delay = budget.failed(now)
        counted = [at for at in counted if now - at < 3600] + [now]
        assert (delay is None) is (len(counted) > limit)
        assert delay is None or delay == (0.0 if len(counted) == 1 else min(30.0, 2.0 ** (len(counted) - 2)))
        if forgiven:
            budget.forgive(now)
            counted.remove(now)
        budget.forgive(now + 0.5)
        assert budget.failures == counted


@pytest.mark.parametrize(
    ("at", "served_since", "delay"),
    [(3599.0, None, None), (3599.0, 40.0, None), (3600.0, None, 4.0), (3600.0, 3001.0, 4.0), (3600.0, 3000.0, 0.0)],
)
def test_a_budget_s_example(at: float, served_since: float | None, delay: float | None) -> None:
    budget = RestartBudget(limit=4)
    assert [budget.failed(at) for at in (0.0, 10.0, 20.0, 30.0)] == [0.0, 1.0, 2.0, 4.0]
    if served_since is not None:
        budget.serves(served_since)
    assert budget.failed(at) == delay


def test_a_budget_starts_an_engine_at_once_that_has_served_for_a_while() -> None:
    budget = RestartBudget(limit=6)
    assert [budget.failed(at) for at in (0.0, 10.0, 20.0, 30.0)] == [0.0, 1.0, 2.0, 4.0]
    assert budget.when(31.0) == "starts again in 3.0 s, try 4 of 6"
    assert budget.when(40.0) == "is being started again, try 4 of 6"
    budget.serves(40.0)
    assert budget.failed(100.0) == 8.0, "it has not served for ten minutes"
    budget.serves(110.0)
    assert budget.failed(710.0) == 0.0
    assert budget.failed(2000.0) is None, "the limit counts all of an hour"
    assert budget.failed(4400.0) == 1.0, "it has not served in between"


# ---- one engine ------------------------------------------------------------------------------------------------------
class Scene:
    """A FrozenEngine on a FakeRuntime, and what its log says."""

    def __init__(self, *faults: Fault, spawn: float = 2.0, call_timeout: float | None = None, **options: Any) -> None:
        self.runtime = FakeRuntime(Timing(verbs={"logprobs": 1.0, "scores": 1.0, "spawn": spawn}), faults)
        self.log = EventLog(None, asyncio.get_running_loop().time)
        self.events: list[Any] = []
        self.log.subscribe(self)
        self.engine = FrozenEngine(self.log, self.runtime, SPEC, call_timeout=call_timeout, **options)

    def see(self, event: Any, *, live: bool) -> None:
        self.events.append(event)

    def close(self) -> None: ...

    def count(self, kind: type[Any]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    async def read(self, uid: int = 1) -> Any:
        (rows,) = await self.engine.read("logprobs", [rollout(uid, (uid, 1))])
        return [row.tolist() for row in rows]


def lost(at: float = 0.0, kind: Any = "lost", verb: str = "logprobs") -> Fault:
    return Fault(group="reference", at=at, kind=kind, verb=verb)


@pytest.mark.parametrize("supervised", [False, True])
def test_a_lost_engine_is_started_again_and_asked_again(supervised: bool) -> None:
    async def main() -> None:
        scene = Scene(lost(), lost(3.0))
        await scene.engine.start()
        if not supervised:
            assert await scene.read() == [[-1 / 32, -1 / 32]]
        else:
            async with scene.engine.supervised():
                found = await asyncio.gather(*(scene.read(uid) for uid in range(1, 5)))
            assert found == [[[-uid / 32, -1 / 32]] for uid in range(1, 5)]
        assert (scene.engine.incarnation, scene.count(Restarted), len(scene.runtime.handles)) == (2, 2, 3)

    run_virtual(main())


def test_losses_within_an_hour_count_though_it_worked_between_them() -> None:
    async def main() -> None:
        scene = Scene(*(lost(at) for at in (0, 1000, 2000, 3000, 5000)), max_restarts=3)
        await scene.engine.start()
        async with scene.engine.supervised():
            for _ in range(6):
                await scene.read()
                await asyncio.sleep(490)
            await asyncio.sleep(100)
            for _ in range(2):
                with pytest.raises(GroupError, match=r"4 times within an hour; groups.reference.max_restarts = 3"):
                    await scene.read()
        assert len(scene.runtime.handles) == 4

    run_virtual(main())


def test_an_engine_that_cannot_come_up_is_given_up() -> None:
    async def main() -> None:
        scene = Scene(lost(), max_restarts=2)
        await scene.engine.start()
        spawns = 0

        async def spawn(spec: EngineSpec, on_events: OnEvents) -> EngineHandle:
            nonlocal spawns
            spawns += 1
            raise GroupError("no memory")

        scene.runtime.spawn = spawn
        async with scene.engine.supervised():
            found = await asyncio.gather(*(scene.read() for _ in range(3)), return_exceptions=True)
        assert spawns == 2
        assert all(isinstance(error, GroupError) and "no memory" in str(error) for error in found)

    run_virtual(main())


def test_cancelled_callers_neither_stop_the_restart_nor_pay_for_it() -> None:
    async def main() -> None:
        scene = Scene(lost(), spawn=100.0, max_restarts=1)
        await scene.engine.start()
        async with scene.engine.supervised():
            for _ in range(6):
                caller = asyncio.ensure_future(scene.read())
                await asyncio.sleep(10)
                caller.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await caller
            assert scene.engine.incarnation == 0
            await scene.read()
            assert asyncio.get_running_loop().time() == 100 + 100 + 1
        assert (scene.engine.incarnation, len(scene.runtime.handles)) == (1, 2)

    run_virtual(main())


def test_a_restart_ends_with_its_group() -> None:
    async def main() -> None:
        scene = Scene(lost(), spawn=100.0)
        group = ReferenceGroup("reference", scene.log, scene.engine)
        await group.start()
        serving = asyncio.ensure_future(group.serve())
        caller = asyncio.ensure_future(group.logprobs(rollout(1, (1,))))
        await asyncio.sleep(50)
        assert any(task.get_name() == "reference/0 restart" for task in asyncio.all_tasks())
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        caller.cancel()
        await asyncio.wait([caller])
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert len(scene.runtime.handles) == 1

    run_virtual(main())


@pytest.mark.parametrize("kind", ["hang", "lose"])
def test_an_engine_that_does_not_answer_is_given_up_and_started_again(kind: str) -> None:
    async def main() -> None:
        scene = Scene(lost(kind=kind), call_timeout=60.0)
        await scene.engine.start()
        async with scene.engine.supervised():
            assert await scene.read() == [[-1 / 32, -1 / 32]]
        assert asyncio.get_running_loop().time() == 2 + 60 + 2 + 1

    run_virtual(main())


def test_an_engine_that_always_hangs_is_given_up_for_good_and_the_limit_is_named() -> None:
    async def main() -> None:
        scene = Scene(*(lost(kind="hang") for _ in range(9)), call_timeout=60.0, max_restarts=2)
        await scene.engine.start()
        with pytest.raises(
            GroupError, match=r"not come back within 60.0 s, half of limits.stall_timeout(.|\n)*3 times"
        ):
            await scene.read()

    run_virtual(main())


def test_a_bug_in_an_engine_is_not_asked_again() -> None:
    async def main() -> None:
        scene = Scene(lost(kind="die"))
        await scene.engine.start()
        with pytest.raises(GroupError, match="by the fault plan"):
            await scene.read()
        assert len(scene.runtime.handles) == 1

    run_virtual(main())


# ---- reward functions that take their process down -------------------------------------------------------------------
class Process:
    """Scores side by side, a second each. A prompt in `poison` ends the process half a second after it came, and one in
    `holds` blocks it."""

    def __init__(self, runtime: Processes) -> None:
        self.runtime, self.blocked = runtime, asyncio.Event()
        self.over: asyncio.Future[EngineLost | GroupError] = asyncio.get_running_loop().create_future()

    def end(self, error: EngineLost | GroupError) -> None:
        if not self.over.done():
            self.over.set_result(error)

    async def call(self, verb: str, *arguments: Any) -> Any:
        loop, seconds = asyncio.get_running_loop(), 1.0
        if verb == "score":
            request: ScoreRequest = arguments[0]
            self.runtime.asked.append((loop.time(), request.uid))
            if request.uid in self.runtime.poison:
                loop.call_later(0.5, self.end, EngineLost("group 'reward', rank 0: killed\nlast words"))
            if request.uid in self.runtime.holds:
                self.blocked.set()
        if self.blocked.is_set():
            seconds = 1e9
        await asyncio.wait([self.over], timeout=seconds)
        if self.over.done():
            raise self.over.result()
        return (float(arguments[0].uid),) if verb == "score" else None

    async def close(self, *, at_once: bool = False) -> None:
        self.end(GroupError("closed"))


class Processes(FakeRuntime):
    def __init__(self, poison: Sequence[int] = (), holds: Sequence[int] = ()) -> None:
        super().__init__()
        self.poison, self.holds, self.asked = poison, holds, list[tuple[float, int]]()
        self.processes: list[Process] = []

    async def spawn(self, spec: EngineSpec, on_events: OnEvents) -> Any:
        await asyncio.sleep(0.1)
        self.processes.append(Process(self))
        return self.processes[-1]


def scored(runtime: Processes, uids: Sequence[float], *, max_restarts: int = 3) -> dict[int, Any]:
    """The reward or the error of each uid; number i comes after uids[i] // 1000 ms."""

    async def main() -> dict[int, Any]:
        log = EventLog(None, asyncio.get_running_loop().time)
        spec = EngineSpec(group="reward", rank=0, engine="", options=None)
        engine = FrozenEngine(log, runtime, spec, max_restarts=max_restarts)
        group = RewardGroup("reward", log, RuleScorer(engine, str, silence=11.0))
        await group.start()

        async def one(uid: int) -> Any:
            await asyncio.sleep(uid // 1000 / 1000)
            return await group.score(rollout(uid, (1,)))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(group.serve())
            found = await asyncio.gather(*(one(int(uid)) for uid in uids), return_exceptions=True)
            group.close()
        return dict(zip(map(int, uids), found, strict=True))

    return run_virtual(main())


def check_scores(found: dict[int, Any], bad: Sequence[int]) -> None:
    for uid, result in found.items():
        if uid in bad:
            assert isinstance(result, SampleError), (uid, result)
            assert str(result).startswith(f"uid {uid}: its reward function took its process down: ")
        else:
            assert result == (float(uid),), (uid, result)


@pytest.mark.parametrize("later", [400, 500, 501, 600, 650, 700, 1500, 1700])
def test_a_suspect_is_asked_alone(later: int) -> None:
    """A fresh poisonous prompt comes while the first one's innocent neighbours are being asked again."""
    fresh = later * 1000
    runtime = Processes(poison=(2, fresh + 4))
    found = scored(runtime, [1, 2, 3, fresh + 4, fresh + 5])
    check_scores(found, (2, fresh + 4))


@given(st.lists(st.tuples(st.integers(0, 4000), st.booleans()), min_size=1, max_size=12))
def test_only_prompts_at_fault_fail_whenever_they_come(plan: list[tuple[int, bool]]) -> None:
    uids = [1000 * milliseconds + number for number, (milliseconds, _) in enumerate(plan)]
    bad = [uid for uid, (_, poisonous) in zip(uids, plan, strict=True) if poisonous]
    runtime = Processes(poison=bad)
    check_scores(scored(runtime, uids, max_restarts=len(plan)), bad)


def test_prompts_that_are_at_fault_do_not_use_up_the_restarts() -> None:
    """Seven in a row, two losses each, with room for one loss that nobody is to blame for."""
    bad = [3_000_000 * i + i for i in range(1, 8)]
    runtime = Processes(poison=bad)
    check_scores(scored(runtime, [0, *bad], max_restarts=1), bad)
    assert len(runtime.processes) == 1 + 13, "the last one's loss is not restarted for: nobody asks"


def test_losses_that_no_prompt_is_to_blame_for_end_the_group() -> None:
    async def main() -> None:
        log = EventLog(None, asyncio.get_running_loop().time)
        runtime = Processes()
        engine = FrozenEngine(log, runtime, EngineSpec(group="reward", rank=0, engine="", options=None), max_restarts=2)
        scorer = RuleScorer(engine, str, silence=11.0)
        await scorer.start()
        async with scorer.supervised():
            for uid in range(2):
                call = asyncio.ensure_future(scorer.score(rollout(uid, (1,))))
                await asyncio.sleep(0.2)
                runtime.processes[-1].end(EngineLost("killed"))
                assert await call == (float(uid),)
            call = asyncio.ensure_future(scorer.score(rollout(3, (1,))))
            await asyncio.sleep(0.2)
            runtime.processes[-1].end(EngineLost("killed"))
            with pytest.raises(GroupError, match=r"killed\n\(it failed 3 times within an hour"):
                await call

    run_virtual(main())


def test_who_starts_a_lost_engine_again_and_when() -> None:
    """The second time nobody has asked it yet, though its budget knows of a restart."""

    async def main() -> None:
        log = EventLog(None, asyncio.get_running_loop().time)
        runtime, now = Processes(), asyncio.get_running_loop().time
        engine = FrozenEngine(log, runtime, EngineSpec(group="reward", rank=0, engine="", options=None), max_restarts=2)
        await engine.start()
        async with engine.supervised():
            for said in ("is being started again, try 1 of 2", "starts again in 1.0 s, try 2 of 2"):
                assert engine.out_of_service(now()) == ""
                await engine.give_up_on(await engine.serving(), "killed")
                assert engine.out_of_service(now()) == "will be started again when it is asked"
                asked = asyncio.ensure_future(engine.serving())
                await settle()
                assert engine.out_of_service(now()) == said
                await asked
            await engine.give_up_on(await engine.serving(), "killed")
            with pytest.raises(GroupError, match="max_restarts = 2"):
                await engine.serving()
            assert engine.out_of_service(now()) == "was lost too often"

    run_virtual(main())


def test_a_function_that_holds_its_process_fails_its_prompt_alone() -> None:
    runtime = Processes(holds=(2,))
    found = scored(runtime, [1, 2, 3], max_restarts=1)
    check_scores(found, (2,))
    assert f"no sign of life for {PATIENCE:g} s" in str(found[2])


def test_a_cancelled_suspect_lets_the_others_go_on() -> None:
    async def main() -> None:
        log = EventLog(None, asyncio.get_running_loop().time)
        runtime = Processes(poison=(1,))
        engine = FrozenEngine(log, runtime, EngineSpec(group="reward", rank=0, engine="", options=None))
        scorer = RuleScorer(engine, str, silence=11.0)
        await scorer.start()
        async with scorer.supervised():
            calls = [asyncio.ensure_future(scorer.score(rollout(uid, (1,)))) for uid in range(4)]
            await asyncio.sleep(0.7)
            for call in calls[:3]:
                call.cancel()
            assert await calls[3] == (3.0,)
            assert await scorer.score(rollout(4, (1,))) == (4.0,)
            await asyncio.wait(calls)

    run_virtual(main())


# ---- what a reward model is measured against -------------------------------------------------------------------------
class Given:
    """A reward model that gives these scores."""

    def __init__(self, scores: Sequence[float]) -> None:
        self.scores = scores

    async def call(self, verb: str, *arguments: Any) -> Any:
        return self.scores

    async def close(self, *, at_once: bool = False) -> None: ...


def calibrated(scores: Sequence[float], warning: str = "") -> Coroutine[Any, Any, tuple[PerSample, list[Any]]]:
    async def main() -> tuple[PerSample, list[Any]]:
        scene = Scene()

        async def spawn(spec: EngineSpec, on_events: OnEvents) -> EngineHandle:
            return Given(scores)

        scene.runtime.spawn = spawn
        answers = [rollout(uid, (uid,)) for uid in range(len(scores))]
        scorer = ModelScorer(scene.engine, answers, warning=warning)
        await scorer.start()
        return await scorer.score(rollout(0, *((1,) for _ in scores))), scene.events

    return main()


def test_calibrated_scores_are_deviations_from_the_mean() -> None:
    found, events = run_virtual(calibrated([1.0, 3.0, 5.0], "2 rows were left out"))
    assert found == pytest.approx((-(1.5**0.5), 0.0, 1.5**0.5))
    assert [event.message for event in events if isinstance(event, Warned)] == ["2 rows were left out"]


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([1.0, float("nan"), 2.0], "of the 3 answers to calibrate with 1 have a score that is not finite"),
        ([float("inf"), float("-inf")], "of the 2 answers to calibrate with 2 have a score that is not finite"),
        ([0.5, 0.5], "of the 2 answers to calibrate with all have the score 0.5"),
    ],
)
def test_scores_that_have_no_deviation_are_refused(scores: list[float], words: str) -> None:
    with pytest.raises(GroupError, match=words):
        run_virtual(calibrated(scores))


def test_an_engine_lost_while_it_is_calibrated_is_started_again() -> None:
    async def main() -> None:
        scene = Scene(lost(verb="scores"))
        scorer = ModelScorer(scene.engine, [rollout(1, (1,)), rollout(2, (2,))])
        await scorer.start()
        assert scene.engine.incarnation == 1
        assert await scorer.score(rollout(1, (1,))) == (-1.0,)

    run_virtual(main())


# ---- several ranks ---------------------------------------------------------------------------------------------------
class Rank:
    """A rank of a frozen model, which reads its own rows; rank 1 is lost when first asked."""

    address = "10.0.0.7"

    def __init__(self, spec: EngineSpec, lost: bool) -> None:
        self.spec, self.closed = spec, False
        self.rows: list[int] = []
        self._lost = lost

    async def call(self, verb: str, *arguments: Any) -> Any:
        if verb in ("rendezvous", "join"):
            return 29500
        batch: TrainBatch = arguments[0]
        if self._lost:
            raise EngineLost("rank 1 has ended")
        self.rows.append(len(batch))
        return [np.full(length, self.spec.rank, np.float32) for length in batch.response_lengths]

    async def close(self, *, at_once: bool = False) -> None:
        self.closed = True


class Ranks(FakeRuntime):
    """Where they live."""

    ranks: list[Rank]

    async def spawn(self, spec: EngineSpec, on_events: OnEvents) -> EngineHandle:
        self.ranks.append(Rank(spec, lost=spec.rank == 1 and len(self.ranks) < 2))
        return self.ranks[-1]


def test_a_frozen_model_may_have_ranks_which_are_lost_and_started_again_together() -> None:
    async def main() -> None:
        runtime = Ranks(Timing(), ())
        runtime.ranks = []
        log = EventLog(None, asyncio.get_running_loop().time)
        specs = [EngineSpec(group="reference", rank=rank, engine="", options=FakeTrainerOptions()) for rank in (0, 1)]
        engine = FrozenEngine(log, runtime, *specs)
        await engine.start()
        rows = await engine.read("logprobs", [rollout(1, (1, 2)), rollout(2, (3, 4, 5))])
        first, second = runtime.ranks[:2], runtime.ranks[2:]
        assert all(rank.closed for rank in first)
        assert [rank.spec.rank for rank in second] == [0, 1]
        assert sum(sum(rank.rows) for rank in second) == sum(map(len, rows)) > 1
        assert all(rank.rows for rank in second)
        assert engine.incarnation == 1

    run_virtual(main())


def test_what_another_group_fails_with_is_not_taken_for_its_own_loss() -> None:
    class Failing:
        shared = True

        @asynccontextmanager
        async def taken(self) -> AsyncGenerator[None]:
            raise EngineLost("group 'policy', rank 0: killed")
            yield

        kept = taken

        def note(self) -> None: ...

    async def main() -> None:
        scene = Scene()
        await scene.engine.start()
        scene.engine.turn = cast(Any, Failing())
        with pytest.raises(EngineLost, match="policy"):
            await scene.read()
        assert not (await scene.engine.serving()).lost

    run_virtual(main())
