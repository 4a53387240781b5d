"""Netlink messages as bytes: what we write, pyroute2 reads, and the other way round. No kernel needed."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from netem.kernel import ipv4
from netem.kernel import rtnetlink as rt


def decoded(kind: type, body: bytes) -> object:
    """A message body as pyroute2 reads it."""
    message = kind(bytes(16 + len(body)))
    raw = (16 + len(body)).to_bytes(4, "little") + bytes(12) + body
    message = kind(raw)
    message.decode()
    return message


@pytest.mark.parametrize(
    ("values", "raw"),
    [
        ({}, ""),
        ({4: 1500}, "0800 0400 dc050000"),
        ({3: "p1"}, "0700 0300 703100 00"),
        ({1: b"\x02\x00\x00\x00\x00\x07"}, "0a00 0100 020000000007 0000"),
        ({2: {1: "x"}}, "0c00 0200 0600 0100 7800 0000"),
        ({1: IPv4Address("10.77.0.2")}, "0800 0100 0a4d0002"),
    ],
)
def test_attributes_as_the_kernel_lays_them_out(values: dict[int, rt.Value], raw: str) -> None:
    assert rt.encode(values) == bytes.fromhex(raw)


@given(st.dictionaries(st.integers(1, 100), st.binary(max_size=40)))
def test_attributes_survive_a_round_trip(values: dict[int, bytes]) -> None:
    assert rt.attributes(rt.encode(values)) == values


@given(st.binary(max_size=200))
def test_any_bytes_can_be_read(raw: bytes) -> None:
    """Attributes that lie about their length end the list; nothing hangs or raises."""
    assert all(len(value) <= len(raw) for value in rt.attributes(raw).values())


def test_pyroute2_reads_a_link() -> None:
    values: dict[int, rt.Value] = {
        rt.IFLA_IFNAME: "p1",
        rt.IFLA_MTU: 9000,
        rt.IFLA_ADDRESS: rt.mac_bytes("02:00:0a:00:00:01"),
    }
    message = decoded(ifinfmsg, rt.link_body(7, values, up=True))
    assert (message["index"], message["flags"], message["change"]) == (7, 1, 1)
    assert message.get_attr("IFLA_IFNAME") == "p1"
    assert message.get_attr("IFLA_MTU") == 9000
    assert message.get_attr("IFLA_ADDRESS") == "02:00:0a:00:00:01"


def test_a_link_that_pyroute2_wrote() -> None:
    message = ifinfmsg()
    bridge = [("IFLA_INFO_KIND", "bridge"), ("IFLA_INFO_DATA", {"attrs": [("IFLA_BR_STP_STATE", 1)]})]
    message["index"], message["flags"] = 5, 1
    message["attrs"] = [
        ("IFLA_IFNAME", "eth0"), ("IFLA_MTU", 1500), ("IFLA_ADDRESS", "02:00:0a:00:00:01"), ("IFLA_MASTER", 2),
        ("IFLA_LINKINFO", {"attrs": bridge}),
    ]  # fmt: skip
    message.encode()
    link = rt.link_of(bytes(message.data[16:]))
    assert (link.index, link.up, link.name, link.mtu_bytes, link.mac, link.master) == (
        5, True, "eth0", 1500, "02:00:0a:00:00:01", 2,
    )  # fmt: skip
    assert {kind: rt.number(raw) for kind, raw in link.info(rt.IFLA_INFO_DATA).items()} == {5: 1}


def test_pyroute2_reads_an_address_a_neighbour_and_a_route() -> None:
    own, network = IPv4Address("10.77.0.1"), IPv4Network("10.77.0.0/16")
    message = decoded(ifaddrmsg, ipv4.address("", 2, own, 16).body)
    assert (message["index"], message["prefixlen"], message.get_attr("IFA_LOCAL")) == (2, 16, "10.77.0.1")
    message = decoded(ndmsg, ipv4.neighbour("", 2, own, "02:00:00:00:00:01").body)
    assert (message["ifindex"], message["state"]) == (2, 0x80)
    assert (message.get_attr("NDA_DST"), message.get_attr("NDA_LLADDR")) == ("10.77.0.1", "02:00:00:00:00:01")
    body = ipv4.route("", 2, network, own, "cubic").body
    message = decoded(rtmsg, body)
    assert (message["dst_len"], message["table"], message["proto"], message["scope"]) == (16, 254, 2, 253)
    assert (message.get_attr("RTA_DST"), message.get_attr("RTA_PREFSRC")) == ("10.77.0.0", "10.77.0.1")
    assert message.get_attr("RTA_METRICS").get_attr("RTAX_CC_ALGO") == "cubic"
    assert ipv4.congestion_control_of(body) == "cubic"


def test_a_route_without_a_congestion_control() -> None:
    assert ipv4.congestion_control_of(ipv4.find_route("", IPv4Network("10.77.0.0/16")).body) is None
