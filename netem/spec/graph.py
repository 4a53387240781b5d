"""What a topology's graph has to be: one link for every host, and a way from everywhere to everywhere."""

from __future__ import annotations

from netem.spec.source import Path_, Source
from netem.spec.topology import MAX_HOSTS, MAX_LINKS, MAX_SWITCHES, MAX_WORKERS, Topology


def check_roles(topology: Topology, source: Source, at: Path_) -> None:
    """One server and 1..64 workers, or neither. Raises SpecError."""
    servers = [name for name, host in topology.hosts.items() if host.role == "server"]
    workers = len(topology.workers)
    if len(servers) > 1:
        message = f"more than one server: {', '.join(servers)}; exactly one is needed"
        raise source.error((*at, "hosts", servers[1]), message)
    if workers and not servers:
        raise source.error((*at, "hosts"), "no host has the role server; exactly one is needed")
    if workers > MAX_WORKERS or (servers and not workers):
        raise source.error((*at, "hosts"), f"{workers} workers are out of range; allowed: 1 to {MAX_WORKERS}")
    if not 1 <= len(topology.hosts) <= MAX_HOSTS:
        raise source.error((*at, "hosts"), f"{len(topology.hosts)} hosts are out of range; allowed: 1 to {MAX_HOSTS}")


def check_graph(topology: Topology, source: Source, at: Path_) -> None:
    """Raises SpecError at the host or switch that is not connected as it has to be."""
    switches = topology.switches
    if not 1 <= len(switches) <= MAX_SWITCHES:
        message = f"{len(switches)} switches are out of range; allowed: 1 to {MAX_SWITCHES}"
        raise source.error((*at, "switches"), message)
    for index, switch in enumerate(switches):
        if switch in switches[:index]:
            raise source.error((*at, "switches", index), f"{switch!r} is named twice")
    if len(topology.links) > MAX_LINKS:
        raise source.error((*at, "links"), f"{len(topology.links)} links; allowed: up to {MAX_LINKS}")
    adjacent: dict[str, set[str]] = {name: set() for name in (*topology.hosts, *switches)}
    for link in topology.links:
        first, second = link.between
        adjacent[first].add(second)
        adjacent[second].add(first)
    first_host = next(iter(topology.hosts))
    reached = _reached(first_host, adjacent)
    for host in topology.hosts:
        if not adjacent[host]:
            raise source.error((*at, "hosts", host), f"host {host!r} is linked to nothing; every host needs one link")
        if host not in reached:
            raise source.error((*at, "hosts", host), f"there is no way from host {host!r} to host {first_host!r}")
    for index, switch in enumerate(switches):
        if switch not in reached:
            problem = f"there is no way from switch {switch!r} to any host"
            message = problem if adjacent[switch] else f"switch {switch!r} is linked to nothing"
            raise source.error((*at, "switches", index), message)


def _reached(start: str, adjacent: dict[str, set[str]]) -> set[str]:
    reached, frontier = {start}, [start]
    while frontier:
        new = adjacent[frontier.pop()] - reached
        reached |= new
        frontier += new
    return reached
