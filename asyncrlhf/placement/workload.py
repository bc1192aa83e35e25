"""What there is to do in one train step, and how long its answers are. Deterministic: lengths are quantiles."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist, fmean
from typing import Annotated, Literal

from msgspec import Meta, field

from asyncrlhf.config.bounds import Amount, Count, Positive, PositiveAmount, Table
from asyncrlhf.errors import ConfigError

__all__ = ("Lengths", "Workload", "lognormal_quantiles")


class Lengths(Table, frozen=True, kw_only=True):
    """Tokens of an answer: log-normal, cut at a maximum; or as observed."""

    mean: PositiveAmount = 1024.0
    """Before the cut."""
    cv: Amount = 0.0
    """Standard deviation over mean; 0: every answer has the same length."""
    max: Positive = 1_000_000
    """Where an answer is cut."""
    observed: list[Positive] = field(default_factory=list)
    """Lengths that were seen; replaces mean and cv."""

    def quantiles(self, count: int) -> tuple[int, ...]:
        """`count` lengths, shortest first, that stand for the distribution."""
        if self.observed:
            seen = sorted(self.observed)
            return tuple(min(self.max, seen[int((i + 0.5) * len(seen) / count)]) for i in range(count))
        return tuple(min(self.max, max(1, round(x))) for x in lognormal_quantiles(self.mean, self.cv, count))


@lru_cache(maxsize=256)
def lognormal_quantiles(mean: float, cv: float, count: int) -> tuple[float, ...]:
    """The middle of each of `count` equally likely parts of a log-normal distribution, smallest first."""
    if not cv:
        return (mean,) * count
    sigma = math.sqrt(math.log1p(cv * cv))
    normal = NormalDist(math.log(mean) - sigma * sigma / 2, sigma)
    return tuple(math.exp(normal.inv_cdf((i + 0.5) / count)) for i in range(count))


class Workload(Table, frozen=True, kw_only=True):
    """One train step. Example: 1024 prompts of 1024 tokens, one answer each, 8 optimizer steps: HybridFlow's."""

    prompts_per_step: Positive = 1024
    answers_per_prompt: Positive = 1
    prompt_tokens: Positive = 1024
    response: Lengths = Lengths()
    """Tokens of an answer."""
    minibatches: Positive = 1
    """Optimizer steps of each trained model in a train step."""
    micro_batch_tokens: Positive = 8192
    """Tokens of one forward and backward pass of one data-parallel rank; a longer sequence goes alone."""
    recompute: bool = True
    """Activations are recomputed in the backward pass."""
    recompute_logprobs: bool = False
    """The policy reads the batch once more before it trains (decoupled loss)."""
    max_staleness: Count = 0
    """K, in versions; 0: synchronous."""
    lookahead: Count | None = None
    """D <= K: train steps that generation runs ahead; left out: ceil(K / 2)."""
    reward_seconds: Amount = 0.0
    """Mean latency of a reward function, all calls concurrent; 0: instant, or a model in [models]."""
    reward_cv: Amount = 0.0
    """Standard deviation over mean of that latency (log-normal)."""
    publish: Literal["in_flight", "drain"] = "in_flight"
    """As [publish] mode: swap weights under running answers, or let them finish."""
    optimizer_shards: Annotated[int, Meta(ge=1, le=3)] = 1
    """What data parallelism shards (ZeRO): 1 optimizer state; 3 weights and gradients too."""
    offload: Literal["auto", "always", "never"] = "auto"
    """Whether units that sleep move to host memory; "auto": where their devices would else be full."""

    def __post_init__(self) -> None:
        if self.lookahead is not None and self.lookahead > self.max_staleness:
            raise ConfigError(
                f"lookahead = {self.lookahead} is above max_staleness = {self.max_staleness}; lower the first or raise "
                f"the second to {2 * self.lookahead}"
            )

    @property
    def ahead(self) -> int:
        """D."""
        return (self.max_staleness + 1) // 2 if self.lookahead is None else self.lookahead

    @property
    def samples(self) -> int:
        """Sequences in a train step."""
        return self.prompts_per_step * self.answers_per_prompt

    @property
    def mean_response(self) -> float:
        """After the cut."""
        return _mean(self.response.mean, self.response.cv, self.response.max, tuple(self.response.observed))

    @property
    def longest(self) -> tuple[float, float]:
        """Tokens of the longest answer to a prompt: mean, and standard deviation over mean."""
        seen = tuple(self.response.observed)
        return _longest(self.response.mean, self.response.cv, self.response.max, seen, self.answers_per_prompt)

    @property
    def window(self) -> float:
        """Batches that are decoded at once when generation runs ahead: of the D + 1 that may be live, up to half of
        one waits for the others, the more the longest answers differ."""
        return self.ahead + 1 - min(1.0, self.longest[1]) / 2

    @property
    def mean_length(self) -> float:
        """Prompt and answer."""
        return self.prompt_tokens + self.mean_response

    def micro_batches(self, rows: float) -> int:
        """Of `rows` sequences, as many as fit a micro-batch go together."""
        each = max(1, int(self.micro_batch_tokens // self.mean_length))
        return max(1, math.ceil(rows / each))


@lru_cache(maxsize=64)
def _longest(mean: float, cv: float, cut: int, observed: tuple[int, ...], answers: int) -> tuple[float, float]:
    """Of `answers` draws: a quantile is the longest when one draw is there and none beyond."""
    lengths = Lengths(mean=mean, cv=cv, max=cut, observed=list(observed)).quantiles(512)
    below = [(i / len(lengths)) ** answers for i in range(len(lengths) + 1)]
    weights = [after - before for before, after in pairwise(below)]
    first = sum(w * x for w, x in zip(weights, lengths, strict=True))
    second = sum(w * x * x for w, x in zip(weights, lengths, strict=True))
    return first, math.sqrt(max(0.0, second - first * first)) / first


@lru_cache(maxsize=64)
def _mean(mean: float, cv: float, cut: int, observed: tuple[int, ...]) -> float:
    return fmean(Lengths(mean=mean, cv=cv, max=cut, observed=list(observed)).quantiles(512))
