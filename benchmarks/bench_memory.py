"""(d) Memory of server and workers against the size of the gradient: 3 workers, replay workload.

Peak resident memory of each process (VmHWM) beyond that of an interpreter that has loaded the same modules and done
nothing. What the kernel holds in socket buffers is not part of it. A worker of this workload also keeps the noise that
it replays, so it has one gradient more than a training worker that computes its gradient in place.
"""

from __future__ import annotations

from benchmarks.bench_flow import MTU_BYTES
from benchmarks.harness import Context, Line
from benchmarks.processes import PeakMemory, idle_bytes
from benchmarks.testbed import replay, standing
from dblp.wire import chunk_values
from netem.kernel.errors import Unavailable

TITLE = "(d) memory beyond interpreter and libraries, 3 workers"
WORKERS = 3
SIZES_MB, QUICK_MB = (4, 16, 100, 500), (4, 16)
ITERATIONS, ITERATIONS_OF_LARGE, LARGE_MB = 3, 2, 100
MB = 1e6


def measure(context: Context) -> list[Line]:
    servers, workers = [], []
    for size in QUICK_MB if context.quick else SIZES_MB:
        context.say(f"gradient of {size} MB")
        try:
            server, worker = _measure(context, size)
        except Unavailable as error:
            server, worker = (
                Line.absent(_name(size, who), str(error), unit="gradients") for who in ("server", "worker")
            )
        servers.append(server)
        workers.append(worker)
    return servers + workers


def _name(size_mb: float, who: str) -> str:
    return f"{who}, gradient of {size_mb} MB"


def chunks_of(size_mb: float) -> int:
    """Full packets that hold so many MB."""
    return round(size_mb * MB / (4 * chunk_values(MTU_BYTES)))


def _measure(context: Context, size_mb: float) -> tuple[Line, Line]:
    chunks = chunks_of(size_mb)
    gradient = chunks * 4 * chunk_values(MTU_BYTES)
    iterations = ITERATIONS if size_mb < LARGE_MB else ITERATIONS_OF_LARGE
    scenario = replay(WORKERS, chunks, iterations, "{dblp: {fixed: 0.8%}}")
    with standing(scenario, context.scratch()) as bed:
        idle = idle_bytes(bed.star)
        peaks = PeakMemory()
        bed.run("dblp", peaks)
    context.record(f"{size_mb}_MB_bytes", {"gradient": gradient, "idle": idle, "peaks": peaks.by_rank})
    lines = []
    for who, peak, limit in (("server", peaks.server_bytes, WORKERS + 2.0), ("worker", peaks.worker_bytes, None)):
        detail = f"{(peak - idle) / MB:.1f} MB beyond {idle / MB:.1f} MB"
        lines.append(Line(_name(size_mb, who), (peak - idle) / gradient, limit, unit="gradients", detail=detail))
    return lines[0], lines[1]
