"""Qdiscs and filters over our own netlink messages, on this kernel: read back, changed in place, in one batch."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from netem.kernel import netns, qdisc, u32, veth
from netem.kernel.errors import KernelError
from netem.kernel.qdisc import Command, Pfifo, Tbf, handle
from netem.kernel.rtnetlink import BATCH, CREATE, EXCLUSIVE, Request, Rtnetlink, encode

CLSACT, EGRESS = 0xFFFFFFF1, 0xFFFFFFF3  # TC_H_CLSACT, and its TC_H_MIN_EGRESS
TBF = Tbf(handle(1), qdisc.ROOT, 10**9, 125_000, 1 << 20)
CHILD = Tbf(handle(2), handle(1, 1), 10**6, 6_056, 50_000)


@pytest.fixture
def port() -> Iterator[tuple[Rtnetlink, int, str]]:
    """A netlink socket, the index of an interface, and its namespace."""
    near, far = (f"tc{end}{os.getpid()}" for end in "nf")
    try:
        for name in (near, far):
            netns.create(name)
        with closing(netns.open_inside(near)) as inside:
            pair = veth.Pair(veth.End(near, "eth0", "02:00:00:00:00:01"), veth.End(far, "f", "02:00:00:00:00:02"), 1500)
            veth.create(inside.netlink, [pair])
        with closing(netns.open_rtnetlink(near)) as netlink:
            yield netlink, netlink.find("eth0").index, near
    finally:
        for name in (near, far):
            netns.remove(name)


def tc(namespace: str, *words: str) -> list[dict[str, Any]]:
    program = shutil.which("tc")
    if program is None:
        pytest.skip("tc is not installed (Debian, Ubuntu: apt-get install iproute2)")
    argv = ["ip", "netns", "exec", namespace, program, "-j", *words]
    return json.loads(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout)


def test_a_tree_is_added_changed_read_back_and_removed(port: tuple[Rtnetlink, int, str]) -> None:
    netlink, index, namespace = port
    tree: qdisc.Tree = (TBF, CHILD)
    qdisc.execute(netlink, index, qdisc.plan((), tree))
    qdisc.verify(qdisc.dump(netlink, index), tree)
    shown = {q["handle"]: q for q in tc(namespace, "qdisc", "show", "dev", "eth0")}
    assert (shown["1:"]["kind"], shown["1:"]["options"]["rate"]) == ("tbf", 125_000_000)
    assert shown["1:"]["options"]["burst"] == pytest.approx(125_000, rel=0.001)
    assert shown["2:"]["parent"] == "1:1"
    faster: qdisc.Tree = (TBF, Tbf(CHILD.handle, CHILD.parent, 2 * 10**6, 7_000, 60_000))
    with pytest.raises(KernelError, match="rate in bytes/s"):
        qdisc.verify(qdisc.dump(netlink, index), faster)
    commands = qdisc.plan(tree, faster)
    assert [c.verb for c in commands] == ["change"]
    qdisc.execute(netlink, index, commands)
    qdisc.verify(qdisc.dump(netlink, index), faster)
    queue: qdisc.Tree = (Pfifo(handle(3), qdisc.ROOT, 77),)
    qdisc.execute(netlink, index, qdisc.plan(faster, queue))
    there = qdisc.dump(netlink, index)
    qdisc.verify(there, queue)
    assert not there.keys() & {TBF.handle, CHILD.handle}


def test_one_qdisc_is_asked_for_at_its_place(port: tuple[Rtnetlink, int, str]) -> None:
    netlink, index, _ = port
    qdisc.execute(netlink, index, qdisc.plan((), (TBF, CHILD)))
    answers = netlink.ask([qdisc.get(index, TBF), qdisc.get(index, CHILD)])
    qdisc.verify(qdisc.by_handle(body for _, body in answers), (TBF, CHILD))
    elsewhere = Tbf(CHILD.handle, qdisc.ROOT, 10**6, 6_056, 50_000)
    with pytest.raises(KernelError, match="read back tbf"):
        netlink.ask([qdisc.get(index, elsewhere)])


def test_an_error_names_the_command(port: tuple[Rtnetlink, int, str]) -> None:
    netlink, index, _ = port
    with pytest.raises(KernelError, match=r"change tbf \(1:\) on interface") as caught:
        qdisc.execute(netlink, index, [Command("change", TBF)])
    assert caught.value.code in (errno.ENOENT, errno.EINVAL)


def filters(count: int, priority: int) -> list[u32.Filter]:
    matches = [
        (
            u32.Match(0, b"\x45", b"\xff"),
            u32.Match(12, bytes([10, 77, 0, n]), b"\xff" * 4),
            u32.Match(32, n.to_bytes(4, "big"), b"\xff\xff\xff\xfe"),
        )
        for n in range(count)
    ]
    return [u32.Filter(EGRESS, priority, handle(1, n + 1), match) for n, match in enumerate(matches)]


def found(netlink: Rtnetlink, index: int) -> list[u32.Found]:
    answers = netlink.ask([u32.dump(index, EGRESS)])
    return [entry for _, body in answers if (entry := u32.decode(body)) is not None]


def add_clsact(netlink: Rtnetlink, index: int) -> None:
    body = qdisc.TCMSG.pack(0, index, handle(0xFFFF), CLSACT, 0) + encode({qdisc.KIND: "clsact"})
    netlink.ask([Request("add clsact", qdisc.NEWQDISC, CREATE | EXCLUSIVE, body)])


def test_filters_are_read_back_as_they_were_sent(port: tuple[Rtnetlink, int, str]) -> None:
    netlink, index, namespace = port
    add_clsact(netlink, index)
    first, second = filters(5, 1), filters(3, 2)
    netlink.ask([u32.add(index, item) for item in first])
    matched = u32.verify(found(netlink, index), first)
    assert len({entry.handle for entry in matched}) == 5
    answers = netlink.ask([u32.get(index, first[3], matched[3].handle)])
    assert u32.decode(answers[0][1]) == matched[3]
    shown = [f for f in tc(namespace, "filter", "show", "dev", "eth0", "egress") if "match" in f.get("options", {})]
    assert len(shown) == 5
    netlink.ask([*(u32.add(index, item) for item in second), u32.remove(index, EGRESS, 1)])
    u32.verify(found(netlink, index), second)
    with pytest.raises(KernelError, match="not asked for"):
        u32.verify(found(netlink, index), second[:2])
    with pytest.raises(KernelError, match="missing"):
        u32.verify(found(netlink, index), [*second, first[0]])


def test_a_batch_reads_changes_and_reads_again(port: tuple[Rtnetlink, int, str]) -> None:
    """In one system call, the answers in the order of the requests; more than fit go in a second one."""
    netlink, index, _ = port
    add_clsact(netlink, index)
    qdisc.execute(netlink, index, qdisc.plan((), (TBF,)))
    slower = Tbf(TBF.handle, TBF.parent, 10**8, 12_500, 1 << 20)
    wanted = filters(2, 1)
    requests = [qdisc.get(index, TBF), qdisc.request(index, Command("change", slower))]
    requests += [*(u32.add(index, item) for item in wanted), qdisc.get(index, slower), u32.dump(index, EGRESS)]
    batches = netlink.lay_out(requests)
    assert len(batches) == 1
    answers = netlink.run(batches)
    before, after = (next(a.body for a in answers if a.of == of) for of in (0, 4))
    qdisc.verify(qdisc.by_handle([before]), (TBF,))
    qdisc.verify(qdisc.by_handle([after]), (slower,))
    listed = [entry for a in answers if a.of == 5 and (entry := u32.decode(a.body)) is not None]
    u32.verify(listed, wanted)
    many = netlink.lay_out([qdisc.get(index, slower)] * (BATCH + 1))
    assert [len(batch.requests) for batch in many] == [BATCH, 1]
    assert [answer.of for answer in netlink.run(many)] == list(range(BATCH + 1))


def test_a_dump_ends_its_batch(port: tuple[Rtnetlink, int, str]) -> None:
    netlink, index, _ = port
    add_clsact(netlink, index)
    netlink.ask([u32.add(index, item) for item in filters(2, 1)])
    answers = netlink.ask([u32.dump(index, EGRESS), u32.dump(index, EGRESS)])
    assert sum(u32.decode(body) is not None for _, body in answers) == 4
