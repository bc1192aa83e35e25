"""Reward functions: parallel, timed, named when they fail; the event loop never waits for one."""

from __future__ import annotations

import asyncio
import functools
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrlhf.backends import rules
from asyncrlhf.backends.rules import RewardRunner
from asyncrlhf.errors import ConfigError, SampleError

gate = threading.Event()
together = threading.Barrier(4)
all_here = asyncio.Event()
seen: list[Any] = []


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    gate.clear()
    together.reset()
    seen.clear()
    yield
    gate.set()


def length(prompt: str, response: str, ground_truth: Any, **columns: Any) -> float:
    seen.append(columns)
    return float(len(response))


def picky(prompt: str, response: str, ground_truth: Any, level: int, *, hint: str = "none") -> float:
    seen.append((prompt, response, ground_truth, level, hint))
    return 1.0


async def picky_async(question: str, response: str, ground_truth: Any, **columns: Any) -> float:
    await asyncio.sleep(0)
    seen.append(columns)
    return float(len(question + response))


class Judge:
    async def __call__(self, prompt: str, response: str, ground_truth: Any) -> float:
        return 3.0


judge = Judge()
partial = functools.partial(length, extra=1)


def meets(prompt: str, response: str, ground_truth: Any) -> float:
    """Returns once four calls run at the same time."""
    together.wait(20)
    return 1.0


async def meets_async(prompt: str, response: str, ground_truth: Any) -> float:
    """Returns once four calls run at the same time."""
    seen.append(response)
    if len(seen) == 4:
        all_here.set()
    await all_here.wait()
    return 1.0


def hangs_on_hang(prompt: str, response: str, ground_truth: Any) -> float:
    if response == "hang":
        gate.wait(60)
    seen.append(response)
    return 1.0


async def hangs_async(prompt: str, response: str, ground_truth: Any) -> float:
    if response == "hang":
        await asyncio.Event().wait()
    return 1.0


def naps(prompt: str, response: str, ground_truth: Any) -> float:
    time.sleep(0.1)
    return 1.0


GIVES = {
    "none": None,
    "nan": math.nan,
    "inf": -math.inf,
    "huge": 10**400,
    "text": "1.0",
    "list": [1.0],
    "array": np.ones(1),
    "numpy": np.float32(0.5),
    "scalar": np.array(2.0),
    "bool": True,
    "int": 3,
}


async def _late() -> float:
    return 1.0


def gives(prompt: str, response: str, ground_truth: Any) -> Any:
    if response == "raise":
        raise KeyError("no such unit")
    if response == "exit":
        sys.exit(3)
    if response == "stop":
        raise StopIteration
    if response == "timeout":
        raise TimeoutError("upstream")
    if response == "coroutine":
        return _late()
    return GIVES[response]


async def gives_async(prompt: str, response: str, ground_truth: Any) -> Any:
    return gives(prompt, response, ground_truth)


def no_arguments() -> float:
    return 1.0


def two(prompt: str, response: str) -> float:
    return 1.0


def by_name_only(*, prompt: str, response: str, ground_truth: Any) -> float:
    return 1.0


def swapped(response: str, prompt: str, ground_truth: Any) -> float:
    return 1.0


constant = 1.0


def runner(name: str, *, timeout: float = 30.0, concurrency: int = 64, threads: int = 8) -> RewardRunner:
    return RewardRunner(f"{__name__}:{name}", timeout, concurrency, threads)


async def score(rewards: RewardRunner, responses: Sequence[str], uid: int = 7, **columns: Any) -> list[float]:
    return await rewards.score("question", responses, "truth", columns, uid)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - threads change it, and tell nobody
            await asyncio.sleep(0.005)


async def test_rewards_come_in_the_order_of_the_answers() -> None:
    rewards = runner("length")
    assert await score(rewards, ["a", "", "abc"]) == [1.0, 0.0, 3.0]
    assert await score(rewards, []) == []
    assert await score(runner("judge"), ["a"]) == [3.0]
    assert await score(runner("partial"), ["ab"]) == [2.0]
    rewards.close()


async def test_columns_go_by_name_all_of_them_or_those_it_names() -> None:
    columns = {"level": 2, "hint": "h", "response": "not this one", "question": "nor this"}
    await score(runner("length"), ["a"], **columns)
    assert seen.pop() == {"level": 2, "hint": "h", "question": "nor this"}
    await score(runner("picky"), ["a"], **columns)
    assert seen.pop() == ("question", "a", "truth", 2, "h")
    assert await score(runner("picky_async"), ["a"], **columns) == [9.0]
    assert seen.pop() == {"level": 2, "hint": "h"}
    with pytest.raises(SampleError, match=r"raised TypeError: .*'level'"):
        await score(runner("picky"), ["a"])


@pytest.mark.parametrize("name", ["meets", "meets_async"])
async def test_l6_the_answers_of_a_prompt_are_scored_in_parallel(name: str) -> None:
    assert await score(runner(name), ["a", "b", "c", "d"]) == [1.0] * 4


async def test_l6_answers_of_several_prompts_are_scored_in_parallel() -> None:
    rewards = runner("meets", threads=4)
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(score(rewards, ["a", "b"], uid)) for uid in (1, 2)]
    assert [call.result() for call in calls] == [[1.0, 1.0], [1.0, 1.0]]


async def test_l6_the_loop_runs_while_a_plain_function_waits() -> None:
    """The loop itself opens the gate: a loop blocked by the call would never come to it."""
    call = asyncio.create_task(score(runner("hangs_on_hang"), ["hang"]))
    await asyncio.sleep(0.01)
    assert not call.done()
    gate.set()
    assert await call == [1.0]


async def test_l6_a_hung_call_is_named_and_its_thread_replaced() -> None:
    rewards = runner("hangs_on_hang", timeout=2.0, threads=1)
    with pytest.raises(SampleError) as caught:
        await score(rewards, ["fine", "hang", "fine"], uid=70)
    assert str(caught.value) == (
        "prompt 70, answer 1: reward tests.unit.test_rewards:hangs_on_hang ran longer than groups.reward.timeout = "
        "2 s; make it faster or raise it"
    )
    assert rewards.stuck_count == 1
    assert await score(rewards, ["fine"] * 20) == [1.0] * 20
    gate.set()
    await until(lambda: rewards.stuck_count == 0)
    assert await score(rewards, ["fine"] * 20) == [1.0] * 20
    assert len(rewards._threads._workers) == 1
    rewards.close()


async def test_l6_when_every_thread_is_stuck_it_says_so_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SPARE", 1)
    rewards = runner("hangs_on_hang", timeout=2.0, threads=1)
    for stuck in (1, 2):
        with pytest.raises(SampleError, match="ran longer"):
            await score(rewards, ["hang"])
        assert rewards.stuck_count == stuck
    with pytest.raises(SampleError, match=r"prompt 8, answer 0: .* was not called: all 2 threads are stuck"):
        await score(rewards, ["fine"], uid=8)
    gate.set()
    await until(lambda: rewards.stuck_count == 0)
    assert await score(rewards, ["fine"]) == [1.0]
    assert len(rewards._threads._workers) == 1


async def test_l6_calls_that_wait_when_the_last_thread_sticks_are_refused_not_forgotten() -> None:
    rewards = runner("hangs_on_hang", timeout=0.02, threads=1)
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(_outcome(rewards, uid)) for uid in range(12)]
    outcomes = [call.result() for call in calls]
    assert sum("ran longer" in text for text in outcomes) == 5
    assert sum("all 5 threads are stuck" in text for text in outcomes) == 7


async def _outcome(rewards: RewardRunner, uid: int) -> str:
    with pytest.raises(SampleError) as caught:
        await score(rewards, ["hang"], uid)
    return str(caught.value)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


async def cancels_itself(prompt: str, response: str, ground_truth: Any) -> float:
    raise asyncio.CancelledError


async def leaves(prompt: str, response: str, ground_truth: Any) -> float:
    raise GeneratorExit


def unspeakable(prompt: str, response: str, ground_truth: Any) -> float:
    raise Unspeakable


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cancels_itself", "raised CancelledError: "),
        ("leaves", "raised GeneratorExit: "),
        ("unspeakable", r"raised Unspeakable: its message cannot be had \(RuntimeError\)"),
    ],
)
async def test_errors_of_any_kind_fail_their_prompt_by_name(name: str, words: str) -> None:
    rewards = runner(name)
    for _ in range(2):
        with pytest.raises(SampleError, match=words):
            await score(rewards, ["a"])
    assert rewards.stuck_count == 0


async def test_l6_time_counts_from_the_call_not_from_its_place_in_the_queue() -> None:
    """Twenty calls of 0.1 s on one thread, each allowed 1.5 s: the last starts after 1.9 s."""
    assert await score(runner("naps", timeout=1.5, threads=1), ["a"] * 20) == [1.0] * 20
    assert await score(runner("naps", timeout=1.5, concurrency=1), ["a"] * 20) == [1.0] * 20


async def test_l6_a_hung_async_function_is_cancelled_and_named() -> None:
    rewards = runner("hangs_async", timeout=2.0, concurrency=1)
    with pytest.raises(SampleError, match=r"prompt 7, answer 1: .* ran longer than groups.reward.timeout = 2 s"):
        await score(rewards, ["fine", "hang", "fine"])
    assert await score(rewards, ["fine", "fine"]) == [1.0, 1.0]


async def test_l6_a_cancelled_prompt_leaves_the_queue() -> None:
    rewards = runner("hangs_on_hang", threads=1)
    call = asyncio.create_task(score(rewards, ["hang", "never"]))
    await until(lambda: len(rewards._threads._waiting) == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.set()
    assert await score(rewards, ["next"]) == [1.0]
    assert seen == ["hang", "next"]


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("none", "gave None; return a number"),
        ("nan", "gave nan; return a finite number"),
        ("inf", "gave -inf; return a finite number"),
        ("huge", "return a finite number"),
        ("text", "gave '1.0'; return a number"),
        ("list", "gave [1.0]; return a number"),
        ("array", "gave array([1.]); return a number"),
        ("coroutine", "gave a coroutine; declare it `async def`"),
        ("raise", "raised KeyError: 'no such unit'"),
        ("exit", "raised SystemExit: 3"),
        ("timeout", "raised TimeoutError: upstream"),
    ],
)
@pytest.mark.parametrize("name", ["gives", "gives_async"])
async def test_n8_a_bad_reward_names_its_sample(name: str, response: str, words: str) -> None:
    rewards = runner(name)
    with pytest.raises(SampleError) as caught:
        await score(rewards, ["bool", "int", response], uid=12)
    assert str(caught.value).startswith(f"prompt 12, answer 2: reward tests.unit.test_rewards:{name} ")
    assert words in str(caught.value)
    assert await score(rewards, ["bool"]) == [1.0]


async def test_n8_the_exception_of_the_function_is_the_cause() -> None:
    for name in ("gives", "gives_async"):
        with pytest.raises(SampleError) as caught:
            await score(runner(name), ["raise"])
        assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(SampleError, match="raised StopIteration"):
        await score(runner("gives"), ["stop"])


async def test_n8_anything_that_is_one_finite_number_is_a_reward() -> None:
    assert await score(runner("gives"), ["numpy", "scalar", "bool", "int"]) == [0.5, 2.0, 1.0, 3.0]


async def test_n10_one_bad_answer_of_eight_fails_the_prompt_as_a_whole() -> None:
    with pytest.raises(SampleError, match="prompt 7, answer 3"):
        await score(runner("gives"), ["int"] * 3 + ["nan"] + ["int"] * 4)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "cannot be imported (module"),
        ("constant", "is a float, not a function"),
        ("Judge", "is a type, not a function"),
        ("no_arguments", "cannot be called with 3 arguments (too many positional arguments)"),
        ("two", "cannot be called with 3 arguments"),
        ("by_name_only", "cannot be called with 3 arguments"),
        ("swapped", "takes prompt as argument 2, but is given it as argument 1"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_at_once(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        runner(name)
    assert str(caught.value).startswith(f'groups.reward.function = "tests.unit.test_rewards:{name}" ')
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    if name != "missing":
        assert "write it as def reward(prompt, response, ground_truth, **columns) -> float" in str(caught.value)


async def test_a_closed_runner_refuses_and_lets_waiting_calls_go() -> None:
    rewards = runner("hangs_on_hang", threads=1)
    hung = asyncio.create_task(score(rewards, ["hang"]))
    waiting = asyncio.create_task(_outcome(rewards, 3))
    await until(lambda: len(rewards._threads._waiting) == 1)
    rewards.close()
    assert "was not called: the rewards are closed" in await waiting
    with pytest.raises(SampleError, match="the rewards are closed"):
        await score(rewards, ["a"])
    gate.set()
    assert await hung == [1.0]


def test_l6_a_process_with_a_hung_reward_can_end(tmp_path: Path) -> None:
    (tmp_path / "hung.py").write_text("import time\ndef reward(prompt, response, ground_truth):\n    time.sleep(600)\n")
    code = (
        "import asyncio\n"
        "from asyncrlhf.backends.rules import RewardRunner\n"
        "from asyncrlhf.errors import SampleError\n"
        "async def main():\n"
        "    rewards = RewardRunner('hung:reward', 0.05, 8, 2)\n"
        "    try:\n"
        "        await rewards.score('q', ['a'], None, {}, 1)\n"
        "    except SampleError as problem:\n"
        "        print(problem)\n"
        "    rewards.close()\n"
        "asyncio.run(main())\n"
    )
    paths = [str(tmp_path), str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path[:0] = {paths}\n{code}"],
        timeout=50,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "prompt 1, answer 0: reward hung:reward ran longer" in done.stdout
    assert done.stderr == ""
