"""The seam to the engines: what a backend implements. Plain synchronous objects; a runtime gives each its own thread,
process or actor, calls one method at a time, and reports how long it computed.

An engine is constructed as `Engine(options)`, where `options` is the frozen Struct that its `Options` attribute names,
so that a runtime can build it elsewhere from (import path, msgpack).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrlhf.errors import ConfigError, GroupError
from asyncrlhf.messages import (
    Array,
    EngineEvent,
    GenerateRequest,
    Packed,
    PerSample,
    ScoreRequest,
    StepResult,
    TrainBatch,
    WeightHandle,
)

__all__ = ("Engine", "GenerateEngine", "RewardEngine", "ScoreEngine", "ShadowEngine", "TrainEngine")


class Engine:
    """What every engine has."""

    @classmethod
    def use_threads(cls, count: int) -> None:
        """Compute with `count` threads. Called first, where the engine will live; nothing to do unless overridden."""

    def close(self) -> None:
        """Free what the engine holds. Called once, last."""
        return


class ScoreEngine(Engine, ABC):
    """A frozen model that reads answers, or one of several ranks of it, which are asked for everything together.

    What a verb gets and gives on each rank is its transfer protocol's to say (groups/ranks.py): `step`, `logprobs` and
    `scores` see the rank's own rows, maybe none; all others the whole, and what rank 0 gives counts. Between `offload`
    and `onload` other verbs raise GroupError.
    """

    def rendezvous(self, host: str, ranks: int) -> int:
        """Asked of rank 0: open a port of this machine, which the others reach as `host`, for `ranks` ranks to meet at.
        Raises ConfigError for an engine that works alone."""
        raise ConfigError(f"{type(self).__name__} works on 1 rank and was given {ranks}; use parallel sizes of 1")

    def join(self, host: str, port: int, rank: int, ranks: int, timeout: float) -> None:
        """Asked of all ranks, before any other verb: meet the others there. One that is missed for `timeout` seconds,
        now or later, is given up."""
        raise ConfigError(f"{type(self).__name__} works on 1 rank and was given {ranks}; use parallel sizes of 1")

    def offload(self) -> None:
        """Leave the device to others: what is kept there (parameters, buffers, optimizer state) moves to host memory,
        gradients and caches are freed. Offloaded already: nothing happens. Unless overridden it has none to leave."""
        return

    def onload(self) -> None:
        """Move it back, bit by bit the same."""
        return

    def finish(self) -> None:
        """Nothing: calls come one after another, so that with the answer all that were made before have ended."""
        return

    @abstractmethod
    def logprobs(self, batch: TrainBatch) -> Sequence[Array]:
        """Log-prob of every response token at the run's temperature: one float32 array [response length] per row.
        Raises ValueError for a model without log-probs."""

    @abstractmethod
    def scores(self, batch: TrainBatch) -> Sequence[float]:
        """The value after the last response token, one number per row: what a reward model thinks of an answer. Raises
        ValueError for a model without values."""


class RewardEngine(Engine, ABC):
    """Scores texts. Its coroutines run side by side on an event loop of the engine's own, and may be cancelled."""

    async def ping(self) -> None:
        """A sign of life."""

    @abstractmethod
    async def score(self, request: ScoreRequest) -> PerSample:
        """One finite reward per answer, in order. Raises SampleError, naming uid and answer."""


class TrainEngine(ScoreEngine):
    """A model being trained. Of what its ranks give for `export` all counts, if each has put a part of the weights
    (weights/parts.py)."""

    @abstractmethod
    def step(self, batch: TrainBatch, loss: Packed) -> StepResult:
        """One optimizer step on all rows of `batch`; the schedule reads `batch.train_step`.

        The loss gives per-token values; masks and denominators are global over `batch`, so micro-batches, packing and
        data parallel ranks cannot change the objective. A gradient that is not finite, or no unmasked token, changes
        nothing and says so in the result.
        """

    @abstractmethod
    def apply(self, transform: Packed, batch: TrainBatch) -> Mapping[str, Sequence[Array] | float]:
        """New columns, one array per row, and measures, one number for the batch: forward the model over `batch` if the
        transform needs it, then call the transform."""

    @abstractmethod
    def export(self, version: int) -> WeightHandle:
        """Put the weights where followers can read them, with a Probe of what they make the model say. Raises
        PublishRefused if a weight is not finite."""

    @abstractmethod
    def save_model(self, directory: Path) -> None:
        """Write a Hugging Face directory: config, safetensors, tokenizer."""

    @abstractmethod
    def save_state(self, directory: Path) -> None:
        """Write everything that the next optimizer step depends on: weights, optimizer, RNG."""

    @abstractmethod
    def load_state(self, directory: Path) -> None:
        """Restore what `save_state` wrote; the next step is then exactly the step that would have followed."""


class ShadowEngine(ScoreEngine):
    """A copy of a critic: it reads as the critic does, with weights that were published."""

    @abstractmethod
    def prepare(self, weights: WeightHandle) -> None:
        """As of a GenerateEngine."""

    @abstractmethod
    def commit(self, version: int, kv: str) -> Sequence[EngineEvent]:
        """Take over the prepared weights, between two calls; `kv` means nothing here."""

    @abstractmethod
    def values(self, batch: TrainBatch) -> Sequence[Array]:
        """The value of every response token: one float32 array [response length] per row."""

    @abstractmethod
    def apply(self, transform: Packed, batch: TrainBatch) -> Mapping[str, Sequence[Array] | float]:
        """As of a TrainEngine; a column `values` of the batch takes the place of a forward."""


class GenerateEngine(Engine, ABC):
    """A sampler with continuous batching. `add` and `abort` take effect between two `step` calls (token boundaries)."""

    version: int
    """Version of the weights that the next token will be sampled with; of those it had, while it sleeps."""
    asleep: bool = False
    """Between `sleep` and `wake` its devices are another's: it has no weights, no KV cache, and so no work. Requests
    may be added, and wait; they may be aborted; `step` gives nothing; other verbs raise GroupError, and it sleeps on.
    """
    still: bool = False
    """Between `pause` and `go_on` the runtime does not call `step`. All else goes on, and nothing leaves its memory."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether a request is running or waiting for a slot; while True the runtime keeps calling `step`,
        unless the engine is `still`."""

    @abstractmethod
    def add(self, requests: Sequence[GenerateRequest]) -> Sequence[EngineEvent]:
        """Accept requests (Rejected events for those that cannot be answered)."""

    @abstractmethod
    def step(self) -> Sequence[EngineEvent]:
        """Admit waiting requests into free slots, sample one token for every running request, report."""

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> Sequence[GenerateRequest]:
        """Stop these requests. Gives each back with the tokens sampled so far, ready to be continued elsewhere or
        thrown away; unknown ids (already finished) are passed over. Unreported tokens are reported by the next
        `step` or with the events of this call's runtime."""

    @abstractmethod
    def prepare(self, weights: WeightHandle) -> None:
        """First phase of a publish: bring the weights near (a second buffer); sampling goes on with the old ones.
        Raises PublishRefused when the bytes do not have the announced checksum."""

    @abstractmethod
    def commit(self, version: int, kv: str) -> Sequence[EngineEvent]:
        """Second phase: take over the prepared weights at this token boundary. `kv` is "rebuild" (recompute the KV
        cache of running requests under the new weights) or "keep" (the tokens that follow are flagged kv_mixed)."""

    @abstractmethod
    def probe(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Log-prob of every token but the first, at temperature 1, under the weights in use."""

    @abstractmethod
    def sleep(self) -> Sequence[EngineEvent]:
        """Give memory back at this token boundary: weights, also prepared ones, and KV cache. Running answers keep
        their tokens and log-probs, which are reported, and wait, ahead of those that have not begun. Asleep already:
        nothing happens."""

    @abstractmethod
    def wake(self, weights: WeightHandle) -> None:
        """Compute with these weights, all of whose bytes are read, whatever was in use before: they arrive where they
        stay, one tensor at a time, and only then is there a KV cache again. Interrupted answers go on first, with a
        cache computed anew.

        Raises PublishRefused when the bytes do not have the announced checksum or do not fit the model, and GroupError
        for an engine that does not sleep; one that slept sleeps on, to be woken with others.
        """

    def pause(self) -> None:
        """From this token boundary on the runtime calls no `step`."""
        self.still = True

    def go_on(self) -> None:
        """It calls `step` again."""
        self.still = False

    def _require(self, verb: str, *, asleep: bool) -> None:
        """Raises GroupError for a verb that comes at the wrong time."""
        if self.asleep and not asleep:
            raise GroupError(
                f"{verb} came while the engine sleeps, without weights; wake it with the newest ones first"
            )
        if asleep and not self.asleep:
            raise GroupError(
                f"{verb} came while the engine is awake; prepare and commit a version, or let it sleep first"
            )
