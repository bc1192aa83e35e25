"""Reference model of the staleness ledger: a pure value machine, no clock, no asyncio.

`Ledger` decides who may generate and what may be trained; membership.py decides the published version.
`Rules` names each place where the model reads the page in an amended way; `Rules.page()` is the literal text.
A prompt key is its ordinal in the data stream (epoch * len(dataset) + position), so keys are ordered by age.
"""

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rules:
    """Amendments to the literal page; every one has a witness in the model's own tests."""

    birth_waits_for_all_answers: bool = True  # page: min over the tokens reported so far
    cancel_scoring_too: bool = True  # page: only running leases are cancelled
    expired_means_over_age: bool = True  # page: "without a trainable token" (also catches zero variance)

    @classmethod
    def page(cls):
        return cls(False, False, False)


@dataclass(frozen=True)
class Config:
    """Keys of the page. Example: Config(B=2, K=4, D=1) keeps at most 4 leases live."""

    B: int
    K: int
    D: int
    every: int = 1
    byte_limit: float = float("inf")
    at_deadline: str = "mask"
    order: str = "ready"
    answers: int = 1
    max_attempts: int = 3
    max_filtered: int | None = None
    max_void_steps: int = 10
    last: str = "train"
    rules: Rules = Rules()

    def __post_init__(self):
        if not 0 <= self.D <= self.K:
            raise ValueError(f"lookahead = {self.D} must lie in 0..max_staleness = {self.K}")
        if not 1 <= self.every <= self.D + 1:
            raise ValueError(f"publish.every = {self.every} must be at most lookahead + 1 = {self.D + 1}")


@dataclass
class Lease:
    """Permission to answer one prompt. `tokens` maps policy version -> model tokens sampled by it."""

    key: int
    attempt: int
    tries: int
    index: int
    granted: int
    state: str = "running"
    tokens: Counter = field(default_factory=Counter)
    newest: dict = field(default_factory=dict)  # answer -> version of its last token
    size: int = 0
    zero_variance: bool = False

    def birth(self, config):
        """Version the head lag counts from; never falls while the lease is live (amended rule)."""
        if not self.tokens or (config.rules.birth_waits_for_all_answers and len(self.newest) < config.answers):
            return self.granted
        return min(self.tokens)


@dataclass(frozen=True)
class Batch:
    """One pop: `trained` and `masked` are model-token counts per version."""

    step: int
    leases: tuple
    trained: Counter
    masked: Counter


class Ledger:
    """Admission, settlement, the pop, void steps, end of data and resume. Every method is one transaction."""

    def __init__(self, config, data=None):
        self.config, self.data = config, data
        self.step = 0  # n: the next train step to pop
        self.published = None  # P: undefined until the first commit
        self.live = {}  # key -> Lease, running | scoring | ready
        self.training = None  # Batch popped and not yet applied or void
        self.again = {}  # key -> (attempt, tries): prompts waiting for a new lease
        self.cursor = self.index = 0  # next fresh key, next admission index
        self.done = {}  # key -> terminal state, above the low-water mark only
        self.low_water = 0  # every key below it is terminal
        self.ready_bytes = self.filtered_row = self.void_row = 0
        self.count, self.tokens = Counter(), Counter()
        self.reason = None  # how the run ends: completed | exhausted | diverged

    # ---- admission -------------------------------------------------------------------------------------------
    def room(self):
        """B (P + D - n + 1): how many leases may be live."""
        return self.config.B * (self.published + self.config.D - self.step + 1)

    def admits(self):
        c = self.config
        return (
            self.reason is None
            and self.published is not None
            and len(self.live) + 1 <= self.room()
            and (len(self.live) < c.B or self.ready_bytes < c.byte_limit)
        )

    def data_left(self):
        return bool(self.again) or self.data is None or self.cursor < self.data

    def grant(self):
        """A lease for the oldest prompt waiting for one, else for the next prompt, else None."""
        if not self.admits() or not self.data_left():
            return None
        if self.again:
            key = min(self.again)
            attempt, tries = self.again.pop(key)
        else:
            key, attempt, tries = self.cursor, 1, 1
            self.cursor += 1
        lease = self.live[key] = Lease(key, attempt, tries, self.index, self.published)
        self.index += 1
        self.count["admitted"] += 1
        return lease

    # ---- a lease's life (False: refused, the attempt is old or the lease has settled) ------------------------
    def find(self, key, attempt, *states):
        lease = self.live.get(key)
        return lease if lease and lease.attempt == attempt and lease.state in states else None

    def report(self, key, attempt, answer, version, count):
        """`count` model tokens of one answer were sampled by `version`."""
        lease = self.find(key, attempt, "running")
        if not lease:
            return False
        if version < lease.newest.get(answer, lease.granted):
            raise AssertionError("w_i fell within a sample, or below the version published at the grant")
        lease.newest[answer] = version
        lease.tokens[version] += count
        self.tokens["generated"] += count
        return True

    def score(self, key, attempt):
        """Generation is over, rewards are pending."""
        lease = self.find(key, attempt, "running")
        if lease:
            lease.state = "scoring"
        return bool(lease)

    def ready(self, key, attempt, size=1, zero_variance=False):
        """The one put of a lease."""
        lease = self.find(key, attempt, "running", "scoring")
        if lease:
            lease.state, lease.size, lease.zero_variance = "ready", size, zero_variance
            self.ready_bytes += size
            self.filtered_row = 0
        return bool(lease)

    def settle(self, key, attempt, state):
        """`filtered` or `failed`: terminal for the prompt."""
        lease = self.find(key, attempt, "running", "scoring")
        if lease:
            self._end(lease, state)
            self.filtered_row += 1
            limit = 20 * self.config.B if self.config.max_filtered is None else self.config.max_filtered
            if self.filtered_row >= limit:
                self.reason = "exhausted"
        return bool(lease)

    def drop(self, key, attempt, reason, again=True, counts=False):
        """dropped(reason). `again`: lease the prompt again; `counts`: only while tries <= max_attempts."""
        lease = self.find(key, attempt, "running", "scoring", "ready")
        if lease:
            tries = lease.tries + counts
            retry = again and tries <= self.config.max_attempts
            self._end(lease, f"dropped({reason})", terminal=not retry)
            if retry:
                self.again[key] = (attempt + 1, tries)
        return bool(lease)

    def _end(self, lease, state, terminal=True):
        if self.live.pop(lease.key, None) and lease.state == "ready":
            self.ready_bytes -= lease.size
        lease.state = state
        self.count[state] += 1
        if state != "consumed":
            self.tokens["dropped"] += lease.tokens.total()
        if terminal:
            self.done[lease.key] = state
            while self.low_water in self.done:
                del self.done[self.low_water]
                self.low_water += 1

    # ---- the pop -----------------------------------------------------------------------------------------------
    def deadline(self, lease):
        return lease.birth(self.config) + self.config.K

    def feasible(self, leases):
        """Can steps n+1, n+2, ... consume `leases`, B a step, each by its deadline?"""
        due = sorted(self.deadline(lease) for lease in leases)
        return all(j <= self.config.B * (d - self.step) for j, d in enumerate(due, 1))

    def pop(self, timed_out=False):
        """The batch of step n, or None while the trainer has to wait. `timed_out`: wait_timeout has passed."""
        c, t = self.config, self.step
        assert self.training is None
        if c.at_deadline == "mask":
            for lease in [x for x in self.live.values() if x.state == "ready" and self._expired(x)]:
                self.drop(lease.key, lease.attempt, "expired", counts=True)
        ready = [x for x in self.live.values() if x.state == "ready"]
        closing = not self.data_left() and len(ready) == len(self.live)
        if c.order == "ready":
            chosen = sorted(ready, key=lambda x: (self.deadline(x), x.index))[: c.B]
        else:
            chosen = sorted(self.live.values(), key=lambda x: x.index)[: c.B]
        if len(chosen) < c.B and closing:
            if chosen and c.last == "drop":
                for lease in chosen:
                    self.drop(lease.key, lease.attempt, "end", again=False)
                chosen = []
            if not chosen:
                self.reason = self.reason or "completed"
                return None
        elif len(chosen) < c.B or any(x.state != "ready" for x in chosen):
            return None
        rest = [x for x in self.live.values() if x not in chosen]
        if c.at_deadline != "mask" and not self.feasible(rest):
            if c.at_deadline == "wait" and not timed_out:
                return None
            states = ("running", "scoring") if c.rules.cancel_scoring_too else ("running",)
            for lease in sorted((x for x in rest if x.state in states), key=lambda x: (self.deadline(x), x.index)):
                self.drop(lease.key, lease.attempt, "late", counts=True)
                rest.remove(lease)
                if self.feasible(rest):
                    break
            else:
                return None
        trained, masked = Counter(), Counter()
        for lease in chosen:
            del self.live[lease.key]
            self.ready_bytes -= lease.size
            lease.state = "training"
            for version, count in lease.tokens.items():
                (masked if t - version > c.K or lease.zero_variance else trained)[version] += count
        self.training = Batch(t, tuple(chosen), trained, masked)
        self.step = t + 1
        return self.training

    def _expired(self, lease):
        if lease.zero_variance and not self.config.rules.expired_means_over_age:
            return True
        return self.step - max(lease.tokens) > self.config.K

    def applied(self):
        """The step changed some trained model: V = n."""
        for lease in self.training.leases:
            self._end(lease, "consumed")
        self.tokens["trained"] += self.training.trained.total()
        self.tokens["masked"] += self.training.masked.total()
        self.training, self.void_row = None, 0

    def void(self):
        """No optimizer step was applied: n returns to t, the rollouts settle dropped(void)."""
        for lease in self.training.leases:
            self._end(lease, "dropped(void)")
        self.step, self.training = self.training.step, None
        self.void_row += 1
        if self.void_row >= self.config.max_void_steps:
            self.reason = "diverged"

    def due(self):
        """Do the weights move after the step that just closed? V = n at a step boundary."""
        return self.step % self.config.every == 0

    # ---- resume ------------------------------------------------------------------------------------------------
    def snapshot(self):
        """State at a train-step boundary (no batch in training)."""
        assert self.training is None
        return deepcopy(self)

    @classmethod
    def restore(cls, snapshot, payloads):
        """Continue from `snapshot`; `payloads`: ready rollouts were saved. P is undefined until the first commit."""
        ledger = deepcopy(snapshot)
        for lease in list(ledger.live.values()):
            newest = max(lease.tokens, default=lease.granted)
            head = newest if ledger.config.at_deadline == "mask" else lease.birth(ledger.config)
            if not (payloads and lease.state == "ready" and ledger.step - head <= ledger.config.K):
                ledger.drop(lease.key, lease.attempt, "restart")  # does not count towards max_attempts
        ledger.published = None
        return ledger

    # ---- invariants 1, 3, 10 -----------------------------------------------------------------------------------
    def check(self):
        c, training = self.config, self.training.leases if self.training else ()
        ended = sum(n for state, n in self.count.items() if state != "admitted")
        assert self.count["admitted"] == len(self.live) + len(training) + ended
        opened = sum(x.tokens.total() for x in (*self.live.values(), *training))
        assert self.tokens["generated"] == sum(self.tokens[k] for k in ("trained", "masked", "dropped")) + opened
        assert self.ready_bytes == sum(x.size for x in self.live.values() if x.state == "ready")
        assert len(self.live) <= c.B * (c.D + 1)
        if self.published is not None:
            assert self.published <= self.step
            assert len(self.live) <= self.room()
