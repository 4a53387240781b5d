"""Guest side: runs the checks of the netem backend on a real sch_netem and writes what it measured as JSON.

`python guest_checks.py RESULT` as root. Nothing is judged here: the tests on the host do. A check that raises
leaves {"error": traceback}, and the others run.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import guest_delays  # noqa: E402
import guest_events  # noqa: E402
import guest_fidelity  # noqa: E402
import guest_options  # noqa: E402
import guest_path  # noqa: E402
from guest_network import DATA_PORT, RECEIVER, Traffic  # noqa: E402
from guest_ports import FLOW, KEY, SENDERS, account, handles, port_of, qdiscs, rule  # noqa: E402

from netem.kernel import qdisc  # noqa: E402
from netem.kernel.netns import open_netlink  # noqa: E402
from netem.kernel.user import User  # noqa: E402
from netem.links.base import Flow, LinkError, Shape, UnsupportedFeature  # noqa: E402
from netem.links.netem import NetemPort  # noqa: E402
from netem.links.tree import netem_handle  # noqa: E402
from netem.preflight import first_closed  # noqa: E402

RESULT = Path(sys.argv[1])
LOSS_PACKETS = 10_000
Check = Callable[[], dict[str, Any]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@check
def kernel() -> dict[str, Any]:
    with port_of(Shape()) as (_, network):
        modules = Path("/proc/modules").read_text()
        return {
            "release": platform.release(),
            "netem": "sch_netem" in modules,
            "qdiscs": handles(network),
            "loss_engine": NetemPort("p", None, "lo").loss_engine,
        }


@check
def delay() -> dict[str, Any]:
    """Round trips without delay and with 10 ms at the port, in both classes, and with 10 +- 4 ms."""
    with port_of(Shape()) as (port, network), Traffic(network, SENDERS[0]) as traffic:
        port.set_loss([rule(SENDERS[0], 0.0)])
        traffic.round_trips_s(5)
        found: dict[str, Any] = {"base_s": statistics.median(traffic.round_trips_s(50))}
        port.install(Shape(delay_us=10_000), FLOW, KEY, SENDERS)
        port.set_loss([rule(SENDERS[0], 0.0)])
        found["data_s"] = statistics.median(traffic.round_trips_s(50))
        found["other_s"] = statistics.median(traffic.round_trips_s(50, other=True))
        port.install(Shape(delay_us=10_000, jitter_us=4_000), FLOW, KEY, SENDERS)
        found["jittered_s"] = sorted(traffic.round_trips_s(50))
        return found


@check
def jitter_order() -> dict[str, Any]:
    """200 packets through 10 +- 8 ms: with a rate in order, without one not."""
    found = {}
    for name, rate_bps in (("rated", 10**9), ("unrated", None)):
        shape = Shape(delay_us=10_000, jitter_us=8_000, rate_bps=rate_bps)
        with port_of(shape) as (_, network), Traffic(network, SENDERS[0]) as traffic:
            for index in range(200):
                traffic.send(1, index=index)
            found[name] = [index for index, _ in traffic.receive(quiet_s=0.5)]
    return found


def _loss(ratio: float, shape: Shape, *, bpf_loss: bool = False) -> dict[str, Any]:
    with (
        port_of(shape, bpf_loss=bpf_loss) as (port, network),
        Traffic(network, SENDERS[0]) as hit,
        Traffic.sharing(hit, network, SENDERS[1]) as spared,
    ):
        port.set_loss([rule(SENDERS[0], ratio)])
        found = {
            "requested": ratio,
            "sent": LOSS_PACKETS,
            "received": hit.count(LOSS_PACKETS),
            "control_sent": 500,
            "control_received": hit.count(500, other=True),
            "spared_sent": 500,
            "spared_received": spared.count(500),
            **account(port),
        }
        port.set_loss([])
        found["after_sent"] = 2_000
        found["after_received"] = hit.count(2_000)
        found["after"] = account(port)
        return found


@check
def loss_50() -> dict[str, Any]:
    return _loss(0.5, Shape())


@check
def loss_90() -> dict[str, Any]:
    return _loss(0.9, Shape(delay_us=2_000))


@check
def loss_90_by_bpf() -> dict[str, Any]:
    return _loss(0.9, Shape(delay_us=2_000), bpf_loss=True)


@check
def base_loss() -> dict[str, Any]:
    """A link's own loss: 2 % of all packets; with a rule of 50 % on top, 51 % of that sender's data."""
    with port_of(Shape(loss_ratio=0.02)) as (port, network), Traffic(network, SENDERS[0]) as traffic:
        found = {"sent": LOSS_PACKETS, "received": traffic.count(LOSS_PACKETS)}
        port.set_loss([rule(SENDERS[0], 0.5)])
        found["rule_received"] = traffic.count(LOSS_PACKETS)
        return found | account(port)


@check
def change_in_place() -> dict[str, Any]:
    """Loss and delay change while 400 packets wait in the delay: none of them may be lost."""
    with port_of(Shape(delay_us=5_000_000)) as (port, network), Traffic(network, SENDERS[0]) as traffic:
        port.set_loss([rule(SENDERS[0], 0.0)])
        before = handles(network)
        traffic.send(200)
        traffic.send(200, other=True)
        port.set_loss([rule(SENDERS[0], 1.0)])
        found = qdiscs(network)
        waiting = [found[netem_handle(band)].stats.waiting for band in range(3)]
        port.set_loss([rule(SENDERS[0], 0.0)])
        port.set_loss([])
        port.install(Shape(delay_us=1_000), FLOW, KEY, SENDERS)
        received = len(traffic.receive(quiet_s=1.0, first_s=8)) + len(traffic.receive(quiet_s=1.0, other=True))
        started = time.monotonic()
        port.set_loss([rule(SENDERS[0], 0.9)])
        applied = time.monotonic()
        port.set_loss([])
        cleared = time.monotonic()
        return {
            "before": before, "after": handles(network), "waiting": waiting, "sent": 400, "received": received,
            "apply_s": applied - started, "clear_s": cleared - applied,
            "later_sent": 5_000, "later_received": traffic.count(5_000), **account(port),
        }  # fmt: skip


@check
def window() -> dict[str, Any]:
    """A rule for rounds 41..42 at 100 % leaves rounds 40 and 43 whole; one for round 44 is counted under 44."""
    with port_of(Shape()) as (port, network), Traffic(network, SENDERS[0]) as traffic:
        port.set_loss([rule(SENDERS[0], 1.0, first=41, last=42)])
        for index in (40, 41, 42, 43):
            traffic.send(100, index=index)
        port.set_loss([rule(SENDERS[0], 0.5, first=44, last=44)])
        for index in (43, 44):
            traffic.send(400, index=index)
        port.set_loss([])
        traffic.send(100, index=44)
        arrived = [index for index, _ in traffic.receive(quiet_s=0.3)]
        return {"received": {str(i): arrived.count(i) for i in range(40, 45)}, **account(port)}


@check
def match_all() -> dict[str, Any]:
    with (
        port_of(Shape()) as (port, network),
        Traffic(network, SENDERS[0]) as hit,
        Traffic.sharing(hit, network, SENDERS[1]) as spared,
    ):
        port.set_loss([rule(SENDERS[0], 1.0, match="all")])
        received = {"data": hit.count(100), "other": hit.count(100, other=True)}
        spared_received = {"data": spared.count(100), "other": spared.count(100, other=True)}
        return {"hit": received, "spared": spared_received, **account(port)}


@check
def overflow() -> dict[str, Any]:
    """300 packets into a limit of 100, with 3 s of delay and no loss."""
    shape = Shape(delay_us=3_000_000, limit_packets=100)
    with port_of(shape) as (port, network), Traffic(network, SENDERS[0]) as traffic:
        port.set_loss([rule(SENDERS[0], 0.0)])
        traffic.send(300)
        return {"received": len(traffic.receive(quiet_s=1.0, first_s=8)), **account(port)}


@check
def rate() -> dict[str, Any]:
    """100 frames of 1,042 bytes at 1 Mbit/s behind 20 ms of delay; half of another 2,000 small ones lost."""
    shape = Shape(delay_us=20_000, rate_bps=1_000_000)
    with port_of(shape) as (port, network), Traffic(network, SENDERS[0]) as traffic:
        began = time.monotonic()
        traffic.send(100, payload_bytes=1_000)
        arrivals = [at for _, at in traffic.receive(quiet_s=1.0)]
        port.install(Shape(delay_us=20_000, rate_bps=10**9), FLOW, KEY, SENDERS)
        port.set_loss([rule(SENDERS[0], 0.5)])
        return {
            "sent": 100, "frame_bytes": 1_042, "burst_bytes": qdisc.burst_bytes(1_000_000, 1500),
            "received": len(arrivals), "first_s": arrivals[0] - began, "spread_s": arrivals[-1] - arrivals[0],
            "lossy_sent": 2_000, "lossy_received": traffic.count(2_000, batch=100),
            "qdiscs": handles(network), **account(port),
        }  # fmt: skip


@check
def tcp_flow() -> dict[str, Any]:
    """With a TCP flow the connection's packets are data; 100 % keeps it from connecting, 0 % again lets it."""
    flow = Flow("tcp", dst_ports=(DATA_PORT, DATA_PORT))
    with port_of(Shape(), flow=flow) as (port, network):
        server = network.tcp("far", lambda: socket.create_server((RECEIVER, DATA_PORT)))

        def connect(timeout_s: float) -> str:
            def make() -> socket.socket:
                address = (RECEIVER, DATA_PORT)
                return socket.create_connection(address, timeout=timeout_s, source_address=(SENDERS[0], 0))

            try:
                network.tcp("near", make).close()
            except TimeoutError:
                return "timed out"
            return "connected"

        with server:
            port.set_loss([rule(SENDERS[0], 1.0)])
            lost = connect(0.5)
            port.set_loss([rule(SENDERS[0], 0.0)])
            return {"lost": lost, "clear": connect(5.0), **account(port)}


@check
def many_senders() -> dict[str, Any]:
    """20 senders: rules of one ratio share a band; 16 different ratios at once are refused."""
    senders = [f"10.77.0.{2 + i}" for i in range(20)]
    with (
        port_of(Shape(), senders) as (port, network),
        Traffic(network, senders[0]) as first,
        Traffic.sharing(first, network, senders[1]) as second,
        Traffic.sharing(first, network, senders[2]) as third,
    ):
        port.set_loss([rule(s, 1.0 if s == senders[0] else 0.5) for s in senders])
        found: dict[str, Any] = {"received": first.count(100)}
        found["shared_received"] = second.count(600) + third.count(200)
        found |= account(port)
        try:
            port.set_loss([rule(s, (1 + i) / 40) for i, s in enumerate(senders)])
        except UnsupportedFeature as error:
            found["refused"] = str(error)
        return found


@check
def tampering() -> dict[str, Any]:
    """Somebody else changes a qdisc behind our back: the next change says so."""
    with port_of(Shape()) as (port, network):
        with open_netlink(network.near.netns) as ipr:
            ipr.tc("change", "netem", network.ifindex, netem_handle(0), parent=0x100001, limit=77, loss=3)
        try:
            port.set_loss([rule(SENDERS[0], 0.5)])
        except LinkError as error:
            return {"error_text": str(error)}
        return {"error_text": ""}


@check
def burst_run() -> dict[str, Any]:
    """The whole product on this kernel: a replay run with delay and one burst, see burst-vm.yaml."""
    parent = Path("/tmp/vm-runs")  # in the machine's memory: the shared folder (9p) takes no Unix sockets
    scenario = Path(__file__).with_name("burst-vm.yaml")
    command = [sys.executable, "-m", "netem.cli", "run", str(scenario), "--out", str(parent)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    shared = RESULT.parent / "runs"
    shutil.copytree(parent, shared, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))
    folders = sorted(str(path) for path in shared.glob("*") if path.is_dir())
    return {"status": done.returncode, "output": (done.stdout + done.stderr)[-8000:], "folders": folders}


@check
def rootless_run() -> dict[str, Any]:
    """burst-vm.yaml as a user who is not root, without sudo."""
    nobody = User.of(65534)
    parent = Path(tempfile.mkdtemp(dir="/tmp"))  # open to everyone, which the results' folder is not
    parent.chmod(0o777)
    for path in (Path(sys.executable), ROOT / "netem", *map(Path, sys.path)):
        while path.exists() and (closed := first_closed(path, nobody)):
            _open_for_all(Path(closed.split(" is closed")[0]))
    command = [sys.executable, "-B", "-m", "netem.cli", "run", str(Path(__file__).with_name("burst-vm.yaml"))]
    done = subprocess.run(
        [*command, "--out", str(parent)], cwd="/", capture_output=True, text=True, timeout=600, check=False,
        user=nobody.uid, group=nobody.gid, extra_groups=[], env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    owners = sorted({path.stat().st_uid for path in parent.rglob("*")})
    return {"status": done.returncode, "output": (done.stdout + done.stderr)[-8000:], "owners": owners}


def _open_for_all(folder: Path) -> None:
    """The interpreter may lie where only root can read: over such a folder lies one of the machine's own."""
    layers = Path(tempfile.mkdtemp())
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", layers], check=True, timeout=60)  # /tmp may be layers itself
    for name in ("upper", "work"):
        (layers / name).mkdir()
    options = f"lowerdir={folder},upperdir={layers / 'upper'},workdir={layers / 'work'}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, folder], check=True, timeout=60)
    folder.chmod(folder.stat().st_mode | 0o555)


@check
def long_path() -> dict[str, Any]:
    """Rounds of the transport over 5 ms each way and 60 to 90 % loss, see guest_path.py."""
    return guest_path.measure()


@check
def provision() -> dict[str, Any]:
    """vagrant/provision.sh on a machine where everything is installed already: the modules, `make install`, doctor."""
    script = ROOT / "vagrant" / "provision.sh"
    done = subprocess.run(["bash", script, ROOT], capture_output=True, text=True, timeout=600, check=False)
    return {"status": done.returncode, "output": (done.stdout + done.stderr)[-8000:]}


@check
def clean_up() -> dict[str, Any]:
    with port_of(Shape(delay_us=1_000, rate_bps=10**9)) as (port, network):
        port.close()
        return {"qdiscs": handles(network)}


for function in (*guest_options.CHECKS, *guest_delays.CHECKS, *guest_events.CHECKS, *guest_fidelity.CHECKS):
    check(function)


def main(names: list[str]) -> None:
    found: dict[str, Any] = {"boot_s": float(Path("/proc/uptime").read_text().split()[0])}
    for name in names or CHECKS:
        began = time.monotonic()
        try:
            found[name] = CHECKS[name]()
        except Exception:
            found[name] = {"error": traceback.format_exc()}
        found[name]["took_s"] = round(time.monotonic() - began, 2)
        RESULT.write_text(json.dumps(found, indent=1))
        print(name, found[name].get("error", "done"), found[name]["took_s"], flush=True)


if __name__ == "__main__":
    main(sys.argv[2:])
