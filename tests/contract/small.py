"""A ledger in a few words, for tests that tell a story step by step."""

from __future__ import annotations

from typing import Any

from asyncrlhf.flow.ledger import Batch, Lease, Ledger, LedgerRules


def rules(B: int, K: int, D: int, **others: Any) -> LedgerRules:
    return LedgerRules(prompts_per_step=B, max_staleness=K, lookahead=D, **others)


def launched(B: int, K: int, D: int, data: int | None = None, **others: Any) -> Ledger:
    """A ledger whose engines serve version 0."""
    ledger = Ledger(rules(B, K, D, **others), data)
    ledger.publish(0)
    return ledger


def refill(ledger: Ledger) -> list[Lease]:
    return list(iter(ledger.grant, None))


def finish(ledger: Ledger, lease: Lease, *versions: int, tokens: int = 10, trainable: bool = True) -> None:
    """Every answer gets `tokens` tokens of each version (default: the one of its grant), then the rollout is put."""
    for answer in range(ledger.rules.answers_per_prompt):
        for version in versions or (lease.granted,):
            assert ledger.report(lease.uid, lease.attempt, answer, version, tokens)
    assert ledger.ready(lease.uid, lease.attempt, byte_count=100, trainable=trainable)


def train(ledger: Ledger) -> Batch:
    """Pop, apply, publish when due."""
    batch = ledger.pop()
    assert batch is not None
    ledger.applied()
    if ledger.due():
        ledger.publish(ledger.version)
    ledger.check()
    return batch


def uids(batch: Batch | None) -> list[int]:
    assert batch is not None
    return [lease.uid for lease in batch.leases]


def run_to_end(ledger: Ledger, steps: int = 10_000) -> list[list[int]]:
    """Everything granted finishes at once, until the run ends or `steps` batches are trained: their uids."""
    batches: list[list[int]] = []
    while ledger.reason is None and len(batches) < steps:
        for lease in refill(ledger):
            finish(ledger, lease)
        for lease in list(ledger.live.values()):
            if lease.state != "ready":
                finish(ledger, lease, max([lease.granted, *lease.tokens]))
        if (batch := ledger.pop()) is not None:
            batches.append(uids(batch))
            ledger.applied()
            if ledger.due():
                ledger.publish(ledger.version)
    ledger.check()
    return batches
