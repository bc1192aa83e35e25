"""Engines for any Hugging Face decoder with full attention, on one CPU or GPU: train, score, sample.

Reading order: options, model (loading and the forward), layout and data (micro-batches), train, score; slots, attention
and sampling, then sample; replica and state. Nothing is imported here: options load no torch.
"""
