"""The keys of a configuration: frozen Structs with bounds in their types, and the rules between keys. Torch-free.

A rule that is broken raises ConfigError; its message starts with the key, and `load` puts the table before it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import field

from asyncrlhf.config.bounds import (
    Amount,
    Cap,
    Correction,
    Count,
    Label,
    Name,
    Positive,
    PositiveAmount,
    Table,
    require_import_path,
    require_one_source,
)
from asyncrlhf.config.groups import ROLES as ROLES
from asyncrlhf.config.groups import MegatronCritic as MegatronCritic
from asyncrlhf.config.groups import MegatronReward as MegatronReward
from asyncrlhf.config.groups import MegatronScore as MegatronScore
from asyncrlhf.config.groups import MegatronTrain as MegatronTrain
from asyncrlhf.config.groups import OptimizerTable as OptimizerTable
from asyncrlhf.config.groups import Rules as Rules
from asyncrlhf.config.groups import Scratch as Scratch
from asyncrlhf.config.groups import TorchCritic as TorchCritic
from asyncrlhf.config.groups import TorchReward as TorchReward
from asyncrlhf.config.groups import TorchRollout as TorchRollout
from asyncrlhf.config.groups import TorchScore as TorchScore
from asyncrlhf.config.groups import TorchTrain as TorchTrain
from asyncrlhf.config.groups import VllmRollout as VllmRollout
from asyncrlhf.config.placement import Placement
from asyncrlhf.errors import ConfigError

__all__ = (
    "ROLES",
    "Checkpoint",
    "Config",
    "Data",
    "Evaluation",
    "Limits",
    "MegatronCritic",
    "MegatronReward",
    "MegatronScore",
    "MegatronTrain",
    "Observe",
    "OptimizerTable",
    "Pool",
    "Publish",
    "Ray",
    "Rules",
    "Scratch",
    "TorchCritic",
    "TorchReward",
    "TorchRollout",
    "TorchScore",
    "TorchTrain",
    "VllmRollout",
)

RUNTIMES = ("local", "inproc", "ray")
"""Runtimes there are."""


class Limits(Table, frozen=True, kw_only=True):
    """When to give up, and what may be held."""

    max_attempts: Positive = 3
    """Attempts in all that one prompt may lose before it is dropped for good."""
    max_filtered: Positive | None = None
    """Filtered or failed prompts in a row, without a ready one, that end the run; left out: 20 * prompts_per_step."""
    max_void_steps: Positive = 10
    """Train steps in a row without an applied optimizer step that end the run."""
    byte_limit: Count = 0
    """Bytes of ready rollouts above which no more than prompts_per_step are live; 0: no limit."""
    min_answers: Positive | None = None
    """Answers that must survive for a rollout to train, at most answers_per_prompt; left out: all of them."""
    lease_timeout: Amount = 900.0
    """Seconds without a sign of life (a token, finished answers) after which a lease is lost and its prompt leased
    again; below stall_timeout; 0: never."""
    stall_timeout: PositiveAmount = 1800.0
    """Seconds without any progress, or for one call to a trained model, after which the run ends as stalled."""
    max_restarts: Count = 3
    """Times within an hour that the run goes on from its newest checkpoint when the process of a trained model is lost,
    with delays as those of a rollout engine; 0: the run then fails."""
    logprob_gap: Amount = 0.1
    """Nats by which sampler and trainer may differ on a token of the same weights before a warning; 0: no warning."""
    wait_timeout: PositiveAmount = 60.0
    """Seconds that `at_deadline = "wait"` waits before it drops."""

    def __post_init__(self) -> None:
        if self.lease_timeout and self.lease_timeout >= self.stall_timeout:
            raise ConfigError(
                f"lease_timeout = {self.lease_timeout:g} s must be below stall_timeout = {self.stall_timeout:g} s, or "
                "the run ends before a lost lease is granted again; lower the first or raise the second"
            )


class Data(Table, frozen=True, kw_only=True):
    """Where prompts come from: exactly one of `path` and `source`."""

    path: Name | None = None
    """A .jsonl file, relative to the current directory: one JSON object a line."""
    source: Name | None = None
    """Import path "module:factory" of a callable that gives rows: an indexable object or an iterable of dicts."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""
    prompt: Name = "prompt"
    """Column with the prompt: text, or a list of messages when `chat` is set. Beside a `response` it may be empty: the
    answer then follows the model's BOS (or else EOS) token."""
    ground_truth: str = "answer"
    """Column handed to reward functions as ground_truth; "": rows have none. Optional when `response` is set."""
    chat: bool = False
    """Put the prompt through the tokenizer's chat template."""
    response: Name | None = None
    """Column with the answer's text, to learn from directly (SFT); left out: answers are sampled."""
    rejected: Name | None = None
    """Column with the text of a worse answer than `response`, to learn a preference from (RewardModel)."""
    epochs: Positive | None = None
    """Passes over the rows; left out: as many as train_steps need. Required without train_steps."""
    shuffle: bool = True
    """A new order every epoch, from (seed, epoch). A stream keeps its own order."""
    last: Literal["train", "drop"] = "train"
    """What becomes of the last batch when the data ends with fewer than prompts_per_step rollouts."""
    max_prompt_tokens: Positive | None = None
    """A longer prompt fails with an error that names it, and is counted; left out: no limit here."""

    def __post_init__(self) -> None:
        require_one_source(self.path, self.source, self.options)
        if self.rejected is not None and self.response is None:
            raise ConfigError(f'rejected = "{self.rejected}" has no answer to be worse than; set response as well')


class Evaluation(Table, frozen=True, kw_only=True):
    """Answers to held-out prompts, scored between train steps; columns are named as in [data]."""

    every: Count = 0
    """Train steps between evaluations, the first before any; 0: never."""
    path: Name | None = None
    """As data.path."""
    source: Name | None = None
    """As data.source."""
    options: dict[str, Any] = field(default_factory=dict)
    """As data.options."""
    prompts: Positive = 64
    """Prompts per evaluation: the first ones of the set."""
    temperature: Amount = 0.0
    """Sampling temperature; 0: greedy."""
    max_hold: Amount = 60.0
    """Seconds that a publish, or on shared devices a train step, waits for an evaluation to finish; 0: not at all."""
    show: Count = 3
    """Answers of each evaluation that the event log and the summary quote, from the first prompts on."""
    judges: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Further scorers by name, each a table like that of a reward group, whose means are reported as eval/<name> and
    which training never sees. One with a model shares devices as [placement] says of reward models, and by its name in
    `placement.sets`."""

    def __post_init__(self) -> None:
        if self.every or self.path is not None or self.source is not None:
            require_one_source(self.path, self.source, self.options)

    def rows(self, data: Data) -> Data:
        """The [data] table of the held-out set: one pass in its own order, columns as in `data`."""
        return msgspec.structs.replace(
            data, path=self.path, source=self.source, options=self.options, epochs=1, shuffle=False
        )


class Publish(Table, frozen=True, kw_only=True):
    """How new weights reach the engines that follow."""

    every: Positive = 1
    """Train steps between two publishes that move bytes; at most lookahead + 1. There is no other trigger to choose:
    admission grants prompts_per_step prompts for every version published, so without a publish the window closes by as
    many with every step, and how far the published version falls behind is a matter of this number alone."""
    mode: Literal["in_flight", "drain"] = "in_flight"
    """Swap weights at a token boundary of running answers, or let them finish first."""
    rolling: bool = False
    """Swap one engine after another, while the others sample on: generation never stops, and a publish takes as long
    as all the swaps together. False: all at once."""
    overlap: bool | None = None
    """Train on while the engines take the weights of the step before; the step after waits for them. Left out: where
    that can be. With lookahead = 0 there is nothing to train on meanwhile, and where a trained model and engines that
    follow share devices in turn only one of them computes: true is then refused."""
    kv: Literal["rebuild", "keep"] = "rebuild"
    """What becomes of the KV cache of running answers: recomputed, or kept and their tokens flagged kv_mixed."""
    probe_gap: Amount = 0.5
    """Nats by which an engine may differ from its trainer on fixed tokens right after it has taken new weights, before
    it is fenced: it then computes with others; 0: it is not asked."""
    transport: Literal["auto", "shared", "collective", "objects"] = "auto"
    """How bytes move. "shared": memory of one machine, which every engine must be on. "collective": torch.distributed,
    a group for each engine and trainer rank. "objects": Ray's object store (runtime "ray"). "auto": within one process
    its own memory, on one machine "shared", and between machines of a Ray "collective"."""
    timeout: PositiveAmount = 300.0
    """Seconds an engine has to take new weights, to accept answers or to give them back, before it is fenced."""


class Checkpoint(Table, frozen=True, kw_only=True):
    """What is saved to resume from."""

    every: Count = 50
    """Train steps between checkpoints; 0: only at the end."""
    keep: Positive = 2
    """The newest checkpoints that are kept."""
    payloads: bool = True
    """Save ready rollouts too; otherwise their prompts are answered again after a resume."""


class Ray(Table, frozen=True, kw_only=True):
    """The Ray that `runtime = "ray"` uses."""

    address: Name | None = None
    """A cluster to join: "auto" or "host:port"; left out: one of this run's own, on this machine."""
    inline_bytes: Count = 65536
    """Bytes of an answer (8 a token) up to which it goes through the controller, as do other columns; larger ones go
    from engine to engine through Ray's object store; 0: all of them."""
    patience: PositiveAmount = 10.0
    """Seconds that a run waits for the devices and cores of its pools to be free before it is refused."""


class Pool(Table, frozen=True, kw_only=True):
    """Devices and cores that groups share. Groups say which pool they are in (`groups.<name>.pool`); left out, rollout
    groups are in "generation" and the others in "training", where there are pools of these names."""

    devices: Count = 0
    """GPUs in all; 0: its engines compute on CPUs."""
    engines_per_device: Positive = 1
    """Engines that may share a GPU."""
    cores: Count = 0
    """Logical CPUs that each of its engines asks Ray for, and that this machine must have for it in the other runtimes;
    0: none."""
    labels: dict[str, Label] = field(default_factory=dict)
    """Labels of the nodes that it lies on, in a cluster that the run joins (ray.address); on one machine they mean
    nothing."""


class Observe(Table, frozen=True, kw_only=True):
    """What is shown while the run goes."""

    console: Literal["auto", "plain", "off"] = "auto"
    """A live view on a terminal and lines elsewhere, always lines, or nothing."""
    trace: bool = True
    """Write trace.json, the timeline, at the end."""
    trackers: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Also send metrics there (extra `asyncrlhf[trackers]`)."""


class Config(Table, frozen=True, kw_only=True):
    """A whole run. `lookahead` and `off_policy` are filled in when left out, so neither is None afterwards."""

    algorithm: Name
    """Import path "module:Class" of an Algorithm."""
    runtime: str = "local"
    """Where engines live: "local", each in a process of its own on this machine; "inproc", in threads of this process
    (for tests and debugging); "ray", each an actor, on this machine or a cluster (extra `asyncrlhf[ray]`)."""
    seed: Count = 0
    """Of the data order, the sampling and the initial weights."""
    train_steps: Positive | None = None
    """Batches to train on; left out: until the data ends (data.epochs)."""
    prompts_per_step: Positive
    """B: prompts in one train step."""
    answers_per_prompt: Positive = 1
    """n: answers sampled to each prompt."""
    run_dir: Name
    """Directory of this run, relative to the current directory."""
    resume: Name = "auto"
    """"auto": go on from the newest checkpoint of run_dir, if there is one. "never": start anew. Else: a
    checkpoint directory; one of another run is where this run_dir then begins."""
    after: list[Name] = field(default_factory=list)
    """Configuration files, relative to this one, whose runs must be complete first; complete ones are reused."""
    max_staleness: Count = 0
    """K: the hard bound on t - w_i of a trained token, in policy versions; 0: synchronous."""
    lookahead: Count | None = None
    """D: batches that generation may be ahead, in policy versions, at most K; left out: ceil(K / 2)."""
    at_deadline: Literal["mask", "wait", "drop"] = "mask"
    """What happens to a rollout that reaches the bound: its old tokens are masked, training waits, or it is dropped."""
    order: Literal["ready", "admission"] = "ready"
    """Which ready rollouts train first: the earliest deadline, or strictly as admitted (reproducible)."""
    off_policy: Correction | None = None
    """Correction for tokens of older versions; must be chosen when max_staleness > 0; left out at 0: "none"."""
    off_policy_cap: Cap = 2.0
    """Importance ratio above which the correction truncates or masks a token."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The algorithm's own fields."""
    limits: Limits = Limits()
    """When to give up, and what may be held."""
    data: Data
    """Where prompts come from."""
    evaluation: Evaluation = Evaluation()
    """Held-out prompts."""
    publish: Publish = Publish()
    """How new weights reach the engines that follow."""
    checkpoint: Checkpoint = Checkpoint()
    """What is saved to resume from."""
    observe: Observe = Observe()
    """What is shown."""
    ray: Ray = Ray()
    """Which Ray."""
    placement: Placement = Placement()
    """Which groups share devices, and take turns."""
    pools: dict[str, Pool] = field(default_factory=dict)
    """Where groups compute; left out: engines take what they find, and ask a cluster for nothing."""
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """One raw table per model group; the algorithm's fields say which of ROLES each is."""
    directory: str = ""
    """Directory of the file this came from, where `after` and import paths start; filled in by `load`."""

    def __post_init__(self) -> None:
        if self.lookahead is None:
            msgspec.structs.force_setattr(self, "lookahead", (self.max_staleness + 1) // 2)
        if self.off_policy is None and self.max_staleness == 0:
            msgspec.structs.force_setattr(self, "off_policy", "none")
        require_import_path("algorithm", self.algorithm, "algorithms.grpo:GRPO")
        if self.runtime not in RUNTIMES:
            known = '"' + '", "'.join(RUNTIMES) + '"'
            raise ConfigError(f'runtime = "{self.runtime}" is not there; use {known}')
        if self.publish.transport == "objects" and self.runtime != "ray":
            raise ConfigError(
                f'publish.transport = "objects" takes runtime = "ray", not "{self.runtime}"; change one of them, or '
                'leave the first "auto"'
            )
        self._check_staleness()
        if self.train_steps is None and self.data.epochs is None:
            raise ConfigError("train_steps, data.epochs: neither is set, so the run has no end; set one or both")
        least = self.limits.min_answers
        if least is not None and least > self.answers_per_prompt:
            raise ConfigError(
                f"limits.min_answers = {least} is above answers_per_prompt = {self.answers_per_prompt}, so no rollout "
                "could train; lower the first or raise the second"
            )

    def _check_staleness(self) -> None:
        bound, ahead = self.max_staleness, self.lookahead or 0
        if ahead > bound:
            raise ConfigError(
                f"lookahead = {ahead} is above max_staleness = {bound}: generation would run ahead of what may be "
                "trained; lower the first or raise the second (2 * lookahead is a good bound)"
            )
        if self.order == "admission" and self.at_deadline != "mask":
            raise ConfigError(
                f'order = "admission" never lets a rollout reach its deadline, so at_deadline = "{self.at_deadline}" '
                'has nothing to do; remove at_deadline, or set order = "ready"'
            )
        if self.off_policy is None:
            raise ConfigError(
                f"off_policy is not chosen and max_staleness = {bound} trains on older versions; set it to "
                '"decoupled", "truncated_is" or "masked_is", or to "none" to train uncorrected'
            )
        if self.publish.overlap and not ahead:
            raise ConfigError(
                "publish.overlap = true and lookahead = 0: no prompt is live while weights are published, so there is "
                "nothing to train on meanwhile; remove it, or raise max_staleness and lookahead to 1 or more"
            )
        if self.publish.every > ahead + 1:
            raise ConfigError(
                f"publish.every = {self.publish.every} is above lookahead + 1 = {ahead + 1}: generation would wait for "
                f"weights that only later steps publish, for ever; set it to {ahead + 1} or less, or raise lookahead"
            )
