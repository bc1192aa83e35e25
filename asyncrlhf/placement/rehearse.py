"""A candidate run through the simulator: what staleness, tails and slow rewards make of its stage times.

Large batches are scaled down together with the engines: B and the number of engines by the same factor.
"""

from __future__ import annotations

from random import Random

from asyncrlhf.flow.ledger import LedgerRules
from asyncrlhf.placement.decode import decode_step_seconds
from asyncrlhf.placement.pipeline import Pipeline, Simulated
from asyncrlhf.placement.plan import Candidate, Problem
from asyncrlhf.placement.simulate import simulate
from asyncrlhf.placement.workload import lognormal_quantiles

__all__ = ("pipeline_of", "rehearse")

ANSWERS = 512
"""Answers per simulated train step at most."""
STEPS = 24
QUANTILES = 1024


def rehearse(problem: Problem, candidate: Candidate, steps: int = STEPS) -> Simulated:
    """The candidate's steady state, simulated."""
    return simulate(pipeline_of(problem, candidate), steps)


def pipeline_of(problem: Problem, candidate: Candidate, seed: int = 0) -> Pipeline:
    """Stage times of the cost model around the ledger. Models that read on devices of their own take rollouts one after
    the other; those on the trainer's devices read before it trains, those on the engines' slow these down."""
    work, fit = problem.work, problem.fit
    rollout = next(part for part in candidate.sets if "rollout" in part.stages)
    trained = next(name for name, model in problem.models.items() if model.role == "policy")
    trainer = next(part for part in candidate.sets if trained in part.stages)
    layout, node = rollout.layouts["rollout"], rollout.members[0].block.node
    spec = problem.models[trained]
    scale = max(1.0, work.samples / ANSWERS)
    engines = max(1, round(layout.dp / scale))
    prompts = max(1, round(work.prompts_per_step * engines / layout.dp))
    context = work.prompt_tokens + work.mean_response / 2
    table: dict[int, float] = {}

    def decode(active: int) -> float:
        if active not in table:
            table[active] = decode_step_seconds(spec, node, layout, active, context, fit)
        return table[active]

    lengths = work.response.quantiles(QUANTILES)
    latencies = lognormal_quantiles(work.reward_seconds, work.reward_cv, QUANTILES) if work.reward_seconds else (0.0,)
    per_token = spec.shape.kv_bytes / layout.model * max(1.0, layout.tp / spec.shape.kv_heads)
    cache = rollout.items.get("rollout kv cache")
    held = work.samples if cache is None else int(cache / (per_token * work.mean_length))
    prefill = work.prompt_tokens * spec.forward_flops(work.prompt_tokens) / layout.model
    answers = prompts * work.answers_per_prompt
    shared = rollout is trainer
    beside = 0.0 if shared else rollout.prepare * engines / answers
    train = max(part.train for part in candidate.sets) + trainer.prepare + (0.0 if shared else trainer.switch)
    mean = work.mean_length * answers

    def seconds(random: Random, tokens: int) -> float:
        """In proportion to the tokens of the batch, prompts included."""
        return train * (tokens + work.prompt_tokens * answers) / mean

    def reward(random: Random) -> float:
        """The slowest of a rollout's answers, all scored at once."""
        draws = (latencies[int(random.random() * len(latencies))] for _ in range(work.answers_per_prompt))
        return max(draws) if len(latencies) > 1 else 0.0

    exposed = candidate.sync.exposed if work.ahead else candidate.sync.seconds
    return Pipeline(
        rules=LedgerRules(
            prompts_per_step=prompts,
            answers_per_prompt=work.answers_per_prompt,
            max_staleness=work.max_staleness,
            lookahead=work.ahead,
        ),
        engines=engines,
        slots=max(1, held),
        length=lambda random: lengths[int(random.random() * QUANTILES)],
        decode=decode,
        prefill=prefill / (node.flops * fit.mfu_forward) + beside,
        reward=reward,
        score=[part.prepare / prompts for part in candidate.sets if part.prepare and part not in (rollout, trainer)],
        train=seconds,
        publish=exposed if shared else candidate.sync.seconds,
        export=exposed,
        load=exposed,
        overlap=work.ahead > 0,
        mode=work.publish,
        shared=shared,
        to_train=trainer.switch / 2,
        to_generate=trainer.switch / 2,
        seed=seed,
    )
