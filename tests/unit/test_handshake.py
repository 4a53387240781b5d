"""The terms on which server and workers must agree."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dblp.chunks import TensorSpec
from dblp.collective.handshake import Terms, check_welcome, config_differences, hello, token_bytes
from dblp.config import PAPER, RECOMMENDED, Config, Profile
from dblp.errors import PeerProtocolError
from dblp.wire import FrameReader, Ready, Welcome, encode

TENSORS = (TensorSpec("w", (20, 50)), TensorSpec("b", ()))
CONFIG = Config(token="00ff", transport={"kind": "bounded", "fixed": 0.008}, workload={}, seed=7)
BF16 = dataclasses.replace(RECOMMENDED, wire_dtype="bfloat16")


@pytest.mark.parametrize("profile", [RECOMMENDED, BF16], ids=["float32", "bfloat16"])
def test_terms_survive_the_wire(profile: Profile) -> None:
    config = dataclasses.replace(CONFIG, profile=profile)
    terms = Terms.of(config, TENSORS)
    (frame,) = FrameReader().feed(encode(hello(config, 2, 0, terms)))
    again = Terms.parse(frame.metadata, "worker 2")
    assert (again.tensors, again.layout, again.text) == (terms.tensors, terms.layout, terms.text)
    assert again.layout.chunks == (3 if profile is RECOMMENDED else 2)
    assert terms.differences(again) == config_differences(config, again) == []
    assert (frame.rank, frame.purpose, frame.token) == (2, 0, token_bytes(config))


@pytest.mark.parametrize(
    ("config", "tensors", "keys"),
    [
        (CONFIG, (TensorSpec("v", (20, 50)), TENSORS[1]), ["tensors"]),
        (CONFIG, TENSORS[::-1], ["tensors"]),
        (CONFIG, (TensorSpec("w", (50, 50)), TENSORS[1]), ["chunks", "tensors"]),
        (dataclasses.replace(CONFIG, seed=8), TENSORS, ["seed"]),
        (dataclasses.replace(CONFIG, mtu=9000), TENSORS, ["chunk_values", "chunks"]),
        (dataclasses.replace(CONFIG, profile=PAPER), TENSORS, ["profile"]),
        (dataclasses.replace(CONFIG, profile=BF16), TENSORS, ["chunk_values", "chunks", "dtype", "profile"]),
        (dataclasses.replace(CONFIG, transport={"kind": "tcp"}), TENSORS, ["transport"]),
        (dataclasses.replace(CONFIG, token="beef"), TENSORS, []),  # in the Hello, not in the terms
        (dataclasses.replace(CONFIG, profile=RECOMMENDED), TENSORS, []),
    ],
)
def test_differences_are_named_by_key(config: Config, tensors: tuple[TensorSpec, ...], keys: list[str]) -> None:
    differences = Terms.of(CONFIG, TENSORS).differences(Terms.of(config, tensors))
    assert [text.split(":")[0] for text in differences] == keys
    assert all(" here, " in text and text.endswith(" there") for text in differences)


def test_long_values_are_cut_in_messages() -> None:
    many = [TensorSpec(f"layer{index}", (10,)) for index in range(500)]
    (text,) = [t for t in Terms.of(CONFIG, TENSORS).differences(Terms.of(CONFIG, many)) if t.startswith("tensors")]
    assert len(text) < 250
    assert "characters)" in text


def test_server_has_no_tensors_of_its_own_to_differ_in() -> None:
    assert config_differences(CONFIG, Terms.of(CONFIG, [TensorSpec("anything", (5,))])) == []


GOOD = json.loads(Terms.of(CONFIG, TENSORS).text)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"5",
        b"{}",
        json.dumps({**GOOD, "tensors": []}),
        json.dumps({**GOOD, "tensors": 5}),
        json.dumps({**GOOD, "tensors": [["w"]]}),
        json.dumps({**GOOD, "tensors": [["w", ["x"]]]}),
        json.dumps({**GOOD, "tensors": [["w", [-5]], ["b", [10]]]}),
        json.dumps({**GOOD, "chunks": 4}),
        json.dumps({**GOOD, "chunk_values": 0}),
        json.dumps({**GOOD, "chunk_values": -364}),
        json.dumps({**GOOD, "chunk_values": "x"}),
        json.dumps({**GOOD, "dtype": "float8"}),
        json.dumps({**GOOD, "dtype": ["float32"]}),
        json.dumps({key: value for key, value in GOOD.items() if key != "chunks"}),
    ],
)
def test_unusable_terms_are_the_peers_error(raw: Any) -> None:
    with pytest.raises(PeerProtocolError, match="worker 1 sent unusable metadata"):
        Terms.parse(raw if isinstance(raw, bytes) else raw.encode(), "worker 1")


def test_token_may_be_any_text() -> None:
    tokens = {token_bytes(dataclasses.replace(CONFIG, token=text)) for text in ("", "00ff", "ü", "x" * 1000)}
    assert len(tokens) == 4
    assert {len(token) for token in tokens} == {16}


@pytest.mark.parametrize("metadata", [b"", b"[]", b"5", b"{}", b'{"phase": "normal"}', b"\xff"])
def test_welcome_that_says_nothing_usable_is_the_peers_error(metadata: bytes) -> None:
    with pytest.raises(PeerProtocolError):
        check_welcome(Welcome(5, metadata), "server")


def test_welcome() -> None:
    text = b'{"phase": "normal", "tolerance": 0.408, "window": 138}'
    assert check_welcome(Welcome(5, text), "server") == (5, json.loads(text))
    assert check_welcome(Welcome(5, b"{}"), "server", needs=()) == (5, {})  # of a data connection
    with pytest.raises(PeerProtocolError, match="server answered the Hello with Ready"):
        check_welcome(Ready(1), "server")
