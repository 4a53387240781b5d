"""The exchange before training: who takes part, and whether all mean the same run."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dblp.chunks import Layout, TensorSpec
from dblp.config import Config, Env
from dblp.dtypes import DTYPES
from dblp.errors import ConnectError, HandshakeError, PeerProtocolError
from dblp.io import Control, clock, wait
from dblp.wire import Frame, Hello, Refuse, Welcome, chunk_values

CONTROL, DATA = 0, 1
"""Purpose of a connection, in its Hello."""


@dataclass(frozen=True)
class Terms:
    """What both sides must have alike: tensors, dtype, chunking, tolerance and profile."""

    tensors: tuple[TensorSpec, ...]
    layout: Layout
    text: str
    """The terms as JSON, compared key by key."""

    @classmethod
    def of(cls, config: Config, tensors: Sequence[TensorSpec]) -> Terms:
        dtype = DTYPES[config.profile.wire_dtype]
        layout = Layout(sum(tensor.size for tensor in tensors), chunk_values(config.mtu, dtype=dtype), dtype)
        terms = {
            "tensors": [[tensor.name, list(tensor.shape)] for tensor in tensors],
            "dtype": dtype.name,
            "chunks": layout.chunks,
            "chunk_values": layout.chunk_values,
            "transport": dict(config.transport),
            "profile": dataclasses.asdict(config.profile),
            "seed": config.seed,
        }
        return cls(tuple(tensors), layout, json.dumps(terms, sort_keys=True))

    @classmethod
    def parse(cls, text: bytes, peer: str) -> Terms:
        """Terms that a peer sent. Raises PeerProtocolError when they are not terms."""
        try:
            raw = json.loads(text)
            tensors = tuple(TensorSpec(str(name), tuple(map(int, shape))) for name, shape in raw["tensors"])
            layout = Layout(sum(tensor.size for tensor in tensors), int(raw["chunk_values"]), DTYPES[raw["dtype"]])
            if not tensors or layout.chunks != raw["chunks"]:
                raise ValueError("chunk count and tensors do not fit")
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise PeerProtocolError(f"{peer} sent unusable metadata: {error}") from error
        return cls(tensors, layout, json.dumps(raw, sort_keys=True))

    def differences(self, other: Terms) -> list[str]:
        """What is not alike, in words."""
        mine, theirs = json.loads(self.text), json.loads(other.text)
        return [
            f"{key}: {_short(mine.get(key))} here, {_short(theirs.get(key))} there"
            for key in sorted(set(mine) | set(theirs))
            if mine.get(key) != theirs.get(key)
        ]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def config_differences(config: Config, terms: Terms) -> list[str]:
    """What a worker's terms have otherwise than the server's configuration (the server has no tensors of its own)."""
    return Terms.of(config, terms.tensors).differences(terms)


def first_frame(control: Control, deadline: float) -> Frame:
    """The first frame of a connection. Raises ConnectError at the deadline."""
    while True:
        frames = control.poll()
        if frames:
            if isinstance(frames[0], Refuse):
                raise HandshakeError(f"{control.peer} refused: {frames[0].reason.decode(errors='replace')}")
            return frames[0]
        if not wait([control.fileno()], deadline - clock()) and clock() >= deadline:
            raise ConnectError(f"{control.peer} said nothing before the connect deadline")


def refuse(control: Control, reason: str, limit_s: float = 2.0) -> None:
    """Tell the peer why, as far as it still listens."""
    try:
        control.send(Refuse(reason.encode()), clock() + limit_s)
    except Exception:  # the peer has gone: there is nobody to tell
        return


def connect(env: Env, port: int, limit_s: float) -> socket.socket:
    """A TCP connection to the server; tries again while nobody listens, until the limit. Raises ConnectError."""
    deadline = clock() + limit_s
    pause_s = 0.02
    while True:
        try:
            return socket.create_connection((env.master_addr, port), timeout=max(0.1, deadline - clock()))
        except OSError as error:
            if clock() + pause_s >= deadline:
                raise ConnectError(
                    f"no connection to the server at {env.master_addr}:{port} within {limit_s:g} s: {error}"
                ) from error
        idle = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        wait([idle.fileno()], pause_s)  # bounded pause: nothing tells when the server begins to listen
        idle.close()
        pause_s = min(0.5, pause_s * 1.5)


def hello(config: Config, rank: int, purpose: int, terms: Terms | None) -> Hello:
    return Hello(token_bytes(config), rank, purpose, terms.text.encode() if terms else b"")


def token_bytes(config: Config) -> bytes:
    """The run's token as 16 bytes; it may be any text."""
    return hashlib.sha256(config.token.encode()).digest()[:16]


def check_hello(control: Control, frame: Frame, config: Config, workers: int) -> Hello:
    """The Hello of a new connection. Raises HandshakeError (the peer has been told) when it is not of this run."""
    if not isinstance(frame, Hello):
        problem = f"the first frame is {type(frame).__name__}, not Hello"
    elif not hmac.compare_digest(frame.token, token_bytes(config)):
        problem = "the token is that of another run"
    elif not 1 <= frame.rank <= workers:
        problem = f"rank {frame.rank} is not in 1..{workers}"
    else:
        return frame
    refuse(control, problem)
    raise HandshakeError(f"{control.peer}: {problem}")


WELCOME_KEYS = ("phase", "tolerance", "window")


def check_welcome(frame: Frame, peer: str, needs: Sequence[str] = WELCOME_KEYS) -> tuple[int, dict[str, Any]]:
    """(session, metadata) of the server's answer. Raises PeerProtocolError unless the metadata has all it needs."""
    if not isinstance(frame, Welcome):
        raise PeerProtocolError(f"{peer} answered the Hello with {type(frame).__name__}")
    try:
        metadata = json.loads(frame.metadata)
    except ValueError as error:
        raise PeerProtocolError(f"{peer} sent unusable metadata: {error}") from error
    if not isinstance(metadata, dict) or not set(needs) <= metadata.keys():
        raise PeerProtocolError(f"{peer} sent unusable metadata: {frame.metadata[:80]!r}")
    return frame.session, metadata
