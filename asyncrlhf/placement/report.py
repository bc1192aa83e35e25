"""A plan in words, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrlhf.placement.cluster import GIB
from asyncrlhf.placement.decode import longest_answer_seconds
from asyncrlhf.placement.pipeline import Simulated
from asyncrlhf.placement.plan import Candidate, Outcome, Problem
from asyncrlhf.placement.rehearse import rehearse
from asyncrlhf.placement.schedule import Schedule, schedule, tasks_of
from asyncrlhf.placement.setplan import SetPlan
from asyncrlhf.placement.steps import speedup_bound
from asyncrlhf.placement.value import reward_latency

__all__ = ("as_json", "as_text", "scheduled")


def scheduled(problem: Problem, candidate: Candidate) -> Schedule:
    """The candidate's stages on a time line."""
    return schedule(tasks_of(candidate, problem.work.ahead, reward_latency(problem)))


def as_text(outcome: Outcome, *, explain: bool = False) -> str:
    """What fits, best first, and why the rest does not. `explain`: details of every placement, not of the best only."""
    return "\n".join([*_given(outcome), *_found(outcome, explain)])


def _given(outcome: Outcome) -> Iterator[str]:
    problem = outcome.problem
    work = problem.work
    pools = " + ".join(
        f"{count} x {node.memory_gib:g} GiB, {node.tflops:g} TFLOP/s, {node.devices} to a node"
        for node, count in problem.cluster.pools
    )
    yield f"devices    {pools}"
    for name, model in problem.models.items():
        shape = model.shape
        active = f" ({shape.active_params / 1e9:.1f}e9 active)" if shape.experts else ""
        kv = f", {shape.kv_bytes / 1024:.0f} KiB of KV cache per token" if model.role == "policy" else ""
        yield f"{name:<11}{shape.name}: {model.params / 1e9:.2f}e9 parameters{active}{kv}"
    yield (
        f"train step {work.prompts_per_step} prompts x {work.answers_per_prompt} answers of {work.prompt_tokens} + "
        f"{work.mean_response:.0f} tokens, {work.minibatches} optimizer steps; max_staleness {work.max_staleness}, "
        f"lookahead {work.ahead}"
    )
    how = "exhaustive" if outcome.exhaustive else "a coarse grid, then refined"
    yield f"compared   {outcome.examined:,} placements after pruning ({how})"
    yield f"seconds    {_origin(problem)}"


def _origin(problem: Problem) -> str:
    """Where the seconds come from, and how to have better ones."""
    timed = [name for name in problem.models if name in problem.fit.measured]
    timed += ["rollout"] if "rollout" in problem.fit.measured else []
    known = f"timed: {', '.join(timed)}; the rest is estimated" if timed else "all estimated"
    return (
        f"{known} by formula (data-sheet numbers, assumed efficiencies), to compare placements, not as a promise. To "
        "calibrate, run some 20 train steps, and give stage times as [calibration.measured], or have plan --calibrate "
        "RUN_DIR predict other settings of that run"
    )


def _found(outcome: Outcome, explain: bool) -> Iterator[str]:
    best = outcome.candidates[0]
    for i, candidate in enumerate(outcome.candidates):
        yield ""
        ratio = "" if i == 0 else f", {candidate.step / best.step:.2f} x the best"
        yield f"{i + 1}. {candidate.strategy.label}: {candidate.step:.1f} s per train step{ratio}"
        if i == 0 or explain:
            yield from ("   " + line for line in _details(outcome.problem, candidate))
        if i == 0:
            yield f"   {_rehearsal(rehearse(outcome.problem, candidate))}"
    yield ""
    yield "strategies, best placement of each"
    for name, candidate in sorted(outcome.best_of.items(), key=lambda item: item[1].step):
        yield (
            f"   {name:<13}{candidate.step:9.1f} s   {candidate.step / best.step:5.2f} x the best; bound by "
            f"{candidate.bottleneck}"
        )
    seen: set[str] = set()
    for refused in outcome.refused:
        if not refused.strategy.startswith("auto ") and refused.strategy not in outcome.best_of:
            seen.add(refused.strategy)
            yield f"   {refused.strategy:<13}    no: {refused.reason}"
    partitions = [refused for refused in outcome.refused if refused.strategy.startswith("auto ")]
    if partitions and explain:
        yield f"partitions without a place: {len(partitions)}"
        yield from (f"   {refused.strategy}: {refused.reason}" for refused in partitions)


def _details(problem: Problem, candidate: Candidate) -> Iterator[str]:
    stages = _stages(problem, candidate)
    yield ", ".join(f"{name} {seconds:.2f} s" for name, seconds in stages.items() if seconds)
    gained = candidate.alone / candidate.step
    bound = speedup_bound([s for s in (stages["generation"], _training_side(stages)) if s] or [1.0])
    yield (
        f"bound by {candidate.bottleneck}; {gained:.2f} x as fast as the same stages in sequence (overlapping two "
        f"stages of these lengths gains {bound:.2f} x at most, the rest is engines kept full)"
        if problem.work.ahead
        else f"bound by {candidate.bottleneck}; nothing overlaps; two stages of these lengths could gain {bound:.2f} x"
    )
    times = scheduled(problem, candidate)
    for i, (part, start) in enumerate(zip(candidate.sets, candidate.starts(), strict=True)):
        busy = max(share for place, share in times.busy.items() if place.split()[1] == str(i))
        pool = f"pool {part.members[0].block.pool}, " if len(problem.cluster.pools) > 1 else ""
        yield (f"devices {pool}{start}-{start + part.devices - 1}: busy {busy:.0%}, bubble {1 - busy:.0%}")
        for member in part.members:
            name = member.unit.name
            where = f" on {member.block.count} of them" if member.block.count < part.devices else ""
            floor = 0.0
            if member.unit.generates:
                node, layout = member.block.node, part.layouts[name]
                floor = longest_answer_seconds(member.unit.model, node, layout, problem.work, problem.fit)
            yield f"  {name}: {part.layouts[name]}{where}, {_seconds(part, name, floor)}"
        yield from ("  " + line for line in _memory(problem, part))


def _rehearsal(found: Simulated) -> str:
    return (
        f"simulated on the ledger: {found.step:.1f} s per train step, token lag {found.lag_mean:.1f} on average and "
        f"{found.lag_max} at most, {found.masked:.1%} over age, {found.dropped:.1%} dropped; generation busy "
        f"{found.generate:.0%}, training {found.train:.0%}, a lease lasts {found.lease:.1f} s"
    )


def _training_side(stages: dict[str, float]) -> float:
    return stages["preparation"] + stages["training"]


def _stages(problem: Problem, candidate: Candidate) -> dict[str, float]:
    sets = candidate.sets
    return {
        "generation": max(part.sampling for part in sets),
        "preparation": max(part.prepare for part in sets),
        "training": max(part.train for part in sets),
        "switches": max(part.switch for part in sets),
        "weight sync": candidate.sync.seconds,
        "exposed sync": candidate.sync.exposed,
        "reward latency": reward_latency(problem),
    }


def _seconds(part: SetPlan, name: str, floor: float) -> str:
    stage = part.stages[name]
    found = {"generates": stage.generate, "reads": stage.prepare, "trains": stage.train}
    words = [f"{verb} {seconds:.2f} s" for verb, seconds in found.items() if seconds]
    if name == "rollout" and part.stream < stage.generate:
        words.append(f"{part.stream:.2f} s when kept full")
    if floor:
        words.append(f"the longest answer alone {floor:.2f} s")
    if name == "rollout" and part.waves > 1.0:
        words.append(f"{part.waves:.1f} x as many answers as the cache holds")
    return ", ".join(words)


def _memory(problem: Problem, part: SetPlan) -> Iterator[str]:
    node = part.members[0].block.node
    usable = node.memory * problem.fit.usable
    items = ", ".join(f"{name} {size / GIB:.1f}" for name, size in part.items.items() if size / GIB >= 0.05)
    yield f"memory {part.peak / GIB:.1f} of {usable / GIB:.1f} GiB, fullest while {part.peak_at} computes: {items}"
    if part.offloads:
        limit = node.host_gib * problem.fit.host_usable
        yield f"host memory {part.host / GIB:.0f} of {limit:.0f} GiB on a node: sleeping models move there"


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The same as plain values: seconds, bytes."""
    return {
        "devices": outcome.problem.cluster.devices,
        "examined": outcome.examined,
        "exhaustive": outcome.exhaustive,
        "simulated": _simulated(rehearse(outcome.problem, outcome.candidates[0])),
        "plans": [_candidate(outcome.problem, candidate) for candidate in outcome.candidates],
        "strategies": {name: candidate.step for name, candidate in outcome.best_of.items()},
        "rejected": [{"strategy": refused.strategy, "reason": refused.reason} for refused in outcome.refused],
    }


def _simulated(found: Simulated) -> dict[str, Any]:
    return {
        "step_s": found.step,
        "token_lag_mean": found.lag_mean,
        "token_lag_max": found.lag_max,
        "masked_fraction": found.masked,
        "dropped_fraction": found.dropped,
        "busy_generate": found.generate,
        "busy_train": found.train,
        "lease_s": found.lease,
    }


def _candidate(problem: Problem, candidate: Candidate) -> dict[str, Any]:
    times = scheduled(problem, candidate)
    stages = _stages(problem, candidate)
    groups: dict[str, Any] = {}
    for part, start in zip(candidate.sets, candidate.starts(), strict=True):
        for member in part.members:
            layout = part.layouts[member.unit.name]
            groups[member.unit.name] = {
                "pool": member.block.pool,
                "first_device": start,
                "devices": member.block.count,
                "tensor_parallel": layout.tp,
                "pipeline_parallel": layout.pp,
                "data_parallel": layout.dp,
                "expert_parallel": layout.ep,
            }
    return {
        "strategy": candidate.strategy.label,
        "step_s": candidate.step,
        "scheduled_step_s": times.step,
        "sequential_step_s": candidate.alone,
        "bottleneck": candidate.bottleneck,
        "speedup_bound": speedup_bound([stages["generation"], max(_training_side(stages), 1e-12)]),
        "price": candidate.price or None,
        "stages_s": stages,
        "groups": groups,
        "sets": [
            {
                "units": [member.unit.name for member in part.members],
                "devices": part.devices,
                "bubble": 1 - max(share for place, share in times.busy.items() if place.split()[1] == str(i)),
                "memory": {"peak": part.peak, "at": part.peak_at, "items": dict(part.items)},
                "host_memory": part.host,
            }
            for i, part in enumerate(candidate.sets)
        ],
    }
