"""What every sampler owes that shares its devices: asleep it has nothing there, and woken it has lost nothing."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from asyncrlhf.errors import GroupError, PublishRefused
from asyncrlhf.testing.conformance.sampling import (
    GenerateSubject,
    probe_gap,
    refusal,
    reported_by,
    require_counted,
    require_logprobs,
    samples_of,
)

__all__ = ("SLEEPING",)


def answers_go_on_behind_a_sleep(subject: GenerateSubject) -> None:
    """Running and waiting ones, and those that come meanwhile; tokens and log-probs of before stay."""
    engine = subject.engine
    subject.publish(0)
    running = [subject.request(max_tokens=14, stop_token_ids=()) for _ in range(4)]
    waiting, given_up, later = (subject.request(max_tokens=5, stop_token_ids=()) for _ in range(3))
    events = list(engine.add([*running, waiting, given_up]))
    for _ in range(4):
        events += engine.step()
    events += engine.sleep()
    assert engine.asleep
    assert {name: sum(counted.values()) for name, counted in reported_by(events).items()} == {
        request.request_id: 4 for request in running
    }
    assert not engine.has_work
    assert not engine.step()
    assert not engine.sleep(), "it sleeps already"
    events += engine.add([later])
    given_back = {partial.request_id: partial for partial in engine.abort([running[3].request_id, given_up.request_id])}
    assert given_back.keys() == {running[3].request_id, given_up.request_id}
    assert len(given_back[running[3].request_id].logprobs) == len(given_back[running[3].request_id].tokens) == 4
    assert given_back[given_up.request_id] == given_up
    assert not engine.has_work
    subject.train()
    engine.wake(subject.export(1))
    assert (engine.asleep, engine.version, engine.has_work) == (False, 1, True)
    events += engine.step()
    assert {name for name, counted in reported_by(events).items() if counted[1]} >= {r.request_id for r in running[:3]}
    events += subject.rest(engine)
    require_counted(events)
    samples = samples_of(events)
    assert samples.keys() == {request.request_id for request in (*running[:3], waiting, later)}
    for request in (*running[:3], waiting, later):
        sample = samples[request.request_id]
        before = 4 if request in running else 0
        assert sample.versions() == (0,) * before + (1,) * (request.max_tokens - before)
        assert not any(segment.kv_mixed for segment in sample.segments)
        require_logprobs(subject, request, sample)


def a_woken_engine_computes_with_the_weights_it_was_woken_with(subject: GenerateSubject) -> None:
    """Also with those it had before, from the start on, and behind it publishes go on as ever."""
    engine = subject.engine
    engine.sleep()
    first = subject.export(0)
    engine.wake(first)
    assert engine.version == 0
    assert probe_gap(engine, first) <= subject.tolerance
    request = subject.request()
    before = samples_of(subject.run(request))[request.request_id]
    engine.sleep()
    same = subject.export(1)
    assert not same.changed
    engine.wake(same)
    assert probe_gap(engine, same) <= subject.tolerance
    assert samples_of(subject.run(request))[request.request_id].token_ids == before.token_ids
    subject.train()
    new = subject.export(2)
    engine.prepare(new)
    assert probe_gap(engine, same) <= subject.tolerance < probe_gap(engine, new)
    engine.commit(2, "rebuild")
    assert probe_gap(engine, new) <= subject.tolerance
    unchanged = subject.export(3)
    engine.prepare(unchanged)
    engine.commit(3, "rebuild")
    assert probe_gap(engine, new) <= subject.tolerance


def M1_what_needs_weights_is_refused_while_they_are_away(subject: GenerateSubject) -> None:
    """A version that was prepared goes, too; and an engine that cannot be woken sleeps on."""
    engine = subject.engine
    subject.publish(0)
    subject.train()
    weights = subject.export(1)
    assert "awake" in refusal(GroupError, lambda: engine.wake(weights))
    engine.prepare(weights)
    engine.sleep()
    assert "prepare" in refusal(GroupError, lambda: engine.prepare(weights))
    assert "commit" in refusal(GroupError, lambda: engine.commit(1, "rebuild"))
    assert "probe" in refusal(GroupError, lambda: engine.probe((8, 9, 10)))
    request = subject.request()
    assert not engine.add([request])
    wrong = replace(weights, checksum=weights.checksum ^ 1)
    assert "1" in refusal(PublishRefused, lambda: engine.wake(wrong))
    assert (engine.asleep, engine.version, engine.has_work) == (True, 0, False)
    engine.wake(weights)
    refusal(Exception, lambda: engine.commit(1, "rebuild"))
    sample = samples_of(subject.rest(engine))[request.request_id]
    assert set(sample.versions()) == {1}
    require_logprobs(subject, request, sample)


SLEEPING: tuple[Callable[[GenerateSubject], None], ...] = (
    answers_go_on_behind_a_sleep,
    a_woken_engine_computes_with_the_weights_it_was_woken_with,
    M1_what_needs_weights_is_refused_while_they_are_away,
)
