"""The shipped files and the JSON Schema."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from netem.spec import (
    gates,
    iterations_total,
    load_scenario,
    load_scenario_text,
    load_topology,
    load_topology_text,
    profile_options,
    resolved_yaml,
    schema,
)

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = sorted((ROOT / "scenarios").rglob("*.yaml"))
TOPOLOGIES = sorted((ROOT / "topologies").glob("*.yaml"))


def test_all_of_them_are_there() -> None:
    expected = {
        "burst60",
        "burst70",
        "burst80",
        "burst90",
        "burst90-replay",
        "sweep-replay",
        "clean",
        "adaptive",
        "command",
        "gloo",
        "iperf3",
    }
    expected |= {"poisson", "periodic", "ramp", "trace"}
    assert {path.stem for path in SCENARIOS} >= expected
    shipped = {"star", "star3", "dumbbell", "leaf-spine", "two-site", "fat-tree4", "graph"}
    assert {path.stem for path in TOPOLOGIES} >= shipped


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_shipped_scenario_loads_and_its_resolved_form_is_equal(path: Path) -> None:
    spec = load_scenario(path).spec
    assert spec.name == path.stem
    assert load_scenario_text(resolved_yaml(spec)).spec == spec


@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda path: path.stem)
def test_a_shipped_topology_loads_and_its_resolved_form_is_equal(path: Path) -> None:
    topology = load_topology(path)
    assert topology.name == path.stem
    assert topology.workers
    assert load_topology_text(resolved_yaml(topology)) == topology


@pytest.mark.parametrize("loss", [60, 70, 80, 90])
def test_the_main_jobs(loss: int) -> None:
    spec = load_scenario(ROOT / "scenarios" / f"burst{loss}.yaml").spec
    assert iterations_total(spec) == 120
    assert [(b.iteration, b.loss, b.direction) for b in spec.bursts] == [(40, loss / 100, "up"), (90, loss / 100, "up")]
    assert gates(spec) == (40, 41, 90, 91)
    detector = spec.transports["dblp"].detector
    assert detector is not None
    assert not any(first <= b.iteration <= last for b in spec.bursts for first, last in detector.critical)


def test_the_sweep_is_stop_and_wait_without_overhead() -> None:
    spec = load_scenario("sweep-replay").spec
    assert profile_options(spec) == {"base": "paper", "pass_overhead_s": 0.0}
    assert [burst.loss for burst in spec.bursts] == [0.6, 0.7, 0.8, 0.9]


@pytest.mark.parametrize("path", [*SCENARIOS, *TOPOLOGIES], ids=lambda path: path.stem)
def test_shipped_files_explain_themselves(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert all(len(line) <= 125 for line in lines)


def accepts(form: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """Enough of JSON Schema for ours; an unknown keyword is a failure, not a pass."""
    known = {
        "$ref", "$defs", "$schema", "title", "description", "default", "examples", "type", "properties", "required",
        "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "enum", "const", "pattern", "anyOf",
        "oneOf", "discriminator", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minProperties",
        "maxProperties", "propertyNames",
    }  # fmt: skip
    assert set(form) <= known, set(form) - known
    if "$ref" in form:
        return accepts(root["$defs"][form["$ref"].rpartition("/")[2]], value, root)
    if "enum" in form and value not in form["enum"]:
        return False
    if "const" in form and value != form["const"]:
        return False
    if "anyOf" in form and not any(accepts(option, value, root) for option in form["anyOf"]):
        return False
    if "oneOf" in form and sum(accepts(option, value, root) for option in form["oneOf"]) != 1:
        return False
    types = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
    if "type" in form and form["type"] != "null" and not isinstance(value, types[form["type"]]):
        return False
    if form.get("type") == "null" and value is not None:
        return False
    if "pattern" in form and not re.search(form["pattern"], value):
        return False
    if "minimum" in form and value < form["minimum"]:
        return False
    if isinstance(value, dict):
        return _accepts_mapping(form, value, root)
    if isinstance(value, list) and "items" in form:
        return all(accepts(form["items"], item, root) for item in value)
    return True


def _accepts_mapping(form: dict[str, Any], value: dict[str, Any], root: dict[str, Any]) -> bool:
    if any(key not in value for key in form.get("required", ())):
        return False
    if len(value) > form.get("maxProperties", len(value)):
        return False
    if "propertyNames" in form and not all(accepts(form["propertyNames"], key, root) for key in value):
        return False
    properties, others = form.get("properties", {}), form.get("additionalProperties", True)
    for key, item in value.items():
        inner = properties.get(key, others)
        if inner is False or (isinstance(inner, dict) and not accepts(inner, item, root)):
            return False
    return True


def read(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_schema_accepts_scenarios_and_their_resolved_form(path: Path) -> None:
    form = schema("scenario")
    assert accepts(form, read(path.read_text(encoding="utf-8")), form)
    assert accepts(form, read(resolved_yaml(load_scenario(path).spec)), form)


@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda path: path.stem)
def test_the_schema_accepts_topologies_and_their_resolved_form(path: Path) -> None:
    form = schema("topology")
    assert accepts(form, read(path.read_text(encoding="utf-8")), form)
    assert accepts(form, read(resolved_yaml(load_topology(path))), form)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("loss: 90%", "loss: 0.9"),
        ("seed: 7", "sede: 7"),
        ("kind: train", "kind: trian"),
        ("iteration: 40", "iteration: -1"),
        ("topology: star3", "topology: {stra: {workers: 3}}"),
        ("snap: 96 B", "snap: 96"),
    ],
)
def test_the_schema_refuses(old: str, new: str) -> None:
    text = (ROOT / "scenarios" / "burst90.yaml").read_text(encoding="utf-8")
    assert old in text
    form = schema("scenario")
    assert not accepts(form, read(text.replace(old, new)), form)


def test_the_schema_accepts_shorthands() -> None:
    form = schema("topology")
    assert accepts(form, {"extends": "star3", "workers": 8, "links": [{"between": ["*", "sw"], "delay": "5 ms"}]}, form)
    group = {"workers": 3, "hosts": 1}
    assert accepts(form, {"dumbbell": {"left": 4, "right": group}, "defaults": {"rate": "1 Gbit"}}, form)
    assert not accepts(form, {"dumbbell": {"left": 4}}, form)
    scenario = schema("scenario")
    bursts = [{"iteration": 1, "loss": "9%", "workers": "w1"}]
    assert accepts(scenario, {"extends": "burst90", "bursts": bursts}, scenario)
