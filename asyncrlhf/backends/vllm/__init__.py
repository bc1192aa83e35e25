"""vLLM as rollout engine, in the engine's own process: continuous batching, with weights that change between steps.

Reading order: options, environment (before vLLM is imported), core (vLLM's engine core, built), worker (what vLLM's
workers can do in addition), arrivals (their two sets of weights), slices (what each of them reads), answers
(bookkeeping), engine. Nothing is imported here: options load neither torch nor vLLM.
"""
