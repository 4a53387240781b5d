"""What a file may write in short for a command: its part of the JSON Schema."""

from __future__ import annotations

from typing import Any

_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_ARGUMENT = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]}
_ARGUMENTS = {"type": "array", "items": _ARGUMENT, "minItems": 1}
_VALUES = {"type": "object", "additionalProperties": _ARGUMENT}


def open_command(definitions: dict[str, Any]) -> None:
    """Numbers as arguments, a list as a program, one name as a list of names."""
    program = definitions["Program"]["properties"]
    program["argv"], program["env"] = _ARGUMENTS, _VALUES
    command = definitions["Command"]["properties"]
    command["run"]["additionalProperties"] = {"anyOf": [_ARGUMENTS, {"$ref": "#/$defs/Program"}]}
    command["env"], command["until"] = _VALUES, _TEXTS
    command["variants"]["additionalProperties"] = _VALUES
    definitions["DataFlow"]["properties"]["at"] = _TEXTS
