"""PolicyGroup and CriticGroup: models being trained. `step` is one optimizer step, any number per train step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrlhf.abc import EngineHandle, EngineSpec, Runtime
from asyncrlhf.errors import AsyncRLHFError, EngineLost, GroupError
from asyncrlhf.groups.group import Group, Request, TooLate, answer, refuse, within
from asyncrlhf.groups.ranks import VERBS, start_ranks
from asyncrlhf.groups.shadow import ShadowGroup
from asyncrlhf.groups.turn import ALONE, Turn, end_the_run
from asyncrlhf.messages import (
    Array,
    Column,
    EngineEvent,
    Failed,
    ParallelLayout,
    StepResult,
    TrainBatch,
    WeightHandle,
    column_of,
    pack,
)
from asyncrlhf.observe.events import Measured, OptimizerStep, Warned
from asyncrlhf.observe.log import EventLog

if TYPE_CHECKING:
    from pathlib import Path

    from asyncrlhf.ops import Loss, Transform

__all__ = ("CriticGroup", "PolicyGroup", "TrainGroup")

HALF = "half of limits.stall_timeout,"


class TrainGroup(Group):
    """A trained model. One engine, or several ranks that work as one, which take requests one after another."""

    def __init__(
        self,
        name: str,
        log: EventLog,
        runtime: Runtime,
        specs: Sequence[EngineSpec],
        *,
        layout: ParallelLayout | None = None,
        verbs: Mapping[str, str] = VERBS,
        needs_proximal: bool = False,
        gap_alarm: float = 0.0,
        call_timeout: float | None = None,
    ) -> None:
        """`specs`: of its ranks. `layout`: how they share the model; left out: as data parallel ones. `verbs`: transfer
        protocols of further verbs that its engines have, for `ask`.
        `needs_proximal`: the off-policy correction compares with the policy at the start of the train step.
        `gap_alarm`: warn when sampler and trainer differ by more at lag 0, in nats per token; 0: never.
        `call_timeout`: seconds an engine call may take before the group fails; None: for ever."""
        super().__init__(name, log)
        self.specs = specs
        self.layout, self._verbs = layout or ParallelLayout(data=len(specs)), verbs
        self.turn: Turn = ALONE
        self.shadow: ShadowGroup | None = None
        """Copies that are asked for values in this group's place."""
        self.optimizer_steps = 0
        self.applied_since_publish = 0
        self.rejections_since_publish: list[str] = []
        self._runtime = runtime
        self._engine: EngineHandle | None = None
        self.failure: AsyncRLHFError | None = None
        """What ended its engine, if it has failed by itself."""
        self._lost = ""  # the call that it was ended for
        self._tasks: asyncio.TaskGroup | None = None
        self._older: asyncio.Task[None] | None = None
        self._newest: asyncio.Task[None] | None = None
        self._free_since = 0.0
        self._needs_proximal = needs_proximal
        self._begun: tuple[int, tuple[int, ...]] | None = None  # train step and row lengths of the popped batch
        self._asked: tuple[list[int], asyncio.Future[Any]] | None = None  # rows of it, and a forward over them
        self._proximal: Column | None = None  # for every row of it; None: its one step needs none
        self._before_update = asyncio.Lock()  # steps asked for at once wait for the forward of the first
        self._gap_alarm, self._call_timeout = gap_alarm, call_timeout

    async def start(self) -> None:
        """Spawn the engines. Raises GroupError with the original traceback."""
        async with self.turn.taken():
            self._engine = await start_ranks(
                self._runtime, self.specs, self.layout, self._on_events, self._call_timeout, self._verbs
            )

    @property
    def engine(self) -> EngineHandle:
        if self._engine is None:
            raise GroupError(f"group {self.name!r} has not been started")
        return self._engine

    # ---- verbs -------------------------------------------------------------------------------------------------
    async def step(self, batch: TrainBatch, loss: Loss) -> StepResult:
        """One optimizer step on all rows of `batch`, maybe a mini-batch of a popped one. Steps that are asked for at
        once are taken one after another, in that order, and the engine does not pause in between.

        Raises GroupError if the engine fails, ValueError if a further step follows one on the whole batch although the
        correction needs the log-probs from before it: take all steps from `batch.minibatches(count, epochs=...)`, or if
        a loss that works on whole rollouts gets parts of them.
        """
        if loss.level == "rollout":
            batch.require_whole_rollouts()
        if self._needs_proximal:
            async with self._before_update:
                batch = await self._with_proximal(batch, loss.uses_masked_rows)
        return await self.ask("step", batch.without_origin(), pack(loss))

    async def logprobs(self, batch: TrainBatch) -> Column:
        """Log-prob of every response token under the current weights, as a column."""
        return column_of("token", await self.ask("logprobs", batch.without_origin()))

    async def apply(self, transform: Transform, batch: TrainBatch) -> TrainBatch:
        """The batch with the columns that a transform computes beside this model (GAE beside the critic); what it
        measures is reported."""
        request = pack(transform), batch.without_origin()
        found: Mapping[str, Sequence[Array] | float]
        if self.shadow is not None and transform.needs_forward:
            found = await self.shadow.apply(*request)
        else:
            found = await self.ask("apply", *request)
        columns: dict[str, Column] = {}
        measures: dict[str, float] = {}
        for name, value in found.items():
            if isinstance(value, int | float):
                measures[name] = value
            else:
                columns[name] = column_of("token", value)
        if measures:
            self.emit(Measured(group=self.name, train_step=batch.train_step, metrics=measures))
        return batch.with_columns(**columns)

    async def ask_export(self, version: int) -> asyncio.Future[WeightHandle]:
        """As `export`, behind what was asked for before and ahead of what is asked for later. Returns when the engine
        has been told, so that it need not wait for whatever the caller does next; gives the reply, to be awaited."""
        request = await self.put("export", version)
        await request.sent.wait()
        return request.reply

    # ---- control lane ------------------------------------------------------------------------------------------
    async def export(self, version: int) -> WeightHandle:
        """Weights where followers can read them. Raises PublishRefused."""
        return await self._call("export", version, after=self._newest)

    async def save(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory, and beside it what the next optimizer step depends on."""
        await self._call("save_model", directory, after=self._newest)
        await self._call("save_state", directory)

    async def load(self, directory: Path) -> None:
        """Restore what `save` wrote."""
        await self._call("load_state", directory)

    def closed_step(self) -> tuple[int, list[str]]:
        """Optimizer steps applied and reasons of those rejected since the last call (one train step)."""
        result = self.applied_since_publish, self.rejections_since_publish
        self.applied_since_publish, self.rejections_since_publish = 0, []
        self._begun = self._asked = self._proximal = None
        return result

    async def rest(self) -> None:
        """Leave the devices to others. If it cannot, that ends the run; raises GroupError while it does not serve."""
        if self._engine is None:
            return
        try:
            await self._move("offload" if self.turn.offload else "finish")
        except AsyncRLHFError as error:
            if self._tasks is None:
                raise
            await end_the_run(error)

    async def resume(self) -> None:
        """Come back to them. Raises GroupError."""
        if self._engine is not None and self.turn.offload:
            await self._move("onload")

    async def _call(
        self,
        verb: str,
        *arguments: object,
        after: asyncio.Task[None] | None = None,
        told: Callable[[], None] = lambda: None,
    ) -> Any:
        """`after`: the request that the engine is at, if any. Waits for the turn first; `told` is called as the engine
        is told. Raises as `_ask` does."""
        async with self.turn.taken():
            told()
            return await self._ask(verb, *arguments, after=after)

    async def _move(self, verb: str) -> None:
        """While others wait for its devices, in a run that is stalled after `call_timeout`: it has half of that, so
        that the run ends by its name."""
        half = None if self._call_timeout is None else self._call_timeout / 2
        await self._settle(within(half, self.engine.call(verb), f"group {self.name!r}: {verb}", limit_is=HALF))

    async def _ask(self, verb: str, *arguments: object, after: asyncio.Task[None] | None = None) -> Any:
        call = self.engine.call(verb, *arguments)
        return await self._settle(within(self._call_timeout, call, f"group {self.name!r}: {verb}", after=after))

    async def _settle(self, call: Awaitable[Any]) -> Any:
        """Raises EngineLost, and ends the engine, when it does not come back; for other calls to it, too."""
        try:
            return await call
        except TooLate as error:
            self._lost = self._lost or str(error)
            await self.engine.close(at_once=True)
        except GroupError:
            if not self._lost:
                raise
        raise EngineLost(self._lost)

    # ---- the actor ---------------------------------------------------------------------------------------------
    async def serve(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await super().serve()
        finally:
            self._tasks = None

    async def handle(self, requests: list[Request]) -> None:
        """Sends the engine a request while it is at the one before, and no more: it works on them in order, and waits
        for nobody in between."""
        assert self._tasks is not None
        for request in requests:
            if self._older is not None:
                await asyncio.wait([self._older])
            name = f"{self.name}: {request.verb}"
            self._older = self._newest
            self._newest = self._tasks.create_task(self._one(request, self._newest), name=name)

    async def _one(self, request: Request, before: asyncio.Task[None] | None) -> None:
        """Answered after the request `before`: if the engine fails, whoever it failed hears of it first."""
        sent, cancelled = self.log.elapsed(), request.reply.done()
        result: Any = None
        failure: AsyncRLHFError | None = None
        if not cancelled:
            try:
                result = await self._call(request.verb, *request.arguments, after=before, told=request.sent.set)
            except AsyncRLHFError as error:
                failure = error
        request.sent.set()
        if before is not None:
            await asyncio.wait([before])
        if cancelled:
            return
        if failure is not None:
            refuse(request, failure)
            return
        now = self.log.elapsed()
        if request.verb == "step":
            self._count(request.arguments[0], result, now - max(sent, self._free_since))
        self._free_since = now
        answer(request, result)

    def _count(self, batch: TrainBatch, result: StepResult, seconds: float) -> None:
        if result.applied:
            self.optimizer_steps += 1
            self.applied_since_publish += 1
        else:
            self.rejections_since_publish.append(result.reason)
        self.emit(
            OptimizerStep(
                group=self.name,
                train_step=batch.train_step,
                optimizer_step=self.optimizer_steps,
                applied=result.applied,
                reason=result.reason,
                metrics=dict(result.metrics),
                seconds=seconds,
            )
        )
        gap = result.metrics.get("logprob_gap", 0.0)
        if 0 < self._gap_alarm < gap:
            self.emit(
                Warned(
                    message=f"train step {batch.train_step}: sampler and trainer differ by {gap:.3g} nats on a token "
                    f"of the same weights (limits.logprob_gap = {self._gap_alarm:g}); check dtype, temperature and the "
                    "weights that the rollout engines hold"
                )
            )

    async def _with_proximal(self, batch: TrainBatch, masked_rows: bool) -> TrainBatch:
        """The first step takes the detached current log-probs (the engine does): nothing has been updated yet. Unless
        it is the only one, a forward over all rows of the popped batch goes ahead of it, for the steps that follow."""
        step, popped = batch.train_step, batch.popped
        if self._begun is None:
            self._begun = step, popped.response_lengths
            if batch.several_steps or set(batch.rows) != set(popped.rows):
                await self._ask_proximal(popped, masked_rows)
            return batch
        if self._begun != (step, popped.response_lengths):
            raise ValueError(
                f"train step {self._begun[0]} has begun on another batch than this one, of train step {step}; make all "
                "parts from the popped batch, with take, minibatches and with_columns"
            )
        if self._asked is None:
            raise ValueError(
                f"train step {step}: a second optimizer step after one on the whole batch would compare with weights "
                "that the first has changed; use batch.minibatches(count, epochs=...)"
            )
        if self._proximal is None:
            self._proximal = await self._proximal_of(popped, *self._asked)
        return batch.with_columns(proximal_logprobs=self._proximal.take(batch.rows))

    async def _ask_proximal(self, popped: TrainBatch, masked_rows: bool) -> None:
        """A forward over the rows that a loss reads: those with an unmasked token, or all."""
        used = [row for row, count in enumerate(popped.unmasked) if count or masked_rows]
        if used:
            self._asked = used, (await self.put("logprobs", popped.take(used).without_origin())).reply
        else:
            self._asked = used, asyncio.get_running_loop().create_future()
            self._asked[1].set_result(())

    @staticmethod
    async def _proximal_of(popped: TrainBatch, used: list[int], asked: asyncio.Future[Any]) -> Column:
        """Log-probs of those rows; zeros for the others."""
        rows: list[Sequence[float] | Array] = [np.zeros(length, np.float32) for length in popped.response_lengths]
        for row, logprobs in zip(used, await asked, strict=True):
            rows[row] = logprobs
        return column_of("token", rows)

    def _on_events(self, rank: int, events: Sequence[EngineEvent]) -> None:
        """Raises EngineLost, which ends the run, also while nobody waits for the engine; any other failure reaches the
        caller of the verb."""
        for event in events:
            if self.emit_busy(rank, event) or not isinstance(event, Failed):
                continue
            error = EngineLost(event.reason) if event.lost else GroupError(event.reason)
            if event.lost or self.failure is None:  # ranks that are left fail for the loss of one, and may be first
                self.failure = error
            if event.lost:
                raise error


class PolicyGroup(TrainGroup):
    """The policy: what is trained and followed by the rollout engines."""


class CriticGroup(TrainGroup):
    """A model with a value per token: a critic, where `apply(GAE(...), batch)` fills advantages and `step` fits
    returns, or a reward model being trained."""
