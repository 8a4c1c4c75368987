"""Parses the values of config fields by their declared types: `--config.model.blocks=(2,2)`."""

import contextlib
from collections.abc import Sequence
from typing import Any, Literal, Union

from tftpu.config.field_types import FieldType, read_type

_SCALARS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_SEVERAL = {
    int: "whole numbers in brackets, as (2,2,2,2)",
    float: "numbers in brackets, as (0.5,1)",
    str: "names in brackets, as (a,b)",
}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def parse(text: str, kind: Any) -> Any:
    """Returns the value that a text stands for.

    Brackets around several values, and quotes inside, may be left out: `(1,2)` or `1,2`.

    Args:
        text: the text as given on the command line.
        kind: the declared type: int, float, bool, str, None, or a Literal, tuple, list or union of
            these. For a union, the first type that fits is used; None is tried first, and str last.

    Raises:
        ValueError: the text is not a value of this type.
        TypeError: no text can be a value of this type.
    """
    kind = read_type(kind)
    if kind.container is Union:
        return _parse_first(text, sorted(kind.parts, key=_rank_type))
    if kind.container is Literal:
        return _parse_first(text, [FieldType(type(value)) for value in kind.values], kind.values)
    if kind.container in (tuple, list, Sequence) and kind.parts:
        return _parse_several(split(text), kind)
    plain = kind.declared
    if plain is type(None) and text.lower() == "none":
        return None
    if plain is bool and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if plain is int:
        return _parse_whole(text)
    if plain in (float, str):
        return plain(text)
    if plain in (bool, type(None)):
        raise ValueError(f"{text!r} is not {describe_kind(kind)}")
    raise TypeError(f"no value of {plain} can be parsed")


def describe_kind(kind: Any) -> str:
    """Returns a description of the texts that `parse` accepts for a type, such as "a number"."""
    kind = read_type(kind)
    described = [describe_kind(part) for part in kind.parts]
    if kind.container is Union:
        return ", or ".join(described)
    if kind.container is Literal:
        return f"one of {', '.join(map(str, kind.values))}"
    if kind.is_fixed:
        return f"{len(described)} values in brackets: {', '.join(described)}"
    if described:
        return _SEVERAL.get(kind.parts[0].declared) or f"values in brackets, each {described[0]}"
    return "none" if kind.declared is type(None) else _SCALARS[kind.declared]


def _rank_type(kind: FieldType) -> int:
    return (kind.declared is str) - (kind.declared is type(None))


def _parse_first(
    text: str, kinds: Sequence[FieldType], allowed: Sequence[Any] | None = None
) -> Any:
    """Returns the value of the first type that fits; for a Literal, an allowed value."""
    for kind in kinds:
        try:
            value = parse(text, kind)
        except ValueError:
            continue
        if allowed is None or any(type(v) is kind.declared and v == value for v in allowed):
            return value
    raise ValueError(f"{text!r} fits none of {[kind.declared for kind in kinds]}")


def _parse_several(texts: list[str], kind: FieldType) -> Any:
    """Returns the elements of a tuple or list."""
    kinds = kind.parts if kind.is_fixed else kind.parts[:1] * len(texts)
    values = [parse(text, part) for text, part in zip(texts, kinds, strict=True)]
    return values if kind.container is list else tuple(values)


def _parse_whole(text: str) -> int:
    """Returns a whole number, also from "64.0", as hyper-parameter services may write it."""
    try:
        return int(text)
    except ValueError:
        if not float(text).is_integer():
            raise
        return int(float(text))


def split(text: str) -> list[str]:
    """Splits a text at the commas outside inner brackets and quotes: "(1,(2,3))" has two parts.

    Raises:
        ValueError: a bracket or a quote is not closed.
    """
    if text[:1] + text[-1:] in ("()", "[]"):
        # The first and the last bracket of "(1,2),(3,4)" are not a pair.
        with contextlib.suppress(ValueError):
            return _split_parts(text[1:-1])
    return _split_parts(text)


def _split_parts(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for char in text:
        if char == "," and not depth and not quote:
            parts.append("")
            continue
        parts[-1] += char
        if quote or char in "'\"":
            quote = "" if char == quote else quote or char
        else:
            depth += (char in "([") - (char in ")]")
        if depth < 0:
            break
    if depth or quote:
        raise ValueError(f"{text!r} has an unclosed bracket or quote")
    parts = [part.strip() for part in parts]
    if not parts[-1]:  # the text is empty, or ends with a comma
        parts.pop()
    return [p[1:-1] if len(p) > 1 and p[0] == p[-1] and p[0] in "'\"" else p for p in parts]
