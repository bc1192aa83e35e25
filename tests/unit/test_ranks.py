"""Several engines called as one: who is asked what, and what becomes of all when one of them fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from asyncrlhf.abc import EngineHandle, EngineSpec, OnEvents
from asyncrlhf.errors import CheckpointError, ConfigError, DataLost, EngineLost, GroupError, PublishRefused
from asyncrlhf.groups import PolicyGroup
from asyncrlhf.groups.frozen import FrozenEngine
from asyncrlhf.groups.protocols import Protocol
from asyncrlhf.groups.ranks import PATIENCE, Ranks
from asyncrlhf.messages import Failed, ParallelLayout, TrainBatch
from asyncrlhf.observe import EventLog
from asyncrlhf.testing import FakeRuntime, FakeTrainerOptions
from tests.unit.virtual import virtual

HANGS = object()


class Rank:
    """An engine that says what it is told to; an error is raised after as many seconds as its `late`."""

    def __init__(self, number: int, says: Any = None, late: float = 0.0) -> None:
        self.spec, self.address = specs(4)[number], "10.0.0.7"
        self.says, self.late = says, late
        self.heard: list[tuple[Any, ...]] = []
        self.closed: list[bool] = []
        self.cancelled = False

    async def call(self, verb: str, *arguments: Any) -> Any:
        self.heard.append((verb, *arguments))
        await asyncio.sleep(self.late)
        if self.says is HANGS:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    async def close(self, *, at_once: bool = False) -> None:
        self.closed.append(at_once)


class Joined(Rank):
    """One that has met the others."""

    async def call(self, verb: str, *arguments: Any) -> Any:
        return 29500 if verb in ("rendezvous", "join") else await super().call(verb, *arguments)


def batch() -> TrainBatch:
    """Two rows."""
    return TrainBatch(
        train_step=0, prompt_lengths=(1, 1), response_lengths=(2, 2), unmasked=(2, 2), rollouts=(0, 1), columns={}
    )


def specs(count: int) -> list[EngineSpec]:
    kind = "asyncrlhf.testing.trainer:FakeTrainer"
    return [EngineSpec(group="policy", rank=r, engine=kind, options=FakeTrainerOptions()) for r in range(count)]


def together(*says: Any, late: Sequence[float] = (0.0, 0.0, 0.0, 0.0)) -> tuple[Ranks, list[Rank]]:
    ranks = [Rank(number, what, late[number]) for number, what in enumerate(says)]
    return Ranks(ranks, ParallelLayout(data=len(ranks))), ranks


@virtual
async def test_ranks_meet_at_a_port_of_rank_0() -> None:
    group, ranks = together(29500, 29500)
    await group.join(60.0)
    assert ranks[0].heard == [("rendezvous", "10.0.0.7", 2), ("join", "10.0.0.7", 29500, 0, 2, 60.0)]
    assert ranks[1].heard == [("join", "10.0.0.7", 29500, 1, 2, 60.0)]


@virtual
async def test_rank_0_speaks_for_all_and_a_verb_without_a_protocol_is_refused() -> None:
    group, ranks = together("the handle", None)
    assert await group.call("apply", 3) == "the handle"
    assert [rank.heard for rank in ranks] == [[("apply", 3)]] * 2
    with pytest.raises(GroupError, match="'dance' has no transfer protocol; give Ranks one beside step"):
        await group.call("dance")
    with pytest.raises(GroupError, match="2 engines for 3 ranks"):
        Ranks(ranks, ParallelLayout(data=3))


@virtual
async def test_L12_the_rank_that_ended_is_named_though_its_peers_fail_first() -> None:
    broken, lost = GroupError("rank 0: connection reset by peer"), EngineLost("rank 1: was ended by SIGKILL")
    group, ranks = together(broken, lost, late=(0.0, PATIENCE / 2))
    with pytest.raises(EngineLost, match="rank 1: was ended by SIGKILL"):
        await group.call("export", 0)
    assert [rank.closed for rank in ranks] == [[True], [True]]


@virtual
async def test_L12_a_rank_that_waits_for_a_lost_one_is_ended_and_not_waited_for() -> None:
    group, ranks = together(HANGS, EngineLost("rank 1: was ended by SIGKILL"), HANGS)
    started = asyncio.get_running_loop().time()
    with pytest.raises(EngineLost, match="rank 1: was ended by SIGKILL"):
        await group.call("export", 0)
    assert asyncio.get_running_loop().time() - started == pytest.approx(PATIENCE)
    assert [rank.cancelled for rank in ranks] == [True, False, True]
    assert [rank.closed for rank in ranks] == [[True]] * 3


@virtual
async def test_an_error_that_all_ranks_agree_on_leaves_them_at_work() -> None:
    group, ranks = together(PublishRefused("not finite"), PublishRefused("not finite"))
    with pytest.raises(PublishRefused):
        await group.call("export", 0)
    assert [rank.closed for rank in ranks] == [[], []]


@virtual
async def test_an_error_of_one_rank_that_the_others_wait_for_ends_them_all() -> None:
    group, ranks = together(CheckpointError("no such file"), HANGS)
    with pytest.raises(EngineLost, match=r"load_state of ranks \[1\] was still open 10 s after .*no such file"):
        await group.call("load_state", "somewhere")
    assert [rank.closed for rank in ranks] == [[True], [True]]


class Spawner(FakeRuntime):
    """Gives the engines of a test."""

    def __init__(self, make: Callable[[EngineSpec], Any]) -> None:
        super().__init__()
        self._make = make

    async def spawn(self, spec: EngineSpec, on_events: OnEvents) -> EngineHandle:
        made = self._make(spec)
        if isinstance(made, Exception):
            raise made
        if made is HANGS:
            await asyncio.Event().wait()
        return made


@virtual
async def test_a_rank_that_cannot_start_stops_the_start_of_the_others() -> None:
    runtime = Spawner(lambda spec: ConfigError("no such device") if spec.rank else HANGS)
    with pytest.raises(ConfigError, match="group 'policy': no such device"):
        await PolicyGroup("policy", EventLog(None), runtime, specs(2)).start()


@virtual
async def test_nothing_is_left_of_a_start_that_failed() -> None:
    first = Rank(0)
    runtime = Spawner(lambda spec: GroupError("no memory") if spec.rank else first)
    with pytest.raises(GroupError, match="no memory"):
        await PolicyGroup("policy", EventLog(None), runtime, specs(2)).start()
    assert first.closed == [True]


@virtual
async def test_ranks_that_do_not_meet_are_ended() -> None:
    ranks = [Rank(0, 29500), Rank(1, HANGS)]
    group = PolicyGroup("policy", EventLog(None), Spawner(lambda spec: ranks[spec.rank]), specs(2), call_timeout=5.0)
    with pytest.raises(GroupError, match="the meeting of its 2 ranks has not come back within .* = 5 s"):
        await group.start()
    assert [rank.closed for rank in ranks] == [[True], [True]]


@virtual
async def test_ranks_that_all_lack_what_they_were_to_read_go_on() -> None:
    gone = DataLost("an answer is gone")
    group, ranks = together(gone, gone)
    with pytest.raises(DataLost):
        await group.call("logprobs", batch())
    assert (group.closed, [rank.closed for rank in ranks]) == (False, [[], []])


@virtual
async def test_ranks_of_which_one_lacks_what_it_was_to_read_are_ended() -> None:
    group, ranks = together(HANGS, DataLost("an answer is gone"))
    with pytest.raises(DataLost):
        await group.call("logprobs", batch())
    assert (group.closed, [rank.closed for rank in ranks]) == (True, [[True], [True]])


@virtual
async def test_a_frozen_model_of_several_ranks_starts_again_when_one_lacks_an_answer_and_reads_the_others() -> None:
    made: list[Rank] = []

    def make(spec: EngineSpec) -> Rank:
        says = DataLost("an answer is gone") if len(made) == 1 else HANGS if not made else [np.zeros(2, np.float32)]
        made.append(Joined(spec.rank, says))
        return made[-1]

    engine = FrozenEngine(EventLog(None), Spawner(make), *specs(2))
    await engine.start()
    with pytest.raises(DataLost):
        await engine.call("logprobs", batch())
    assert await engine.call("logprobs", batch()) == [pytest.approx([0.0, 0.0])] * 2
    assert (len(made), engine.incarnation) == (4, 1)


@virtual
async def test_one_rank_meets_nobody() -> None:
    alone = Rank(0)
    group = PolicyGroup("policy", EventLog(None), Spawner(lambda spec: alone), specs(1))
    await group.start()
    assert group.engine is alone
    assert alone.heard == []


SUMS = Protocol(
    lambda layout, arguments: [(*arguments, rank) for rank in range(layout.ranks)],
    lambda layout, arguments, results: sum(results),
)


@virtual
async def test_a_protocol_of_ones_own_carries_a_verb_of_ones_own() -> None:
    ranks = [Rank(0, 5), Rank(1, 7)]
    group = PolicyGroup(
        "policy",
        EventLog(None),
        Spawner(lambda spec: ranks[spec.rank]),
        specs(2),
        verbs={"count": "tests.unit.test_ranks:SUMS"},
    )
    await group.start()
    serving = asyncio.ensure_future(group.serve())
    assert await group.ask("count", "apples") == 12
    assert [rank.heard[-1] for rank in ranks] == [("count", "apples", 0), ("count", "apples", 1)]
    group.close()
    await serving


@virtual
async def test_an_engine_that_trains_alone_says_so() -> None:
    group = PolicyGroup("policy", EventLog(None), FakeRuntime(), specs(2))
    with pytest.raises(
        ConfigError, match="group 'policy': FakeTrainer works on 1 rank and was given 2; use parallel sizes of 1"
    ):
        await group.start()


async def test_the_loss_of_a_rank_is_what_its_group_has_failed_for_though_the_others_say_so_first() -> None:
    group = PolicyGroup("policy", EventLog(None, lambda: 0.0), FakeRuntime(), specs(2))
    group._on_events(0, [Failed(reason="RuntimeError: connection closed by peer")])
    assert type(group.failure) is GroupError
    with pytest.raises(EngineLost, match="SIGKILL"):
        group._on_events(1, [Failed(reason="rank 1 was ended by SIGKILL", lost=True)])
    group._on_events(0, [Failed(reason="RuntimeError: connection closed by peer")])
    assert "SIGKILL" in str(group.failure)
