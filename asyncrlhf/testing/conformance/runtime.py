"""What every runtime owes: engines are built and called, errors and events arrive in order, and closing ends them.

A check gets a fresh runtime in which an engine of group "plain" that is told to `wait` hangs, and an empty directory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncrlhf.abc import EngineHandle, EngineSpec, Runtime
from asyncrlhf.errors import GroupError, SampleError
from asyncrlhf.messages import Busy, EngineEvent, Failed, Finished, GenerateRequest, Progress, WeightHandle
from asyncrlhf.testing.conformance.engines import PlainOptions, TickingOptions

__all__ = ("RUNTIME",)

ENGINES = "asyncrlhf.testing.conformance.engines"
PATIENCE = 30.0
"""Seconds after which a check gives up on a runtime that does not move."""


class _Heard:
    """Events as they arrive, and a way to wait for one."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self._more = asyncio.Event()

    def __call__(self, events: Sequence[EngineEvent]) -> None:
        self.events += [event for event in events if not isinstance(event, Busy)]
        self._more.set()

    async def until(self, *kinds: type[Any]) -> list[EngineEvent]:
        """All events so far, once there is one of each kind."""
        async with asyncio.timeout(PATIENCE):
            while not all(any(isinstance(event, kind) for event in self.events) for kind in kinds):
                self._more.clear()
                await self._more.wait()
        return self.events


async def _plain(runtime: Runtime, heard: _Heard | None = None, rank: int = 0, **options: Any) -> EngineHandle:
    spec = EngineSpec(group="plain", rank=rank, engine=f"{ENGINES}:Plain", options=PlainOptions(**options))
    return await runtime.spawn(spec, heard or _Heard())


async def _ticking(runtime: Runtime, heard: _Heard, **options: Any) -> EngineHandle:
    spec = EngineSpec(group="ticking", rank=3, engine=f"{ENGINES}:Ticking", options=TickingOptions(**options))
    return await runtime.spawn(spec, heard)


def _request(name: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prompt_token_ids=(9,), max_tokens=999_999, temperature=1.0, stop_token_ids=(0,), seed=len(name)
    )


async def _error_of(awaitable: Awaitable[Any]) -> BaseException:
    async with asyncio.timeout(PATIENCE):
        try:
            await awaitable
        except Exception as error:
            return error
    raise AssertionError("nothing was raised")


async def a_call_runs_the_method_and_gives_its_result(runtime: Runtime, directory: Path) -> None:
    handle = await _plain(runtime, name="p")
    assert handle.spec.group == "plain"
    assert list(await handle.call("echo", 1, "two")) == ["p", 1, 1, "two"]
    assert list(await handle.call("echo")) == ["p", 2]
    await runtime.close()


async def calls_run_one_at_a_time_in_the_order_they_were_made(runtime: Runtime, directory: Path) -> None:
    handle = await _plain(runtime, name="p")
    async with asyncio.TaskGroup() as tasks:
        made = [tasks.create_task(handle.call("echo", number)) for number in range(20)]
    assert [list(task.result()) for task in made] == [["p", number + 1, number] for number in range(20)]
    await runtime.close()


async def an_engine_that_cannot_be_built_is_reported_with_its_traceback(runtime: Runtime, directory: Path) -> None:
    error = await _error_of(_plain(runtime, rank=2, name="bad", broken=True))
    assert isinstance(error, GroupError)
    for part in ("'plain'", "rank 2", "ZeroDivisionError", "bad cannot be built", "Traceback", "in __init__"):
        assert part in str(error), (part, str(error))
    error = await _error_of(
        runtime.spawn(EngineSpec(group="g", rank=0, engine=f"{ENGINES}:Nothing", options=PlainOptions()), _Heard())
    )
    assert isinstance(error, GroupError)
    assert "Nothing" in str(error)
    await runtime.close()


async def an_error_of_asyncrlhf_passes_and_the_engine_goes_on(runtime: Runtime, directory: Path) -> None:
    heard = _Heard()
    handle = await _plain(runtime, heard, name="p")
    error = await _error_of(handle.call("refuse", "not this one"))
    assert isinstance(error, SampleError)
    assert str(error) == "not this one"
    assert list(await handle.call("echo", 1)) == ["p", 1, 1]
    assert heard.events == []
    await runtime.close()


async def any_other_error_breaks_the_engine_and_says_where_and_why(runtime: Runtime, directory: Path) -> None:
    heard = _Heard()
    handle = await _plain(runtime, heard, rank=1)
    failed = asyncio.ensure_future(handle.call("breaks", "division"))
    behind = asyncio.ensure_future(handle.call("echo", 1))
    for error in (await _error_of(failed), await _error_of(behind), await _error_of(handle.call("echo", 2))):
        assert isinstance(error, GroupError)
        for part in ("'plain'", "rank 1", "ZeroDivisionError: division", "Traceback", "in breaks"):
            assert part in str(error), (part, str(error))
    (event,) = await heard.until(Failed)
    assert isinstance(event, Failed)
    assert "rank 1" in event.reason
    assert "Traceback" in event.reason
    await runtime.close()
    assert len(heard.events) == 1, "nothing follows a Failed event"


async def an_unknown_verb_breaks_the_engine(runtime: Runtime, directory: Path) -> None:
    handle = await _plain(runtime)
    error = await _error_of(handle.call("whistle"))
    assert isinstance(error, GroupError)
    assert "whistle" in str(error)
    await runtime.close()


async def engines_do_not_share_a_fate(runtime: Runtime, directory: Path) -> None:
    first, second = await _plain(runtime, name="a"), await _plain(runtime, rank=1, name="b")
    await _error_of(first.call("breaks", "x"))
    await first.close()
    assert list(await second.call("echo")) == ["b", 1]
    await runtime.close()


async def engines_reach_each_other_at_their_addresses(runtime: Runtime, directory: Path) -> None:
    one, other = await _plain(runtime), await _plain(runtime, rank=1)
    port = await one.call("listen", one.address)
    await other.call("reach", one.address, port)
    assert isinstance(await _error_of(other.call("reach", other.address, 1)), GroupError), "nobody listens there"
    await runtime.close()


async def a_sampler_steps_while_it_has_work_and_reports_in_order(runtime: Runtime, directory: Path) -> None:
    heard = _Heard()
    handle = await _ticking(runtime, heard, length=4.0)
    assert await handle.call("add", [_request("a")]) is None
    await heard.until(Finished)
    assert [type(event) for event in heard.events] == [Progress, Progress, Progress, Finished]
    assert [event.token_count for event in heard.events if isinstance(event, Progress)] == [0, 1, 3]
    await runtime.close()


async def a_sampler_takes_no_step_while_it_is_paused(runtime: Runtime, directory: Path) -> None:
    heard = _Heard()
    handle = await _ticking(runtime, heard, length=4.0)
    await handle.call("pause")
    await handle.call("add", [_request("a")])
    for _ in range(3):
        await handle.call("probe", [1, 2])
    assert not sum(event.token_count for event in heard.events if isinstance(event, Progress))
    assert not any(isinstance(event, Finished) for event in heard.events)
    await handle.call("go_on")
    await heard.until(Finished)
    await runtime.close()


async def a_paused_sampler_gives_back_what_runs_and_goes_on_with_others(runtime: Runtime, directory: Path) -> None:
    heard = _Heard()
    handle = await _ticking(runtime, heard, length=1e6)
    await handle.call("add", [_request("a"), replace(_request("b"), max_tokens=3)])
    await heard.until(Finished)
    await handle.call("pause")
    (given_back,) = await handle.call("abort", ["a"])
    assert given_back.request_id == "a"
    count = sum(segment.token_count for segment in given_back.segments)
    assert len(given_back.tokens) == len(given_back.logprobs) == count >= 3
    until_then = [event for event in heard.events if isinstance(event, Progress)]
    heard.events.clear()
    await handle.call("add", [replace(_request("c"), max_tokens=3)])
    await handle.call("go_on")
    await heard.until(Finished)
    (finished,) = [event for event in heard.events if isinstance(event, Finished)]
    assert (finished.request_id, len(finished.sample.token_ids)) == ("c", 3)
    reports = [*until_then, *(event for event in heard.events if isinstance(event, Progress))]
    assert sum(event.token_count for event in reports if event.request_id == "a") == count
    await runtime.close()


async def what_a_method_reports_arrives_before_its_reply(runtime: Runtime, directory: Path) -> None:
    heard = _Heard()
    handle = await _ticking(runtime, heard, slots=2, length=1e6)
    assert await handle.call("add", [_request("a"), replace(_request("b"), max_tokens=3)]) is None
    assert [event.request_id for event in heard.events if isinstance(event, Progress)][:2] == ["a", "b"]
    await heard.until(Finished)  # b, so that a has tokens that it has not reported
    weights = WeightHandle(version=1, checksum=0, changed=False, byte_count=0, transport="", payload={})
    await handle.call("prepare", weights)
    before = len(heard.events)
    assert await handle.call("commit", 1, "rebuild") is None
    versions = [event.version for event in heard.events[before:] if isinstance(event, Progress)]
    assert versions[:1] == [0], "the tokens of before the swap are reported by it"
    assert versions == sorted(versions), "they come first"
    await runtime.close()


async def commands_take_effect_between_two_steps(runtime: Runtime, directory: Path) -> None:
    heard = _Heard()
    handle = await _ticking(runtime, heard, length=1e6)
    await handle.call("add", [_request("a"), _request("b")])
    given_back = await handle.call("abort", ["a", "b", "c"])
    assert sorted(request.request_id for request in given_back) == ["a", "b"]
    assert all(len(r.tokens) == len(r.logprobs) == sum(s.token_count for s in r.segments) for r in given_back)
    assert len({len(request.tokens) for request in given_back}) == 1, "both had the same steps"
    await runtime.close()


async def a_step_that_breaks_is_reported_and_fails_the_calls_in_flight(runtime: Runtime, directory: Path) -> None:
    heard = _Heard()
    handle = await _ticking(runtime, heard, length=1e6, breaks_at=3)
    await handle.call("add", [_request("a")])
    events = await heard.until(Failed)
    failed = events[-1]
    assert isinstance(failed, Failed)
    for part in ("'ticking'", "rank 3", "ZeroDivisionError: the step broke", "Traceback", "in step"):
        assert part in failed.reason
    assert isinstance(await _error_of(handle.call("abort", ["a"])), GroupError)
    await runtime.close()
    assert events[-1] is failed


async def closing_ends_the_engine_and_refuses_calls(runtime: Runtime, directory: Path) -> None:
    journal = directory / "journal"
    handle = await _plain(runtime, name="p", journal=str(journal))
    await handle.close()
    assert journal.read_text().splitlines() == ["p built", "p closed"]
    error = await _error_of(handle.call("echo"))
    assert isinstance(error, GroupError)
    assert "'plain'" in str(error)
    await handle.close()
    await runtime.close()
    assert journal.read_text().splitlines() == ["p built", "p closed"]


async def closing_the_runtime_ends_every_engine(runtime: Runtime, directory: Path) -> None:
    handles = [await _plain(runtime, rank=n, name=f"p{n}", journal=str(directory / f"{n}")) for n in range(3)]
    await runtime.close()
    for number, handle in enumerate(handles):
        assert (directory / f"{number}").read_text().splitlines()[-1] == f"p{number} closed"
        assert isinstance(await _error_of(handle.call("echo")), GroupError)


async def calls_in_flight_fail_when_the_engine_is_closed(runtime: Runtime, directory: Path) -> None:
    handle = await _plain(runtime)
    calls = [asyncio.ensure_future(handle.call("wait")), asyncio.ensure_future(handle.call("echo"))]
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE):
        await handle.close()
    for call in calls:
        assert isinstance(await _error_of(call), GroupError)
    await runtime.close()


async def an_engine_that_hangs_does_not_hold_up_the_end(runtime: Runtime, directory: Path) -> None:
    hung, other = await _plain(runtime), await _plain(runtime, rank=1, name="other", journal=str(directory / "other"))
    call = asyncio.ensure_future(hung.call("wait"))
    await other.call("echo")
    async with asyncio.timeout(PATIENCE):
        await runtime.close()
    assert isinstance(await _error_of(call), GroupError)
    assert (directory / "other").read_text().splitlines()[-1] == "other closed"


async def a_cancelled_call_leaves_the_engine_usable(runtime: Runtime, directory: Path) -> None:
    handle = await _plain(runtime, name="p")
    call = asyncio.ensure_future(handle.call("echo", "nobody listens"))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    name, _, said = await handle.call("echo", "again")
    assert (name, said) == ("p", "again")
    await runtime.close()


RUNTIME: tuple[Callable[[Runtime, Path], Awaitable[None]], ...] = (
    a_call_runs_the_method_and_gives_its_result,
    calls_run_one_at_a_time_in_the_order_they_were_made,
    an_engine_that_cannot_be_built_is_reported_with_its_traceback,
    an_error_of_asyncrlhf_passes_and_the_engine_goes_on,
    any_other_error_breaks_the_engine_and_says_where_and_why,
    an_unknown_verb_breaks_the_engine,
    engines_do_not_share_a_fate,
    engines_reach_each_other_at_their_addresses,
    a_sampler_steps_while_it_has_work_and_reports_in_order,
    a_sampler_takes_no_step_while_it_is_paused,
    a_paused_sampler_gives_back_what_runs_and_goes_on_with_others,
    what_a_method_reports_arrives_before_its_reply,
    commands_take_effect_between_two_steps,
    a_step_that_breaks_is_reported_and_fails_the_calls_in_flight,
    closing_ends_the_engine_and_refuses_calls,
    closing_the_runtime_ends_every_engine,
    calls_in_flight_fail_when_the_engine_is_closed,
    an_engine_that_hangs_does_not_hold_up_the_end,
    a_cancelled_call_leaves_the_engine_usable,
)
