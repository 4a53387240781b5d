"""Errors of the transport. A caller can tell its own mistakes from the peer's by the class."""

from __future__ import annotations


class DblpError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(DblpError):
    """A configuration value is missing or not allowed.

    `path` is the key path inside the configuration, for example ("profile", "probing").
    """

    def __init__(self, path: tuple[str | int, ...], message: str) -> None:
        super().__init__(f"{'.'.join(map(str, path))}: {message}" if path else message)
        self.path = path
        self.message = message


class LocalProtocolError(DblpError):
    """This side asked a state machine for something that its state does not allow."""


class PeerProtocolError(DblpError):
    """The peer sent bytes or an order of messages that the protocol does not allow."""


class HandshakeError(DblpError):
    """The peers do not agree on the run (token, version, tensors, profile), or one refused the other."""


class ConnectError(DblpError):
    """No connection to the peer within the connect deadline."""


class PeerLost(DblpError):
    """The control connection to a peer ended before the run did."""

    def __init__(self, peer: str, round_: int, phase: str, cause: str) -> None:
        super().__init__(f"lost {peer} in round {round_} while {phase}: {cause}")
        self.peer, self.round, self.phase = peer, round_, phase


class RoundTimeout(DblpError):
    """A wait passed its deadline. Names the peer, the round and what was waited for."""

    def __init__(self, peer: str, round_: int, phase: str, limit_s: float) -> None:
        super().__init__(f"{peer}, round {round_}: {phase} took longer than {limit_s:g} s")
        self.peer, self.round, self.phase, self.limit_s = peer, round_, phase, limit_s
