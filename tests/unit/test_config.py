"""DBLP_CONFIG and the environment: what is read, and how a mistake is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.config import PAPER, PROFILES, RECOMMENDED, Config, Deadlines, Env, Profile, profile_from
from dblp.errors import ConfigError

BASE = {
    "version": 1,
    "token": "00ff",
    "seed": 7,
    "transport": {"name": "mlt", "kind": "bounded", "fixed": 0.008},
    "workload": {"kind": "replay", "chunks": 10, "iterations": 2},
    "mtu": 1500,
    "deadlines": {"connect_s": 60, "round_s": 30},
}


def test_what_is_written_is_read_again() -> None:
    for profile in PROFILES.values():
        config = Config.from_mapping({**BASE, "profile": dataclasses.asdict(profile)})
        assert Config.from_json(config.to_json()) == config
        assert config.profile == profile
    assert config.deadlines == Deadlines(60, 30, 600.0)
    assert (config.name, config.is_tcp) == ("mlt", False)


def test_what_is_left_out_has_its_default() -> None:
    config = Config.from_mapping({key: BASE[key] for key in ("token", "transport", "workload")})
    assert (config.profile, config.mtu, config.seed, config.deadlines) == (RECOMMENDED, 1500, 0, Deadlines())
    assert Config.from_mapping({**BASE, "transport": {"kind": "tcp"}}).name == "tcp"


def test_the_two_profiles_answer_every_question_of_the_facts() -> None:
    differing = {f.name for f in dataclasses.fields(Profile) if getattr(PAPER, f.name) != getattr(RECOMMENDED, f.name)}
    assert differing == {"send_order", "broadcast", "broadcast_fill", "mean", "norm", "hints", "threshold", "probing"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("paper", PAPER),
        ({}, RECOMMENDED),
        ({"base": "paper"}, PAPER),
        ({"base": "paper", "hints": True}, dataclasses.replace(PAPER, hints=True)),
        ({"always_reliable": ["*.bias"]}, dataclasses.replace(RECOMMENDED, always_reliable=("*.bias",))),
        ({"pass_overhead_s": 0}, dataclasses.replace(RECOMMENDED, pass_overhead_s=0)),
    ],
)
def test_profile_by_name_or_mapping(value: Any, expected: Profile) -> None:
    assert profile_from(value) == expected
    assert Config.from_mapping({**BASE, "profile": value}).profile == expected


BAD: list[tuple[dict[str, Any], str]] = [
    ({"version": 2}, "version: 2 is not supported; this program speaks version 1"),
    ({"token": None}, "token: None is not text"),
    ({"token": 5}, "token: 5 is not text"),
    ({"seed": 1.5}, "seed: 1.5 is not a whole number"),
    ({"seed": True}, "seed: True is not a whole number"),
    ({"mtu": 500}, "mtu: 500 is not in 576..65535 bytes"),
    ({"mtu": 70_000}, "mtu: 70000 is not in 576..65535 bytes"),
    ({"mtu": "1500"}, "mtu: '1500' is not a whole number"),
    ({"speed": 1}, "speed: unknown; known are"),
    ({"transport": 5}, "transport: 5 is not a mapping"),
    ({"workload": ["replay"]}, "workload: ['replay'] is not a mapping"),
    ({"deadlines": 5}, "deadlines: 5 is not a mapping"),
    ({"deadlines": {"round_s": 0}}, "deadlines.round_s: must be above 0 s"),
    ({"deadlines": {"round_s": -1}}, "deadlines.round_s: must be above 0 s"),
    ({"deadlines": {"round_s": float("nan")}}, "deadlines.round_s: nan is not a finite number"),
    ({"deadlines": {"connect_s": float("inf")}}, "deadlines.connect_s: inf is not a finite number"),
    ({"deadlines": {"round_s": "30 s"}}, "deadlines.round_s: '30 s' is not a number"),
    ({"deadlines": {"rounds": 30}}, "deadlines.rounds: unknown; known are connect_s, round_s, step_s"),
    ({"profile": 5}, "profile: 5 is not a name or a mapping"),
    ({"profile": {"base": [1]}}, "profile: [1] is not one of recommended, paper"),
    ({"profile": "papers"}, "profile: 'papers' is not one of recommended, paper"),
    ({"profile": {"base": "papers", "hints": True}}, "profile.base: 'papers' is not one of recommended, paper"),
    ({"profile": {"probing": "fast"}}, "profile.probing: 'fast' is not one of pipelined, stop-and-wait"),
    ({"profile": {"wire_dtype": "bf16"}}, "profile.wire_dtype: 'bf16' is not one of float32, float16, bfloat16"),
    ({"profile": {"hints": 1}}, "profile.hints: 1 is not true or false"),
    ({"profile": {"hint": True}}, "profile.hint: unknown; known are"),
    ({"profile": {"pass_overhead_s": -0.1}}, "profile.pass_overhead_s: must not be negative"),
    ({"profile": {"pace_bps": -1}}, "profile.pace_bps: must not be negative"),
    ({"profile": {"pass_overhead_s": "110 ms"}}, "profile.pass_overhead_s: '110 ms' is not a number"),
    ({"profile": {"pass_overhead_s": float("inf")}}, "profile.pass_overhead_s: inf is not a finite number"),
    ({"profile": {"always_reliable": "bias"}}, "profile.always_reliable: 'bias' is not a list of texts"),
    ({"profile": {"always_reliable": [1]}}, "profile.always_reliable: (1,) is not a list of texts"),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_value_is_named_by_its_key(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_json(json.dumps({**BASE, **change}))
    assert words in str(caught.value)


@pytest.mark.parametrize("key", ["token", "transport", "workload"])
def test_required_key(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: is required"):
        Config.from_mapping({name: value for name, value in BASE.items() if name != key})


@pytest.mark.parametrize(
    ("text", "words"), [("", "not JSON"), ("[]", "must be a mapping"), ("{", "not JSON"), ("5", "mapping")]
)
def test_text_that_is_no_configuration(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config.from_json(text)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing.json: No such file"):
        Config.load(tmp_path / "missing.json")
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert Config.load(tmp_path / "config.json").seed == 7
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError):
        Config.load(tmp_path / "bytes.json")


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
KEYS = st.sampled_from([*BASE, "profile", "x"])


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.dictionaries(KEYS, JSON, max_size=3))
def test_any_value_is_accepted_or_a_config_error(change: dict[str, Any]) -> None:
    try:
        config = Config.from_json(json.dumps({**BASE, **change}))
    except ConfigError:
        return
    assert isinstance(config.profile, Profile)
    assert isinstance(config.deadlines, Deadlines)
    assert isinstance(config.name, str)


ENVIRON = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}


def test_environment() -> None:
    env = Env.from_environ(ENVIRON)
    assert (env, env.workers) == (Env(1, 4, "10.77.0.1", 29500), 3)
    assert Env.from_environ({key: ENVIRON[key] for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}) == env


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", None, "RANK: is not set: a whole number in 0..3"),
        ("RANK", "4", "RANK: '4' is not a whole number in 0..3"),
        ("RANK", "-1", "RANK: '-1' is not"),
        ("RANK", "", "RANK: '' is not"),
        ("RANK", "²", "RANK: '²' is not"),
        ("WORLD_SIZE", "1", "WORLD_SIZE: '1' is not a whole number in 2..65"),
        ("WORLD_SIZE", "66", "WORLD_SIZE: '66' is not a whole number in 2..65"),
        ("MASTER_PORT", "0", "MASTER_PORT: '0' is not"),
        ("MASTER_PORT", "65500", "MASTER_PORT: '65500' is not a whole number in 1..65035"),
        ("MASTER_ADDR", None, "MASTER_ADDR: is not set: the address of rank 0, the server"),
        ("MASTER_ADDR", "", "MASTER_ADDR: is not set"),
    ],
)
def test_bad_environment_names_the_variable(name: str, value: str | None, words: str) -> None:
    environ = {**ENVIRON, name: value}
    with pytest.raises(ConfigError) as caught:
        Env.from_environ({key: text for key, text in environ.items() if text is not None})
    assert words in str(caught.value)
