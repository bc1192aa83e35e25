"""What every engine of the megatron backend has: a model over ranks that have met, asked for log-probs or scores. All
ranks wait for each other in every verb."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from asyncrlhf.backends.megatron import cpu
from asyncrlhf.backends.megatron.exchange import load
from asyncrlhf.backends.megatron.model import Model
from asyncrlhf.backends.megatron.options import MegatronOptions
from asyncrlhf.backends.megatron.parallel import Standing, leave, stand, start_alone
from asyncrlhf.backends.megatron.sizes import require_fits
from asyncrlhf.backends.torch.away import Away, give_back
from asyncrlhf.backends.torch.data import Rows, split_by_row
from asyncrlhf.backends.torch.engine import TorchEngine
from asyncrlhf.backends.torch.model import pick_device, read_config
from asyncrlhf.backends.torch.world import World, meet, open_store, own_device
from asyncrlhf.errors import GroupError
from asyncrlhf.messages import Array, TrainBatch

__all__ = ("MegatronEngine",)

FOREVER = 365 * 86400.0


class MegatronEngine(TorchEngine):
    """One rank of a model."""

    Options = MegatronOptions
    _built: Model
    _away: Away | None = None
    _store: Any = None

    def __init__(self, options: MegatronOptions) -> None:
        """Raises ConfigError: no such directory or device, an architecture or layout that cannot be built, missing
        weights."""
        self.options = options
        cpu.require_device(options.device)
        self._device = pick_device(options.device)
        if options.device == "cpu":
            cpu.install()
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # kernels then overlap as megatron-core means them to
        self._config = read_config(options.model, options.head)
        require_fits(options, self._config)
        if options.ranks == 1:
            self._begin(start_alone(self._device), FOREVER)

    def rendezvous(self, host: str, ranks: int) -> int:
        """A port of this machine, where `ranks` ranks can meet."""
        self._store, port = open_store(host, ranks)
        return port

    def join(self, host: str, port: int, rank: int, ranks: int, timeout: float) -> None:
        """Meet the other ranks. Raises ConfigError if they have to share a GPU, or the layout takes another number."""
        self._device = own_device(self._device, rank)
        self._begin(meet(self._store, host, port, rank, ranks, self._device, timeout), timeout)

    def _begin(self, world: World, timeout: float) -> None:
        """Build this rank's part of the model, and read its weights."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        with cpu.calling():
            self._built = Model(self.options, self._config, self._device, stand(self.options, world, timeout))
            load(self._model)

    @property
    def _model(self) -> Model:
        if self._away is not None:
            raise GroupError(f"model = {self.options.model!r} is asked for something while it is offloaded; onload it")
        return self._built

    def offload(self) -> None:
        """With device = "cpu" everything stays where it is, since it would move there."""
        if self._away is None:
            kept, gradients = (
                [t for t in some if t.device.type != "cpu"] for some in (self._held(), self._gradients())
            )
            self._away = Away(kept, gradients)
            give_back()

    def onload(self) -> None:
        if self._away is not None:
            self._away.back()
            self._away = None

    def _held(self) -> Iterator[Tensor]:
        """What the next verb depends on."""
        for chunk in self._model.chunks:
            yield from (tensor.detach() for tensor in (*chunk.parameters(), *chunk.buffers()))

    def _gradients(self) -> Iterator[Tensor]:
        """Memory that is zero between two verbs."""
        yield from ()

    @property
    def _standing(self) -> Standing:
        return self._model.standing

    def close(self) -> None:
        if "_built" in vars(self):
            leave(self._built.standing.world)
        super().close()

    def logprobs(self, batch: TrainBatch) -> Sequence[Array]:
        if self.options.head != "lm":
            raise ValueError(f"{self.options.model!r} was loaded with a value head, which has no log-probs")
        found = self._model.token_values(Rows(batch, self._device), temperature=self.options.temperature)
        return split_by_row(found, batch.response_lengths)

    def scores(self, batch: TrainBatch) -> list[float]:
        if self.options.head != "value":
            raise ValueError(f"{self.options.model!r} was loaded without a value head, which scores come from")
        found = self._model.token_values(Rows(batch, self._device), temperature=1.0, after=True)
        return [float(row[-1]) if len(row) else math.nan for row in split_by_row(found, batch.response_lengths)]
