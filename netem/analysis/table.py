"""The summary table at the end of a run: transports side by side, measured beside oracle, verdicts below."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from netem.analysis import congestion, delays

Summary = dict[str, Any]
Cell = Callable[[dict[str, Any]], str]
MISSING = "-"
MAX_FAILED_SHOWN = 6
MAX_BURSTS_SHOWN = 8
MAX_WIDTH = 400
MIN_R_SQUARED = 0.5
"""A cost model that explains less says nothing."""
LATENCY_CAPTION = "Latency of worker to server, every round of every worker."
MEANS = "means of the burst rounds up to the packet that completes the round"


def render(summary: Summary, console: Console) -> None:
    """Prints the table and the verdicts of a summary (the content of summary.json).

    A file or a pipe has no width of its own: there the table gets the one that it needs.
    """
    if not console.is_terminal:
        needed = Measurement.get(console, console.options.update(max_width=MAX_WIDTH), _numbers(summary)).maximum
        console.width = max(console.width, needed)
    console.print(table(summary))


def table(summary: Summary) -> RenderableType:
    """Fits 100 columns with up to three transports."""
    title = (
        f"{summary['scenario']}   seed {summary['seed']}   links: {summary['backend']}, loss: {summary['loss_engine']}"
    )
    return Group(Text(title, style="bold"), _numbers(summary), Text(_caption(summary), style="dim"), *_notes(summary))


def _caption(summary: Summary) -> str:
    if not any(one["passes"] or one["packets"] for t in summary["transports"].values() for one in t["by_loss"]):
        return LATENCY_CAPTION
    if any(_pipelined(transport) for transport in summary["transports"].values()):
        beside = "packets beside the oracle's means, which has no passes for pipelined probing"
        return f"{LATENCY_CAPTION} Passes, packets: {MEANS}; {beside}."
    return f"{LATENCY_CAPTION} Passes, packets: {MEANS}, beside the oracle's means."


def _pipelined(transport: dict[str, Any]) -> bool:
    """Whether chunks may be repeated while they are on their way: passes are then no passes of the oracle."""
    probing: str | None = transport["facts"].get("profile", {}).get("probing")
    return probing == "pipelined" and transport["kind"] != "tcp"


def _numbers(summary: Summary) -> Table:
    names = list(summary["transports"])
    ratios = _shown_ratios(summary)
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    grid.add_column("", no_wrap=True)
    for name in names:
        grid.add_column(name, justify="right", no_wrap=True)
    for pair in ratios:
        grid.add_column(pair, justify="right", no_wrap=True, style="bold")
    for label, cell, ratio_name in _lines(summary):
        if label is None:
            grid.add_section()
            continue
        cells = [cell(summary["transports"][name]) for name in names]
        if all(text == MISSING for text in cells):
            continue
        shown = [_times(summary["ratios"][pair].get(ratio_name)) if ratio_name else "" for pair in ratios]
        grid.add_row(label, *cells, *shown)
    return grid


def _shown_ratios(summary: Summary) -> list[str]:
    """At most three, those with the first transport below."""
    pairs = list(summary["ratios"])
    return pairs[: min(3, max(0, len(summary["transports"]) - 1))]


def _lines(summary: Summary) -> Iterator[tuple[str | None, Cell, str | None]]:
    """(label, cell, name of the ratio); a label of None starts a new section."""
    section = (None, _nothing, None)
    yield from (
        ("burst latency, max", _time("burst_latency_s", "max"), "burst_max"),
        ("burst latency, mean", _time("burst_latency_s", "mean"), "burst_mean"),
        ("latency, mean", _time("latency_s", "mean"), "mean"),
        ("latency, p95", _time("latency_s", "p95"), "p95"),
        ("latency, p99", _time("latency_s", "p99"), "p99"),
        ("latency, max", _time("latency_s", "max"), "max"),
        ("latency, worst 1 %", _time("latency_s", "worst_1pct_mean"), "worst_1pct_mean"),
        ("total time", lambda t: seconds(t["total_s"]), "total"),
    )
    yield section
    iterations = sorted({b["iteration"] for t in summary["transports"].values() for b in t["burst_rounds"]})
    for iteration in iterations[:MAX_BURSTS_SHOWN]:
        yield f"burst at {iteration}, max", _burst(iteration), None
    yield "phase in bursts", _phases, None
    yield section
    yield from _loss_lines(summary)
    yield "delay, median / asked", delay_cell, None
    yield from _queue_lines()
    yield section
    yield "accuracy", lambda t: _percent(t["accuracy"]), None
    yield "perplexity", lambda t: _number(t["perplexity"]), None
    yield "training loss", lambda t: _number(t["train_loss"]), None
    yield "replicas identical", lambda t: {True: "yes", False: "NO", None: MISSING}[t["replicas_identical"]], None
    yield "rounds not ok", _not_ok, None
    yield "waiting for a core", _waiting, None


def _waiting(transport: dict[str, Any]) -> str:
    """The transport's threads; in burst rounds where there are any."""
    machine = transport["machine"]
    found = machine["waiting_for_a_core"]
    share = found["other_rounds"] if found["burst_rounds"] is None else found["burst_rounds"]
    return _percent(share) + (" !" if machine["busy"] else "")


def _loss_lines(summary: Summary) -> Iterator[tuple[str | None, Cell, str | None]]:
    transports = list(summary["transports"].values())
    pipelined = any(_pipelined(transport) for transport in transports)
    for loss in sorted({one["requested"] for t in transports for one in t["by_loss"]}):
        yield f"loss {100 * loss:.4g} %: achieved", _achieved(loss), None
        own = next(one.get("burst_loss") for t in transports for one in t["by_loss"] if one["requested"] == loss)
        if own is not None and own != loss:
            yield f"  ({100 * own:.4g} % burst + links)", _nothing, None
        yield "  mean burst / asked", _mean_burst(loss), None
        yield f"  passes {'(pipelined)' if pipelined else '/ oracle'}", _beside_oracle(loss, "passes"), None
        yield "  packets / oracle", _beside_oracle(loss, "packets"), None


def _queue_lines() -> Iterator[tuple[str | None, Cell, str | None]]:
    yield "queue drops, data / all", _queue(lambda q: f"{_count(q['drops_data'])} / {_count(q['drops'])}"), None
    yield "  share in microbursts", _queue(lambda q: _percent(q["drops_in_burst"])), None
    yield "  peak depth of the limit", _queue(lambda q: _percent(q["peak"])), None


def _queue(text: Callable[[dict[str, float | None]], str]) -> Cell:
    def cell(transport: dict[str, Any]) -> str:
        found = congestion.values(transport["queues"])
        return (
            text({name.partition(".")[2]: value for name, value in found.items()}) if transport["queues"] else MISSING
        )

    return cell


def delay_cell(transport: dict[str, Any]) -> str:
    """Of the path that is furthest from what was asked of it."""
    found = delays.worst(transport["delays"])
    if found is None:
        return MISSING
    return f"{seconds(found['achieved_s']['p50'])} / {seconds(found['requested_s']['p50'])}"


def _count(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}"


def _nothing(_: dict[str, Any]) -> str:
    return ""


def _time(group: str, name: str) -> Cell:
    return lambda transport: seconds(transport[group][name]) if transport[group] else MISSING


def _burst(iteration: int) -> Cell:
    def cell(transport: dict[str, Any]) -> str:
        found = [b["latency_max_s"] for b in transport["burst_rounds"] if b["iteration"] == iteration]
        return seconds(max((value for value in found if value is not None), default=None))

    return cell


def _phases(transport: dict[str, Any]) -> str:
    return ", ".join(dict.fromkeys(burst["phase"] for burst in transport["burst_rounds"] if burst["phase"])) or MISSING


def _of_loss(transport: dict[str, Any], loss: float) -> dict[str, Any]:
    return next((entry for entry in transport["by_loss"] if entry["requested"] == loss), {})


def _achieved(loss: float) -> Cell:
    def cell(transport: dict[str, Any]) -> str:
        found = _of_loss(transport, loss)
        return _percent(found.get("achieved")) + (" !" if found.get("ok") is False else "")

    return cell


def _mean_burst(loss: float) -> Cell:
    """Losses in a row, of the worker that is furthest from what was asked of the link."""

    def cell(transport: dict[str, Any]) -> str:
        found = [each for each in transport["burst_lengths"] if each["requested_loss"] == float(loss)]
        known = [each for each in found if each["achieved_mean"] is not None and each["requested_mean"] is not None]
        if not known:
            return "not measured" if found else MISSING
        worst = max(known, key=lambda each: abs(each["achieved_mean"] - each["requested_mean"]))
        return f"{worst['achieved_mean']:.2f} / {worst['requested_mean']:.2f}"

    return cell


def _beside_oracle(loss: float, what: str) -> Cell:
    def cell(transport: dict[str, Any]) -> str:
        found = _of_loss(transport, loss).get(what)
        if found is None:
            return MISSING
        digits = ",.0f" if what == "packets" else ".2f"
        if what == "passes" and _pipelined(transport):
            return f"{found['measured']:{digits}}"
        return f"{found['measured']:{digits}} / {found['oracle']:{digits}}"

    return cell


def _not_ok(transport: dict[str, Any]) -> str:
    bad = [f"{count} {outcome}" for outcome, count in transport["rounds"]["outcomes"].items() if outcome != "ok"]
    return ", ".join(bad) or "0"


def _notes(summary: Summary) -> Iterator[Text]:
    if summary["cost_model"] and (summary["cost_model"]["r_squared"] or 0.0) >= MIN_R_SQUARED:
        yield _cost(summary["cost_model"])
    yield from notes(summary)


def notes(summary: Summary) -> Iterator[Text]:
    """The verdicts, which every kind of run has."""
    yield _fidelity(summary["fidelity"])
    failed = [check for check in summary["fidelity"]["checks"] if not check["ok"]]
    for check in failed[:MAX_FAILED_SHOWN]:
        yield Text(f"  {check['transport']}: {check['name']}: {check['detail']}", style="red")
    if len(failed) > MAX_FAILED_SHOWN:
        yield Text(f"  and {len(failed) - MAX_FAILED_SHOWN} more in summary.json", style="red")
    for name, transport in summary.get("transports", {}).items():
        if count := transport["facts"].get("saturated"):
            dtype = transport["facts"]["profile"]["wire_dtype"]
            yield Text(f"{name}: {count} gradient values beyond the largest {dtype} were sent as that", style="yellow")
    if summary["captures"]:
        yield _captures(summary["captures"])
    for one in summary["expectations"]:
        word, style = {True: ("held  ", "green"), False: ("FAILED", "red"), None: ("FAILED", "red")}[one["held"]]
        yield Text.assemble((f"expect {word} ", style), one["text"])
        yield Text(f"              {one['detail']}", style="dim")


def _cost(model: dict[str, Any]) -> Text:
    """Which regime the run is in: does a burst cost its passes (round trips) or its packets?"""
    formula = (
        f"latency = {seconds(model['a_s'])} + {seconds(model['b_s_per_pass'])} a pass + "
        f"{seconds(model['c_s_per_packet'])} a packet (r² {model['r_squared']:.2f})"
    )
    if model["regime"] == "undetermined":
        return Text(f"cost: {formula}; passes and packets cannot be told apart")
    shares = ", ".join(f"{name} {share:.0%}" for name, share in model["passes_share"].items())
    return Text.assemble(("cost: ", ""), (f"{model['regime']} dominate", "bold"), f"; {formula}; by passes: {shares}")


def _fidelity(fidelity: dict[str, Any]) -> Text:
    names = [check["name"] for check in fidelity["checks"]]
    if fidelity["faithful"]:
        counts = ", ".join(f"{name} {names.count(name)}" for name in dict.fromkeys(names))
        return Text.assemble(("faithful", "green"), f"   {counts}")
    bad = sum(1 for check in fidelity["checks"] if not check["ok"])
    return Text.assemble(
        ("NOT FAITHFUL", "bold red"), f"   {bad} of {len(names)} checks failed: do not use these numbers"
    )


def _captures(captures: list[dict[str, Any]]) -> Text:
    received = sum(capture["received"] or 0 for capture in captures)
    missed = [capture["missed_by_kernel"] for capture in captures]
    known = sum(value for value in missed if value is not None)
    style = "yellow" if known or None in missed else ""
    unknown = f", unknown for {missed.count(None)}" if None in missed else ""
    return Text(f"captures: {len(captures)} files, {received:,} packets, {known:,} missed{unknown}", style=style)


def seconds(value: float | None) -> str:
    """Three significant digits in the unit that fits: 980 us, 12.3 ms, 1.23 s."""
    if value is None:
        return MISSING
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size * 0.9995 or unit == "us":
            scaled = value / size
            digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
            return f"{scaled:.{digits}f} {unit}"
    return MISSING


def _times(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.2f} %"


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4g}"
