"""(c) All-reduce of 16 MB among three workers, beside Gloo's in the same lab, clean and with loss of all traffic.

dblp    a server and three workers, recommended profile, p 0.8 %; the product's own replay. Its control connections
        have TCP cubic.
Gloo    torch.distributed among the three workers' hosts, with TCP cubic and TCP bbr as attribute of the hosts' routes.

Loss is steady and random, at every switch port towards a host and whatever the packet: data, acknowledgements,
control, connection set-up. So each packet has one chance to be lost on its way. A sample is the time from one
all-reduce's end to the next one's as one worker sees it: one scaled copy of the gradient, the exchange, the result. The
first is not counted. Everyone's gradients have 11,000 chunks of 364 float32.
"""

from __future__ import annotations

import errno
import importlib.util
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from ipaddress import IPv4Interface
from itertools import pairwise

from benchmarks.bench_flow import CHUNKS, MTU_BYTES
from benchmarks.harness import Context, Line, Spread, alternate, ratio
from benchmarks.testbed import Testbed, replay, standing
from dblp.wire import chunk_values
from netem.experiment.conductor import Conductor
from netem.experiment.hub import Event
from netem.kernel import ipv4, netns
from netem.kernel.errors import KernelError
from netem.lab import Lab
from netem.lab.plan import HOST_INDEX

TITLE = "(c) all-reduce of 16 MB, 3 workers"
WORKERS = 3
LOSSES, QUICK_LOSSES = ("0%", "0.1%", "1%", "5%"), ("0%", "1%")
CONTROLS = ("cubic", "bbr")
ALL_REDUCES = {"0%": 8, "0.1%": 8, "1%": 8, "5%": 4}  # at 5 % one over TCP cubic takes ten seconds and more
LIMIT_S = 240.0
OVER_GLOO, GLOO_OVER = 1.0, {"1%": 3.0, "5%": 10.0}


def measure(context: Context) -> list[Line]:
    lines: list[Line] = []
    for loss in QUICK_LOSSES if context.quick else LOSSES:
        context.say(f"loss of all traffic {loss}")
        lines += _with_loss(context, loss)
    return lines


def _with_loss(context: Context, loss: str) -> list[Line]:
    all_reduces = 4 if context.quick else ALL_REDUCES[loss]
    text = replay(WORKERS, CHUNKS, all_reduces, "{dblp: {fixed: 0.8%}}")
    links = f'[{{between: ["*", sw], down: {{loss: {loss}}}}}]'
    text = text.replace(f"{{star: {{workers: {WORKERS}}}}}", f"{{star: {{workers: {WORKERS}}}, links: {links}}}")
    with standing(text, context.scratch()) as bed:
        shares: dict[str, list[float]] = {}
        contestants: dict[str, Callable[[], list[float]]] = {"dblp": partial(_counted, bed, shares, "dblp", dblp_s)}
        absent = "" if importlib.util.find_spec("torch") else "torch is not installed"
        known = [] if absent else [name for name in CONTROLS if set_congestion_control(bed.lab, name)]
        for name in known:
            contestants[name] = partial(_counted, bed, shares, name, partial(gloo_s, control=name, times=all_reduces))
        turns = alternate(contestants, context.repeats(3, 1))
    samples = {name: [value for turn in each for value in turn] for name, each in turns.items()}
    context.record(f"all_reduce_s, loss {loss}", samples)
    context.record(f"lost_share, loss {loss}", shares)
    return _lines(loss, samples, shares, absent)


def _counted(
    bed: Testbed, shares: dict[str, list[float]], name: str, job: Callable[[Testbed], list[float]]
) -> list[float]:
    """Run a job, and keep the share of packets that the ports dropped meanwhile."""
    samples = job(bed)
    counters = [counter for port in bed.fabric.ports.values() for counter in port.counters()]
    dropped, seen = (sum(getattr(counter, key) for counter in counters) for key in ("dropped", "seen"))
    shares.setdefault(name, []).append(dropped / max(1, seen))
    return samples


def _lines(loss: str, samples: dict[str, list[float]], shares: dict[str, list[float]], absent: str) -> list[Line]:
    shown = {
        name: f"{Spread.of(each).shown(1e3, 'ms')}, lost {max(shares[name]):.2%}" for name, each in samples.items()
    }
    lines = [Line(f"loss {loss}: dblp", 1e3 * Spread.of(samples["dblp"]).median, unit="ms", detail=shown["dblp"])]
    for control in CONTROLS:
        line = _over_gloo(control) if loss == "0%" else _gloo_over(loss, control)
        if control not in samples:
            line = replace(line, missing=absent or f"this kernel has no TCP {control}")
        else:
            value = ratio(samples["dblp"], samples[control])
            line = replace(line, value=value if line.sense == "at most" else 1 / value, detail=shown[control])
        lines.append(line)
    return lines


def _over_gloo(control: str) -> Line:
    return Line(f"loss 0%: dblp over Gloo ({control})", None, OVER_GLOO if control == "cubic" else None)


def _gloo_over(loss: str, control: str) -> Line:
    """How many times longer Gloo takes. With bbr it is shown, not judged."""
    limit = GLOO_OVER.get(loss) if control == "cubic" else None
    return Line(f"loss {loss}: Gloo ({control}) over dblp", None, limit, "at least")


class Steps:
    """When each worker had the result of each all-reduce; a `Watch`."""

    def __init__(self) -> None:
        self._ends: dict[int, list[float]] = {}

    def __call__(self, conductor: Conductor, event: Event) -> None:
        if event["event"] == "received" and event["direction"] == "down":
            self._ends.setdefault(event["worker"], []).append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From end to end, all workers'."""
        return [after - before for ends in self._ends.values() for before, after in pairwise(ends)]


def dblp_s(bed: Testbed) -> list[float]:
    """Seconds of each all-reduce at each worker but the first; see Steps."""
    set_congestion_control(bed.lab, "cubic")
    steps = Steps()
    bed.run("dblp", steps)
    return steps.seconds()


def gloo_s(bed: Testbed, control: str, times: int) -> list[float]:
    """The same of Gloo over TCP with this congestion control."""
    set_congestion_control(bed.lab, control)
    bed.fabric.wiring.install_steady()  # a job of dblp tells the ports about its own senders only
    values = CHUNKS * chunk_values(MTU_BYTES)
    arguments = (str(WORKERS), bed.star.address("worker1"), str(values), str(times))
    ranks = [bed.star.python(f"worker{rank + 1}", "benchmarks.gloo", str(rank), *arguments) for rank in range(WORKERS)]
    return [seconds for rank in ranks for seconds in rank.report(LIMIT_S)]


def set_congestion_control(lab: Lab, name: str) -> bool:
    """Set the algorithm at every host of a lab and read it back; False when this kernel does not have it."""
    for host in lab.hosts.values():
        own, what = IPv4Interface(f"{host.address}/{host.prefix_length}"), f"set TCP {name} at {host.name}"
        with closing(netns.open_inside(host.netns)) as inside:
            try:
                inside.netlink.ask([ipv4.route(what, HOST_INDEX, own.network, own.ip, name)])
            except KernelError as error:
                if error.code != errno.EINVAL:
                    raise
                return False
            ((_, found),) = inside.netlink.ask([ipv4.find_route(what, own.network)])
        if ipv4.congestion_control_of(found) != name:
            raise KernelError(what, detail="reads back another one")
    return True
