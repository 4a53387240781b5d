"""(a) One flow on a clean link between two hosts and a switch, packets of the MTU in the fabric: goodput.

All contestants run in turns in one lab, behind the same switch port with the same loss program in it. Goodput is what
counts at the receiver:

dblp        16 MB gradients of the replay workload with tolerance 0, so that every byte counts; payload over the
            worker's latency from the first packet to the read of the stop. Rounds after the first.
iperf3 UDP  datagrams of 1,448 bytes; what the receiver got in sequence numbers, lost ones excluded. Tried first with
            several rates and buffers; the best takes part.
iperf3 TCP  the lab's hosts have TSO off; what the receiver got. With and without zero copy, the better takes part.
plain       `send` and `recv_into` of one datagram at a time in Python, with the same large socket buffers as dblp's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial

from benchmarks.harness import Context, Line, Spread, alternate, installed, ratio
from benchmarks.labs import Program
from benchmarks.testbed import Testbed, replay, standing
from dblp.wire import chunk_values

TITLE = "(a) one flow, clean: goodput"
CHUNKS, MTU_BYTES = 11_000, 1500
UDP = ("-u", "-l", "1448")
UDP_CANDIDATES = (("-b", "0"), ("-b", "0", "-w", "416K"), ("-b", "5G", "-w", "416K"))
TCP_CANDIDATES = ((), ("-Z",))
LIMITS = {"iperf3 UDP": 2.0, "iperf3 TCP": 1.3, "plain": 5.0}
LABELS = {
    "iperf3 UDP": "over iperf3 UDP, 1,448 B",
    "iperf3 TCP": "over iperf3 TCP, no TSO",
    "plain": "over plain Python",
}


def measure(context: Context) -> list[Line]:
    rounds = 4 if context.quick else 12
    with standing(replay(1, CHUNKS, rounds, "{dblp: {fixed: 0%}}"), context.scratch()) as bed:
        contestants: dict[str, Callable[[], list[float]]] = {
            "dblp": lambda: dblp_bps(bed),
            "plain": lambda: plain_bps(bed, context.repeats(4)),
        }
        if installed("iperf3"):
            contestants |= _iperf(context, bed)
        turns = alternate(contestants, context.repeats(5))
    samples = {name: [value for turn in each for value in turn] for name, each in turns.items()}
    context.record("goodput_bps", samples)
    shown = {name: Spread.of(each).shown(1e-9, "Gbit/s") for name, each in samples.items()}
    lines = [Line("dblp", Spread.of(samples["dblp"]).median / 1e9, unit="Gbit/s", detail=shown["dblp"])]
    for name, limit in LIMITS.items():
        if name in samples:
            value = ratio(samples["dblp"], samples[name])
            lines.append(Line(LABELS[name], value, limit, "at least", detail=shown[name]))
        else:
            lines.append(Line.absent(LABELS[name], "iperf3 is not installed", limit, "at least"))
    return lines


def dblp_bps(bed: Testbed) -> list[float]:
    """Goodput of each round of a job, in bit/s."""
    payload_bits = 8 * 4 * chunk_values(MTU_BYTES)
    return [
        row.delivered * payload_bits / row.latency_s for row in bed.run("dblp").up() if row.delivered and row.latency_s
    ]


def plain_bps(bed: Testbed, times: int) -> list[float]:
    """Goodput of each blast of datagrams that are sent and received one by one, in bit/s; the first warms up."""
    payload_bits = 8 * 4 * chunk_values(MTU_BYTES)
    return [got * payload_bits / seconds for got, seconds in blasts(bed, "plain", CHUNKS, times + 1)[1:]]


def blasts(bed: Testbed, kind: str, chunks: int, times: int) -> list[tuple[int, float]]:
    """(datagrams received, seconds) of each blast; see blast.py.

    Plain: from the first send to the last read. Product: until the last send has returned, when the kernel has brought
    the datagrams to the receiver's socket; nothing can be faster that sends by these calls.
    """
    star = bed.star
    address = star.address("server")
    receiver = star.python("server", "benchmarks.blast", "receive", address, kind, str(chunks), str(times))
    sender = star.python("worker1", "benchmarks.blast", "send", address, kind, str(chunks), str(times))
    sent, got = sender.report(60.0), receiver.report(60.0)
    lost = sum(here["sent"] - there["received"] for here, there in zip(sent, got, strict=True))
    if lost and kind == "product":
        raise RuntimeError(f"blasts without loss lost {lost} of {times * chunks} datagrams: no clean rate")
    ends = [here["sent_at_s"] for here in sent] if kind == "product" else [there["last_at_s"] for there in got]
    return [(there["received"], end - here["began_at_s"]) for here, there, end in zip(sent, got, ends, strict=True)]


def _iperf(context: Context, bed: Testbed) -> dict[str, Callable[[], list[float]]]:
    """The contestants of iperf3, each with what served it best in a first trial."""
    server = bed.star.start("server", ["iperf3", "-s", "--forceflush"])
    _await(server, "Server listening")
    seconds = 1 if context.quick else 2
    chosen: dict[str, Callable[[], list[float]]] = {}
    for name, base, candidates in (("iperf3 UDP", UDP, UDP_CANDIDATES), ("iperf3 TCP", (), TCP_CANDIDATES)):
        tried = {" ".join(options): iperf_bps(bed, 1, *base, *options)[0] for options in candidates}
        best = max(tried, key=lambda options: tried[options])
        context.record(f"{name}_tried_bps", tried)
        context.say(f"{name}: best with {best or 'no options'!r}")
        options = (*base, *best.split())
        chosen[name] = partial(iperf_bps, bed, seconds, *options)
    return chosen


def iperf_bps(bed: Testbed, seconds: int, *options: str) -> list[float]:
    """What the receiver of one iperf3 run got, in bit/s."""
    argv = ["iperf3", "-c", bed.star.address("server"), "-t", str(seconds), "-J", *options]
    end = json.loads(bed.star.start("worker1", argv).output(seconds + 15.0))["end"]
    return [8 * end["sum_received"]["bytes"] / end["sum_received"]["seconds"]]


def _await(program: Program, text: str, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while text not in program.log.read_text():
        if time.monotonic() > deadline or program.child.poll() is not None:
            raise RuntimeError(f"{program.child.argv[0]} does not say {text!r}: {program.log.read_text()[-300:]}")
        time.sleep(0.02)
