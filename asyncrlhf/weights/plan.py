"""The reshard plan: which bytes go from which rank's tensor to which rank's, so that one layout becomes another.

Pure and deterministic: every rank computes the same plan from the two layouts (metadata only), and nobody asks anybody.
For every slice that a destination needs: a copy where the rank has it itself, else one of the ranks that are nearest to
it (`near`), else a replica on the same node, else the one that sends least so far. What moves between ranks is cut into
pieces and dealt to buckets, such that no rank ever holds more than `cap` bytes of messages at once, in or out.
HybridFlow (arXiv:2409.19256, section 5.3 and table 2) is where gathering everything on every rank is compared with
moving what differs; `zero_redundancy.py` has its grouping.

Example: `plan = make_plan(megatron_layout(...), vllm_layout(...), cap=64 << 20)`, then `print(describe(plan))`.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from asyncrlhf.errors import ConfigError
from asyncrlhf.weights.layout import Box, Holding, Layout, Slice
from asyncrlhf.weights.shapes import BYTES, Dtype

__all__ = (
    "LOCAL",
    "SLACK",
    "SMALLEST_CAP",
    "Move",
    "Plan",
    "Traffic",
    "describe",
    "make_plan",
    "message_bytes",
    "size_text",
)

LOCAL = -1
"""Bucket of moves within a rank, which need no message."""
SLACK = 32
"""Bytes of a message beyond its moves: version, plan and checksum, 8 bytes each, and alignment."""
SMALLEST_CAP = 4096
"""Bytes: room for a few pieces and their trailers."""
PIECES = 4
"""A message of one piece takes at most this part of the cap, so that buckets fill up."""
FULL = 16
"""A bucket with less than this part of the cap left counts as full: that much is for checksums and the like."""
ALIGNMENT = 8


class Move(msgspec.Struct, frozen=True):
    """One rectangle of one parameter, from a tensor of rank `source` into a tensor of rank `target`."""

    parameter: str
    box: Box
    dtype: Dtype
    """What travels: the destination's type."""
    source: int
    source_tensor: str
    source_offset: tuple[int, ...]
    target: int
    target_tensor: str
    target_offset: tuple[int, ...]
    bucket: int
    """Messages of one bucket travel together, and buckets one after another; `LOCAL`: none is needed."""

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(high - low for low, high in self.box)

    @property
    def byte_count(self) -> int:
        return _bytes(self.box, self.dtype)


class Traffic(msgspec.Struct, frozen=True):
    """What a plan costs one rank, in bytes."""

    rank: int
    node: str
    sent: int
    received: int
    received_on_node: int
    """Part of `received` that comes from the same node."""
    copied: int
    """What it has itself."""
    extra: int
    """Messages that it holds at once, at most; never more than the cap."""


class Plan(msgspec.Struct, frozen=True):
    """Every move between two layouts. Equal fingerprints mean equal plans."""

    source: str
    destination: str
    nodes: dict[int, str]
    moves: tuple[Move, ...]
    bucket_count: int
    cap: int
    fingerprint: int
    shapes: dict[str, tuple[int, ...]]
    """Of every parameter, whole."""

    def traffic(self) -> tuple[Traffic, ...]:
        """Of every rank, in order."""
        sent, received, near, copied = (dict.fromkeys(self.nodes, 0) for _ in range(4))
        for move in self.moves:
            if move.bucket == LOCAL:
                copied[move.target] += move.byte_count
                continue
            sent[move.source] += move.byte_count
            received[move.target] += move.byte_count
            if self.nodes[move.source] == self.nodes[move.target]:
                near[move.target] += move.byte_count
        extra = _held_at_once(self.moves)
        return tuple(
            Traffic(rank, node, sent[rank], received[rank], near[rank], copied[rank], extra.get(rank, 0))
            for rank, node in sorted(self.nodes.items())
        )


class _Piece(NamedTuple):
    """Part of a destination slice, the rank that has it, and the slice in which it has it."""

    box: Box
    source: int
    found: Slice


def make_plan(
    source: Layout, destination: Layout, *, cap: int, near: Mapping[int, Collection[int]] | None = None
) -> Plan:
    """Cover every slice of `destination` from `source`. `cap`: bytes of messages that a rank may hold at once. `near`:
    by rank of the destination, whom it takes from before it asks others.

    Raises ConfigError, naming parameter and both shapes, when the two do not hold the same parameters or a slice is
    nowhere to be found.
    """
    if cap < SMALLEST_CAP:
        raise ConfigError(f"{cap} bytes of messages at once are too few; at least {SMALLEST_CAP} are needed")
    _require_same_parameters(source, destination)
    nodes = {holding.place.rank: holding.place.node for side in (source, destination) for holding in side.holdings}
    finder = _Finder(source, nodes, near or {}, cap // PIECES)
    wanted: dict[str, list[tuple[Holding, Slice]]] = defaultdict(list)
    for holding in destination.holdings:
        for piece in holding.slices:
            wanted[piece.parameter].append((holding, piece))
    dealer = _Dealer(cap)
    moves: list[Move] = []
    for name, parameter in destination.parameters.items():
        for holding, piece in wanted[name]:
            for box, rank, found in finder.cover(piece, holding.place.rank, parameter.dtype, destination.name):
                target = holding.place.rank
                bucket = LOCAL if rank == target else dealer.bucket(rank, target, _bytes(box, parameter.dtype))
                here, there = _offset(found, box), _offset(piece, box)
                moves.append(
                    Move(name, box, parameter.dtype, rank, found.tensor, here, target, piece.tensor, there, bucket)
                )
    moves.sort(key=lambda move: move.bucket)
    encoded = msgspec.msgpack.encode((sorted(nodes.items()), moves, cap))
    fingerprint = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little", signed=True)
    shapes = {name: parameter.shape for name, parameter in destination.parameters.items()}
    return Plan(source.name, destination.name, nodes, tuple(moves), dealer.bucket_count, cap, fingerprint, shapes)


def message_bytes(moves: Iterable[Move]) -> int:
    """Size of the message that carries these moves, its trailer not counted."""
    return sum(_aligned(move.byte_count) for move in moves)


def _require_same_parameters(source: Layout, destination: Layout) -> None:
    for name in source.parameters.keys() | destination.parameters.keys():
        here, there = source.parameters.get(name), destination.parameters.get(name)
        if here is None or there is None:
            has, lacks = (destination, source) if here is None else (source, destination)
            raise ConfigError(
                f"{name} of shape {has.parameters[name].shape} is a parameter of {has.name}, and not of {lacks.name}: "
                "both must hold the same model (are the embeddings tied in both?)"
            )
        if here.shape != there.shape:
            raise ConfigError(f"{name} has shape {here.shape} in {source.name}, {there.shape} in {destination.name}")


class _Finder:
    """Where every rectangle of a parameter can be had. Slices with the same rectangle are replicas of each other."""

    def __init__(
        self, source: Layout, nodes: Mapping[int, str], near: Mapping[int, Collection[int]], largest: int
    ) -> None:
        self._source, self._nodes, self._near, self._largest = source, nodes, near, largest
        self._load: dict[int, int] = defaultdict(int)
        self._replicas: dict[str, dict[Box, dict[int, Slice]]] = defaultdict(lambda: defaultdict(dict))
        for holding in source.holdings:
            for piece in holding.slices:
                self._replicas[piece.parameter][piece.box].setdefault(holding.place.rank, piece)

    def cover(self, wanted: Slice, target: int, dtype: Dtype, destination: str) -> Iterator[_Piece]:
        """Disjoint pieces that make up `wanted` for rank `target`, of at most `largest` bytes where they must travel.
        Raises ConfigError if something is missing."""
        replicas = self._replicas[wanted.parameter]
        near = [(box, ranks) for box, ranks in replicas.items() if _overlap(box, wanted.box)]
        near.sort(key=lambda entry: (target not in entry[1], entry[0]))
        missing = [wanted.box]
        for box, ranks in near:
            left: list[Box] = []
            for part in missing:
                common = _overlap(box, part)
                if common is None:
                    left.append(part)
                    continue
                if target in ranks:
                    yield _Piece(common, target, ranks[target])
                else:
                    for cut in _cut(common, BYTES[dtype], self._largest):
                        rank = min(ranks, key=lambda rank: self._cost(rank, target))
                        self._load[rank] += _bytes(cut, dtype)
                        yield _Piece(cut, rank, ranks[rank])
                left += _without(part, common)
            missing = left
        if missing:
            shape = self._source.parameters[wanted.parameter].shape
            raise ConfigError(
                f"{wanted.parameter} of shape {shape}: rank {target} of {destination} needs {_text(wanted.box)}, of "
                f"which no rank of {self._source.name} holds {_text(missing[0])}"
            )

    def _cost(self, rank: int, target: int) -> tuple[bool, bool, int, int]:
        far = rank not in self._near.get(target, ())
        return far, self._nodes[rank] != self._nodes[target], self._load[rank], rank


class _Dealer:
    """Puts what must travel into the first bucket where both its ranks have room."""

    def __init__(self, cap: int) -> None:
        self._cap = cap - cap // FULL
        self._held: dict[int, list[int]] = defaultdict(list)
        self._pairs: set[tuple[int, int, int]] = set()
        self._first: dict[int, int] = defaultdict(int)
        self.bucket_count = 0

    def bucket(self, source: int, target: int, size: int) -> int:
        bucket = max(self._first[source], self._first[target])
        while True:
            extra = _aligned(size) + (0 if (bucket, source, target) in self._pairs else SLACK)
            if max(self._at(source, bucket), self._at(target, bucket)) + extra <= self._cap:
                break
            bucket += 1
        for rank in (source, target):
            self._held[rank][bucket] += extra
            while self._at(rank, self._first[rank]) > self._cap - self._cap // FULL:
                self._first[rank] += 1
        self._pairs.add((bucket, source, target))
        self.bucket_count = max(self.bucket_count, bucket + 1)
        return bucket

    def _at(self, rank: int, bucket: int) -> int:
        held = self._held[rank]
        held.extend([0] * (bucket + 1 - len(held)))
        return held[bucket]


def _held_at_once(moves: Iterable[Move]) -> dict[int, int]:
    """Rank -> bytes of messages in the bucket where it has most of them."""
    held: dict[tuple[int, int], int] = defaultdict(int)
    pairs: set[tuple[int, int, int]] = set()
    for move in moves:
        if move.bucket == LOCAL:
            continue
        pair = (move.bucket, move.source, move.target)
        size = _aligned(move.byte_count) + (0 if pair in pairs else SLACK)
        pairs.add(pair)
        for rank in (move.source, move.target):
            held[rank, move.bucket] += size
    most: dict[int, int] = defaultdict(int)
    for (rank, _), size in held.items():
        most[rank] = max(most[rank], size)
    return most


# ---- rectangles ----------------------------------------------------------------------------------------------------
def _overlap(one: Box, other: Box) -> Box | None:
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(low < high for low, high in common) else None


def _without(box: Box, hole: Box) -> list[Box]:
    """`box` less `hole`, which lies in it, as disjoint rectangles."""
    rest: list[Box] = []
    for dim, ((low, high), (first, last)) in enumerate(zip(box, hole, strict=True)):
        before, after = hole[:dim], box[dim + 1 :]
        rest += [(*before, side, *after) for side in ((low, first), (last, high)) if side[0] < side[1]]
    return rest


def _cut(box: Box, element_bytes: int, limit: int) -> Iterator[Box]:
    """Pieces of at most `limit` bytes: by rows, and by columns where one row is too large."""
    for dim, (low, high) in enumerate(box):
        inner = element_bytes
        for first, last in box[dim + 1 :]:
            inner *= last - first
        step = limit // inner
        if step or dim == len(box) - 1:
            for start in range(low, high, max(step, 1)):
                yield (*box[:dim], (start, min(start + max(step, 1), high)), *box[dim + 1 :])
            return
        if high - low > 1:
            for index in range(low, high):
                yield from _cut((*box[:dim], (index, index + 1), *box[dim + 1 :]), element_bytes, limit)
            return


def _bytes(box: Box, dtype: Dtype) -> int:
    count = BYTES[dtype]
    for low, high in box:
        count *= high - low
    return count


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _offset(piece: Slice, box: Box) -> tuple[int, ...]:
    """Where `box`, which lies in this slice, starts in the slice's tensor."""
    return _shifted(piece.offset, tuple(a[0] - b[0] for a, b in zip(box, piece.box, strict=True)))


def _shifted(offset: tuple[int, ...], shift: tuple[int, ...]) -> tuple[int, ...]:
    extra = len(offset) - len(shift)
    return offset[:extra] + tuple(a + b for a, b in zip(offset[extra:], shift, strict=True))


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{low}:{high}" for low, high in box) + "]"


# ---- for people ----------------------------------------------------------------------------------------------------
def describe(plan: Plan) -> str:
    """The plan's bytes per rank, as a table, for `check` and the log."""
    rows = plan.traffic()
    moved, copied = sum(row.received for row in rows), sum(row.copied for row in rows)
    lines = [
        f"{plan.source} -> {plan.destination}: {size_text(moved)} between ranks, {size_text(copied)} copied in place, "
        f"{len(plan.moves)} moves in {plan.bucket_count} buckets of at most {size_text(plan.cap)} per rank",
        f"{'rank':>6} {'node':>6} {'sent':>11} {'received':>11} {'on node':>11} {'copied':>11} {'extra':>11}",
    ]
    lines += [
        f"{row.rank:>6} {row.node or '-':>6} {size_text(row.sent):>11} {size_text(row.received):>11} "
        f"{size_text(row.received_on_node):>11} {size_text(row.copied):>11} {size_text(row.extra):>11}"
        for row in rows
    ]
    return "\n".join(lines)


def size_text(count: int) -> str:
    """Of so many bytes, for people."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
