"""megatron-core's distributed AdamW under the schedule of the torch engines, with a gradient check that can refuse a
step. All ranks call everything here together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from asyncrlhf.backends.megatron.cpu import calling, import_quietly
from asyncrlhf.backends.megatron.model import Model
from asyncrlhf.backends.megatron.options import OptimizerOptions
from asyncrlhf.backends.torch.optimizer import learning_rate

__all__ = ("Optimizer",)


class Optimizer:
    """AdamW (arXiv 1711.05101), without decay on biases and norms; each data parallel rank keeps a part of main
    parameters and moments."""

    def __init__(self, model: Model, options: OptimizerOptions) -> None:
        self.options = options
        self._model = model
        optimizer = import_quietly("megatron.core.optimizer")
        settings = optimizer.OptimizerConfig(
            optimizer="adam",
            lr=options.learning_rate,
            min_lr=0.0,
            weight_decay=options.weight_decay,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_eps=options.eps,
            clip_grad=0.0,
            bf16=model.options.dtype == "bfloat16",
            params_dtype=torch.bfloat16 if model.options.dtype == "bfloat16" else torch.float32,
            use_distributed_optimizer=True,
        )
        with calling():
            self.inner: Any = optimizer.get_megatron_optimizer(settings, model.wrapped)
        for group in self.inner.param_groups:  # megatron-core leaves this to its own scheduler
            group["weight_decay"] = options.weight_decay * group["wd_mult"]
        self.allocate()

    def allocate(self) -> None:
        """Make room for the moments now: not at the first step, when a run that fits so far would run out of memory."""
        for adamw in self.adamws():
            counts = isinstance(adamw, torch.optim.AdamW)  # Transformer Engine's has a step count per group
            for parameter in (p for group in adamw.param_groups for p in group["params"]):
                if not adamw.state[parameter]:
                    adamw.state[parameter] = {
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
                    if counts:
                        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                        adamw.state[parameter]["step"] = step

    def adamws(self) -> Iterator[torch.optim.Optimizer]:
        """This rank's optimizers: of dense parameters, and of experts if there are any."""
        for optimizer in self.inner.chained_optimizers:
            if optimizer.optimizer is not None:
                yield optimizer.optimizer

    def zero_grad(self) -> None:
        with calling():
            for chunk in self._model.wrapped:
                chunk.zero_grad_buffer()
            self.inner.zero_grad()

    def gradient_norm(self) -> float:
        """Global norm of the gradients; not finite if any of them is not."""
        with calling():
            self.inner.prepare_grads()
            return float(self.inner.get_grad_norm())

    def step(self, train_step: int, norm: float) -> float:
        """Clip gradients of global norm `norm`, apply them and drop them; gives the learning rate used."""
        rate = learning_rate(self.options, train_step)
        scale = (self.options.max_grad_norm or math.inf) / (norm + 1e-6)
        for group in self.inner.param_groups:
            group["lr"] = rate
            for parameter in group["params"]:
                if scale < 1.0 and parameter.grad is not None:
                    parameter.grad.mul_(scale)
        with calling():
            self.inner.step_with_ready_grads()
        self.zero_grad()
        return rate
