"""Reshard between processes: every rank of a plan sends its slices and receives those it lacks, bucket by bucket.

All ranks of the plan call `run` for the same version. It waits for every other one: for their word that they are ready,
for their messages, and for their word that all has arrived; each time at most until `timeout`. Nothing is written to
the weights that an engine serves with, only to the tensors it gives as `staged`; whoever gets no complete version
raises PublishRefused, as do all others, and goes on with the version it has.

On both sides, with the layouts of `megatron_layout`, `torch_layout` and `vllm_layout`:

    source, destination = megatron_layout(shape, parallel, places(4)), vllm_layout(shape, engine, places(4, first=4))
    exchange = Exchange(source, destination, rank, join(host, port, rank, 8), cap=64 << 20)
    exchange.run(7, dict(chunks.named_parameters()), {})                     # ranks 0-3, the trainer
    staged = allocate(holding_of(destination, rank))                         # ranks 4-7, once
    exchange.run(7, {}, staged)                                              # then exchange staged and live: commit
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrlhf.errors import ConfigError, PublishRefused
from asyncrlhf.messages.samples import Message
from asyncrlhf.weights.layout import Layout
from asyncrlhf.weights.plan import LOCAL, Move, make_plan, message_bytes
from asyncrlhf.weights.regions import dtype_of, holding_of, region, require_tensors

__all__ = ("Exchange", "Receipt", "join")

TRAILER = 3
"""int64 words after the bytes of a message: version, fingerprint of the plan, checksum of the bytes."""
WORD = 8
ROW = 512
"""Words whose sum gets one factor in a checksum."""


class Receipt(Message, frozen=True):
    """What one `run` did at one rank, in bytes."""

    version: int
    sent: int
    received: int
    copied: int
    extra: int
    """Memory that messages took; never more than the plan's cap."""


def join(host: str, port: int, rank: int, rank_count: int, *, timeout: float = 60.0) -> Any:
    """A gloo group of its own for `rank_count` processes, beside whatever groups each has already; rank 0 listens on
    `port`. Waits for all of them, at most `timeout` seconds, then raises RuntimeError."""
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(host, port, rank_count, rank == 0, timeout=limit)
    return dist.ProcessGroupGloo(dist.PrefixStore("asyncrlhf-reshard", store), rank, rank_count, limit)


class Exchange:
    """One rank's part in moving weights from one layout to another.

    `group`: of all the plan's ranks, numbered alike: from `join`, or from torch.distributed.new_group. `device`: where
    messages are; not that of the tensors if the group cannot reach it (gloo and a GPU: "cpu"). `cap`: bytes.
    """

    def __init__(
        self,
        source: Layout,
        destination: Layout,
        rank: int,
        group: Any,
        *,
        cap: int,
        timeout: float = 60.0,
        device: str = "cpu",
    ) -> None:
        self.plan = make_plan(source, destination, cap=cap)
        if len(self.plan.nodes) != group.size() or set(self.plan.nodes) != set(range(group.size())):
            raise ConfigError(f"the plan has ranks {sorted(self.plan.nodes)}, its group has {group.size()}")
        self._rank, self._group, self._timeout, self._device = rank, group, timeout, device
        self._holds, self._needs = holding_of(source, rank), holding_of(destination, rank)
        self._broken = ""
        self._copies = [move for move in self.plan.moves if move.bucket == LOCAL and move.target == rank]
        self._buckets: dict[int, _Bucket] = defaultdict(_Bucket)
        for move in self.plan.moves:
            if move.bucket != LOCAL and move.source == rank:
                self._buckets[move.bucket].out[move.target].append(move)
            elif move.bucket != LOCAL and move.target == rank:
                self._buckets[move.bucket].into[move.source].append(move)
        self._extra = max((bucket.byte_count for bucket in self._buckets.values()), default=0)

    @torch.no_grad()
    def run(self, version: int, tensors: Mapping[str, Tensor], staged: Mapping[str, Tensor]) -> Receipt:
        """Send from `tensors` (empty: this rank trains nothing), receive into `staged` (empty: it serves nothing).

        Raises PublishRefused at every rank if any is not ready, fails, is too late, or holds bytes that are not those
        sent. What is in `staged` then is of no use. Once a rank was lost the group is, and needs to be made anew.
        """
        if self._broken:
            raise PublishRefused(f"version {version} cannot move: {self._broken}. The group must be made anew")
        deadline = time.monotonic() + self._timeout
        arena, problem = self._ready(tensors, staged)
        self._agree(version, problem, deadline)
        for move in self._copies:
            taken = region(tensors[move.source_tensor], move.source_offset, move.lengths)
            region(staged[move.target_tensor], move.target_offset, move.lengths).copy_(taken)
        spoilt = [self._carry(index, version, arena, tensors, staged, deadline) for index in sorted(self._buckets)]
        self._agree(version, "; ".join(filter(None, spoilt)), deadline)
        return Receipt(
            version=version,
            sent=_total(moves for bucket in self._buckets.values() for moves in bucket.out.values()),
            received=_total(moves for bucket in self._buckets.values() for moves in bucket.into.values()),
            copied=_total([self._copies]),
            extra=self._extra,
        )

    def _ready(self, tensors: Mapping[str, Tensor], staged: Mapping[str, Tensor]) -> tuple[Tensor, str]:
        """(memory for messages, what is wrong here)."""
        try:
            require_tensors(tensors, self._holds, "trained")
            require_tensors(staged, self._needs, "staged")
            return torch.empty(self._extra, dtype=torch.uint8, device=self._device), ""
        except (ConfigError, RuntimeError) as error:
            return torch.empty(0), f"{type(error).__name__}: {error}"

    def _carry(
        self,
        index: int,
        version: int,
        arena: Tensor,
        tensors: Mapping[str, Tensor],
        staged: Mapping[str, Tensor],
        deadline: float,
    ) -> str:
        """All of one bucket. Gives what is wrong with the messages that came, for none to be used."""
        bucket, at = self._buckets[index], 0
        receive, send = list[_Message](), list[_Message]()
        for found, side in ((receive, bucket.into), (send, bucket.out)):
            for peer, moves in side.items():
                size = message_bytes(moves) + TRAILER * WORD
                found.append(_Message(peer, moves, arena[at : at + size]))
                at += size
        for message in send:
            message.pack(tensors, version, self.plan.fingerprint)
        works = self._post(index, version, send, receive)
        for work in works:
            self._wait(work, version, deadline)
        return "; ".join(filter(None, (message.unpack(staged, version, self.plan.fingerprint) for message in receive)))

    def _post(self, index: int, version: int, send: Sequence[_Message], receive: Sequence[_Message]) -> list[Any]:
        try:
            if isinstance(self._group, dist.ProcessGroupGloo):  # from `join`, unknown to torch.distributed's functions
                posted = [self._group.recv([message.buffer], message.peer, index) for message in receive]
                return posted + [self._group.send([message.buffer], message.peer, index) for message in send]
            operations = [(dist.irecv, message) for message in receive] + [(dist.isend, message) for message in send]
            return dist.batch_isend_irecv(
                [dist.P2POp(verb, m.buffer, group=self._group, group_peer=m.peer) for verb, m in operations]
            )
        except RuntimeError as error:
            raise self._lost(error, version) from error

    def _agree(self, version: int, problem: str, deadline: float) -> None:
        """Wait for every rank's word. Raises PublishRefused if one has a problem, another version or another plan."""
        mine = torch.tensor([version, self.plan.fingerprint, not problem], dtype=torch.int64, device=self._device)
        words = [torch.empty_like(mine) for _ in range(self._group.size())]
        try:
            work = self._group.allgather([words], [mine])
        except RuntimeError as error:
            raise self._lost(error, version) from error
        self._wait(work, version, deadline)
        if problem:
            raise PublishRefused(f"version {version} is refused by rank {self._rank}: {problem}")
        for rank, (other, fingerprint, fine) in enumerate(word.tolist() for word in words):
            if other != version:
                raise PublishRefused(f"rank {self._rank} moves version {version}, rank {rank} version {other}")
            if fingerprint != self.plan.fingerprint:
                raise PublishRefused(
                    f"rank {self._rank} follows plan {self.plan.fingerprint:x}, rank {rank} plan {fingerprint:x}: "
                    "layouts and cap must be the same everywhere"
                )
            if not fine:
                raise PublishRefused(f"version {version} is refused by rank {rank}, whose own message says why")

    def _wait(self, work: Any, version: int, deadline: float) -> None:
        try:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise self._lost(error, version) from error

    def _lost(self, error: RuntimeError, version: int) -> PublishRefused:
        """A peer is gone or late. Giving up closes this rank's connections, so that the others give up as well."""
        first = (str(error).splitlines() or [""])[0]
        self._broken = f"rank {self._rank} lost a peer at version {version} ({first})"
        return PublishRefused(
            f"version {version} did not move within {self._timeout:g} s: {self._broken}; engines go on with the "
            "version they have"
        )


@dataclass(slots=True)
class _Bucket:
    """What one rank sends and receives together, by peer."""

    out: dict[int, list[Move]] = field(default_factory=lambda: defaultdict(list))
    into: dict[int, list[Move]] = field(default_factory=lambda: defaultdict(list))

    @property
    def byte_count(self) -> int:
        messages = [*self.out.values(), *self.into.values()]
        return sum(message_bytes(moves) + TRAILER * WORD for moves in messages)


@dataclass(frozen=True, slots=True)
class _Message:
    """The moves between this rank and a peer in one bucket, and uint8 [bytes] for them."""

    peer: int
    moves: Sequence[Move]
    buffer: Tensor

    def _slots(self) -> Iterator[tuple[Move, Tensor]]:
        at = 0
        for move in self.moves:
            slot = self.buffer[at : at + move.byte_count].view(dtype_of(move.dtype)).view(move.lengths)
            yield move, slot
            at += message_bytes((move,))

    def pack(self, tensors: Mapping[str, Tensor], version: int, fingerprint: int) -> None:
        for move, slot in self._slots():
            slot.copy_(region(tensors[move.source_tensor], move.source_offset, move.lengths))
        words = self.buffer.view(torch.int64)
        words[-TRAILER:] = torch.tensor([version, fingerprint, _checksum(words[:-TRAILER])], device=words.device)

    def unpack(self, staged: Mapping[str, Tensor], version: int, fingerprint: int) -> str:
        """Gives what is wrong, and then leaves `staged` alone."""
        words = self.buffer.view(torch.int64)
        expected = [version, fingerprint, _checksum(words[:-TRAILER])]
        found = words[-TRAILER:].tolist()
        if found != expected:
            return f"from rank {self.peer} came version, plan and checksum {found}, expected {expected}"
        for move, slot in self._slots():
            region(staged[move.target_tensor], move.target_offset, move.lengths).copy_(slot)
        return ""


def _total(lists: Iterable[Sequence[Move]]) -> int:
    return sum(move.byte_count for moves in lists for move in moves)


def _checksum(words: Tensor) -> int:
    """Of int64 words, in one pass and without a copy: sums of rows, each times an odd number of its place, mod 2^64."""
    whole = len(words) // ROW
    sums = words[: whole * ROW].view(whole, ROW).sum(1)
    factors = torch.arange(1, 2 * whole + 1, 2, device=words.device).mul_(-7046029254386353131)
    return int(sums.mul_(factors).sum() + words[whole * ROW :].sum() * -4658895280553007687)
