"""Names that transformers gives the weights of experts in memory: one tensor of a layer's experts, gate above up."""

from __future__ import annotations

__all__ = ("fused",)


def fused(name: str) -> tuple[str, int | None]:
    """(name, expert) where all experts of a layer are one tensor; of any other name (name, None)."""
    before, found, after = name.partition(".experts.")
    number, _, kind = after.partition(".")
    if not found or not number.isdecimal():
        return name, None
    return f"{before}.experts.{'down_proj' if kind.startswith('down') else 'gate_up_proj'}", int(number)
