"""The few lines that a program needs to report to dblp-netem: copy them, or say the same in another language.

JSON objects, one a line, over the Unix socket that DBLP_EVENTS names. `hello` is answered with the rounds before which
the testbed wants to be asked, `gate` when such a round may start; other events have no answer. Without the variable
nothing happens, so that the program runs the same way elsewhere.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any


class Testbed:
    """One for each process."""

    def __init__(self, rank: int) -> None:
        self.rank, self.gates = rank, set[int]()
        self._stream: Any = None
        if path := os.environ.get("DBLP_EVENTS"):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(path)
            self._stream = sock.makefile("rw", encoding="utf-8", newline="\n")
            self.gates = set(self._ask(event="hello")["gates"])

    def gate(self, round_: int) -> None:
        """Before a round: returns when the burst of this round is in place."""
        if round_ in self.gates:
            self._ask(event="gate", round=round_)

    def report(self, round_: int, latency_s: float) -> None:
        """After a round: how long it took."""
        if self._stream is not None:
            self._say(event="round", round=round_, latency_s=latency_s)

    def _say(self, **event: Any) -> None:
        self._stream.write(json.dumps({"rank": self.rank, **event}) + "\n")
        self._stream.flush()

    def _ask(self, **event: Any) -> Any:
        self._say(**event)
        return json.loads(self._stream.readline())
