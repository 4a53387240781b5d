"""Loss as files write it: a ratio, or a Gilbert-Elliott chain. In Python both are numbers, the mean share lost.

`loss: 30%`, `loss: {gilbert_elliott: {loss: 30%, burst: 5}}` (mean loss, mean number of packets lost in a row), or
`loss: {gilbert_elliott: {p: 2%, r: 10%, h: 0%, k: 100%}}`: p from good to bad, r from bad to good, h and k what passes
in the bad and in the good state.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import PlainSerializer, SerializationInfo, ValidationInfo, WithJsonSchema, WrapValidator

from netem.spec.fields import Ratio, did_you_mean, from_file, refuse, shown
from netem.spec.units import UnitError, format_ratio, parse_ratio

MODEL = "gilbert_elliott"
_MEANS, _CHAIN = ("loss", "burst"), ("p", "r", "h", "k")


class BurstyLoss(float):
    """The mean loss of a Gilbert-Elliott chain, and the chain: p, r, h, k (0..1), as of one packet."""

    p: float
    r: float
    h: float
    k: float

    def __new__(cls, p: float, r: float, h: float = 0.0, k: float = 1.0) -> BurstyLoss:
        """ValueError when one is not in 0..1, or the chain never leaves its first state."""
        for name, value in (("p", p), ("r", r), ("h", h), ("k", k)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} is {value:g}; allowed: 0% to 100%")
        if p + r == 0.0:
            raise ValueError("with p and r of 0% the chain never leaves the state it begins in")
        bad = p / (p + r)
        new = super().__new__(cls, bad * (1.0 - h) + (1.0 - bad) * (1.0 - k))
        new.p, new.r, new.h, new.k = p, r, h, k
        return new

    @classmethod
    def of_bursts(cls, loss: float, burst: float) -> BurstyLoss:
        """By mean loss and mean number of packets lost in a row. ValueError where no chain has both."""
        if not 0.0 < loss < 1.0:
            raise ValueError(f"a loss in bursts is more than 0% and less than 100%, not {format_ratio(loss)}")
        least = max(1.0, loss / (1.0 - loss))
        if not least - 1e-9 <= burst < math.inf:
            raise ValueError(
                f"a mean loss of {format_ratio(loss)} needs bursts of {least:.4g} packets or more, not {burst:g}"
            )
        r = min(1.0, 1.0 / burst)
        return cls(min(1.0, r * loss / (1.0 - loss)), r)

    @property
    def parameters(self) -> tuple[float, float, float, float]:
        return self.p, self.r, self.h, self.k

    @property
    def burst_packets(self) -> float:
        """Mean number of packets that the chain stays in the bad state; infinite where it never leaves it."""
        return 1.0 / self.r if self.r else math.inf

    @property
    def clustering(self) -> float:
        """Variance of the number of losses over that of independent ones, for many packets."""
        mean, bad = float(self), self.p / (self.p + self.r)
        memory, apart = 1.0 - self.p - self.r, self.k - self.h
        if not 0.0 < mean < 1.0 or memory <= -1.0:
            return 1.0
        covariance = bad * (1.0 - bad) * apart**2 * memory / (1.0 - memory)
        return max(1.0, 1.0 + 2.0 * covariance / (mean * (1.0 - mean)))

    def with_loss(self, ratio: float) -> BurstyLoss:
        """With an independent loss on top."""
        return BurstyLoss(self.p, self.r, self.h * (1.0 - ratio), self.k * (1.0 - ratio))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BurstyLoss) and self.parameters == other.parameters

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.parameters)

    def __reduce__(self) -> tuple[Any, ...]:
        return BurstyLoss, self.parameters


def together(one: float, other: float) -> float:
    """Two losses, one after the other, independent of each other: a chain stays one. Two chains: their mean alone."""
    if not one or not other:
        return one or other
    if isinstance(one, BurstyLoss) and not isinstance(other, BurstyLoss):
        return one.with_loss(other)
    if isinstance(other, BurstyLoss) and not isinstance(one, BurstyLoss):
        return other.with_loss(one)
    return 1.0 - (1.0 - one) * (1.0 - other)


def loss_text(loss: float) -> str:
    """`30%`, or `30% in bursts of 5`."""
    if not isinstance(loss, BurstyLoss):
        return format_ratio(loss)
    return f"{100 * float(loss):.4g}% in bursts of {loss.burst_packets:.4g}"


def loss_of(written: float | dict[str, Any]) -> float:
    """From what a model's dump has."""
    return BurstyLoss(**written[MODEL]) if isinstance(written, dict) else written


def _read(value: Any, handler: Any, info: ValidationInfo) -> Any:
    if isinstance(value, BurstyLoss):
        return value
    if not isinstance(value, dict):
        return handler(value)
    for key in value:
        if key != MODEL:
            raise refuse(f"unknown key {key!r}{did_you_mean(str(key), [MODEL])} (allowed: {MODEL})", key)
    options = value.get(MODEL)
    if not isinstance(options, dict):
        raise refuse(f"expected {{{MODEL}: {{loss: 30%, burst: 5}}}}")
    for key in options:
        if key not in (*_MEANS, *_CHAIN):
            allowed = ", ".join((*_MEANS, *_CHAIN))
            raise refuse(
                f"unknown key {key!r}{did_you_mean(str(key), (*_MEANS, *_CHAIN))} (allowed: {allowed})", MODEL, key
            )
    numbers = _numbers(options, from_file(info))
    try:
        return BurstyLoss.of_bursts(**numbers) if "burst" in numbers else BurstyLoss(**numbers)
    except ValueError as error:
        raise refuse(str(error), MODEL) from error


def _numbers(options: dict[str, Any], with_units: bool) -> dict[str, float]:
    by_means, by_chain = ([key for key in keys if key in options] for keys in (_MEANS, _CHAIN))
    if by_means and by_chain:
        raise refuse(f"{by_means[0]} and {by_chain[0]} exclude each other", MODEL, by_chain[0])
    for key in _MEANS if by_means else ("p", "r"):
        if key not in options:
            raise refuse("is required", MODEL, key)
    return {key: _number(key, value, with_units) for key, value in options.items()}


def _number(key: str, value: Any, with_units: bool) -> float:
    if key == "burst" or not with_units:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refuse(f"{shown(value)} is not allowed; a burst is a number of packets such as 5", MODEL, key)
        return float(value)
    try:
        ratio = parse_ratio(value)
    except UnitError as error:
        raise refuse(str(error), MODEL, key) from error
    if ratio > 1.0:
        raise refuse(f"{value} is out of range; allowed: 0% to 100%", MODEL, key)
    return ratio


def _write(loss: float, info: SerializationInfo) -> Any:
    text = bool(info.context and info.context.get("with_units"))
    if not isinstance(loss, BurstyLoss):
        return format_ratio(loss) if text else loss
    return {MODEL: {k: format_ratio(v) if text else v for k, v in zip(_CHAIN, loss.parameters, strict=True)}}


_RATIO_SCHEMA = {"type": "string", "pattern": r"^\s*(\d+\.?\d*|\.\d+)\s*%\s*$", "examples": ["90%"]}
_BURST_SCHEMA = {"type": "number", "minimum": 1}
Loss = Annotated[
    Ratio,
    WrapValidator(_read),
    PlainSerializer(_write),
    WithJsonSchema(
        {
            "anyOf": [
                _RATIO_SCHEMA,
                {
                    "type": "object",
                    "additionalProperties": False,
                    "required": [MODEL],
                    "properties": {
                        MODEL: {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                **dict.fromkeys(("loss", *_CHAIN), _RATIO_SCHEMA),
                                "burst": _BURST_SCHEMA,
                            },
                        }
                    },
                },
            ]
        }
    ),
]
"""0..1; `30%` in a file, or a chain."""
