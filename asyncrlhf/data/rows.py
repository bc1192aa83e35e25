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
    if data.response is not None:
        needed.append(data.response)
    elif data.ground_truth:
        needed.append(data.ground_truth)
    for name in needed:
        if name not in row:
            return f"no column {name!r} (it has {', '.join(map(repr, row)) or 'none'})"
    if data.response is not None and not isinstance(row[data.response], str):
        return f"column {data.response!r} is a {type(row[data.response]).__name__}, not text"
    return _problem_of_prompt(row[data.prompt], data)


def _problem_of_prompt(prompt: object, data: Data) -> str | None:
    if isinstance(prompt, str):
        return None if prompt else f"column {data.prompt!r} is empty"
    if not isinstance(prompt, list):
        return f"column {data.prompt!r} is a {type(prompt).__name__}, not text"
    if not data.chat:
        return f"column {data.prompt!r} is a list, not text (a list of messages needs data.chat = true)"
    messages = cast(list[object], prompt)
    if not messages:
        return f"column {data.prompt!r} is empty"
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= cast(Mapping[str, Any], message).keys():
            return f"column {data.prompt!r} holds a message without role and content"
    return None


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
            "name its columns in data.prompt, data.ground_truth and data.response"
        )
    return rows, Report(path, len(rows), len(malformed), tuple(malformed[:NAMED]))


def _decode(text: bytes, data: Data) -> tuple[dict[str, Any], str | None]:
    try:
        columns = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        return {}, f"not JSON: {problem}"
    return columns, problem_of(columns, data)
