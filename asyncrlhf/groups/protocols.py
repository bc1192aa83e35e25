"""Transfer protocols: what each rank of a group gets of a call, and what its callers get of the ranks' results.

Pure functions of the group's layout (HybridFlow, arXiv 2409.19256, section 4.1). A TrainBatch is split by its lengths
alone; ranks may end up with no row. A user's own pair is any Protocol that can be imported.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from asyncrlhf.errors import ConfigError, GroupError
from asyncrlhf.messages import Packed, TrainBatch, import_object
from asyncrlhf.messages.layout import ParallelLayout
from asyncrlhf.weights.parts import joined

__all__ = (
    "PROTOCOLS",
    "Arguments",
    "Protocol",
    "all_to_all",
    "announce",
    "broadcast",
    "lead",
    "micro_data_parallel",
    "pipeline_only",
    "protocol",
    "shares",
    "three_d",
)

Arguments = tuple[Any, ...]
LOPSIDED = 1.1
"""Load of the fullest rank against the mean above which the answers to one prompt are parted."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way to call all ranks of a group.

    Example: with `three_d` on ParallelLayout(data=2), step(batch, loss) gives rank 0 some rows of the batch, rank 1 the
    others, and both the loss.
    """

    distribute: Callable[[ParallelLayout, Arguments], list[Arguments]]
    """The arguments of every rank, by rank."""
    collect: Callable[[ParallelLayout, Arguments, Sequence[Any]], Any]
    """The result for the caller, from the layout, the caller's arguments, and the results by rank."""


def protocol(name: str) -> Protocol:
    """A protocol by its name here, or by import path "module:name". Raises ConfigError."""
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    if ":" not in name:
        raise ConfigError(
            f'there is no transfer protocol "{name}"; use one of {", ".join(PROTOCOLS)}, or "module:name" of your own'
        )
    found = import_object(name)
    if not isinstance(found, Protocol):
        raise ConfigError(f'"{name}" is a {type(found).__name__}; a transfer protocol is a groups.protocols.Protocol')
    return found


# ---- how rows are shared out ---------------------------------------------------------------------------------------
def shares(batch: TrainBatch, count: int, *, whole_rollouts: bool = False) -> list[list[int]]:
    """Rows for each of `count` ranks, ascending, every row once, balanced by tokens of prompt and answer.

    Answers to one prompt stay together (their prompt may then be read once) if that leaves the fullest rank within
    LOPSIDED of the mean, or always with `whole_rollouts`.
    """
    sizes = [prompt + answer for prompt, answer in zip(batch.prompt_lengths, batch.response_lengths, strict=True)]
    if count == 1 or not sizes:
        return [list(range(len(sizes))), *([] for _ in range(count - 1))]
    rollouts: dict[int, list[int]] = {}
    for row, rollout in enumerate(batch.rollouts):
        rollouts.setdefault(rollout, []).append(row)
    together, fullest = _spread(rollouts.values(), sizes, count)
    if whole_rollouts or fullest <= LOPSIDED * sum(sizes) / count:
        return together
    apart, lightest = _spread(([row] for row in range(len(sizes))), sizes, count)
    return apart if lightest < fullest else together


def _spread(units: Iterable[list[int]], sizes: Sequence[int], count: int) -> tuple[list[list[int]], int]:
    """Units of rows over ranks, the largest first, each to the emptiest; and the load of the fullest rank."""
    weighed = sorted(((sum(sizes[row] for row in unit), unit) for unit in units), key=lambda pair: (-pair[0], pair[1]))
    ranks: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, rank) for rank in range(count)]
    for size, unit in weighed:
        load, rank = heapq.heappop(loads)
        ranks[rank] += unit
        heapq.heappush(loads, (load + size, rank))
    return [sorted(rows) for rows in ranks], max(loads)[0]


def _split(arguments: Arguments, count: int) -> list[list[int]]:
    """The shares of the batch among the arguments; a loss there that works on rollouts keeps them whole."""
    batches = [argument for argument in arguments if isinstance(argument, TrainBatch)]
    if len(batches) != 1:
        raise GroupError(f"{len(batches)} of {len(arguments)} arguments are batches; a split takes exactly 1")
    whole = any(
        getattr(import_object(argument.path), "level", "token") == "rollout"
        for argument in arguments
        if isinstance(argument, Packed)
    )
    return shares(batches[0], count, whole_rollouts=whole)


def _parts(arguments: Arguments, rows: Sequence[Sequence[int]]) -> list[Arguments]:
    """The arguments with the batch cut to some rows, for each share."""

    def cut(argument: Any, share: Sequence[int]) -> Any:
        return argument.take(share).without_origin() if isinstance(argument, TrainBatch) else argument

    return [tuple(cut(argument, share) for argument in arguments) for share in rows]


def _merged(results: Sequence[Any], rows: Sequence[Sequence[int]]) -> Any:
    """One result of those of the shares: something per row goes back to the order of the rows, columns one by one; of
    anything else all have the same."""
    first = results[0]
    if isinstance(first, Mapping):
        columns = cast("Sequence[Mapping[str, Any]]", results)
        return {name: _merged([part[name] for part in columns], rows) for name in columns[0]}
    if not isinstance(first, list | tuple):
        return first
    found: list[Any] = [None] * sum(map(len, rows))
    for share, part in zip(rows, cast("Sequence[Sequence[Any]]", results), strict=True):
        if len(share) != len(part):
            raise GroupError(f"a rank was given {len(share)} rows and gave results for {len(part)}")
        for row, value in zip(share, part, strict=True):
            found[row] = value
    return found


# ---- the protocols -------------------------------------------------------------------------------------------------
def _same(layout: ParallelLayout, arguments: Arguments) -> list[Arguments]:
    return [arguments] * layout.ranks


def _all(layout: ParallelLayout, arguments: Arguments, results: Sequence[Any]) -> list[Any]:
    return list(results)


def _first(layout: ParallelLayout, arguments: Arguments, results: Sequence[Any]) -> Any:
    return results[0]


def _announced(layout: ParallelLayout, arguments: Arguments, results: Sequence[Any]) -> Any:
    return joined(results)


def _distribute_3d(layout: ParallelLayout, arguments: Arguments) -> list[Arguments]:
    parts = _parts(arguments, _split(arguments, layout.data))
    return [parts[layout.place(rank).data] for rank in range(layout.ranks)]


def _collect_3d(layout: ParallelLayout, arguments: Arguments, results: Sequence[Any]) -> Any:
    rows = _split(arguments, layout.data)
    return _merged([results[layout.last_of(data)] for data in range(layout.data)], rows)


def _collect_stages(layout: ParallelLayout, arguments: Arguments, results: Sequence[Any]) -> list[Any]:
    places = (layout.place(rank) for rank in range(layout.ranks))
    return [results[layout.rank(place)] for place in places if place.tensor == place.context == place.data == 0]


def _distribute_transposed(layout: ParallelLayout, arguments: Arguments) -> list[Arguments]:
    for argument in arguments:
        if len(argument) != layout.ranks:
            raise GroupError(f"an argument has {len(argument)} parts for {layout.ranks} ranks; give one for each")
    return [tuple(argument[rank] for argument in arguments) for rank in range(layout.ranks)]


def micro_data_parallel(tensor: int, pipeline: int) -> Protocol:
    """For ranks that train in one layout and generate in another, of `tensor` and `pipeline` parallel size, without
    moving a shard twice (HybridFlow's zero-redundancy grouping).

    Of the t * p ranks of a data parallel copy, those with equal (pp_rank % (p / pipeline), tp_rank % (t / tensor)) form
    one generating copy: its rows are the same on all of them, and come back from the first of its last stage. Raises
    GroupError, when called, if the sizes do not divide those of the layout.
    """

    def copies(layout: ParallelLayout) -> tuple[int, int]:
        if layout.tensor % tensor or layout.pipeline % pipeline or layout.context > 1:
            raise GroupError(
                f"generation with tensor, pipeline = {tensor}, {pipeline} on training ranks with {layout.tensor}, "
                f"{layout.pipeline} and context = {layout.context}: the former must divide the latter, and context be 1"
            )
        return layout.tensor // tensor, layout.pipeline // pipeline

    def copy_of(layout: ParallelLayout, rank: int) -> int:
        wide, deep = copies(layout)
        place = layout.place(rank)
        return (place.data * deep + place.pipeline % deep) * wide + place.tensor % wide

    def count(layout: ParallelLayout) -> int:
        wide, deep = copies(layout)
        return layout.data * wide * deep

    def distribute(layout: ParallelLayout, arguments: Arguments) -> list[Arguments]:
        parts = _parts(arguments, _split(arguments, count(layout)))
        return [parts[copy_of(layout, rank)] for rank in range(layout.ranks)]

    def collect(layout: ParallelLayout, arguments: Arguments, results: Sequence[Any]) -> Any:
        wide, deep = copies(layout)
        answers: dict[int, Any] = {}
        for rank in range(layout.ranks):
            place = layout.place(rank)
            if place.tensor // wide == 0 and place.pipeline // deep == pipeline - 1:
                answers[copy_of(layout, rank)] = results[rank]
        return _merged([answers[copy] for copy in range(count(layout))], _split(arguments, count(layout)))

    return Protocol(distribute, collect)


broadcast = Protocol(_same, _all)
"""All ranks get everything; the caller gets every rank's result."""
lead = Protocol(_same, _first)
"""All ranks get everything and work together; rank 0 has the result."""
announce = Protocol(_same, _announced)
"""All ranks get everything and put their parts of the weights; the caller gets one WeightHandle for all of them."""
three_d = Protocol(_distribute_3d, _collect_3d)
"""Each data parallel copy gets its rows, all ranks of a copy the same; results come from the last stage of each. With
tensor, context and pipeline sizes of 1 this is plain data parallelism."""
pipeline_only = Protocol(_same, _collect_stages)
"""All ranks get everything; the caller gets one result per pipeline stage, in their order."""
all_to_all = Protocol(_distribute_transposed, _all)
"""Every argument is a list with one part per rank; the caller gets every rank's result."""

PROTOCOLS: Mapping[str, Protocol] = {
    "broadcast": broadcast,
    "lead": lead,
    "announce": announce,
    "data_parallel": three_d,
    "3d": three_d,
    "pipeline_only": pipeline_only,
    "all_to_all": all_to_all,
}
"""By name. `micro_data_parallel` needs the sizes of the generating layout."""
