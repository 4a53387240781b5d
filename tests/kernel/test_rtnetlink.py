"""Batches of requests: in order, complete, and an error names the request that failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from netem.kernel import bridge, netns, veth
from netem.kernel import rtnetlink as rt
from netem.kernel.errors import KernelError

BRIDGE, GROUP, PAIRS = 2, 5, 150  # more pairs than go into one batch


@pytest.fixture
def spaces() -> Iterator[tuple[str, str]]:
    names = (f"rta{os.getpid()}", f"rtb{os.getpid()}")
    try:
        for name in names:
            netns.create(name)
        yield names
    finally:
        for name in names:
            netns.remove(name)


def pairs(spaces: tuple[str, str], count: int) -> list[veth.Pair]:
    near, far = spaces
    return [
        veth.Pair(
            veth.End(near, f"n{number}", f"02:00:00:01:00:{number:02x}", 10 + number),
            veth.End(far, f"f{number}", f"02:00:00:02:00:{number:02x}", 300 + number),
            1400,
        )
        for number in range(count)
    ]


def test_many_pairs_in_few_calls_and_gone_at_once(spaces: tuple[str, str]) -> None:
    wanted = pairs(spaces, PAIRS)
    with closing(netns.open_inside(spaces[0])) as near, closing(netns.open_inside(spaces[1])) as far:
        bridge.create(near.netlink, "br", "02:00:00:00:00:01", BRIDGE)
        veth.create(near.netlink, wanted, BRIDGE, GROUP)
        for netlink, ends in ((near.netlink, [p.near for p in wanted]), (far.netlink, [p.far for p in wanted])):
            found = {link.name: link for link in netlink.links("look")}
            for end in ends:
                veth.check(found[end.ifname], end, 1400)
        ports = [link for link in near.netlink.links("look") if link.master == BRIDGE]
        assert len(ports) == PAIRS
        assert all(port.up for port in ports)
        veth.delete_group(near.netlink, GROUP)
        assert [link.name for link in far.netlink.links("look")] == ["lo"]
        with pytest.raises(KernelError, match="group") as caught:
            veth.delete_group(near.netlink, GROUP)
        assert caught.value.code == errno.ENODEV


def test_an_error_names_its_request_and_the_socket_stays_usable(spaces: tuple[str, str]) -> None:
    first, second = pairs(spaces, 2)
    with closing(netns.open_inside(spaces[0])) as inside:
        with pytest.raises(KernelError) as caught:
            veth.create(inside.netlink, [first, first, second])
        assert caught.value.code == errno.EEXIST
        assert f"{first.near.netns}/{first.near.ifname}" in str(caught.value)
        assert {link.name for link in inside.netlink.links("look")} == {"lo", "n0", "n1"}


def test_what_differs_is_an_error(spaces: tuple[str, str]) -> None:
    (pair,) = pairs(spaces, 1)
    with closing(netns.open_inside(spaces[0])) as inside:
        veth.create(inside.netlink, [pair])
        (link,) = (link for link in inside.netlink.links("look") if link.name == "n0")
        veth.check(link, pair.near, 1400)
        with pytest.raises(KernelError, match="MTU"):
            veth.check(link, pair.near, 1500)
        with pytest.raises(KernelError, match="reads back"):
            veth.check(link, veth.End(pair.near.netns, "n0", "02:00:00:00:00:99", 10), 1400)
        with pytest.raises(KernelError, match="not there"):
            veth.check(None, pair.near, 1400)
        with pytest.raises(KernelError, match="ENODEV"):
            inside.netlink.ask([rt.get_link("look", 4711)])


def test_sockets_of_a_namespace_that_is_not_there() -> None:
    with pytest.raises(KernelError, match="nonesuch"):
        netns.open_inside("nonesuch")
