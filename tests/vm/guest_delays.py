"""Guest side: whole runs over links that delay, and what their probes say: once as asked, once with a link that lies.

`python guest_delays.py LIE_US ARGUMENT...` is `dblp-netem ARGUMENT...` in which the workers' own interfaces hold back
every packet for so long, which nobody asked for: nothing but probes can tell.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from netem.experiment.conductor import Conductor  # noqa: E402
from netem.kernel import qdisc  # noqa: E402
from netem.kernel.netem_options import NetemOptions  # noqa: E402
from netem.kernel.netns import open_rtnetlink  # noqa: E402

SCENARIO = """\
name: delays
seed: 3
topology: {{star: {{workers: 2}}, links: [{{between: [server, sw], {server}}}, {{between: ["worker*", sw]}}]}}
workload: {{kind: replay, chunks: 100, iterations: {iterations}, compute: 10 ms}}
profile: paper
latencies: reported
transports: {{mlt: {{fixed: 0.8%}}}}
link: {{backend: netem}}
deadlines: {{connect: 180 s, round: 90 s}}
{extra}
"""
FIVE, NORMAL = "down: {delay: 5 ms}", "down: {delay: 10 ms, jitter: 2 ms, distribution: normal}, reorder: allow"
LIE_US = 3_000
EVENT = "events: [{at: 200 ms, for: 1 s, delay: 12 ms, on: [server.down]}]"


def run(server: str, *, lie_us: int = 0, iterations: int = 5, extra: str = "") -> dict[str, Any]:
    """Exit status, output and delay checks of one run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "delays.yaml").write_text(SCENARIO.format(server=server, iterations=iterations, extra=extra))
        command = [sys.executable, "-B", __file__, str(lie_us), "run", str(folder / "delays.yaml"), "--out", name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        found: dict[str, Any] = {"status": done.returncode, "output": (done.stdout + done.stderr)[-8000:]}
        for summary in folder.glob("*/summary.json"):
            content = json.loads(summary.read_text())
            found["faithful"] = content["fidelity"]["faithful"]
            found["delays"] = content["transports"]["mlt"]["delays"]
            found["failed"] = [check["name"] for check in content["fidelity"]["checks"] if not check["ok"]]
    return found


def delays_as_asked() -> dict[str, Any]:
    return run(FIVE)


def delays_of_a_liar() -> dict[str, Any]:
    return run(FIVE, lie_us=LIE_US)


def delays_with_jitter() -> dict[str, Any]:
    return run(NORMAL)


def delays_in_an_event() -> dict[str, Any]:
    return run(FIVE, iterations=60, extra=EVENT)


CHECKS: tuple[Callable[[], dict[str, Any]], ...] = (
    delays_as_asked, delays_of_a_liar, delays_with_jitter, delays_in_an_event,
)  # fmt: skip


def _lie(delay_us: int) -> None:
    """From now on jobs run over slower links than those that were installed."""
    install = Conductor._install

    def installed(self: Conductor) -> None:
        for host in self.lab.hosts.values():
            if host.rank:
                with closing(open_rtnetlink(host.netns)) as netlink:
                    options = NetemOptions(1000, delay_ns=1000 * delay_us)
                    part = qdisc.Netem(qdisc.handle(0x200), qdisc.ROOT, options)
                    qdisc.execute(netlink, netlink.find(host.ifname).index, [qdisc.Command("add", part)])
        install(self)

    Conductor._install = installed  # type: ignore[method-assign]


if __name__ == "__main__":
    from netem.cli import main

    if int(sys.argv[1]):
        _lie(int(sys.argv[1]))
    sys.argv[1:] = sys.argv[2:]
    sys.exit(main())
