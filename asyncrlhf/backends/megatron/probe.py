"""What a model says about a few tokens, asked of all its ranks together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from asyncrlhf.backends.megatron.microbatch import MicroBatch
from asyncrlhf.backends.megatron.model import Model
from asyncrlhf.backends.torch.data import Rows
from asyncrlhf.messages import ArrayColumn, TrainBatch

__all__ = ("likely_tokens", "probe")


def _row(token_ids: Sequence[int]) -> TrainBatch:
    """One row: a prompt of one token and the rest as its answer."""
    ids = np.asarray(token_ids, dtype=np.int32)
    return TrainBatch(
        train_step=0,
        prompt_lengths=(1,),
        response_lengths=(len(ids) - 1,),
        unmasked=(len(ids) - 1,),
        rollouts=(0,),
        columns={"token_ids": ArrayColumn("sequence", (ids,))},
    )


def probe(model: Model, token_ids: Sequence[int]) -> tuple[float, ...]:
    """Log-prob of every token but the first, at temperature 1."""
    rows = Rows(_row(token_ids), model.device)
    own = model.token_values(rows, temperature=1.0).tolist()
    said = model.standing.world.everyones(own if model.standing.speaks else None)
    return tuple(next(values for values in said if values is not None))


def likely_tokens(model: Model, count: int) -> tuple[int, ...]:
    """Tokens that the model itself would choose, one after another: greedy decoding from the middle of its
    vocabulary, without a cache."""
    tokens = [model.config.vocab_size // 2]
    while len(tokens) < count:
        best: list[tuple[float, int]] = []

        def keep(batch: MicroBatch, output: Tensor, best: list[tuple[float, int]] = best) -> Tensor:
            logits = output[0, batch.numbers == batch.count - 1].float()  # [1, V / tensor parallel ranks], or [0, ...]
            first = model.standing.tensor.rank() * logits.shape[-1]
            if len(logits) and first < model.config.vocab_size:  # else this rank has padding, or other places, only
                value, column = logits[0, : model.config.vocab_size - first].max(-1)
                best.append((float(value), first + int(column)))
            return output.new_zeros(())

        model.run(model.forwards(Rows(_row([*tokens, 0]), model.device)), keep)
        tokens.append(max(found for own in model.standing.world.everyones(best) for found in own)[1])
    return tuple(tokens)
