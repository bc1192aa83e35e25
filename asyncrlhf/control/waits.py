"""Who waits for whom, as a run's parts know it: the gate's leases and trainer, the coordinator, the engines' calls.

Looks, changes nothing, waits for nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from asyncrlhf.abc import InFlight
from asyncrlhf.control.coordinator import Coordinator
from asyncrlhf.control.turns import Turns, engine_of
from asyncrlhf.flow.gate import Gate
from asyncrlhf.flow.queue import Queue, QueueStatistics
from asyncrlhf.groups import Group, TrainGroup
from asyncrlhf.groups.follower import Follower
from asyncrlhf.observe.waits import Wait, wait_lines

__all__ = ("waits_of",)

PUBLISHES = ("export", "prepare", "commit", "probe")
SAVES = ("save_model", "save_state", "load_state")
ADMISSION, BATCH = "admission", "the next batch"


def waits_of(
    gate: Gate,
    coordinator: Coordinator,
    groups: Mapping[str, Group],
    queues: Sequence[Queue[Any]],
    calls: Iterable[InFlight],
    now: float,
    turns: Sequence[Turns] = (),
) -> list[str]:
    """One line for everybody who waits. `now` and the times of `calls` are the event loop's."""
    step = f"train step {_step(gate)}"
    waits = [*_trainer(gate, step, coordinator.publishing, now), *_leases(gate), *_calls(calls, groups, step, now)]
    waits += [wait for each in turns for wait in each.waits(now)]
    waits += [Wait("the publish", whom, what, now - since) for (whom, what), since in coordinator.waits.items()]
    return wait_lines(waits, [*(line for each in turns for line in each.holders()), *_notes(groups, queues, now)])


def _step(gate: Gate) -> int:
    """The one that trains, that waits for its batch, or whose weights are being published."""
    if (training := gate.ledger.training) is not None:
        return training.step
    return gate.ledger.step if gate.pops() else max(0, gate.ledger.step - 1)


def _trainer(gate: Gate, step: str, publishing: bool, now: float) -> Iterator[Wait]:
    """The two ends of the gate: who waits for a batch, and who for room. `publishing`: while a step trains."""
    ledger, since, ended = gate.ledger, gate.trainer_waits_since, gate.ended
    if since is not None:
        if gate.pops():
            ready = f"{ledger.ready_count} of {ledger.rules.prompts_per_step} prompts are ready"
            yield Wait(step, BATCH, ready, now - since)
        else:
            yield Wait(step, "the publish", "", now - since)
    if gate.waiting_workers() and not ended and not ledger.admits():
        live = len(ledger.live)
        what = f"{gate.waiting_workers()} workers, {live} prompts are live, version {ledger.published} is published"
        yield Wait(ADMISSION, "the publish" if publishing else step, what)
        if not live and gate.pops():
            yield Wait(BATCH, ADMISSION)


def _leases(gate: Gate) -> Iterator[Wait]:
    for lease in gate.unfinished():
        whom = lease.where or ("its scores" if lease.state == "scoring" else "an engine that serves")
        yield Wait(f"prompt uid {lease.uid} (attempt {lease.attempt})", whom, "", lease.seconds, kind="prompts")


def _calls(calls: Iterable[InFlight], groups: Mapping[str, Group], step: str, now: float) -> Iterator[Wait]:
    for call in calls:
        name = call.engine.partition("/")[0]
        who = f"group {name}"
        if call.verb in PUBLISHES:
            who = "the publish"
        elif call.verb in SAVES:
            who = "the checkpoint"
        elif isinstance(groups.get(name), TrainGroup):
            who = step
        yield Wait(who, call.engine, call.verb, now - call.since, kind=f"calls to {name}")


def _notes(groups: Mapping[str, Group], queues: Sequence[Queue[Any]], now: float) -> Iterator[str]:
    """What has no age: engines out of service, when they start again, and how full inboxes and queues are."""
    for group in groups.values():
        if isinstance(group, Follower):
            for replica in group.replicas:
                if not replica.serving:
                    when = replica.budget.when(now)
                    yield f"{replica.key} is out of service{when and f'; it {when}'}"
        elif (engine := engine_of(group)) is not None and (when := engine.out_of_service(now)):
            yield f"{group.name}/{engine.spec.rank} is out of service; it {when}"
        yield from _fullness(f"the inbox of {group.name}", group.statistics())
    for queue in queues:
        yield from _fullness(f"queue {queue.name}", queue.statistics())


def _fullness(name: str, now: QueueStatistics) -> Iterator[str]:
    if now.items or now.waiting_putters:
        yield f"{name} holds {now.items} of {now.capacity}, {now.waiting_putters} wait to put"
