"""Requests that no sampler can answer, whatever it computes with. Torch-free."""

from __future__ import annotations

from asyncrlhf.messages import Finished, GenerateRequest, Sample

__all__ = ("already_complete", "why_not")


def why_not(request: GenerateRequest, *, version: int, longest: int, vocabulary_size: int) -> str:
    """Why a request cannot be answered by an engine whose weights are `version`, which has `longest` places for prompt
    and answer; empty if it can."""
    prompt, done = request.prompt_token_ids, request.tokens
    if version < 0:
        return "no weights were committed yet; publish a version first"
    if not prompt:
        return "the prompt has no token"
    if request.max_tokens < 1:
        return f"max_tokens = {request.max_tokens}; an answer takes at least 1"
    if len(prompt) + request.max_tokens > longest:
        return (
            f"a prompt of {len(prompt)} tokens and max_tokens = {request.max_tokens} need "
            f"{len(prompt) + request.max_tokens} places; this engine has {longest} (the smaller of "
            "max_sequence_tokens and the model's max_position_embeddings)"
        )
    if not request.temperature >= 0:
        return f"temperature = {request.temperature}; use 0 or more"
    lowest, highest = min(*prompt, *done, 0), max(*prompt, *done, 0)
    if lowest < 0 or highest >= vocabulary_size:
        return f"token {lowest if lowest < 0 else highest} is outside the vocabulary of {vocabulary_size}"
    if not len(done) == len(request.logprobs) == sum(s.token_count for s in request.segments):
        return (
            f"{len(done)} tokens to continue from come with {len(request.logprobs)} log-probs and segments of "
            f"{sum(s.token_count for s in request.segments)} tokens"
        )
    return ""


def already_complete(request: GenerateRequest) -> Finished | None:
    """The answer of a request that had nothing left to sample when it was interrupted."""
    stopped = bool(request.tokens) and request.tokens[-1] in request.stop_token_ids
    if not stopped and len(request.tokens) < request.max_tokens:
        return None
    sample = Sample(
        token_ids=request.tokens,
        logprobs=request.logprobs,
        segments=request.segments,
        finish_reason="stop" if stopped else "length",
    )
    return Finished(request_id=request.request_id, sample=sample)
