"""Guest side: changes of a netem port while packets pass it, as events by time make them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from guest_network import Traffic
from guest_ports import SENDERS, account, port_of, rule

from netem.kernel import netns
from netem.links.base import Extras, Shape

HERE = Path(__file__).resolve().parent
HELD_PACKETS, HELD_ROUNDS = 40, 6


def held_packet() -> dict[str, Any]:
    """A rule comes and goes while packets wait for the rate: each of them is counted once.

    40 frames of 1,042 bytes take 33 ms at 10 Mbit/s, but for the bucket's; so the queue is never empty at a change.
    """
    with port_of(Shape(rate_bps=10_000_000)) as (port, network), Traffic(network, SENDERS[0]) as traffic:
        arrived = 0
        for _ in range(HELD_ROUNDS):
            traffic.send(HELD_PACKETS, payload_bytes=1_000)
            port.set_loss([rule(SENDERS[0], 0.0)])
            traffic.send(HELD_PACKETS, payload_bytes=1_000)
            port.set_loss([])
            arrived += len(traffic.receive(quiet_s=0.3))
        return {"sent": 2 * HELD_PACKETS * HELD_ROUNDS, "arrived": arrived, **account(port)}


def ecn() -> dict[str, Any]:
    """A loss of 30 % that marks instead: 1,000 packets that can be marked, then 1,000 that cannot."""
    found: dict[str, Any] = {}
    shape = Shape(loss_ratio=0.3, extras=Extras(ecn=True))
    for name in ("bands", "alone"):
        with port_of(shape) as (port, network), Traffic(network, SENDERS[0]) as traffic:
            if name == "alone":
                port.install(shape, None, None, ())
            for capable in (True, False):
                traffic.ecn(capable)
                found[f"{name} {capable}"] = {"received": traffic.count(1_000), **account(port)}
            found[f"{name} marked"] = marked(network.far.netns)
    return found


def marked(space: str) -> int:
    """Packets that came in with "congestion experienced" (IpExt InCEPkts)."""
    text = netns.call_in(space, Path("/proc/thread-self/net/netstat").read_text)
    names, values = (line.split() for line in text.splitlines() if line.startswith("IpExt:"))
    return int(values[names.index("InCEPkts")])


def altered_run() -> dict[str, Any]:
    """Links that damage and copy packets, see altered-vm.yaml: whole runs, with the loss by eBPF and by netem."""
    by_netem = ("--set", "link.loss_engine=netem", "--set", "topology.links.0.down.duplicate=0%")
    return {"bpf": _run("altered-vm.yaml"), "netem": _run("altered-vm.yaml", *by_netem)}


def event_run() -> dict[str, Any]:
    """Loss, rate and delay by time and by iteration, at hosts and between switches, see events-vm.yaml."""
    return _run("events-vm.yaml")


def _run(name: str, *more: str) -> dict[str, Any]:
    """`dblp-netem run` of a scenario in this folder: status, output, checks of the verdict, changes."""
    parent = Path(tempfile.mkdtemp(dir="/tmp"))
    command = [sys.executable, "-B", "-m", "netem.cli", "run", str(HERE / name), "--out", str(parent), *more]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=300, check=False)
    (folder,) = parent.iterdir()
    summary = folder / "summary.json"
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return {
        "status": done.returncode,
        "output": (done.stdout + done.stderr)[-6000:],
        "checks": json.loads(summary.read_text())["fidelity"]["checks"] if summary.exists() else [],
        "manifest": json.loads((folder / "manifest.json").read_text()),
        "changes": [line for line in lines if line["event"] == "impairment"],
        "rounds": (folder / "rounds.csv").read_text() if summary.exists() else "",
    }


CHECKS = (held_packet, ecn, altered_run, event_run)
