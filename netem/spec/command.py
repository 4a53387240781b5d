"""A workload of arbitrary programs: what runs in which host, when the job is over, and which packets are its data.

Programs are argument vectors. Their arguments and environment may hold placeholders such as `{rank}`; `placeholders`
says which there are.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, SerializationInfo, ValidationInfo, WithJsonSchema

from netem.spec.fields import PositiveTime, Spec, did_you_mean, from_file, refuse, shown

Port = Annotated[int, Field(ge=1, le=65535)]

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*(?::[A-Za-z0-9_-]+)?)\}", re.ASCII)
VARIANT = "command"
"""What the only variant is called where none is named."""
TEXTS = ("seed", "repeat", "variant", "host", "rank", "world_size", "address", "server", "python")
"""Placeholders that every program has; `{address:HOST}` and the keys of the variant come on top."""


class PlaceholderError(ValueError):
    """A placeholder that is not known; the message says which are."""


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with `{name}` replaced, and `{{name}}` by `{name}`. Raises PlaceholderError."""

    def value(found: re.Match[str]) -> str:
        literal, name = found[1], found[2]
        if literal is not None:
            return f"{{{literal}}}"
        if name not in values:
            known = [key for key in values if ":" not in key]
            guess = did_you_mean(name, values)
            allowed = ", ".join(f"{{{key}}}" for key in known)
            raise PlaceholderError(
                f"unknown placeholder {{{name}}}{guess} (known: {allowed}, {{address:HOST}}; "
                f"write {{{{{name}}}}} for the text itself)"
            )
        return values[name]

    return _PLACEHOLDER.sub(value, text)


def _read_range(value: Any, info: ValidationInfo) -> Any:
    """`5201` or `5201..5210` -> (first, last)."""
    if isinstance(value, tuple) and not from_file(info):
        return value
    first, dots, last = str(value).partition("..")
    ends = (first.strip(), last.strip() if dots else first.strip())
    if isinstance(value, bool) or not all(end.isascii() and end.isdigit() and 0 < int(end) < 2**16 for end in ends):
        raise refuse(f"{shown(value)} is no port; write 5201, or 5201..5210 for a range (1 to 65535)")
    if int(ends[0]) > int(ends[1]):
        raise refuse(f"{value}: the first port of a range is not after the last")
    return int(ends[0]), int(ends[1])


def _write_range(value: tuple[int, int], info: SerializationInfo) -> Any:
    if not (info.context and info.context.get("with_units")):
        return list(value)
    return value[0] if value[0] == value[1] else f"{value[0]}..{value[1]}"


PortRange = Annotated[
    tuple[int, int],
    BeforeValidator(_read_range),
    PlainSerializer(_write_range),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}], "examples": [5201, "5201..5210"]}),
]


class Ready(Spec):
    """The others start when this program listens on a port."""

    tcp: Port | None = None
    udp: Port | None = None

    @property
    def port(self) -> tuple[Literal["tcp", "udp"], int]:
        return ("tcp", self.tcp) if self.tcp is not None else ("udp", self.udp or 0)


class Program(Spec):
    """What runs in one host."""

    argv: Annotated[tuple[str, ...], Field(min_length=1)]
    env: dict[str, str] = Field(default_factory=dict)
    ready: Ready | None = None
    status: Annotated[int, Field(ge=0, le=255)] | Literal["any"] = 0
    """The exit status that is not a failure."""


class DataFlow(Spec):
    """Which packets are the job's data: those to `ports` at the hosts `at`, and the answers from there."""

    proto: Literal["tcp", "udp"]
    ports: PortRange
    at: tuple[str, ...] = ()
    """Hosts that listen on these ports; after loading never empty."""
    key: tuple[tuple[int, int], ...] = ()
    """udp: half-open byte ranges of the payload that say which transmission a packet is. With them the backend bpf
    loses the same packets in every run of a seed."""


class Command(Spec):
    """Any programs, one in each host at most."""

    shorthand_keys: ClassVar[frozenset[str]] = frozenset()

    kind: Literal["command"]
    run: dict[str, Program]
    """By host; after loading in rank order."""
    env: dict[str, str] = Field(default_factory=dict)
    until: tuple[str, ...] = ()
    """Hosts whose programs end the job: when all of these have ended, the others are terminated. After loading never
    empty. They are also those who ask at gates."""
    limit_s: Annotated[PositiveTime, Field(alias="limit")] = 60.0
    """A job that takes longer has failed."""
    iterations: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """Rounds that the programs count, for bursts by iteration; None: they do not report any."""
    flow: DataFlow | None = None
    """None: everything between the hosts."""
    variants: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Name -> values of placeholders. One after another, like transports."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the variants."""
        return tuple(self.variants) or (VARIANT,)

    @property
    def ranks(self) -> dict[str, int]:
        """Host -> rank among those that run a program, in the topology's order."""
        return {host: rank for rank, host in enumerate(self.run)}


def line(argv: Sequence[str]) -> str:
    """Arguments for people: quoted where they would not be told apart otherwise, braces not."""
    return " ".join(arg if re.fullmatch(r"[^\s'\"\\;&|]+", arg) else shlex.quote(arg) for arg in argv)


@dataclass(frozen=True)
class Place:
    """What fills the placeholders of one program. `addresses`: host -> address, of the whole lab."""

    host: str
    addresses: Mapping[str, str]
    server: str
    python: str
    seed: int = 0
    repeat: int = 0
    variant: str = VARIANT


def placeholders(work: Command, place: Place) -> dict[str, str]:
    """Name -> text."""
    own: dict[str, Any] = {
        "seed": place.seed,
        "repeat": place.repeat,
        "variant": place.variant,
        "host": place.host,
        "rank": work.ranks[place.host],
        "world_size": len(work.run),
        "address": place.addresses[place.host],
        "server": place.addresses[place.server],
        "python": place.python,
    }
    others = {f"address:{host}": address for host, address in place.addresses.items()}
    return {**{key: str(value) for key, value in own.items()}, **others, **work.variants.get(place.variant, {})}


def filled(work: Command, place: Place) -> tuple[tuple[str, ...], dict[str, str]]:
    """Arguments and own environment of the program in a host. Raises PlaceholderError."""
    program, values = work.run[place.host], placeholders(work, place)
    env = {key: fill(text, values) for key, text in {**work.env, **program.env}.items()}
    return tuple(fill(argument, values) for argument in program.argv), env
