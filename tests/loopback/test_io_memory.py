"""How much of its receive buffer a data socket uses."""

from __future__ import annotations

from typing import Any

import numpy as np

from dblp.chunks import Layout
from dblp.datagrams import DataSocket, PacketBuffer
from dblp.io import clock, wait
from dblp.sender import Batch

SESSION = 0xDEADBEEF


def feed(socks: Any, receiver: DataSocket, sizes: list[int]) -> list[int]:
    """Sends messages of so many chunks each, and returns how many messages each call has read."""
    for size in sizes:
        if size > 1:
            socks[0].setsockopt(17, 103, receiver.stride)
            socks[0].send(bytes(size * receiver.stride))
            socks[0].setsockopt(17, 103, 0)
        else:
            socks[0].send(bytes(receiver.stride))
    wait([receiver.fileno()], 2.0)
    genuine, counts = receiver._slots.fill, []
    for _ in range(1000):
        lengths, _ = genuine(receiver.fileno(), receiver._most)
        if not len(lengths):
            break
        counts.append(len(lengths))
        receiver._adapt(int(lengths.max()))
    return counts


def test_a_small_gradient_reads_few_large_messages_at_once_but_many_small_ones(socks: Any) -> None:
    """What it never writes of its 1 MB of buffer takes no memory. Where the kernel coalesces little, messages are small
    and as many are read as ever."""
    receiver = DataSocket(socks[1], Layout(3000 * 364, 364), SESSION)
    segments = receiver.segments
    assert feed(socks, receiver, [segments] * 12) == [4, 4, 4]
    counts = feed(socks, receiver, [1] * 400)
    assert counts[:4] == [4] * 4  # one small message says little of the next
    assert sorted(counts[:-1]) == counts[:-1]
    assert counts[-2] == 16
    feed(socks, receiver, [segments])
    assert receiver._most == 4
    feed(socks, receiver, [1] * 400)
    receiver._expects(7)  # what was in one round says nothing of the next
    assert receiver._most == 4


def test_a_large_gradient_uses_all_of_its_buffer(socks: Any) -> None:
    receiver = DataSocket(socks[1], Layout(10_000 * 364, 364), SESSION)
    assert receiver._most == len(receiver._slot_rows) == 16


def test_messages_that_are_read_in_turns_leave_nothing_behind(socks: Any) -> None:
    """`drained` says whether the socket is empty, however many messages a call takes."""
    layout = Layout(3000 * 364, 364)
    sender, receiver = DataSocket(socks[0], layout, SESSION), DataSocket(socks[1], layout, SESSION)
    packets = PacketBuffer(layout)
    packets.values[:] = np.arange(layout.values, dtype=np.float32).reshape(packets.values.shape)
    packets.address(SESSION, 2)
    order = np.roll(np.arange(3000), 70)
    values, got = layout.matrix(), 0
    for start in range(0, 3000, 500):
        part = order[start : start + 500]
        for at in range(0, len(part), sender.batch):
            one = part[at : at + sender.batch]
            sender.send(packets, Batch(one, np.zeros(len(one), np.int64)), clock() + 5.0)
        wait([receiver.fileno()], 2.0)
        while (received := receiver.receive(2)) is not None:
            got += len(received.rows)
            receiver.store(received, np.arange(len(received.rows)), values)
            if receiver.drained:
                break
    assert got == 3000
    assert np.array_equal(values, packets.values)
