"""Many datagrams in one call: complete, in order, and what does not fit is an error. A pair of local sockets."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator

import pytest

from netem.kernel.inbox import Inbox

SLOTS, SLOT_BYTES = 4, 4096


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with near, far:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 1000))
        yield near, far


def datagram(number: int, size: int) -> bytes:
    return bytes((number + place) % 251 for place in range(size))


def test_all_that_is_there_comes_in_order_and_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    """Around the size of the beginnings, and more of them than there are slots."""
    near, far = pair
    sent = [datagram(number, size) for number, size in enumerate((1, 511, 512, 513, SLOT_BYTES, 0, 20))]
    for one in sent:
        near.send(one)
    inbox = Inbox(SLOTS, SLOT_BYTES)
    first = list(inbox.receive(far))
    assert len(first) == SLOTS
    assert first + list(inbox.receive(far)) == sent


def test_a_slot_is_used_again(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    inbox = Inbox(SLOTS, SLOT_BYTES)
    for number, size in enumerate((1000, 3, 700)):
        near.send(datagram(number, size))
        assert list(inbox.receive(far)) == [datagram(number, size)]


def test_a_datagram_longer_than_a_slot(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    near.send(bytes(SLOT_BYTES + 1))
    with pytest.raises(OSError, match="more than 4096 bytes") as caught:
        list(Inbox(SLOTS, SLOT_BYTES).receive(far))
    assert caught.value.errno == errno.EMSGSIZE


def test_nothing_comes(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(BlockingIOError):
        list(Inbox(SLOTS, SLOT_BYTES).receive(pair[1]))
