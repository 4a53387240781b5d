"""Guest side: changes of a netem port while packets pass it, as events by time make them."""

from __future__ import annotations

from typing import Any

from guest_network import Traffic
from guest_ports import SENDERS, account, port_of, rule

from netem.links.base import Shape

HELD_PACKETS, HELD_ROUNDS = 40, 6


def held_packet() -> dict[str, Any]:
    """A rule comes and goes while packets wait for the rate: each of them is counted once.

    40 frames of 1,042 bytes take 33 ms at 10 Mbit/s, but for the bucket's; so the queue is never empty at a change.
    """
    with port_of(Shape(rate_bps=10_000_000)) as (port, network), Traffic(network, SENDERS[0]) as traffic:
        arrived = 0
        for _ in range(HELD_ROUNDS):
            traffic.send(HELD_PACKETS, payload_bytes=1_000)
            port.set_loss([rule(SENDERS[0], 0.0)])
            traffic.send(HELD_PACKETS, payload_bytes=1_000)
            port.set_loss([])
            arrived += len(traffic.receive(quiet_s=0.3))
        return {"sent": 2 * HELD_PACKETS * HELD_ROUNDS, "arrived": arrived, **account(port)}


CHECKS = (held_packet,)
