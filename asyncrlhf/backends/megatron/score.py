"""The scoring engine of the megatron backend: log-probs or scores of answers under a frozen model, with the trainer's
forward."""

from __future__ import annotations

from asyncrlhf.abc import ScoreEngine
from asyncrlhf.backends.megatron.engine import MegatronEngine
from asyncrlhf.backends.torch.world import World

__all__ = ("MegatronScorer",)


class MegatronScorer(MegatronEngine, ScoreEngine):
    """One rank of a frozen Hugging Face model: a causal language model, such as the reference of a KL penalty, or one
    with a value head, such as a reward model."""

    def _begin(self, world: World, timeout: float) -> None:
        super()._begin(world, timeout)
        for _, parameter, _ in self._model.parameters():
            parameter.requires_grad_(False)
