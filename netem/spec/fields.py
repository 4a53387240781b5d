"""Field types and the base class of all spec models.

Values reach a model in two ways. From a file, quantities are text with a unit and keys are the file's keys (`for`,
`delay`). From Python, quantities are numbers in the base unit that the field's name says, and keys are field names
(`for_s`, `delay_s`). The validation context `FROM_FILE` tells the two apart, so that a file can never get away with a
number that has no unit.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializationInfo,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from netem.spec import units
from netem.spec.source import Path_

FROM_FILE = {"from_file": True}
WITH_UNITS = {"with_units": True}


def from_file(info: ValidationInfo) -> bool:
    return bool(info.context and info.context.get("from_file"))


def refuse(message: str, *path: str | int) -> PydanticCustomError:
    """An error of a validator, at `path` below the value that it validates."""
    return PydanticCustomError("spec", "{text}", {"text": message, "path": path})


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'up'?` or an empty text."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


class Spec(BaseModel):
    """Frozen, strict about types, and unknown keys are refused with a suggestion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    shorthand_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys that a file may have here and that are expanded before the model sees them; for messages only."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        keys = {field.alias or name for name, field in cls.model_fields.items()}
        names = keys if from_file(info) else keys | set(cls.model_fields)
        for key in data:
            if key not in names:
                allowed = sorted(keys | cls.shorthand_keys)
                guess = did_you_mean(str(key), allowed)
                raise refuse(f"unknown key {key!r}{guess or ''} (allowed: {', '.join(allowed)})", key)
        return data


def _quantity(parse: Callable[[object], Any], text: Callable[[Any], str], example: str, pattern: str) -> tuple[Any, ...]:
    def read(value: object, info: ValidationInfo) -> object:
        if value is None or (isinstance(value, int | float) and not from_file(info)):
            return value
        return parse(value)

    def write(value: Any, info: SerializationInfo) -> Any:
        return text(value) if info.context and info.context.get("with_units") else value

    return (
        BeforeValidator(read),
        PlainSerializer(write),
        WithJsonSchema({"type": "string", "pattern": pattern, "examples": [example]}),
    )


_NUMBER = r"^\s*(\d+\.?\d*|\.\d+)\s*"
_ratio = _quantity(units.parse_ratio, units.format_ratio, "90%", _NUMBER + r"%\s*$")
_time = _quantity(units.parse_time_s, units.format_time, "10 ms", _NUMBER + r"(ns|us|µs|μs|ms|s|min|h)\s*$")
_rate = _quantity(units.parse_rate_bps, units.format_rate, "1 Gbit", _NUMBER + r"[kMGT]?bit(/s)?\s*$")
_size = _quantity(units.parse_size_bytes, units.format_size, "64 KiB", _NUMBER + r"([kMG]|[KMG]i)?B\s*$")

# In each, the range stands before the reader: pydantic then checks it after reading.
Ratio = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), *_ratio]
"""0..1; `90%` in a file."""
Time = Annotated[float, Field(ge=0, allow_inf_nan=False), *_time]
"""Seconds, 0 or more; `10 ms` in a file."""
PositiveTime = Annotated[float, Field(gt=0, allow_inf_nan=False), *_time]
Rate = Annotated[int, Field(gt=0, le=10**13), *_rate]
"""Bits per second, up to 10 Tbit; `1 Gbit` in a file."""
Size = Annotated[int, Field(ge=1, le=2**32 - 1), *_size]
"""Bytes; `64 KiB` in a file."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""Becomes part of a file's name: letters, digits, dot, underscore, hyphen; at most 64."""


def explain(error: Any) -> tuple[Path_, str]:
    """Place and sentence of one entry of pydantic's `ValidationError.errors()`."""
    kind, location, context, value = error["type"], tuple(error["loc"]), error.get("ctx", {}), error["input"]
    if kind == "spec":
        return (*location, *context["path"]), context["text"]
    if kind == "value_error":
        return location, str(context["error"])
    if kind == "missing":
        return location, "is required"
    return location, _sentence(kind, context, value, error["msg"])


_TYPES = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "bool_type": "true or false", "string_type": "text", "tuple_type": "a list", "dict_type": "a mapping",
    "model_type": "a mapping", "model_attributes_type": "a mapping", "finite_number": "a finite number",
}  # fmt: skip
_LIMITS = {"greater_than_equal": ("ge", "or more"), "greater_than": ("gt", ""), "less_than_equal": ("le", "or less")}


def _sentence(kind: str, context: dict[str, Any], value: object, fallback: str) -> str:
    if kind in _TYPES:
        hint = " (write it in quotes)" if kind == "string_type" and isinstance(value, bool | int | float) else ""
        return f"expected {_TYPES[kind]}, got {shown(value)}{hint}"
    if kind in _LIMITS:
        key, words = _LIMITS[kind]
        limit = f"{context[key]} {words}".strip() if words else f"more than {context[key]}"
        return f"{shown(value)} is out of range; allowed: {limit}"
    if kind == "literal_error":
        allowed = context["expected"].replace("'", "").replace(" or ", ", ")
        return f"{shown(value)} is not allowed; allowed: {allowed}" + _guess(value, allowed)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        key = str(context["discriminator"]).strip("'")
        allowed = str(context.get("expected_tags", "train, replay")).replace("'", "")
        given = f"{key} {context['tag']!r} is not allowed" if "tag" in context else f"{key} is required"
        return f"{given}; allowed: {allowed}"
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} is not a valid name; it must match {context['pattern']}"
    if kind in ("too_short", "too_long"):
        return f"expected {context.get('min_length', context.get('max_length'))} entries, got {context['actual_length']}"
    return fallback


def _guess(value: object, allowed: str) -> str:
    return did_you_mean(value, allowed.split(", ")) if isinstance(value, str) else ""


def shown(value: object) -> str:
    """A value in a message: short, in the file's terms."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
