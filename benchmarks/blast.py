"""Datagrams without a protocol, from one host to another: the yardstick of the others. Two kinds:

product   the transport's own data socket (`DataSocket`): its batches, its header, its send order, its receive
          call. No received set, no probes, no control channel, nothing stored.
plain     what one writes first: `send` and `recv_into` of one datagram at a time.

    python -m benchmarks.blast receive ADDRESS product CHUNKS TIMES
    python -m benchmarks.blast send ADDRESS product CHUNKS TIMES

Both sides print one JSON list, an object a blast, with times of the clock that all processes of a machine share
(CLOCK_MONOTONIC, seconds). A TCP connection lines the blasts up; it is silent during a blast.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.harness import out
from dblp.chunks import Layout, send_order
from dblp.datagrams import DataSocket, PacketBuffer
from dblp.sender import Batch
from dblp.wire import HEADER_BYTES, chunk_values

PORT, CONTROL_PORT = 29600, 29700
"""The data port is one of those that a testbed's links take for data."""
MTU_BYTES = 1500
BUFFER_BYTES = 64 << 20
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
SILENCE_S, GATHER_S = 0.2, 0.001
SESSION, LIMIT_S = 1, 20.0
FIRST_ROUND = 1_000_000
"""Rounds that no job has: a loss that the last job left in place is for one of its own."""

Report = dict[str, float]


def _udp(own: tuple[str, int] | None, peer: tuple[str, int] | None) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    if own:
        sock.bind(own)
    if peer:
        sock.connect(peer)
    return sock


def _receive_product(sock: socket.socket, chunks: int) -> Callable[[int], Report]:
    layout = Layout(chunks * chunk_values(MTU_BYTES), chunk_values(MTU_BYTES))
    data = DataSocket(sock, layout, SESSION)
    poller = select.poll()
    poller.register(data.fileno(), select.POLLIN)

    def one(round_: int) -> Report:
        count, last_at = 0, 0.0
        while count < chunks and poller.poll(SILENCE_S * 1000 if count else LIMIT_S * 1000):
            while (received := data.receive(round_)) is not None:
                count, last_at = count + len(received.sequences), time.monotonic()
            time.sleep(GATHER_S)  # as the transport's receiver: to wake for every few costs the sender's core
        return {"received": count, "last_at_s": last_at}

    return one


def _receive_plain(sock: socket.socket, chunks: int) -> Callable[[int], Report]:
    seconds = struct.pack("@ll", int(SILENCE_S), int(SILENCE_S % 1 * 1e6))
    buffer = bytearray(MTU_BYTES)

    def one(round_: int) -> Report:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(LIMIT_S), 0))
        sock.recv_into(buffer)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        count = 1
        receive = sock.recv_into
        try:
            while count < chunks:
                receive(buffer)
                count += 1
            last_at = time.monotonic()
        except BlockingIOError:  # something was lost
            last_at = time.monotonic() - SILENCE_S
        return {"received": count, "last_at_s": last_at}

    return one


def _send_product(sock: socket.socket, chunks: int) -> Callable[[int], Report]:
    layout = Layout(chunks * chunk_values(MTU_BYTES), chunk_values(MTU_BYTES))
    data, packets = DataSocket(sock, layout, SESSION), PacketBuffer(layout)
    packets.values += 1.0

    def one(round_: int) -> Report:
        order = send_order("rotate", chunks, seed=1, round_=round_, rank=1, direction=0)
        passes = np.zeros(chunks, np.int64)
        packets.address(SESSION, round_)
        began = time.monotonic()
        deadline = began + LIMIT_S
        for start in range(0, chunks, data.batch):
            end = start + data.batch
            data.send(packets, Batch(order[start:end], passes[start:end]), deadline)
        return {"began_at_s": began, "sent_at_s": time.monotonic(), "sent": chunks}

    return one


def _send_plain(sock: socket.socket, chunks: int) -> Callable[[int], Report]:
    datagram = bytes(HEADER_BYTES + 4 * chunk_values(MTU_BYTES))

    def one(round_: int) -> Report:
        send = sock.send
        began = time.monotonic()
        for _ in range(chunks):
            send(datagram)
        return {"began_at_s": began, "sent_at_s": time.monotonic(), "sent": chunks}

    return one


def receive(address: str, kind: str, chunks: int, times: int) -> list[Report]:
    """As many blasts as the sender makes, one report each."""
    sock = _udp((address, PORT), None)
    one = (_receive_product if kind == "product" else _receive_plain)(sock, chunks)
    with socket.create_server((address, CONTROL_PORT)) as listener:
        listener.settimeout(LIMIT_S)
        control, _ = listener.accept()
    reports = []
    with control:
        for round_ in range(FIRST_ROUND, FIRST_ROUND + times):
            control.sendall(b"g")
            reports.append(one(round_))
            control.recv(1)
    return reports


def send(address: str, kind: str, chunks: int, times: int) -> list[Report]:
    """Blasts, each when the receiver is ready for it."""
    one = (_send_product if kind == "product" else _send_plain)(_udp(None, (address, PORT)), chunks)
    control = _connect((address, CONTROL_PORT))
    reports = []
    with control:
        for round_ in range(FIRST_ROUND, FIRST_ROUND + times):
            if not control.recv(1):
                break
            time.sleep(0.005)  # the receiver is back in its wait
            reports.append(one(round_))
            control.sendall(b"d")
    return reports


def _connect(peer: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection(peer, timeout=LIMIT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def main(role: str, address: str, kind: str, chunks: str, times: str) -> None:
    """Run one side and print its reports."""
    act = {"receive": receive, "send": send}[role]
    out(json.dumps(act(address, kind, int(chunks), int(times))))


if __name__ == "__main__":
    main(*sys.argv[1:])
