"""Packet sources and recorded queues on a real path: three hosts, a switch, and a shallow queue in front of one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from netem.analysis import queues
from netem.kernel import bpf
from netem.kernel.bpf_asm import R0, R1, R2, Assembler
from netem.kernel.clsact import Attachment
from netem.kernel.errors import LabError
from netem.kernel.user import User
from netem.lab import Lab, Settings
from netem.links.base import Flow, Shape, UnsupportedFeature
from netem.links.bpf import BpfPort
from netem.links.bucket import bucket_bytes
from netem.links.queue_recorder import QueueRecorder
from netem.spec import star
from netem.traffic.plan import DISCARD_PORT, NS, Burst, Sent, Stream, due
from netem.traffic.process import PacketSource

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: run with sudo")

SERVER, SENDERS = "server", ("worker1", "worker2")
RATE_BPS, QUEUE_BYTES, FRAME = 100_000_000, 64 << 10, 1514
GENERATED = [("microburst", Flow("udp", dst_ports=(DISCARD_PORT, DISCARD_PORT)))]
LIMIT_S = 30.0
MIN_PACKETS_PER_CPU_S = 500_000


@dataclass
class Bench:
    """A lab with a sink at the server, and what the tests need of it."""

    lab: Lab
    folder: Path
    stack: ExitStack

    @contextmanager
    def source(self, *plans: Burst | Stream, realtime: bool = True) -> Iterator[PacketSource]:
        server = self.lab.hosts[SERVER].address
        with (
            (self.folder / "source.log").open("ab", buffering=0) as log,
            PacketSource(self.lab, SENDERS[0], user=User.current(), log=log, realtime=realtime) as source,
        ):
            for plan in plans:
                with ExitStack() as handed_in:
                    sockets = [
                        handed_in.enter_context(self.lab.socket(host, "udp", 4096, 8 << 20))
                        for host in SENDERS[: plan.senders]
                    ]
                    for sock in sockets:
                        sock.connect((server, DISCARD_PORT))
                    source.add(plan, sockets, segment=True)
            source.wait_ready()
            yield source

    def recorder(self, *, records: int = 1 << 15) -> QueueRecorder:
        place, server = self.lab.port_of(SERVER), self.lab.hosts[SERVER]
        made = QueueRecorder(SERVER, (place.netns, place.ifname), (server.netns, server.ifname), records=records)
        self.stack.callback(made.close)
        made.install(GENERATED)
        return made

    def port(self, shape: Shape) -> BpfPort:
        place = self.lab.port_of(SERVER)
        made = BpfPort(SERVER, place.netns, place.ifname)
        self.stack.callback(made.close)
        made.install(shape, None, None, [host.address for host in self.lab.hosts.values()])
        return made


@pytest.fixture
def bench(tmp_path: Path, state_dir: Path) -> Iterator[Bench]:
    with Lab.build(star(2), state_dir=state_dir, settings=Settings(gro=False)) as lab, ExitStack() as stack:
        sink = stack.enter_context(lab.socket(SERVER, "udp", 4096, 4096))
        sink.bind((lab.hosts[SERVER].address, DISCARD_PORT))
        yield Bench(lab, tmp_path, stack)


def fire(source: PacketSource, plan: int = 0, in_ns: int = 2_000_000) -> Sent:
    source.fire(plan, time.monotonic_ns() + in_ns)
    (sent,) = source.reports(1, LIMIT_S)
    return sent


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def settled(recorder: QueueRecorder, port: BpfPort) -> None:
    """Nothing is on its way any more: what went in has come out or was dropped."""

    def empty() -> bool:
        flows = recorder.read().flows
        return sum(f.packets_in - f.packets_out for f in flows) == port.health().queue_dropped

    wait_for(empty)


def test_every_packet_is_sent_and_counted_and_the_source_is_in_time(bench: Bench) -> None:
    bench.port(Shape())
    recorder = bench.recorder()
    recorder.arm(0, 2**63)
    with bench.source(Burst(2, 1500, packets=1000), Burst(2, 100, RATE_BPS // 10, packets=50)) as source:
        first, second = fire(source), fire(source, 1)
    assert first.packets == (1000, 1000)
    assert second.packets == (50, 50)
    assert second.ended_ns - second.began_ns >= 49 * 8 * 114 * 100, "at 10 Mbit/s"
    assert first.refused == second.refused == 0
    assert first.began_ns >= first.planned_ns
    total = sum(first.packets) + sum(second.packets)
    (flow,) = [flow for flow in recorder.read().flows if flow.kind == "microburst"]
    assert (flow.packets_in, flow.packets_out) == (total, total)
    sizes = recorder.read().records["bytes"].tolist()
    assert sizes == [1514] * 2000 + [114] * (total - 2000)
    _, ahead = queues.depth_at(recorder.read().records)
    assert np.median(ahead) == 0, "out of the queue at once, long before the train of packets has arrived"
    began = recorder.read().records["time_in_ns"][0]
    assert first.began_ns <= began <= first.ended_ns, "both clocks are CLOCK_MONOTONIC"


def test_a_duration_is_kept(bench: Bench) -> None:
    """From 100 us on: the last call to the kernel may take longer, and the first ones are slow."""
    bench.port(Shape())
    lengths = {100_000: 100_000, 2_000_000: 200_000}
    with bench.source(*(Burst(2, 1500, duration_ns=length) for length in lengths)) as source:
        for plan, (length, slack) in enumerate(lengths.items()):
            tries = [fire(source, plan) for _ in range(5)]
            over = min(sent.ended_ns - sent.began_ns - length for sent in tries)
            assert 0 <= over <= slack
            assert all(sum(sent.packets) > 0 for sent in tries)


@pytest.mark.parametrize("packet_bytes", [64, 1500])
def test_one_core_sends_half_a_million_packets_a_second_into_a_veth(bench: Bench, packet_bytes: int) -> None:
    """By the time of the processor: how much of it there is depends on who else is at work."""
    place = bench.lab.port_of(SENDERS[0])
    drop = Assembler()
    drop.load(4, R2, R1, 16)
    drop.swap_be(R2, 16)
    drop.mov(R0, -1)
    drop.jump_if(R2, "!=", 0x0800, "end")
    drop.mov(R0, 2)
    drop.label("end")
    drop.exit()
    Attachment(place.netns, place.ifname, "ingress", 1).attach(
        bench.stack.enter_context(bpf.Program("drop", drop.assemble()))
    )
    with bench.source(Burst(1, packet_bytes, duration_ns=NS // 2)) as source:
        process = psutil.Process(source.child.pid)
        before = process.cpu_times()
        sent = fire(source)
        after = process.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    rate = sent.packets[0] / used_s
    assert rate >= MIN_PACKETS_PER_CPU_S, f"{rate:,.0f} packets a second of processor time"


def test_a_burst_loses_what_the_arithmetic_says(bench: Bench) -> None:
    """What passes: the bucket, the queue, and the rate for as long as the burst takes."""
    port = bench.port(Shape(rate_bps=RATE_BPS, queue_bytes=QUEUE_BYTES))
    recorder = bench.recorder()
    bucket = bucket_bytes(RATE_BPS, 1500, QUEUE_BYTES, QUEUE_BYTES)
    assert bucket == QUEUE_BYTES // 4, "less than 4 ms at the rate"
    gaps, lost = [], 0
    with bench.source(Burst(2, 1500, packets=200)) as source:
        for _ in range(5):
            start = len(recorder.read().records)
            recorder.arm(time.monotonic_ns(), time.monotonic_ns() + NS)
            sent = fire(source)
            settled(recorder, port)
            reading = recorder.read()
            records = reading.records[start:]
            assert len(records) == sum(sent.packets) == 400
            passed = len(queues.passed(records))
            lost += 400 - passed
            allowed = bucket + QUEUE_BYTES + RATE_BPS / 8 * (sent.ended_ns - sent.began_ns) / NS
            gaps.append(passed - allowed / FRAME)
            depth = queues.depth(records)
            assert depth.size_bytes.max() <= QUEUE_BYTES + queues.IN_FLIGHT_FRAMES * FRAME
            assert depth.size_bytes.max() > QUEUE_BYTES - FRAME
            assert depth.size_bytes[-1] == 0
            time.sleep(0.02)  # the bucket fills again
    assert port.health().queue_dropped == lost > 5 * 200
    assert min(abs(gap) for gap in gaps) <= 3, gaps
    assert max(gaps) <= 5, "never more than rate, bucket and queue allow"


def test_time_in_the_queue_is_what_its_depth_takes_at_the_rate(bench: Bench) -> None:
    port = bench.port(Shape(rate_bps=RATE_BPS, queue_bytes=QUEUE_BYTES))
    recorder = bench.recorder()
    recorder.arm(0, 2**63)
    with bench.source(Burst(1, 1500, packets=200)) as source:
        fire(source)
        settled(recorder, port)
    records = recorder.read().records
    ahead, _ = queues.depth_at(records)
    inside = records["time_out_ns"] > 0
    waited = (records["time_out_ns"] - records["time_in_ns"])[inside] / 1e9
    expected = ahead[inside] * 8 / RATE_BPS
    deep = ahead[inside] > QUEUE_BYTES // 2
    assert deep.sum() > 5
    assert np.median(np.abs(waited[deep] - expected[deep])) < 0.0015, "the bucket is a millisecond"


def test_windows_and_records_that_do_not_suffice(bench: Bench) -> None:
    bench.port(Shape())
    recorder = bench.recorder(records=150)
    with bench.source(Burst(1, 200, packets=100)) as source:
        fire(source)
        assert len(recorder.read().records) == 0, "no window"
        recorder.arm(time.monotonic_ns(), time.monotonic_ns() + NS)
        fire(source)
        assert (len(recorder.read().records), recorder.read().overflow) == (100, 0)
        fire(source)
    reading = recorder.read()
    assert (len(reading.records), reading.overflow) == (150, 50)
    (flow,) = [flow for flow in reading.flows if flow.kind == "microburst"]
    assert (flow.packets_in, flow.packets_out) == (300, 300), "counted all the same"


def test_installed_again_it_counts_from_zero(bench: Bench) -> None:
    bench.port(Shape())
    recorder = bench.recorder()
    recorder.arm(0, 2**63)
    with bench.source(Burst(1, 200, packets=10)) as source:
        fire(source)
        recorder.install(GENERATED)
        fire(source)
    assert [flow.packets_in for flow in recorder.read().flows if flow.kind == "microburst"] == [10]
    assert len(recorder.read().records) == 0, "windows are forgotten too"


def test_receivers_see_no_tag_in_their_time_stamps(bench: Bench) -> None:
    """SO_TIMESTAMP (29) gives the time of arrival, not the tag, which is 146 years after the machine's start."""
    bench.port(Shape())
    bench.recorder()
    server = bench.lab.hosts[SERVER].address
    receiver = bench.stack.enter_context(bench.lab.socket(SERVER, "udp", 1 << 16, 4096))
    receiver.bind((server, 4000))
    receiver.settimeout(LIMIT_S)
    receiver.setsockopt(1, 29, 1)
    sender = bench.stack.enter_context(bench.lab.socket(SENDERS[0], "udp", 4096, 1 << 16))
    sender.sendto(b"x", (server, 4000))
    _, ancillary, _, _ = receiver.recvmsg(100, 100)
    (stamp,) = [int.from_bytes(data[:8], "little") for _, kind, data in ancillary if kind == 29]
    assert abs(stamp - time.time()) < 60


def test_gro_at_the_receiver_is_refused(tmp_path: Path, state_dir: Path) -> None:
    with Lab.build(star(2), state_dir=state_dir) as lab:
        place, server = lab.port_of(SERVER), lab.hosts[SERVER]
        recorder = QueueRecorder(SERVER, (place.netns, place.ifname), (server.netns, server.ifname))
        with pytest.raises(UnsupportedFeature, match=r"GRO at .*turn it off"):
            recorder.install(GENERATED)


def test_a_stream_keeps_its_rate_on_average(bench: Bench) -> None:
    bench.port(Shape())
    recorder = bench.recorder()
    plan = Stream(1000, 20_000_000, on_s=0.02, off_s=0.02)
    with bench.source(plan, realtime=False) as source:
        source.fire(0, time.monotonic_ns())
        wait_for(lambda: sum(flow.packets_in for flow in recorder.read().flows) > 1000)
        source.stop(0)
        (sent,) = source.reports(1, LIMIT_S)
    assert sent.packets[0] == sum(flow.packets_in for flow in recorder.read().flows)
    seconds = (sent.ended_ns - sent.began_ns) / NS
    allowed = due(round(seconds / 2 * NS), plan.rate_bps, 1000)
    in_phase = due(20_000_000, plan.rate_bps, 1000)
    assert abs(sent.packets[0] + sent.skipped - allowed) <= in_phase


def test_a_source_that_dies_is_reported(bench: Bench) -> None:
    with bench.source(Burst(1, 200, packets=10)) as source:
        source.child.terminate()
        with pytest.raises(LabError, match="has ended"):
            source.reports(1, LIMIT_S)
