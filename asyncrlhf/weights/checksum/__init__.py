"""The checksum of all parameter bytes: what it is (sums.py), of which blocks (blocks.py), and how CPUs compute it
(threads.py, whose inner loop is in compiled.py)."""

from asyncrlhf.weights.checksum.sums import (
    Sums,
    checksum,
    combine,
    partial_checksum,
    require_checksum,
    tensor_checksum,
)

__all__ = ("Sums", "checksum", "combine", "partial_checksum", "require_checksum", "tensor_checksum")
