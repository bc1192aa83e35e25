"""What lives when a run begins is no business of the garbage collector until it ends."""

from __future__ import annotations

import gc
import weakref

import pytest

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
