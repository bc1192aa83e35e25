"""python -m tests.check: everything that CI runs, in order, and one line about each at the end."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

RERUN = [
    "--reruns=1",
    "--rerun-show-tracebacks",
    *(f"--rerun-exclude-path={ROOT / 'tests' / pure}" for pure in ("unit", "contract")),
]
"""A test outside tests/unit and tests/contract, most of which have real processes, that fails is run once more, on a
machine that others use, too. One that passes then is listed as RERUN, with what it had failed for: it is to be
mended."""

STEPS: tuple[tuple[str, list[str]], ...] = (
    ("lint", [str(BIN / "ruff"), "check", "."]),
    ("format", [str(BIN / "ruff"), "format", "--check", "."]),
    ("types", [str(BIN / "basedpyright"), "--pythonpath", sys.executable]),
    ("layers", [str(BIN / "lint-imports")]),
    ("tests", [sys.executable, "-m", "pytest", *RERUN]),
)

ENGINES = {
    "torch": "torch",
    "transformers": "transformers",
    "ray": "ray",
    "vllm": "vllm",
    "megatron": "megatron.core",
}
"""Engine -> module that must import. One that does not is named with the reason, and with CI=true fails the check."""


def engines() -> list[str]:
    """Import every engine; print what was found, return those that are missing."""
    missing: list[str] = []
    for name, module in ENGINES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what an engine would use on GPUs
                found = importlib.import_module(module)
        except ImportError as error:
            missing.append(name)
            print(f"engine {name}: not here ({error}); its tests fail")
        else:
            print(f"engine {name}: {getattr(found, '__version__', 'found')}")
    return missing


def main() -> int:
    os.chdir(ROOT)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    results: list[tuple[str, bool, float]] = []
    missing = engines()
    results.append(("engines", not (missing and os.environ.get("CI") == "true"), 0.0))
    for name, command in STEPS:
        print(f"--- {name}: {' '.join(command)}", flush=True)
        started = time.perf_counter()
        code = subprocess.run(command, env=environment, check=False).returncode
        results.append((name, code == 0, time.perf_counter() - started))
    print("--- summary")
    for name, passed, seconds in results:
        print(f"{'pass' if passed else 'FAIL'}  {name:8} {seconds:6.1f} s")
    return 0 if all(passed for _, passed, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
