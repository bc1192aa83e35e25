"""What is put is what is counted: the ledger's tokens of a lease are made those of its experience."""

from __future__ import annotations

from collections import Counter

from asyncrlhf.flow.ledger import Ledger
from asyncrlhf.messages import Experience

__all__ = ("reconcile",)


def reconcile(ledger: Ledger, experience: Experience) -> None:
    """Count tokens that no engine reported, and drop reported ones that are not in the experience. Those that an
    environment wrote count nowhere. Raises ValueError for tokens that the lease did not sample."""
    prompt = experience.prompt
    lease = ledger.live[prompt.uid]
    put: Counter[int] = Counter()
    unreported = not lease.tokens  # sampled by something else than a rollout group
    if lease.state == "scoring":
        ledger.reopen(prompt.uid, prompt.attempt)
    for number, sample in enumerate(experience.rollout.samples):
        for segment in (s for s in sample.segments if s.source != "environment"):
            put[segment.version] += segment.token_count
            if unreported or segment.source == "data":
                ledger.report(prompt.uid, prompt.attempt, number, segment.version, segment.token_count)
    unknown = {version: count for version, count in put.items() if count > lease.tokens.get(version, 0)}
    if unknown:
        version, count = next(iter(unknown.items()))
        raise ValueError(
            f"uid {prompt.uid}: the experience holds {count} tokens of version {version}, and its lease sampled "
            f"{lease.tokens.get(version, 0)}; put the samples that rollout.sample(prompt) gave, or some of them"
        )
    ledger.discard(prompt.uid, prompt.attempt, {v: n - put[v] for v, n in lease.tokens.items() if n > put[v]})
