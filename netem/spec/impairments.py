"""What a link does to packets beyond rate, delay and an even loss: the options that only sch_netem has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializationInfo,
    ValidationInfo,
    WithJsonSchema,
    WrapSerializer,
    WrapValidator,
)

from netem.kernel import distributions
from netem.kernel.loss_models import FourState
from netem.kernel.netem_options import I32_MAX
from netem.spec.fields import Delay, Jitter, PositiveTime, Ratio, Spec, from_file, refuse
from netem.spec.loss import Loss
from netem.spec.units import SIZE, UnitError, format_ratio, format_size, parse_ratio, parse_size_bytes

Distribution = Literal["uniform", "normal", "pareto", "paretonormal"]
Table = Annotated[tuple[Annotated[int, Field(ge=-32768, le=32767)], ...], Field(min_length=1, max_length=16384)]
"""Quantiles in units of 1/8192 of a standard deviation; in a file the path of such a table, as iproute2 has them."""


def table_of(distribution: Distribution | tuple[int, ...]) -> tuple[int, ...] | None:
    """netem's table of a distribution; None for an even one, which needs none."""
    if isinstance(distribution, str):
        return None if distribution == "uniform" else distributions.table(distribution)
    return distribution


def _read_bytes(value: object, info: ValidationInfo) -> object:
    if value is None or (isinstance(value, int) and not from_file(info)):
        return value
    text = str(value).strip()
    if text.startswith("-"):
        return -parse_size_bytes(text[1:].strip())
    try:
        return parse_size_bytes(value)
    except UnitError as error:
        raise UnitError(f"{error}; overheads may be negative ({', '.join(SIZE.units)})") from error


def _write_bytes(value: int, info: Any) -> Any:
    if not (info.context and info.context.get("with_units")):
        return value
    return f"-{format_size(-value)}" if value < 0 else format_size(value)


Bytes = Annotated[
    int,
    Field(ge=-65535, le=65535),
    BeforeValidator(_read_bytes),
    PlainSerializer(_write_bytes),
    WithJsonSchema({"type": "string", "pattern": r"^\s*-?\s*(\d+\.?\d*)\s*([kMG]|[KMG]i)?B\s*$", "examples": ["24 B"]}),
]


FOUR_STATE = "four_state"
_STATES = ("p13", "p31", "p32", "p23", "p14")


class FourStateLoss(float):
    """The mean loss of a model of four states, and the model (`netem.kernel.loss_models.FourState`)."""

    model: FourState

    def __new__(cls, model: FourState) -> FourStateLoss:
        new = super().__new__(cls, model.mean_ratio)
        new.model = model
        return new

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FourStateLoss) and self.model == other.model

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.model)

    def __reduce__(self) -> tuple[Any, ...]:
        return FourStateLoss, (self.model,)


def _read_loss(value: Any, handler: Any, info: ValidationInfo) -> Any:
    """Four states; anything else is a burst's too."""
    if isinstance(value, dict) and "correlation" in value:
        why = "sch_netem's correlation changes the mean: 10% at 25% of correlation lose 1.7%"
        raise refuse(f"is not offered, {why}; use gilbert_elliott: {{loss: 10%, burst: 2}}", "correlation")
    if not isinstance(value, dict) or FOUR_STATE not in value:
        return value if isinstance(value, FourStateLoss) else handler(value)
    options = value[FOUR_STATE]
    if len(value) > 1 or not isinstance(options, dict):
        raise refuse("expected {four_state: {p13: 2%, p31: 30%}}", FOUR_STATE)
    for key in options:
        if key not in _STATES:
            raise refuse(f"unknown key {key!r} (allowed: {', '.join(_STATES)})", FOUR_STATE, key)
    for key in _STATES[:2]:
        if key not in options:
            raise refuse("is required", FOUR_STATE, key)
    try:
        read = parse_ratio if from_file(info) else float
        return FourStateLoss(FourState(**{key: read(each) for key, each in options.items()}))
    except (ValueError, TypeError) as error:
        raise refuse(str(error), FOUR_STATE) from error


def _write_loss(loss: float, handler: Any, info: SerializationInfo) -> Any:
    if not isinstance(loss, FourStateLoss):
        return handler(loss)
    text = bool(info.context and info.context.get("with_units"))
    values = {key: getattr(loss.model, key) for key in _STATES}
    return {FOUR_STATE: {key: format_ratio(value) if text else value for key, value in values.items()}}


_SHARE = {"type": "string", "pattern": r"^\s*(\d+\.?\d*|\.\d+)\s*%\s*$", "examples": ["2%"]}
_STATES_SCHEMA = {"type": "object", "additionalProperties": False, "required": list(_STATES[:2])}
_FOUR_STATE_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": [FOUR_STATE],
    "properties": {FOUR_STATE: {**_STATES_SCHEMA, "properties": dict.fromkeys(_STATES, _SHARE)}},
}


class _AlsoFourStates:
    """The schema of a burst's loss, and of four states."""

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> Any:
        burst = handler(core)
        return {"anyOf": [*burst.get("anyOf", [burst]), _FOUR_STATE_SCHEMA]}


LinkLoss = Annotated[Loss, WrapValidator(_read_loss), WrapSerializer(_write_loss), _AlsoFourStates()]
"""A ratio or a chain, as of a burst; or four states, which only netem has. In Python a number, the mean share lost."""


class Reorder(Spec):
    """Of every `gap`-th packet the share `ratio` is not delayed, and so overtakes those that are."""

    ratio: Ratio
    gap: Annotated[int, Field(ge=1, le=2**31)] = 1


class Overhead(Spec):
    """What each packet weighs beyond its frame when the rate is worked out; with cells, rounded up to whole ones."""

    packet_bytes: Annotated[Bytes, Field(alias="packet")] = 0
    cell_bytes: Annotated[Bytes, Field(alias="cell", ge=0)] = 0
    cell_overhead_bytes: Annotated[Bytes, Field(alias="cell_overhead")] = 0


class Slot(Spec):
    """Packets leave together, in slots: `min`..`max` apart, or by a distribution of mean `delay` and `jitter`.

    At most so many packets and bytes a slot; None: any number.
    """

    min_s: Annotated[Delay | None, Field(alias="min")] = None
    max_s: Annotated[PositiveTime | None, Field(alias="max")] = None
    delay_s: Annotated[Delay | None, Field(alias="delay")] = None
    jitter_s: Annotated[Jitter | None, Field(alias="jitter")] = None
    distribution: Distribution | Table | None = None
    packets: Annotated[int, Field(ge=1, le=I32_MAX)] | None = None
    size_bytes: Annotated[Annotated[Bytes, Field(ge=1)] | None, Field(alias="bytes")] = None


class Impairments(Spec):
    """Base of `LinkShape`: the options that only the backend `netem` has."""

    ONLY_NETEM: ClassVar[tuple[str, ...]] = (
        "delay", "jitter", "distribution", "loss", "overhead", "limit", "duplicate", "corrupt", "reorder", "slot",
        "ecn",
    )  # fmt: skip
    """`loss`: where it is four states."""
    ONE_NETEM: ClassVar[tuple[str, ...]] = ("overhead", "duplicate", "slot")
    """Of these, what several netems side by side would each do by themselves: a port needs to have a single one."""

    distribution: Distribution | Table = "uniform"
    """Of the jitter."""
    overhead: Overhead | None = None
    """The rate is netem's own, and counts this as well."""
    limit: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    """Packets that netem holds, the delayed ones included; None: 1.5 x rate x delay."""
    duplicate: Ratio = 0.0
    corrupt: Ratio = 0.0
    """Share of packets in which one bit is flipped."""
    reorder: Reorder | None = None
    slot: Slot | None = None
    ecn: bool = False
    """Mark packets of transports that can be told by ECN instead of losing them."""

    def asked(self, names: tuple[str, ...]) -> Iterator[str]:
        """Which of these keys say something that only netem can do."""
        fields = {field.alias or name: (field, getattr(self, name)) for name, field in type(self).model_fields.items()}
        for key in names:
            field, value = fields[key]
            if isinstance(value, FourStateLoss) if key == "loss" else value != field.default:
                yield key
