"""The command line: `python -m asyncrlhf CONFIG.toml [key=value ...]` runs it, `... check CONFIG.toml` only looks,
`... plan PLAN.toml` says where models should compute."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from asyncrlhf import __version__
from asyncrlhf.errors import ConfigError, DataError

__all__ = ("main",)

PROGRAM = "python -m asyncrlhf"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: that of the run; 2, after one line on stderr, when the configuration or the data is refused."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["plan"]:
        return _plan(words[1:])
    only_check = words[:1] == ["check"]
    options = _parser(only_check).parse_args(words[1:] if only_check else words)
    try:
        from asyncrlhf.config.load import load

        config = load(options.config, options.overrides)
        from asyncrlhf import launch

        if only_check:
            print(launch.check(config))
            return 0
        return launch.run(config)
    except (ConfigError, DataError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2


def _plan(words: Sequence[str]) -> int:
    from asyncrlhf.placement.command import main as plan

    try:
        return plan(words, PROGRAM)
    except ConfigError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2


def _parser(only_check: bool) -> argparse.ArgumentParser:
    if only_check:
        parser = argparse.ArgumentParser(
            prog=f"{PROGRAM} check", description="Read a configuration and print what follows from it; run nothing."
        )
    else:
        parser = argparse.ArgumentParser(
            prog=PROGRAM,
            description="Run the configuration in a TOML file.",
            epilog=f"`{PROGRAM} check CONFIG ...` only reads it and prints sizes, bounds and warnings; `{PROGRAM} plan "
            "...` finds where models should compute. Exit code: 0 complete, 1 failed, 2 refused, 130 or 143 stopped.",
        )
        parser.add_argument("--version", action="version", version=f"asyncrlhf {__version__}")
    parser.add_argument("config", metavar="CONFIG", help="a TOML file")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="set a key, or table.key, on top of the file; an empty value takes it out",
    )
    return parser


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has gone: nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
