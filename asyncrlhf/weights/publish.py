"""Publishing the weights of ranks that hold them in parts: every rank puts its own where engines read them, and none
ever has more than that.

The ranks ask for it together, and wait for the slowest. Each part goes out once, from one of the ranks that have it;
where engines are on the ranks' devices, from all that have it, since each takes it from its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from asyncrlhf.errors import PublishRefused
from asyncrlhf.messages import Probe, WeightHandle, import_object
from asyncrlhf.weights.checksum import Sums, combine
from asyncrlhf.weights.finite import not_finite
from asyncrlhf.weights.layout import Box, Layout, without_replicas
from asyncrlhf.weights.parts import ASSEMBLED, part
from asyncrlhf.weights.regions import region

__all__ = ("ShardPublisher",)


class ShardPublisher:
    """One rank's side of a trainer's publishing."""

    def __init__(
        self,
        transport: str,
        layout: Layout,
        rank: int,
        everyones: Callable[[Any], list[Any]],
        *,
        replicas: bool = False,
    ) -> None:
        """`transport`: import path of the WeightTransfer that carries the parts. `layout`: where the ranks, in their
        order, have them. `everyones`: gives what each rank brings, by rank. `replicas`: each puts all that it has, also
        what others put."""
        once = without_replicas(layout)
        self._layout, self._rank, self._everyones = layout if replicas else once, rank, everyones
        self._path, self._sender = transport, import_object(transport)()
        self._holding, self._once = self._layout.holdings[rank], once.holdings[rank]
        order = {name: number for number, name in enumerate(self._layout.parameters)}
        slices = sorted(self._holding.slices, key=lambda piece: order[piece.parameter])
        self._names = tuple(dict.fromkeys(piece.tensor for piece in slices))
        """Tensors that this rank puts, in the order in which they will be read."""
        self._exported: tuple[int, Mapping[str, Any], Probe | None] | None = None

    def export(self, version: int, tensors: Mapping[str, Tensor], probe: Callable[[], Probe | None]) -> WeightHandle:
        """Put this rank's part of `tensors`, which are all that it has, by their names in the layout; `probe` is asked
        when they have changed. Raises PublishRefused, on all ranks, if a number is not finite or a rank cannot put its
        part; what was put before can still be read."""
        digest = self._checksum(version, tensors)
        changed = self._exported is None or self._exported[0] != digest
        if changed:
            self._exported = digest, self._put(version, tensors), probe()
        assert self._exported is not None
        return WeightHandle(
            version=version,
            checksum=digest,
            changed=changed,
            byte_count=sum(parameter.byte_count for parameter in self._layout.parameters.values()),
            transport=ASSEMBLED,
            payload=self._exported[1],
            probe=self._exported[2],
        )

    def _checksum(self, version: int, tensors: Mapping[str, Tensor]) -> int:
        """That of the whole parameters, to which one rank adds each part."""
        bad = not_finite(tensors)
        sums, own = Sums[tuple[str, Box]](), dict[str, int]()
        for piece in () if bad else self._once.slices:
            found = region(self._local(tensors, piece.tensor), piece.offset, tuple(b - a for a, b in piece.box))
            shape = self._layout.parameters[piece.parameter].shape
            sums.add((piece.parameter, piece.box), found, piece.box, shape)
        for (name, _), added in sums.settle().items():
            own[name] = own.get(name, 0) + added
        said = self._everyones((bad, own))
        if bad := [name for names, _ in said for name in names]:
            raise PublishRefused(
                f"version {version} has {len(bad)} parameters that are not finite, among them {bad[0]!r}; the weights "
                "published before stay in use. Lower the learning rate or max_grad_norm"
            )
        sums = dict.fromkeys(self._layout.parameters, 0)
        for _, parts in said:
            for name, added in parts.items():
                sums[name] = (sums[name] + added) % (1 << 64)
        return combine(sums.items())

    def _put(self, version: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Any]:
        own, problem = {}, ""
        try:
            own = self._sender.send(version, {name: self._local(tensors, name) for name in self._names})
        except Exception as error:  # whatever a transport raises: the other ranks must hear of it
            problem = f"rank {self._rank}: {type(error).__name__}: {error}"
        if problem := next(filter(None, self._everyones(problem)), ""):
            raise PublishRefused(
                f"version {version} could not be put where engines read it, {problem}; the weights published before "
                "stay in use"
            )
        return part(self._layout, self._path, version, own)

    def _local(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        return tensors[name].detach().view(self._holding.tensors[name].shape)
