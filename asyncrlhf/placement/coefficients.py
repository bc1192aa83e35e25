"""Calibration as data: how far from the data sheet real kernels are. Every default can be set in [calibration]."""

from __future__ import annotations

from msgspec import field

from asyncrlhf.config.bounds import Amount, Fraction, PositiveAmount, Table

__all__ = ("Coefficients", "Measured")


class Measured(Table, frozen=True, kw_only=True):
    """A stage that was timed: its device-seconds stay what they were at other device counts."""

    seconds: PositiveAmount
    """Of one train step."""
    devices: PositiveAmount = 1
    """That took them."""


class Coefficients(Table, frozen=True, kw_only=True):
    """The defaults are assumptions, not measurements: placements are compared by them, seconds are not promised."""

    mfu_train: PositiveAmount = 0.45
    """Share of peak FLOP/s in forward and backward passes."""
    mfu_forward: PositiveAmount = 0.50
    """In forward passes alone."""
    mfu_decode: PositiveAmount = 0.40
    """In decode steps, where compute bounds them."""
    mbu: PositiveAmount = 0.70
    """Share of memory bandwidth in decode steps."""
    network: PositiveAmount = 0.80
    """Share of link bandwidth in collectives and weight transfers."""
    step_overhead_s: Amount = 2e-3
    """o0: what a decode step costs whatever it holds."""
    sequence_overhead_s: Amount = 1e-4
    """o1: what each sequence adds to a decode step (sampling, scheduling)."""
    collective_s: Amount = 8e-6
    """Latency of one collective, times 1 + log2 of the group."""
    update_overhead_s: Amount = 0.0
    """What an optimizer step costs beside computing and communicating."""
    call_s: Amount = 2e-3
    """One remote call."""
    bucket_gib: PositiveAmount = 1.0
    """Weights moved at once."""
    usable: Fraction = 0.92
    """Share of device memory that a plan may fill."""
    kv_share: Fraction = 0.90
    """Share of the memory left beside weights that a KV cache may take."""
    residual_gib: Amount = 4.0
    """What a process that sleeps keeps on its device."""
    host_factor: PositiveAmount = 2.25
    """Host bytes per offloaded byte, at worst (measured in slime, issue 1851)."""
    host_usable: Fraction = 0.90
    """Share of host memory that a plan may fill."""
    measured: dict[str, Measured] = field(default_factory=dict)
    """Stages by name ("rollout", "policy", "critic", "reference", "reward") that were timed: they replace formulas."""
