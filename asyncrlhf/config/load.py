"""Reads a configuration: TOML, overrides from the command line, and the resolved file that lies beside a run."""

from __future__ import annotations

import datetime
import os
import pkgutil
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import tomli_w

from asyncrlhf.config.convert import convert as convert
from asyncrlhf.config.schema import Config
from asyncrlhf.errors import ConfigError

__all__ = ("convert", "import_named", "load", "read_table", "resolved")


def load(path: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the TOML file `path`, with `key=value` and `table.key=value` overrides on top.

    A value is read as TOML; what is not TOML is a string, so quotes are optional; an empty one (`key=`) takes the key
    out again, back to its default. `after` becomes absolute and `directory` is filled in (a resolved file keeps the
    one it came from). The current directory and `directory` join the end of `sys.path`, once, so that "module:name"
    finds files beside the configuration. Raises ConfigError, in one line, for anything that cannot be used.
    """
    table = read_table(path, overrides)
    directory = os.path.dirname(os.path.abspath(path))
    table.setdefault("directory", directory)
    try:
        config = convert(table, Config)
    except ConfigError as problem:
        raise ConfigError(f"{path}: {problem}") from None
    after = [os.path.normpath(os.path.join(config.directory, name)) for name in config.after]
    _make_importable(os.getcwd(), config.directory)
    return msgspec.structs.replace(config, after=after)


def read_table(path: str | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The TOML file (None: an empty one) with overrides on top, as plain values. Raises ConfigError."""
    table: dict[str, Any] = {} if path is None else _read(path)
    for override in overrides:
        _override(table, override)
    return table


def resolved(config: Config, groups: Mapping[str, msgspec.Struct], judges: Mapping[str, msgspec.Struct]) -> str:
    """TOML text of a whole run, every default written out. `groups` and `judges` are the converted tables that replace
    raw ones.

    Stable: loading the text gives a config equal to `config` but for its now complete groups, and the same text again.
    """
    table = _plain(config)
    table["groups"] = {**table["groups"], **{name: _plain(group) for name, group in groups.items()}}
    table["evaluation"]["judges"] = {name: _plain(judge) for name, judge in judges.items()}
    return tomli_w.dumps(table)


def import_named(key: str, path: str) -> Any:
    """What the "module:name" under `key` names. Raises ConfigError if it cannot be imported."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError, SyntaxError) as problem:
        raise ConfigError(
            f'{key} = "{path}" cannot be imported ({problem}); modules are looked for in {os.getcwd()}, beside the '
            "configuration and among installed packages"
        ) from problem


def _plain(value: msgspec.Struct) -> dict[str, Any]:
    dates = (datetime.datetime, datetime.date, datetime.time)
    return _without_none(msgspec.to_builtins(value, builtin_types=dates))


def _without_none(value: Any) -> Any:
    """TOML has no null: a key that is None is left out."""
    if isinstance(value, dict):
        table = cast(dict[str, Any], value)
        return {key: _without_none(item) for key, item in table.items() if item is not None}
    return value


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file (looked in {os.getcwd()})") from None
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path}: not UTF-8 text at byte {problem.start}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        last = f"at line {len(text.splitlines())}, the last"
        raise ConfigError(f"{path}: not TOML: {str(problem).replace('at end of document', last)}") from None


def _override(table: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(re.fullmatch(r"[A-Za-z0-9_-]+", part) for part in parts):
        raise ConfigError(f'"{text}" is not an override; write it as key=value or table.key=value')
    for depth, part in enumerate(parts[:-1], 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{key} cannot be set: {'.'.join(parts[:depth])} is not a table")
    if value.strip():
        table[parts[-1]] = _value(value.strip())
    else:
        table.pop(parts[-1], None)


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    return text if len(parsed) > 1 or isinstance(value, datetime.date | datetime.time) else value


def _make_importable(*directories: str) -> None:
    for directory in directories:
        if directory not in map(os.path.abspath, sys.path):
            sys.path.append(directory)
