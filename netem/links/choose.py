"""Which backend makes the links, and which one the loss: a pure function of what is asked for and what works here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from netem.links.base import UnsupportedFeature

Backend = Literal["netem", "bpf", "fake"]
Requested = Literal["auto", "netem", "bpf", "fake"]
LossEngine = Literal["auto", "netem", "bpf"]

ELSEWHERE = "netem on a kernel with sch_netem"


class Probe(Protocol):
    """What a try of the real thing gave; `detail` says why it failed."""

    @property
    def ok(self) -> bool: ...

    @property
    def detail(self) -> str: ...


@dataclass(frozen=True)
class BackendChoice:
    """`name` makes delay and rate, `loss_engine` decides about loss; `reason` is for the user."""

    name: Backend
    loss_engine: Backend
    reason: str


def choose(
    requested: Requested, loss_engine: LossEngine, needs: Sequence[str] | bool, probes: Mapping[str, Probe]
) -> BackendChoice:
    """The backend to use. `probes` has the keys "netem" and "bpf" (a missing one counts as not working).

    `needs`: what is asked for that only netem can do, each with the link that asks for it; True stands for a delay.

    netem is the first choice; bpf where the kernel has no sch_netem. The loss comes from the backend itself unless
    `loss_engine: bpf` asks for the repeatable mask on a netem link. Raises UnsupportedFeature.
    """
    if requested == "fake":
        return BackendChoice("fake", "fake", "fake: asked for; in memory, no packets")
    wanted = ("delay" if needs else "") if isinstance(needs, bool) else ", ".join(needs)
    if requested == "bpf" or (requested == "auto" and not wanted and not _works("netem", probes)):
        return _bpf(requested, loss_engine, wanted, probes)
    return _netem(requested, loss_engine, wanted, probes)


def check_bands(loss_engine: Backend, one_netem: Sequence[str], four_states: Sequence[str]) -> None:
    """What the switch ports of a scenario on backend netem cannot do together with its bursts. UnsupportedFeature.

    With `loss_engine: netem` a port has a netem for each sender and rule; with `bpf` a single one, without loss.
    """
    if one_netem and loss_engine == "netem":
        detail = "each of the netems of a port, one for each sender of a burst, would do it by itself"
        raise UnsupportedFeature(", ".join(one_netem), ("loss_engine: bpf",), detail)
    if four_states and loss_engine == "bpf":
        detail = "four_state is netem's, and the ports that make bursts lose in one place"
        raise UnsupportedFeature(", ".join(four_states), ("loss_engine: netem",), detail)


def _bpf(requested: Requested, loss_engine: LossEngine, wanted: str, probes: Mapping[str, Probe]) -> BackendChoice:
    if wanted:
        raise UnsupportedFeature(
            wanted, _with_delay(probes), "link backend bpf cannot hold packets back, only lose them"
        )
    if loss_engine == "netem":
        _demand("netem", probes, "loss engine netem", alternatives=("bpf",))
        raise UnsupportedFeature("loss engine netem", ("netem",), "link backend bpf makes the loss itself")
    if requested == "auto" and not _works("bpf", probes):
        why = f"netem: {_detail('netem', probes)}; bpf: {_detail('bpf', probes)}"
        raise UnsupportedFeature("a link backend", (ELSEWHERE,), why)
    _demand("bpf", probes, "link backend bpf", alternatives=("netem",))
    if requested == "bpf":
        return BackendChoice("bpf", "bpf", "bpf: asked for")
    return BackendChoice("bpf", "bpf", f"bpf: netem does not work here ({_detail('netem', probes)})")


def _netem(requested: Requested, loss_engine: LossEngine, wanted: str, probes: Mapping[str, Probe]) -> BackendChoice:
    if wanted:
        _demand("netem", probes, wanted, alternatives=())
    _demand("netem", probes, "link backend netem", alternatives=("bpf",))
    why = "asked for" if requested == "netem" else "first choice, and it works here"
    if loss_engine == "bpf":
        _demand("bpf", probes, "loss engine bpf", alternatives=("netem",))
        return BackendChoice("netem", "bpf", f"netem: {why}; repeatable loss by bpf: asked for")
    return BackendChoice("netem", "netem", f"netem: {why}")


def _demand(backend: str, probes: Mapping[str, Probe], feature: str, alternatives: tuple[str, ...]) -> None:
    """UnsupportedFeature unless the backend works; of the alternatives only those that do are named."""
    if _works(backend, probes):
        return
    have = [other for other in alternatives if _works(other, probes)]
    if backend == "netem" or not have:
        have.append(ELSEWHERE)
    raise UnsupportedFeature(feature, have, _detail(backend, probes))


def _with_delay(probes: Mapping[str, Probe]) -> tuple[str, ...]:
    return ("netem",) if _works("netem", probes) else (ELSEWHERE,)


def _works(backend: str, probes: Mapping[str, Probe]) -> bool:
    return backend in probes and probes[backend].ok


def _detail(backend: str, probes: Mapping[str, Probe]) -> str:
    return probes[backend].detail if backend in probes else "not tried"
