"""The loss program on a hook of an interface, with its maps: what loses packets in the `bpf` backend.

Changing the loss is one write for each sender plus one that switches all of them together; nothing is
detached or reinstalled, and counters go on. A sender may have a rule for each of many rounds at once.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import c_uint32

import numpy as np

from netem.kernel import bpf
from netem.kernel.clsact import Attachment, Hook
from netem.kernel.errors import KernelError
from netem.links import mask, program
from netem.links import program_layout as layout
from netem.links.base import (
    WINDOWS_MAX,
    Counter,
    Flow,
    Key,
    Kind,
    LinkError,
    LossRule,
    check_windows,
)
from netem.links.chain import GilbertElliott
from netem.links.program_decide import Chained
from netem.links.program_records import COUNTER, Control, Rule

NAME, PRIORITY = "dblp_loss", 10
_KINDS: tuple[Kind, Kind] = ("data", "other")


class LossFilter:
    """The loss program on one hook of one interface, with its maps. Also usable beside a netem qdisc.

    `counter_entries` bounds the (sender, index, kind) combinations that are counted apart; what finds no
    room is still decided, and counted in `events()`. The default has room for 16,384 rounds of every
    sender. With `by` "destination" all that is said of sources here, in rules and in counters, is meant of
    the packets' destinations: for a place that many receivers' packets of one sender pass.
    """

    def __init__(
        self,
        netns: str | None,
        ifname: str,
        hook: Hook = "egress",
        *,
        counter_entries: int | None = None,
        by: program.By = "source",
    ) -> None:
        self.place = (netns, ifname, hook)
        self.by: program.By = by
        self._entries = counter_entries
        self._lock = threading.Lock()  # the maps' buffers are shared, and system calls let other threads run
        self._owned: ExitStack | None = None
        self._adopted = False
        self._sources: dict[str, bytes] = {}
        self._control = Control()

    def install(
        self,
        flow: Flow | None,
        key: Key | None,
        sources: Sequence[str],
        base_ratio: float = 0.0,
        chain: GilbertElliott | None = None,
        chain_state: int = 0,
    ) -> None:
        """Load a program for this flow and key and attach it, replacing an earlier one in place.

        Counters start at zero, without loss but for the base loss: a ratio or a chain (`Shape`).
        """
        base = Rule.of(chain_state, base_ratio, chain)
        with self._lock, ExitStack() as stack:
            self._flow, self._key = flow, key
            self._sources = {source: ipaddress.IPv4Address(source).packed for source in sources}
            self._control = Control(0, 0, base)
            self._windows: dict[int, list[bytes]] = {0: [], 1: []}
            self._make_maps(stack)
            for number, (source, packed) in enumerate(self._sources.items()):
                self._write("sources", packed, bytes(c_uint32(number)), f"sender {source}")
            self._write_rules(0, {})
            self._write_control()
            self._chained: Chained = {"base"} if chain is not None else frozenset()
            loaded = stack.enter_context(self._load(self._chained))
            self._attach(loaded)
            self._release()
            self._owned, self._adopted = stack.pop_all(), False
        self.program = loaded

    def adopt(self, sources: Sequence[str]) -> bool:
        """Take over the program that another process attached here, to read its counters; False: there is none.

        It is left where it is when this object is closed.
        """
        with self._lock, ExitStack() as stack:
            with translated(f"look for the loss program at {self._where()}"):
                number = Attachment(*self.place, PRIORITY).number(NAME)
            if number is None:
                return False
            self._maps = {name: stack.enter_context(each) for name, each in bpf.maps_of(number).items()}
            self._sources = {source: ipaddress.IPv4Address(source).packed for source in sources}
            self._release()
            self._owned, self._adopted = stack.pop_all(), True
        return True

    def _load(self, chained: Chained) -> bpf.Program:
        ingress = self.place[2] == "ingress"
        text = program.loss_program(self._flow, self._key, self.by, ingress=ingress, chained=chained)
        return bpf.Program(NAME, text.assemble({name: each.fd for name, each in self._maps.items()}))

    def _learn_chains(self) -> None:
        """The first time that a rule has a chain: a program that knows them, over the same maps."""
        if self._owned is None or "rules" in self._chained:
            return
        chained: Chained = {*self._chained, "rules"}
        with ExitStack() as stack:
            loaded = stack.enter_context(self._load(chained))
            self._attach(loaded)
            stack.pop_all()
        self.program.close()
        self._owned.push(loaded)
        self.program, self._chained = loaded, chained

    def set_loss(self, rules: Sequence[LossRule]) -> None:
        """Replace all rules: write the bank that is not in use, read it back, switch."""
        with self._lock:
            by_source = self._checked(rules)
            if any(rule.chain is not None for rule in rules):
                self._learn_chains()
            bank = 1 - self._control.bank
            self._write_rules(bank, by_source)
            self._control.bank = bank
            self._write_control()

    def set_label(self, index: int) -> None:
        """The counter index of packets without an index field."""
        if not 0 <= index < 2**32:
            raise ValueError(f"label {index}: expected 0..2**32-1")
        with self._lock:
            self._require_installed()
            self._control.label = index
            self._write_control()

    def counters(self) -> list[Counter]:
        """All counters since `install`, sorted by source, index and kind."""
        with self._lock:
            self._require_installed()
            raw = b"".join(key + value for key, value in self._maps["counters"].items())
        rows = np.frombuffer(raw, COUNTER)
        rows = rows[np.lexsort((rows["kind"], rows["index"], rows["source"]))]
        names = {int.from_bytes(packed, "big"): source for source, packed in self._sources.items()}
        return [
            Counter(names[source], index, seen, dropped, size, _KINDS[kind], duplicated, corrupted)
            for source, index, kind, seen, dropped, size, _, duplicated, corrupted in rows.tolist()
        ]

    def events(self) -> dict[str, int]:
        """Counts of what makes numbers doubtful, by `layout.EVENTS`."""
        with self._lock:
            self._require_installed()
            raw = self._maps["events"].lookup(bytes(4)) or bytes(layout.EVENTS_BYTES)
        return dict(zip(layout.EVENTS, np.frombuffer(raw, "u8").tolist(), strict=False))

    def close(self) -> None:
        """Detach the program. The interface or its namespace may be gone already."""
        with self._lock:
            if self._owned is not None and not self._adopted:
                self._detach()
            self._release()

    def _release(self) -> None:
        if self._owned is not None:
            self._owned.close()
            self._owned = None

    def _require_installed(self) -> None:
        if self._owned is None:
            raise LinkError(f"loss at {self._where()}: nothing is installed")

    def _make_maps(self, stack: ExitStack) -> None:
        senders = max(1, len(self._sources))
        counters = self._entries or min(1 << 20, 2 * 16_384 * senders)
        maps = (
            bpf.Map("control", bpf.ARRAY, 4, layout.CONTROL_BYTES, 1),
            bpf.Map("sources", bpf.HASH, 4, 4, senders),
            bpf.Map("rules", bpf.ARRAY, 4, layout.RULE_BYTES, 2 * senders),
            bpf.Map(
                "windows",
                bpf.HASH,
                layout.WINDOW_KEY_BYTES,
                layout.RULE_BYTES,
                2 * WINDOWS_MAX * senders,
                bpf.NO_PREALLOC,
            ),
            bpf.Map("counters", bpf.HASH, layout.COUNTER_KEY_BYTES, layout.COUNTER_BYTES, counters, bpf.NO_PREALLOC),
            bpf.Map("events", bpf.ARRAY, 4, layout.EVENTS_BYTES, 1),
        )
        self._maps = {each.name: stack.enter_context(each) for each in maps}

    def _checked(self, rules: Sequence[LossRule]) -> dict[str, list[LossRule]]:
        """Rules by sender. Raises LinkError."""
        self._require_installed()
        by_source: dict[str, list[LossRule]] = {}
        for rule in rules:
            by_source.setdefault(rule.source, []).append(rule)
        unknown = by_source.keys() - self._sources.keys()
        if unknown:
            raise LinkError(f"loss at {self._where()}: no such sender {', '.join(sorted(unknown))}")
        if self._flow is None and any(rule.match == "data" for rule in rules):
            raise LinkError(f"loss at {self._where()}: match data, but no data flow is installed")
        more = [rule for rule in rules if rule.duplicate_ratio or rule.corrupt_ratio]
        if any(rule.match == "all" or self._key is None for rule in more):
            raise LinkError(f"loss at {self._where()}: only data packets with a key can be duplicated or corrupted")
        try:
            check_windows(by_source, keyed=self._key is not None and self._key.index is not None)
        except LinkError as error:
            raise LinkError(f"loss at {self._where()}: {error}") from error
        return by_source

    def _write_rules(self, bank: int, by_source: dict[str, list[LossRule]]) -> None:
        for key in self._windows[bank]:
            with translated(f"remove a rule at {self._where()}"):
                self._maps["windows"].delete(key)
        self._windows[bank] = []
        for number, source in enumerate(self._sources):
            rules = by_source.get(source, [])
            if len(rules) > 1:
                self._write_windows(bank, source, rules)
                only = Rule.of(0, 0.0, None, flags=layout.BY_INDEX)
            else:
                only = self._rule(rules[0]) if rules else Rule.of(0, 0.0, None)
            self._write("rules", bytes(c_uint32(2 * number + bank)), bytes(only), f"loss of {source}")

    def _write_windows(self, bank: int, source: str, rules: Sequence[LossRule]) -> None:
        """One element for each index: the program finds it with one look-up, however many there are."""
        for rule in rules:
            value = bytes(self._rule(rule))
            for index in range(rule.first, rule.last + 1):
                key = self._sources[source] + bytes(c_uint32(index)) + bytes(c_uint32(bank))
                self._write("windows", key, value, f"loss of {source} in round {index}")
                self._windows[bank].append(key)

    def _rule(self, rule: LossRule) -> Rule:
        windowed = rule.match == "data" and self._key is not None and self._key.index is not None
        window = (rule.first, rule.last) if windowed else (0, mask.U32)
        flags = layout.MATCH_ALL if rule.match == "all" else 0
        return Rule.of(rule.state, rule.loss_ratio, rule.chain, window, flags, rule.duplicate_ratio, rule.corrupt_ratio)

    def _write_control(self) -> None:
        self._write("control", bytes(4), bytes(self._control), "switch rules")

    def _write(self, name: str, key: bytes, value: bytes, what: str) -> None:
        with translated(f"{what} at {self._where()}"):
            self._maps[name].update(key, value)
            found = self._maps[name].lookup(key)
        if found != value:
            held = "nothing" if found is None else found.hex()
            raise LinkError(f"{what} at {self._where()}: wrote {value.hex()}, the kernel holds {held}")

    def _attach(self, loaded: bpf.Program) -> None:
        with translated(f"attach the loss program at {self._where()}"):
            Attachment(*self.place, PRIORITY).attach(loaded)

    def _detach(self) -> None:
        Attachment(*self.place, PRIORITY).detach()

    def _where(self) -> str:
        netns, ifname, hook = self.place
        return f"{netns or 'this namespace'}/{ifname} {hook}"


@contextmanager
def translated(what: str) -> Iterator[None]:
    """The kernel's errors as a link's."""
    try:
        yield
    except KernelError as error:
        raise LinkError(f"{what}: {error}") from error
