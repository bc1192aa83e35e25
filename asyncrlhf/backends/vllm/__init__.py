"""vLLM as rollout engine, in the engine's own process: continuous batching, with weights that change between steps.

Reading order: options, environment (before vLLM is imported), core (vLLM's engine core, built), worker (weights into
the running model), answers (bookkeeping), engine. Nothing is imported here: options load neither torch nor vLLM.
"""
