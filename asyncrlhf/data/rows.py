"""What a row is, which rows are usable, and how a .jsonl file becomes a list of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from asyncrlhf.config.schema import Data
from asyncrlhf.errors import DataError

__all__ = ("Report", "Row", "problem_of", "read_jsonl")

NAMED = 5
"""Malformed rows that a report names one by one."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data set. Example: Row(columns={"prompt": "qwert>", "answer": "trewq"})."""

    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """What was found when a data set was opened."""

    source: str
    row_count: int | None
    """Usable rows of one epoch; None: not known beforehand."""
    malformed_count: int = 0
    malformed: tuple[str, ...] = ()
    """The first few, for example "line 17: no column 'answer'"."""

    def __str__(self) -> str:
        rows = "rows as they come" if self.row_count is None else f"{self.row_count} rows"
        if not self.malformed_count:
            return f"{self.source}: {rows}"
        more = "; ..." if self.malformed_count > len(self.malformed) else ""
        return f"{self.source}: {rows}, {self.malformed_count} malformed left out ({'; '.join(self.malformed)}{more})"


def problem_of(columns: object, data: Data) -> str | None:
    """Why this row cannot be used under these column names, or None."""
    if not isinstance(columns, Mapping):
        return f"a row is a {type(columns).__name__}, not an object with columns"
    row = cast(Mapping[str, Any], columns)
    needed = [data.prompt]
    answers = [name for name in (data.response, data.rejected) if name is not None]
    if answers:
        needed += answers
    elif data.ground_truth:
        needed.append(data.ground_truth)
    for name in needed:
        if name not in row:
            return f"no column {name!r} (it has {', '.join(map(repr, row)) or 'none'})"
    for name in answers:
        if problem := _problem_of_text(name, row[name]):
            return problem
    if answers and not data.chat and row[data.prompt] == "":
        return None
    if data.chat and isinstance(row[data.prompt], list):
        return _problem_of_messages(data.prompt, cast(list[object], row[data.prompt]))
    problem = _problem_of_text(data.prompt, row[data.prompt])
    return f"{problem} (a list of messages needs data.chat = true)" if isinstance(row[data.prompt], list) else problem


def _problem_of_text(name: str, value: object) -> str | None:
    if not isinstance(value, str):
        return f"column {name!r} is a {type(value).__name__}, not text"
    return None if value else f"column {name!r} is empty"


def _problem_of_messages(name: str, messages: list[object]) -> str | None:
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= cast(Mapping[str, Any], message).keys():
            return f"column {name!r} holds a message without role and content"
    return None if messages else f"column {name!r} is empty"


def read_jsonl(path: str, data: Data, where: str) -> tuple[list[dict[str, Any]], Report]:
    """The usable rows of a file with one JSON object a line; blank lines are passed over.

    Malformed rows are left out, counted and named by line in the report. Raises DataError if no row is left.
    """
    rows: list[dict[str, Any]] = []
    malformed: list[str] = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
                if not text:
                    continue
                columns, problem = _decode(text, data)
                if problem is None:
                    rows.append(columns)
                else:
                    malformed.append(f"line {number}: {problem}")
    except OSError as problem:
        raise DataError(f'{where}.path = "{path}" cannot be read: {problem.strerror}') from None
    if not rows and not malformed:
        raise DataError(f'{where}.path = "{path}" is empty; write one JSON object a line')
    if not rows:
        raise DataError(
            f'{where}.path = "{path}": all {len(malformed)} rows are malformed ({malformed[0]}); mend the file, or '
            "name its columns in data.prompt, data.ground_truth, data.response and data.rejected"
        )
    return rows, Report(path, len(rows), len(malformed), tuple(malformed[:NAMED]))


def _decode(text: bytes, data: Data) -> tuple[dict[str, Any], str | None]:
    try:
        columns = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        return {}, f"not JSON: {problem}"
    return columns, problem_of(columns, data)
