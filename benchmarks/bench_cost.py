"""(e) What an all-reduce costs against the number of workers and against the size of the gradient; clean links.

Recommended profile, p 0.8 %. Processor time is that of server and workers together, by gigabyte of gradients moved in
both directions. Latency is that of the slowest worker to the server, by its own clock; all-reduce the time from one
iteration to the next, which includes the broadcast and the making of the next gradient. All processes share the cores
of this machine, so the time must grow with the workers: what matters is that a gigabyte does not get dearer.

The drops are those of an incast without configuration: datagrams of workers that the server's sockets, or its network
device, had no room for, as a share of those sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from benchmarks.bench_flow import MTU_BYTES
from benchmarks.bench_memory import chunks_of
from benchmarks.harness import Context, Line, Spread, alternate
from benchmarks.processes import Work
from benchmarks.testbed import replay, standing
from dblp.wire import chunk_values

TITLE = "(e) cost of an all-reduce"
WORKERS, QUICK_WORKERS = (1, 2, 3, 4, 8, 16), (1, 3)
SIZES_MB, QUICK_MB = (1, 4, 16, 64), (1, 4)
FIXED_MB, QUICK_FIXED_MB, FIXED_WORKERS = 16, 4, 3
ITERATIONS = 7
INCASTS, DROP_LIMIT = (3, 16), 0.1


@dataclass(frozen=True)
class Sample:
    """One job: latencies of each iteration's slowest worker, seconds; datagrams dropped at the receiver, and sent."""

    latency_s: list[float]
    all_reduce_s: float
    cpu_s_per_gb: float
    dropped: int
    sent: int


def measure(context: Context) -> list[Line]:
    fixed = QUICK_FIXED_MB if context.quick else FIXED_MB
    by_workers = [(workers, fixed) for workers in (QUICK_WORKERS if context.quick else WORKERS)]
    by_size = [(FIXED_WORKERS, size) for size in (QUICK_MB if context.quick else SIZES_MB)]
    cases = list(dict.fromkeys(by_workers + by_size))
    contestants = {_name(*case): partial(_sample, context, *case) for case in cases}
    samples = alternate(contestants, context.repeats(3, 1))
    context.record("jobs", {name: [vars(each) for each in found] for name, found in samples.items()})
    lines = [_line(_name(*case), samples[_name(*case)]) for case in cases]
    return lines + [_incast(case[0], samples[_name(*case)]) for case in by_workers if case[0] in INCASTS]


def _name(workers: int, size_mb: float) -> str:
    return f"{workers} worker{'s' * (workers > 1)}, {size_mb} MB"


def _sample(context: Context, workers: int, size_mb: float) -> Sample:
    chunks, work = chunks_of(size_mb), Work()
    with standing(replay(workers, chunks, ITERATIONS, "{dblp: {fixed: 0.8%}}"), context.scratch()) as bed:
        outcome = bed.run("dblp", work)
    slowest: dict[int, float] = {}
    for row in outcome.up():
        slowest[row.iteration] = max(slowest.get(row.iteration, 0.0), row.latency_s or 0.0)
    wall_s, cpu_s = work.per_iteration()
    gigabytes = 2 * workers * chunks * 4 * chunk_values(MTU_BYTES) / 1e9
    ups = [row for row in outcome.rows if row.direction == "up"]
    return Sample(
        list(slowest.values()),
        wall_s,
        cpu_s / gigabytes,
        sum(row.dropped_socket or 0 for row in ups) + outcome.device_drops["up"],
        sum(row.packets_sent or 0 for row in ups),
    )


def _line(name: str, samples: list[Sample]) -> Line:
    latency = Spread.of(each for sample in samples for each in sample.latency_s)
    whole = Spread.of(sample.all_reduce_s for sample in samples)
    cpu = Spread.of(sample.cpu_s_per_gb for sample in samples)
    detail = f"latency {latency.shown(1e3, 'ms')}; all-reduce {whole.shown(1e3, 'ms')}"
    return Line(name, cpu.median, unit="CPU s/GB", detail=detail)


def _incast(workers: int, samples: list[Sample]) -> Line:
    dropped, sent = (sum(getattr(sample, key) for sample in samples) for key in ("dropped", "sent"))
    detail = f"{dropped:,} of {sent:,}"
    return Line(
        f"incast of {workers}: dropped at the receiver", 100 * dropped / sent, DROP_LIMIT, unit="%", detail=detail
    )
