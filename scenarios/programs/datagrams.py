"""A transport of one's own, to be tested under bursts: workers send numbered datagrams to a server, round after round.

    python datagrams.py --rounds 20 --chunks 80 --tolerate 0.1

Rank 0 is the server. A worker sends all chunks of a round over UDP, asks over TCP which are missing, and sends those
again until the missing share is `--tolerate` or less. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say who is who, as
under torchrun. Standard library only, and it runs without a testbed too.
"""

from __future__ import annotations

import argparse
import os
import selectors
import socket
import struct
import time

from testbed import Testbed

CHUNK = struct.Struct("!IIH")  # round, sequence, pass: what tells one transmission from another
PAYLOAD = bytes(1000)
DATA_PORT = 5000  # of rank r: 5000 + r, at the server


def work(rank: int, server: tuple[str, int], rounds: int, chunks: int, tolerate: float) -> None:
    testbed = Testbed(rank)
    data = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    data.connect((server[0], DATA_PORT + rank))
    with socket.create_connection(server, timeout=30) as control, control.makefile("rw", newline="\n") as stream:
        stream.write(f"{rank}\n")
        stream.flush()
        stream.readline()  # all are there
        for round_ in range(rounds):
            testbed.gate(round_)
            began = time.perf_counter()
            missing, passed = list(range(chunks)), 0
            while len(missing) > tolerate * chunks or passed == 0:
                for sequence in missing:
                    data.send(CHUNK.pack(round_, sequence, passed) + PAYLOAD)
                passed += 1
                stream.write(f"{round_} {chunks}\n")  # which are missing?
                stream.flush()
                missing = [int(word) for word in stream.readline().split()]
            latency_s = time.perf_counter() - began
            testbed.report(round_, latency_s)
            print(f"round {round_}: {passed} passes, {len(missing)} missing, {latency_s * 1e3:.1f} ms", flush=True)


def serve(address: tuple[str, int], workers: int) -> None:
    selector = selectors.DefaultSelector()
    data = {rank: socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for rank in range(1, workers + 1)}
    arrived: dict[int, set[tuple[int, int]]] = {rank: set() for rank in data}
    for rank, sock in data.items():
        sock.setblocking(False)
        sock.bind((address[0], DATA_PORT + rank))
        selector.register(sock, selectors.EVENT_READ, rank)
    with socket.create_server(address, backlog=workers) as listener:
        controls = [listener.accept()[0] for _ in range(workers)]
    streams = {control: control.makefile("rw", newline="\n") for control in controls}
    for control, stream in streams.items():
        selector.register(control, selectors.EVENT_READ, int(stream.readline()))
    for stream in streams.values():
        stream.write("go\n")
        stream.flush()
    while streams:
        for key, _ in selector.select():
            rank = key.data
            _drain(data[rank], arrived[rank])
            if key.fileobj not in streams:
                continue
            stream = streams[key.fileobj]
            question = stream.readline().split()
            if not question:
                selector.unregister(key.fileobj)
                del streams[key.fileobj]
                continue
            round_, chunks = map(int, question)
            missing = [str(sequence) for sequence in range(chunks) if (round_, sequence) not in arrived[rank]]
            stream.write(" ".join(missing) + "\n")
            stream.flush()


def _drain(sock: socket.socket, arrived: set[tuple[int, int]]) -> None:
    while True:
        try:
            packet = sock.recv(2048)
        except BlockingIOError:
            return
        round_, sequence, _ = CHUNK.unpack_from(packet)
        arrived.add((round_, sequence))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--chunks", type=int, default=80)
    parser.add_argument("--tolerate", type=float, default=0.0)
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    server = (os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", "29500")))
    if rank == 0:
        serve(server, world_size - 1)
    else:
        work(rank, server, options.rounds, options.chunks, options.tolerate)


if __name__ == "__main__":
    main()
