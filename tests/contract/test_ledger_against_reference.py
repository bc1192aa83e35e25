"""The product's ledger and membership against the oracle, event by event, under random worlds, faults and crashes.

`EXAMPLES` (environment) sets the number of examples per property.
"""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.reference.ledger import Config
from tests.contract.reference.sim import World
from tests.contract.twin import TwinMembership, TwinSimulation

EXAMPLES = int(os.environ.get("EXAMPLES", "200"))
NAMED = {"completed", "exhausted", "diverged", "train_steps"}
many = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
pytestmark = pytest.mark.timeout(400 if EXAMPLES <= 200 else 0)


@st.composite
def configs(draw) -> Config:
    staleness = draw(st.integers(0, 5))
    lookahead = draw(st.integers(0, staleness))
    order = draw(st.sampled_from(["ready", "ready", "admission"]))
    return Config(
        B=draw(st.integers(1, 6)),
        K=staleness,
        D=lookahead,
        every=draw(st.integers(1, lookahead + 1)),
        byte_limit=draw(st.sampled_from([0, 10, 100, float("inf")])),
        at_deadline="mask" if order == "admission" else draw(st.sampled_from(["mask", "wait", "drop"])),
        order=order,
        answers=draw(st.integers(1, 3)),
        max_attempts=draw(st.integers(1, 3)),
        max_filtered=draw(st.sampled_from([None, None, 3])),
        max_void_steps=draw(st.sampled_from([10, 10, 2])),
        last=draw(st.sampled_from(["train", "drop"])),
    )


@st.composite
def worlds(draw) -> World:
    rates = st.sampled_from([0.0, 0.0, 0.1, 0.4])
    return World(
        seed=draw(st.integers(0, 10**6)),
        timing=draw(st.integers(0, 10**6)),
        replicas=draw(st.integers(1, 3)),
        slots=draw(st.integers(1, 6)),
        length=draw(st.sampled_from([1, 4, 12])),
        sigma=draw(st.sampled_from([0.0, 0.7, 1.5])),
        pace=draw(st.sampled_from([1, 4])),
        reward=draw(st.sampled_from([(0, 0), (0, 10), (0, 60)])),
        train=draw(st.sampled_from([1, 5, 20])),
        sync=draw(st.integers(0, 3)),
        latency=draw(st.sampled_from([0, 2, 15])),
        mode=draw(st.sampled_from(["in_flight", "drain", "drain_granted"])),
        p_filter=draw(rates),
        p_fail=draw(rates),
        p_zero=draw(rates),
        p_void=draw(rates),
        report_late=draw(st.booleans()),
        deaths=draw(st.integers(0, 3)),
        continuation=draw(st.booleans()),
        crashes=tuple(draw(st.lists(st.integers(1, 250), max_size=2))),
        checkpoint_every=draw(st.integers(1, 3)),
        payloads=draw(st.booleans()),
        data=draw(st.integers(0, 40)),
        train_steps=draw(st.sampled_from([10**9, 10**9, 4, 9])),
        wait_timeout=draw(st.sampled_from([None, 0, 30])),
    )


def stress(number: int) -> tuple[Config, World]:
    """Drawn uniformly, not shrunk: long data, heavy tails, slow rewards, so that deadlines bite."""
    r = Random(number)
    staleness = r.randint(0, 5)
    lookahead = r.choice([staleness, r.randint(0, staleness)])
    order = r.choice(["ready", "ready", "ready", "admission"])

    def rate() -> float:
        return r.choice([0.0, 0.0, 0.05, 0.2])

    config = Config(
        B=r.randint(1, 6),
        K=staleness,
        D=lookahead,
        every=r.choice([1, r.randint(1, lookahead + 1)]),
        byte_limit=r.choice([50, float("inf"), float("inf")]),
        at_deadline="mask" if order == "admission" else r.choice(["mask", "wait", "drop"]),
        order=order,
        answers=r.randint(1, 3),
        max_attempts=r.randint(1, 3),
        last=r.choice(["train", "drop"]),
    )
    world = World(
        seed=number,
        replicas=r.randint(1, 3),
        slots=r.randint(2, 8),
        length=r.choice([6, 15]),
        sigma=r.choice([0.5, 1.2, 1.8]),
        pace=r.choice([1, 3]),
        reward=r.choice([(0, 0), (0, 60), (0, 300)]),
        train=r.choice([1, 5]),
        sync=r.randint(0, 2),
        latency=r.choice([0, 2, 8]),
        mode=r.choice(["in_flight", "in_flight", "drain"]),
        p_filter=rate(),
        p_fail=rate(),
        p_zero=rate(),
        p_void=rate(),
        report_late=r.random() < 0.5,
        deaths=r.randint(0, 3),
        continuation=r.random() < 0.5,
        crashes=tuple(r.randint(20, 600) for _ in range(r.randint(0, 2))),
        checkpoint_every=r.randint(1, 3),
        payloads=r.random() < 0.5,
        data=r.randint(20, 120),
        train_steps=r.choice([10**9, 10**9, r.randint(1, 30)]),
        wait_timeout=r.choice([None, None, 0, 30]),
    )
    return config, world


def run_both(config: Config, world: World, *, late_end: bool) -> None:
    train_steps = world.train_steps if world.train_steps < 10**9 else None
    run = TwinSimulation(config, world, train_steps=train_steps, late_end=late_end)
    reason = run.run()
    assert reason in NAMED, reason
    keys = [key for _, batch in run.batches for key, _ in batch]
    assert len(keys) == len(set(keys)) == run.ledger.count["consumed"]
    if reason == "train_steps":
        assert not run.ledger.product.live


@many
@given(configs(), worlds(), st.booleans())
def test_product_does_what_the_reference_does(config: Config, world: World, late_end: bool) -> None:
    run_both(config, world, late_end=late_end)


@many
@given(st.integers(0, 2**40))
def test_product_does_what_the_reference_does_under_stress(number: int) -> None:
    run_both(*stress(number), late_end=number % 2 == 0)


OPERATIONS = st.tuples(st.sampled_from(["prepare", "acknowledge", "commit", "fence", "join"]), st.integers(0, 3))


@many
@given(st.integers(1, 3), st.lists(OPERATIONS, max_size=60))
def test_membership_does_what_the_reference_does(engines: int, operations: list[tuple[str, int]]) -> None:
    members = TwinMembership(range(engines), 0)
    for verb, engine in operations:
        serves, known = engine in members.version, engine in members.incarnation
        if verb == "prepare":
            members.prepare(members.target + engine)
        elif verb == "acknowledge" and serves:
            members.ack(engine)
        elif verb == "commit" and serves and members.prepared():
            members.commit(engine)
        elif verb == "fence" and known:
            members.fence(engine)
        elif verb == "join" and known and not serves:
            members.join(engine)


@pytest.mark.parametrize("lookahead", [0, 1, 30])
@pytest.mark.parametrize(
    ("faults", "ending"),
    [
        ({"p_filter": 1.0}, "exhausted"),
        ({"p_fail": 1.0}, "exhausted"),
        ({"p_void": 1.0}, "diverged"),
        ({"p_zero": 1.0}, "no_signal"),
        ({"data": 0}, "completed"),
        ({"train_steps": 5}, "train_steps"),
    ],
)
def test_A2_A8_L2_endless_trouble_ends_with_a_name(lookahead: int, faults: dict[str, Any], ending: str) -> None:
    world = World(**faults)
    run = TwinSimulation(Config(B=2, K=30, D=lookahead), world, train_steps=faults.get("train_steps"))
    run.run()
    assert run.ledger.product.reason == ending


def test_the_comparison_notices_a_difference() -> None:
    """The oracle tests mean something: a ledger with another bound does not pass for this one."""
    run = TwinSimulation(Config(B=2, K=2, D=2), World(sigma=1.5, data=40))
    run.ledger.product.rules = run.ledger.product.rules.__class__(prompts_per_step=2, max_staleness=2, lookahead=1)
    with pytest.raises(AssertionError):
        run.run()
