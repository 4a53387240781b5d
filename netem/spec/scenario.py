"""The scenario: what is trained, over which transports, and which bursts hit which iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, SerializationInfo, ValidationInfo, WithJsonSchema

from netem.spec.command import Command
from netem.spec.events import Event
from netem.spec.fields import Name, PositiveTime, Ratio, Snap, Spec, Time, did_you_mean, from_file, refuse, shown
from netem.spec.loss import Loss
from netem.spec.ranges import range_text, read_ranges
from netem.spec.topology import Topology
from netem.spec.traffic import Background, Microburst, Queues
from netem.spec.units import parse_rate_bps, parse_time_s

Positive = Annotated[int, Field(ge=1)]

TRAIN_SAMPLES = {"digits": 1437}
"""Training samples of each data set that ships with the package (digits: 80 % of 1,797 images)."""


class Train(Spec):
    """Data parallel SGD on real data; every worker has its own shard."""

    kind: Literal["train"]
    model: Literal["digits-cnn"] = "digits-cnn"
    data: Literal["digits"] = "digits"
    epochs: Annotated[int, Field(ge=1, le=100_000)]
    batch_size: Positive
    """Samples per worker and iteration."""
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.9


class Replay(Spec):
    """Gradients of a given size without a model: for experiments with the transport alone."""

    kind: Literal["replay"]
    chunks: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    """Number of full packets, whatever the number format in them; sequence numbers have 32 bits."""
    shapes: tuple[tuple[Positive, ...], ...] | None = None
    """Shapes of tensors, instead of `chunks`."""
    iterations: Annotated[int, Field(ge=1, le=2**31)]
    iterations_per_epoch: Positive | None = None
    """None: all iterations are one epoch."""
    compute_s: Annotated[Time, Field(alias="compute")] = 0.0
    """Pause before every exchange, in seconds, in place of the backward pass."""


Workload = Annotated[Train | Replay | Command, Field(discriminator="kind")]

DETECTORS = ("schedule", "paper", "every-n-rounds", "never", "always")


class Detector(Spec):
    """What decides whether an iteration is in a critical learning regime."""

    kind: Literal["schedule", "paper", "every-n-rounds", "never", "always"]
    critical: tuple[tuple[int, int], ...] = ()
    """schedule: critical iterations as inclusive ranges."""
    eta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """paper, every-n-rounds: relative change of the gradient norm from which on it is critical."""
    n: Positive | None = None
    """every-n-rounds: window in rounds."""

    def config(self) -> dict[str, Any]:
        """Kind and the options of that kind, as the workload's configuration takes them."""
        options = {"kind": self.kind, **{k: getattr(self, k) for k in _DETECTOR_OPTIONS[self.kind]}}
        return {**options, "critical": [list(r) for r in self.critical]} if self.kind == "schedule" else options


_DETECTOR_OPTIONS: dict[str, dict[str, Any]] = {
    "schedule": {"critical": None},
    "paper": {"eta": 0.5},
    "every-n-rounds": {"n": 10, "eta": 0.5},
    "never": {},
    "always": {},
}
"""Options of each kind with their defaults; None: must be given."""


def _read_detector(value: Any, info: ValidationInfo) -> Any:
    """`paper`, `{paper: {eta: 0.5}}` or `{schedule: {critical: 0..14}}`."""
    if isinstance(value, Detector) or (isinstance(value, dict) and not from_file(info)):
        return value
    if isinstance(value, str):
        value = {value: {}}
    if not isinstance(value, dict) or len(value) != 1:
        raise refuse(f"expected one detector: a name or {{name: {{options}}}}; allowed: {', '.join(DETECTORS)}")
    ((kind, options),) = value.items()
    if kind not in DETECTORS:
        guess = did_you_mean(str(kind), DETECTORS)
        raise refuse(f"unknown detector {kind!r}{guess} (allowed: {', '.join(DETECTORS)})", kind)
    known = _DETECTOR_OPTIONS[kind]
    if not isinstance(options, dict):
        raise refuse(f"expected a mapping of options ({', '.join(known) or 'none'}), got {shown(options)}", kind)
    for key in options:
        if key not in known:
            allowed = f"(allowed: {', '.join(known) or 'none'})"
            raise refuse(f"unknown key {key!r}{did_you_mean(str(key), known)} {allowed}", kind, key)
    given = {**known, **options}
    if kind == "schedule":
        if given["critical"] is None:
            raise refuse("is required: critical iterations such as 0..14 or [0..14, 30]", kind, "critical")
        given["critical"] = read_ranges(given["critical"], kind, "critical")
    _check_numbers(kind, given)
    return Detector(kind=kind, **given)


def _check_numbers(kind: str, options: dict[str, Any]) -> None:
    n, eta = options.get("n", 1), options.get("eta", 1.0)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise refuse(f"{shown(n)} is not allowed; a number of rounds is a whole number of 1 or more", kind, "n")
    if isinstance(eta, bool) or not isinstance(eta, int | float) or not 0 < eta < float("inf"):
        raise refuse(f"{shown(eta)} is not allowed; eta is a number above 0 such as 0.5", kind, "eta")


def _write_detector(detector: Detector, info: SerializationInfo) -> Any:
    options = detector.config()
    if not (info.context and info.context.get("with_units")):
        return options
    del options["kind"]
    if detector.kind == "schedule":
        options["critical"] = [range_text(ends) for ends in detector.critical]
    return {detector.kind: options}


_DETECTOR_SCHEMA = {
    "anyOf": [
        {"enum": [kind for kind in DETECTORS if kind != "schedule"]},
        {"type": "object", "minProperties": 1, "maxProperties": 1, "propertyNames": {"enum": list(DETECTORS)}},
    ],
    "examples": ["paper", {"schedule": {"critical": "0..14"}}, {"every-n-rounds": {"n": 10, "eta": 0.5}}],
}
DetectorField = Annotated[
    Detector,
    BeforeValidator(_read_detector),
    PlainSerializer(_write_detector),
    WithJsonSchema(_DETECTOR_SCHEMA),
]


class TransportSpec(Spec):
    """One transport under test. dblp: low, high, detector; mlt: fixed; tcp: nothing (reliable)."""

    kind: Literal["dblp", "mlt", "tcp"]
    low: Ratio | None = None
    """Tolerated missing share of a round in a critical phase, 0..1."""
    high: Ratio | None = None
    """The same in a normal phase."""
    fixed: Ratio | None = None
    """The same, whatever the phase."""
    detector: DetectorField | None = None
    wire_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Number format in packets, instead of the profile's; every kind may have it."""

    @property
    def reliable(self) -> bool:
        return self.kind == "tcp"


Direction = Literal["up", "down", "both"]


class Burst(Spec):
    """Loss on one iteration's round. Up: workers to server; down: server to workers."""

    iteration: Annotated[int, Field(ge=0)]
    """0-based."""
    loss: Loss
    """Share of the matching packets dropped, 0..1: each by itself, or in bursts by a Gilbert-Elliott chain."""
    duplicate: Ratio = 0.0
    """Share of the packets that get through twice, 0..1."""
    corrupt: Ratio = 0.0
    """Share of the packets that arrive with a wrong checksum, 0..1."""
    direction: Direction = "up"
    match: Literal["data", "all"] = "data"
    """`data`: the data packets of the transport under test; `all`: control and everything else too."""
    workers: tuple[str, ...] | Literal["all"] = "all"
    """Host names; after loading always a tuple."""
    for_s: Annotated[PositiveTime | None, Field(alias="for")] = None
    """Length from the start of the round, in seconds; None: the whole round."""


class Capture(Spec):
    """Packets recorded at the switch ports that face hosts, after the loss, or at the hosts themselves."""

    at: tuple[str, ...] = ()
    """Host names; none: no capture."""
    place: Literal["port", "host"] = "port"
    """The switch port that faces the host, or the host's interface: both directions, and merged by its GRO."""
    snap_bytes: Annotated[Snap, Field(alias="snap")] = 96
    """Bytes kept of each packet."""
    rounds: Literal["all", "bursts", "none"] = "all"
    both: bool = False
    """Also the ingress ports, before the loss."""

    @property
    def enabled(self) -> bool:
        return bool(self.at) and self.rounds != "none"


class LinkSettings(Spec):
    """Which link backend carries the topology and makes the loss."""

    backend: Literal["auto", "netem", "bpf"] = "auto"
    loss_engine: Literal["auto", "netem", "bpf"] = "auto"
    """bpf: the repeatable mask, also beside netem's delay and rate."""
    loss_at: Literal["before_rate", "after_rate"] = "before_rate"
    """Whether a lost packet costs time on a link with a rate: after_rate, it does."""
    arm: Literal["gate", "preloaded", "auto"] = "gate"
    """When bursts are put in place. gate: before their rounds, while all workers wait; preloaded: all before the run,
    as rules that name their rounds; auto: preloaded where that is possible."""


class Deadlines(Spec):
    """Limits of waiting, in seconds."""

    connect_s: Annotated[PositiveTime, Field(alias="connect")] = 60.0
    round_s: Annotated[PositiveTime, Field(alias="round")] = 30.0
    """A round that takes longer is given up and recorded as censored."""


class Scenario(Spec):
    """Everything that one run needs; loaded scenarios have every default filled in."""

    shorthand_keys: ClassVar[frozenset[str]] = frozenset({"extends"})

    name: Name
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    topology: Topology
    workload: Workload
    profile: str | dict[str, Any] = "recommended"
    """A name, or options on top of a `base`; the transport's configuration says which options there are."""
    transports: dict[str, TransportSpec] = Field(default_factory=dict)
    """Run one after another, in this order. A command has variants instead."""
    bursts: tuple[Burst, ...] = ()
    events: tuple[Event, ...] = ()
    """Impairments by iteration, epoch, phase and time."""
    microbursts: tuple[Microburst, ...] = ()
    """Packets of many senders at once: loss by a queue that overflows."""
    background: tuple[Background, ...] = ()
    """Traffic between hosts during the whole run."""
    queues: Queues = Queues()
    """Ports whose queue is recorded packet by packet."""
    capture: Capture = Capture(rounds="none")
    expect: tuple[str, ...] = ()
    """Conditions on the results."""
    latencies: Literal["judged", "reported"] = "judged"
    """Whether the run is faithful only if its latencies are those of the network, not of this machine's cores."""
    link: LinkSettings = LinkSettings()
    deadlines: Deadlines = Deadlines()
    repeats: Annotated[int, Field(ge=1, le=1000)] = 1


PROFILE_UNITS: dict[str, tuple[str, str, Callable[[object], float]]] = {
    "pass_overhead": ("pass_overhead_s", "110 ms", parse_time_s),
    "pace": ("pace_bps", "500 Mbit", parse_rate_bps),
}
"""Options of a profile that have a unit, as the file names them: the transport's own name, an example, the reader."""


def profile_options(spec: Scenario) -> dict[str, Any]:
    """`base` and options under the names and in the units of the transport: `pass_overhead: 110 ms` becomes
    `pass_overhead_s: 0.11`."""
    if isinstance(spec.profile, str):
        return {"base": spec.profile}
    options = {"base": "recommended", **spec.profile}
    for key, (name, _, parse) in PROFILE_UNITS.items():
        if key in options:
            options[name] = parse(options.pop(key))
    return options


def train_iterations_per_epoch(samples: int, workers: int, batch_size: int) -> int:
    """Iterations of one epoch when `samples` are split evenly over `workers`.

    Every worker has floor(samples / workers) samples (the rest is left out, so that all workers take the same number
    of steps) and ceil(that / batch_size) batches, the last of which may be smaller. 1,437 samples, 3 workers, batches
    of 32: 479 samples, 15 iterations.
    """
    shard = samples // workers
    return -(-shard // batch_size)


def iterations_per_epoch(spec: Scenario) -> int:
    """Of a replay without epochs: all its iterations."""
    work = spec.workload
    if isinstance(work, Command):
        return work.iterations or 1
    if isinstance(work, Replay):
        return work.iterations_per_epoch or work.iterations
    return train_iterations_per_epoch(TRAIN_SAMPLES[work.data], len(spec.topology.workers), work.batch_size)


def iterations_total(spec: Scenario) -> int:
    """Iterations are 0 .. this - 1. A command that counts none has 0."""
    work = spec.workload
    if isinstance(work, Command):
        return work.iterations or 0
    return work.iterations if isinstance(work, Replay) else work.epochs * iterations_per_epoch(spec)


def epoch_of(spec: Scenario, iteration: int) -> int:
    """0-based epoch of a 0-based iteration."""
    return iteration // iterations_per_epoch(spec)
