"""What the staleness ledger keeps: its rules, leases, batches, saved state and account. Values only, no decisions."""

from __future__ import annotations

from typing import Literal

import msgspec

from asyncrlhf.errors import ConfigError

__all__ = ("Account", "Batch", "Books", "Lease", "LedgerRules", "LedgerState", "Reason", "TokenAccount")

Reason = Literal["completed", "train_steps", "exhausted", "diverged", "no_signal"]
"""How a run ends: data used up | every train step done | too many filtered or failed in a row | too many void steps
in a row, some of them not finite | the same, none of them with an unmasked token."""


class LedgerRules(msgspec.Struct, frozen=True, kw_only=True):
    """The staleness contract's knobs. Raises ConfigError where two of them exclude each other.

    Example: LedgerRules(prompts_per_step=2, max_staleness=4, lookahead=1) keeps at most 2 * (1 + 1) = 4 leases live.
    """

    prompts_per_step: int
    """B: rollouts popped by one train step."""
    max_staleness: int
    """K: the hard bound on token lag (`mask`) or head lag (`wait`, `drop`), in versions; 0 is synchronous."""
    lookahead: int
    """D <= K: how many train steps admission runs ahead; 0 admits nothing between a pop and the next publish."""
    publish_every: int = 1
    """Train steps from one publish to the next, at most D + 1."""
    byte_limit: int | None = None
    """Bytes of ready rollouts at which leases beyond the first B wait; soft; None: no limit."""
    at_deadline: Literal["mask", "wait", "drop"] = "mask"
    """What gives when a rollout reaches the bound: its old tokens, the trainer's time, or unfinished rollouts."""
    order: Literal["ready", "admission"] = "ready"
    """Earliest deadline among the ready, or strictly in the order of admission (reproducible)."""
    answers_per_prompt: int = 1
    max_attempts: int = 3
    """Attempts a prompt may lose, restarts and fenced engines not counted, before its drop is final."""
    max_filtered: int | None = None
    """Filtered or failed leases in a row, without a ready one, that end the run; None: 20 B."""
    max_void_steps: int = 10
    """Void train steps in a row that end the run."""
    last: Literal["train", "drop"] = "train"
    """The fewer than B rollouts left when the data has ended: a short batch, or `dropped(end)`."""
    train_steps: int | None = None
    """Train steps of the run; nothing is admitted that none of them would take. None: until the data ends."""

    def __post_init__(self) -> None:
        least = {"prompts_per_step": 1, "max_staleness": 0, "lookahead": 0, "publish_every": 1, "byte_limit": 0}
        least |= {"answers_per_prompt": 1, "max_attempts": 1, "max_filtered": 1, "max_void_steps": 1, "train_steps": 0}
        for name, bound in least.items():
            value: int | None = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"{name} = {value} must be at least {bound}")
        staleness, lookahead = self.max_staleness, self.lookahead
        if lookahead > staleness:
            raise ConfigError(
                f"lookahead = {lookahead} is more than max_staleness = {staleness}; "
                f"lower lookahead to {staleness} or raise max_staleness to {2 * lookahead}"
            )
        if self.publish_every > lookahead + 1:
            raise ConfigError(
                f"publish.every = {self.publish_every} is more than lookahead + 1 = {lookahead + 1} and deadlocks; "
                f"lower publish.every to {lookahead + 1} or raise lookahead to {self.publish_every - 1}"
            )
        if self.order == "admission" and self.at_deadline != "mask":
            raise ConfigError(
                f'order = "admission" leaves at_deadline = "{self.at_deadline}" nothing to do: no rollout grows older '
                f"than lookahead = {lookahead}, within max_staleness = {staleness}; "
                'set at_deadline = "mask" or order = "ready"'
            )

    @property
    def filtered_limit(self) -> int:
        return 20 * self.prompts_per_step if self.max_filtered is None else self.max_filtered


class Lease(msgspec.Struct, kw_only=True, gc=False):
    """Permission to answer one prompt; only the ledger writes it.

    Example: Lease(uid=7, attempt=2, tries=1, index=12, granted=3, tokens={3: 40, 4: 25}, newest={0: 3, 1: 4}) is
    prompt 7 leased again after a restart, its answer 1 sampled by versions 3 and 4 so far.
    """

    uid: int
    """The prompt's ordinal in the data stream: epoch * rows + position."""
    attempt: int
    """1 for the prompt's first lease; a result that carries an older one is refused."""
    tries: int
    """1 + the attempts that the prompt itself has lost."""
    index: int
    """Place in the order of admission."""
    granted: int
    """Published version at the grant."""
    state: str = "running"
    """running | scoring | ready | training, then consumed | filtered | failed | dropped(reason)."""
    tokens: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    """Policy version -> model tokens it sampled, over all answers."""
    newest: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    """Answer -> version of its last reported token."""
    byte_count: int = 0
    """Bytes of the rollout, known once it is ready."""
    trainable: bool = True
    """False: keeps its place in the batch with every token masked (zero variance)."""

    def birth(self, rules: LedgerRules) -> int:
        """Version its head lag counts from. Until every answer has reported: the one published at the grant."""
        if len(self.newest) < rules.answers_per_prompt:
            return self.granted
        return min(self.tokens, default=self.granted)

    def deadline(self, rules: LedgerRules) -> int:
        """The last train step at which its oldest token is within the bound."""
        return self.birth(rules) + rules.max_staleness

    @property
    def last(self) -> int:
        """Version of its newest model token; the one published at the grant while it has none."""
        return max(self.tokens, default=self.granted)

    @property
    def token_count(self) -> int:
        """Model tokens reported so far."""
        return sum(self.tokens.values())

    def copy(self) -> Lease:
        return msgspec.structs.replace(self, tokens=dict(self.tokens), newest=dict(self.newest))


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one pop took. Example, with K = 1: Batch(step=4, leases=(...), trained={3: 60, 4: 12}, masked={2: 9})."""

    step: int
    """Train step t that consumes it."""
    leases: tuple[Lease, ...]
    """Whole rollouts in the order of the pop; fewer than B only once the data has ended."""
    trained: dict[int, int]
    """Version -> model tokens within the bound."""
    masked: dict[int, int]
    """Version -> model tokens over age, or of rollouts that are not trainable."""


class TokenAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Model tokens since the run began: generated = trained + masked + dropped + open, exactly."""

    generated: int
    trained: int
    masked: int
    dropped: int
    """Of leases that ended without training, and of results that came too late."""
    open: int
    """Of live leases and of the batch in training."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Where every prompt, lease and model token is.

    Example: counts={"admitted": 9, "waiting": 1, "running": 2, "scoring": 0, "ready": 1, "training": 0, "consumed": 4,
    "filtered": 0, "failed": 0, "dropped(void)": 1}: the first is the sum of the others.
    """

    tokens: TokenAccount
    counts: dict[str, int]
    """State -> prompts in it now; `waiting` were granted before and will be leased again."""
    granted_leases: int
    """Leases granted, repeated attempts included."""
    leased_again: dict[str, int]
    """Reason -> leases dropped for it whose prompt was, or will be, leased again."""


class Books(msgspec.Struct, kw_only=True):
    """Totals since the run began, along the restored lineage; only the ledger writes them."""

    granted_leases: int = 0
    generated: int = 0
    trained: int = 0
    masked: int = 0
    dropped: int = 0
    ended: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Terminal state -> prompts."""
    leased_again: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Reason -> leases."""

    def end(self, state: str) -> None:
        self.ended[state] = self.ended.get(state, 0) + 1

    def lease_again(self, reason: str) -> None:
        self.leased_again[reason] = self.leased_again.get(reason, 0) + 1

    def tokens(self) -> TokenAccount:
        spent = self.trained + self.masked + self.dropped
        return TokenAccount(
            generated=self.generated,
            trained=self.trained,
            masked=self.masked,
            dropped=self.dropped,
            open=self.generated - spent,
        )

    def copy(self) -> Books:
        return msgspec.structs.replace(self, ended=dict(self.ended), leased_again=dict(self.leased_again))


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger at a train-step boundary, as a checkpoint stores it; survives msgpack and JSON."""

    step: int
    data_count: int | None
    cursor: int
    index: int
    low_water: int
    settled: dict[int, str]
    again: dict[int, tuple[int, int]]
    leases: tuple[Lease, ...]
    books: Books
    filtered_row: int
    void_row: int
    void_not_finite: bool
