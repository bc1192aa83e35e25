"""GSM8K (arXiv 2110.14168): word problems of grade-school arithmetic.

Its rows are {"question", "answer"}; an answer ends with "#### " and a number."""

from __future__ import annotations

import re
from typing import Any

__all__ = ("verify",)

NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
BOXED = re.compile(r"\\boxed\{([^}]*)\}")


def verify(prompt: str, response: str, ground_truth: str, **columns: Any) -> float:
    """1 if the last number of the response, or that in its last \\boxed{...}, is the answer's."""
    boxed = BOXED.findall(response)
    found, expected = _last_number(boxed[-1] if boxed else response), _last_number(ground_truth.rpartition("####")[2])
    return float(found is not None and found == expected)


def _last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("$", "")) if found else None
