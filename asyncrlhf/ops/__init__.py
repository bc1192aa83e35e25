"""Tensor mathematics: losses, advantages and off-policy corrections are built from these. Loads no torch by itself."""

from asyncrlhf.ops.advantages import GAE as GAE
from asyncrlhf.ops.advantages import whiten as whiten
from asyncrlhf.ops.batch import MicroBatch as MicroBatch
from asyncrlhf.ops.batch import TokenStats as TokenStats
from asyncrlhf.ops.losses import Level as Level
from asyncrlhf.ops.losses import Loss as Loss
from asyncrlhf.ops.losses import Reduction as Reduction
from asyncrlhf.ops.losses import Transform as Transform
from asyncrlhf.ops.losses import clipped_gain as clipped_gain
from asyncrlhf.ops.losses import k3 as k3
from asyncrlhf.ops.losses import outside as outside
from asyncrlhf.ops.losses import ratio as ratio
from asyncrlhf.ops.rewards import KLControl as KLControl
from asyncrlhf.ops.rewards import RewardScale as RewardScale
from asyncrlhf.ops.rewards import TokenRewards as TokenRewards
from asyncrlhf.ops.rewards import sequence_kl as sequence_kl
