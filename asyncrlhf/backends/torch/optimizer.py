"""AdamW under a schedule that is a pure function of the train step, with a gradient check that can refuse a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from asyncrlhf.backends.torch.away import Away
from asyncrlhf.backends.torch.options import OptimizerOptions
from asyncrlhf.backends.torch.world import gathered, spread_like

__all__ = ("Optimizer", "learning_rate")


def learning_rate(options: OptimizerOptions, train_step: int) -> float:
    """Learning rate of a train step, counted from 0: above 0 at step 0, and exactly `min_ratio` of the peak from the
    last step, total_steps - 1, on (a run of one step runs at the peak)."""
    if train_step < options.warmup_steps:
        return options.learning_rate * (train_step + 1) / options.warmup_steps
    if options.schedule == "constant":
        return options.learning_rate
    steps = options.total_steps - 1 - options.warmup_steps
    progress = min(1.0, (train_step - options.warmup_steps) / steps) if steps > 0 else 0.0
    left = 1.0 - progress if options.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return options.learning_rate * (options.min_ratio + (1.0 - options.min_ratio) * left)


class Optimizer:
    """AdamW (arXiv 1711.05101), without decay on biases and norms."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], options: OptimizerOptions) -> None:
        self.options = options
        self._away: Away | None = None
        self._parameters = list(parameters.values())
        matrices = [p for p in self._parameters if p.dim() >= 2]
        vectors = [p for p in self._parameters if p.dim() < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=all(p.device.type in ("cpu", "cuda") for p in self._parameters),
        )
        for parameter in self._parameters:  # not at the first step, when a run that fits so far would run out of memory
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def offload(self) -> None:
        """Drop gradients, and move the moments to the host where they are on a device; no step until `onload`."""
        self.zero_grad()
        if self._away is None:
            moments = (tensor for own in self._adamw.state.values() for tensor in own.values())
            self._away = Away(tensor for tensor in moments if tensor.device.type != "cpu")

    def onload(self) -> None:
        if self._away is not None:
            self._away.back()
            self._away = None

    def gradient_norm(self) -> Tensor:
        """Global norm of the gradients, float32 [], over all ranks that keep parts of them; not finite if any of them
        is not."""
        return gathered(nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None]))

    def step(self, train_step: int, norm: Tensor) -> float:
        """Clip gradients of global norm `norm`, apply them and drop them; gives the learning rate used."""
        nn.utils.clip_grads_with_norm_(self._parameters, self.options.max_grad_norm or math.inf, norm)
        rate = learning_rate(self.options, train_step)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.zero_grad()
        return rate

    def state(self, keep: Callable[[Tensor], Tensor | None] = Tensor.detach) -> dict[str, Any]:
        """Everything that the next step depends on; `keep` makes of each moment what is to be kept of it."""
        state = self._adamw.state_dict()
        moments = {
            number: {name: keep(tensor) for name, tensor in sorted(own.items())}
            for number, own in sorted(state["state"].items())
        }
        return {"state": moments, "param_groups": state["param_groups"]}

    def load(self, state: dict[str, Any]) -> None:
        """Take over whole moments."""
        parameters = [parameter for group in self._adamw.param_groups for parameter in group["params"]]
        moments = {
            number: {
                name: (tensor if name == "step" else spread_like(tensor, parameters[number])).clone()
                for name, tensor in own.items()
            }
            for number, own in state["state"].items()
        }
        self._adamw.load_state_dict({"state": moments, "param_groups": state["param_groups"]})
