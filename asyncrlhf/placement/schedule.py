"""List scheduling of a candidate's stages on its sets of devices, several train steps unrolled: who is busy when.

A stage waits for the stages that it reads from and for its devices; generation of step j waits for the weights that
train step j - lookahead - 1 has published. Durations are fixed; `simulate` is for those that vary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrlhf.placement.plan import Candidate

__all__ = ("Schedule", "Slice", "Task", "schedule", "tasks_of")


@dataclass(frozen=True, slots=True)
class Task:
    """One stage of every train step. `after`: (stage, how many train steps earlier)."""

    name: str
    seconds: float
    places: tuple[str, ...]
    """Devices that it has to itself, by any name; none: it waits for nobody."""
    after: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Slice:
    """A stage that ran. Example: Slice("rollout", 3, 10.0, 14.5, ("set 0",))."""

    task: str
    step: int
    start: float
    end: float
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """`step`: seconds per train step in the second half of those unrolled. `busy`: share of it per place."""

    slices: tuple[Slice, ...]
    step: float
    busy: Mapping[str, float]


def schedule(tasks: Sequence[Task], steps: int = 12) -> Schedule:
    """Earliest start first, older train steps first. `steps`: unrolled, at least 2."""
    ends: dict[tuple[str, int], float] = {}
    free: dict[str, float] = {place: 0.0 for task in tasks for place in task.places}
    waiting = [(step, task) for step in range(steps) for task in tasks]
    slices: list[Slice] = []
    while waiting:
        best: tuple[float, int, int] | None = None
        for i, (step, task) in enumerate(waiting):
            if best is not None and step > best[1] + steps // 2:
                break
            before = [(name, step - lag) for name, lag in task.after if step >= lag]
            if all(each in ends for each in before):
                start = max([ends[each] for each in before] + [free[place] for place in task.places], default=0.0)
                if best is None or (start, step) < best[:2]:
                    best = start, step, i
        assert best is not None, "the stages wait for each other"
        start, step, i = best
        task = waiting.pop(i)[1]
        end = start + task.seconds
        ends[task.name, step] = end
        free |= dict.fromkeys(task.places, end)
        slices.append(Slice(task.name, step, start, end, task.places))
    done = [max(end for (_, at), end in ends.items() if at == step) for step in range(steps)]
    half = steps // 2
    begin, end = done[half - 1], done[-1]
    busy = {
        place: sum(max(0.0, min(s.end, end) - max(s.start, begin)) for s in slices if place in s.places)
        / max(end - begin, 1e-12)
        for place in free
    }
    return Schedule(tuple(slices), (end - begin) / (steps - half), busy)


def tasks_of(candidate: Candidate, lookahead: int, reward: float) -> list[Task]:
    """The stages of one train step of a candidate, each on its set; a set's switches are a stage of their own."""
    home = {m.unit.name: f"set {i}" for i, part in enumerate(candidate.sets) for m in part.members}
    lane = {m.unit.name: m.lane for part in candidate.sets for m in part.members}
    stages = {name: stage for part in candidate.sets for name, stage in part.stages.items()}
    lanes = {f"set {i}": sorted({m.lane for m in part.members if m.lane}) for i, part in enumerate(candidate.sets)}

    def places(name: str) -> tuple[str, ...]:
        """A member of a lane takes its lane only; the others take every lane of their set."""
        if lane[name]:
            return (f"{home[name]} {lane[name]}",)
        return tuple(f"{home[name]} {each}" for each in lanes[home[name]]) or (home[name],)

    tasks: list[Task] = []
    rollout = next(part for part in candidate.sets if "rollout" in part.stages)
    generate = rollout.stream if lookahead else rollout.generate
    last = "reward latency" if reward else "rollout"
    tasks.append(Task("rollout", generate, places("rollout"), (("sync", lookahead + 1),)))
    if lookahead and rollout.generate > generate:
        tasks.append(Task("tail", rollout.generate - generate, (), (("rollout", 0),)))
        last = "tail"
    if reward:
        tasks.append(Task("reward latency", reward, (), ((last, 0),)))
        last = "reward latency"
    prepared: list[str] = []
    for name, stage in stages.items():
        if stage.prepare:
            tasks.append(Task(f"{name} reads", stage.prepare, places(name), ((last, 0),)))
            prepared.append(f"{name} reads")
    trained: list[str] = []
    for name, stage in stages.items():
        if stage.train:
            before = tuple((each, 0) for each in (prepared or [last]))
            tasks.append(Task(f"{name} trains", stage.train, places(name), (*before, (f"{name} trains", 1))))
            trained.append(f"{name} trains")
    exposed = candidate.sync.seconds if not lookahead else candidate.sync.exposed
    switch = max(part.switch for part in candidate.sets)
    held = places("rollout")
    tasks.append(Task("sync", exposed + switch, held, (*((name, 0) for name in trained), ("sync", 1))))
    return tasks
