"""Field types and the base class of all spec models.

Values reach a model in two ways. From a file, quantities are text with a unit and keys are the file's keys (`for`,
`delay`). From Python, quantities are numbers in the base unit that the field's name says, and keys are field names
(`for_s`, `delay_s`). The validation context `FROM_FILE` tells the two apart, so that a file can never get away with a
number that has no unit.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from functools import partial
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


def _quantity(
    parse: Callable[[object], Any], text: Callable[[Any], str], low: float, high: float, example: str, pattern: str
) -> tuple[Any, ...]:
    """Metadata of a field that is a number in Python (low..high) and text with a unit in a file."""

    def read(value: object, info: ValidationInfo) -> object:
        if value is None or (isinstance(value, int | float) and not from_file(info)):
            return value
        number = parse(value)
        if not low <= number <= high:
            raise units.UnitError(f"{value} is out of range; allowed: {text(low)} to {text(high)}")
        return number

    def write(value: Any, info: SerializationInfo) -> Any:
        return text(value) if info.context and info.context.get("with_units") else value

    return (
        Field(ge=low, le=high),  # before the reader in the list: checked after it
        BeforeValidator(read),
        PlainSerializer(write),
        WithJsonSchema(
            {"type": "string", "pattern": rf"^\s*(\d+\.?\d*|\.\d+)\s*({pattern})\s*$", "examples": [example]}
        ),
    )


_RATIO = partial(_quantity, units.parse_ratio, units.format_ratio, pattern="%")
_TIME = partial(_quantity, units.parse_time_s, units.format_time, pattern="ns|us|µs|μs|ms|s|min|h")
_RATE = partial(_quantity, units.parse_rate_bps, units.format_rate, pattern="[kMGT]?bit(/s)?")
_SIZE = partial(_quantity, units.parse_size_bytes, units.format_size, pattern="([kMG]|[KMG]i)?B")


def quantity_of_size(low: int, high: int, example: str) -> tuple[Any, ...]:
    """Metadata of a field that is a number of bytes; `64 KiB` in a file."""
    return _SIZE(low=low, high=high, example=example)


Ratio = Annotated[float, *_RATIO(low=0, high=1, example="90%")]
"""0..1; `90%` in a file."""
Time = Annotated[float, *_TIME(low=0, high=86_400, example="10 ms")]
"""Seconds, 0 or more; `10 ms` in a file."""
PositiveTime = Annotated[float, *_TIME(low=1e-9, high=86_400, example="30 s")]
Delay = Annotated[float, *_TIME(low=0, high=60, example="10 ms")]
"""Seconds; a link that delays by more than a minute is a mistake, and sch_netem overflows at 71 minutes."""
Jitter = Annotated[float, *_TIME(low=0, high=2.147483647, example="1 ms")]
"""Seconds; sch_netem cuts it at 2**31 - 1 nanoseconds."""
Rate = Annotated[int, *_RATE(low=1, high=10**13, example="1 Gbit")]
"""Bits per second, up to 10 Tbit; `1 Gbit` in a file."""
Snap = Annotated[int, *_SIZE(low=40, high=65_535, example="96 B")]
"""Bytes, at least the headers up to UDP and a chunk's own."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""Becomes part of a file's name: letters, digits, dot, underscore, hyphen; at most 64."""


def explain(error: Any) -> tuple[Path_, Path_, str]:
    """Of one entry of pydantic's `ValidationError.errors()`: its location, keys below it, and a sentence.

    The location still contains pydantic's names of union members; the keys below it need not exist.
    """
    kind, location, context = error["type"], tuple(error["loc"]), error.get("ctx", {})
    if kind == "spec":
        return location, tuple(context["path"]), context["text"]
    if kind == "missing":
        return location[:-1], location[-1:], "is required"
    if kind == "value_error":
        return location, (), str(context["error"])
    return location, (), _sentence(kind, context, error["input"], error["msg"])


_TYPES = {
    "int_type": "a whole number", "int_from_float": "a whole number", "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number", "float_parsing": "a number", "float_type": "a number",
    "finite_number": "a finite number", "bool_type": "true or false", "string_type": "text",
    "list_type": "a list", "tuple_type": "a list", "dict_type": "a mapping", "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}  # fmt: skip
_LIMITS = {
    "greater_than_equal": ("ge", "{} or more"), "greater_than": ("gt", "more than {}"),
    "less_than_equal": ("le", "{} or less"), "less_than": ("lt", "less than {}"),
}  # fmt: skip


def _sentence(kind: str, context: dict[str, Any], value: object, fallback: str) -> str:
    if kind in _TYPES:
        hint = " (write it in quotes)" if kind == "string_type" and isinstance(value, bool | int | float) else ""
        return f"expected {_TYPES[kind]}, got {shown(value)}{hint}"
    if kind in _LIMITS:
        key, words = _LIMITS[kind]
        return f"{shown(value)} is out of range; allowed: {words.format(context[key])}"
    if kind == "literal_error":
        allowed = context["expected"].replace("'", "").replace(" or ", ", ")
        return f"{shown(value)} is not allowed; allowed: {allowed}" + _guess(value, allowed)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        key = str(context["discriminator"]).strip("'")
        allowed = str(context.get("expected_tags", "train, replay, command")).replace("'", "")
        given = f"{key} {context['tag']!r} is not allowed" if "tag" in context else f"{key} is required"
        return f"{given}; allowed: {allowed}"
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} is not a valid name; it must match {context['pattern']}"
    if kind in ("too_short", "too_long"):
        wanted = context.get("min_length", context.get("max_length"))
        return f"expected {wanted} entries, got {context['actual_length']}"
    return f"{fallback.replace('Input should be', 'expected', 1)}, got {shown(value)}"


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
