"""The sampler of the torch backend: continuous batching over any Hugging Face decoder with full attention.

Requests wait in a queue until a slot is free. A step samples one token for every running request: those that run
already by a decode, those that get a slot by the prefill of their whole sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncrlhf.abc import GenerateEngine
from asyncrlhf.backends.requests import already_complete, why_not
from asyncrlhf.backends.torch.attention import SlotCache
from asyncrlhf.backends.torch.away import give_back
from asyncrlhf.backends.torch.engine import TorchEngine
from asyncrlhf.backends.torch.layout import Integers
from asyncrlhf.backends.torch.model import Model
from asyncrlhf.backends.torch.options import SamplerOptions
from asyncrlhf.backends.torch.probe import require_cache_works
from asyncrlhf.backends.torch.replica import Replica
from asyncrlhf.backends.torch.sampling import choose, uniforms
from asyncrlhf.backends.torch.slots import Slots
from asyncrlhf.messages import EngineEvent, GenerateRequest, Rejected, WeightHandle

__all__ = ("SamplerOptions", "TorchSampler")


class TorchSampler(TorchEngine, GenerateEngine):
    """Samples from a Hugging Face causal language model on one device."""

    Options = SamplerOptions

    def __init__(self, options: SamplerOptions) -> None:
        self.options = options
        self.version = options.version
        self._model = Model(options.model, dtype=options.dtype, device=options.device)
        require_cache_works(self._model)
        self._device = self._model.device
        positions = getattr(self._model.module.config.get_text_config(), "max_position_embeddings", None)
        self._max_tokens = min(options.max_sequence_tokens, positions or options.max_sequence_tokens)
        self._replica = Replica(self._model, options.transport)
        self._slots = Slots(options.slots, self._max_tokens)
        self._cache = SlotCache(options.slots, self._max_tokens)
        self._places = torch.arange(self._max_tokens, device=self._device)
        self._rows = torch.arange(options.slots, device=self._device)
        self._waiting: deque[GenerateRequest] = deque()
        self._known: set[str] = set()
        self._unsent: list[EngineEvent] = []
        self._cache_is_old = False
        """Weights were swapped and the cache was not rebuilt yet: that is the next step's work, not the publisher's."""

    @property
    def has_work(self) -> bool:
        return not self.asleep and bool(self._slots.count or self._waiting or self._unsent)

    def add(self, requests: Sequence[GenerateRequest]) -> Sequence[EngineEvent]:
        events: list[EngineEvent] = []
        for request in requests:
            if reason := self._why_not(request):
                events.append(Rejected(request_id=request.request_id, reason=reason))
            elif finished := already_complete(request):
                events.append(finished)
            else:
                self._known.add(request.request_id)
                self._waiting.append(request)
        return events

    @torch.inference_mode()
    def step(self) -> Sequence[EngineEvent]:
        if self.asleep:
            return []
        events, self._unsent = self._unsent, []
        if count := self._slots.count:
            if self._cache_is_old:
                self._rebuild(count)
            else:
                self._decode()
            self._finish(events)
        if self._waiting and self._slots.free:
            taken = self._admit()
            for slot in range(taken.start, taken.stop):
                if (progress := self._slots.report(slot, self.version)) is not None:
                    events.append(progress)
            self._finish(events)
        return events

    @torch.inference_mode()
    def abort(self, request_ids: Sequence[str]) -> Sequence[GenerateRequest]:
        wanted = self._known.intersection(request_ids)
        given_back = [request for request in self._waiting if request.request_id in wanted]
        self._waiting = deque(request for request in self._waiting if request.request_id not in wanted)
        running = self._slots.requests[: self._slots.count]
        slots = [i for i, request in enumerate(running) if request is not None and request.request_id in wanted]
        for slot in slots:
            if (progress := self._slots.report(slot, self.version)) is not None:
                self._unsent.append(progress)
            given_back.append(self._slots.interrupt(slot, self.version))
        self._release(np.asarray(slots, dtype=np.int64))
        self._known -= wanted
        return given_back

    def prepare(self, weights: WeightHandle) -> None:
        self._require("prepare", asleep=False)
        self._replica.prepare(weights)

    def commit(self, version: int, kv: str) -> Sequence[EngineEvent]:
        """Take over the prepared weights. Raises ValueError if `version` was not the last one prepared, or for an
        unknown `kv`."""
        self._require("commit", asleep=False)
        if kv not in ("rebuild", "keep"):
            raise ValueError(f"kv = {kv!r}; use 'rebuild' or 'keep'")
        moved = self._replica.commit(version)
        events: list[EngineEvent] = []
        for slot in range(self._slots.count):
            if (progress := self._slots.report(slot, self.version)) is not None:
                events.append(progress)
            self._slots.close_run(slot, self.version)
        self.version = version
        if moved and self._slots.count:
            if kv == "rebuild":
                self._cache_is_old = True
            elif not self._cache_is_old:
                self._slots.kv_mixed[: self._slots.count] = True
        return events

    @torch.inference_mode()
    def probe(self, token_ids: Sequence[int]) -> Sequence[float]:
        self._require("probe", asleep=False)
        return self._model.probe(token_ids)

    def sleep(self) -> Sequence[EngineEvent]:
        if self.asleep:
            return []
        events, self._unsent = self._unsent, []
        running = range(self._slots.count)
        events += filter(None, [self._slots.report(slot, self.version) for slot in running])
        self._waiting.extendleft(reversed([self._slots.interrupt(slot, self.version) for slot in running]))
        self._slots.release(np.arange(self._slots.count))
        self._cache_is_old, self.asleep = False, True
        self._replica.release()
        self._cache.release()
        give_back()
        return events

    def wake(self, weights: WeightHandle) -> None:
        self._require("wake", asleep=True)
        self._replica.refill(weights)
        self.version, self.asleep = weights.version, False

    def _why_not(self, request: GenerateRequest) -> str:
        """Why a request cannot be answered; empty if it can."""
        if request.request_id in self._known:
            return f"request {request.request_id!r} is running already"
        return why_not(
            request, version=self.version, longest=self._max_tokens, vocabulary_size=self._model.vocabulary_size
        )

    def _decode(self) -> None:
        count = self._slots.count
        positions = torch.from_numpy(self._slots.positions).to(self._device)
        extent = int(self._slots.positions.max()) + 1
        self._cache.begin_decode(self._rows[:count], positions, extent)
        hidden = self._places.new_zeros((), dtype=self._model.module.dtype)
        mask = torch.where(self._places[:extent] <= positions[:, None], hidden, -torch.inf)[:, None, None]
        logits = self._model.forward(
            torch.from_numpy(self._slots.last_token[:count, None]).to(self._device),
            self._rows[:count],
            position_ids=positions[:, None],
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._sample(slice(0, count), logits)

    def _admit(self) -> slice:
        """Give free slots to waiting requests and sample their next token."""
        count = min(self._slots.free, len(self._waiting))
        requests = [self._waiting.popleft() for _ in range(count)]
        taken = self._slots.take(requests)
        sequences = [np.asarray(r.prompt_token_ids + r.tokens, dtype=np.int64) for r in requests]
        self._sample(taken, self._prefill(np.arange(taken.start, taken.stop), sequences))
        return taken

    def _prefill(self, slots: Integers, sequences: list[Integers]) -> Tensor:
        """Write the KV cache of whole sequences; gives the logits [N, V] behind the last token of each.

        Equal sequences (the answers to one prompt) are computed once, those of similar length together.
        """
        keys = [sequence.tobytes() for sequence in sequences]
        unique = sorted(dict.fromkeys(keys), key=len)
        ranks = {key: rank for rank, key in enumerate(unique)}
        source = np.asarray([ranks[key] for key in keys])
        lengths = [len(key) // np.dtype(np.int64).itemsize for key in unique]
        found: list[Tensor] = []
        start = 0
        for end in range(1, len(unique) + 1):
            if end == len(unique) or lengths[end] * (end + 1 - start) > self.options.prefill_tokens:
                part = [np.frombuffer(key, dtype=np.int64) for key in unique[start:end]]
                chosen = (source >= start) & (source < end)
                found.append(self._prefill_part(slots[chosen], source[chosen] - start, part))
                start = end
        logits = found[0] if len(found) == 1 else torch.cat(found)
        return logits[torch.from_numpy(source).to(self._device)]

    def _prefill_part(self, slots: Integers, source: Integers, sequences: list[Integers]) -> Tensor:
        """One forward over `sequences`, shortest first; `source[i]` of them goes into slot `slots[i]`."""
        lengths = np.asarray([len(sequence) for sequence in sequences])
        width = int(lengths[-1])
        ids = np.zeros((len(sequences), width), dtype=np.int64)
        ids[np.arange(width) < lengths[:, None]] = np.concatenate(sequences)
        self._cache.begin_prefill(
            torch.from_numpy(slots).to(self._device), torch.from_numpy(source).to(self._device), width
        )
        return self._model.forward(
            torch.from_numpy(ids).to(self._device),
            torch.from_numpy(np.arange(len(sequences)) * width + lengths - 1).to(self._device),
            position_ids=self._places[None, :width],
            past_key_values=self._cache,
            use_cache=True,
        )

    @torch.inference_mode()
    def _rebuild(self, count: int) -> None:
        """In place of a decode: compute the KV cache of all running requests anew, under the weights in use."""
        sequences = [self._slots.sequence(slot) for slot in range(count)]
        self._sample(slice(0, count), self._prefill(np.arange(count), sequences))
        self._cache_is_old = False

    def _sample(self, taken: slice, logits: Tensor) -> None:
        numbers = uniforms(self._slots.key[taken], self._slots.length[taken])
        tokens, logprobs = choose(logits, self._slots.temperature[taken], numbers)
        self._slots.append(taken, tokens.cpu().numpy(), logprobs.cpu().numpy())

    def _finish(self, events: list[EngineEvent]) -> None:
        slots = self._slots.finished()
        for slot in slots.tolist():
            if (progress := self._slots.report(slot, self.version)) is not None:
                events.append(progress)
            finished = self._slots.finish(slot, self.version)
            self._known.discard(finished.request_id)
            events.append(finished)
        self._release(slots)

    def _release(self, slots: Integers) -> None:
        if not len(slots):
            return
        source, target = self._slots.release(slots)
        if len(source):
            extent = int(self._slots.positions.max()) + 1
            self._cache.move(
                torch.from_numpy(source).to(self._device), torch.from_numpy(target).to(self._device), extent
            )
