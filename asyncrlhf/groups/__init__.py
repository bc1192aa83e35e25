"""WHO: the typed handles an algorithm talks to."""

from asyncrlhf.groups.group import Group as Group
from asyncrlhf.groups.reference import ReferenceGroup as ReferenceGroup
from asyncrlhf.groups.reward import RewardGroup as RewardGroup
from asyncrlhf.groups.rollout import RolloutGroup as RolloutGroup
from asyncrlhf.groups.shadow import ShadowGroup as ShadowGroup
from asyncrlhf.groups.train import CriticGroup as CriticGroup
from asyncrlhf.groups.train import PolicyGroup as PolicyGroup
from asyncrlhf.groups.train import TrainGroup as TrainGroup
