"""Long answers through a whole chain of actors: the object store holds what is live, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integration.long_answers import PROMPTS, STORE, TOKENS

ROLLOUTS = 10_000


@pytest.mark.timeout(600)
def test_the_object_store_is_as_full_after_10000_long_rollouts_as_after_a_few() -> None:
    """All of them together are 13 times what the store holds, and it cannot spill."""
    command = [sys.executable, "-m", "tests.integration.long_answers", str(ROLLOUTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rollouts"] == ROLLOUTS
    live = 3 * PROMPTS  # two batches ahead and the one in training
    size = TOKENS * (8 + 4)  # ids and log-probs, and the log-probs of the reference
    assert ROLLOUTS * size > 13 * STORE
    assert max(found["used"]) < 2 * live * size
    assert max(found["references"]) <= 2 * max(found["references"][:20])
