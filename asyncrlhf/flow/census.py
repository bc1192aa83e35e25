"""The live leases, with the counts that spare the ledger a scan: by state, by birth, by newest version. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

from asyncrlhf.flow.leases import Lease, LedgerRules

__all__ = ("Census",)

Key = TypeVar("Key", bound=Hashable)


class Census:
    """Live = running + scoring + ready. A change costs O(versions of the lease), a question O(distinct versions)."""

    def __init__(self, rules: LedgerRules) -> None:
        self.by_uid: dict[int, Lease] = {}
        """In the order of admission."""
        self.ready_bytes = 0
        self._rules = rules
        self._states: Counter[str] = Counter()
        self._births: Counter[int] = Counter()
        self._ready_births: Counter[int] = Counter()
        self._ready_lasts: Counter[int] = Counter()

    def count(self, state: str) -> int:
        return self._states[state]

    def enter(self, lease: Lease) -> None:
        self.by_uid[lease.uid] = lease
        self._states[lease.state] += 1
        self._births[lease.birth(self._rules)] += 1
        if lease.state == "ready":
            self._enter_ready(lease)

    def leave(self, lease: Lease) -> None:
        """The lease keeps its state; whoever takes it out gives it the next."""
        del self.by_uid[lease.uid]
        _take_one(self._states, lease.state)
        birth = lease.birth(self._rules)
        _take_one(self._births, birth)
        if lease.state == "ready":
            _take_one(self._ready_births, birth)
            _take_one(self._ready_lasts, lease.last)
            self.ready_bytes -= lease.byte_count

    def add_tokens(self, lease: Lease, answer: int, version: int, count: int) -> None:
        if answer in lease.newest and version in lease.tokens:  # nothing that its birth depends on
            lease.newest[answer] = version
            lease.tokens[version] += count
            return
        before = lease.birth(self._rules)
        lease.newest[answer] = version
        lease.tokens[version] = lease.tokens.get(version, 0) + count
        after = lease.birth(self._rules)
        if after != before:
            _take_one(self._births, before)
            self._births[after] += 1

    def remove_tokens(self, lease: Lease, tokens: Mapping[int, int]) -> None:
        before = lease.birth(self._rules)
        for version, count in tokens.items():
            lease.tokens[version] -= count
            if not lease.tokens[version]:
                del lease.tokens[version]
        after = lease.birth(self._rules)
        if after != before:
            _take_one(self._births, before)
            self._births[after] += 1

    def move(self, lease: Lease, state: str) -> None:
        """To running, scoring or ready; a ready lease has its byte count already."""
        _take_one(self._states, lease.state)
        lease.state = state
        self._states[state] += 1
        if state == "ready":
            self._enter_ready(lease)

    def ready(self) -> list[Lease]:
        return [lease for lease in self.by_uid.values() if lease.state == "ready"]

    def unfinished(self) -> list[Lease]:
        return [lease for lease in self.by_uid.values() if lease.state != "ready"]

    def ready_older_than(self, version: int) -> list[Lease]:
        """Ready leases without a token of `version` or newer."""
        if all(last >= version for last in self._ready_lasts):
            return []
        return [lease for lease in self.ready() if lease.last < version]

    def births_left_by(self, places: int) -> Counter[int]:
        """Birth -> live leases, less the `places` ready ones with the earliest deadlines."""
        rest = Counter(self._births)
        for birth in sorted(self._ready_births):
            taken = min(places, self._ready_births[birth])
            rest[birth] -= taken
            places -= taken
        return rest

    def check(self) -> None:
        """Assert that every count matches what it counts. O(live)."""
        live, ready = self.by_uid.values(), self.ready()
        assert [x.index for x in live] == sorted(x.index for x in live)
        assert self._states == Counter(x.state for x in live)
        assert self._births == Counter(x.birth(self._rules) for x in live)
        assert self._ready_births == Counter(x.birth(self._rules) for x in ready)
        assert self._ready_lasts == Counter(x.last for x in ready)
        assert self.ready_bytes == sum(x.byte_count for x in ready)

    def _enter_ready(self, lease: Lease) -> None:
        self._ready_births[lease.birth(self._rules)] += 1
        self._ready_lasts[lease.last] += 1
        self.ready_bytes += lease.byte_count


def _take_one(counter: Counter[Key], key: Key) -> None:
    """One less, and no zero left behind: the counters are scanned, and must not grow with the run."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
