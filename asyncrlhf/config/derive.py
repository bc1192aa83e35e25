"""What follows from a configuration: sizes, bounds and warnings, as `asyncrlhf check` prints them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from asyncrlhf.config.groups import Rules
from asyncrlhf.config.schema import Config

__all__ = ("Derived", "derive", "one_evaluation", "overlaps", "transport_line")

REWARD_TIMEOUT: float = next(field.default for field in msgspec.structs.fields(Rules) if field.name == "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """Facts nobody sets. Example: B = 4, n = 8, K = 4, D = 2 give 32 samples a step and 12 live rollouts."""

    samples_per_step: int
    """B * n."""
    train_steps: int | None
    """None: until the data ends."""
    live_window: int
    """B * (D + 1): rollouts running, being scored or ready, at most; also the generate() workers."""
    queue_capacity: int
    """B * (D + 1): with no more than that live, a put never blocks."""
    lookahead: int
    """D, in versions; typical lags follow it."""
    worst_lag: int
    """K, in versions."""
    worst_lag_of: str
    """What K bounds: "token", or "rollout" with at_deadline = wait or drop."""
    publish_every: int
    """Train steps between two publishes that move bytes."""
    publish_overlap: bool
    """Whether the next train step goes on meanwhile."""
    max_filtered: int
    """Prompts in a row without a ready one that end the run."""
    min_answers: int
    """Answers that must survive for a rollout to train."""
    warnings: tuple[str, ...]
    """What is legal and probably not meant."""

    def lines(self) -> list[str]:
        """The facts, then the warnings, one a line."""
        steps = "until the data ends" if self.train_steps is None else f"{self.train_steps} train steps"
        typical = f"about {self.lookahead}" if self.lookahead else "0"
        every = "every train step" if self.publish_every == 1 else f"every {self.publish_every} train steps"
        return [
            f"samples per train step   {self.samples_per_step}, {steps}",
            f"live rollouts            {self.live_window} at most (queue capacity {self.queue_capacity})",
            f"{self.worst_lag_of} lag".ljust(25)
            + f"{typical} typically, {self.worst_lag} at worst, in policy versions",
            f"weights published        {every}{', while the next one trains' if self.publish_overlap else ''}",
            f"a rollout trains with    {self.min_answers} answer{'s' if self.min_answers > 1 else ''} or more",
            *(f"warning: {warning}" for warning in self.warnings),
        ]


def overlaps(config: Config, in_turn: bool) -> bool:
    """Whether training goes on while weights are published: `publish.overlap`, or what follows where it is left out.
    `in_turn`: a trained model and engines that follow share devices in turn."""
    return config.publish.overlap is not False and bool(config.lookahead) and not in_turn


def one_evaluation(config: Config) -> str:
    """Why there will be only the evaluation before any train step, if so."""
    every, steps = config.evaluation.every, config.train_steps
    if not every or steps is None or every <= steps:
        return ""
    return (
        f"evaluation.every = {every} with train_steps = {steps}: only version 0 is evaluated, before any train step; "
        f"set the first to {steps} or less"
    )


def transport_line(config: Config) -> str:
    """How weights come to the engines that follow, and why so."""
    chosen = config.publish.transport
    if chosen != "auto":
        return "weights go by".ljust(25) + f"{chosen}, as publish.transport says"
    ways = {
        "inproc": "memory of this process, which all engines are in",
        "local": "shared, since all engines are processes of this machine",
        "ray": "shared to engines on the trainer's machine, collective to those on another",
    }
    return "weights go by".ljust(25) + f'{ways[config.runtime]} (publish.transport = "auto")'


def derive(config: Config, *, in_turn: bool = False) -> Derived:
    """Pure: neither files nor devices are looked at. `in_turn`: as of `overlaps`."""
    ahead, batch = config.lookahead or 0, config.prompts_per_step
    limits = config.limits
    return Derived(
        samples_per_step=batch * config.answers_per_prompt,
        train_steps=config.train_steps,
        live_window=batch * (ahead + 1),
        queue_capacity=batch * (ahead + 1),
        lookahead=ahead,
        worst_lag=config.max_staleness,
        worst_lag_of="token" if config.at_deadline == "mask" else "rollout",
        publish_every=config.publish.every,
        publish_overlap=overlaps(config, in_turn),
        max_filtered=20 * batch if limits.max_filtered is None else limits.max_filtered,
        min_answers=config.answers_per_prompt if limits.min_answers is None else limits.min_answers,
        warnings=tuple(_warnings(config, ahead)),
    )


def _warnings(config: Config, ahead: int) -> Iterator[str]:
    bound, every, steps = config.max_staleness, config.publish.every, config.train_steps
    if 0 < bound == ahead:
        yield (
            f"max_staleness = lookahead = {bound}: long answers and slow rewards then cost 17-38 % of the tokens, "
            f"masked or dropped; choose max_staleness >= 2 * lookahead = {2 * ahead}"
        )
    if 0 < ahead < every:
        yield (
            f"publish.every = {every} is lookahead + 1: legal, but almost nothing overlaps; set publish.every to "
            f"{ahead} or less, or lookahead to {every} or more"
        )
    if bound and not ahead:
        yield f"lookahead = 0: generation and training never overlap, so max_staleness = {bound} has nothing to bound"
    if bound and config.off_policy == "none":
        yield f'off_policy = "none": tokens up to {bound} versions old train uncorrected; "decoupled" corrects them'
    if config.answers_per_prompt == 1 and config.data.response is None and "critic" not in config.groups:
        yield "answers_per_prompt = 1: advantages within a prompt are all 0; without a critic, use 2 or more"
    for name, table in config.groups.items():
        ranks, rows = table.get("data_parallel", 1), config.prompts_per_step * config.answers_per_prompt
        if isinstance(ranks, int) and ranks > rows:
            yield (
                f"groups.{name}.data_parallel = {ranks}, and a train step has {rows} samples: {ranks - rows} ranks or "
                "more have nothing to do"
            )
    if steps is not None and config.checkpoint.every >= steps:
        yield f"checkpoint.every = {config.checkpoint.every} with train_steps = {steps}: only the end is saved"
    if few := one_evaluation(config):
        yield few
    if not config.limits.lease_timeout:
        yield "limits.lease_timeout = 0: a lost answer is noticed only when the run stalls"
    for name, table in config.groups.items():
        timeout, patience = table.get("timeout", REWARD_TIMEOUT), config.limits.lease_timeout
        if "function" in table and patience and isinstance(timeout, int | float) and timeout >= patience:
            yield (
                f"groups.{name}.timeout = {timeout:g} s lets a reward take longer than limits.lease_timeout = "
                f"{patience:g} s, after which its prompt counts as lost; raise the second above the first"
            )
