"""Which table belongs to which role. The tables themselves are in compute, trained, rollouts and frozen. Torch-free."""

from __future__ import annotations

from typing import cast

from msgspec import Struct

from asyncrlhf.config.compute import Compute as Compute
from asyncrlhf.config.frozen import Frozen as Frozen
from asyncrlhf.config.frozen import MegatronFrozen as MegatronFrozen
from asyncrlhf.config.frozen import MegatronReward as MegatronReward
from asyncrlhf.config.frozen import MegatronScore as MegatronScore
from asyncrlhf.config.frozen import Rules as Rules
from asyncrlhf.config.frozen import TorchReward as TorchReward
from asyncrlhf.config.frozen import TorchScore as TorchScore
from asyncrlhf.config.frozen import TorchShadow as TorchShadow
from asyncrlhf.config.rollouts import RolloutTable as RolloutTable
from asyncrlhf.config.rollouts import TorchRollout as TorchRollout
from asyncrlhf.config.rollouts import VllmRollout as VllmRollout
from asyncrlhf.config.trained import MegatronCritic as MegatronCritic
from asyncrlhf.config.trained import MegatronTrain as MegatronTrain
from asyncrlhf.config.trained import OptimizerTable as OptimizerTable
from asyncrlhf.config.trained import Scratch as Scratch
from asyncrlhf.config.trained import TorchCritic as TorchCritic
from asyncrlhf.config.trained import TorchTrain as TorchTrain
from asyncrlhf.config.trained import Trained as Trained

__all__ = (
    "Compute",
    "Frozen",
    "MegatronCritic",
    "MegatronFrozen",
    "MegatronReward",
    "MegatronScore",
    "MegatronTrain",
    "OptimizerTable",
    "ROLES",
    "RolloutTable",
    "Rules",
    "Scratch",
    "TorchCritic",
    "TorchReward",
    "TorchRollout",
    "TorchScore",
    "TorchShadow",
    "TorchTrain",
    "Trained",
    "VllmRollout",
)


ROLES: dict[str, type[Struct]] = {
    "policy": cast("type[Struct]", TorchTrain | MegatronTrain),
    "critic": cast("type[Struct]", TorchCritic | MegatronCritic),
    "rollout": cast("type[Struct]", TorchRollout | VllmRollout),
    "reference": cast("type[Struct]", TorchScore | MegatronScore),
    "reward": cast("type[Struct]", Rules | TorchReward | MegatronReward),
    "shadow": TorchShadow,
}
"""The table of each role, or a union of them, told apart by the key `backend`; without it the first counts."""
