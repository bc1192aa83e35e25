"""Options of the megatron engines. Torch-free, so that a launcher can read them before any engine process has started.

Bounds and defaults are those of the configuration's tables.
"""

from __future__ import annotations

from asyncrlhf.backends.torch.options import INPROC, OptimizerOptions
from asyncrlhf.config.bounds import (
    Cap,
    Correction,
    Count,
    Device,
    Dtype,
    Head,
    Positive,
    PositiveAmount,
    Recompute,
    Table,
)

__all__ = ("MegatronOptions", "OptimizerOptions")


class MegatronOptions(Table, frozen=True, kw_only=True):
    """A model being trained by tensor * context * data * pipeline parallel ranks. With dtype "bfloat16" the model's
    parameters have that type, and the optimizer keeps main parameters in float32."""

    model: str
    """Directory of a Hugging Face causal language model."""
    temperature: PositiveAmount = 1.0
    """Sampling temperature of the run: log-probs are those of logits / temperature."""
    dtype: Dtype = "float32"
    device: Device = "auto"
    """"cpu" for machines without CUDA, where it has to be said."""
    micro_batch_tokens: Positive = 2048
    """Tokens of one packed forward, at most; a longer row goes alone."""
    head: Head = "lm"
    """"value": a scalar head instead of the output embedding; it starts at 0 if the directory has none."""
    new_head: bool = False
    """Start the value head at 0 even if the directory has one."""
    tensor_parallel: Positive = 1
    pipeline_parallel: Positive = 1
    virtual_pipeline: Positive = 1
    """Model chunks per pipeline stage."""
    data_parallel: Positive = 1
    context_parallel: Positive = 1
    expert_parallel: Positive = 1
    """Ranks that share the experts of a layer, of those that have the same layers."""
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    optimizer: OptimizerOptions = OptimizerOptions()
    max_response_tokens: Count = 0
    """Longest answer of the run; the denominator of losses with reduction "constant" (0: such losses are refused)."""
    off_policy: Correction = "none"
    """Off-policy correction that fills `anchor_logprobs` and `weight` where the batch does not bring them."""
    off_policy_cap: Cap = 2.0
    transport: str = INPROC
    """Import path of the WeightTransfer that publishes the weights."""
    put_replicas: bool = False
    """Every rank puts all that it has, also what others put: engines on its device take it from there."""

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.context_parallel * self.data_parallel * self.pipeline_parallel
