"""The search: complete, the same as trying everything, and close to it where it is not complete."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from asyncrlhf.errors import ConfigError
from asyncrlhf.placement.cluster import NODES, Block, Cluster
from asyncrlhf.placement.layouts import Layout
from asyncrlhf.placement.memory import pass_memory
from asyncrlhf.placement.plan import Candidate, Problem
from asyncrlhf.placement.rehearse import rehearse
from asyncrlhf.placement.schedule import Task, schedule, tasks_of
from asyncrlhf.placement.search import search
from asyncrlhf.placement.setplan import Member, SetPlan
from asyncrlhf.placement.sets import Sets
from asyncrlhf.placement.strategies import STRATEGIES, partitions
from asyncrlhf.placement.units import units_of
from asyncrlhf.placement.value import Value, reward_latency
from asyncrlhf.placement.workload import Lengths, Workload
from tests.unit.placement.scene import model, problem

NAMES = ("qwen2.5-1.5b", "llama-7b", "llama-13b")


@pytest.mark.parametrize(("count", "ways"), [(1, 1), (2, 2), (3, 5), (4, 15), (5, 52), (6, 203)])
def test_every_partition_once(count: int, ways: int) -> None:
    found = [frozenset(map(frozenset, parts)) for parts in partitions(tuple("abcdef"[:count]))]
    assert len(found) == len(set(found)) == ways
    for parts in found:
        assert sorted(itertools.chain(*parts)) == sorted("abcdef"[:count])


def brute_force(asked: Problem) -> float:
    """Every partition, every size of every set, nothing pruned and nothing remembered between partitions."""
    (node, total), *_ = asked.cluster.pools
    sizes = asked.cluster.sizes(0)
    value, units = Value(asked), units_of(asked.models)
    best = float("inf")
    for parts in partitions(tuple(units)):
        for counts in itertools.product(sizes, repeat=len(parts)):
            if sum(counts) <= total:
                plans = [
                    Sets(asked.work, asked.fit).plan([Member(units[name], Block(node, count)) for name in part])
                    for part, count in zip(parts, counts, strict=True)
                ]
                if all(isinstance(plan, SetPlan) for plan in plans):
                    best = min(best, value.cost([plan for plan in plans if isinstance(plan, SetPlan)]))
    return best


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("devices", [2, 8])
def test_the_search_finds_what_trying_everything_finds(devices: int, ahead: int) -> None:
    work = Workload(prompts_per_step=64, minibatches=2, max_staleness=ahead)
    asked = problem(devices, "qwen2.5-1.5b", roles=("policy", "reference"), strategies=("auto",), work=work)
    found = search(asked)
    assert found.exhaustive
    assert found.candidates[0].step == pytest.approx(brute_force(asked), rel=1e-9)


@settings(max_examples=12, deadline=None)
@given(
    shape=st.sampled_from(NAMES),
    nodes=st.integers(2, 8),
    staleness=st.integers(0, 2),
    cv=st.sampled_from([0.0, 1.0]),
    batch=st.sampled_from([128, 512]),
)
def test_heuristics_come_close_to_the_exhaustive_search(
    shape: str, nodes: int, staleness: int, cv: float, batch: int
) -> None:
    """A search that may compare few allocations only (as on thousands of devices), against one that compares all."""
    work = Workload(
        prompts_per_step=batch, minibatches=2, max_staleness=staleness, response=Lengths(mean=512, cv=cv, max=4096)
    )
    asked = problem(8 * nodes, shape, roles=("policy", "critic", "reference"), strategies=("auto",), work=work)
    whole, coarse = search(asked), search(asked, limit=8)
    assert whole.exhaustive
    assert whole.candidates[0].step <= coarse.candidates[0].step <= 1.1 * whole.candidates[0].step


@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from(NAMES),
    devices=st.sampled_from([1, 2, 4, 8, 16, 24, 64]),
    staleness=st.integers(0, 2),
    shards=st.sampled_from([1, 3]),
)
def test_every_placement_is_one(shape: str, devices: int, staleness: int, shards: int) -> None:
    """Aligned, disjoint devices that exist; layouts that tile them; memory within what there is."""
    work = Workload(prompts_per_step=256, max_staleness=staleness, optimizer_shards=shards)
    asked = problem(devices, shape, strategies=STRATEGIES, work=work, top=50)
    try:
        outcome = search(asked)
    except ConfigError:
        return
    for candidate in outcome.candidates:
        check(asked, candidate)


def check(asked: Problem, candidate: Candidate) -> None:
    taken: list[int] = []
    for part, start in zip(candidate.sets, candidate.starts(), strict=True):
        width = min(part.devices, 8)
        assert start % width == 0 if part.devices < 8 else start % 8 == 0, "blocks are aligned"
        taken += range(start, start + part.devices)
        assert part.peak <= asked.cluster.pools[0][0].memory * asked.fit.usable
        assert sum(part.items.values()) == pytest.approx(part.peak)
        for member in part.members:
            layout = part.layouts[member.unit.name]
            assert layout.devices == member.block.count
            rows = asked.work.samples // asked.work.minibatches
            assert not member.unit.trains or layout.dp <= rows
            assert layout.tp <= 8
    assert len(taken) == len(set(taken)), "sets share no device"
    assert max(taken) < asked.cluster.devices
    assert candidate.step <= candidate.alone * (1 + 1e-9)


def test_rejections_carry_both_numbers() -> None:
    outcome = search(problem(8, "llama-13b", strategies=("colocate", "standalone", "separation", "async")))
    reasons = {refused.strategy: refused.reason for refused in outcome.refused}
    assert reasons["standalone"] == "its 4 sets need 10 devices, have 8"
    assert "lookahead = 0" in reasons["async"]
    with pytest.raises(ConfigError, match=r"colocate: \w+ needs [\d.]+ of 73.6 GiB of device memory; with offloading"):
        search(problem(8, "llama-34b"))


def test_m3_budgets_are_per_set() -> None:
    """verl 7795: one memory fraction for two pools. Here generation and training pools each have their own peak, and
    the cache is what the engines' own devices have left."""
    work = Workload(prompts_per_step=256, max_staleness=2)
    best = search(problem(16, "llama-7b", roles=("policy",), strategies=("async",), work=work)).candidates[0]
    engine, trainer = best.sets
    assert set(engine.items) == {"rollout weights", "rollout kv cache"}
    assert not any("rollout" in name for name in trainer.items)
    assert engine.peak != trainer.peak


def test_m4_host_memory_is_a_budget() -> None:
    """OpenRLHF 1013, slime 1851: offloading counts 2.25 host bytes per byte; what does not fit is refused before."""
    asked = problem(8, "llama-13b", strategies=("colocate",))
    offloaded = search(asked).candidates[0].sets[0]
    assert offloaded.offloads
    limit = NODES["A100"].host_gib * 0.9 * (1 << 30)
    assert 0 < offloaded.host <= limit
    poor = changed(NODES["A100"], host_gib=64)
    assert not search(replace(asked, cluster=Cluster(((poor, 8),)))).candidates[0].sets[0].offloads
    small = changed(poor, memory_gib=64)
    with pytest.raises(ConfigError, match=r"with offloading, it needs [\d.]+ of 57.6 GiB of host memory on a node"):
        search(replace(asked, cluster=Cluster(((small, 8),))))


def test_pools_of_different_devices() -> None:
    """No set straddles two pools, and the generation pool goes where generating is cheap."""
    work = Workload(
        prompts_per_step=64,
        answers_per_prompt=8,
        prompt_tokens=512,
        response=Lengths(mean=4000, cv=0.5, max=16000),
        max_staleness=2,
    )
    asked = replace(
        problem(8, "qwen2.5-7b", roles=("policy",), strategies=("async",), work=work),
        cluster=Cluster(((NODES["H800"], 16), (NODES["H20"], 16))),
        by_price=True,
    )
    best = search(asked).candidates[0]
    assert [part.members[0].block.pool for part in best.sets] == [1, 0]
    assert best.price == pytest.approx(
        best.step * sum(p.devices * p.members[0].block.node.price for p in best.sets) / 3600
    )


# ---- the schedule
@settings(max_examples=30, deadline=None)
@given(generate=st.floats(0.1, 10), train=st.floats(0.1, 10), sync=st.floats(0, 1), lookahead=st.integers(0, 4))
def test_two_pools_scheduled_as_the_closed_form_says(
    generate: float, train: float, sync: float, lookahead: int
) -> None:
    tasks = [
        Task("generate", generate, ("a",), (("sync", lookahead + 1),)),
        Task("train", train, ("b",), (("generate", 0), ("train", 1))),
        Task("sync", sync, ("b",), (("train", 0), ("sync", 1))),
    ]
    found = schedule(tasks, 40)
    loop = (generate + train + sync) / (lookahead + 1)
    assert found.step == pytest.approx(max(generate, train + sync, loop), rel=0.03)
    assert found.step >= max(generate, train + sync, loop) * (1 - 1e-9)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_candidates_scheduled_close_to_their_closed_form(staleness: int) -> None:
    work = Workload(prompts_per_step=256, minibatches=2, max_staleness=staleness, response=Lengths(mean=512, cv=0.5))
    asked = problem(32, "llama-7b", strategies=tuple(s for s in STRATEGIES if s != "auto"), work=work)
    for candidate in search(asked).best_of.values():
        times = schedule(tasks_of(candidate, work.ahead, reward_latency(asked)))
        assert times.step == pytest.approx(candidate.step, rel=0.25), candidate.strategy.label
        assert all(0 <= share <= 1 + 1e-9 for share in times.busy.values())


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("staleness", "strategy"), [(0, "colocate"), (1, "async"), (4, "async"), (2, "colocate")])
def test_closed_form_against_the_simulator(staleness: int, strategy: str, cv: float) -> None:
    """The search ranks by a closed form; the simulator, on the ledger, is the better model. They differ most where one
    train step ahead is just enough or just too little."""
    work = Workload(
        prompts_per_step=64,
        answers_per_prompt=8,
        prompt_tokens=512,
        response=Lengths(mean=2000, cv=cv, max=16000),
        max_staleness=staleness,
    )
    asked = problem(32, "qwen2.5-7b", roles=("policy", "reference"), node="H20", strategies=(strategy,), work=work)
    best = search(asked).candidates[0]
    assert rehearse(asked, best).step == pytest.approx(best.step, rel=0.3)


def test_flattening_is_refused_with_both_numbers() -> None:
    outcome = search(problem(16, "llama-13b", strategies=("flattening", "colocate")))
    (refused,) = outcome.refused
    found = re.search(r"16 devices shard are gathered for every token: (\d+) ms, and (\d+) ms with", refused.reason)
    assert found is not None
    assert int(found[1]) > 20 * int(found[2])


def test_alternating_keeps_the_layouts_that_were_asked_for() -> None:
    fixed = {"rollout": (2, 2, 8)}
    best = search(problem(8, "llama-7b", strategies=("alternating",), fixed=fixed)).best_of["alternating"]
    for name in ("rollout", "policy"):
        assert (best.sets[0].layouts[name].tp, best.sets[0].layouts[name].pp) == (2, 2)
    with pytest.raises(ConfigError, match="on exactly 3 devices, as layouts.rollout says, does not tile 16"):
        search(problem(16, "llama-7b", strategies=("alternating",), fixed={"rollout": (1, 1, 3)}))
    both = {"rollout": (2, 1, 0), "policy": (4, 1, 0)}
    with pytest.raises(ConfigError, match=r"rollout says tensor_parallel 2 .*layouts.policy says tensor_parallel 4"):
        search(problem(8, "llama-7b", strategies=("alternating",), fixed=both))


def test_no_more_micro_batches_wait_than_there_are() -> None:
    """A stage keeps activations of as many micro-batches as there are stages, unless a batch has fewer."""
    spec = model("llama-7b")
    work = Workload(prompts_per_step=16, micro_batch_tokens=1)  # 16 micro-batches of one sequence

    def kept(pp: int, dp: int = 1) -> float:
        return pass_memory(spec, Layout(1, pp, dp), work)["activations"]

    one, layer = kept(1), 34 * work.mean_length * spec.shape.hidden
    assert kept(16) - layer == pytest.approx((one - layer) / 32 * 2 * 16)
    assert kept(16, dp=4) - layer == pytest.approx((one - layer) / 32 * 2 * 4)
