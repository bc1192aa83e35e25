"""Options of the torch engines. Torch-free, so that a launcher can read them before any engine process has started.

Bounds and defaults are those of the configuration's tables.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from asyncrlhf.config.bounds import (
    Attention,
    Cap,
    Correction,
    Count,
    Device,
    Dtype,
    Head,
    Layout,
    Positive,
    PositiveAmount,
    Sharding,
    Table,
)
from asyncrlhf.config.groups import OptimizerTable

__all__ = (
    "Attention",
    "Device",
    "Dtype",
    "OptimizerOptions",
    "SamplerOptions",
    "ScorerOptions",
    "ScratchOptions",
    "ShadowOptions",
    "TrainerOptions",
)

INPROC = "asyncrlhf.weights.inproc:InprocTransfer"


class OptimizerOptions(OptimizerTable, frozen=True, kw_only=True):
    """AdamW and its schedule, which is a pure function of the train step: step t < warmup_steps runs at (t + 1) /
    warmup_steps of the peak, and the last one, t = total_steps - 1, at exactly min_ratio of it. Matrices are decayed;
    biases and norms never are."""

    total_steps: Count = 0
    """Train steps of the run. Needed by "linear" and "cosine"."""

    def __post_init__(self) -> None:
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"optimizer.schedule = {self.schedule!r} needs total_steps ({self.total_steps}) above warmup_steps "
                f"({self.warmup_steps})"
            )


class ScorerOptions(Table, frozen=True, kw_only=True):
    """A frozen model that reads answers."""

    model: str
    """Directory of a Hugging Face causal language model."""
    temperature: PositiveAmount = 1.0
    """Sampling temperature of the run: log-probs are those of logits / temperature."""
    dtype: Dtype = "float32"
    device: Device = "auto"
    micro_batch_tokens: Positive = 2048
    """Tokens of one forward, padding included; a longer row goes alone."""
    micro_batch_rows: Count = 0
    """Rows of one forward instead, if above 0."""
    layout: Layout = "padded"
    """"padded": rows of similar length side by side. "packed": rows end to end in one, for flash attention on GPUs.
    "shared": answers to one prompt behind a single copy of it where that is less work, which it is for short rows and
    for prompts that are long against their answers."""
    attention: Attention = "auto"
    """"flash_attention_2" needs layout "packed", dtype "bfloat16", a GPU and flash-attn; "auto" takes it where it
    has them, and torch's own ("sdpa") elsewhere."""
    head: Head = "lm"
    """"value": a scalar head instead of the output embedding (a critic, a reward model). One to be trained starts at 0
    if the directory has none."""


class ShadowOptions(ScorerOptions, frozen=True, kw_only=True):
    """A copy of a critic."""

    transport: str = INPROC
    """Import path of the WeightTransfer that brings the weights."""


class TrainerOptions(ScorerOptions, frozen=True, kw_only=True):
    """A model being trained. With dtype "bfloat16" the master weights stay float32 and the forward autocasts."""

    data_parallel: Positive = 1
    """Ranks that train the model together."""
    sharding: Sharding = "none"
    """"none": each rank keeps all of the model and its optimizer. "full": each keeps a part of every parameter, its
    gradient and its moments."""
    new_head: bool = False
    """Start the value head at 0 even if the directory has one."""
    gradient_checkpointing: bool = False
    optimizer: OptimizerOptions = OptimizerOptions()
    max_response_tokens: Count = 0
    """Longest answer of the run; the denominator of losses with reduction "constant" (0: such losses are refused)."""
    off_policy: Correction = "none"
    """Off-policy correction that fills `anchor_logprobs` and `weight` where the batch does not bring them."""
    off_policy_cap: Cap = 2.0
    transport: str = INPROC
    """Import path of the WeightTransfer that publishes the weights."""


class SamplerOptions(Table, frozen=True, kw_only=True):
    """A sampler with continuous batching."""

    model: str
    """Directory of a Hugging Face causal language model."""
    dtype: Dtype = "float32"
    device: Device = "auto"
    slots: Positive = 256
    """Requests decoded at once; the others wait."""
    max_sequence_tokens: Positive = 2048
    """Longest prompt and answer together; the KV cache holds slots * max_sequence_tokens tokens."""
    prefill_tokens: Positive = 8192
    """Tokens of one prefill forward, padding included; a longer row goes alone."""
    version: Annotated[int, Meta(ge=-1)] = -1
    """Policy version of the weights in `model`; -1: unknown, so requests are rejected until the first commit."""
    transport: str = INPROC
    """Import path of the WeightTransfer that brings the weights."""


class ScratchOptions(Table, frozen=True, kw_only=True):
    """A new, randomly initialised model with a character or word tokenizer; see `scratch.write_model`."""

    model_type: str = "qwen2"
    """Architecture, by its Hugging Face `model_type`."""
    characters: str = ""
    """Every character the model can read; id 0 is <eos> (also the padding), 1 is <unk>, then these in order."""
    words: tuple[str, ...] = ()
    """Instead of `characters`: every word it can read, where words are what white space separates."""
    config: dict[str, Any]
    """Fields of the architecture's Hugging Face configuration, e.g. {"hidden_size": 128, "num_hidden_layers": 3}."""
    seed: int = 0
    initializer: Literal["scaled", "huggingface"] = "scaled"
    """"scaled" learns faster: matrices N(0, 0.64 / fan in), residual outputs divided by sqrt(2 layers), biases 0."""
    chat_template: str = ""
