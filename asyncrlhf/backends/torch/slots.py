"""The running requests of a sampler: flat arrays indexed by slot, of which the first `count` are always in use."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrlhf.backends.torch.layout import Integers
from asyncrlhf.backends.torch.sampling import stream_key
from asyncrlhf.messages import Finished, GenerateRequest, Progress, Sample, Segment

__all__ = ("Slots",)


class Slots:
    """Bookkeeping on the host; the KV cache mirrors it slot by slot."""

    def __init__(self, slots: int, max_tokens: int) -> None:
        self.capacity, self.count = slots, 0
        self.requests: list[GenerateRequest | None] = [None] * slots
        self.segments: list[list[Segment]] = [[] for _ in range(slots)]
        """Closed runs of tokens, by slot; the open run starts at `run_start`."""
        self.tokens = np.zeros((slots, max_tokens), dtype=np.int64)
        """The answer so far."""
        self.logprobs = np.zeros((slots, max_tokens), dtype=np.float32)
        self.length = np.zeros(slots, dtype=np.int64)
        """Tokens of the answer so far."""
        self.prompt_length = np.zeros(slots, dtype=np.int64)
        self.last_token = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)
        self.key = np.zeros(slots, dtype=np.uint64)
        self.temperature = np.zeros(slots, dtype=np.float32)
        self.stops = np.full((slots, 1), -1, dtype=np.int64)
        """Stop tokens, filled up with -1."""
        self.run_start = np.zeros(slots, dtype=np.int64)
        self.reported = np.zeros(slots, dtype=np.int64)
        """Tokens of the answer that were reported, here or by the engine that had the request before."""
        self.kv_mixed = np.zeros(slots, dtype=np.bool_)

    @property
    def free(self) -> int:
        return self.capacity - self.count

    @property
    def positions(self) -> Integers:
        """[count] where the last token of each request stands in its sequence."""
        return self.prompt_length[: self.count] + self.length[: self.count] - 1

    def take(self, requests: Sequence[GenerateRequest]) -> slice:
        """Put `requests` behind the running ones; gives their slots."""
        taken = slice(self.count, self.count + len(requests))
        stop_count = max(len(request.stop_token_ids) for request in requests)
        if stop_count > self.stops.shape[1]:
            more = np.full((self.capacity, stop_count - self.stops.shape[1]), -1, dtype=np.int64)
            self.stops = np.concatenate([self.stops, more], axis=1)
        for slot, request in enumerate(requests, self.count):
            done = len(request.tokens)
            self.requests[slot] = request
            self.segments[slot] = list(request.segments)
            if done:
                self.tokens[slot, :done] = request.tokens
                self.logprobs[slot, :done] = request.logprobs
            self.stops[slot] = -1
            self.stops[slot, : len(request.stop_token_ids)] = request.stop_token_ids
        self.length[taken] = self.run_start[taken] = self.reported[taken] = [len(r.tokens) for r in requests]
        self.prompt_length[taken] = [len(r.prompt_token_ids) for r in requests]
        self.limit[taken] = [r.max_tokens for r in requests]
        self.key[taken] = [stream_key(r.seed) for r in requests]
        self.temperature[taken] = [r.temperature for r in requests]
        self.kv_mixed[taken] = False
        self.count = taken.stop
        return taken

    def append(self, taken: slice, tokens: Integers, logprobs: NDArray[np.float32]) -> None:
        """One more token for each of the slots `taken`."""
        rows = np.arange(taken.start, taken.stop)
        self.tokens[rows, self.length[taken]] = tokens
        self.logprobs[rows, self.length[taken]] = logprobs
        self.last_token[taken] = tokens
        self.length[taken] += 1

    def finished(self) -> Integers:
        """Slots whose last token ends the answer, ascending."""
        used = slice(0, self.count)
        stopped = (self.stops[used] == self.last_token[used, None]).any(1)
        return np.flatnonzero(stopped | (self.length[used] >= self.limit[used]))

    def report(self, slot: int, version: int) -> Progress | None:
        """The tokens of a slot that were not reported yet, all of them sampled by `version`."""
        count = int(self.length[slot] - self.reported[slot])
        if not count:
            return None
        self.reported[slot] = self.length[slot]
        return Progress(request_id=self._request(slot).request_id, version=version, token_count=count)

    def close_run(self, slot: int, version: int) -> None:
        """End the open run of tokens: all of them were sampled by `version`."""
        count = int(self.length[slot] - self.run_start[slot])
        if not count:
            return
        run = Segment(version=version, token_count=count, kv_mixed=bool(self.kv_mixed[slot]))
        segments = self.segments[slot]
        if segments and msgspec.structs.replace(segments[-1], token_count=count) == run:
            run = msgspec.structs.replace(run, token_count=count + segments.pop().token_count)
        segments.append(run)
        self.run_start[slot] = self.length[slot]

    def finish(self, slot: int, version: int) -> Finished:
        """The complete answer in a slot."""
        self.close_run(slot, version)
        request, length = self._request(slot), int(self.length[slot])
        stopped = int(self.last_token[slot]) in request.stop_token_ids
        sample = Sample(
            token_ids=tuple(self.tokens[slot, :length].tolist()),
            logprobs=tuple(self.logprobs[slot, :length].tolist()),
            segments=tuple(self.segments[slot]),
            finish_reason="stop" if stopped else "length",
        )
        return Finished(request_id=request.request_id, sample=sample)

    def interrupt(self, slot: int, version: int) -> GenerateRequest:
        """The request in a slot with its tokens so far, to be continued elsewhere."""
        self.close_run(slot, version)
        length = int(self.length[slot])
        return msgspec.structs.replace(
            self._request(slot),
            tokens=tuple(self.tokens[slot, :length].tolist()),
            logprobs=tuple(self.logprobs[slot, :length].tolist()),
            segments=tuple(self.segments[slot]),
        )

    def sequence(self, slot: int) -> Integers:
        """Prompt and answer so far."""
        prompt = np.asarray(self._request(slot).prompt_token_ids, dtype=np.int64)
        return np.concatenate([prompt, self.tokens[slot, : self.length[slot]]])

    def release(self, slots: Integers) -> tuple[Integers, Integers]:
        """Free `slots` (ascending); the last requests move into the holes. Gives (from, to) slots of the moves."""
        left = self.count - len(slots)
        holes = slots[slots < left]
        tail = np.ones(self.count - left, dtype=np.bool_)
        tail[slots[slots >= left] - left] = False
        movers = np.flatnonzero(tail) + left
        for source, target in zip(movers.tolist(), holes.tolist(), strict=True):
            self.requests[target], self.segments[target] = self.requests[source], self.segments[source]
        for array in (
            self.tokens, self.logprobs, self.length, self.prompt_length, self.last_token, self.limit, self.key,
            self.temperature, self.stops, self.run_start, self.reported, self.kv_mixed,
        ):  # fmt: skip
            array[holes] = array[movers]
        for slot in range(left, self.count):
            self.requests[slot], self.segments[slot] = None, []
        self.count = left
        return movers, holes

    def _request(self, slot: int) -> GenerateRequest:
        request = self.requests[slot]
        assert request is not None
        return request
