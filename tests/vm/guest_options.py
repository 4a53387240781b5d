"""Guest side: every option of netem written to a real sch_netem and read back, by us and by tc; and what some do."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any

from guest_network import Network, Traffic
from guest_ports import SENDERS, account, handles, port_of, qdiscs, rule

from netem.kernel import distributions, qdisc
from netem.kernel import netem_options as no
from netem.kernel.errors import KernelError
from netem.kernel.loss_models import FourState, GilbertElliott
from netem.kernel.netem_options import NetemOptions, Overhead, Rate, Slot
from netem.kernel.netns import open_netlink, open_rtnetlink
from netem.kernel.qdisc import Command, Netem
from netem.kernel.rtnetlink import Rtnetlink
from netem.kernel.veth import tx_dropped
from netem.links import chain as chain_of_links
from netem.links.base import Extras, LinkError, Shape
from netem.links.netem import NetemPort

SENDER = "10.77.0.2"
MS = 1_000_000
CHAIN = GilbertElliott.of_bursts(0.2, 3.0)
NORMAL = distributions.table("normal")
ROWS: dict[str, NetemOptions] = {
    "plain": NetemOptions(1000),
    "delay": NetemOptions(1000, 10 * MS),
    "delay, ns": NetemOptions(1000, 10 * MS + 1),
    "delay, 10 min": NetemOptions(1000, 600_000 * MS),
    "jitter": NetemOptions(1000, 10 * MS, 4 * MS),
    "correlation": NetemOptions(1000, 10 * MS, 4 * MS, delay_correlation=0.25),
    "loss": NetemOptions(1000, loss=0.3),
    "loss 100%": NetemOptions(1000, loss=1.0),
    "gilbert": NetemOptions(1000, loss=GilbertElliott.of_bursts(0.05, 5)),
    "gilbert-elliott": NetemOptions(1000, loss=GilbertElliott(0.01, 0.2, 0.25, 0.999)),
    "four states": NetemOptions(1000, loss=FourState(0.02, 0.3, 0.2, 0.5, 0.01)),
    "duplicate": NetemOptions(1000, duplicate_ratio=0.1),
    "reorder": NetemOptions(1000, 10 * MS, reorder_ratio=0.25, reorder_gap=5),
    "corrupt": NetemOptions(1000, corrupt_ratio=0.001),
    "rate": NetemOptions(1000, rate=Rate(125_000)),
    "rate, overheads": NetemOptions(1000, rate=Rate(125_000, Overhead(-14, 48, 5))),
    "rate, 64 bits": NetemOptions(1000, rate=Rate(2**33)),
    "slot": NetemOptions(1000, slot=Slot(MS, 2 * MS, packets=3, bytes=4000)),
    "ecn": NetemOptions(1000, loss=0.1, ecn=True),
    "limit": NetemOptions(12_345),
    "everything": NetemOptions(
        2000, 10 * MS, 4 * MS, 0.1, None, GilbertElliott(0.01, 0.2), 0.1, 0.5, 2, 0.01, Rate(10**6), Slot(MS, MS), True
    ),
    "nothing left of it": NetemOptions(1000),
    # These cannot be taken back, so they come last.
    "distribution": NetemOptions(1000, 10 * MS, 4 * MS, table=NORMAL),
    "slots, distribution": NetemOptions(
        1000, 10 * MS, 4 * MS, table=NORMAL, slot=Slot(mean_ns=MS, deviation_ns=MS // 5, table=NORMAL)
    ),
}
BY_TC: dict[str, NetemOptions] = {
    "limit 1000 delay 10ms 4ms": NetemOptions(1000, 10 * MS, 4 * MS),
    "limit 1000 loss 50%": NetemOptions(1000, loss=no.ratio_of(round(0.5 * (2**32 - 1)))),
    "limit 1000 loss gemodel 1% 20% 75% 0.1%": NetemOptions(1000, loss=GilbertElliott(0.01, 0.2, 0.25, 0.999)),
    "limit 1000 loss gemodel 1% 20%": NetemOptions(1000, loss=GilbertElliott(0.01, 0.2)),
    "limit 1000 loss state 2% 30% 20% 50% 1%": NetemOptions(1000, loss=FourState(0.02, 0.3, 0.2, 0.5, 0.01)),
    "limit 1000 delay 10ms reorder 25% gap 5": NetemOptions(1000, 10 * MS, reorder_ratio=0.25, reorder_gap=5),
    "limit 1000 rate 1mbit -14 48 5": NetemOptions(1000, rate=Rate(125_000, Overhead(-14, 48, 5))),
    "limit 1000 slot 1ms 2ms packets 3 bytes 4000": NetemOptions(1000, slot=Slot(MS, 2 * MS, 3, 4000)),
    "limit 1000 loss 10% ecn": NetemOptions(1000, loss=0.1, ecn=True),
    "limit 1000 duplicate 10% corrupt 1%": NetemOptions(1000, duplicate_ratio=0.1, corrupt_ratio=0.01),
}


@contextmanager
def near_end() -> Iterator[tuple[Network, Rtnetlink]]:
    with Network([SENDER]) as network, closing(open_rtnetlink(network.near.netns)) as netlink:
        yield network, netlink


def put(netlink: Rtnetlink, index: int, options: NetemOptions, verb: Any = "change") -> bytes:
    """TCA_OPTIONS as the kernel has them afterwards."""
    netem = Netem(qdisc.handle(0x100), qdisc.ROOT, options)
    netlink.ask([qdisc.request(index, Command(verb, netem))])
    return qdisc.dump(netlink, index)[netem.handle].options


def tc(network: Network, *words: str) -> str:
    argv = ["ip", "netns", "exec", network.near.netns, "tc", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout if done.returncode == 0 else f"error: {done.stderr}"


def every_option() -> dict[str, Any]:
    """Each row is a change of the row before, so what one leaves behind shows in the next."""
    rows: dict[str, Any] = {}
    with near_end() as (network, netlink):
        put(netlink, network.ifindex, NetemOptions(1), "add")
        have_tc = shutil.which("tc") is not None
        for name, options in ROWS.items():
            raw = put(netlink, network.ifindex, options)
            shown = tc(network, "-j", "qdisc", "show", "dev", network.near.ifname) if have_tc else ""
            rows[name] = {
                "wanted": described(options),
                "found": described(no.decode(raw)),
                "agrees": no.agrees(no.report(options), raw),
                "differences": no.differences(options, raw),
                "tc": json.loads(shown)[0]["options"] if shown.startswith("[") else shown,
            }
    return {"rows": rows}


def described(options: NetemOptions) -> dict[str, Any]:
    """What is not the default, without the values of tables."""
    plain = asdict(NetemOptions(1))
    found = {key: value for key, value in asdict(options).items() if value != plain[key]}
    return {key: f"{len(value)} values" if key == "table" else value for key, value in found.items()}


def set_by_tc() -> dict[str, Any]:
    """The other way round: tc writes, we read."""
    rows: dict[str, Any] = {}
    with near_end() as (network, netlink):
        for words, expected in BY_TC.items():
            said = tc(network, *f"qdisc replace dev {network.near.ifname} root handle 100: netem {words}".split())
            there = qdisc.dump(netlink, network.ifindex).get(qdisc.handle(0x100))
            rows[words] = {
                "error": said,
                "differences": no.differences(expected, there.options) if there else ["not there"],
                "decoded": described(no.decode(there.options)) if there and there.kind == "netem" else None,
            }
            tc(network, *f"qdisc del dev {network.near.ifname} root".split())
    return {"rows": rows}


def seed_refused() -> dict[str, Any]:
    with near_end() as (network, netlink):
        raw = put(netlink, network.ifindex, NetemOptions(1000, prng_seed=7), "add")
        return {"differences": no.differences(NetemOptions(1000, prng_seed=7), raw)}


def duplicates_side_by_side() -> dict[str, Any]:
    """What this kernel says to two netems of which one duplicates."""
    with near_end() as (network, netlink):
        tree = (qdisc.Prio(qdisc.handle(0x10), qdisc.ROOT, 2), *(
            Netem(qdisc.handle(0x100 + n), qdisc.handle(0x10, n + 1), NetemOptions(1000, duplicate_ratio=0.1 * n))
            for n in range(2)
        ))  # fmt: skip
        try:
            qdisc.execute(netlink, network.ifindex, qdisc.plan((), tree))
        except KernelError as error:
            return {"said": str(error)}
        return {"said": "nothing"}


def change_time() -> dict[str, Any]:
    """Seconds of a change for three senders, laid out before, on and off in turns."""
    senders = [f"10.77.0.{2 + i}" for i in range(3)]
    with port_of(Shape(), senders) as (port, _):
        rules = [rule(source, 0.9) for source in senders]
        took: list[float] = []
        for turn in range(44):
            wanted = rules if turn % 2 == 0 else []
            port.prepare(wanted)
            began = time.perf_counter()
            port.set_loss(wanted)
            took.append(time.perf_counter() - began)
        return {"on_s": took[4::2], "off_s": took[5::2]}


def port_options() -> dict[str, Any]:
    """A port whose own loss comes in bursts, and a burst on top of it; a port that duplicates behind the mask."""
    extras = Extras(table=NORMAL, limit_packets=5000, ecn=True)
    chain = chain_of_links.GilbertElliott(CHAIN.p, CHAIN.r)
    shape = Shape(delay_us=2000, jitter_us=200, rate_bps=10**9, chain=chain, extras=extras)
    found: dict[str, Any] = {"sent": 4000, "loss": CHAIN.mean_ratio, "duplicate": 0.3}
    found["clustering"] = CHAIN.clustering
    with port_of(shape) as (port, network), Traffic(network, SENDERS[0]) as traffic:
        found["steady"] = traffic.count(4000)
        port.set_loss([rule(SENDERS[0], 0.5)])
        found["burst"] = traffic.count(4000)
        port.set_loss([])
        found |= account(port)
        with open_netlink(network.near.netns) as netlink:
            found["devices"] = tx_dropped(netlink, network.near.ifname)
    extras = Extras(duplicate_ratio=0.3, slot=Slot(100_000, 200_000), overhead=Overhead(24))
    shape = Shape(delay_us=1000, rate_bps=10**9, extras=extras)
    with port_of(shape, bpf_loss=True) as (port, network), Traffic(network, SENDERS[0]) as traffic:
        found["doubled"] = traffic.count(4000)
        found["qdiscs"] = handles(network)
    return found


def reshaped() -> dict[str, Any]:
    """Another process takes a port over, installs another shape in place, and changes that."""
    with Network(SENDERS) as network:
        place = (network.near.netns, network.near.ifname)
        first, second, third = (NetemPort(name, *place) for name in ("first", "second", "third"))
        first.install(Shape(delay_us=1000, rate_bps=10**9), None, None, [])
        second.adopt(Shape(delay_us=1000, rate_bps=10**9), [])
        second.install(Shape(delay_us=3000, rate_bps=10**9, loss_ratio=0.1), None, None, [])
        second.set_shape(Shape(delay_us=5000, rate_bps=10**8))
        tbf, netem = (qdiscs(network)[qdisc.handle(major)] for major in (1, 0x100))
        try:
            third.adopt(Shape(delay_us=1000, rate_bps=10**9), [])
            refused = ""
        except LinkError as error:
            refused = str(error)
        found = described(no.decode(netem.options))
        second.close()
        return {"netem": found, "tbf": tbf.kind, "refused": refused, "left": handles(network)}


CHECKS = (
    reshaped,
    change_time,
    port_options,
    every_option,
    set_by_tc,
    seed_refused,
    duplicates_side_by_side,
)
