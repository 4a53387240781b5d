"""JSON Schema of the files, for editors: the models' own schema plus the shorthands that a file may use."""

from __future__ import annotations

from typing import Any, Literal

from netem.spec.command_schema import open_command
from netem.spec.scenario import Scenario
from netem.spec.shapes import MAX_K
from netem.spec.topology import MAX_HOSTS, MAX_SWITCHES, MAX_WORKERS, SHAPE_KEYS, SHAPES, Topology

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
        **_short_forms(),
    }
    topology["anyOf"] = [
        {"required": ["extends"]},
        *({"required": [form]} for form in SHAPES),
        {"required": ["hosts", "switches", "links"]},
    ]
    del topology["required"]
    definitions["HostSpec"].pop("required")
    link = definitions["Link"]
    _open_link(link["properties"], definitions)
    kept = {key: value for key, value in link["properties"].items() if key != "between"}
    topology["properties"]["defaults"] = {"type": "object", "properties": kept, "additionalProperties": False}


def _open_link(link: dict[str, Any], definitions: dict[str, Any]) -> None:
    """The short forms of a direction's properties, which may also stand for both."""
    shape = definitions["LinkShape"]["properties"]
    percent = {"type": "string", "pattern": r"^\s*(\d+\.?\d*|\.\d+)\s*%\s*$", "examples": ["25%"]}
    shape["reorder"] = {"anyOf": [percent, *shape["reorder"]["anyOf"]]}
    for properties in (shape, definitions["Slot"]["properties"]):
        properties["distribution"]["anyOf"].append({"type": "string", "description": "The file of a table."})
    policy = {"enum": link["reorder"]["enum"]}
    link |= {key: shape[key] for key in SHAPE_KEYS}
    link["reorder"] = {"default": "refuse", "anyOf": [policy, *shape["reorder"]["anyOf"]]}


def _short_forms() -> dict[str, Any]:
    """The forms that `netem.spec.shapes` expands."""

    def form(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
        properties = {**required, **optional}
        return {
            "type": "object",
            "properties": properties,
            "required": list(required),
            "additionalProperties": False,
        }

    count = {"type": "integer", "minimum": 0, "maximum": MAX_HOSTS}
    roles = {"server": {"type": "integer", "minimum": 0, "maximum": 1}, "workers": count, "hosts": count}
    group = {"anyOf": [count, {"type": "object", "properties": roles, "additionalProperties": False}]}
    switches = {"type": "integer", "minimum": 1, "maximum": MAX_SWITCHES}
    return {
        "star": form({"workers": _WORKERS}, hosts=count),
        "dumbbell": form({"left": group, "right": group}),
        "leaf_spine": form({"leaves": switches, "spines": switches, "hosts_per_leaf": group}),
        "two_site": form({"site1": group, "site2": group}),
        "fat_tree": form({"k": {"type": "integer", "minimum": 2, "maximum": MAX_K}}, hosts_per_edge=group),
    }


def _open_scenario(result: dict[str, Any], definitions: dict[str, Any]) -> None:
    topology = definitions.pop("Topology")
    definitions["Topology"] = {"anyOf": [{"type": "string"}, topology]}
    definitions["TransportSpec"].pop("required")
    open_command(definitions)
    result["properties"]["extends"] = {"type": "string", "description": "Name or path of a scenario to start from."}
    workers = definitions["Burst"]["properties"]["workers"]
    workers["anyOf"] = [{"type": "string"}, *(form for form in workers["anyOf"] if form.get("type") == "array")]
    event = definitions["Event"]["properties"]
    event["on"]["anyOf"] = [{"type": "string"}, {"type": "array", "items": event["on"].pop("items")}]
    event["on"].pop("type")
    for key in ("trace", "replay"):
        event[key]["anyOf"].insert(0, {"type": "string"})
    required = [key for key in result.pop("required") if key != "name"]
    result["anyOf"] = [{"required": ["extends"]}, {"required": required}]
