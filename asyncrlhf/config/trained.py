"""The tables of trained models (policy, critic), one Struct per backend. Torch-free."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import field

from asyncrlhf.config.bounds import (
    Amount,
    Attention,
    Count,
    Decay,
    Fraction,
    Head,
    Layout,
    Name,
    Positive,
    PositiveAmount,
    Recompute,
    Sharding,
    Table,
    require_import_path,
)
from asyncrlhf.config.compute import Compute, require_sizes
from asyncrlhf.errors import ConfigError

__all__ = (
    "MegatronCritic",
    "MegatronTrain",
    "OptimizerTable",
    "Scratch",
    "TorchCritic",
    "TorchTrain",
    "Trained",
)


class OptimizerTable(Table, frozen=True, kw_only=True):
    """AdamW and its schedule, which runs in train steps."""

    learning_rate: Amount = 1e-6
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: PositiveAmount = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Amount = 0.0
    """Decoupled weight decay; 0: none."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine fall until train_steps."""
    warmup_steps: Count = 0
    """Train steps over which the rate rises from 0; 0: none. Below train_steps unless the schedule is constant."""
    min_ratio: Fraction = 0.0
    """Where the schedule ends, as a share of learning_rate."""
    max_grad_norm: Amount = 1.0
    """Gradients are scaled down to this global norm; 0: never."""


class Scratch(Table, frozen=True, kw_only=True):
    """A small model with random weights, and one token per character or per word: exactly one of the two."""

    model_type: Name = "qwen2"
    """Hugging Face model type."""
    characters: Name | None = None
    """The alphabet; every character is one token, beside the special ones."""
    words: Name | None = None
    """Import path "module:function" of the list of words; text is split at white space, and every word is a token."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the Hugging Face configuration, such as hidden_size."""

    def __post_init__(self) -> None:
        if (self.characters is None) == (self.words is None):
            given = "neither is set" if self.words is None else "both are set"
            raise ConfigError(
                f"characters, words: {given}; set exactly one: an alphabet, or a function that gives words"
            )
        if self.words is not None:
            require_import_path("words", self.words, "my_data:words")


class Trained(Compute, frozen=True, kw_only=True):
    """A trained model (policy, critic), whatever trains it: exactly one of `model` and `scratch`."""

    model: Name | None = None
    """Hugging Face directory to start from."""
    scratch: Scratch | None = None
    """Start from random weights."""
    head: Head = "lm"
    """What sits on the trunk: token log-probs, or one value per token."""
    data_parallel: Positive = 1
    """Copies that train it together, each in processes of its own and on its own rows; not with runtime = "inproc"."""
    micro_batch_tokens: Positive = 2048
    """Tokens forwarded at once, at most; a longer row goes alone."""
    optimizer: OptimizerTable = OptimizerTable()
    """AdamW and its schedule."""

    @property
    def sizes(self) -> dict[str, int]:
        """Parallel sizes by key; their product is the number of ranks."""
        return {"data_parallel": self.data_parallel}

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.model is None) == (self.scratch is None):
            given = "neither is set" if self.model is None else "both are set"
            raise ConfigError(f"model, scratch: {given}; set exactly one: a directory, or a table for random weights")


class TorchTrain(Trained, frozen=True, kw_only=True, tag_field="backend", tag="torch"):
    """A model trained with torch and transformers."""

    sharding: Sharding = "none"
    """What a rank keeps: "none", all of the model, as replicas do; "full", a part of every parameter, gradient and
    moment, with more communication (FSDP)."""
    micro_batch_rows: Count = 0
    """Rows forwarded at once; 0: only tokens count."""
    layout: Layout = "padded"
    """Rows sorted by length and padded; laid end to end in one (GPUs with flash attention); or sharing the prompt that
    they answer (fewest tokens, fastest on a CPU)."""
    attention: Attention = "auto"
    """"sdpa": torch's own. "flash_attention_2": for layout "packed" and dtype "bfloat16" on a GPU, where flash-attn is
    installed. "auto": the second where all that holds, else the first."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention == "flash_attention_2" and (self.layout, self.dtype) != ("packed", "bfloat16"):
            raise ConfigError(
                f'attention = "flash_attention_2" needs layout = "packed" and dtype = "bfloat16", not "{self.layout}" '
                f'and "{self.dtype}"; set those, or leave attention "auto"'
            )
        if self.sharding == "full" and self.data_parallel == 1:
            raise ConfigError(
                'sharding = "full" spreads the model over data_parallel = 1 ranks; raise that, or leave sharding "none"'
            )


class TorchCritic(TorchTrain, frozen=True, kw_only=True):
    """A trained model with a value per token: a critic, or a reward model in the making. `model` may be a language
    model, or one with a value head, such as a reward model."""

    head: Head = "value"
    """What sits on the trunk: one value per token, or token log-probs."""
    new_head: bool = False
    """Start the value head at 0 even if the directory has one: a critic that keeps a reward model's trunk only."""


class MegatronTrain(Trained, frozen=True, kw_only=True, tag_field="backend", tag="megatron"):
    """A model trained with megatron-core: cut over ranks, each in a process of its own."""

    tensor_parallel: Positive = 1
    """Ranks that share every layer; divides the key/value heads."""
    pipeline_parallel: Positive = 1
    """Stages of consecutive layers; divides the layers."""
    virtual_pipeline: Positive = 1
    """Chunks of layers per stage, which take turns; above 1 needs pipeline_parallel above 1, and their product divides
    the layers."""
    context_parallel: Positive = 1
    """Ranks that share the tokens of every row."""
    expert_parallel: Positive = 1
    """Ranks that share the experts of a layer, each with whole ones; divides the experts, and tensor_parallel *
    context_parallel * data_parallel, whose ranks they are."""
    sequence_parallel: bool = False
    """Share norms and residuals among the tensor parallel ranks too: less memory for the same communication."""
    recompute: Recompute = "none"
    """Of activations, in the backward pass: "selective", attention only; "full", every layer, for a third more time."""

    @property
    def sizes(self) -> dict[str, int]:
        """Parallel sizes by key; their product is the number of ranks."""
        return {
            "tensor_parallel": self.tensor_parallel,
            "context_parallel": self.context_parallel,
            "data_parallel": self.data_parallel,
            "pipeline_parallel": self.pipeline_parallel,
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes(self)
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ConfigError(
                f"virtual_pipeline = {self.virtual_pipeline} cuts the stages of pipeline_parallel = 1; raise that, or "
                "set virtual_pipeline = 1"
            )


class MegatronCritic(MegatronTrain, frozen=True, kw_only=True):
    """A model with a value per token, trained with megatron-core."""

    head: Head = "value"
    """What sits on the trunk: one value per token, or token log-probs."""
    new_head: bool = False
    """Start the value head at 0 even if the directory has one: a critic that keeps a reward model's trunk only."""
