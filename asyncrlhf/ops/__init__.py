"""Tensor mathematics: losses, advantages and off-policy corrections are built from these. Loads no torch by itself."""

from asyncrlhf.ops.advantages import GAE as GAE
from asyncrlhf.ops.advantages import whiten as whiten
from asyncrlhf.ops.batch import MicroBatch as MicroBatch
from asyncrlhf.ops.batch import TokenStats as TokenStats
from asyncrlhf.ops.losses import Loss as Loss
from asyncrlhf.ops.losses import Reduction as Reduction
from asyncrlhf.ops.losses import Transform as Transform
from asyncrlhf.ops.losses import clipped_gain as clipped_gain
from asyncrlhf.ops.losses import k3 as k3
