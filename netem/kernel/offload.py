"""Offload settings of an interface (ethtool(8) -k/-K), through pyroute2's ioctl interface."""

from __future__ import annotations

from collections.abc import Mapping

from pyroute2.ethtool.ioctl import IoctlEthtool

from netem.kernel.errors import KernelError, attempting
from netem.kernel.netns import call_in

# All of TSO: veth hands packets to GRO only if the peer has every one of them off (veth_set_features).
TSO = (
    "tx-tcp-segmentation",
    "tx-tcp-ecn-segmentation",
    "tx-tcp-mangleid-segmentation",
    "tx-tcp6-segmentation",
    "tx-tcp-accecn-segmentation",
)
UDP_SEGMENTATION = "tx-udp-segmentation"
CHECKSUM = "tx-checksum-ip-generic"
GRO = "rx-gro"
GSO = "tx-generic-segmentation"

REPORTED = (*TSO, UDP_SEGMENTATION, CHECKSUM, GRO, GSO)


def read_here(ifname: str) -> dict[str, bool]:
    """The features in REPORTED that this kernel knows; the caller's thread is in the namespace."""
    tool = IoctlEthtool(ifname)
    try:
        with attempting(f"read offloads of {ifname}"):
            features = tool.get_features()
            return {name: bool(features[name]) for name in REPORTED if name in features}
    finally:
        tool.close()


def write_here(ifname: str, wanted: Mapping[str, bool]) -> None:
    """Set features and read them back; the caller's thread is in the namespace.

    A feature that the kernel does not know counts as off. KernelError when one cannot be set.
    """
    tool = IoctlEthtool(ifname)
    what = f"set offloads of {ifname} to {dict(wanted)}"
    try:
        with attempting(what):
            features = tool.get_features()
            for name, value in wanted.items():
                if name in features:
                    features[name] = value
            tool.set_features(features)
            after = tool.get_features()
    finally:
        tool.close()
    wrong = sorted(n for n, v in wanted.items() if (n in after and bool(after[n])) != v)
    if wrong:
        raise KernelError(what, detail=f"the kernel kept {', '.join(wrong)}")


def read(netns: str, ifname: str) -> dict[str, bool]:
    return call_in(netns, lambda: read_here(ifname))


def write(netns: str, ifname: str, wanted: Mapping[str, bool]) -> None:
    call_in(netns, lambda: write_here(ifname, wanted))
