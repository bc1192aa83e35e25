"""RolloutGroup by itself: who gets which answer, whose events count, and what becomes of answers nobody wants."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any

import pytest

from asyncrlhf.abc import EngineHandle, EngineSpec, OnEvents
from asyncrlhf.errors import ConfigError, GroupError, SampleError
from asyncrlhf.flow.silence import Silence
from asyncrlhf.groups.answers import Sampling, answer_seed
from asyncrlhf.groups.rollout import LAST_WORDS, Replica, RolloutGroup
from asyncrlhf.messages import (
    EngineEvent,
    Failed,
    Finished,
    GenerateRequest,
    Probe,
    Progress,
    Prompt,
    Rejected,
    Sample,
    Segment,
    WeightHandle,
)
from asyncrlhf.observe import EventLog
from asyncrlhf.testing import FakeSamplerOptions
from tests.unit.virtual import settle, virtual


class Silent:
    """An engine that only notes what it is told; replies to `add` and `abort` come when a test says so."""

    def __init__(self, spec: EngineSpec, on_events: OnEvents) -> None:
        self.spec, self.on_events = spec, on_events
        self.added: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.replies: dict[str, Any] = {}
        self.closed = False

    async def call(self, verb: str, *arguments: Any) -> Any:
        if verb == "add":
            self.added += arguments[0]
        elif verb == "abort":
            self.aborted += arguments[0]
        reply = self.replies.get(verb, [])
        if isinstance(reply, asyncio.Future):
            return await reply
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def close(self) -> None:
        self.closed = True

    def say(self, *events: EngineEvent) -> None:
        self.on_events(events)


class Books:
    """What the gate would be told."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, int, int, int, int]] = []
        self.scored: list[int] = []
        self.dropped: list[tuple[int, int, str]] = []

    def report(self, uid: int, attempt: int, answer: int, version: int, token_count: int) -> None:
        self.reports.append((uid, attempt, answer, version, token_count))

    def score(self, prompt: Prompt) -> None:
        self.scored.append(prompt.uid)

    def sample_more(self, prompt: Prompt) -> int:
        return 0

    def drop(self, uid: int, attempt: int, reason: str, *, counts: bool = False) -> None:
        self.dropped.append((uid, attempt, reason))

    def alive(self) -> None: ...

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def silence(self) -> Silence:
        return Silence(asyncio.get_running_loop(), 0.0, lambda: None)


class Scene:
    def __init__(self, replicas: int, answers: int, least: int | None) -> None:
        self.engines: list[Silent] = []
        self.refusal: ConfigError | None = None
        """Of the next engine to be spawned."""
        self.books = Books()
        self.failures: list[tuple[str, str]] = []
        specs = [
            EngineSpec(group="rollout", rank=rank, engine="x:Y", options=FakeSamplerOptions())
            for rank in range(replicas)
        ]
        sampling = Sampling(
            answers_per_prompt=answers,
            min_answers=answers if least is None else least,
            max_tokens=9,
            temperature=1.0,
            stop_token_ids=(0,),
            seed=0,
        )
        loop = asyncio.get_running_loop()
        self.group = RolloutGroup(
            "rollout", EventLog(None, loop.time), self, specs, sampling, self.books, reply_timeout=50.0
        )
        self.group.on_failure = lambda replica, reason: self.failures.append((replica.key, reason))

    async def spawn(self, spec: EngineSpec, on_events: OnEvents) -> EngineHandle:
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal
        self.engines.append(Silent(spec, on_events))
        return self.engines[-1]

    async def close(self) -> None:
        pass

    def ask(self, uid: int = 0, attempt: int = 1) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.group.sample(prompt(uid, attempt)))


@asynccontextmanager
async def group(replicas: int = 1, answers: int = 1, least: int | None = None, *, serving: bool = True) -> Any:
    """A group at work, whose engines are Silent."""
    scene = Scene(replicas, answers, least)
    await scene.group.start()
    for replica in scene.group.replicas:
        replica.serving = serving
    actor = asyncio.ensure_future(scene.group.serve())
    await settle()
    yield scene
    scene.group.close()
    await actor


def prompt(uid: int, attempt: int = 1, *, tokens: int = 1) -> Prompt:
    return Prompt(uid=uid, epoch=0, attempt=attempt, version=0, token_ids=(9,) * tokens, text="")


def finished(request: GenerateRequest, count: int = 3, version: int = 0) -> Finished:
    segments = (Segment(version=version, token_count=count),)
    sample = Sample(token_ids=(9,) * count, logprobs=(-1.0,) * count, segments=segments, finish_reason="stop")
    return Finished(request_id=request.request_id, sample=sample)


def progress(request: GenerateRequest, count: int, version: int = 0) -> Progress:
    return Progress(request_id=request.request_id, version=version, token_count=count)


@virtual
async def test_all_answers_to_a_prompt_come_back_in_their_order() -> None:
    async with group(replicas=2, answers=3) as scene:
        rollout = scene.ask(5)
        await settle()
        requests = [request for engine in scene.engines for request in engine.added]
        assert [len(engine.added) for engine in scene.engines] == [2, 1]
        for engine in reversed(scene.engines):
            for number, request in enumerate(reversed(engine.added)):
                engine.say(progress(request, 1), finished(request, 3 + number))
        found = await rollout
        assert len(found.samples) == 3
        assert {request.seed for request in requests} == {answer_seed(0, 5, 1, number) for number in range(3)}
        assert sorted(scene.books.reports)[:2] == [(5, 1, 0, 0, 1), (5, 1, 0, 0, 3)]
        assert scene.books.scored == [5]


def test_every_answer_of_a_run_has_a_seed_of_its_own() -> None:
    """Answers to one prompt that share a seed are the same answer."""
    seeds = [
        answer_seed(run, uid, attempt, number)
        for run in (0, 1)
        for uid in range(-20, 300)
        for attempt in (1, 2, 3)
        for number in range(16)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [
        answer_seed(run, uid, attempt, number)
        for run in (0, 1)
        for uid in range(-20, 300)
        for attempt in (1, 2, 3)
        for number in range(16)
    ]


@virtual
async def test_every_token_is_reported_once() -> None:
    """Before it is complete, by progress; the rest with the complete answer."""
    async with group() as scene:
        rollout = scene.ask()
        await settle()
        (request,) = scene.engines[0].added
        scene.engines[0].say(progress(request, 1), progress(request, 4))
        scene.engines[0].say(finished(request, 8))
        await rollout
        assert [report[-1] for report in scene.books.reports] == [1, 4, 3]


@virtual
async def test_fewer_answers_than_needed_are_an_error_that_names_the_prompt_and_the_reason() -> None:
    async with group(answers=3, least=2) as scene:
        rollout = scene.ask(7)
        await settle()
        first, second, third = scene.engines[0].added
        scene.engines[0].say(
            Rejected(request_id=first.request_id, reason="too long"),
            finished(second),
            Rejected(request_id=third.request_id, reason="too odd"),
        )
        with pytest.raises(SampleError, match=r"uid 7: 1 of 3 answers.*limits\.min_answers = 2.*too long"):
            await rollout


@virtual
async def test_what_a_fenced_incarnation_still_says_counts_for_nothing() -> None:
    async with group() as scene:
        replica: Replica = scene.group.replicas[0]
        rollout = scene.ask(3)
        await settle()
        old = scene.engines[0]
        (request,) = old.added
        scene.group.fence(replica)
        assert scene.books.dropped == [(3, 1, "fenced")]
        await scene.group.restart(replica, 0.0)
        replica.serving = True
        assert old.closed
        old.say(progress(request, 5), finished(request), Failed(reason="too late to matter"))
        await settle()
        assert (scene.books.reports, scene.failures) == ([], [])
        assert not rollout.done()
        rollout.cancel()


@virtual
async def test_an_evaluation_begins_anew_elsewhere_and_the_old_answer_is_refused() -> None:
    async with group(replicas=2) as scene:
        evaluation = asyncio.ensure_future(scene.group.evaluate(prompt(-1), 0.0))
        await settle()
        first, second = scene.engines
        (request,) = first.added
        scene.group.fence(scene.group.replicas[0])
        await settle()
        assert second.added == [request]
        first.say(finished(request, 2))
        assert not evaluation.done()
        second.say(progress(request, 1), finished(request, 6))
        assert len((await evaluation).samples[0].token_ids) == 6
        assert scene.group.evaluation_tokens == 6
        assert scene.books.reports == []


@virtual
async def test_the_answers_to_a_long_prompt_go_to_one_engine_and_the_prompts_to_all() -> None:
    """As long as the answers may become, 9 tokens: its prefix is computed once."""
    async with group(replicas=2, answers=4) as scene:
        rollouts = [asyncio.ensure_future(scene.group.sample(prompt(uid, tokens=9))) for uid in range(6)]
        await settle()
        homes = [{request.request_id.split(".")[1] for request in engine.added} for engine in scene.engines]
        assert [len(engine.added) for engine in scene.engines] == [12, 12]
        assert not homes[0] & homes[1]
        for rollout in rollouts:
            rollout.cancel()


@virtual
async def test_the_answers_to_a_long_prompt_go_elsewhere_while_their_engine_is_drained() -> None:
    async with group(replicas=2, answers=2) as scene:
        first = asyncio.ensure_future(scene.group.sample(prompt(0, tokens=9)))
        await settle()
        drained = asyncio.ensure_future(scene.group.drained(scene.group.replicas[0], alone=True))
        await settle()
        second = asyncio.ensure_future(scene.group.sample(prompt(1, tokens=9)))
        await settle()
        assert [len(engine.added) for engine in scene.engines] == [2, 2]
        for request in scene.engines[0].added:
            scene.engines[0].say(finished(request))
        await first
        await drained
        scene.group.release(scene.group.replicas[0])
        third = asyncio.ensure_future(scene.group.sample(prompt(2, tokens=9)))
        await settle()
        assert [len(engine.added) for engine in scene.engines] == [4, 2]
        for rollout in (second, third):
            rollout.cancel()


@virtual
async def test_requests_wait_for_an_engine_that_serves() -> None:
    async with group(serving=False) as scene:
        rollout = scene.ask()
        await settle()
        assert scene.engines[0].added == []
        scene.group.replicas[0].serving = True
        scene.group.flush()
        await settle()
        scene.engines[0].say(finished(scene.engines[0].added[0]))
        await rollout


@virtual
async def test_while_engines_drain_new_requests_wait_even_if_another_engine_comes_to_serve() -> None:
    async with group(replicas=2) as scene:
        running = scene.ask(0)
        await settle()
        drained = asyncio.ensure_future(scene.group.drained(scene.group.replicas[0]))
        await settle()
        waiting = scene.ask(1)
        await settle()
        scene.group.flush()
        await settle()
        assert [len(engine.added) for engine in scene.engines] == [1, 0]
        assert not drained.done()
        scene.engines[0].say(finished(scene.engines[0].added[0]))
        await drained
        await running
        scene.group.release()
        await settle()
        (engine,) = [engine for engine in scene.engines if len(engine.added) > (engine is scene.engines[0])]
        engine.say(finished(engine.added[-1]))
        await waiting


@virtual
async def test_cancelling_the_caller_aborts_its_answers_and_counts_their_tokens() -> None:
    async with group(answers=2) as scene:
        rollout = scene.ask(4)
        await settle()
        engine = scene.engines[0]
        engine.say(progress(engine.added[0], 2))
        so_far = finished(engine.added[0], 5).sample
        partial = GenerateRequest(
            **{name: getattr(engine.added[0], name) for name in engine.added[0].__struct_fields__}
            | {"tokens": so_far.token_ids, "logprobs": so_far.logprobs, "segments": so_far.segments}
        )
        engine.replies["abort"] = [partial, engine.added[1]]
        rollout.cancel()
        await settle()
        assert rollout.cancelled()
        assert engine.aborted == [request.request_id for request in engine.added]
        assert scene.books.reports == [(4, 1, 0, 0, 2), (4, 1, 0, 0, 3)]
        engine.say(finished(engine.added[0], 9))
        assert len(scene.books.reports) == 2, "a late answer is nobody's"


@virtual
async def test_a_caller_that_is_gone_does_not_wait_for_a_hung_engine_and_the_engine_is_fenced() -> None:
    async with group() as scene:
        scene.engines[0].replies["abort"] = asyncio.get_running_loop().create_future()
        rollout = scene.ask()
        await settle()
        rollout.cancel()
        await settle()
        assert rollout.done()
        await asyncio.sleep(49)
        assert scene.failures == []
        await asyncio.sleep(2)
        assert scene.failures == [("rollout/0", "no answer to abort within 50 s")]


@virtual
async def test_a_hung_engine_does_not_keep_requests_from_the_others() -> None:
    async with group(replicas=2) as scene:
        scene.engines[0].replies["add"] = asyncio.get_running_loop().create_future()
        rollouts = [scene.ask(uid) for uid in range(4)]
        await settle()
        assert [len(engine.added) for engine in scene.engines] == [2, 2]
        for task in rollouts:
            task.cancel()


@virtual
async def test_an_engine_that_fails_a_call_is_reported_once() -> None:
    async with group() as scene:
        scene.engines[0].replies["add"] = GroupError("it broke")
        rollout = scene.ask()
        await settle()
        assert scene.failures == [("rollout/0", "it broke")]
        rollout.cancel()


@virtual
async def test_what_is_no_configuration_at_a_start_is_a_failure_like_others_at_a_restart() -> None:
    async with group() as scene:
        (replica,) = scene.group.replicas
        scene.group.fence(replica)
        scene.refusal = ConfigError("free memory is less than desired")
        with pytest.raises(GroupError, match="group 'rollout': free memory is less than desired"):
            await scene.group.restart(replica, 0.0)
        await scene.group.restart(replica, 0.0)
        assert len(scene.engines) == 2
        scene.refusal = ConfigError("no such model")
        with pytest.raises(ConfigError, match="group 'rollout': no such model"):
            await scene.group.spawn(replica)


@virtual
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("said", [math.nan, -math.inf])
async def test_a_probe_that_is_not_finite_anywhere_is_no_small_gap(place: int, said: float) -> None:
    expected = (-1.0, -2.0, -3.0)
    weights = WeightHandle(
        version=1,
        checksum=0,
        changed=True,
        byte_count=0,
        transport="",
        payload={},
        probe=Probe(token_ids=(1, 2, 3, 4), logprobs=expected),
    )
    async with group() as scene:
        scene.engines[0].replies["probe"] = [*expected[:place], said, *expected[place + 1 :]]
        assert math.isnan(await scene.group.probe(scene.group.replicas[0], weights))
        scene.engines[0].replies["probe"] = [-1.5, -2.0, -3.25]
        assert await scene.group.probe(scene.group.replicas[0], weights) == 0.5


@virtual
async def test_the_end_waits_for_the_last_aborts_but_not_for_long() -> None:
    began = asyncio.get_running_loop().time()
    async with group() as scene:
        scene.engines[0].replies["abort"] = asyncio.get_running_loop().create_future()
        rollout = scene.ask()
        await settle()
        rollout.cancel()
        await settle()
    assert asyncio.get_running_loop().time() - began == LAST_WORDS


def by_rank(engines: Sequence[Silent]) -> list[int]:
    return [engine.spec.rank for engine in engines]


@virtual
async def test_engines_are_named_for_whoever_asks_where_a_lease_is() -> None:
    async with group(replicas=3, answers=2) as scene:
        rollout = scene.ask(8)
        await settle()
        assert by_rank(scene.engines) == [0, 1, 2]
        assert scene.group.engines_of(8, 1) == ["rollout/0", "rollout/1"]
        assert scene.group.engines_of(8, 2) == []
        rollout.cancel()
