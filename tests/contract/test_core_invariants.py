"""The staleness contract over the real core: gate, queues, groups, coordinator and algorithms on fakes, with faults.

`EXAMPLES` (environment) sets the number of examples per property. `Inspector` asserts conservation, admission and
settlement after every event, and that nobody waits in vain whenever the clock moves.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from algorithms.grpo import GRPO
from asyncrlhf.algorithm import Algorithm
from asyncrlhf.observe import StepEnded
from asyncrlhf.testing import Run, Scenario, Timing
from tests.contract.inspector import check_batches, go
from tests.contract.scenarios import scenarios, stressed, timings
from tests.contract.shapes import SHAPES, TwoModels

EXAMPLES = int(os.environ.get("EXAMPLES", "60"))
pytestmark = pytest.mark.timeout(400 if EXAMPLES <= 60 else 0)
ENDS = {"completed", "train_steps", "Exhausted"}


def many(share: float = 1.0) -> settings:
    count = max(10, round(EXAMPLES * share))
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


shapes = st.sampled_from(SHAPES)


def ends_well(algorithm: type[Algorithm], scenario: Scenario, **options: Any) -> Run[Any]:
    run = go(algorithm, scenario, **options)
    assert run.reason in ENDS, f"{run.reason}: {run.error}"
    check_batches(run)
    check_trained(run)
    if run.reason == "completed":
        assert run.rows.released == set(range(run.ledger.low_water))
    return run


def check_trained(run: Run[Any]) -> None:
    """Every prompt is trained once, or ended otherwise; nothing is left open once the data has been used up."""
    account, trained = run.ledger.account(), Counter(uid for _, uids in run.batches for uid in uids)
    assert all(count == 1 for count in trained.values())
    assert trained.total() == account.counts["consumed"]
    assert [step for step, _ in run.batches] == list(range(len(run.batches)))
    assert run.ledger.version == len(run.batches)
    if run.reason == "completed":
        assert not run.ledger.live
        assert not run.ledger.again
        assert run.ledger.low_water == run.rows.count
        assert account.tokens.open == 0
        ended = sum(n for state, n in account.counts.items() if state in ("filtered", "failed") or "dropped" in state)
        assert trained.total() + ended == run.rows.count


@many()
@given(shapes, scenarios())
def test_calm_runs_end_and_every_invariant_holds(algorithm: type[Algorithm], scenario: Scenario) -> None:
    """Invariants 1-6, 8, 10-12, 14, without faults: then also every sampled token is on the books."""
    run = ends_well(algorithm, scenario)
    if scenario.timing.latency < 1.0 and scenario.timing.pace < 2.0:  # the last aborts are answered in time
        sampled = sum(h.engine.token_count for h in run.runtime.handles if h.spec.group == "rollout")
        assert sampled == run.ledger.account().tokens.generated + run.groups["rollout"].evaluation_tokens


@many()
@given(shapes, scenarios(most_faults=3))
def test_faulty_runs_end_and_every_invariant_holds(algorithm: type[Algorithm], scenario: Scenario) -> None:
    """The same with engines that die, hang, lose replies, are late, and speak after they were fenced."""
    run = ends_well(algorithm, scenario)
    late = {id(event.sample) for event in run.runtime.late}
    trained = {id(s) for p in run.popped for e in p.experiences for s in e.rollout.samples}
    assert not late & trained, "an answer of a fenced engine was trained on"


@many()
@given(shapes, st.integers(0, 2**40))
def test_long_runs_under_stress(algorithm: type[Algorithm], number: int) -> None:
    ends_well(algorithm, stressed(number))


# ---- crash and resume


def trained_along(algorithm: type[Algorithm], scenario: Scenario, crashes: list[int]) -> Run[Any]:
    """Run, crash at these iterations of the event loop, resume each time from the newest checkpoint, run to the end."""
    saved = None
    for crash_at in (*crashes, None):
        run = go(algorithm, scenario, resume=saved, crash_at=crash_at)
        saved = run.saved or saved
        if not run.crashed:
            return run
    raise AssertionError("the last attempt has no crash")


@many()
@given(
    shapes,
    scenarios(most_faults=1, train_steps=None, evaluation_every=0),
    st.lists(st.integers(30, 800), min_size=1, max_size=3),
    st.integers(1, 3),
    st.booleans(),
)
def test_R1_R2_R4_a_crash_at_any_await_loses_and_doubles_nothing(
    algorithm: type[Algorithm], scenario: Scenario, crashes: list[int], every: int, payloads: bool
) -> None:
    """Invariant 9, on data run to its end: each (uid, epoch) is trained once unless it ended otherwise."""
    scenario = replace(scenario, checkpoint_every=every, payloads=payloads)
    run = trained_along(algorithm, scenario, crashes)
    assert run.reason in ENDS, f"{run.reason}: {run.error}"
    check_trained(run)
    applied = sum(event.applied for event in run.events if type(event).__name__ == "OptimizerStep")
    if not run.crashed and run.saved is None:
        assert run.trainer().steps == applied
    for name in ("policy", "critic"):
        if name in run.groups:
            assert run.groups[name].optimizer_steps == run.trainer(name).steps


# ---- reproducibility


CALM: dict[str, Any] = {
    "unusable": 0.0,
    "evaluation_every": 0,
    "byte_limit": None,
    "max_attempts": 3,
    "lease_timeout": 0.0,
}


def membership(run: Run[Any]) -> list[tuple[int, tuple[int, ...]]]:
    assert run.reason in ENDS, f"{run.reason}: {run.error}"
    return [(popped.batch.step, tuple(lease.uid for lease in popped.batch.leases)) for popped in run.popped]


def token_versions(run: Run[Any]) -> list[Any]:
    return [[(e.prompt.uid, s.segments) for e in p.experiences for s in e.rollout.samples] for p in run.popped]


@many(0.5)
@given(shapes, scenarios(order="admission", **CALM), timings())
def test_admission_order_has_reproducible_membership(
    algorithm: type[Algorithm], scenario: Scenario, timing: Timing
) -> None:
    """Invariant 13: which prompts form a batch depends on no duration, whatever the publish mode and the filters.

    The weights stay as they are, or else filters would judge other answers.
    """
    scenario = replace(scenario, trainer=replace_struct(scenario.trainer, learning_rate=0.0))
    first = go(algorithm, scenario)
    assert membership(go(algorithm, replace(scenario, timing=timing))) == membership(first)


@many(0.5)
@given(shapes, scenarios(lookahead=0, **CALM), timings())
def test_without_lookahead_everything_is_reproducible(
    algorithm: type[Algorithm], scenario: Scenario, timing: Timing
) -> None:
    """Invariant 13, D = 0: the versions of the tokens and the weights too."""
    scenario = replace(scenario, kv="rebuild")
    first, second = go(algorithm, scenario), go(algorithm, replace(scenario, timing=timing))
    assert membership(first) == membership(second)
    assert token_versions(first) == token_versions(second)
    assert first.trainer().weights == second.trainer().weights


DRAINED: dict[str, Any] = {"publish_mode": "drain", "order": "admission", "min_answers": None, **CALM}


@many(0.5)
@given(st.sampled_from([GRPO, TwoModels]), scenarios(**DRAINED), timings())
def test_draining_publishes_make_token_versions_reproducible(
    algorithm: type[Algorithm], scenario: Scenario, timing: Timing
) -> None:
    """Invariant 13, D > 0: every granted lease is drained, queued ones included; no filters, no faults. Nor, where
    training goes on beside a publish, void steps: each makes room for a lease, before the commit or after it."""
    reward = {**scenario.reward, "failing": 0.0, "hanging": 0.0}
    scenario = replace(scenario, reward=reward, sampler=replace_struct(scenario.sampler, rejected=0.0))
    first, second = go(algorithm, scenario), go(algorithm, replace(scenario, timing=timing))
    if scenario.publish_overlap:
        assume(not any(event.void for event in first.events_of(StepEnded)))
    assert membership(first) == membership(second)
    assert token_versions(first) == token_versions(second)
    assert first.trainer().weights == second.trainer().weights
