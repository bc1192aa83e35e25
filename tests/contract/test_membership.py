"""Two-phase publishing: who serves which version, what is refused, and that P never falls."""

from __future__ import annotations

import pytest

from asyncrlhf.control.membership import Membership


def test_P_rises_when_the_last_serving_engine_has_committed() -> None:
    members = Membership("ab", version=3)
    assert (members.published, dict(members.serving)) == (3, {"a": 3, "b": 3})
    members.prepare(4)
    assert members.acknowledge("a", 0)
    assert not members.prepared
    with pytest.raises(ValueError, match="a commits version 4, but 1 of 2 serving engines do not hold it yet: b"):
        members.commit("a", 0)
    assert members.acknowledge("b", 0)
    assert members.prepared
    assert members.commit("b", 0)
    assert (members.published, members.target) == (3, 4)
    assert members.commit("a", 0)
    assert members.published == 4
    members.prepare(5)
    assert not members.prepared


def test_L7_an_engine_fenced_within_a_publish_does_not_hold_it_up() -> None:
    members = Membership("ab", version=0)
    members.prepare(1)
    members.acknowledge("a", 0)
    assert members.fence("b") == 1
    assert members.prepared
    members.commit("a", 0)
    assert members.published == 1
    assert not members.acknowledge("b", 0)
    assert not members.commit("b", 0)


def test_messages_of_an_old_incarnation_are_refused_after_it_joins_again() -> None:
    members = Membership("ab", version=0)
    members.fence("b")
    assert members.join("b") == 1
    members.prepare(1)
    assert not members.acknowledge("b", 0)
    assert not members.acknowledge("c", 0)
    assert members.acknowledge("b", 1)


def test_an_engine_joins_at_P_or_at_the_version_under_way() -> None:
    members = Membership("a", version=0)
    assert members.join("b") == 0
    assert members.serving["b"] == 0
    members.prepare(1)
    members.join("c")
    assert members.serving["c"] == 1
    for engine in "ab":
        members.acknowledge(engine, 0)
    for engine in "ab":
        members.commit(engine, 0)
    assert members.published == 1
    with pytest.raises(ValueError, match="c serves version 1 already"):
        members.join("c")


def test_with_no_serving_engine_P_keeps_its_value_and_a_publish_waits() -> None:
    members = Membership("a", version=2)
    members.fence("a")
    members.prepare(3)
    assert (members.published, members.prepared, dict(members.serving)) == (2, False, {})
    members.join("a")
    assert (members.published, members.prepared) == (3, True)


def test_versions_never_fall() -> None:
    members = Membership("a", version=2)
    with pytest.raises(ValueError, match="version 1 after version 2"):
        members.prepare(1)
