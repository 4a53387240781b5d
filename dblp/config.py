"""Configuration of one run of the transport: frozen values, and their JSON form (`DBLP_CONFIG`).

Every question that the paper leaves open is one named field of `Profile`; `PAPER` and `RECOMMENDED` are two
complete answers.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from dblp.errors import ConfigError

T = TypeVar("T")

VERSION = 1
DEFAULT_PORT = 29500
MAX_WORKERS = 64


@dataclass(frozen=True)
class Profile:
    """How the transport behaves where the paper is silent. Times in seconds."""

    send_order: Literal["sequential", "rotate", "shuffle"] = "rotate"
    """Order of the chunks. Sequential order makes an early stop always discard the same end of the model."""
    broadcast: Literal["reliable", "bounded"] = "reliable"
    """Server to workers: everything, or with the round's tolerance (the replicas then diverge)."""
    broadcast_fill: Literal["stale", "zero"] = "stale"
    """What a worker uses for a chunk that a bounded broadcast did not deliver: its last received value, or zero."""
    mean: Literal["delivered", "all"] = "delivered"
    """Divide each chunk by the number of workers that delivered it, or by the number of workers."""
    error_feedback: bool = False
    """A worker adds what was not delivered to its next gradient."""
    norm: Literal["workers", "average"] = "workers"
    """Gradient norm for the detector: mean of the workers' norms before loss, or norm of the lossy average."""
    hints: bool = True
    """Probe, bitmap, stop and end also go out as small datagrams; TCP stays the guarantee."""
    always_reliable: tuple[str, ...] = ()
    """Patterns (fnmatch) of tensor names whose chunks must arrive whatever the tolerance."""
    threshold: Literal["integer", "float"] = "integer"
    """Needed chunks as N - floor(pN + 1e-9), or by comparing the missing share with p as a float."""
    probing: Literal["pipelined", "stop-and-wait"] = "pipelined"
    """Keep sending while a probe is outstanding, or wait for its answer."""
    pass_overhead_s: float = 0.0
    """Fixed cost added to every pass, to emulate an implementation that is slow between passes."""
    pace_bps: float = 0.0
    """Rate of each sender to one peer, in bits of IP packets a second; 0: as fast as it can."""
    wire_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Number format of gradients and mean in packets. Sums are float32 whatever it is."""
    on_deadline: Literal["skip", "accept"] = "skip"
    """At the round deadline: all workers skip the step, or the mean is taken of what has arrived."""


RECOMMENDED = Profile()
PAPER = Profile(
    send_order="sequential",
    broadcast="bounded",
    broadcast_fill="zero",
    mean="all",
    norm="average",
    hints=False,
    threshold="float",
    probing="stop-and-wait",
)
PROFILES = {"recommended": RECOMMENDED, "paper": PAPER}


@dataclass(frozen=True)
class Deadlines:
    """Limits of every wait, in seconds."""

    connect_s: float = 60.0
    round_s: float = 30.0
    """From the start of one direction of a round to its end."""
    step_s: float = 600.0
    """How long a peer may compute between two rounds."""


@dataclass(frozen=True)
class Config:
    """All that server and workers must agree on."""

    token: str
    transport: Mapping[str, Any]
    workload: Mapping[str, Any]
    seed: int = 0
    profile: Profile = RECOMMENDED
    mtu: int = 1500
    offload: bool = True
    """Let the kernel cut and merge datagrams (UDP_SEGMENT, UDP_GRO). False: every datagram is sent by itself."""
    deadlines: Deadlines = field(default_factory=Deadlines)

    @property
    def is_tcp(self) -> bool:
        return bool(self.transport.get("kind") == "tcp")

    @property
    def name(self) -> str:
        return str(self.transport.get("name", self.transport.get("kind", "bounded")))

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Raises ConfigError with the key path of the first value that is not allowed."""
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError((), f"not JSON: {error}") from error
        return cls.from_mapping(raw)

    @classmethod
    def from_mapping(cls, raw: Any) -> Config:
        if not isinstance(raw, Mapping):
            raise ConfigError((), "the configuration must be a mapping")
        values = dict(raw)
        version = values.pop("version", VERSION)
        if version != VERSION:
            raise ConfigError(("version",), f"{version!r} is not supported; this program speaks version {VERSION}")
        for key in ("token", "transport", "workload"):
            if key not in values:
                raise ConfigError((key,), "is required")
        for key in ("transport", "workload", "deadlines"):
            if not isinstance(values.get(key, {}), Mapping):
                raise ConfigError((key,), f"{values[key]!r} is not a mapping")
        if "profile" in values:
            values["profile"] = profile_from(values["profile"])
        if "deadlines" in values:
            values["deadlines"] = build(Deadlines, values["deadlines"], ("deadlines",))
        config = build(cls, values, ())
        if not 576 <= config.mtu <= 65535:
            raise ConfigError(("mtu",), f"{config.mtu} is not in 576..65535 bytes")
        for deadline in dataclasses.fields(Deadlines):
            if getattr(config.deadlines, deadline.name) <= 0:
                raise ConfigError(("deadlines", deadline.name), "must be above 0 s")
        return config

    @classmethod
    def load(cls, path: Path) -> Config:
        try:
            return cls.from_json(path.read_text())
        except OSError as error:
            raise ConfigError((), f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError((), f"cannot read {path}: {error}") from error


def profile_from(value: Any, path: tuple[str | int, ...] = ("profile",)) -> Profile:
    """A profile by name ("recommended", "paper"), or a mapping {base: name, option: value ...}."""
    if isinstance(value, str):
        value = {"base": value}
    if not isinstance(value, Mapping):
        raise ConfigError(path, f"{value!r} is not a name or a mapping")
    options = dict(value)
    base = options.pop("base", "recommended")
    if not isinstance(base, str) or base not in PROFILES:
        raise ConfigError((*path, "base") if len(value) > 1 else path, f"{base!r} is not one of {', '.join(PROFILES)}")
    if isinstance(options.get("always_reliable"), list | tuple):
        options["always_reliable"] = tuple(options["always_reliable"])
    profile = build(Profile, options, path, base=PROFILES[base])
    for key in ("pass_overhead_s", "pace_bps"):
        if getattr(profile, key) < 0:
            raise ConfigError((*path, key), "must not be negative")
    return profile


def build(cls: type[T], values: Mapping[str, Any], path: tuple[str | int, ...], base: T | None = None) -> T:
    """A frozen dataclass from a mapping, with unknown keys and wrong types refused by key path."""
    hints = get_type_hints(cls)
    for key, value in values.items():
        if key not in hints:
            raise ConfigError((*path, key), f"unknown; known are {', '.join(sorted(hints))}")
        problem = _mismatch(hints[key], value)
        if problem:
            raise ConfigError((*path, key), problem)
    if base is not None:
        return dataclasses.replace(base, **values)  # type: ignore[type-var]
    return cls(**values)


def _mismatch(hint: Any, value: Any) -> str | None:
    if get_origin(hint) is Literal:
        allowed = get_args(hint)
        return None if value in allowed else f"{value!r} is not one of {', '.join(map(str, allowed))}"
    if hint is float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return f"{value!r} is not a number"
        return None if abs(value) < float("inf") else f"{value!r} is not a finite number"
    if hint is int:
        return None if isinstance(value, int) and not isinstance(value, bool) else f"{value!r} is not a whole number"
    if hint in (bool, str):
        return None if isinstance(value, hint) else f"{value!r} is not {'true or false' if hint is bool else 'text'}"
    if get_origin(hint) is tuple:
        ok = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        return None if ok else f"{value!r} is not a list of texts"
    return None


@dataclass(frozen=True)
class Env:
    """Role and rendezvous, from the variables that torchrun, Slurm and Kubernetes users set: rank 0 is the server."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int = DEFAULT_PORT

    @property
    def workers(self) -> int:
        return self.world_size - 1

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Env:
        environ = os.environ if environ is None else environ
        world_size = _whole(environ, "WORLD_SIZE", 2, MAX_WORKERS + 1)
        rank = _whole(environ, "RANK", 0, world_size - 1)
        port = _whole(environ, "MASTER_PORT", 1, 65535 - 500, default=DEFAULT_PORT)
        if not environ.get("MASTER_ADDR"):
            raise ConfigError(("MASTER_ADDR",), "is not set: the address of rank 0, the server")
        return cls(rank, world_size, environ["MASTER_ADDR"], port)


def _whole(environ: Mapping[str, str], name: str, low: int, high: int, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise ConfigError((name,), f"is not set: a whole number in {low}..{high}")
        return default
    if not text.strip().isdecimal() or not low <= int(text) <= high:
        raise ConfigError((name,), f"{text!r} is not a whole number in {low}..{high}")
    return int(text)
