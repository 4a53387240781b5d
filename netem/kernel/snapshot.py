"""What a lab could have changed outside itself: the proof that it did not is two equal snapshots."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from netem.kernel import netns, sysctl

# Numbers that the kernel changes by itself: counters shown as sysctls, and per-boot estimates.
VOLATILE = ("netfilter.nf_conntrack_count", "ipv4.route.gc_elapsed")


@dataclass(frozen=True)
class HostSnapshot:
    """Namespaces by name; links and qdiscs of the root namespace in words; every readable sysctl under net."""

    namespaces: tuple[str, ...]
    links: tuple[str, ...]
    qdiscs: tuple[str, ...]
    sysctls: tuple[tuple[str, str], ...]

    def differences(self, other: HostSnapshot) -> list[str]:
        """What `other` has more or less, one line each; empty when they are equal."""
        found = []
        for field in fields(self):
            before, after = set(getattr(self, field.name)), set(getattr(other, field.name))
            found += [f"{field.name}: gone {item}" for item in sorted(before - after, key=str)]
            found += [f"{field.name}: new {item}" for item in sorted(after - before, key=str)]
        return found


def host_snapshot() -> HostSnapshot:
    """Look at the host; takes about 50 ms, changes nothing."""
    netlink = netns.open_netlink(None)
    try:
        links = sorted(
            f"{m['index']} {m.get('ifname')} {m.get('linkinfo', {}).get('kind', '')} mtu {m.get('mtu')} "
            f"{m.get('state')} {m.get('address')}"
            for m in netlink.get_links()
        )
        qdiscs = sorted(
            f"{m['index']} {m.get_attr('TCA_KIND')} {m['handle']:x} {m['parent']:x}" for m in netlink.get_qdiscs()
        )
    finally:
        netlink.close()
    return HostSnapshot(tuple(netns.names()), tuple(links), tuple(qdiscs), tuple(_sysctls()))


def _sysctls() -> list[tuple[str, str]]:
    found = []
    for path in sorted(sysctl.ROOT.rglob("*")):
        key = ".".join(path.relative_to(sysctl.ROOT).parts)
        if key not in VOLATILE and path.is_file():
            value = _read(path)
            if value is not None:
                found.append((key, value))
    return found


def _read(path: Path) -> str | None:
    try:
        return " ".join(path.read_text(errors="replace").split())
    except OSError:  # write-only, or gone meanwhile
        return None
