"""`python -m asyncrlhf plan [FILE] [key=value ...]`: prints a plan, and runs nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncrlhf.config.load import read_table
from asyncrlhf.errors import ConfigError
from asyncrlhf.placement import predict, report, scaling
from asyncrlhf.placement.gantt import draw
from asyncrlhf.placement.inputs import problem_of
from asyncrlhf.placement.measured import MeasuredRun, read_run
from asyncrlhf.placement.search import search
from asyncrlhf.placement.tables import as_toml

__all__ = ("main",)


def main(words: Sequence[str], program: str) -> int:
    """Raises ConfigError for what cannot be planned."""
    options = _parser(program).parse_args(words)
    file, overrides = _split(options.words)
    run: MeasuredRun | None = None
    try:
        if options.calibrate is not None:
            run = read_run(options.calibrate)
            if file is None:
                result = predict.predictions(run, read_table(file, overrides))
                show = predict.as_json if options.json else predict.as_text
                print(json.dumps(show(run, result), indent=2) if options.json else show(run, result))
                return 0
        problem = problem_of(read_table(file, overrides))
        if run is not None:
            problem = replace(problem, work=run.workload(problem.work))
        if options.scaling:
            points = scaling.curve(problem)
            print(json.dumps(scaling.as_json(points), indent=2) if options.json else scaling.as_text(points))
            return 0
        outcome = search(problem)
    except ConfigError as refused:
        raise ConfigError(
            f"{file}: {refused}" if file and not str(refused).startswith(file) else str(refused)
        ) from None
    if options.json:
        print(json.dumps(report.as_json(outcome), indent=2))
    elif options.toml:
        print(as_toml(outcome), end="")
    else:
        print(report.as_text(outcome, explain=options.explain))
    if options.gantt is not None:
        best = outcome.candidates[0]
        draw(report.scheduled(problem, best), best.strategy.label, Path(options.gantt))
        print(f"picture: {options.gantt}", file=sys.stderr)
    return 0


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file, if the first word is one, and the overrides."""
    if words and "=" not in words[0]:
        return words[0], list(words[1:])
    return None, list(words)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{program} plan",
        description="Find where the models of an RLHF run should compute; run nothing.",
        epilog="Keys are documented in asyncrlhf/placement/inputs.py. Example: plan configs/plan_hybridflow.toml "
        "workload.max_staleness=2 --explain",
    )
    parser.add_argument("words", metavar="FILE|key=value", nargs="*", help="a TOML file, then keys on top of it")
    parser.add_argument("--explain", action="store_true", help="details of every placement shown, and of what has none")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--toml", action="store_true", help="print the best placement as tables of a configuration")
    parser.add_argument("--gantt", metavar="PICTURE", help="draw the best placement's time line (takes matplotlib)")
    parser.add_argument("--scaling", action="store_true", help="the best placement at 1/64 to all of the devices")
    parser.add_argument(
        "--calibrate",
        metavar="RUN_DIR",
        help="simulate what a finished run would do with other settings; with a FILE: take lengths of answers and "
        "latencies of rewards from it",
    )
    return parser
