"""JSON Schema of the files, for editors: the models' own schema plus the shorthands that a file may use."""

from __future__ import annotations

from typing import Any, Literal

from netem.spec.scenario import Scenario
from netem.spec.topology import MAX_WORKERS, SHAPE_KEYS, Topology

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_WORKERS = {"type": "integer", "minimum": 1, "maximum": MAX_WORKERS}


def schema(kind: Literal["scenario", "topology"] = "scenario") -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a scenario or topology file."""
    model = Scenario if kind == "scenario" else Topology
    result = model.model_json_schema(by_alias=True, mode="validation")
    definitions = result.setdefault("$defs", {})
    topology = definitions["Topology"] if kind == "scenario" else result
    _open_topology(topology, definitions)
    if kind == "scenario":
        _open_scenario(result, definitions)
    return {"$schema": _DIALECT, **result, "title": f"dblp-netem {kind}"}


def _open_topology(topology: dict[str, Any], definitions: dict[str, Any]) -> None:
    topology["properties"] |= {
        "extends": {"type": "string", "description": "Name or path of a topology to start from."},
        "workers": {**_WORKERS, "description": "Number of workers in place of the base's."},
        "star": {
            "type": "object",
            "properties": {"workers": _WORKERS},
            "required": ["workers"],
            "additionalProperties": False,
        },
    }
    topology["anyOf"] = [
        {"required": ["extends"]},
        {"required": ["star"]},
        {"required": ["hosts", "switches", "links"]},
    ]
    del topology["required"]
    shape = definitions["LinkShape"]["properties"]
    definitions["Link"]["properties"] |= {key: shape[key] for key in SHAPE_KEYS}


def _open_scenario(result: dict[str, Any], definitions: dict[str, Any]) -> None:
    topology = definitions.pop("Topology")
    definitions["Topology"] = {"anyOf": [{"type": "string"}, topology]}
    definitions["TransportSpec"].pop("required")
    result["properties"]["extends"] = {"type": "string", "description": "Name or path of a scenario to start from."}
    workers = definitions["Burst"]["properties"]["workers"]
    workers["anyOf"] = [{"type": "string"}, *(form for form in workers["anyOf"] if form.get("type") == "array")]
    required = [key for key in result.pop("required") if key != "name"]
    result["anyOf"] = [{"required": ["extends"]}, {"required": required}]
