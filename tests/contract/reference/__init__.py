"""The reference model of the staleness contract: our own executable reading of it, and the oracle of these tests.

`ledger.py` and `membership.py` are pure; `sim.py` drives them with fake engines, rewards, a trainer, faults, crashes.
Nothing here is product code. Where product and oracle differ, one of them is wrong: read the contract, then fix it.
"""
