"""Options of the torch engines. Torch-free, so that a launcher can read them before any engine process has started."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

__all__ = (
    "Device",
    "Dtype",
    "OptimizerOptions",
    "SamplerOptions",
    "ScorerOptions",
    "ScratchOptions",
    "TrainerOptions",
)

Dtype = Literal["float32", "bfloat16"]
Device = Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")]
"""Where the engine computes; "auto" is the first GPU, or the CPU where there is none."""
Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]

INPROC = "asyncrlhf.weights.inproc:InprocTransfer"


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all options: immutable, and an unknown key is an error."""


class OptimizerOptions(_Options, frozen=True, kw_only=True):
    """AdamW and its schedule, which is a pure function of the train step."""

    learning_rate: Annotated[float, Meta(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]] = (0.9, 0.999)
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """Decoupled weight decay of matrices; biases and norms are never decayed."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Natural = 0
    """Train steps of linear warm-up; step t < warmup_steps runs at (t + 1) / warmup_steps of the peak."""
    total_steps: Natural = 0
    """Train steps of the run; the last one, t = total_steps - 1, runs at exactly min_ratio of the peak. Needed by
    "linear" and "cosine"."""
    min_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.1
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """Gradients are scaled down to this global norm."""

    def __post_init__(self) -> None:
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"optimizer.schedule = {self.schedule!r} needs total_steps ({self.total_steps}) above warmup_steps "
                f"({self.warmup_steps})"
            )


class ScorerOptions(_Options, frozen=True, kw_only=True):
    """A frozen model that reads answers."""

    model: str
    """Directory of a Hugging Face causal language model."""
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    """Sampling temperature of the run: log-probs are those of logits / temperature."""
    dtype: Dtype = "float32"
    device: Device = "auto"
    micro_batch_tokens: Positive = 1024
    """Tokens of one forward, padding included; a longer row goes alone."""
    micro_batch_rows: Natural = 0
    """Rows of one forward instead, if above 0."""
    layout: Literal["padded", "packed", "shared"] = "padded"
    """"padded": rows of similar length side by side. "packed": rows end to end in one, for flash attention on GPUs.
    "shared": answers to one prompt behind a single copy of it where that is less work, which it is for short rows and
    for prompts that are long against their answers."""


class TrainerOptions(ScorerOptions, frozen=True, kw_only=True):
    """A model being trained. With dtype "bfloat16" the master weights stay float32 and the forward autocasts."""

    head: Literal["lm", "value"] = "lm"
    """"value": a scalar head instead of the output embedding (a critic); it starts at 0 if the directory has none."""
    gradient_checkpointing: bool = False
    optimizer: OptimizerOptions = OptimizerOptions()
    max_response_tokens: Natural = 0
    """Longest answer of the run; the denominator of losses with reduction "constant" (0: such losses are refused)."""
    off_policy: Literal["none", "truncated_is", "masked_is", "decoupled"] = "none"
    """Off-policy correction that fills `anchor_logprobs` and `weight` where the batch does not bring them."""
    off_policy_cap: Annotated[float, Meta(ge=1)] = 2.0
    transport: str = INPROC
    """Import path of the WeightTransfer that publishes the weights."""


class SamplerOptions(_Options, frozen=True, kw_only=True):
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


class ScratchOptions(_Options, frozen=True, kw_only=True):
    """A new, randomly initialised model with a character tokenizer; see `scratch.write_model`."""

    model_type: str = "qwen2"
    """Architecture, by its Hugging Face `model_type`."""
    characters: str
    """Every character the model can read; id 0 is <eos> (also the padding), 1 is <unk>, then these in order."""
    config: dict[str, Any]
    """Fields of the architecture's Hugging Face configuration, e.g. {"hidden_size": 128, "num_hidden_layers": 3}."""
    seed: int = 0
    initializer: Literal["scaled", "huggingface"] = "scaled"
    """"scaled" learns faster: matrices N(0, 0.64 / fan in), residual outputs divided by sqrt(2 layers), biases 0."""
    chat_template: str = ""
