"""Units that share a block of devices: their parallel sizes, seconds per stage, and bytes on a device at the worst
moment. The inner loop of the search, so everything is remembered by (unit, block)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrlhf.placement import memory
from asyncrlhf.placement.cluster import GIB, Block
from asyncrlhf.placement.coefficients import Coefficients
from asyncrlhf.placement.costs import forward_seconds, train_seconds
from asyncrlhf.placement.decode import generation
from asyncrlhf.placement.layouts import Layout, generation_layouts, splits_heads, training_layouts
from asyncrlhf.placement.movement import reshard_seconds
from asyncrlhf.placement.setplan import Choice, Engine, Member, Rejection, SetPlan, Stage
from asyncrlhf.placement.units import Unit
from asyncrlhf.placement.workload import Workload

__all__ = ("Fixed", "Sets")

PRICES = (0.0, 0.1, 1.0, 10.0, 1e6)
"""Seconds that a GiB of device memory is taken to cost while layouts are chosen; the first that fits wins."""

Fixed = Mapping[str, tuple[int, int, int]]
"""unit -> (t, p, devices of its set or 0) that a user insists on."""


class Sets:
    """Finds the plan of a set. Remembers: ask it again."""

    def __init__(self, work: Workload, fit: Coefficients, fixed: Fixed | None = None, most_pp: int = 0) -> None:
        self.work, self.fit, self.fixed, self.most_pp = work, fit, fixed or {}, most_pp
        self._choices: dict[tuple[str, bool, bool, int, int], list[Choice]] = {}
        self._plans: dict[tuple[tuple[str, int, int, str], ...], SetPlan | Rejection] = {}
        self._generated: dict[tuple[int, int, Layout, int], tuple[float, float, float, float] | None] = {}

    def plan(self, members: Sequence[Member]) -> SetPlan | Rejection:
        """The fastest layouts that fit."""
        key = tuple((m.unit.name + "r" * m.unit.reads, m.block.pool, m.block.count, m.lane) for m in members)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._best(members)
        return found

    # ---- one unit

    def choices(self, unit: Unit, block: Block) -> list[Choice]:
        """Layouts of a unit that trains or reads, none worse than another in both time and memory."""
        key = (unit.name, unit.reads, unit.trains, block.pool, block.count)
        if key not in self._choices:
            self._choices[key] = self._front([self._choice(unit, block, lay) for lay in self._layouts(unit, block)])
        return self._choices[key]

    def _layouts(self, unit: Unit, block: Block) -> list[Layout]:
        work, shape = self.work, unit.model.shape
        rows = work.samples // work.minibatches if unit.trains else work.samples
        width = min(block.node.joined, max(block.count, 1))
        if unit.name in self.fixed:
            tp, pp, devices = self.fixed[unit.name]
            layout = Layout(tp, pp, block.count // (tp * pp))
            fits = layout.devices == block.count and tp <= width and (not unit.trains or layout.dp <= rows)
            return [layout] if fits and splits_heads(shape, tp) and devices in (0, block.count) else []
        if unit.generates:
            return generation_layouts(shape, block.count, width)
        return training_layouts(shape, block.count, min(width, block.node.devices), rows, most_pp=self.most_pp)

    def _choice(self, unit: Unit, block: Block, layout: Layout) -> Choice:
        work, fit, model = self.work, self.fit, unit.model
        prepare = forward_seconds(model, block, layout, work, fit) if unit.reads else 0.0
        train = train_seconds(model, block, layout, work, fit) if unit.trains else 0.0
        measured = fit.measured.get(unit.name)
        if measured is not None and prepare + train:
            scale = measured.seconds * measured.devices / block.count / (prepare + train)
            prepare, train = prepare * scale, train * scale
        if unit.trains:
            items = memory.training_state(model, layout, work)
        else:
            items = {"weights": memory.frozen_weights(model, layout, work)}
        return Choice(layout, Stage(0.0, prepare, train), items, memory.pass_memory(model, layout, work))

    @staticmethod
    def _front(found: list[Choice]) -> list[Choice]:
        found.sort(key=lambda c: (c.stage.prepare + c.stage.train, c.peak))
        front: list[Choice] = []
        for choice in found:
            if not front or choice.peak < front[-1].peak:
                front.append(choice)
        return front

    # ---- all of them

    def _best(self, members: Sequence[Member]) -> SetPlan | Rejection:
        fixed_part: list[tuple[Member, list[Choice]]] = []
        for member in members:
            if not member.unit.generates:
                choices = self.choices(member.unit, member.block)
                if not choices:
                    return self._untiled(member)
                fixed_part.append((member, choices))
        best: SetPlan | None = None
        refused: dict[bool, Rejection] = {}
        ways = {"auto": (False, True), "always": (True,), "never": (False,)}[self.work.offload]
        seen: set[tuple[Layout, ...]] = set()
        for price in PRICES:
            chosen = [
                (member, min(choices, key=lambda c: c.stage.prepare + c.stage.train + price * c.peak / GIB))
                for member, choices in fixed_part
            ]
            layouts = tuple(choice.layout for _, choice in chosen)
            if layouts in seen:
                continue
            seen.add(layouts)
            for offload in ways if len(members) > 1 else (False,):
                found = self._fit(members, chosen, offload=offload)
                if isinstance(found, Rejection):
                    refused[offload] = found  # the last layouts take the least memory
                elif best is None or found.busy < best.busy:
                    best = found
        if best is not None:
            return best
        if len(refused) == 1:
            return next(iter(refused.values()))
        awake = refused[False]
        return Rejection(f"{awake.text}; with offloading, {refused[True].text}", awake.need, awake.have, spelled=True)

    def _untiled(self, member: Member) -> Rejection:
        unit, count = member.unit, member.block.count
        rows = self.work.samples // self.work.minibatches if unit.trains else self.work.samples
        heads, layers = unit.model.shape.heads, unit.model.shape.layers
        if unit.name in self.fixed:
            tp, pp, devices = self.fixed[unit.name]
            wish = f" on exactly {devices} devices" if devices else ""
            return Rejection(
                f"{unit.name}: tensor_parallel {tp} * pipeline_parallel {pp}{wish}, as layouts.{unit.name} says, does "
                f"not tile {count} devices with {rows} sequences"
            )
        return Rejection(
            f"{unit.name}: no (tensor, pipeline) sizes of {heads} heads and {layers} layers tile {count} devices with "
            f"{rows} sequences for a data parallel size of at most {rows}; raise the batch or give it fewer devices"
        )

    def _fit(
        self, members: Sequence[Member], chosen: list[tuple[Member, Choice]], *, offload: bool
    ) -> SetPlan | Rejection:
        """Peak over phases of what is resident and what the phase needs, on the fullest lane."""
        fit, work = self.fit, self.work
        node = members[0].block.node
        usable = node.memory * fit.usable
        lanes = sorted({member.lane for member in members}) or [""]
        on = {lane: [(m, c) for m, c in chosen if m.lane in ("", lane)] for lane in lanes}
        fullest = max(on.values(), key=lambda found: sum(choice.resident for _, choice in found))
        resident = sum(choice.resident for _, choice in fullest)
        asleep = fit.residual_gib * GIB
        rollout = next((member for member in members if member.unit.generates), None)
        peak, peak_at, items = self._busiest(chosen, offload=offload, engine=rollout is not None)
        if peak > usable:
            return Rejection(f"{peak_at} needs {{}} of device memory", peak, usable)
        stages = {member.unit.name: choice.stage for member, choice in chosen}
        layouts = {member.unit.name: choice.layout for member, choice in chosen}
        switch, waves = 0.0, 1.0
        stream, lease = 0.0, 0.0
        if rollout is not None:
            held = asleep * len(fullest) if offload else resident
            policy = next((choice for member, choice in chosen if member.unit.model is rollout.unit.model), None)
            got = self._engine(rollout, usable - held, policy, awake=offload)
            if isinstance(got, Rejection):
                return Rejection(got.reason, got.need + held, usable)
            stages["rollout"], layouts["rollout"] = Stage(generate=got.seconds), got.layout
            stream, waves, lease = got.stream, got.waves, got.lease
            switch += got.moving
            if held + got.weights + got.cache > peak:
                peak, peak_at = held + got.weights + got.cache, "rollout"
                items = {f"{m.unit.name} asleep": asleep for m, _ in fullest} if offload else _named(fullest)
                items |= {"rollout weights": got.weights, "rollout kv cache": got.cache}
        host = 0.0
        if offload:
            host, moving = self._offloaded(chosen, members[0].block)
            switch += moving
            limit = node.host_gib * GIB * fit.host_usable
            if host > limit:
                return Rejection("it needs {} of host memory on a node", host, limit)
        parts = [(m.lane, stages[m.unit.name]) for m in members]
        return SetPlan(
            members=tuple(members),
            layouts=layouts,
            stages=stages,
            switch=switch,
            items=items,
            peak=peak,
            peak_at=peak_at,
            host=host,
            offloads=offload,
            waves=waves,
            generate=sum(stage.generate for _, stage in parts),
            stream=stream,
            lease=lease,
            streams=work.ahead > 0,
            prepare=sum(stage.prepare for lane, stage in parts if not lane)
            + max((sum(s.prepare for at, s in parts if at == lane) for lane in lanes if lane), default=0.0),
            train=sum(stage.train for _, stage in parts),
        )

    def _busiest(
        self, chosen: list[tuple[Member, Choice]], *, offload: bool, engine: bool
    ) -> tuple[float, str, dict[str, float]]:
        """The unit that trains or reads at the fullest moment: bytes then, its name, and the bytes by item."""
        asleep = self.fit.residual_gib * GIB
        found = 0.0, "", dict[str, float]()
        for member, choice in chosen:
            others = [(m, c) for m, c in chosen if m is not member and (m.lane in ("", member.lane) or not member.lane)]
            items = {f"{m.unit.name} asleep": asleep for m, _ in others} if offload else _named(others)
            if offload and engine:
                items["rollout asleep"] = asleep
            items |= _named([(member, choice)]) | _passing(member.unit.name, choice)
            found = max(found, (sum(items.values()), member.unit.name, items), key=lambda each: each[0])
        return found

    def _offloaded(self, chosen: list[tuple[Member, Choice]], block: Block) -> tuple[float, float]:
        """Bytes on the host of one node, and seconds per train step of moving: everything comes in once, and what was
        trained goes out again; gradients are dropped instead."""
        kept = [(m, choice.resident - choice.items.get("gradients", 0.0)) for m, choice in chosen]
        comes, goes = sum(size for _, size in kept), sum(size for m, size in kept if m.unit.trains)
        return memory.host_bytes(comes, block, self.fit), (comes + goes) / block.node.pcie

    def _engine(self, member: Member, free: float, policy: Choice | None, *, awake: bool) -> Engine | Rejection:
        """The generation layout with the shortest (sampling + resharding), given `free` bytes a device. `awake`: the
        policy's weights are not among what is held, and have to be there as well while the engine takes them."""
        unit, block, fit = member.unit, member.block, self.fit
        shard = policy.items["weights"] if policy is not None and awake else 0.0
        bucket = fit.bucket_gib * GIB
        best: Engine | None = None
        least = (float("inf"), "")
        options = self._layouts(unit, block)
        for layout in options:
            weights = memory.engine_weights(unit.model, layout)
            cache = (free - weights - bucket) * fit.kv_share
            got = None
            if cache > 0 and memory.wake_up_peak(shard, weights, cache, bucket) <= free:
                got = self._sampled(unit, block, layout, cache)
            if got is None:
                one = unit.model.shape.kv_bytes / layout.model * self.work.mean_length
                need = max(memory.wake_up_peak(shard, weights, one, bucket), weights + bucket + one / fit.kv_share)
                least = min(least, (need, str(layout)))
                continue
            moving = 0.0 if policy is None else reshard_seconds(unit.model, block, policy.layout, layout, fit)
            engine = Engine(layout, *got, weights, cache, moving)
            if best is None or self._sampling(engine) < self._sampling(best):
                best = engine
        if best is not None:
            return best
        if not options and unit.name in self.fixed:
            return self._untiled(member)
        if not options:
            return Rejection(
                f"rollout: no tensor parallel size of {unit.model.shape.heads} heads tiles {block.count} devices"
            )
        return Rejection(
            f"rollout's wake-up (weights of {least[1]}, one bucket, cache of one answer) needs {{}} of device memory",
            least[0],
        )

    def _sampling(self, engine: Engine) -> float:
        return engine.moving + (engine.stream if self.work.ahead else engine.seconds)

    def _sampled(
        self, unit: Unit, block: Block, layout: Layout, cache: float
    ) -> tuple[float, float, float, float] | None:
        """Seconds, seconds with full engines, waves, and a lease's; remembered by quarter GiB of cache."""
        key = (block.pool, block.count, layout, int(cache / GIB * 4))
        if key not in self._generated:
            got = generation(unit.model, block, layout, self.work, key[3] / 4 * GIB, self.fit)
            measured = self.fit.measured.get(unit.name)
            if got is None:
                self._generated[key] = None
            elif measured is None:
                self._generated[key] = got.seconds, got.stream, got.waves, got.lease
            else:
                seconds = measured.seconds * measured.devices / block.count
                self._generated[key] = seconds, seconds, got.waves, got.lease * seconds / got.seconds
        return self._generated[key]


def _named(chosen: Sequence[tuple[Member, Choice]]) -> dict[str, float]:
    return {f"{m.unit.name} {item}": size for m, c in chosen for item, size in c.items.items()}


def _passing(name: str, choice: Choice) -> dict[str, float]:
    return {f"{name} {item}": size for item, size in choice.passing.items() if size}
