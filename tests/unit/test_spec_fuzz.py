"""Whatever stands in a file, the answer is a spec or a SpecError; never another exception."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from netem.spec import SpecError, load_scenario_text, load_topology_text, resolved_yaml

SCENARIO: dict[str, Any] = {
    "name": "fuzz",
    "seed": 7,
    "topology": {
        "name": "t",
        "hosts": {"server": {"role": "server"}, "worker1": {"role": "worker"}},
        "switches": ["sw"],
        "links": [
            {"between": ["server", "sw"], "delay": "5 ms"},
            {"between": ["worker*", "sw"], "up": {"rate": "1 Gbit"}, "mtu": 1500},
        ],
    },
    "workload": {"kind": "replay", "chunks": 9, "iterations": 12, "compute": "1 ms"},
    "profile": {"base": "paper", "pass_overhead": "5 ms"},
    "transports": {"dblp": {"low": "1%", "high": "2%", "detector": {"schedule": {"critical": ["0..4", 7]}}}, "tcp": {}},
    "bursts": [{"iteration": 4, "loss": "90%", "workers": ["worker1"], "for": "5 ms"}],
    "capture": {"at": ["server"], "snap": "96 B"},
    "expect": ["a > 1"],
    "link": {"backend": "bpf"},
    "deadlines": {"round": "5 s"},
}

WORDS = ["", "all", "90%", "5 ms", "-1%", "1 Gbit", "star3", "worker1", "server", "sw", "*", "0..14", "paper", "up"]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.sampled_from(WORDS), st.text(max_size=6)
)
KEYS = st.sampled_from(["extends", "star", "workers", "kind", "up", "loss", "paper", "base"]) | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in below for place in places(item, (*path, key)))]


PLACES = [place for place in places(SCENARIO) if place]


def changed(place: tuple[Any, ...], value: Any, add: str | None) -> dict[str, Any]:
    result = copy.deepcopy(SCENARIO)
    target: Any = result
    for key in place[:-1]:
        target = target[key]
    if add is not None and isinstance(target, dict):
        target[add] = value
    else:
        target[place[-1]] = value
    return result


def written(value: Any) -> str:
    buffer = io.StringIO()
    YAML(typ="safe", pure=True).dump(value, buffer)
    return buffer.getvalue()


def reloads(load: Callable[[str], Any], text: str) -> Any:
    """What was once valid must load: here a SpecError is a failure too."""
    try:
        return load(text)
    except SpecError as error:
        raise AssertionError(f"{error} in\n{text}") from error


def test_the_starting_point_is_valid() -> None:
    assert load_scenario_text(written(SCENARIO)).spec.name == "fuzz"


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(PLACES), VALUES, st.none() | KEYS)
def test_a_changed_scenario(place: tuple[Any, ...], value: Any, add: str | None) -> None:
    with suppress(SpecError):
        spec = load_scenario_text(written(changed(place, value, add))).spec
        assert reloads(load_scenario_text, resolved_yaml(spec)).spec == spec


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([p for p in PLACES if p[0] == "topology" and len(p) > 1]), VALUES, st.none() | KEYS)
def test_a_changed_topology(place: tuple[Any, ...], value: Any, add: str | None) -> None:
    with suppress(SpecError):
        topology = load_topology_text(written(changed(place, value, add)["topology"]))
        assert reloads(load_topology_text, resolved_yaml(topology)) == topology


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40) | st.sampled_from([".".join(map(str, place)) for place in PLACES]), VALUES)
def test_any_override(key: str, value: Any) -> None:
    with suppress(SpecError):
        load_scenario_text(written(SCENARIO), [f"{key}={value}"])


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_any_text(text: str) -> None:
    with suppress(SpecError):
        load_scenario_text(text)
