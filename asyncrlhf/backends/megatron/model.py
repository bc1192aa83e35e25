"""One rank's part of a megatron model: loaded from a Hugging Face directory, and asked about response tokens only.

Every method waits for the other ranks of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncrlhf.backends.megatron import families
from asyncrlhf.backends.megatron.build import build
from asyncrlhf.backends.megatron.cpu import calling, import_quietly
from asyncrlhf.backends.megatron.microbatch import MicroBatch, grain, micro_batch, width_of
from asyncrlhf.backends.megatron.options import MegatronOptions
from asyncrlhf.backends.megatron.parallel import Standing
from asyncrlhf.backends.megatron.vocabulary import token_stats
from asyncrlhf.backends.torch.data import Rows
from asyncrlhf.backends.torch.layout import Cut, Integers
from asyncrlhf.messages import Array
from asyncrlhf.ops import TokenStats

__all__ = ("Model",)

Finish = Callable[[MicroBatch, Tensor], Tensor]
"""From a micro-batch and what the head gave for its tokens on this rank, [1, S, ...], to its share of the objective,
float32 []."""


class Model:
    """GPTModel chunks of this rank under megatron-core's data parallel wrapper, and the schedule that runs them."""

    def __init__(self, options: MegatronOptions, config: Any, device: torch.device, standing: Standing) -> None:
        """`config`: the Hugging Face configuration. Raises ConfigError for an architecture that cannot be built."""
        self.options, self.config, self.standing, self.device = options, config, standing, device
        self.directory = Path(options.model)
        self.transformer, self.chunks = build(options, config, device)
        self.wrapped: list[Any] = self.chunks
        self._selected: Tensor | None = None
        for chunk in self.chunks:
            if chunk.post_process:
                self._select_before(chunk.output_layer)
        row, self._multiple = grain(standing, options.sequence_parallel)
        self._cut = Cut(tokens=options.micro_batch_tokens, layout="packed", multiple=row)
        self._schedule = import_quietly("megatron.core.pipeline_parallel").get_forward_backward_func()

    def wrap(self) -> None:
        """Make buffers for gradients, which data parallel ranks then bring together."""
        distributed = import_quietly("megatron.core.distributed")
        if self.options.dtype == "bfloat16":
            module = import_quietly("megatron.core.transformer.module")
            inner = [module.Float16Module(self.transformer, chunk) for chunk in self.chunks]
        else:
            inner = self.chunks
        settings = distributed.DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        )
        self.wrapped = [distributed.DistributedDataParallel(self.transformer, settings, chunk) for chunk in inner]
        self.transformer.finalize_model_grads_func = distributed.finalize_model_grads

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, list[families.Piece]]]:
        """(name, parameter, where it lies in Hugging Face tensors) of every parameter of this rank; the name is that of
        the parameter in its chunk, behind the chunk's number."""
        expert = self.standing.expert
        first_expert = expert.rank() * (getattr(self.config, "num_experts", 0) // expert.size())
        for number, chunk in enumerate(self.chunks):
            layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
            for name, parameter in chunk.named_parameters():
                group = self.standing.expert_tensor if ".experts." in name else self.standing.tensor
                part = families.Part(
                    rank=group.rank(),
                    ranks=group.size(),
                    config=self.config,
                    value_head=self.options.head == "value",
                )
                found = families.pieces(name, tuple(parameter.shape), part, layers.__getitem__, first_expert)
                yield f"{number}.{name}", parameter, found

    def forwards(
        self, rows: Rows, chosen: Integers | None = None, *, whole_rollouts: bool = False, after: bool = False
    ) -> list[MicroBatch]:
        """The micro-batches of `chosen` rows (all by default), as many on every rank."""
        found = [
            *rows.forwards(
                self._cut, chosen, flash=True, whole_rollouts=whole_rollouts, after=after, rounds=self._rounds
            )
        ]
        widths = [width_of(forward, self._multiple) for forward in found]
        if self.options.virtual_pipeline > 1:
            widths = [max(widths)] * len(widths)
        return [micro_batch(forward, self.standing, width) for forward, width in zip(found, widths, strict=True)]

    def _rounds(self, count: int) -> int:
        """At least one, and whole rounds of an interleaved pipeline."""
        most = max(self.standing.world.everyones(count))
        stages = self.standing.pipeline.size() if self.options.virtual_pipeline > 1 else 1
        return -(-max(most, 1) // stages) * stages

    def run(self, batches: Sequence[MicroBatch], finish: Finish, *, backward: bool = False) -> None:
        """Forward every micro-batch, and on the last stage hand what comes out to `finish`; with `backward`, leave in
        the buffers the gradients of the sum of what that returns, over all data parallel copies."""
        count = len(batches)

        def finished(batch: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            share = output.float().sum() * 0.0 if batch.forward.idle else finish(batch, output)
            # the schedule divides by the number of micro-batches, and data parallel ranks take the mean
            return share * (count * self.standing.data.size()), {}

        def forward(batches: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(batches)
            self._selected = batch.selected
            output = chunk(batch.ids, batch.positions, None, packed_seq_params=batch.packed)
            return output, partial(finished, batch)

        iterators = [iter(batches) for _ in self.wrapped]
        several = len(iterators) > 1
        with calling(), torch.set_grad_enabled(backward):
            self._schedule(
                forward_step_func=forward,
                data_iterator=iterators if several else iterators[0],
                model=self.wrapped if several else self.wrapped[0],
                num_microbatches=count,
                seq_length=max(batch.ids.shape[1] for batch in batches) * self.standing.context.size(),
                micro_batch_size=1,
                forward_only=not backward,
            )

    def token_values(self, rows: Rows, *, temperature: float, after: bool = False) -> Array:
        """float32 [T]: log-prob of every response token of `rows`, or its value under a value head; zeros where this
        rank has no results."""
        found = np.zeros(len(rows.mask), dtype=np.float32)

        def keep(batch: MicroBatch, output: Tensor) -> Tensor:
            stats = self.stats(batch, output, temperature)
            values = stats.logprobs if stats.values is None else stats.values
            found[batch.forward.tokens] = values.cpu().numpy()
            return values.new_zeros(())

        self.run(self.forwards(rows, after=after), keep)
        return found

    def stats(self, batch: MicroBatch, output: Tensor, temperature: float, *, entropy: bool = False) -> TokenStats:
        """Of all T tokens of a micro-batch, on every context parallel rank, from the head's output on this one."""
        if self.options.head == "value":
            values = self._everyones(batch, output[0, :, 0].float())
            return TokenStats(logprobs=values.new_empty(0), values=values)
        logits = output[0].float()
        if temperature != 1.0:
            logits = logits / temperature
        logprobs, spread = token_stats(logits, batch.targets, self.config.vocab_size, self.standing.tensor)
        return TokenStats(
            logprobs=self._everyones(batch, logprobs), entropy=self._everyones(batch, spread) if entropy else None
        )

    def _everyones(self, batch: MicroBatch, own: Tensor) -> Tensor:
        if self.standing.context.size() == 1:
            return own
        return _Merged.apply(own, batch.numbers, batch.count, self.standing.context)  # type: ignore[return-value]

    def _select_before(self, output_layer: nn.Module) -> None:
        """Let only chosen places pass through the output layer, so that the logits of prompt tokens never exist."""
        tensor_parallel = import_quietly("megatron.core.tensor_parallel")
        spread = self.options.sequence_parallel
        if spread and isinstance(output_layer, tensor_parallel.ColumnParallelLinear):
            output_layer.sequence_parallel = False
            output_layer.allreduce_dgrad = True

        def select(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            assert self._selected is not None
            hidden = arguments[0]
            if spread:
                hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
            return (hidden.index_select(0, self._selected), *arguments[1:])

        output_layer.register_forward_pre_hook(select)


class _Merged(torch.autograd.Function):
    """Values of tokens that context parallel ranks have some of each -> values of all, on every one of them. Each takes
    back the gradient of its own: the loss is the same everywhere, and counts once."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, numbers: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(numbers)
        found = own.new_zeros(count)
        found[numbers] = own
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (numbers,) = ctx.saved_tensors
        return gradients[0][numbers], None, None, None
