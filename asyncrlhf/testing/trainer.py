"""FakeTrainer and FakeScorer: models of a few numbers, with exact arithmetic, so that weights compare bit by bit."""

from __future__ import annotations

import itertools
import json
import math
import struct
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from asyncrlhf.abc import ScoreEngine, TrainEngine
from asyncrlhf.errors import GroupError, PublishRefused
from asyncrlhf.messages import Array, Message, Packed, Probe, StepResult, TrainBatch, WeightHandle

__all__ = (
    "FakeScorer",
    "FakeTrainer",
    "FakeTrainerOptions",
    "FakeTransfer",
    "Weights",
    "weights_checksum",
    "weights_logprobs",
)

PROBE = (3, 1, 4, 1, 5)
Weights = Mapping[str, Sequence[float]]
_TABLE: dict[str, tuple[int, dict[str, tuple[float, ...]]]] = {}
_NUMBERS = itertools.count()


def weights_checksum(weights: Weights) -> int:
    """Of all bytes in name order."""
    found = 0
    for name in sorted(weights):
        found = zlib.crc32(struct.pack(f"<{len(weights[name])}d", *weights[name]), zlib.crc32(name.encode(), found))
    return found


def weights_logprobs(checksum: int, token_ids: Sequence[int]) -> tuple[float, ...]:
    """What a model with weights of this checksum says about every token but the first: a number for a probe."""
    return tuple(-1.0 - (checksum ^ zlib.crc32(bytes(f"{token}", "ascii"))) % 1009 / 100 for token in token_ids[1:])


class FakeTransfer:
    """A WeightTransfer for lists of floats: two buffers in this process, used in turn."""

    def __init__(self) -> None:
        number = next(_NUMBERS)
        self._keys = itertools.cycle((f"fake-{number}-a", f"fake-{number}-b"))
        for key in (f"fake-{number}-a", f"fake-{number}-b"):
            weakref.finalize(self, _TABLE.pop, key, None)

    def send(self, version: int, weights: Weights) -> Mapping[str, Any]:
        key = next(self._keys)
        _TABLE[key] = (version, {name: tuple(values) for name, values in weights.items()})
        return {"key": key, "version": version}

    def receive(self, payload: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[float]]]:
        """Raises PublishRefused if newer bytes took their place."""
        version, weights = _TABLE.get(payload["key"], (-1, {}))
        if version != payload["version"]:
            raise PublishRefused(
                f"weights of version {payload['version']} are gone: version {version} took their place"
            )
        yield from weights.items()


class FakeTrainerOptions(Message, frozen=True, kw_only=True):
    """What the model is and which of its steps fail."""

    seed: int = 0
    learning_rate: float = 0.125
    """0: steps are applied and change nothing, so publishes move no bytes."""
    not_finite: float = 0.0
    """Share of optimizer steps whose gradient is not finite, by the content of the batch."""
    empty: float = 0.0
    """Share of optimizer steps that find no unmasked token, by the content of the batch."""
    broken_from: int | None = None
    """From this version on the weights are not finite, so the publish gate refuses them."""
    history: bool = True
    """Keep every batch that was stepped on."""


class FakeScorer(ScoreEngine):
    """A frozen model that reads answers."""

    Options = FakeTrainerOptions

    def __init__(self, options: FakeTrainerOptions) -> None:
        self.options = options
        self.offloaded = False

    def offload(self) -> None:
        self.offloaded = True

    def onload(self) -> None:
        self.offloaded = False

    def logprobs(self, batch: TrainBatch) -> Sequence[Array]:
        """A number between -1 and 0 for every response token, from the token alone."""
        self._require_loaded("logprobs")
        rows = zip(batch.columns["token_ids"].fetch(), batch.response_lengths, strict=True)
        return [(row[len(row) - length :].astype(np.float32) % 32 / -32).astype(np.float32) for row, length in rows]

    def scores(self, batch: TrainBatch) -> list[float]:
        """A multiple of 1/8 between 0 and 1 for every row, from its response tokens alone; as FakeReward gives."""
        self._require_loaded("scores")
        rows = zip(batch.columns["token_ids"].fetch(), batch.response_lengths, strict=True)
        return [int(row[len(row) - length :].astype(np.int64).sum()) % 9 / 8 for row, length in rows]

    def _require_loaded(self, verb: str) -> None:
        if self.offloaded:
            raise GroupError(f"{verb} came while the model is offloaded; onload it first")


class FakeTrainer(FakeScorer, TrainEngine):
    """A model of four numbers. The gradient is a sum over unmasked tokens in row order, so it is exact.

    It takes any loss and does not look at it: `advantages`, else `rewards`, else ones are what it follows.
    """

    def __init__(self, options: FakeTrainerOptions) -> None:
        super().__init__(options)
        random = Random(options.seed)
        self.weights = {"w": [random.random() for _ in range(4)]}
        self.steps = 0
        """Optimizer steps applied: what a schedule would count."""
        self.batches: list[TrainBatch] = []
        """What it has been stepped on, if `history` is kept."""
        self.exported: dict[int, int] = {}
        """Version -> checksum of every export."""
        self._transfer = FakeTransfer()
        self._sent: tuple[int, Mapping[str, Any]] | None = None

    def step(self, batch: TrainBatch, loss: Packed) -> StepResult:
        self._require_loaded("step")
        if self.options.history:
            self.batches.append(batch)
        draw = Random(f"{self.options.seed}/{batch.train_step}/{_content(batch)}").random()
        if draw < self.options.not_finite:
            return StepResult(applied=False, reason="not_finite")
        if not sum(batch.unmasked) or draw < self.options.not_finite + self.options.empty:
            return StepResult(applied=False, reason="empty")
        gradient = self._gradient(batch)
        rate = self.options.learning_rate
        self.weights["w"] = [w + rate * (g - 0.25 * w) for w, g in zip(self.weights["w"], gradient, strict=True)]
        self.steps += 1
        return StepResult(applied=True, metrics={"loss": gradient[0], "grad_norm": math.hypot(*gradient)})

    def apply(self, transform: Packed, batch: TrainBatch) -> Mapping[str, Sequence[Array] | float]:
        """Columns that a critic would give: `advantages`, `returns` and `values`."""
        self._require_loaded("apply")
        rewards = batch.columns["rewards"].fetch()
        value = np.float32(self.weights["w"][0])
        rows = [np.full(n, row[0], np.float32) for row, n in zip(rewards, batch.response_lengths, strict=True)]
        return {
            "advantages": [row - value for row in rows],
            "returns": rows,
            "values": [np.full(n, value, np.float32) for n in batch.response_lengths],
        }

    def export(self, version: int) -> WeightHandle:
        self._require_loaded("export")
        if self.options.broken_from is not None and version >= self.options.broken_from:
            raise PublishRefused(f"version {version} has a parameter that is not finite")
        checksum = weights_checksum(self.weights)
        changed = self._sent is None or self._sent[0] != checksum
        if self._sent is None or changed:
            self._sent = checksum, self._transfer.send(version, self.weights)
        self.exported[version] = checksum
        return WeightHandle(
            version=version,
            checksum=checksum,
            changed=changed,
            byte_count=8 * len(self.weights["w"]),
            transport="asyncrlhf.testing.trainer:FakeTransfer",
            payload=self._sent[1],
            probe=Probe(token_ids=PROBE, logprobs=weights_logprobs(checksum, PROBE)),
        )

    def save_model(self, directory: Path) -> None:
        self._require_loaded("save_model")
        (directory / "model.json").write_text(json.dumps(self.weights))

    def save_state(self, directory: Path) -> None:
        """Every number as a hexadecimal float, which is exact."""
        self._require_loaded("save_state")
        state = {"weights": [w.hex() for w in self.weights["w"]], "steps": self.steps}
        (directory / "state.json").write_text(json.dumps(state))

    def load_state(self, directory: Path) -> None:
        self._require_loaded("load_state")
        state = json.loads((directory / "state.json").read_text())
        self.weights = {"w": [float.fromhex(w) for w in state["weights"]]}
        self.steps = state["steps"]

    def _gradient(self, batch: TrainBatch) -> list[float]:
        column = batch.columns.get("advantages") or batch.columns.get("rewards") or batch.columns["mask"]
        gains, masks = column.fetch(), batch.columns["mask"].fetch()
        logprobs, tokens = batch.columns["behaviour_logprobs"].fetch(), batch.columns["token_ids"].fetch()
        total, count = [0.0] * 4, sum(batch.unmasked)
        for row, mask in enumerate(masks):
            answer = tokens[row][batch.prompt_lengths[row] :]
            for place in np.flatnonzero(mask).tolist():
                gain = float(gains[row][0 if column.level == "sample" else place])
                total[int(answer[place]) % 4] += gain * (1.0 + float(logprobs[row][place]) / 8)
        return [part / count for part in total]


def _content(batch: TrainBatch) -> int:
    found = 0
    for row in batch.columns["token_ids"].fetch():
        found = zlib.crc32(row.tobytes(), found)
    return found
