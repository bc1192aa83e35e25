"""The requests that vLLM is computing: which tokens came from which weights, and which of them were reported."""

from __future__ import annotations

import msgspec

from asyncrlhf.messages import Finished, GenerateRequest, Progress, Sample, Segment

__all__ = ("Answer",)


class Answer:
    """One request and its answer so far. Tokens that an earlier engine sampled count as reported."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.tokens = list(request.tokens)
        self.logprobs = list(request.logprobs)
        self.kv_mixed = False
        """The KV cache behind the next token holds entries of older versions."""
        self._segments = list(request.segments)
        self._counted = self._reported = len(request.tokens)
        """Tokens in closed segments, and tokens that were reported."""

    @property
    def is_new(self) -> bool:
        """Whether no token was reported here so far."""
        return self._reported == len(self.request.tokens)

    def report(self, version: int) -> Progress | None:
        """The tokens that were not reported yet, all of them sampled by `version`."""
        count = len(self.tokens) - self._reported
        if not count:
            return None
        self._reported = len(self.tokens)
        return Progress(request_id=self.request.request_id, version=version, token_count=count)

    def close_run(self, version: int) -> None:
        """End the open run of tokens: all of them were sampled by `version`."""
        count = len(self.tokens) - self._counted
        if not count:
            return
        run = Segment(version=version, token_count=count, kv_mixed=self.kv_mixed)
        if self._segments and msgspec.structs.replace(self._segments[-1], token_count=count) == run:
            run = msgspec.structs.replace(run, token_count=count + self._segments.pop().token_count)
        self._segments.append(run)
        self._counted = len(self.tokens)

    def finish(self, version: int) -> Finished:
        """The complete answer."""
        self.close_run(version)
        stopped = self.tokens[-1] in self.request.stop_token_ids
        sample = Sample(
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            segments=tuple(self._segments),
            finish_reason="stop" if stopped else "length",
        )
        return Finished(request_id=self.request.request_id, sample=sample)

    def interrupt(self, version: int) -> GenerateRequest:
        """The request with its tokens so far, to be continued elsewhere."""
        self.close_run(version)
        return msgspec.structs.replace(
            self.request,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            segments=tuple(self._segments),
        )
