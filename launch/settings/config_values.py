"""Parses the values of config fields by their declared types: `--config.model.blocks=(2,2)`."""

import contextlib
import types
import typing
from collections.abc import Sequence
from typing import Any

_SCALARS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_SEVERAL = {
    int: "whole numbers in brackets, as (2,2,2,2)",
    float: "numbers in brackets, as (0.5,1)",
    str: "names in brackets, as (a,b)",
}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_UNIONS = (typing.Union, types.UnionType)


def parse(text: str, kind: Any) -> Any:
    """Returns the value that a text stands for.

    Brackets around several values, and quotes within them, may be left out: `(1,2)` or `1,2`.

    Args:
        text: as given on the command line.
        kind: declared type: int, float, bool, str, None, or a Literal, tuple, list or union of
            these. A union takes the first type that fits, none before all others and text last.

    Raises:
        ValueError: the text is not a value of this type.
        TypeError: no text can be a value of this type.
    """
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in _UNIONS:
        return _parse_first(text, sorted(inside, key=lambda k: (k is str) - (k is type(None))))
    if origin is typing.Literal:
        return _parse_first(text, [type(option) for option in inside], inside)
    if origin in (tuple, list, Sequence) and inside:
        return _parse_several(split(text), origin, inside)
    if kind is type(None) and text.lower() == "none":
        return None
    if kind is bool and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if kind is int:
        return _parse_whole(text)
    if kind in (float, str):
        return kind(text)
    if kind in (bool, type(None)):
        raise ValueError(f"{text!r} is not {describe_kind(kind)}")
    raise TypeError(f"no value of {kind} can be parsed")


def describe_kind(kind: Any) -> str:
    """Returns a description of the texts that `parse` takes for a type, such as "a number"."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in _UNIONS:
        return ", or ".join(map(describe_kind, inside))
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, inside))}"
    if origin is tuple and inside[-1] is not Ellipsis:
        return f"{len(inside)} values in brackets: {', '.join(map(describe_kind, inside))}"
    if inside:
        return _SEVERAL.get(inside[0]) or f"values in brackets, each {describe_kind(inside[0])}"
    return "none" if kind is type(None) else _SCALARS[kind]


def _parse_first(text: str, kinds: Sequence[Any], allowed: Sequence[Any] | None = None) -> Any:
    """Returns the value by the first type that fits and, if given, yields an allowed value."""
    for kind in kinds:
        try:
            value = parse(text, kind)
        except ValueError:
            continue
        if allowed is None or any(type(v) is kind and v == value for v in allowed):
            return value
    raise ValueError(f"{text!r} fits none of {kinds}")


def _parse_several(parts: list[str], container: Any, kinds: tuple[Any, ...]) -> Any:
    """Returns the elements of a tuple or list, whose type arguments are `kinds`."""
    if container is not tuple or kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(parts)
    values = [parse(part, kind) for part, kind in zip(parts, kinds, strict=True)]
    return values if container is list else tuple(values)


def _parse_whole(text: str) -> int:
    """Returns a whole number, also of "64.0": services that choose numbers may write that."""
    try:
        return int(text)
    except ValueError:
        if not float(text).is_integer():
            raise
        return int(float(text))


def split(text: str) -> list[str]:
    """Splits a text at the commas outside inner brackets and quotes: "(1,(2,3))" has two parts.

    Raises:
        ValueError: a bracket or a quote has no counterpart.
    """
    if text[:1] + text[-1:] in ("()", "[]"):
        with contextlib.suppress(ValueError):  # the brackets of "(1,2),(3,4)" are not of one pair
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
    if not parts[-1]:  # nothing, or a comma at the end
        parts.pop()
    return [p[1:-1] if len(p) > 1 and p[0] == p[-1] and p[0] in "'\"" else p for p in parts]
