"""Traffic that is not the workload's: microbursts, background traffic, and which queues are watched meanwhile."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema

from netem.spec.fields import PositiveTime, Rate, Spec, Time, from_file, quantity_of_size

LONGEST_BURST_S = 10.0

_PacketSize = Annotated[int, *quantity_of_size(low=29, high=65_535, example="1500 B")]
_Count = Annotated[int, Field(ge=1, le=10_000_000)]


def _one_name(value: Any, info: ValidationInfo) -> Any:
    """`from: worker1` is `from: [worker1]`."""
    return (value,) if from_file(info) and isinstance(value, str) and value != "all" else value


_Names = Annotated[
    tuple[str, ...] | Literal["all"],
    BeforeValidator(_one_name),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class Microburst(Spec):
    """Many senders at once, into one receiver's port: packets are lost where its queue is full."""

    senders: Annotated[_Names, Field(alias="from")] = "all"
    """Host names, wildcards allowed; all: every host but the receiver. After loading always names."""
    to: str | None = None
    """None: the server. After loading always a name."""
    iteration: Annotated[int | None, Field(ge=0)] = None
    """Released with the gate of this round, 0-based."""
    at_s: Annotated[Time | None, Field(alias="at")] = None
    """Instead: seconds since the first round was let go."""
    offset_s: Annotated[Time, Field(alias="offset")] = 0.0
    """Seconds after the gate."""
    duration_s: Annotated[PositiveTime | None, Field(alias="duration")] = None
    packets: _Count | None = None
    """Instead of a duration: packets of each sender."""
    rate_bps: Annotated[Rate | None, Field(alias="rate")] = None
    """Bits per second of each sender, link-layer frames; None: as fast as the machine."""
    packet_bytes: Annotated[_PacketSize | None, Field(alias="packet")] = None
    """Bytes of an IP packet; None: the MTU."""


class Background(Spec):
    """Traffic between two hosts during the whole run."""

    kind: Literal["udp", "iperf3-tcp", "iperf3-udp"] = "udp"
    sender: Annotated[str, Field(alias="from")]
    to: str | None = None
    """None: the server."""
    rate_bps: Annotated[Rate | None, Field(alias="rate")] = None
    """Bits per second while it is on; only iperf3-tcp does without."""
    packet_bytes: Annotated[_PacketSize | None, Field(alias="packet")] = None
    """Bytes of an IP packet; None: the MTU. Not for iperf3-tcp."""
    on_s: Annotated[PositiveTime | None, Field(alias="on")] = None
    off_s: Annotated[PositiveTime | None, Field(alias="off")] = None
    """Length of the phases on and off; None: always on."""
    pattern: Literal["fixed", "exponential"] = "fixed"
    """exponential: `on` and `off` are means, drawn from the seed."""


class Queues(Spec):
    """Which switch ports record every packet's time in their queue, and when."""

    at: tuple[str, ...] | None = None
    """Host names, of the ports that face them; None: the receivers of microbursts. After loading always names."""
    during: Literal["microbursts", "run"] = "microbursts"
    before_s: Annotated[Time, Field(alias="before")] = 0.005
    after_s: Annotated[Time, Field(alias="after")] = 0.05
    """Seconds recorded beside each microburst."""
    packets: Annotated[int, Field(ge=1, le=1 << 24)] = 1 << 17
    """Most packets recorded of one port and transport, 24 bytes each."""
