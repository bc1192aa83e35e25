"""What every sampler owes: each token reported once under the version that sampled it, and swaps that lose nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from asyncrlhf.abc import GenerateEngine
from asyncrlhf.errors import PublishRefused
from asyncrlhf.messages import (
    EngineEvent,
    Finished,
    GenerateRequest,
    Progress,
    Rejected,
    Sample,
    WeightHandle,
)

__all__ = ("GENERATE_ENGINE", "GenerateSubject")


@dataclass(kw_only=True)
class GenerateSubject:
    """A sampler under test with `slots` = 4, and the trainer that it follows."""

    engine: GenerateEngine
    another: Callable[[], GenerateEngine]
    """A second engine of the same kind, without weights so far."""
    train: Callable[[], None]
    """Change the trainer's weights."""
    export: Callable[[int], WeightHandle]
    """Announce the trainer's weights under this version."""
    logprobs: Callable[[int, GenerateRequest, Sequence[int]], Sequence[float]]
    """Log-probs of these tokens under the weights exported as this version."""
    tolerance: float
    """Largest difference between two computations of one log-prob."""
    prompt: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    unknown_token: int
    """A token that is not in the vocabulary."""
    longest: int
    """Tokens of prompt and answer that still fit."""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def request(self, max_tokens: int = 12, **changes: Any) -> GenerateRequest:
        number = next(self.numbers)
        made = GenerateRequest(
            request_id=f"r{number}",
            prompt_token_ids=self.prompt,
            max_tokens=max_tokens,
            temperature=1.0,
            stop_token_ids=self.stop_token_ids,
            seed=1000 + number,
        )
        return replace(made, **changes)

    def publish(self, version: int, *engines: GenerateEngine, kv: str = "rebuild") -> list[EngineEvent]:
        """Bring the trainer's weights to the engine, or to several."""
        weights, events = self.export(version), list[EngineEvent]()
        for engine in engines or (self.engine,):
            engine.prepare(weights)
            events += engine.commit(version, kv)
        return events

    def run(self, *requests: GenerateRequest, engine: GenerateEngine | None = None) -> list[EngineEvent]:
        """Everything that is said until the last answer."""
        engine = engine or self.engine
        return [*engine.add(requests), *self.rest(engine)]

    @staticmethod
    def rest(engine: GenerateEngine) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        while engine.has_work:
            events += engine.step()
        return events


def _samples(events: Sequence[EngineEvent]) -> dict[str, Sample]:
    return {event.request_id: event.sample for event in events if isinstance(event, Finished)}


def _reported(events: Sequence[EngineEvent]) -> dict[str, Counter[int]]:
    """Request -> version -> tokens, from Progress."""
    found: dict[str, Counter[int]] = {}
    for event in events:
        if isinstance(event, Progress):
            found.setdefault(event.request_id, Counter())[event.version] += event.token_count
    return found


def _require_counted(events: Sequence[EngineEvent], *, since: int = 0) -> None:
    """Every token was reported exactly once, in order of versions, before the answer was complete."""
    done: set[str] = set()
    newest: dict[str, int] = {}
    for event in events:
        if isinstance(event, Progress):
            assert event.request_id not in done, "Progress after Finished"
            assert event.token_count > 0
            assert event.version >= newest.get(event.request_id, -1), "versions fell"
            newest[event.request_id] = event.version
        elif isinstance(event, Finished):
            done.add(event.request_id)
    reported = _reported(events)
    for request_id, sample in _samples(events).items():
        counted = Counter(sample.versions()[since:])
        assert reported[request_id] == counted, f"{reported[request_id]} reported, {counted} sampled"


def _require_logprobs(subject: GenerateSubject, request: GenerateRequest, sample: Sample) -> None:
    """Stored log-probs are those of the version that sampled each token."""
    for version in sorted(set(sample.versions())):
        expected = subject.logprobs(version, request, sample.token_ids)
        for place, (stored, computed) in enumerate(zip(sample.logprobs, expected, strict=True)):
            if sample.versions()[place] == version:
                assert abs(stored - computed) <= subject.tolerance, (place, version, stored, computed)


def _refusal(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("this was not refused")


def every_token_is_reported_once(subject: GenerateSubject) -> None:
    subject.publish(0)
    requests = [subject.request() for _ in range(9)]
    events = subject.run(*requests)
    samples = _samples(events)
    assert samples.keys() == {request.request_id for request in requests}, "more requests than slots all finish"
    _require_counted(events)
    for request in requests:
        sample = samples[request.request_id]
        assert 1 <= len(sample.token_ids) <= request.max_tokens
        stopped = sample.token_ids[-1] in subject.stop_token_ids
        assert sample.finish_reason == ("stop" if stopped else "length")
        assert not set(sample.token_ids[:-1]) & set(subject.stop_token_ids)
        _require_logprobs(subject, request, sample)


def the_first_token_is_reported_at_once(subject: GenerateSubject) -> None:
    """The ledger's births depend on it."""
    subject.publish(0)
    request = subject.request(max_tokens=6, stop_token_ids=())
    subject.engine.add([request])
    first = _reported(subject.engine.step())
    assert first == {request.request_id: Counter({0: 1})}
    subject.rest(subject.engine)


def an_answer_depends_on_its_seed_and_not_on_its_neighbours(subject: GenerateSubject) -> None:
    subject.publish(0)
    request = subject.request()
    alone = _samples(subject.run(request))[request.request_id]
    crowd = [subject.request() for _ in range(3)]
    together = _samples(subject.run(*crowd, request))[request.request_id]
    assert together.token_ids == alone.token_ids
    gaps = [abs(a - b) for a, b in zip(together.logprobs, alone.logprobs, strict=True)]
    assert max(gaps) <= subject.tolerance
    others = {_samples(subject.run(replace(request, seed=seed)))[request.request_id].token_ids for seed in range(8)}
    assert len(others) > 1


def a_swap_splits_answers_at_a_token_boundary(subject: GenerateSubject) -> None:
    """Invariant 8, with the KV cache rebuilt."""
    subject.publish(0)
    requests = [subject.request(max_tokens=14, stop_token_ids=()) for _ in range(5)]
    events = list(subject.engine.add(requests))
    for version in (1, 2):
        for _ in range(4):
            events += subject.engine.step()
        subject.train()
        swap = subject.publish(version)
        assert {event.version for event in swap if isinstance(event, Progress)} == {version - 1}
        events += swap
    events += subject.rest(subject.engine)
    _require_counted(events)
    for request in requests:
        sample = _samples(events)[request.request_id]
        assert len(sample.token_ids) == 14
        assert not any(segment.kv_mixed for segment in sample.segments)
        _require_logprobs(subject, request, sample)
    first = _samples(events)[requests[0].request_id]
    assert [(s.version, s.token_count) for s in first.segments] == [(0, 4), (1, 4), (2, 6)]


def a_kept_cache_is_flagged(subject: GenerateSubject) -> None:
    subject.publish(0)
    running, later = subject.request(stop_token_ids=()), subject.request(stop_token_ids=())
    events = [*subject.engine.add([running]), *subject.engine.step()]
    subject.train()
    events += subject.publish(1, kv="keep")
    events += subject.run(later)
    _require_counted(events)
    flags = {name: [s.kv_mixed for s in sample.segments] for name, sample in _samples(events).items()}
    assert flags == {running.request_id: [False, True], later.request_id: [False]}


def unchanged_weights_are_only_a_new_number(subject: GenerateSubject) -> None:
    subject.publish(0)
    request = subject.request(stop_token_ids=())
    events = [*subject.engine.add([request]), *subject.engine.step()]
    weights = subject.export(1)
    assert not weights.changed
    subject.engine.prepare(weights)
    events += subject.engine.commit(1, "keep")
    events += subject.rest(subject.engine)
    _require_counted(events)
    sample = _samples(events)[request.request_id]
    assert [(s.version, s.kv_mixed) for s in sample.segments] == [(0, False), (1, False)]
    alone = _samples(subject.run(replace(request, request_id="alone")))["alone"]
    assert sample.token_ids == alone.token_ids


def N13_a_probe_tells_which_weights_are_in_use(subject: GenerateSubject) -> None:
    """Also while answers run: those that were announced, once they are committed and not before."""

    def gap(weights: WeightHandle) -> float:
        assert weights.probe is not None
        said = subject.engine.probe(weights.probe.token_ids)
        assert len(said) == len(weights.probe.token_ids) - 1
        return max(abs(a - b) for a, b in zip(said, weights.probe.logprobs, strict=True))

    old = subject.export(0)
    subject.engine.prepare(old)
    subject.engine.commit(0, "rebuild")
    assert gap(old) <= subject.tolerance
    subject.engine.add([subject.request(stop_token_ids=())])
    subject.engine.step()
    subject.train()
    new = subject.export(1)
    subject.engine.prepare(new)
    assert gap(old) <= subject.tolerance < gap(new)
    subject.engine.commit(1, "rebuild")
    assert gap(new) <= subject.tolerance < gap(old)
    subject.rest(subject.engine)
    assert gap(new) <= subject.tolerance


def N15_an_aborted_answer_is_given_back_and_may_continue_elsewhere(subject: GenerateSubject) -> None:
    """Aborted at token 5 of 8: at most 3 more, and as many log-probs as tokens."""
    other = subject.another()
    subject.publish(0, subject.engine, other)
    request, waiting = subject.request(max_tokens=8, stop_token_ids=()), subject.request()
    crowd = [subject.request(max_tokens=30, stop_token_ids=()) for _ in range(3)]
    events = list(subject.engine.add([request, *crowd, waiting]))
    for _ in range(5):
        events += subject.engine.step()
    ids = [request.request_id, waiting.request_id, "never heard of"]
    given_back = {partial.request_id: partial for partial in subject.engine.abort(ids)}
    assert given_back.keys() == {request.request_id, waiting.request_id}
    partial = given_back[request.request_id]
    assert len(partial.tokens) == len(partial.logprobs) == sum(s.token_count for s in partial.segments) == 5
    assert given_back[waiting.request_id] == waiting, "it had not begun"
    events += subject.rest(subject.engine)
    assert _reported(events)[request.request_id] == Counter({0: 5}), "aborted tokens are reported, once"
    assert request.request_id not in _samples(events)
    subject.train()
    subject.publish(1, subject.engine, other)
    more = subject.run(partial, engine=other)
    _require_counted(more, since=5)
    sample = _samples(more)[request.request_id]
    assert len(sample.token_ids) == len(sample.logprobs) == 8
    assert sample.token_ids[:5] == partial.tokens
    assert sample.logprobs[:5] == partial.logprobs, "stored log-probs are never replaced"
    assert [(s.version, s.token_count) for s in sample.segments] == [(0, 5), (1, 3)]
    _require_logprobs(subject, request, sample)


def requests_that_cannot_be_answered_are_rejected_and_the_others_are(subject: GenerateSubject) -> None:
    subject.publish(0)
    good = subject.request()
    bad = [
        subject.request(prompt_token_ids=()),
        subject.request(max_tokens=subject.longest + 1),
        subject.request(prompt_token_ids=(*subject.prompt, subject.unknown_token)),
    ]
    events = subject.run(bad[0], good, *bad[1:])
    rejected = {event.request_id: event.reason for event in events if isinstance(event, Rejected)}
    assert rejected.keys() == {request.request_id for request in bad}
    assert all(rejected.values())
    assert _samples(events).keys() == {good.request_id}


def nothing_is_sampled_before_the_first_weights(subject: GenerateSubject) -> None:
    request = subject.request()
    (event,) = subject.run(request)
    assert isinstance(event, Rejected)
    subject.publish(0)
    assert _samples(subject.run(request))


def weights_that_are_not_those_announced_are_refused_and_the_old_ones_stay(subject: GenerateSubject) -> None:
    subject.publish(0)
    request = subject.request()
    before = _samples(subject.run(request))[request.request_id]
    subject.train()
    weights = subject.export(1)
    wrong = replace(weights, checksum=weights.checksum ^ 1)
    assert "1" in _refusal(PublishRefused, lambda: subject.engine.prepare(wrong))
    assert subject.engine.version == 0
    after = _samples(subject.run(request))[request.request_id]
    assert (after.token_ids, after.segments) == (before.token_ids, before.segments)
    subject.engine.prepare(weights)
    subject.engine.commit(1, "rebuild")
    assert subject.engine.version == 1


def a_commit_needs_its_prepare(subject: GenerateSubject) -> None:
    subject.publish(0)
    assert "0" in _refusal(Exception, lambda: subject.engine.commit(0, "rebuild"))
    assert "1" in _refusal(Exception, lambda: subject.engine.commit(1, "rebuild"))
    assert subject.engine.version == 0


GENERATE_ENGINE: tuple[Callable[[GenerateSubject], None], ...] = (
    every_token_is_reported_once,
    the_first_token_is_reported_at_once,
    an_answer_depends_on_its_seed_and_not_on_its_neighbours,
    a_swap_splits_answers_at_a_token_boundary,
    a_kept_cache_is_flagged,
    unchanged_weights_are_only_a_new_number,
    N13_a_probe_tells_which_weights_are_in_use,
    N15_an_aborted_answer_is_given_back_and_may_continue_elsewhere,
    requests_that_cannot_be_answered_are_rejected_and_the_others_are,
    nothing_is_sampled_before_the_first_weights,
    weights_that_are_not_those_announced_are_refused_and_the_old_ones_stay,
    a_commit_needs_its_prepare,
)
