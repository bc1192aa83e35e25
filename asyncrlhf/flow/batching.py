"""From popped experiences to a TrainBatch: columns, and the mask that keeps the bound.

Nothing here waits: columns that are stored elsewhere stay there.
"""

from __future__ import annotations

import math
import types
import typing
from collections import Counter
from collections.abc import Sequence
from functools import cache
from statistics import fmean, pstdev

import numpy as np
from numpy.typing import NDArray

from asyncrlhf.flow.gate import Popped
from asyncrlhf.messages import (
    ArrayColumn,
    Column,
    Experience,
    PerSample,
    PerToken,
    RunColumn,
    Sample,
    Segment,
    Stored,
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

    Raises ValueError when an experience's column does not fit its samples, or holds what is no number.
    """
    step, experiences = popped.batch.step, popped.experiences
    samples = [sample for e in experiences for sample in e.rollout.samples]
    prompts = [e.prompt.token_ids for e in experiences for _ in e.rollout.samples]
    counts: list[tuple[int, ...]] = []
    masks: list[tuple[float, ...]] = []
    versions: list[tuple[int, ...]] = []
    for experience in experiences:
        oldest = step - max_staleness if experience.trainable else math.inf
        for sample in experience.rollout.samples:
            runs = sample.segments
            counts.append(tuple([s.token_count for s in runs]))
            masks.append(tuple([1.0 if s.version >= oldest and _written_by_model(s) else 0.0 for s in runs]))
            versions.append(tuple([-1 if s.source == "data" else s.version for s in runs]))
    columns: dict[str, Column] = {
        "token_ids": sequence_column(prompts, [s.token_ids for s in samples]),
        "behaviour_logprobs": column_of("token", [s.logprobs for s in samples]),
        "versions": RunColumn("token", tuple(versions), tuple(counts), "int32"),
        "mask": RunColumn("token", tuple(masks), tuple(counts)),
    }
    for name, level in experience_columns(type(experiences[0])).items():
        missing = [e.prompt.uid for e in experiences if getattr(e, name) is None]
        if len(missing) == len(experiences):
            continue
        if missing:
            raise ValueError(f"column {name!r} is None for uid {missing[0]} but filled for others of the same batch")
        columns[name] = _column(experiences, name, level)
    unmasked = tuple([sum([int(m) * n for m, n in zip(*row, strict=True)]) for row in zip(masks, counts, strict=True)])
    counted = sum(popped.batch.trained.values())
    if _from_policy(popped.experiences) and sum(unmasked) != counted:
        raise AssertionError(f"train step {step}: mask leaves {sum(unmasked)} tokens, the ledger counted {counted}")
    return TrainBatch(
        train_step=step,
        prompt_lengths=tuple(map(len, prompts)),
        response_lengths=tuple([len(s.token_ids) for s in samples]),
        unmasked=unmasked,
        rollouts=tuple([number for number, e in enumerate(experiences) for _ in e.rollout.samples]),
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


def _column(experiences: Sequence[Experience], name: str, level: Level) -> Column:
    rows = [(e.prompt.uid, i, row) for e in experiences for i, row in enumerate(_values(e, name, level))]
    try:
        column = column_of(level, [row for *_, row in rows])
    except (TypeError, ValueError):
        _require_numbers(name, rows)
        raise
    if rows and isinstance(column, ArrayColumn) and np.isnan(np.concatenate(column.fetch())).any():  # so None is read
        _require_numbers(name, rows)
    return column


def _require_numbers(name: str, rows: Sequence[tuple[int, int, Sequence[float]]]) -> None:
    """Raises ValueError for the first value that is no number."""
    for uid, answer, row in rows:
        for value in () if isinstance(row, Stored) else row:
            try:
                float(value)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"uid {uid}, answer {answer}: column {name!r} holds {value!r}, which is no number"
                ) from error


def _values(experience: Experience, name: str, level: Level) -> Sequence[Sequence[float]]:
    """A column of one experience, a row for each of its answers."""
    column, samples = getattr(experience, name), experience.rollout.samples
    if len(column) != len(samples):
        raise ValueError(
            f"uid {experience.prompt.uid}: column {name!r} has {len(column)} entries for {len(samples)} answers"
        )
    if level == "sample":
        return [(value,) for value in column]
    for answer, (row, sample) in enumerate(zip(column, samples, strict=True)):
        if row is None:
            raise ValueError(f"uid {experience.prompt.uid}, answer {answer}: column {name!r} holds None, not numbers")
        if len(row) != len(sample.token_ids):
            raise ValueError(
                f"uid {experience.prompt.uid}, answer {answer}: column {name!r} has {len(row)} values for "
                f"{len(sample.token_ids)} response tokens"
            )
    return column
