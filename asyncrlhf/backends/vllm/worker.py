"""Inside vLLM's workers: weights from a trainer into the running model, without disk, in two phases.

vLLM mixes WeightsExtension into its worker class. Every worker holds a second set of its own parameters, which the
next version arrives in while the first is in use, and which is there before vLLM measures what a GPU has left for the
KV cache. The swap is one of pointers on a CPU, a copy within the device's memory on a GPU, whose captured graphs know
the parameters by address.

A worker that sleeps has neither set, nor a KV cache: on GPUs through vLLM's sleep mode, which keeps addresses, and on
CPUs, where vLLM has none, by freeing the tensors. Woken, it reads weights into the first set; a second one is there
again from the next `prepare` on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncrlhf.backends.torch.away import give_back
from asyncrlhf.backends.vllm.arrivals import Arrivals
from asyncrlhf.backends.vllm.environment import CPU_BUILD
from asyncrlhf.errors import ConfigError, PublishRefused
from asyncrlhf.messages import WeightHandle
from asyncrlhf.weights.pull import Receipt

from vllm.distributed.parallel_state import get_tp_group  # isort: skip
from vllm.model_executor.layers import utils as vllm_layers  # isort: skip
from vllm.v1.worker.utils import clear_layer_kv_caches  # isort: skip

__all__ = ("WeightsExtension",)


def _read_live_weights(layer: nn.Module, remove_weight: bool) -> None:
    """In place of vLLM's choice of a matrix product on CPUs: its faster ones compute with packed copies of the weights,
    which a new version does not reach (with tied embeddings without any error)."""
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


if CPU_BUILD:
    vllm_layers.dispatch_cpu_unquantized_gemm = _read_live_weights


class WeightsExtension:
    """What vLLM's workers can do in addition; called on all of them at once."""

    device: torch.device
    model_runner: Any
    sleep: Callable[..., None]
    wake_up: Callable[[list[str]], None]

    _asyncrlhf_arrivals: Arrivals

    def asyncrlhf_reserve(self, beside: Sequence[Sequence[int]]) -> str:
        """Allocate the second set; `beside`: see VllmOptions. Gives the reason if there is no room for it, or no shapes
        to check it by."""
        model, directory = self.model_runner.get_model(), Path(self.model_runner.model_config.model)
        group = get_tp_group()
        try:
            self._asyncrlhf_arrivals = Arrivals(
                model, self.device, directory, group.rank_in_group, group.world_size, beside
            )
        except ConfigError as refusal:
            return str(refusal)
        except torch.OutOfMemoryError as error:
            size = sum(parameter.nbytes for parameter in model.parameters()) / 2**30
            return (
                f"the weights take {size:.3g} GiB, and there is no room for them a second time, which the next version "
                "arrives in; raise tensor_parallel, choose a smaller dtype or a GPU of which less is in use "
                f"({error})"
            )
        return ""

    def asyncrlhf_reads_slices(self, allowed: bool) -> bool:
        """Whether it reads its slices, if that is `allowed`: the others have to do so, too."""
        if not allowed:
            self._asyncrlhf_arrivals.slices = None
        return self._asyncrlhf_arrivals.slices is not None

    def asyncrlhf_prepare(self, handle: WeightHandle) -> Receipt | str | None:
        """Receive weights into the second set; gives what was read, if it was slices. Gives the reason if they are
        refused; those in use stay."""
        try:
            return self._asyncrlhf_arrivals.receive(handle)
        except PublishRefused as refusal:
            return str(refusal)

    def asyncrlhf_commit(self) -> None:
        """Compute with what `asyncrlhf_prepare` brought."""
        self._asyncrlhf_arrivals.swap()

    def asyncrlhf_sleep(self) -> None:
        """Free weights and KV cache."""
        self._asyncrlhf_arrivals.release()
        if CPU_BUILD:
            clear_layer_kv_caches(self.model_runner.compilation_config.static_forward_context.values())
            self.model_runner.kv_caches.clear()
        else:
            self.sleep(level=2)
        give_back()

    def asyncrlhf_wake(self, handle: WeightHandle) -> Receipt | str | None:
        """Receive weights into the memory in which they stay; gives what `asyncrlhf_prepare` gives."""
        if not CPU_BUILD:
            self.wake_up(["weights"])
        try:
            return self._asyncrlhf_arrivals.refill(handle)
        except PublishRefused as refusal:
            return str(refusal)

    def asyncrlhf_wake_cache(self) -> None:
        """Make room for the KV cache again."""
        if CPU_BUILD:
            runner = self.model_runner
            runner.initialize_kv_cache_tensors(runner.kv_cache_config, runner._kernel_block_sizes)
        else:
            self.wake_up(["kv_cache"])
