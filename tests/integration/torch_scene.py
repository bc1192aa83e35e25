"""Small real models and batches for the tests of the torch backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrlhf import ops
from asyncrlhf.backends.torch.guard import guard_companions
from asyncrlhf.backends.torch.options import OptimizerOptions, TrainerOptions
from asyncrlhf.backends.torch.scratch import write_model
from asyncrlhf.backends.torch.train import TorchTrainer
from asyncrlhf.messages import ArrayColumn, GenerateRequest, Sample, TrainBatch, pack

guard_companions()
from transformers import AutoModelForCausalLM  # noqa: E402

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+=> "
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "tie_word_embeddings": True,
}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}>{% endfor %}"


class PolicyLoss(ops.Loss, frozen=True):
    """PPO's clipped loss, token mean."""

    clip: float = 0.2

    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> torch.Tensor:
        ratio = (new.logprobs - batch.anchor_logprobs).exp()
        return -batch.weight * ops.clipped_gain(ratio, batch.advantages, self.clip, self.clip)


class SequenceMeanLoss(PolicyLoss, frozen=True):
    reduction = "sequence_mean"


class ConstantLoss(PolicyLoss, frozen=True):
    reduction = "constant"


class EntropyLoss(PolicyLoss, frozen=True):
    needs = ("entropy",)

    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> torch.Tensor:
        assert new.entropy is not None
        return super().__call__(new, batch) - 0.01 * new.entropy


class SequenceRatioLoss(ops.Loss, frozen=True):
    """One importance ratio per row (GSPO, arXiv 2507.18071)."""

    level = "sequence"

    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> torch.Tensor:
        ratio = batch.mean_by_sequence(new.logprobs - batch.anchor_logprobs).exp()
        return -ratio * batch.advantages


class RawRatioLoss(ops.Loss, frozen=True):
    """A loss that does not clamp: its value and gradient are infinite for a token with a tiny behaviour log-prob."""

    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> torch.Tensor:
        return -(new.logprobs - batch.behaviour_logprobs).exp() * batch.advantages


class KLLoss(ops.Loss, frozen=True):
    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> torch.Tensor:
        return ops.k3(new.logprobs, batch.reference_logprobs)


class ValueLoss(ops.Loss, frozen=True):
    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> torch.Tensor:
        assert new.values is not None
        return (new.values - batch.returns) ** 2


class WrongShape(ops.Loss, frozen=True):
    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> torch.Tensor:
        return new.logprobs.mean()


def make_model(directory: Path, *, model_type: str = "qwen2", seed: int = 0, **changes: Any) -> str:
    """A small model whose distribution is far from uniform."""
    write_model(
        directory,
        model_type=model_type,
        characters=CHARACTERS,
        config={name: value for name, value in (CONFIG | changes).items() if value is not None},
        seed=seed,
        chat_template=TEMPLATE,
    )
    model = AutoModelForCausalLM.from_pretrained(directory)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=random)
            parameter.mul_(2.0) if parameter.dim() > 1 else parameter.add_(noise)
    model.save_pretrained(directory)
    return str(directory)


def make_batch(
    rows: int = 11, *, seed: int = 0, train_step: int = 3, masked: float = 0.2, shared: int = 3
) -> TrainBatch:
    """Ragged rows, `shared` of them in a row behind one prompt, some tokens masked, one row wholly."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 12, rows)
    prompts = [random.integers(2, 42, n) for n in random.integers(2, 7, rows)]
    prompts = [prompts[i // shared * shared] for i in range(rows)]
    masks = [(random.random(n) >= masked).astype(np.float32) for n in lengths]
    masks[1][:] = 0.0

    def per_token(draw: Any) -> ArrayColumn:
        return ArrayColumn("token", tuple(draw(n).astype(np.float32) for n in lengths))

    return TrainBatch(
        train_step=train_step,
        prompt_lengths=tuple(len(p) for p in prompts),
        response_lengths=tuple(int(n) for n in lengths),
        unmasked=tuple(int(m.sum()) for m in masks),
        rollouts=tuple(i // shared for i in range(rows)),
        columns={
            "token_ids": ArrayColumn(
                "sequence",
                tuple(
                    np.concatenate([p, random.integers(2, 42, n)]).astype(np.int32)
                    for p, n in zip(prompts, lengths, strict=True)
                ),
            ),
            "behaviour_logprobs": per_token(lambda n: random.normal(-3, 0.3, n)),
            "mask": ArrayColumn("token", tuple(masks)),
            "versions": ArrayColumn("token", tuple(np.full(n, train_step, np.int32) for n in lengths)),
            "rewards": ArrayColumn("sample", tuple(random.normal(0, 1, 1).astype(np.float32) for _ in lengths)),
            "advantages": per_token(lambda n: random.normal(0, 1, n)),
        },
    )


def replace_token(batch: TrainBatch, name: str, row: int, place: int, value: float) -> TrainBatch:
    """The batch with one number of a token column replaced."""
    column = batch.columns[name]
    rows = [np.array(values) for values in column.fetch()]
    rows[row][place] = value
    return batch.with_columns(**{name: ArrayColumn(column.level, tuple(rows))})


def with_behaviour(batch: TrainBatch, logprobs: Sequence[np.ndarray]) -> TrainBatch:
    """The batch as if the model that gave `logprobs` had sampled it."""
    return batch.with_columns(behaviour_logprobs=ArrayColumn("token", tuple(logprobs)))


def make_requests(
    count: int,
    *,
    seed: int = 0,
    max_tokens: int = 9,
    temperature: float = 1.0,
    stops: tuple[int, ...] = (0, 5, 6, 7),
    prefix: str = "r",
) -> list[GenerateRequest]:
    """Ragged requests, every third prompt twice."""
    random = np.random.default_rng(seed)
    prompts = [tuple(random.integers(2, 42, n).tolist()) for n in random.integers(1, 8, count)]
    return [
        GenerateRequest(
            request_id=f"{prefix}{i}",
            prompt_token_ids=prompts[i - (i % 3 == 2)],
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=stops,
            seed=1000 * seed + i,
        )
        for i in range(count)
    ]


@torch.no_grad()
def reference_logprobs(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """float32 [len(tokens)] log-probs from one plain forward of the whole sequence."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / (temperature or 1.0)
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def largest_gap(model: Any, request: GenerateRequest, sample: Sample) -> float:
    """Largest difference between a sample's log-probs and those of a plain forward."""
    found = reference_logprobs(model, request.prompt_token_ids, sample.token_ids, request.temperature)
    return float((found - torch.tensor(sample.logprobs)).abs().max())


def trainer(model: str, **options: Any) -> TorchTrainer:
    options.setdefault("optimizer", OptimizerOptions(learning_rate=1e-3, max_grad_norm=1e9))
    return TorchTrainer(TrainerOptions(model=model, device="cpu", max_response_tokens=12, **options))


def weights(engine: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine._model.parameters().items()}


def gradients(engine: TorchTrainer, batch: TrainBatch, loss: ops.Loss) -> dict[str, torch.Tensor]:
    """Gradients of one step, caught where the optimizer would take them."""
    caught: dict[str, torch.Tensor] = {}

    def keep(train_step: int, norm: float) -> float:
        caught.update({n: p.grad.clone() for n, p in engine._model.parameters().items() if p.grad is not None})
        return 0.0

    original, engine._optimizer.step = engine._optimizer.step, keep  # type: ignore[method-assign]
    assert engine.step(batch, pack(loss)).applied
    engine._optimizer.step = original  # type: ignore[method-assign]
    engine._optimizer.zero_grad()
    return caught


def tensors_of(engine: TorchTrainer) -> list[torch.Tensor]:
    """Copies of the optimizer's moments and step counts."""
    leaves = torch.utils._pytree.tree_leaves(engine._optimizer.state())
    return [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of a tensor."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - e).norm() / e.norm().clamp(min=1e-12)) for n, e in expected.items())
