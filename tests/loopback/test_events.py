"""Reports, gates and sockets over the Unix socket of a small testbed that this test plays."""

from __future__ import annotations

import array
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dblp.config import PAPER
from dblp.errors import ConnectError, PeerProtocolError
from dblp.events import NoEvents, SocketEvents, events_from_environ
from tests.loopback.collective_world import config_of, mean_of, rounds_body, run_world, tensors_of

LIMIT_S = 10.0
RCVBUF = 1 << 17


class FakeTestbed:
    """Serves every rank in a thread: hello, gates (all ranks of a round must ask), sockets; keeps all lines."""

    def __init__(self, path: Path, ranks: int, gates: tuple[int, ...] = ()) -> None:
        self.path, self.gates = str(path), gates
        self.lines: list[dict[str, Any]] = []
        self.in_place: list[int] = []
        self._barriers = {round_: threading.Barrier(ranks, action=self._place(round_)) for round_ in gates}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _place(self, round_: int) -> Callable[[], None]:
        return lambda: self.in_place.append(round_)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("r") as lines:
            for text in lines:
                line = json.loads(text)
                self.lines.append(line)
                self._answer(sock, line)

    def _answer(self, sock: socket.socket, line: dict[str, Any]) -> None:
        if line["event"] == "hello":
            self._reply(sock, reply="hello", gates=list(self.gates))
        elif line["event"] == "gate":
            self._barriers[line["round"]].wait(LIMIT_S)
            self._reply(sock, reply="go", round=line["round"])
        elif line["event"] == "socket":
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RCVBUF)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [made.fileno()]))]
            sock.sendmsg([b'{"reply":"socket"}\n'], rights)
            made.close()

    def _reply(self, sock: socket.socket, **fields: Any) -> None:
        sock.sendall(json.dumps(fields).encode() + b"\n")

    def named(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        return [e for e in self.lines if e["event"] == event and all(e.get(k) == v for k, v in fields.items())]

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def testbed(tmp_path: Path) -> Iterator[Callable[..., FakeTestbed]]:
    made: list[FakeTestbed] = []

    def make(ranks: int = 1, gates: tuple[int, ...] = ()) -> FakeTestbed:
        made.append(FakeTestbed(tmp_path / "events.sock", ranks, gates))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_hello_names_rank_and_process_and_gets_the_gates(testbed: Any, tmp_path: Path) -> None:
    bed = testbed(gates=(40, 41))
    events = SocketEvents(bed.path, 3)
    assert events.gates == {40, 41}
    assert [line["rank"] for line in bed.named("hello")] == [3]
    events.gate(40)
    assert bed.named("gate") == [{"event": "gate", "round": 40, "rank": 3}]
    events.close()


def test_socket_comes_over_with_its_buffer(testbed: Any) -> None:
    bed = testbed()
    events = SocketEvents(bed.path, 1)
    made = events.socket("udp", 1 << 20, 1 << 21)
    assert made is not None
    with made:
        assert made.type == socket.SOCK_DGRAM
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 2 * RCVBUF
        made.bind(("127.0.0.1", 0))
    assert bed.named("socket") == [{"event": "socket", "kind": "udp", "rcvbuf": 1 << 20, "sndbuf": 1 << 21}]
    events.close()


def test_lines_of_many_threads_do_not_mix(testbed: Any) -> None:
    bed = testbed()
    events = SocketEvents(bed.path, 0)

    def report(number: int) -> None:
        for index in range(100):
            events.emit("sent", worker=number, round=index, text="x" * 200)

    threads = [threading.Thread(target=report, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    events.socket("udp", 1, 1)  # answered in order: everything before it has been read
    assert {(line["worker"], line["round"]) for line in bed.named("sent")} == {
        (number, index) for number in range(4) for index in range(100)
    }
    events.close()


def run_against(answer: bytes, tmp_path: Path) -> SocketEvents:
    """A testbed that says `answer` to the first line and closes."""
    path = str(tmp_path / "raw.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def serve() -> None:
        sock, _ = listener.accept()
        with sock, listener:
            sock.recv(1000)
            sock.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return SocketEvents(path, 0)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"", ConnectError, "closed DBLP_EVENTS before it answered 'hello'"),
        (b"what?\n", PeerProtocolError, "'hello' is not JSON: b'what\\?'"),
        (b"[]\n", PeerProtocolError, "'hello' is no object: b'\\[\\]'"),
        (b'{"error": "rank 7 is unknown"}\n', PeerProtocolError, "refused 'hello': rank 7 is unknown"),
        (b'{"gates": 5}\n', PeerProtocolError, "no list of rounds: 5"),
    ],
)
def test_answer_that_is_none_is_an_error_with_its_words(answer: bytes, kind: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=words):
        run_against(answer, tmp_path)


def test_nobody_listening_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(ConnectError, match=r"DBLP_EVENTS=.*missing.sock: No such file"):
        SocketEvents(str(tmp_path / "missing.sock"), 0)


def test_testbed_that_has_gone_is_an_error_at_the_next_report(tmp_path: Path) -> None:
    events = run_against(b'{"reply":"hello"}\n', tmp_path)
    assert events.gates == frozenset()
    with pytest.raises(ConnectError, match=r"closed DBLP_EVENTS before it answered 'gate'|has gone|no answer"):
        events.gate(0)
    with pytest.raises(ConnectError, match="the testbed at DBLP_EVENTS has gone"):
        events.emit("epoch")
    events.close()


def test_without_the_variable_every_call_does_nothing() -> None:
    events = events_from_environ(0, {})
    assert isinstance(events, NoEvents)
    events.emit("sent", round=0)
    events.gate(0)
    assert events.socket("udp", 1, 1) is None
    assert events.gates == frozenset()
    events.close()


@pytest.mark.parametrize("profile", [None, PAPER], ids=["recommended", "paper"])
def test_a_run_reports_asks_and_uses_the_sockets(testbed: Any, profile: Any) -> None:
    """Server and three workers; nobody sends in a gated round before every worker has asked."""
    bed, tensors = testbed(ranks=3, gates=(1, 2)), tensors_of(10)
    recorders = {rank: SocketEvents(bed.path, rank) for rank in range(4)}
    config = config_of({"name": "dblp", "kind": "bounded", "fixed": 0.0}, profile)
    outcome = run_world(config, rounds_body(tensors, 3), tensors, recorders=recorders).well()
    for events in recorders.values():
        events.socket("udp", 1, 1)
        events.close()
    assert bed.in_place == [1, 2]
    assert np.array_equal(outcome.results[1][2][1], mean_of(tensors, 2))
    asked = [(line["rank"], line["round"]) for line in bed.named("gate")]
    assert sorted(asked) == [(rank, round_) for rank in (1, 2, 3) for round_ in (1, 2)]
    order = [line["event"] if line["event"] == "gate" else "data" for line in bed.lines if line.get("round") == 1]
    assert order[:3] == ["gate"] * 3
    assert len(bed.named("socket", rcvbuf=64 << 20)) == 6  # one data socket for each end
    check_rows(bed)


def check_rows(bed: FakeTestbed) -> None:
    """One `sent` for each direction and one `received` beside it, with the fields that rows need."""
    for round_ in range(3):
        for worker in (1, 2, 3):
            for direction in ("up", "down"):
                (sent,) = bed.named("sent", round=round_, worker=worker, direction=direction)
                (got,) = bed.named("received", round=round_, worker=worker, direction=direction)
                assert sent["outcome"] == got["outcome"] == "ok"
                assert got["delivered"] == got["need"] == got["chunks"] == 10
                assert sent["packets_at_need"] == 10
                assert sent["packets"] >= got["delivered"] + got["duplicate"] + got["dropped_socket"]
                assert (got["foreign"], got["tolerance"], got["phase"]) == (0, 0.0, "normal")
                assert sent["latency_s"] > 0
                assert sent["bytes"] == sent["packets"] * 1472
                assert ("iteration" in sent) == (direction == "up")
