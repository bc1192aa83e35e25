"""The tables of what reads and scores answers: reference and reward models, reward functions. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta, field

from asyncrlhf.config.bounds import (
    Count,
    Head,
    Name,
    Positive,
    PositiveAmount,
    Table,
    require_import_path,
    require_one_source,
)
from asyncrlhf.config.compute import Compute, require_sizes

__all__ = (
    "Calibration",
    "Frozen",
    "MegatronFrozen",
    "MegatronReward",
    "MegatronScore",
    "Rules",
    "TorchFrozen",
    "TorchReward",
    "TorchScore",
    "TorchShadow",
)


class Frozen(Compute, frozen=True, kw_only=True):
    """A frozen model that reads answers, whatever computes it."""

    micro_batch_tokens: Positive = 2048
    """Tokens forwarded at once, at most; a longer row goes alone."""
    max_restarts: Count = 3
    """Restarts of a lost engine within an hour before the run fails, with delays as those of a rollout engine; 0:
    none."""


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
        super().__post_init__()
        require_sizes(self)


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


class TorchShadow(TorchFrozen, frozen=True, kw_only=True):
    """Copies of a critic that give its values, with the weights that it published last. A table of this kind belongs to
    no field of the algorithm: what asks the critic for values is answered here."""

    follows: Name
    """The critic; left out: what the name [groups.shadow_NAME] says."""
    replicas: Positive = 1
    """Copies, each of which reads some of the rows."""
    model: Name | None = None
    """Directory with the model's shape; left out: the followed group's."""
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
