"""Training with megatron-core: a model cut over ranks by tensor, pipeline, context and expert, in copies."""
