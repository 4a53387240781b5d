"""Fixtures of the loopback tier."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from dblp.io import udp_socket


@pytest.fixture
def socks() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = udp_socket(("127.0.0.1", 0)), udp_socket(("127.0.0.1", 0))
    one.connect(other.getsockname())
    other.connect(one.getsockname())
    yield one, other
    one.close()
    other.close()
