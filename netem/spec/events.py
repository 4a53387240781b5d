"""Events: what happens to the links when. `bursts` are the short form for loss in one iteration.

This module has the types and how a file writes them; `event_checks` what must hold between an event and the rest of
the scenario; `effects` what an event does to which packets; `timeline` when.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    WithJsonSchema,
    model_serializer,
)

from netem.spec.fields import (
    Delay,
    PositiveTime,
    Rate,
    Ratio,
    Spec,
    Time,
    did_you_mean,
    from_file,
    refuse,
    shown,
)
from netem.spec.loss import Loss
from netem.spec.ranges import Ranges, range_text, read_ranges
from netem.spec.topology import QueueField
from netem.spec.units import (
    UnitError,
    format_rate,
    format_ratio,
    format_time,
    parse_rate_bps,
    parse_ratio,
    parse_time_s,
)

Phase = Literal["critical", "normal"]
Property = Literal["loss", "rate", "delay"]

SHORTEST_S = 1e-6
"""A drawn length is at least this."""
PARETO_SHAPE = 1.5
DISTRIBUTIONS = ("exponential", "uniform", "pareto")
WHEN = ("iteration", "epoch", "while", "at", "every", "random", "trace", "replay")
"""Keys that say when; an event has exactly one of them."""
WHAT = ("loss", "rate", "delay", "queue", "down", "ramp")


def _with_units(info: SerializationInfo) -> bool:
    return bool(info.context and info.context.get("with_units"))


class Length(Spec):
    """How long an event lasts: a fixed time, or one drawn from a distribution with that mean.

    uniform: between 0 and twice the mean. pareto: with the exponent `shape` above 1, smallest value
    mean * (shape - 1) / shape.
    """

    kind: Literal["fixed", "exponential", "uniform", "pareto"] = "fixed"
    mean_s: PositiveTime
    shape: Annotated[float, Field(gt=1, allow_inf_nan=False)] = PARETO_SHAPE

    def at(self, uniform: float) -> float:
        """Seconds, by inversion of the distribution at `uniform` in 0..1 (1 excluded)."""
        drawn = self.mean_s
        if self.kind == "exponential":
            drawn = -self.mean_s * math.log1p(-uniform)
        elif self.kind == "uniform":
            drawn = 2.0 * self.mean_s * uniform
        elif self.kind == "pareto":
            smallest = self.mean_s * (self.shape - 1.0) / self.shape
            drawn = smallest * (1.0 - uniform) ** (-1.0 / self.shape)
        return max(SHORTEST_S, drawn)

    def words(self) -> str:
        mean = format_time(self.mean_s)
        return mean if self.kind == "fixed" else f"a mean of {mean} ({self.kind})"


def _time(value: Any, *path: str) -> float:
    try:
        parsed = parse_time_s(value)
    except UnitError as error:
        raise refuse(str(error), *path) from error
    if parsed <= 0:
        raise refuse(f"{value} is no length; it is more than 0", *path)
    return parsed


def _read_length(value: Any, info: ValidationInfo) -> Any:
    """`10 ms`, `{exponential: 10 ms}` or `{pareto: 10 ms, shape: 1.5}`."""
    if value is None or isinstance(value, Length) or not from_file(info):
        return value
    if not isinstance(value, dict):
        return Length.model_construct(mean_s=_time(value))
    for key in value:
        if key not in (*DISTRIBUTIONS, "shape"):
            allowed = ", ".join((*DISTRIBUTIONS, "shape"))
            raise refuse(f"unknown key {key!r}{did_you_mean(str(key), DISTRIBUTIONS)} (allowed: {allowed})", key)
    kinds = [kind for kind in DISTRIBUTIONS if kind in value]
    if len(kinds) != 1:
        raise refuse(f"expected a time, or one of {', '.join(DISTRIBUTIONS)} with its mean: {{exponential: 10 ms}}")
    shape = value.get("shape", PARETO_SHAPE)
    if "shape" in value and kinds[0] != "pareto":
        raise refuse(f"only a pareto distribution has a shape, not {kinds[0]}", "shape")
    if isinstance(shape, bool) or not isinstance(shape, int | float) or not 1.0 < shape < math.inf:
        raise refuse(f"{shown(shape)} is not allowed; a shape above 1 has a mean, such as 1.5", "shape")
    return Length.model_construct(kind=kinds[0], mean_s=_time(value[kinds[0]], kinds[0]), shape=float(shape))


def _write_length(length: Length, info: SerializationInfo) -> Any:
    if not _with_units(info):
        return length.model_dump()
    mean = format_time(length.mean_s)
    if length.kind == "fixed":
        return mean
    return {length.kind: mean} | ({"shape": length.shape} if length.kind == "pareto" else {})


_TIME_TEXT: dict[str, Any] = {"type": "string", "examples": ["10 ms"]}
LengthField = Annotated[
    Length,
    BeforeValidator(_read_length),
    PlainSerializer(_write_length),
    WithJsonSchema(
        {
            "anyOf": [
                _TIME_TEXT,
                {
                    "type": "object",
                    "properties": {**dict.fromkeys(DISTRIBUTIONS, _TIME_TEXT), "shape": {"type": "number"}},
                    "additionalProperties": False,
                },
            ],
            "examples": ["10 ms", {"exponential": "10 ms"}, {"pareto": "10 ms", "shape": 1.5}],
        }
    ),
]


class Arrivals(Spec):
    """A Poisson process with that many arrivals a second or an iteration."""

    per_second: Annotated[float, Field(gt=0, le=1e5, allow_inf_nan=False)] | None = None
    per_iteration: Annotated[float, Field(gt=0, le=1e5, allow_inf_nan=False)] | None = None


class Ramp(Spec):
    """A property that goes from one value to another in equal steps.

    The first step has the value `from`, the last `to`. By time: `steps` steps over `over`. By iteration or epoch: a
    step an iteration, and neither of the two is given.
    """

    what: Property
    start: float
    stop: float
    over_s: Annotated[PositiveTime | None, Field(alias="over")] = None
    steps: Annotated[int, Field(ge=2, le=10_000)] = 20

    def value(self, step: int, steps: int) -> float:
        """Of step 0 .. steps - 1, in the property's base unit."""
        share = step / (steps - 1) if steps > 1 else 1.0
        value = self.start + (self.stop - self.start) * share
        return max(1.0, float(round(value))) if self.what == "rate" else value

    def words(self) -> str:
        write = _RAMPS[self.what][1]
        return f"{self.what} from {write(self.start)} to {write(self.stop)}"


_RAMPS: dict[Property, tuple[Callable[[object], float], Callable[[Any], str]]] = {
    "loss": (parse_ratio, format_ratio),
    "rate": (parse_rate_bps, lambda rate: format_rate(round(rate))),
    "delay": (parse_time_s, format_time),
}
_RAMP_KEYS = ("from", "to", "over", "steps")


def _read_ramp(value: Any, info: ValidationInfo) -> Any:
    """`{from: 0%, to: 90%, over: 2 s, steps: 20}`; the unit says what it is a ramp of."""
    if value is None or isinstance(value, Ramp) or not from_file(info):
        return value
    if not isinstance(value, dict):
        raise refuse(f"expected a mapping such as {{from: 0%, to: 90%, over: 2 s, steps: 20}}, got {shown(value)}")
    for key in value:
        if key not in _RAMP_KEYS:
            guess = did_you_mean(str(key), _RAMP_KEYS)
            raise refuse(f"unknown key {key!r}{guess} (allowed: {', '.join(_RAMP_KEYS)})", key)
    for key in ("from", "to"):
        if key not in value:
            raise refuse("is required: a loss (90%), a rate (1 Gbit) or a delay (5 ms)", key)
    what = next((kind for kind in _RAMPS if _reads(kind, value["from"])), None)
    if what is None:
        raise refuse(f"{shown(value['from'])} is no loss (90%), rate (1 Gbit) or delay (5 ms)", "from")
    if not _reads(what, value["to"]):
        raise refuse(f"{shown(value['to'])} is no {what} like {value['from']}", "to")
    read = _RAMPS[what][0]
    ends = {"what": what, "start": float(read(value["from"])), "stop": float(read(value["to"]))}
    return ends | {key: value[key] for key in ("over", "steps") if key in value}


def _reads(what: Property, value: object) -> bool:
    try:
        _RAMPS[what][0](value)
    except UnitError:
        return False
    return True


def _write_ramp(ramp: Ramp, info: SerializationInfo) -> Any:
    if not _with_units(info):
        return ramp.model_dump()
    write = _RAMPS[ramp.what][1]
    timed = {} if ramp.over_s is None else {"over": format_time(ramp.over_s), "steps": ramp.steps}
    return {"from": write(ramp.start), "to": write(ramp.stop), **timed}


_RAMP_SCHEMA = {
    "type": "object",
    "properties": {**{key: {"type": "string"} for key in ("from", "to", "over")}, "steps": {"type": "integer"}},
    "required": ["from", "to"],
    "additionalProperties": False,
    "examples": [{"from": "0%", "to": "90%", "over": "2 s", "steps": 20}],
}
RampField = Annotated[Ramp, BeforeValidator(_read_ramp), PlainSerializer(_write_ramp), WithJsonSchema(_RAMP_SCHEMA)]


def _ranges(what: str) -> tuple[Any, ...]:
    def read(value: Any, info: ValidationInfo) -> Any:
        return value if value is None or not from_file(info) else read_ranges(value, what=what)

    def write(ranges: Ranges, info: SerializationInfo) -> Any:
        return [range_text(ends) for ends in ranges] if _with_units(info) else ranges

    one: list[dict[str, Any]] = [{"type": "integer", "minimum": 0}, {"type": "string"}]
    schema = {"anyOf": [*one, {"type": "array", "items": {"anyOf": one}}], "examples": [40, "40..45", [3, "7..9"]]}
    return BeforeValidator(read), PlainSerializer(write), WithJsonSchema(schema)


Iterations = Annotated[Ranges, *_ranges("iteration")]
Epochs = Annotated[Ranges, *_ranges("epoch")]


class TraceRow(Spec):
    """From `at` on, until the next row: these properties, and no other of the trace."""

    at_s: Annotated[Time, Field(alias="at")]
    rate_bps: Annotated[Rate | None, Field(alias="rate")] = None
    delay_s: Annotated[Delay | None, Field(alias="delay")] = None
    loss: Ratio | None = None


class Replayed(Spec):
    """A recorded loss mask: a file, or the folder of a run and which of its transports."""

    path: str
    transport: str | None = None
    """None: all of that run whose packets were captured, if they lost the same."""
    repeat: Annotated[int, Field(ge=0)] = 0


def _read_replayed(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class Event(Spec):
    """When (exactly one key of WHEN) what (at least one of WHAT) happens where (`on`)."""

    iteration: Iterations | None = None
    """0-based, inclusive ranges."""
    epoch: Epochs | None = None
    phase: Annotated[Phase | None, Field(alias="while")] = None
    """As the workload reports it at the start of a round."""
    at_s: Annotated[Time | None, Field(alias="at")] = None
    """Seconds since the first round was let go, as all times of events."""
    every_s: Annotated[PositiveTime | None, Field(alias="every")] = None
    random: Arrivals | None = None
    trace: tuple[TraceRow, ...] | None = None
    """In a file the name of a CSV file (`traces`), or the rows."""
    replay: Annotated[Replayed | None, BeforeValidator(_read_replayed)] = None

    length: Annotated[LengthField | None, Field(alias="for")] = None
    """None: the whole round; by time until the end of the run."""
    from_s: Annotated[Time | None, Field(alias="from")] = None
    """every, random: the first moment; None: 0."""
    until_s: Annotated[PositiveTime | None, Field(alias="until")] = None
    """every, random: the last moment; None: the end of the run."""

    loss: Loss | None = None
    rate_bps: Annotated[Rate | None, Field(alias="rate")] = None
    delay_s: Annotated[Delay | None, Field(alias="delay")] = None
    queue: QueueField | None = None
    down: bool = False
    """The link is cut: everything is lost."""
    ramp: RampField | None = None

    on: tuple[str, ...] = ()
    """`worker1.up`, `worker*`, ...; after loading HOST.up, HOST.down or `SWITCH to SWITCH`. None: all workers, up."""
    match: Literal["data", "all"] = "data"
    """Which packets the loss hits."""

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in write(self).items() if value is not None and value is not False}

    @property
    def when(self) -> str:
        """The key of WHEN that this event has; the first of several."""
        given = {"while": self.phase, "at": self.at_s, "every": self.every_s}
        return next((k for k in WHEN if given.get(k, getattr(self, k, None)) is not None), "")

    @property
    def by_time(self) -> bool:
        return self.when in ("at", "every", "trace") or (self.random is not None and self.random.per_second is not None)

    @property
    def dynamic(self) -> bool:
        """Known only while the job runs, and not from its seed: which rounds it falls into."""
        return self.by_time or self.phase is not None

    @property
    def shapes(self) -> bool:
        """Whether it changes rate, delay or queue."""
        ramped = self.ramp is not None and self.ramp.what != "loss"
        traced = any(row.rate_bps is not None or row.delay_s is not None for row in self.trace or ())
        return ramped or traced or any(value is not None for value in (self.rate_bps, self.delay_s, self.queue))

    @property
    def delays(self) -> bool:
        """Whether it holds packets back."""
        ramped = self.ramp is not None and self.ramp.what == "delay"
        return ramped or bool(self.delay_s) or any(row.delay_s for row in self.trace or ())

    @property
    def loses(self) -> bool:
        ramped = self.ramp is not None and self.ramp.what == "loss"
        return ramped or self.down or self.loss is not None or any(row.loss is not None for row in self.trace or ())
