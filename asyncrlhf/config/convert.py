"""From a raw table to a typed Struct, with errors in the words of the file: key, value, bound, nearest valid key."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import msgspec
from msgspec import inspect as kinds

from asyncrlhf.config.bounds import PATTERNS
from asyncrlhf.errors import ConfigError

__all__ = ("convert",)

T = TypeVar("T")
Fields = kinds.StructType | kinds.DataclassType

WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


def convert(table: Mapping[str, Any], kind: type[T], where: str = "") -> T:
    """`table` as a `kind` (a Struct or a union of tagged Structs); `where` is its dotted place, e.g. "groups.rollout".

    A union member is chosen by `backend`, the first when the key is missing. Raises ConfigError, in one line, for an
    unknown key at any depth (naming the nearest valid one), a wrong type, a value out of range, or a broken rule.
    """
    info = kinds.type_info(kind)
    table = _with_default_tag(table, info)
    every_key = [_join(where, key) for key in _keys(info)]
    _check(table, info, where, every_key)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as problem:
        raise ConfigError(_explain(problem, table, where, every_key)) from None


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where and key else where or key


def _show(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _members(kind: kinds.Type) -> tuple[kinds.Type, ...]:
    return kind.types if isinstance(kind, kinds.UnionType) else (kind,)


def _tagged(kind: kinds.Type) -> dict[object, kinds.StructType]:
    return {m.tag: m for m in _members(kind) if isinstance(m, kinds.StructType) and m.tag_field is not None}


def _with_default_tag(table: Mapping[str, Any], kind: kinds.Type) -> dict[str, Any]:
    members = _tagged(kind)
    if not members:
        return dict(table)
    tag, first = next(iter(members.items()))
    return {str(first.tag_field): tag, **table}


def _keys(kind: kinds.Type) -> Iterator[str]:
    """Every dotted key below `kind`."""
    for member in _members(kind):
        if isinstance(member, Fields):
            for field in member.fields:
                yield field.encode_name
                yield from (_join(field.encode_name, key) for key in _keys(field.type))


def _check(value: Any, kind: kinds.Type, where: str, every_key: list[str]) -> None:
    """What msgspec does not say well: unknown keys, words that are not a choice, numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value) and not isinstance(kind, kinds.AnyType):
        raise ConfigError(f"{where} = {value} is not a finite number")
    if not isinstance(value, dict) and isinstance(kind, Fields | kinds.DictType):
        raise ConfigError(f"{where} = {_show(value)}: expected a table; write [{where}]")
    tagged = _tagged(kind)
    for member in _members(kind):
        if isinstance(member, kinds.LiteralType) and isinstance(value, str) and value not in member.values:
            _refuse_choice(where, value, list(member.values))
        elif isinstance(member, Fields) and isinstance(value, dict):
            table = cast(dict[str, Any], value)
            if not tagged or _choose(table, tagged, where) is member:
                _check_fields(table, member, where, every_key, tagged)
        elif isinstance(member, kinds.DictType) and isinstance(value, dict):
            for key, item in cast(dict[str, Any], value).items():
                _check(item, member.value_type, _join(where, key), every_key)
                if isinstance(member.value_type, kinds.StructType) and isinstance(item, dict):
                    convert(cast(dict[str, Any], item), member.value_type.cls, _join(where, key))  # which msgspec names
        elif isinstance(member, kinds.ListType) and isinstance(value, list):
            for i, item in enumerate(cast(list[Any], value)):
                _check(item, member.item_type, f"{where}[{i}]", every_key)


def _choose(table: dict[str, Any], tagged: dict[object, kinds.StructType], where: str) -> kinds.StructType:
    field = str(next(iter(tagged.values())).tag_field)
    tag: object = table.get(field, next(iter(tagged)))
    if tag not in tagged:
        _refuse_choice(_join(where, field), tag, list(tagged))
    return tagged[tag]


def _refuse_choice(where: str, value: object, choices: list[Any]) -> NoReturn:
    known = ", ".join(_show(choice) for choice in choices)
    raise ConfigError(f"{where} = {_show(value)} is not a choice; use {'one of ' if len(choices) > 1 else ''}{known}")


def _check_fields(
    table: dict[str, Any], kind: Fields, where: str, every_key: list[str], tagged: Mapping[object, kinds.StructType]
) -> None:
    """`tagged`: this kind and the others that the table might have been."""
    types = {field.encode_name: field.type for field in kind.fields}
    tag_field = kind.tag_field if isinstance(kind, kinds.StructType) else None
    for key, value in table.items():
        if key in types:
            _check(value, types[key], _join(where, key), every_key)
        elif key != tag_field:
            others = [tag for tag, other in tagged.items() if any(key == field.encode_name for field in other.fields)]
            if others:
                tag = next(tag for tag, own in tagged.items() if own is kind)
                raise ConfigError(
                    f"{_join(where, key)} is not a key of {tag_field} = {_show(tag)}, but of "
                    f"{' and '.join(map(_show, others))}; set {_join(where, str(tag_field))}, or take the key out"
                )
            raise ConfigError(f"{_join(where, key)} is not a key; {_suggest(key, where, list(types), every_key)}")


def _suggest(key: str, where: str, here: list[str], every_key: list[str]) -> str:
    if close := difflib.get_close_matches(key, here, 1):
        return f"did you mean {_join(where, close[0])}?"
    leaves = {dotted.rpartition(".")[2]: dotted for dotted in reversed(every_key) if dotted != _join(where, key)}
    if close := difflib.get_close_matches(key, leaves, 1, 0.8):
        return f"did you mean {leaves[close[0]]}?"
    return f"keys there: {', '.join(here)}"


def _explain(problem: msgspec.ValidationError, table: Mapping[str, Any], where: str, every_key: list[str]) -> str:
    text, _, path = str(problem).partition(" - at `$")
    path = path.rstrip("`").removeprefix(".").partition("[...]")[0]  # of a table's value msgspec gives no key
    key = _join(where, path)
    if problem.__cause__ is not None:  # raised by a __post_init__
        first = re.match(r"\w+", text)
        named = first is not None and any(_join(key, first[0]) == known for known in every_key)
        return _join(key, text) if named else f"{key}: {text}" if key else text
    if missing := re.fullmatch(r"Object missing required field `(.+)`", text):
        return f"{_join(key, missing[1])} is missing; it has no default"
    value = _show(_lookup(table, path))
    if wrong := re.fullmatch(r"Expected `(.+)`, got `(.+)`", text):
        expected = " or ".join(WORDS.get(word, word) for word in wrong[1].split(" | ") if word != "null")
        quote = "; put it in quotes" if "str" in wrong[1] and wrong[2] in ("int", "float", "bool") else ""
        return f"{key} = {value}: expected {expected}, got {WORDS.get(wrong[2], wrong[2])}{quote}"
    if bound := re.fullmatch(r"Expected `(?:int|float)(?: \| null)?` ([<>]=?) (.+)", text):
        return f"{key} = {value} must be {bound[1]} {float(bound[2]):g}"
    if re.fullmatch(r"Expected `str(?: \| null)?` of length >= 1", text):
        return f"{key} must not be empty"
    if form := re.fullmatch(r"Expected `str(?: \| null)?` matching regex '(.+)'", text):
        return f"{key} = {value} is not {PATTERNS.get(form[1], f'of the form {form[1]}')}"
    return f"{key} = {value}: {text[0].lower()}{text[1:].replace('`', '')}"


def _lookup(value: Any, path: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", path):
        value = value[int(part) if isinstance(value, Sequence) else part]
    return value
