"""The seams: what backends, runtimes and weight transports implement."""

from asyncrlhf.abc.engine import Engine as Engine
from asyncrlhf.abc.engine import GenerateEngine as GenerateEngine
from asyncrlhf.abc.engine import RewardEngine as RewardEngine
from asyncrlhf.abc.engine import ScoreEngine as ScoreEngine
from asyncrlhf.abc.engine import ShadowEngine as ShadowEngine
from asyncrlhf.abc.engine import TrainEngine as TrainEngine
from asyncrlhf.abc.runtime import Beside as Beside
from asyncrlhf.abc.runtime import EngineHandle as EngineHandle
from asyncrlhf.abc.runtime import EngineSpec as EngineSpec
from asyncrlhf.abc.runtime import InFlight as InFlight
from asyncrlhf.abc.runtime import Needs as Needs
from asyncrlhf.abc.runtime import OnEvents as OnEvents
from asyncrlhf.abc.runtime import Place as Place
from asyncrlhf.abc.runtime import Runtime as Runtime
from asyncrlhf.abc.transfer import WeightTransfer as WeightTransfer
