"""Was the emulation faithful? Loss as requested in the burst, none outside it, every packet accounted for.

Statistical checks share one false-alarm budget (see `intervals`); all others are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from netem.analysis import accounts, burst_lengths, congestion, delays, intervals, load, oracle, punctual
from netem.analysis.altered import balance
from netem.analysis.check import Check, Fidelity, Statistical
from netem.analysis.course import by_loss_alone, mask_exact, recorded_exact
from netem.analysis.records import LinkCount, RoundRow, counts_by_flow
from netem.analysis.run import RunData, TransportRun
from netem.spec.loss import BurstyLoss

MIN_ROUNDS_FOR_PASSES = 5
MAX_UNREQUESTED = 0.001
"""Share of the packets that sockets and devices may drop on their own."""


def fidelity(data: RunData) -> Fidelity:
    """All checks of a run; faithful when none fails."""
    statistical = [one for run in data.runs for one in _statistical(run, data)]
    each = intervals.false_alarm_each(len(statistical))
    checks = [one(each) for one in statistical]
    for run in data.runs:
        checks += _exact(run, data)
    return Fidelity(all(c.ok for c in checks), intervals.FALSE_ALARM_RUN, len(statistical), tuple(checks))


def _statistical(run: TransportRun, data: RunData) -> Iterator[Statistical]:
    by_flow = counts_by_flow(run.counts)
    quiet: dict[tuple[int, str, float], list[LinkCount]] = {}
    for row in run.rows:
        count = by_flow.get((row.round, row.worker, row.direction))
        loss = row.loss_requested
        if loss is None:
            continue
        if row.burst and loss > base_loss(row, data):
            yield partial(_burst_loss, run, row, count, loss)
        elif loss > 0 and count is not None:
            quiet.setdefault((row.worker, row.direction, loss), []).append(count)
    for (worker, direction, loss), counts in quiet.items():
        what = f"worker {worker} {direction}, outside bursts"
        yield partial(_loss, run, "base loss", what, loss, counts)
    burst_rows = passes_comparable(run, data)
    if len(burst_rows) >= MIN_ROUNDS_FOR_PASSES:
        yield partial(_passes, run, burst_rows)
    yield from delay_checks(run)
    for lengths in run.burst_lengths:
        if not lengths.doubt:
            yield partial(_burst_length, run, lengths)


def delay_checks(run: delays.Run) -> Iterator[Statistical]:
    """The paths are as long as asked."""
    for report in run.delays:
        if not report.doubt:
            yield partial(_delay, run, report)


def _burst_length(run: TransportRun, lengths: burst_lengths.Lengths, false_alarm: float) -> Check:
    """Losses come as many in a row as asked for, in the mean."""
    interval = lengths.interval(false_alarm)
    low, high = (1.0 / (1.0 - each) if each < 1.0 else None for each in (interval.low, interval.high))
    ok = bool(lengths.doubt) or not lengths.trials or burst_lengths.continuation(lengths.loss) in interval
    detail = burst_lengths.detail(lengths, low, high)
    return Check(
        "burst length", run.name, run.repeat, ok, detail, lengths.requested, lengths.achieved,
        None if lengths.doubt else low, None if lengths.doubt else high,
    )  # fmt: skip


def unjudged_delays(run: delays.Run) -> list[Check]:
    """Those of which probes do not tell."""
    return [_delay(run, report, 1.0) for report in run.delays if report.doubt]


def _delay(run: delays.Run, report: delays.DelayReport, false_alarm: float) -> Check:
    ok, detail = delays.ok(report, false_alarm), delays.detail(report)
    share = delays.REPORTED[0]
    asked, allowed = report.requested.quantile(share), report.allowed_s(share)
    achieved = report.achieved(share)
    return Check("delay", run.name, run.repeat, ok, detail, asked, achieved, asked - allowed, asked + allowed)


def _burst_loss(run: TransportRun, row: RoundRow, count: LinkCount | None, loss: float, false_alarm: float) -> Check:
    where = f"iteration {row.iteration}, worker {row.worker} {row.direction}"
    counts = [count] if count is not None else []
    return _loss(run, "burst loss", where, loss, counts, false_alarm)


def _loss(
    run: TransportRun, name: str, where: str, loss: float, counts: Sequence[LinkCount], false_alarm: float
) -> Check:
    """The requested loss lies in the exact interval of what the link did."""
    seen, dropped = sum(c.ratio_seen for c in counts), sum(c.ratio_dropped for c in counts)
    if not seen:
        return Check(name, run.name, run.repeat, False, f"{where}: the link counted no data packet", loss)
    # Losses in bursts scatter more than independent ones: as many fewer packets would.
    scatter = loss.clustering if isinstance(loss, BurstyLoss) else 1.0
    interval = intervals.clopper_pearson(round(dropped / scatter), max(1, round(seen / scatter)), false_alarm)
    achieved = dropped / seen
    detail = f"{where}: requested {loss:.2%}, achieved {achieved:.2%} ({dropped} of {seen})"
    return Check(name, run.name, run.repeat, loss in interval, detail, loss, achieved, interval.low, interval.high)


def base_loss(row: RoundRow, data: RunData) -> float:
    """What the links lose of this flow all the time."""
    return data.plan.base_loss.get((row.worker, row.direction), 0.0)


def passes_comparable(run: TransportRun, data: RunData) -> list[tuple[RoundRow, oracle.Passes]]:
    """Completed burst rounds of one loss ratio under stop and wait, and their oracle; none where something else than
    the loss has dropped packets.
    """
    found: list[tuple[RoundRow, oracle.Passes]] = []
    for row in by_loss_alone(run) if run.stop_and_wait else ():
        loss = row.loss_requested
        if not loss or isinstance(loss, BurstyLoss):  # in bursts, the chunks of a pass are not independent
            continue
        expected = oracle.passes(row.chunks, row.delivered, loss) if row.chunks and row.delivered else None
        if expected is not None:
            found.append((row, expected))
    return found


def _passes(run: TransportRun, rows: Sequence[tuple[RoundRow, oracle.Passes]], false_alarm: float) -> Check:
    low, high = oracle.mean_passes_interval([expected for _, expected in rows], 1.0 - false_alarm)
    mean = sum(row.passes or 0 for row, _ in rows) / len(rows)
    expect = sum(expected.mean for _, expected in rows) / len(rows)
    detail = f"{len(rows)} burst rounds: mean {mean:.2f} passes, oracle {expect:.2f} ({low:.2f} to {high:.2f})"
    return Check("passes", run.name, run.repeat, low - 1e-9 <= mean <= high + 1e-9, detail, expect, mean, low, high)


def _exact(run: TransportRun, data: RunData) -> list[Check]:
    checks = [*_clean_rounds(run, data), _totals(run), _unrequested(run), _completion(run), _doubts(run)]
    checks += [Check(name, run.name, run.repeat, ok, detail) for name, ok, detail in congestion.checks(run)]
    checks += _machine(run)
    checks += _saturation(run) if data.judge_latencies else []
    if (in_time := punctual.check(run.moments)) is not None:
        checks.append(Check("event times", run.name, run.repeat, *in_time))
    checks += unjudged_delays(run)
    checks += [_burst_length(run, lengths, 0.5) for lengths in run.burst_lengths if lengths.doubt]
    if run.reliable_broadcast and run.epochs:
        checks.append(_replicas(run))
    if run.stop_and_wait and run.mask_seed is not None and run.order is not None:
        checks.append(mask_exact(run, data))
    if run.recorded and run.stop_and_wait and run.order is not None:
        checks.append(recorded_exact(run, data))
    return checks


def _clean_rounds(run: TransportRun, data: RunData) -> list[Check]:
    """No injected drop in the rounds next to a burst, nor in any other round without loss."""
    by_flow = counts_by_flow(run.counts)
    burst_iterations = {row.iteration for row in run.rows if row.burst}
    near: list[tuple[RoundRow, LinkCount]] = []
    far: list[tuple[RoundRow, LinkCount]] = []
    for row in run.rows:
        count = by_flow.get((row.round, row.worker, row.direction))
        if count is None or row.loss_requested != 0.0:
            continue
        (near if burst_iterations & {row.iteration - 1, row.iteration, row.iteration + 1} else far).append((row, count))
    checks = []
    for name, group in (("rounds beside a burst", near), ("other rounds", far)):
        if group:
            bad = [(row, count) for row, count in group if count.dropped]
            detail = f"{len(group)} flows, {sum(count.dropped for _, count in group)} injected drops"
            if bad:
                row, count = bad[0]
                detail += f"; first: iteration {row.iteration}, worker {row.worker} {row.direction}: {count.dropped}"
            checks.append(Check(name, run.name, run.repeat, not bad, detail))
    rest = [c for c in run.counts if c.round is None and not data.plan.base_loss.get((c.worker, c.direction))]
    if rest:
        drops = sum(count.dropped for count in rest)
        detail = f"{sum(count.seen for count in rest)} packets outside bursts, {drops} injected drops"
        checks.append(Check("outside bursts", run.name, run.repeat, not drops, detail))
    return checks


def _drops(run: TransportRun) -> tuple[dict[str, int], ...]:
    """What dropped packets but the loss, each by direction."""
    return run.device_drops, run.queue_drops, run.uplink_drops, run.trunk_drops


def _totals(run: TransportRun) -> Check:
    """Sent = seen at the link; seen - dropped - corrupted + duplicated = delivered + duplicate + late + dropped by the
    socket.

    What is missing in front of the link may be drops of an uplink's queue, and behind it of the link's queue or of the
    receiving devices. What queues and devices between switches drop is in front of the link that bursts hit, and behind
    one that counts steady loss. All of these are counted by direction only.
    """
    groups = [group for flow in accounts.flows(run) for group in accounts.groups_of(run, flow)]
    altered = {way: [g for g in groups if g.direction == way] for way in ("up", "down") if run.altered.of(way)}
    elsewhere = {way: sum(drops.get(way, 0) for drops in _drops(run)) for way in altered}
    found = [(way, *balance(run.altered, way, those, elsewhere[way])) for way, those in altered.items() if those]
    groups = [group for group in groups if group.direction not in altered]
    problems = [group for group in groups if group.sent != group.seen or group.missing]
    missing = 0
    explained = all(group.sent >= group.seen and group.missing >= 0 for group in problems)
    for direction in {group.direction for group in problems}:
        here = [group for group in problems if group.direction == direction]
        before, behind = sum(group.sent - group.seen for group in here), sum(group.missing for group in here)
        devices, queues, uplinks, trunks = (each.get(direction, 0) for each in _drops(run))
        explained &= before <= uplinks + trunks
        explained &= behind <= devices + queues + trunks
        explained &= before + behind <= devices + queues + uplinks + trunks
        missing += before + behind
    how = "by round" if run.by_round else "over the run"
    detail = f"{len(groups)} sums close ({how})"
    if not groups:
        detail = "nothing to compare: packets are not counted at both ends" if not found else "with copies and damage"
    if problems and explained:
        detail += f", with {missing} packets dropped by queues and devices"
    elif problems:
        detail = f"{len(problems)} of {len(groups)} sums do not close; first: {problems[0].problem()}"
    detail = "; ".join([detail, *(f"{way}: {words}" for way, _, words in found)])
    return Check("totals", run.name, run.repeat, explained and all(ok for _, ok, _ in found), detail)


def _unrequested(run: TransportRun) -> Check:
    """Drops that nobody asked for, by sockets and devices of a machine that is too slow for what it emulates."""
    seen = sum(count.seen for count in run.counts)
    sockets, devices = sum(row.dropped_socket or 0 for row in run.rows), sum(run.device_drops.values())
    if run.altered.overflowed:
        sockets = sum(run.altered.overflowed.values())
    share = (sockets + devices) / seen if seen else 0.0
    detail = (
        f"sockets dropped {sockets}, devices {devices} of {seen} packets ({share:.3%}, allowed {MAX_UNREQUESTED:.1%})"
    )
    return Check("unrequested drops", run.name, run.repeat, share <= MAX_UNREQUESTED, detail)


def _machine(run: TransportRun) -> list[Check]:
    """The machine had its processor to itself, and room for every packet that it was to take in."""
    if run.load is None:
        return []
    steal, dropped = run.load.steal, run.load.backlog_dropped
    detail = f"{steal:.1%} of the processor time stolen (allowed {load.MAX_STEAL:.0%}), the backlog dropped {dropped}"
    return [Check("machine", run.name, run.repeat, steal <= load.MAX_STEAL and not dropped, detail)]


def _saturation(run: TransportRun) -> list[Check]:
    """The latencies are those of the network: the transport's threads hardly waited for a core."""
    judged = load.judged_rounds(run.rows)
    share = load.runqueue_share(judged)
    if share is None:
        return []
    what = "burst rounds" if any(row.burst for row in judged) else "rounds"
    detail = (
        f"threads that were ready waited for a core for {share:.1%} of the latencies of {what} (allowed "
        f"{load.MAX_RUNQUEUE:.0%}): a lower `pace`, fewer workers or more cores, or `latencies: reported`"
    )
    return [Check("saturation", run.name, run.repeat, share <= load.MAX_RUNQUEUE, detail, achieved=share)]


def _doubts(run: TransportRun) -> Check:
    """Every packet was decided by itself and counted: no super-packets, fragments or full counter maps."""
    damage = ("fragments", "short") if run.altered.in_front else ()  # what a flipped bit may make of a packet
    found = [f"{count} {name}" for name, count in sorted(run.doubts.items()) if count and name not in damage]
    detail = f"doubtful: {', '.join(found)}" if found else "every packet was decided by itself and counted"
    return Check("links", run.name, run.repeat, not found, detail)


def _completion(run: TransportRun) -> Check:
    """A round ends with at most the tolerated share missing, or its outcome says why not."""
    bad = [
        row
        for row in run.rows
        if row.outcome == "ok"
        and row.chunks is not None
        and row.delivered is not None
        and row.tolerance is not None
        and row.delivered < oracle.need(row.chunks, row.tolerance)
    ]
    others = sum(1 for row in run.rows if row.outcome != "ok")
    detail = f"{len(run.rows)} flows, {others} with another outcome than ok"
    if bad:
        row = bad[0]
        detail = (
            f"round {row.round}, worker {row.worker} {row.direction}: {row.delivered} of {row.chunks} chunks "
            f"at tolerance {row.tolerance}"
        )
    return Check("rounds complete", run.name, run.repeat, not bad, detail)


def _replicas(run: TransportRun) -> Check:
    bad = sorted({row.epoch for row in run.epochs if row.replica_divergence != 0})
    epochs = len({row.epoch for row in run.epochs})
    detail = f"bit-identical after all {epochs} epochs" if not bad else f"not identical after epochs {bad}"
    return Check("replicas", run.name, run.repeat, not bad, detail)
