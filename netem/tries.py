"""Tries of kernel features in a lab, each by using it: what `preflight.probe` goes through."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from netem.kernel import offload, qdisc
from netem.kernel.errors import KernelError, LabError
from netem.kernel.netns import call_in, open_rtnetlink
from netem.lab import Lab
from netem.links.base import Flow, Key, LossRule, Shape
from netem.links.bpf import BpfPort
from netem.links.netem import NetemPort

SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104  # linux/udp.h

_FLOW, _KEY = Flow("udp", dst_ports=(29600, 29699)), Key(ranges=((4, 14),), index=(4, 8))
_SOURCE = "10.77.0.2"
_HANDLE = 0x10000  # 1:

NO_NETEM = (
    "Use the backend `bpf` (chosen by itself), or a kernel that has it: Debian linux-image-amd64 (not the cloud "
    "image), Ubuntu linux-modules-extra-$(uname -r), RHEL and Fedora kernel-modules-extra; WSL2 and micro-VMs have "
    "none."
)
NO_BPF = "Use the backend `netem`, or a kernel with CONFIG_BPF_SYSCALL, CONFIG_NET_CLS_BPF and CONFIG_NET_SCH_INGRESS."
NO_TBF = "A link without `rate` works. For a rate: a kernel with CONFIG_NET_SCH_TBF (RHEL: kernel-modules-extra)."


def _try_offload(lab: Lab) -> str:
    host = lab.hosts["server"]
    features = offload.read(host.netns, host.ifname)
    return f"{len(features)} features can be set; GRO is {'on' if features.get(offload.GRO) else 'off'}"


def _try_bpf(lab: Lab) -> str:
    place = lab.port_of("server")
    port = BpfPort("probe", place.netns, place.ifname)
    try:
        port.install(Shape(), _FLOW, _KEY, [_SOURCE])
        port.set_loss([LossRule(_SOURCE, 1, 0.5)])
    finally:
        port.close()
    return "the loss program was loaded and attached to clsact"


def _try_jit(lab: Lab) -> str:
    path = Path("/proc/sys/net/core/bpf_jit_enable")
    try:
        value = path.read_text().strip()
    except OSError:  # kernels that always compile (CONFIG_BPF_JIT_ALWAYS_ON) may not show it to all
        return "not shown by this kernel"
    if value == "0":
        raise LabError("net.core.bpf_jit_enable is 0: programs are interpreted, which costs a few percent")
    return "on"


def _try_netem(lab: Lab) -> str:
    place = lab.port_of("worker1")
    port = NetemPort("probe", place.netns, place.ifname)
    try:
        port.install(Shape(delay_us=1000), _FLOW, _KEY, [_SOURCE])
        port.set_loss([LossRule(_SOURCE, 1, 0.5)])
    finally:
        port.close()
    return "delay and loss were set and read back"


def _try_qdisc(lab: Lab, wanted: qdisc.Qdisc) -> str:
    host = lab.hosts["worker1"]
    netlink = open_rtnetlink(host.netns)
    try:
        index = netlink.find(host.ifname).index
        try:
            qdisc.execute(netlink, index, qdisc.plan((), (wanted,)))
        except KernelError as error:
            if error.code == errno.ENOENT:
                raise LabError(f"this kernel has no sch_{type(wanted).__name__.lower()}") from error
            raise
        qdisc.verify(qdisc.dump(netlink, index), (wanted,))
        qdisc.execute(netlink, index, qdisc.plan((wanted,), ()))
    finally:
        netlink.close()
    return "was added, read back and removed"


def _try_udp_offload(lab: Lab, option: int) -> str:
    host = lab.hosts["worker1"]

    def exchange() -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((host.address, 0))
            if option == UDP_GRO:
                sock.setsockopt(SOL_UDP, UDP_GRO, 1)
                return "a socket takes merged packets"
            segment = [(SOL_UDP, UDP_SEGMENT, (1000).to_bytes(2, sys.byteorder))]
            sock.sendmsg([bytes(4000)], segment, 0, (lab.hosts["server"].address, 9))
            return "four datagrams were sent with one call"

    return call_in(host.netns, exchange)


_SLOW = "It works without, but slower: one system call for each packet."

TRIES: dict[str, tuple[Callable[[Lab], str], str]] = {
    "offload": (_try_offload, "Kernel 4.10 or newer."),
    "bpf": (_try_bpf, NO_BPF),
    "bpf jit": (_try_jit, "It works without, but slower. To switch it on: sysctl net.core.bpf_jit_enable=1"),
    "netem": (_try_netem, NO_NETEM),
    "tbf": (lambda lab: _try_qdisc(lab, qdisc.Tbf(_HANDLE, qdisc.ROOT, 10**9, 65536, 1 << 20)), NO_TBF),
    "prio": (lambda lab: _try_qdisc(lab, qdisc.Prio(_HANDLE, qdisc.ROOT, 3)), "Needed by the backend `netem` only."),
    "udp segmentation": (lambda lab: _try_udp_offload(lab, UDP_SEGMENT), _SLOW),
    "udp gro": (lambda lab: _try_udp_offload(lab, UDP_GRO), _SLOW),
}
