"""From popped experiences to a TrainBatch: columns, and the mask that keeps the bound.

Nothing here waits: columns that are stored elsewhere stay there.
"""

from __future__ import annotations

import types
import typing
from collections import Counter
from collections.abc import Sequence
from functools import cache
from statistics import fmean, pstdev
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from asyncrlhf.flow.gate import Popped
from asyncrlhf.messages import (
    Column,
    Experience,
    PerSample,
    PerToken,
    RunColumn,
    Sample,
    Segment,
    TrainBatch,
    column_of,
    sequence_column,
)
from asyncrlhf.messages.batch import Level
from asyncrlhf.observe.events import Popped as PoppedEvent

__all__ = ("build_batch", "experience_columns", "popped_event", "rows_of")


@cache
def experience_columns(kind: type[Experience]) -> dict[str, Level]:
    """The columns an Experience class brings, by field name. Raises TypeError for a field of another type."""
    columns: dict[str, Level] = {}
    for name, hint in typing.get_type_hints(kind).items():
        if name in ("rollout", "trainable") or name.startswith("_"):
            continue
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if PerSample in options:
            columns[name] = "sample"
        elif PerToken in options:
            columns[name] = "token"
        else:
            raise TypeError(
                f"{kind.__name__}.{name} is {hint}; annotate columns of an Experience PerSample (one number per "
                "answer) or PerToken (one number per response token), or either with `| None`"
            )
    return columns


def rows_of(experiences: Sequence[Experience]) -> list[tuple[int, Experience, int, Sample]]:
    """(rollout number, experience, answer number, sample) for every row, in batch order."""
    return [(g, e, i, s) for g, e in enumerate(experiences) for i, s in enumerate(e.rollout.samples)]


def build_batch(popped: Popped, max_staleness: int) -> TrainBatch:
    """The TrainBatch of a pop. Masked: tokens older than the bound, not trainable, or written by an environment.

    Raises ValueError when an experience's column does not fit its samples.
    """
    step, rows = popped.batch.step, rows_of(popped.experiences)
    counts = tuple(tuple(s.token_count for s in sample.segments) for *_, sample in rows)
    masks = tuple(
        tuple(float(e.trainable and _written_by_model(x) and step - x.version <= max_staleness) for x in s.segments)
        for _, e, _, s in rows
    )
    versions = tuple(tuple(-1 if s.source == "data" else s.version for s in sample.segments) for *_, sample in rows)
    columns: dict[str, Column] = {
        "token_ids": sequence_column([e.prompt.token_ids for _, e, _, _ in rows], [s.token_ids for *_, s in rows]),
        "behaviour_logprobs": column_of("token", [s.logprobs for *_, s in rows]),
        "versions": RunColumn("token", versions, counts, "int32"),
        "mask": RunColumn("token", masks, counts),
    }
    for name, level in experience_columns(type(popped.experiences[0])).items():
        values = [_values(e, name, level, i, s) for _, e, i, s in rows]
        if all(value is None for value in values):
            continue
        missing = next((e.prompt.uid for (_, e, _, _), v in zip(rows, values, strict=True) if v is None), None)
        if missing is not None:
            raise ValueError(f"column {name!r} is None for uid {missing} but filled for others of the same batch")
        columns[name] = column_of(level, cast(list[Sequence[float]], values))
    unmasked = tuple(sum(n for m, n in zip(*row, strict=True) if m) for row in zip(masks, counts, strict=True))
    counted = sum(popped.batch.trained.values())
    if _from_policy(popped.experiences) and sum(unmasked) != counted:
        raise AssertionError(f"train step {step}: mask leaves {sum(unmasked)} tokens, the ledger counted {counted}")
    return TrainBatch(
        train_step=step,
        prompt_lengths=tuple(len(e.prompt.token_ids) for _, e, _, _ in rows),
        response_lengths=tuple(len(s.token_ids) for _, _, _, s in rows),
        unmasked=unmasked,
        rollouts=tuple(g for g, _, _, _ in rows),
        columns=columns,
    )


def popped_event(popped: Popped, batch: TrainBatch, max_staleness: int) -> PoppedEvent:
    """What the pop decided, for the event log: lags, masks by position and by length, rewards."""
    step, rows = batch.train_step, rows_of(popped.experiences)
    trained: Counter[int] = Counter()
    masked: Counter[int] = Counter()
    for version, count in popped.batch.trained.items():
        trained[step - version] += count
    untrainable = 0
    by_position, by_length = np.zeros(10, np.int64), np.zeros(10, np.int64)
    longest = max(batch.response_lengths)
    for _, experience, _, sample in rows:
        runs = [(step - s.version, s.token_count) for s in sample.segments if _written_by_model(s)]
        for lag, count in runs:
            if lag > max_staleness:
                masked[lag] += count
            elif not experience.trainable:
                untrainable += count
        if any(lag > max_staleness for lag, _ in runs):
            over = _over_age(sample, step - max_staleness)
            deciles = np.arange(len(over)) * 10 // max(1, len(over))
            by_position += np.bincount(deciles[over], minlength=10)
            by_length[min(9, 10 * len(over) // (longest + 1))] += int(over.sum())
    rewards = [reward for experience in popped.experiences for reward in experience.rewards or ()]
    leases = popped.batch.leases
    return PoppedEvent(
        train_step=step,
        uids=tuple(lease.uid for lease in leases),
        reward_mean=fmean(rewards) if rewards else None,
        rewards_std=pstdev(rewards) if rewards else None,
        waited=popped.waited,
        trained_by_lag=dict(trained),
        masked_by_lag=dict(masked),
        masked_untrainable=untrainable,
        head_lags=tuple(step - min(lease.tokens, default=step) for lease in leases),
        queue_lags=tuple(step - max(lease.tokens, default=step) for lease in leases),
        response_lengths=batch.response_lengths,
        masked_by_position=tuple(by_position.tolist()),
        masked_by_length=tuple(by_length.tolist()),
    )


def _written_by_model(segment: Segment) -> bool:
    """Whether its tokens may be trained on."""
    return segment.source != "environment"


def _over_age(sample: Sample, oldest: int) -> NDArray[np.bool_]:
    """bool [T]: tokens of versions before `oldest` that would have been trained on."""
    runs = [_written_by_model(segment) and segment.version < oldest for segment in sample.segments]
    return np.repeat(np.array(runs, bool), [segment.token_count for segment in sample.segments])


def _from_policy(experiences: Sequence[Experience]) -> bool:
    return all(s.source == "model" for e in experiences for x in e.rollout.samples for s in x.segments)


def _values(experience: Experience, name: str, level: Level, answer: int, sample: Sample) -> Any:
    column = getattr(experience, name)
    if column is None:
        return None
    if len(column) != len(experience.rollout.samples):
        raise ValueError(
            f"uid {experience.prompt.uid}: column {name!r} has {len(column)} entries for "
            f"{len(experience.rollout.samples)} answers"
        )
    if level == "sample":
        return (column[answer],)
    if len(column[answer]) != len(sample.token_ids):
        raise ValueError(
            f"uid {experience.prompt.uid}, answer {answer}: column {name!r} has {len(column[answer])} values for "
            f"{len(sample.token_ids)} response tokens"
        )
    return column[answer]
