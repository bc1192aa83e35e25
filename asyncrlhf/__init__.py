"""asyncrlhf: model groups as async actors, joined by typed queues with bounded staleness. Imports no torch."""

from asyncrlhf.algorithm import Algorithm as Algorithm
from asyncrlhf.algorithm import Stage as Stage
from asyncrlhf.algorithm import gather as gather
from asyncrlhf.control.coordinator import Coordinator as Coordinator
from asyncrlhf.errors import AsyncRLHFError as AsyncRLHFError
from asyncrlhf.errors import ConfigError as ConfigError
from asyncrlhf.errors import SampleError as SampleError
from asyncrlhf.flow.experience import ExperienceQueue as ExperienceQueue
from asyncrlhf.flow.prompts import PromptSource as PromptSource
from asyncrlhf.flow.prompts import StageQueue as StageQueue
from asyncrlhf.groups import CriticGroup as CriticGroup
from asyncrlhf.groups import PolicyGroup as PolicyGroup
from asyncrlhf.groups import ReferenceGroup as ReferenceGroup
from asyncrlhf.groups import RewardGroup as RewardGroup
from asyncrlhf.groups import RolloutGroup as RolloutGroup
from asyncrlhf.messages import Experience as Experience
from asyncrlhf.messages import PerSample as PerSample
from asyncrlhf.messages import PerToken as PerToken
from asyncrlhf.messages import Prompt as Prompt
from asyncrlhf.messages import Rollout as Rollout
from asyncrlhf.messages import Sample as Sample
from asyncrlhf.messages import Segment as Segment
from asyncrlhf.messages import Statistics as Statistics
from asyncrlhf.messages import TrainBatch as TrainBatch

__version__ = "0.1.0"
