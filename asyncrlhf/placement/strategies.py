"""Named ways to put units on devices, each as the sets that share devices. Names after HybridFlow (colocate, split,
standalone; arXiv 2409.19256) and the adaptive placement paper (flattening, interleaving, separation; 2312.11819)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from asyncrlhf.errors import ConfigError
from asyncrlhf.placement.models import ModelSpec
from asyncrlhf.placement.workload import Workload

__all__ = ("STRATEGIES", "Strategy", "partitions", "strategies")

STRATEGIES = (
    *("colocate", "flattening", "interleaving", "separation", "standalone"),
    *("split", "async", "alternating", "auto"),
)


@dataclass(frozen=True, slots=True)
class Strategy:
    """Sets of unit names. Example: split is (("rollout", "policy", "reference"), ("critic", "reward"))."""

    name: str
    sets: tuple[tuple[str, ...], ...]
    lanes: tuple[tuple[str, ...], ...] = ()
    """Interleaving: units that divide the devices of the only set among them, and run at once."""
    shadows: bool = False
    """The critic's values come from a copy that follows it."""
    gathers: bool = False
    """Generation collects weights that all devices shard, token by token: what colocate is without engines of its own
    (flattening)."""
    symmetric: bool = False
    """Every worker generates and trains its share under one layout: nothing is resharded (alternating)."""

    @property
    def label(self) -> str:
        """For people. Example: "auto {rollout} {policy, critic} {reference, reward}"."""
        if self.name != "auto":
            return self.name
        return " ".join([self.name, *("{" + ", ".join(part) + "}" for part in self.sets)])


def partitions(names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to divide names into sets: 15 for 4, 52 for 5, 203 for 6 (Bell's numbers)."""
    if not names:
        yield ()
        return
    first, rest = names[0], names[1:]
    for parts in partitions(rest):
        yield ((first,), *parts)
        for i, part in enumerate(parts):
            yield (*parts[:i], (first, *part), *parts[i + 1 :])


def strategies(
    wanted: list[str], models: Mapping[str, ModelSpec], work: Workload
) -> Iterator[Strategy | tuple[str, str]]:
    """The strategies called `wanted`; (name, reason) for one that these models or this staleness cannot have. Raises
    ConfigError for a name that is none."""
    roles = {name: model.role for name, model in models.items()}
    policy = [name for name, role in roles.items() if role == "policy"]
    critics = [name for name, role in roles.items() if role == "critic"]
    frozen = [name for name, role in roles.items() if role in ("reference", "reward")]
    everything = ("rollout", *policy, *critics, *frozen)
    for name in wanted:
        match name:
            case "colocate":
                yield Strategy(name, (everything,))
            case "flattening":
                yield Strategy(name, (everything,), gathers=True)
            case "alternating":
                yield Strategy("alternating", (everything,), symmetric=True)
            case "interleaving":
                if len(frozen) < 2:
                    yield name, f"{len(frozen)} frozen models cannot run beside each other; it takes 2"
                else:
                    yield Strategy(name, (everything,), lanes=tuple((each,) for each in frozen))
            case "separation":
                shadow = ("shadow_critic",) if critics else ()
                alone = tuple((each,) for each in (*policy, *critics, "rollout", *shadow, *frozen))
                yield Strategy(name, alone, shadows=bool(critics))
                if critics:
                    shared = (*((each,) for each in (*policy, *critics)), ("rollout", *shadow))
                    yield Strategy(f"{name}, shared shadow", (*shared, *((each,) for each in frozen)), shadows=True)
            case "standalone":
                yield Strategy(name, (("rollout", *policy), *((each,) for each in (*critics, *frozen))))
            case "split":
                with_policy = [each for each in frozen if roles[each] == "reference"]
                others = (*critics, *(each for each in frozen if roles[each] == "reward"))
                if others:
                    yield Strategy(name, (("rollout", *policy, *with_policy), others))
                else:
                    yield name, "there is neither a critic nor a reward model to split off; use colocate or async"
            case "async":
                if work.ahead:
                    yield Strategy(name, (("rollout",), (*policy, *critics, *frozen)))
                else:
                    yield (
                        name,
                        (
                            f"lookahead = {work.ahead} (max_staleness = {work.max_staleness}): the two pools would "
                            "take turns; it takes max_staleness of 1 or more"
                        ),
                    )
            case "auto":
                for parts in partitions(everything):
                    yield Strategy("auto", parts)
            case _:
                raise ConfigError(f'strategy = "{name}" is not a strategy; use one of {", ".join(STRATEGIES)}')
