"""Expectations: conditions on the results, such as ``dblp.burst_latency.max < 0.7 *
mlt.burst_latency.max``.

A small language, parsed with `ast` and walked here; nothing is ever evaluated as Python. It has names of
results (TRANSPORT.NAME), bare words (``normal``), numbers with optional units (``95%``, ``10 ms``), ``+ - *
/``, comparisons (also chained) and ``and``, ``or``, ``not``. A name that stands for a value of every burst
round compares as "all of them".
"""

from __future__ import annotations

import ast
import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from netem.spec import units

Value = float | str | bool | tuple[float, ...] | tuple[str, ...]
Kind = Literal["number", "numbers", "text", "texts", "truth"]

_LATENCY = ("mean", "p50", "p95", "p99", "p99_9", "max", "worst_1pct_mean")
NAMES: dict[str, Kind] = {
    **{f"{group}.{name}": "number" for group in ("latency", "clean_latency", "iteration_latency") for name in _LATENCY},
    **{f"burst_latency.{name}": "number" for name in ("mean", "p50", "max")},
    **{f"burst_rounds.{name}": "numbers" for name in ("tolerance", "passes", "packets", "latency", "loss")},
    "burst_rounds.phase": "texts",
    "burst_rounds.outcome": "texts",
    "accuracy": "number",
    "perplexity": "number",
    "train_loss": "number",
    "total": "number",
    "rounds.count": "number",
    "rounds.ok": "number",
    "replicas.identical": "truth",
    **{f"queue.{name}": "number" for name in ("drops", "drops_data", "drops_in_burst", "peak", "sojourn_max")},
}
"""What a transport offers. Times in seconds, ratios as plain numbers. `burst_rounds.*`: one a burst round
and worker.
"""
TRAINED = ("accuracy", "perplexity", "train_loss")
"""Names that only a model that is trained has."""
GLOBAL_NAMES: dict[str, Kind] = {"fidelity.faithful": "truth"}
MAX_ECHO = 100
"""Characters of an expectation that a message repeats."""
WORDS = ("normal", "critical", "ok", "deadline", "censored", "lost_worker")

_NUMBER = re.compile(r"(?<![\w.])(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*(%|[A-Za-zµ]+(?:/s)?)?")
_KEYWORDS = ("and", "or", "not", "in", "is", "if", "else")
_DUMMIES: dict[Kind, Value] = {
    "number": 1.0,
    "numbers": (1.0, 1.0),
    "text": "normal",
    "texts": ("normal", "normal"),
    "truth": True,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class ExpectError(ValueError):
    """An expectation that cannot be understood, or has no value in this run. The message is for the user."""


@dataclass(frozen=True)
class Verdict:
    """`held` is None where the expectation could not be evaluated; `detail` has the values of its names."""

    text: str
    held: bool | None
    detail: str


def check(
    text: str, transports: Sequence[str], *, trains: bool = True, bursts: bool = True, queues: bool = True
) -> None:
    """Raises ExpectError unless `text` is a condition over results that a run of these transports will
    have. `trains`, `bursts`, `queues`: whether the run trains a model, has bursts, records queues.
    """
    used = names_in(text, known_names(transports), f"{transports[0]}.latency.max < 10 ms")
    for name in used:
        result = name.partition(".")[2]
        if result in TRAINED and not trains:
            raise ExpectError(f"{name} has no value: a replay trains no model")
        if result.startswith(("burst_latency.", "burst_rounds.")) and not bursts:
            raise ExpectError(f"{name} has no value: the scenario has no bursts")
        if result.startswith("queue.") and not queues:
            raise ExpectError(f"{name} has no value: no queue is recorded (microbursts, or queues: ...)")


def names_in(text: str, known: Mapping[str, Kind], example: str = "") -> list[str]:
    """The names that a condition uses. Raises ExpectError unless it is one over `known` names."""
    values: dict[str, Value | None] = {  # numbers differ, so that differences are seldom 0
        name: 2.0 + index if kind == "number" else _DUMMIES[kind] for index, (name, kind) in enumerate(known.items())
    }
    used: dict[str, Value] = {}
    try:
        _condition(text, values, used)
    except ZeroDivisionError:
        pass  # of stand-in values
    else:
        if not used:
            raise ExpectError(f"{_short(text)!r} names no result, such as {example or next(iter(known))}")
    return list(used)


def check_all(
    expect: Sequence[str],
    transports: Sequence[str],
    error: Callable[[tuple[str | int, ...], str], Exception],
    *,
    trains: bool = True,
    bursts: bool = True,
    queues: bool = True,
) -> None:
    """`check` for all; raises what `error(path, message)` (netem.spec's `Source.error`) makes of the first
    failure.
    """
    for index, text in enumerate(expect):
        try:
            check(text, transports, trains=trains, bursts=bursts, queues=queues)
        except ExpectError as problem:
            raise error(("expect", index), str(problem)) from problem


def evaluate(text: str, values: Mapping[str, Value | None]) -> Verdict:
    """The verdict on one expectation. `values` has every known name, None where the run has no such value."""
    used: dict[str, Value] = {}
    try:
        held = _condition(text, values, used)
    except ExpectError as problem:
        return Verdict(text, None, str(problem))
    except ZeroDivisionError:
        return Verdict(text, None, f"division by zero ({_shown(used)})")
    return Verdict(text, held, _shown(used))


def known_names(transports: Sequence[str]) -> dict[str, Kind]:
    return {f"{t}.{name}": kind for t in transports for name, kind in NAMES.items()} | GLOBAL_NAMES


def _shown(used: Mapping[str, Value]) -> str:
    return ", ".join(f"{name} = {_show(value)}" for name, value in used.items())


def _show(value: Value) -> str:
    if isinstance(value, tuple):
        parts = list(dict.fromkeys(f"{part:.4g}" if isinstance(part, float) else part for part in value))
        return " | ".join(parts[:4]) + (f" | ... ({len(parts)} values)" if len(parts) > 4 else "")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _condition(text: str, values: Mapping[str, Value | None], used: dict[str, Value] | None = None) -> bool:
    result = _Evaluator(values, {} if used is None else used).run(text)
    if not isinstance(result, bool):
        raise ExpectError(f"{_short(text)!r} is a value, not a condition; compare it, for example {_short(text)} < 0.5")
    return result


class _Evaluator:
    """Walks one expression."""

    def __init__(self, values: Mapping[str, Value | None], used: dict[str, Value]) -> None:
        self._values, self._used = values, used
        odd = {name.split(".")[0] for name in values if not name.split(".")[0].isidentifier()}
        # A transport may be called dblp-paper; for the parser that would be a subtraction.
        self._mangled = {name: re.sub(r"\W", "_", name) + f"_{i}_" for i, name in enumerate(sorted(odd))}

    def run(self, text: str) -> Value:
        if not isinstance(text, str) or not text.strip():
            raise ExpectError("an expectation is a text such as dblp.accuracy >= 95%")
        source = text.strip()
        for name in sorted(self._mangled, key=len, reverse=True):
            source = re.sub(rf"(?<![\w.-]){re.escape(name)}(?=\.)", self._mangled[name], source)
        source = _NUMBER.sub(_plain_number, source)
        try:
            tree = ast.parse(source, mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            hint = "; compare with ==" if re.search(r"[^=<>!]=[^=]", source) else ""
            raise ExpectError(f"{_short(text)!r} is not an expression{hint} (example: dblp.accuracy >= 95%)") from error
        return self._eval(tree.body)

    def _eval(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            return float(node.value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.Name | ast.Attribute):
            return self._name(node)
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.BoolOp):
            parts = [self._truth(part) for part in node.values]
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        raise ExpectError(f"{_source(node)!r} is not allowed; names, numbers, + - * /, comparisons, and/or/not are")

    def _name(self, node: ast.Name | ast.Attribute) -> Value:
        name = ast.unparse(node)
        for original, mangled in self._mangled.items():
            name = name.replace(mangled, original)
        if name in WORDS:
            return name
        if name in ("true", "false", "True", "False"):
            return name.lower() == "true"
        if name not in self._values:
            near = difflib.get_close_matches(name, [*self._values, *WORDS], n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(self._values))}"
            raise ExpectError(f"unknown name {_short(name)!r}{hint}")
        value = self._values[name]
        if value is None or value == ():
            raise ExpectError(f"{name} has no value in this run")
        self._used[name] = value
        return value

    def _arithmetic(self, node: ast.BinOp) -> Value:
        function = _ARITHMETIC.get(type(node.op))
        if function is None:
            raise ExpectError(f"operator in {_source(node)!r} is not allowed; + - * / are")
        left, right = self._eval(node.left), self._eval(node.right)
        if isinstance(left, tuple) and isinstance(right, tuple):
            raise ExpectError(f"{_source(node)!r} combines two lists of burst rounds")
        if isinstance(node.op, ast.Div) and right == 0 and not _has_names(node.right):
            raise ExpectError(f"{_source(node)!r} divides by zero")
        many = isinstance(left, tuple) or isinstance(right, tuple)
        results = [function(_number(a, node), _number(b, node)) for a, b in _pairs(left, right)]
        return tuple(results) if many else results[0]

    def _unary(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            return not self._truth(node.operand)
        value = self._eval(node.operand)
        if isinstance(node.op, ast.USub | ast.UAdd) and isinstance(value, float) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
        raise ExpectError(f"{_source(node)!r} is not allowed")

    def _truth(self, node: ast.expr) -> bool:
        value = self._eval(node)
        if not isinstance(value, bool):
            raise ExpectError(f"{_source(node)!r} is a value, not a condition")
        return value

    def _compare(self, node: ast.Compare) -> bool:
        left, held = self._eval(node.left), True
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self._eval(right_node)
            function = _COMPARE.get(type(op))
            if function is None:
                raise ExpectError(f"comparison in {_source(node)!r} is not allowed; < <= > >= == != are")
            for a, b in _pairs(left, right):
                if type(a) is not type(b) or (isinstance(a, str | bool) and not isinstance(op, ast.Eq | ast.NotEq)):
                    raise ExpectError(f"{_source(node)!r} compares {_kind(a)} with {_kind(b)}")
                held = held and function(a, b)
            left = right
        return held


def _has_names(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Name | ast.Attribute) for part in ast.walk(node))


def _source(node: ast.expr) -> str:
    return _short(ast.unparse(node))


def _short(text: str) -> str:
    return text if len(text) <= MAX_ECHO else f"{text[: MAX_ECHO - 3]}..."


def _pairs(left: Value, right: Value) -> list[tuple[Any, Any]]:
    """Element by element; a single value is paired with every element of a tuple."""
    if isinstance(left, tuple) and isinstance(right, tuple):
        if len(left) != len(right):
            raise ExpectError(f"two lists of burst rounds of different length, {len(left)} and {len(right)}")
        return list(zip(left, right, strict=True))
    if isinstance(left, tuple):
        return [(item, right) for item in left]
    if isinstance(right, tuple):
        return [(left, item) for item in right]
    return [(left, right)]


def _number(value: Any, node: ast.expr) -> float:
    if isinstance(value, float):
        return value
    raise ExpectError(f"{_source(node)!r} calculates with {_kind(value)}")


def _kind(value: Any) -> str:
    return (
        "true/false"
        if isinstance(value, bool)
        else "a number"
        if isinstance(value, float)
        else f"the text {_short(value)!r}"
    )


def _plain_number(match: re.Match[str]) -> str:
    """A number with a unit, in the base unit (1, seconds, bits per second, bytes)."""
    number, unit = match[1], match[2]
    if unit is None or unit in _KEYWORDS:
        return match[0]
    for quantity in (units.RATIO, units.TIME, units.RATE, units.SIZE):
        if unit in quantity.units:
            return repr(float(number) * float(quantity.units[unit]))
    allowed = [name for quantity in (units.RATIO, units.TIME, units.RATE, units.SIZE) for name in quantity.units]
    raise ExpectError(f"unknown unit {_short(unit)!r} in {_short(match[0].strip())!r}; allowed: {', '.join(allowed)}")
