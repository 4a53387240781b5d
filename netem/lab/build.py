"""Puts a plan into the kernel: few system calls with many requests each, through sockets inside the namespaces."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from netem.kernel import bridge, ipv4, netns, offload, sysctl, veth
from netem.kernel.errors import KernelError, Unavailable
from netem.kernel.rtnetlink import Link, Request, Rtnetlink, get_link, link_of, set_up
from netem.kernel.veth import End, Pair
from netem.lab.plan import BRIDGE_IFNAME, BRIDGE_INDEX, HOST_INDEX, Host, Plan

PORT_GROUP = 77  # all ports of a switch: deleted with one request
LOOPBACK_INDEX = 1  # the first interface of every namespace

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
    """A switch port: the one that faces a host, or one that faces another switch."""

    netns: str
    ifname: str
    ifindex: int


Places = dict[tuple[str, str], PortPlace]
"""(switch, its neighbour) -> the switch's port that leads there."""


class Builder:
    """Builds a lab whose namespaces exist, from one thread, through sockets that it opens in each; `close` it."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self._plan, self._settings = plan, settings
        self._stack = ExitStack()
        self._inside: dict[str, netns.Inside] = {}

    def close(self) -> None:
        self._stack.close()

    def build(self) -> Places:
        """Everything in the namespaces, up and read back; returns all switch ports."""
        self._enter({switch.netns: {**NO_IPV6, **NO_FIREWALL} for switch in self._plan.switches})
        self._enter({host.netns: {**NO_IPV6, **TCP_SETTINGS} for host in self._plan.hosts})
        for switch in self._plan.switches:
            bridge.create(self._inside[switch.netns].netlink, BRIDGE_IFNAME, switch.mac, BRIDGE_INDEX)
        self._lay_cables()
        self._write_offloads()
        self._forward()
        known = _neighbours(self._plan)
        for host in self._plan.hosts:
            _configure_host(
                self._plan, host, self._inside[host.netns].netlink, self._settings.congestion_control, known
            )
        return self._await_ports()

    def _enter(self, sysctls: Mapping[str, Mapping[str, str]]) -> None:
        for name, values in sysctls.items():
            inside = netns.open_inside(name, lambda values=values: sysctl.write_here(values))  # type: ignore[misc]
            self._inside[name] = inside
            self._stack.callback(inside.close)

    def _lay_cables(self) -> None:
        for switch in self._plan.switches:
            netlink = self._inside[switch.netns].netlink
            pairs = [Pair(c.near, c.far, c.mtu_bytes) for c in self._plan.cables if c.near.netns == switch.netns]
            veth.create(netlink, pairs, BRIDGE_INDEX, PORT_GROUP)
        for cable in self._plan.cables:
            if cable.host is None:
                bridge.add_port(self._inside[cable.far.netns].netlink, BRIDGE_INDEX, cable.far.index, PORT_GROUP)
        ports: dict[str, list[int]] = {switch.netns: [] for switch in self._plan.switches}
        for end in _port_ends(self._plan):
            ports[end.netns].append(end.index)
        for name, indexes in ports.items():
            bridge.no_flooding(self._inside[name].netlink, indexes)

    def _write_offloads(self) -> None:
        """Segmentation happens in the host, so that the fabric sees packets of the MTU and loses them one by one.

        TSO is off at a switch's ports too: the receiving host's GRO works only then (veth_set_features). Their own GRO
        is off: what one merged, the next link would lose as one.
        """
        at_host = {
            **dict.fromkeys(offload.TSO, False),
            offload.UDP_SEGMENTATION: False,
            offload.CHECKSUM: self._settings.checksum_offload,
            offload.GRO: self._settings.gro,
            offload.GSO: self._settings.gso,
        }
        at_port = {**dict.fromkeys(offload.TSO, False), offload.GRO: False}
        features: offload.Features | None = None
        for cable in self._plan.cables:
            for end, wanted in ((cable.near, at_port), (cable.far, at_port if cable.host is None else at_host)):
                control = self._inside[end.netns].control
                features = features or offload.Features(control, end.ifname)
                features.write(control, end.ifname, wanted)

    def _forward(self) -> None:
        for switch in self._plan.switches:
            entries = [(e.index, e.mac) for e in self._plan.forwarding if e.netns == switch.netns]
            bridge.add_static(self._inside[switch.netns].netlink, entries)

    def _await_ports(self) -> Places:
        """Wait until every switch port forwards: all hosts are up by now. The first packet then is not lost."""
        ports: dict[tuple[str, str], Link] = {}
        for switch in self._plan.switches:
            for link in bridge.await_forwarding(self._inside[switch.netns].netlink, BRIDGE_INDEX):
                ports[switch.netns, link.name] = link
        for cable in self._plan.cables:
            for end in (cable.near,) if cable.host is not None else (cable.near, cable.far):
                found = ports.get((end.netns, end.ifname))
                veth.check(found, end, cable.mtu_bytes)
                if found is None or found.master != BRIDGE_INDEX:
                    raise KernelError(f"add port {end.netns}/{end.ifname} to its bridge")
        return _places(self._plan, ports)


def _port_ends(plan: Plan) -> Iterator[End]:
    """All switch ports."""
    for cable in plan.cables:
        yield cable.near
        if cable.host is None:
            yield cable.far


def _places(plan: Plan, ports: Mapping[tuple[str, str], Link]) -> Places:
    found: Places = {}
    for cable in plan.cables:
        near, far = cable.between
        ends = [(near, far, cable.near)] + ([(far, near, cable.far)] if cable.host is None else [])
        for here, there, end in ends:
            found[here, there] = PortPlace(end.netns, end.ifname, ports[end.netns, end.ifname].index)
    return found


def find_ports(plan: Plan) -> Places:
    """The switch ports of a lab that is already built. KernelError when one is missing."""
    ports: dict[tuple[str, str], Link] = {}
    for switch in plan.switches:
        with closing(netns.open_inside(switch.netns)) as inside:
            for link in inside.netlink.links(f"read the ports of {switch.netns}"):
                ports[switch.netns, link.name] = link
    for end in _port_ends(plan):
        if (end.netns, end.ifname) not in ports:
            raise KernelError(f"find interface {end.netns}/{end.ifname}", detail="not there")
    return _places(plan, ports)


def _neighbours(plan: Plan) -> dict[str, Request]:
    """A static neighbour entry for each host: the same request at all others, so written once."""
    return {
        host.name: ipv4.neighbour(f"add neighbour {host.name}", HOST_INDEX, IPv4Address(host.address), host.mac)
        for host in plan.hosts
    }


def _configure_host(
    plan: Plan, host: Host, netlink: Rtnetlink, congestion_control: str, neighbours: Mapping[str, Request]
) -> None:
    """Address, neighbours and route of one host, everything up; link and route read back.

    The congestion control is an attribute of the route (ip-route(8), congctl), for both ends of a connection. The
    sysctl would not do: a namespace may only choose what the host's tcp_allowed_congestion_control lists, which is
    often reno and the host's own default, and host-wide sysctls are not ours to change.
    """
    what = f"configure {host.netns}/{host.ifname}"
    route_what = f"set congestion control {congestion_control} at {host.name}"
    network, own = IPv4Network(plan.network), IPv4Address(host.address)
    narrower = host.path_mtu if host.path_mtu < host.mtu else None
    requests = [
        set_up(what, LOOPBACK_INDEX),
        ipv4.address(what, HOST_INDEX, own, host.prefix_length),
        set_up(what, HOST_INDEX),
        *(request for other, request in neighbours.items() if other != host.name),
        ipv4.route(route_what, HOST_INDEX, network, own, congestion_control, narrower),
        get_link(what, HOST_INDEX),
        ipv4.find_route(what, network),
    ]
    try:
        link, route = (body for _, body in netlink.ask(requests))
    except KernelError as error:
        if (error.attempted, error.code) != (route_what, errno.EINVAL):
            raise
        known = sysctl.read_here("ipv4.tcp_available_congestion_control")
        raise Unavailable(f"this kernel has no congestion control {congestion_control}", f"It has: {known}.") from error
    veth.check(link_of(link), End(host.netns, host.ifname, host.mac, HOST_INDEX), host.mtu)
    if not link_of(link).up:
        raise KernelError(what, detail="the interface is not up")
    if (found := ipv4.congestion_control_of(route)) != congestion_control:
        raise KernelError(route_what, detail=f"reads back {found}")


def read_settings(host: Host, network: str) -> Mapping[str, object]:
    """What is in force at a host of a lab with this network: sysctls, offloads, MTU."""
    with closing(netns.open_inside(host.netns)) as inside:
        ((_, route),) = inside.netlink.ask([ipv4.find_route(f"read the route of {host.name}", IPv4Network(network))])
    # Kernels whose buffer maxima are not per namespace show them in the root namespace alone.
    outside = {key: sysctl.read_here(key) for key in REPORTED_SYSCTLS}

    def read() -> dict[str, object]:
        inside = {key: sysctl.read_here(key) for key in REPORTED_SYSCTLS}
        return {
            "address": host.address,
            "mtu_bytes": host.mtu,
            "congestion_control": ipv4.congestion_control_of(route),
            "sysctls": {key: outside[key] if value is None else value for key, value in inside.items()},
            "offloads": offload.read_here(host.ifname),
        }

    return netns.call_in(host.netns, read)
