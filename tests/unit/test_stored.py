"""Columns by reference: who fetches what, and what becomes of a rollout whose data is lost."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from asyncrlhf.algorithm import run_algorithm  # noqa: F401
from asyncrlhf.control.checkpoint import encode_payloads
from asyncrlhf.errors import DataLost, EngineLost
from asyncrlhf.flow.batching import build_batch
from asyncrlhf.flow.gate import Popped
from asyncrlhf.flow.ledger import Batch
from asyncrlhf.messages import (
    Array,
    ArrayColumn,
    Experience,
    PerToken,
    Prompt,
    Rollout,
    Sample,
    Segment,
    Stored,
    StoredColumn,
    column_of,
    total,
)
from asyncrlhf.ops.rewards import sequence_kl
