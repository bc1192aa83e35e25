"""ParallelLayout: how the ranks of one model share it. Pure arithmetic on rank numbers."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta

from asyncrlhf.messages.samples import Message

__all__ = ("Coordinates", "ParallelLayout")

Size = Annotated[int, Meta(ge=1)]


class Coordinates(NamedTuple):
    """Where a rank stands."""

    tensor: int
    context: int
    data: int
    pipeline: int


class ParallelLayout(Message, frozen=True, kw_only=True):
    """Parallel sizes of one model. Ranks count tensor parallel places first, then context, data and pipeline ones.

    Example: ParallelLayout(tensor=2, data=2) has 4 ranks; ranks 0 and 1 are the tensor parallel halves of data parallel
    copy 0. Experts are spread over the data parallel copies and need no number here.
    """

    tensor: Size = 1
    context: Size = 1
    data: Size = 1
    pipeline: Size = 1

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.tensor * self.context * self.data * self.pipeline

    def place(self, rank: int) -> Coordinates:
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(tensor, context, data, pipeline)

    def rank(self, place: Coordinates) -> int:
        """The rank that stands there."""
        rest = place.pipeline * self.data + place.data
        return (rest * self.context + place.context) * self.tensor + place.tensor

    def last_of(self, data: int) -> int:
        """The rank of a data parallel copy that has its results: the first of its last pipeline stage."""
        return self.rank(Coordinates(0, 0, data, self.pipeline - 1))
