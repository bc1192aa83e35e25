"""A sampler under test beside the trainer that it follows, and what is said of the events it gives."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from asyncrlhf.abc import GenerateEngine
from asyncrlhf.messages import (
    EngineEvent,
    Finished,
    GenerateRequest,
    Progress,
    Sample,
    WeightHandle,
)

__all__ = (
    "GenerateSubject",
    "probe_gap",
    "refusal",
    "reported_by",
    "require_counted",
    "require_logprobs",
    "samples_of",
)


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


def samples_of(events: Sequence[EngineEvent]) -> dict[str, Sample]:
    return {event.request_id: event.sample for event in events if isinstance(event, Finished)}


def reported_by(events: Sequence[EngineEvent]) -> dict[str, Counter[int]]:
    """Request -> version -> tokens, from Progress."""
    found: dict[str, Counter[int]] = {}
    for event in events:
        if isinstance(event, Progress):
            found.setdefault(event.request_id, Counter())[event.version] += event.token_count
    return found


def require_counted(events: Sequence[EngineEvent], *, since: int = 0) -> None:
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
    reported = reported_by(events)
    for request_id, sample in samples_of(events).items():
        counted = Counter(sample.versions()[since:])
        assert reported[request_id] == counted, f"{reported[request_id]} reported, {counted} sampled"


def require_logprobs(subject: GenerateSubject, request: GenerateRequest, sample: Sample) -> None:
    """Stored log-probs are those of the version that sampled each token."""
    for version in sorted(set(sample.versions())):
        expected = subject.logprobs(version, request, sample.token_ids)
        for place, (stored, computed) in enumerate(zip(sample.logprobs, expected, strict=True)):
            if sample.versions()[place] == version:
                assert abs(stored - computed) <= subject.tolerance, (place, version, stored, computed)


def refusal(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("this was not refused")


def probe_gap(engine: GenerateEngine, weights: WeightHandle) -> float:
    """Between what an engine says and what it should say, had it these weights."""
    assert weights.probe is not None
    said = engine.probe(weights.probe.token_ids)
    assert len(said) == len(weights.probe.token_ids) - 1
    return max(abs(a - b) for a, b in zip(said, weights.probe.logprobs, strict=True))
