"""What every sampler owes: each token reported once under the version that sampled it, and swaps that lose nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from asyncrlhf.errors import PublishRefused
from asyncrlhf.messages import Progress, Rejected
from asyncrlhf.testing.conformance.sampling import (
    GenerateSubject,
    probe_gap,
    refusal,
    reported_by,
    require_counted,
    require_logprobs,
    samples_of,
)
from asyncrlhf.testing.conformance.sleeping import SLEEPING

__all__ = ("GENERATE_ENGINE", "GenerateSubject")


def every_token_is_reported_once(subject: GenerateSubject) -> None:
    subject.publish(0)
    requests = [subject.request() for _ in range(9)]
    events = subject.run(*requests)
    samples = samples_of(events)
    assert samples.keys() == {request.request_id for request in requests}, "more requests than slots all finish"
    require_counted(events)
    for request in requests:
        sample = samples[request.request_id]
        assert 1 <= len(sample.token_ids) <= request.max_tokens
        stopped = sample.token_ids[-1] in subject.stop_token_ids
        assert sample.finish_reason == ("stop" if stopped else "length")
        assert not set(sample.token_ids[:-1]) & set(subject.stop_token_ids)
        require_logprobs(subject, request, sample)


def the_first_token_is_reported_at_once(subject: GenerateSubject) -> None:
    """The ledger's births depend on it."""
    subject.publish(0)
    request = subject.request(max_tokens=6, stop_token_ids=())
    subject.engine.add([request])
    first = reported_by(subject.engine.step())
    assert first == {request.request_id: Counter({0: 1})}
    subject.rest(subject.engine)


def an_answer_depends_on_its_seed_and_not_on_its_neighbours(subject: GenerateSubject) -> None:
    subject.publish(0)
    request = subject.request()
    alone = samples_of(subject.run(request))[request.request_id]
    crowd = [subject.request() for _ in range(3)]
    together = samples_of(subject.run(*crowd, request))[request.request_id]
    assert together.token_ids == alone.token_ids
    gaps = [abs(a - b) for a, b in zip(together.logprobs, alone.logprobs, strict=True)]
    assert max(gaps) <= subject.tolerance
    others = {samples_of(subject.run(replace(request, seed=seed)))[request.request_id].token_ids for seed in range(8)}
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
    require_counted(events)
    for request in requests:
        sample = samples_of(events)[request.request_id]
        assert len(sample.token_ids) == 14
        assert not any(segment.kv_mixed for segment in sample.segments)
        require_logprobs(subject, request, sample)
    first = samples_of(events)[requests[0].request_id]
    assert [(s.version, s.token_count) for s in first.segments] == [(0, 4), (1, 4), (2, 6)]


def a_kept_cache_is_flagged(subject: GenerateSubject) -> None:
    subject.publish(0)
    running, later = subject.request(stop_token_ids=()), subject.request(stop_token_ids=())
    events = [*subject.engine.add([running]), *subject.engine.step()]
    subject.train()
    events += subject.publish(1, kv="keep")
    events += subject.run(later)
    require_counted(events)
    flags = {name: [s.kv_mixed for s in sample.segments] for name, sample in samples_of(events).items()}
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
    require_counted(events)
    sample = samples_of(events)[request.request_id]
    assert [(s.version, s.kv_mixed) for s in sample.segments] == [(0, False), (1, False)]
    alone = samples_of(subject.run(replace(request, request_id="alone")))["alone"]
    assert sample.token_ids == alone.token_ids


def N13_a_probe_tells_which_weights_are_in_use(subject: GenerateSubject) -> None:
    """Also while answers run: those that were announced, once they are committed and not before."""
    engine, old = subject.engine, subject.export(0)
    engine.prepare(old)
    engine.commit(0, "rebuild")
    assert probe_gap(engine, old) <= subject.tolerance
    engine.add([subject.request(stop_token_ids=())])
    engine.step()
    subject.train()
    new = subject.export(1)
    engine.prepare(new)
    assert probe_gap(engine, old) <= subject.tolerance < probe_gap(engine, new)
    engine.commit(1, "rebuild")
    assert probe_gap(engine, new) <= subject.tolerance < probe_gap(engine, old)
    subject.rest(subject.engine)
    assert probe_gap(engine, new) <= subject.tolerance


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
    assert reported_by(events)[request.request_id] == Counter({0: 5}), "aborted tokens are reported, once"
    assert request.request_id not in samples_of(events)
    subject.train()
    subject.publish(1, subject.engine, other)
    more = subject.run(partial, engine=other)
    require_counted(more, since=5)
    sample = samples_of(more)[request.request_id]
    assert len(sample.token_ids) == len(sample.logprobs) == 8
    assert sample.token_ids[:5] == partial.tokens
    assert sample.logprobs[:5] == partial.logprobs, "stored log-probs are never replaced"
    assert [(s.version, s.token_count) for s in sample.segments] == [(0, 5), (1, 3)]
    require_logprobs(subject, request, sample)


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
    assert samples_of(events).keys() == {good.request_id}


def nothing_is_sampled_before_the_first_weights(subject: GenerateSubject) -> None:
    request = subject.request()
    (event,) = subject.run(request)
    assert isinstance(event, Rejected)
    subject.publish(0)
    assert samples_of(subject.run(request))


def weights_that_are_not_those_announced_are_refused_and_the_old_ones_stay(subject: GenerateSubject) -> None:
    subject.publish(0)
    request = subject.request()
    before = samples_of(subject.run(request))[request.request_id]
    subject.train()
    weights = subject.export(1)
    wrong = replace(weights, checksum=weights.checksum ^ 1)
    assert "1" in refusal(PublishRefused, lambda: subject.engine.prepare(wrong))
    assert subject.engine.version == 0
    after = samples_of(subject.run(request))[request.request_id]
    assert (after.token_ids, after.segments) == (before.token_ids, before.segments)
    subject.engine.prepare(weights)
    subject.engine.commit(1, "rebuild")
    assert subject.engine.version == 1


def L9_answers_go_on_behind_an_update_that_failed(subject: GenerateSubject) -> None:
    """Running and waiting ones, without another word to the engine; then as under the version after it."""
    subject.publish(0)
    requests = [subject.request(max_tokens=9, stop_token_ids=()) for _ in range(6)]
    events = list(subject.engine.add(requests))
    for _ in range(3):
        events += subject.engine.step()
    subject.train()
    weights = subject.export(1)
    for _ in range(2):
        refusal(PublishRefused, lambda: subject.engine.prepare(replace(weights, checksum=weights.checksum ^ 1)))
        events += subject.engine.step()
    events += subject.rest(subject.engine)
    require_counted(events)
    for request in requests:
        sample = samples_of(events)[request.request_id]
        assert sample.versions() == (0,) * 9
        require_logprobs(subject, request, sample)
    subject.engine.prepare(weights)
    subject.engine.commit(1, "rebuild")
    later = subject.request()
    assert set(samples_of(subject.run(later))[later.request_id].versions()) == {1}


def a_commit_needs_its_prepare(subject: GenerateSubject) -> None:
    subject.publish(0)
    assert "0" in refusal(Exception, lambda: subject.engine.commit(0, "rebuild"))
    assert "1" in refusal(Exception, lambda: subject.engine.commit(1, "rebuild"))
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
    L9_answers_go_on_behind_an_update_that_failed,
    a_commit_needs_its_prepare,
    *SLEEPING,
)
