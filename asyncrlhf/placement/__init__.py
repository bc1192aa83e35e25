"""ON WHICH DEVICES: what a placement of model groups costs, which one is best, and why the others are not. Torch-free.

    inputs (a TOML file) -> strategies -> search (sets of units on blocks of devices) -> schedule, simulate -> report
                                             |
                                             stages: costs, decode, memory, movement

A *unit* is a model in one duty (`rollout` generates, `policy` trains, `reference` reads, ...); a *set* is the units
that share a block of devices and so take turns. Everything here is a pure function of its arguments.
"""
