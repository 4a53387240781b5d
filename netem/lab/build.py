"""Puts a plan into the kernel. One thread inside each host's namespace does all that host needs."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from netem.kernel import bridge, netns, offload, sysctl, veth
from netem.kernel.errors import KernelError, Unavailable, attempting
from netem.lab.plan import BRIDGE_IFNAME, Host, Plan

PORT_GROUP = 77  # all ports of a switch: deleted with one request
NUD_PERMANENT = 0x80  # linux/neighbour.h
RT_SCOPE_LINK, RTPROT_KERNEL, RT_TABLE_MAIN = 253, 2, 254  # linux/rtnetlink.h

# No IPv6: its router and multicast packets are noise in captures and in counters.
NO_IPV6 = {"ipv6.conf.all.disable_ipv6": "1", "ipv6.conf.default.disable_ipv6": "1"}
# A bridge of this namespace asks no firewall (br_netfilter, by namespace since Linux 5.3): it is a switch.
NO_FIREWALL = {f"bridge.bridge-nf-call-{family}": "0" for family in ("iptables", "ip6tables", "arptables")}
DEFAULT_CONGESTION_CONTROL = "cubic"
# The kernel's own defaults, written out because hosts differ. Metrics of finished connections are not kept: transports
# run one after another, and the second would start with what the first learned about the path.
TCP_SETTINGS = {
    "ipv4.tcp_rmem": "4096 131072 6291456",
    "ipv4.tcp_wmem": "4096 16384 4194304",
    "ipv4.tcp_no_metrics_save": "1",
}
REPORTED_SYSCTLS = (
    *TCP_SETTINGS,
    "ipv4.tcp_sack",
    "ipv4.tcp_ecn",
    "ipv4.tcp_timestamps",
    "core.rmem_max",
    "core.wmem_max",
    "core.rmem_default",
    "core.wmem_default",
)


@dataclass(frozen=True)
class Settings:
    """What a lab sets in its namespaces beyond the topology.

    checksum_offload: False makes hosts compute checksums before the packets leave, for captures without "bad
        checksum"; on kernels before 6.11 a socket can then not use UDP_SEGMENT (EIO).
    gso: False makes TCP hand over single packets. Needed where a host's own qdisc has a rate or a delay: what a sender
        leaves to be cut would pass it, and be dropped, as one. Senders of UDP must not use UDP_SEGMENT there.
    """

    congestion_control: str = DEFAULT_CONGESTION_CONTROL
    checksum_offload: bool = True
    gro: bool = True
    gso: bool = True


@dataclass(frozen=True)
class PortPlace:
    """The switch port that faces a host."""

    netns: str
    ifname: str
    ifindex: int


def build_switches(plan: Plan) -> dict[str, PortPlace]:
    """Bridges and all veth pairs; returns the port that faces each host."""
    with ExitStack() as stack:
        netlinks: dict[str, IPRoute] = {}
        bridges: dict[str, int] = {}
        for switch in plan.switches:
            netlink = netlinks[switch.netns] = netns.open_netlink(switch.netns)
            stack.callback(netlink.close)
            netns.call_in(switch.netns, lambda: sysctl.write_here({**NO_IPV6, **NO_FIREWALL}))
            bridges[switch.netns] = bridge.create(netlink, BRIDGE_IFNAME, switch.mac)
        ports, places = _lay_cables(plan, netlinks)
        for space, netlink in netlinks.items():
            own = {ifname: index for (where, ifname), index in ports.items() if where == space}
            _quiet_ports(space, tuple(own))
            for index in own.values():
                bridge.add_port(netlink, bridges[space], index, PORT_GROUP)
        for entry in plan.forwarding:
            bridge.add_static(netlinks[entry.netns], ports[entry.netns, entry.ifname], entry.mac)
    return places


def _lay_cables(plan: Plan, netlinks: Mapping[str, IPRoute]) -> tuple[dict[tuple[str, str], int], dict[str, PortPlace]]:
    """Create the veth pairs; the indexes of all switch ports, and the port that faces each host."""
    ports: dict[tuple[str, str], int] = {}
    places: dict[str, PortPlace] = {}
    for cable in plan.cables:
        near, far = cable.near, cable.far
        ports[near.netns, near.ifname] = index = veth.create(netlinks[near.netns], near, far, cable.mtu_bytes)
        if cable.host is not None:
            places[cable.host] = PortPlace(near.netns, near.ifname, index)
        else:
            ports[far.netns, far.ifname] = veth.index_of(netlinks[far.netns], far.ifname, cable.mtu_bytes)
    return ports, places


def await_ports(plan: Plan) -> None:
    """Wait until every switch port forwards: all hosts are up by now. The first packet then is not lost."""
    for switch in plan.switches:
        netlink = netns.open_netlink(switch.netns)
        try:
            bridge.await_forwarding(netlink, veth.index_of(netlink, BRIDGE_IFNAME))
        finally:
            netlink.close()


def find_ports(plan: Plan) -> dict[str, PortPlace]:
    """The port that faces each host of a lab that is already built."""
    places: dict[str, PortPlace] = {}
    for switch in plan.switches:
        netlink = netns.open_netlink(switch.netns)
        try:
            for cable in plan.cables:
                if cable.host is not None and cable.near.netns == switch.netns:
                    index = veth.index_of(netlink, cable.near.ifname)
                    places[cable.host] = PortPlace(switch.netns, cable.near.ifname, index)
        finally:
            netlink.close()
    return places


def _quiet_ports(space: str, ifnames: tuple[str, ...]) -> None:
    """TSO off at a switch's ports: the receiving host's GRO works only then (veth_set_features)."""

    def switch_off() -> None:
        for ifname in ifnames:
            offload.write_here(ifname, dict.fromkeys(offload.TSO, False))

    netns.call_in(space, switch_off)


def build_host(plan: Plan, host: Host, settings: Settings) -> None:
    """Addresses, neighbours, sysctls and offloads of one host, everything up; read back."""
    # Segmentation happens in the host, so that the fabric sees packets of the MTU and loses them one by one.
    offloads = {
        **dict.fromkeys(offload.TSO, False),
        offload.UDP_SEGMENTATION: False,
        offload.CHECKSUM: settings.checksum_offload,
        offload.GRO: settings.gro,
        offload.GSO: settings.gso,
    }

    def configure() -> None:
        sysctl.write_here({**NO_IPV6, **TCP_SETTINGS})
        offload.write_here(host.ifname, offloads)

    netns.call_in(host.netns, configure)
    netlink = netns.open_netlink(host.netns)
    try:
        with attempting(f"configure {host.netns}/{host.ifname}"):
            _configure_links(plan, host, netlink)
        _set_congestion_control(plan, host, netlink, settings.congestion_control)
    finally:
        netlink.close()


def _configure_links(plan: Plan, host: Host, netlink: IPRoute) -> None:
    index = veth.index_of(netlink, host.ifname, host.mtu)
    netlink.link("set", index=1, state="up")  # lo is always the first
    netlink.addr("add", index=index, address=host.address, prefixlen=host.prefix_length)
    netlink.link("set", index=index, state="up")
    for other in plan.neighbours(host):
        netlink.neigh("replace", dst=other.address, lladdr=other.mac, ifindex=index, state=NUD_PERMANENT)
    link = netlink.link("get", index=index)[0]
    if link.get("address") != host.mac or link.get("state") != "up":
        raise KernelError(f"configure {host.netns}/{host.ifname}", detail="the interface is not as set")


def _set_congestion_control(plan: Plan, host: Host, netlink: IPRoute, name: str) -> None:
    """Set the algorithm as an attribute of the lab's route (ip-route(8), congctl), for both ends of a connection.

    The sysctl would not do: a namespace may only choose what the host's tcp_allowed_congestion_control lists, which is
    often reno and the host's own default, and host-wide sysctls are not ours to change.
    """
    route = {
        "dst": f"{plan.network}",
        "oif": veth.index_of(netlink, host.ifname),
        "scope": RT_SCOPE_LINK,
        "proto": RTPROT_KERNEL,  # as the kernel's own route, which this one replaces
        "prefsrc": host.address,
    }
    with attempting(f"set congestion control {name} at {host.name}"):
        try:
            netlink.route("replace", **route, metrics={"cc_algo": name})
        except NetlinkError as error:
            if error.code != errno.EINVAL:
                raise
            known = sysctl.read_here("ipv4.tcp_available_congestion_control")
            raise Unavailable(f"this kernel has no congestion control {name}", f"It has: {known}.") from error
    found = _congestion_control(netlink)
    if found != name:
        raise KernelError(f"set congestion control {name} at {host.name}", detail=f"reads back {found}")


def _congestion_control(netlink: IPRoute) -> str | None:
    """The algorithm of the routes of the main table, None where they leave it to the sysctl."""
    for route in netlink.get_routes(table=RT_TABLE_MAIN, family=socket.AF_INET):
        metrics = route.get_attr("RTA_METRICS")
        if metrics is not None and metrics.get_attr("RTAX_CC_ALGO"):
            return str(metrics.get_attr("RTAX_CC_ALGO"))
    return None


def read_settings(host: Host) -> Mapping[str, object]:
    """What is in force at a host: sysctls, offloads, MTU."""

    netlink = netns.open_netlink(host.netns)
    try:
        congestion_control = _congestion_control(netlink)
    finally:
        netlink.close()
    # Kernels whose buffer maxima are not per namespace show them in the root namespace alone.
    outside = {key: sysctl.read_here(key) for key in REPORTED_SYSCTLS}

    def read() -> dict[str, object]:
        inside = {key: sysctl.read_here(key) for key in REPORTED_SYSCTLS}
        return {
            "address": host.address,
            "mtu_bytes": host.mtu,
            "congestion_control": congestion_control,
            "sysctls": {key: outside[key] if value is None else value for key, value in inside.items()},
            "offloads": offload.read_here(host.ifname),
        }

    return netns.call_in(host.netns, read)
