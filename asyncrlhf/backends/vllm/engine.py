"""The sampler of the vLLM backend: vLLM's engine core, stepped by the runtime's loop in the engine's own process.

Requests wait here until one of `slots` places is free, so that an answer which has not begun is given back as it came.
Then they are vLLM's: it admits, batches, preempts and caches prefixes as it sees fit, between two calls of `step`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import torch

from asyncrlhf.abc import GenerateEngine, WeightTransfer
from asyncrlhf.backends.requests import already_complete, why_not
from asyncrlhf.backends.vllm.answers import Answer
from asyncrlhf.backends.vllm.core import Core, SamplingParams
from asyncrlhf.backends.vllm.options import VllmOptions
from asyncrlhf.errors import GroupError, PublishRefused
from asyncrlhf.messages import EngineEvent, GenerateRequest, Rejected, WeightHandle, import_object
from asyncrlhf.weights.collective import is_shared_here
from asyncrlhf.weights.pull import Receipt, require_whole
from asyncrlhf.weights.shared import SharedMemoryTransfer

__all__ = ("VllmOptions", "VllmSampler")

RELAY = "asyncrlhf.weights.shared:SharedMemoryTransfer"


class VllmSampler(GenerateEngine):
    """Samples from a Hugging Face causal language model through vLLM."""

    Options = VllmOptions

    def __init__(self, options: VllmOptions) -> None:
        self.options = options
        self.version = -1
        self._core = Core(options)
        self._waiting: deque[GenerateRequest] = deque()
        self._running: dict[str, Answer] = {}
        """By vLLM's id."""
        self._ids: dict[str, str] = {}
        """Request id -> vLLM's id; "" while it waits here."""
        self._unsent: list[EngineEvent] = []
        self._prepared: WeightHandle | None = None
        self._checksum: int | None = None
        self.bytes_read: tuple[int, ...] = ()
        """Of the weights that came last, by each worker; empty where they are loaded whole."""
        self.bytes_own: tuple[int, ...] = ()
        """Part of `bytes_read` that comes from the rank on whose device the worker is."""
        self._relay = SharedMemoryTransfer()
        self._transports: dict[str, WeightTransfer] = {}
        self._salt = ""
        """Of cached prefixes: changes with the weights, and only then."""

    @classmethod
    def use_threads(cls, count: int) -> None:
        torch.set_num_threads(count)

    @property
    def has_work(self) -> bool:
        return not self.asleep and bool(self._running or self._waiting or self._unsent)

    def add(self, requests: Sequence[GenerateRequest]) -> Sequence[EngineEvent]:
        events: list[EngineEvent] = []
        for request in requests:
            if reason := self._why_not(request):
                events.append(Rejected(request_id=request.request_id, reason=reason))
            elif finished := already_complete(request):
                events.append(finished)
            else:
                self._ids[request.request_id] = ""
                self._waiting.append(request)
        return events

    def step(self) -> Sequence[EngineEvent]:
        if self.asleep:
            return []
        self._admit()
        self._advance()
        events, self._unsent = self._unsent, []
        return events

    def abort(self, request_ids: Sequence[str]) -> Sequence[GenerateRequest]:
        wanted = self._ids.keys() & set(request_ids)
        given_back = [request for request in self._waiting if request.request_id in wanted]
        self._waiting = deque(request for request in self._waiting if request.request_id not in wanted)
        running = [own for name in wanted if (own := self._ids[name])]
        self._core.abort(running)
        for own in running:
            answer = self._running.pop(own)
            if (progress := answer.report(self.version)) is not None:
                self._unsent.append(progress)
            given_back.append(answer.interrupt(self.version))
        for name in wanted:
            del self._ids[name]
        return given_back

    def prepare(self, weights: WeightHandle) -> None:
        self._require("prepare", asleep=False)
        self._prepared = None
        if weights.checksum != self._checksum:
            self._bring("asyncrlhf_prepare", weights)
        self._prepared = weights

    def commit(self, version: int, kv: str) -> Sequence[EngineEvent]:
        """Take over the prepared weights. Raises ValueError if `version` was not the last one prepared, or for an
        unknown `kv`."""
        self._require("commit", asleep=False)
        if kv not in ("rebuild", "keep"):
            raise ValueError(f"kv = {kv!r}; use 'rebuild' or 'keep'")
        prepared = self._prepared
        if prepared is None or prepared.version != version:
            raise ValueError(
                f"commit({version}) without prepare({version}); prepared is {prepared and prepared.version}"
            )
        self._prepared = None
        events: list[EngineEvent] = []
        for answer in self._running.values():
            if (progress := answer.report(self.version)) is not None:
                events.append(progress)
            answer.close_run(self.version)
        self.version = version
        if prepared.checksum != self._checksum:
            self._core.on_workers("asyncrlhf_commit")
            self._checksum, self._salt = prepared.checksum, str(version)
            if kv == "rebuild":
                self._core.forget_cache()
            for answer in self._running.values():
                answer.kv_mixed = kv == "keep"
        return events

    def probe(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Answers that run meanwhile go on: what they gain is said by the next `step`. None is waited for: where they
        leave the probe no room they are interrupted, and computed anew behind it."""
        self._require("probe", asleep=False)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True, detokenize=False)
        own = self._core.add(token_ids, params, self._salt, first=True)
        while (found := self._advance(own)) is None:
            if self._core.is_waiting(own):
                self._core.forget_cache()
        return found

    def sleep(self) -> Sequence[EngineEvent]:
        if self.asleep:
            return []
        if not self.options.sleeps:
            raise GroupError(
                f"the engine of model = {self.options.model!r} was asked to sleep, and was built with sleeps = False; "
                "build it with sleeps = True, as those of groups that take turns are"
            )
        events, self._unsent = self._unsent, []
        answers = list(self._running.values())
        events += filter(None, [answer.report(self.version) for answer in answers])
        self._core.abort(self._running)
        self._waiting.extendleft(reversed([answer.interrupt(self.version) for answer in answers]))
        self._ids.update((answer.request.request_id, "") for answer in answers)
        self._running.clear()
        self._core.forget_cache()
        self._core.on_workers("asyncrlhf_sleep")
        self._prepared, self._checksum, self.asleep = None, None, True
        return events

    def wake(self, weights: WeightHandle) -> None:
        self._require("wake", asleep=True)
        try:
            self._bring("asyncrlhf_wake", weights)
            self._core.on_workers("asyncrlhf_wake_cache")
        except BaseException:
            self._core.on_workers("asyncrlhf_sleep")
            raise
        self._checksum, self._salt = weights.checksum, str(weights.version)
        self.version, self.asleep = weights.version, False

    def close(self) -> None:
        self._core.close()
        vars(self).clear()

    def _bring(self, verb: str, weights: WeightHandle) -> None:
        """Have the workers read weights. Raises PublishRefused when one of them refuses, and when the slices that they
        have read are not together what was announced."""
        answers: list[Receipt | str | None] = self._core.on_workers(verb, self._within_reach(weights))
        for answer in answers:
            if isinstance(answer, str):
                raise PublishRefused(answer)
        receipts = [answer for answer in answers if isinstance(answer, Receipt)]
        if receipts:
            require_whole(receipts, weights)
        before = self.bytes_own
        self.bytes_read = tuple(receipt.byte_count for receipt in receipts)
        self.bytes_own = tuple(receipt.own_byte_count for receipt in receipts)
        if self.options.beside and self.bytes_own != before:
            for near, receipt in zip(self.options.beside, receipts, strict=False):
                own, rest = receipt.own_byte_count, receipt.byte_count - receipt.own_byte_count
                print(f"weights: {own} bytes of rank {near[0]}, on its device, and {rest} of others", flush=True)

    def _within_reach(self, weights: WeightHandle) -> WeightHandle:
        """Weights that processes which vLLM has started can read, too: Ray, say, does not know them, and what is on
        another machine need not come once for each of them."""
        if self.options.tensor_parallel == 1 or is_shared_here(weights):
            return weights
        if weights.transport not in self._transports:
            self._transports[weights.transport] = import_object(weights.transport)()
        received = dict(self._transports[weights.transport].receive(weights.payload))
        payload = self._relay.send(weights.version, received)
        return msgspec.structs.replace(weights, transport=RELAY, payload=payload)

    def _why_not(self, request: GenerateRequest) -> str:
        if request.request_id in self._ids:
            return f"request {request.request_id!r} is running already"
        return why_not(
            request, version=self.version, longest=self._core.longest, vocabulary_size=self._core.vocabulary_size
        )

    def _admit(self) -> None:
        """Give free places to waiting requests."""
        while self._waiting and len(self._running) < self.options.slots:
            request = self._waiting.popleft()
            own = self._core.add(request.prompt_token_ids + request.tokens, _params(request), self._salt)
            self._ids[request.request_id] = own
            self._running[own] = Answer(request)

    def _advance(self, probe: str = "") -> Sequence[float] | None:
        """One step of vLLM; events go to `_unsent`. Gives the log-probs of the request `probe` when they are there.
        Raises RuntimeError when vLLM gives an answer up."""
        found: Sequence[float] | None = None
        for output in self._core.step():
            if output.request_id == probe:
                tensors = output.new_prompt_logprobs_tensors
                assert tensors is not None
                found = tensors.logprobs[:, 0].tolist()
                continue
            answer = self._running[output.request_id]
            if output.new_token_ids:
                assert output.new_logprobs is not None
                answer.tokens += output.new_token_ids
                answer.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finished:
                self._finish(output.request_id, answer, str(output.finish_reason))
            elif answer.is_new and (progress := answer.report(self.version)) is not None:
                self._unsent.append(progress)
        return found

    def _finish(self, own: str, answer: Answer, reason: str) -> None:
        if reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM gave request {answer.request.request_id!r} up: {reason}")
        del self._running[own], self._ids[answer.request.request_id]
        if (progress := answer.report(self.version)) is not None:
            self._unsent.append(progress)
        self._unsent.append(answer.finish(self.version))


def _params(request: GenerateRequest) -> SamplingParams:
    """vLLM takes no token of an answer's own stream to be continued: every continuation has a stream of its own.

    Requests with a seed have generators of their own, from which vLLM on GPUs draws for one request after another, in
    place of once for the batch. This is its slower way to sample; how much slower has not been measured."""
    done = len(request.tokens)
    return SamplingParams(
        max_tokens=request.max_tokens - done,
        temperature=request.temperature,
        seed=_mix(request.seed, done),
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        skip_clone=True,
    )


def _mix(seed: int, done: int) -> int:
    """63 bits that depend on all bits of `seed`, and on how many tokens came before."""
    value = (seed + done * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) >> 1
