"""What lives when a run begins is no business of the garbage collector until it ends."""

from __future__ import annotations

import gc
import pickle
import weakref
from functools import cached_property
from typing import Any

import pytest
from msgspec.structs import replace

from algorithms.grpo import GRPOExperience
from asyncrlhf.messages import Experience, PerSample, Prompt, Rollout, Sample, Segment, pack, unpack
from asyncrlhf.runtimes.garbage import left_alone


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> None:
    gc.unfreeze()


class Thing:
    """Can be referred to weakly, and refers to itself if told so."""

    def __init__(self, *, cycle: bool = False) -> None:
        self.me = self if cycle else None


def is_looked_at(thing: Thing) -> bool:
    return any(found is thing for found in gc.get_objects())


def test_what_lives_is_looked_at_again_only_after_the_block() -> None:
    before = Thing()
    with left_alone():
        after = Thing()
        assert not is_looked_at(before)
        assert is_looked_at(after)
    assert is_looked_at(before)


def test_garbage_of_before_is_gone_and_garbage_of_after_is_found() -> None:
    gone = weakref.ref(Thing(cycle=True))
    with left_alone():
        assert gone() is None
        new = weakref.ref(Thing(cycle=True))
        gc.collect()
        assert new() is None


def test_what_nobody_refers_to_is_freed_within_the_block_and_garbage_that_lived_at_its_start_after_it() -> None:
    counted, cycle = Thing(), Thing(cycle=True)
    by_count, by_search = weakref.ref(counted), weakref.ref(cycle)
    with left_alone():
        del counted, cycle
        gc.collect()
        assert by_count() is None
        assert by_search() is not None
    gc.collect()
    assert by_search() is None


def test_a_run_that_fails_leaves_nothing_out() -> None:
    before = Thing()
    with pytest.raises(ZeroDivisionError), left_alone():
        raise ZeroDivisionError
    assert is_looked_at(before)


def test_what_the_process_has_frozen_itself_stays_frozen() -> None:
    before = Thing()
    gc.freeze()
    try:
        with left_alone():
            pass
        assert not is_looked_at(before)
    finally:
        gc.unfreeze()
    assert is_looked_at(before)


def test_new_objects_are_looked_at_less_often_within_the_block_unless_that_is_turned_off() -> None:
    before = gc.get_threshold()
    with left_alone():
        assert gc.get_threshold() == (max(before[0], 10_000), *before[1:])
    assert gc.get_threshold() == before
    try:
        gc.set_threshold(0, *before[1:])
        with left_alone():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_messages_are_nothing_for_the_garbage_collector() -> None:
    segment = Segment(version=0, token_count=1)
    sample = Sample(token_ids=(1,), logprobs=(-0.5,), segments=(segment,), finish_reason="stop")
    prompt = Prompt(uid=0, epoch=0, attempt=1, version=0, token_ids=(1,), text="a")
    rollout = Rollout(prompt=prompt, samples=(sample,))
    experience = GRPOExperience(rollout=rollout, rewards=(1.0,), advantages=(0.0,), reference_logprobs=None)
    assert not any(map(gc.is_tracked, (segment, sample, prompt, rollout, experience)))


class Cached(Experience, frozen=True, dict=True, gc=True):
    advantages: PerSample

    @cached_property
    def best(self) -> float:
        return max(self.advantages)


class Oops(Exception):
    pass


class Troubled(Experience, frozen=True, gc=True):
    error: Any


def rollout() -> Rollout:
    return Rollout(prompt=Prompt(uid=0, epoch=0, attempt=1, version=0, token_ids=(1,), text="a"), samples=())


def test_an_experience_with_cached_properties_travels_and_is_compared_by_its_fields() -> None:
    one = Cached(rollout=rollout(), rewards=(1.0, 0.0), advantages=(0.5, -0.5))
    assert one.best == 0.5
    assert "best" in vars(one), "it is computed once"
    for arrived in (unpack(pack(one)), pickle.loads(pickle.dumps(one))):
        assert arrived == one
        assert arrived.best == 0.5
    other = replace(one, advantages=(2.0, 1.0))
    assert other != one
    assert other.best == 2.0


def test_an_exception_in_an_experience_may_refer_back_to_it_where_the_class_says_so() -> None:
    error: Any = Oops("no")
    experience = Troubled(rollout=rollout(), rewards=None, error=error)
    error.experience, found = experience, weakref.ref(error)
    del error, experience
    assert found() is not None
    gc.collect()
    assert found() is None
