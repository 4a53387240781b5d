"""Receiver of one direction of one round: a state machine without sockets, clocks or threads.

| state     | accept             | on_probe      | give_up |
|-----------|--------------------|---------------|---------|
| RECEIVING | RECEIVING/COMPLETE | Bitmap        | GIVEN_UP|
| COMPLETE  | nothing is stored  | Stop (again)  | ignored |
| GIVEN_UP  | nothing is stored  | Stop (again)  | ignored |

The set is frozen at exactly the chunk that completes the round, so that the result does not depend on what was in
flight behind it.
"""

from __future__ import annotations

import hashlib
from enum import Enum

import numpy as np

from dblp.chunks import BoolArray, IntArray, pack_bits
from dblp.errors import LocalProtocolError
from dblp.wire import Bitmap, Probe, Stop


class ReceiverState(Enum):
    RECEIVING = "receiving"
    COMPLETE = "complete"
    GIVEN_UP = "given up"


class Receiver:
    """One direction of one round.

    Args:
        need: chunks that complete the round, 0..chunks.
        required: chunks that must arrive in any case, or None.

    Attributes:
        received: which chunks were delivered, shape (chunks,).
        duplicate, late: datagrams of this round that came twice, or after it was complete.
    """

    def __init__(self, round_: int, direction: int, chunks: int, need: int, required: BoolArray | None = None) -> None:
        if not 0 <= need <= chunks:
            raise LocalProtocolError(f"need {need} is not in 0..{chunks}")
        self.round, self.direction, self.chunks, self.need = round_, direction, chunks, need
        self.received: BoolArray = np.zeros(chunks, np.bool_)
        self.delivered = self.duplicate = self.late = 0
        self.completing: tuple[int, int] | None = None
        self.state = ReceiverState.RECEIVING
        self._first_at = np.zeros(chunks, np.int64)
        self._pass_of = np.full(chunks, -1, np.int32)
        self._required = required
        self._required_missing = int(required.sum()) if required is not None else 0
        if need == 0 and not self._required_missing:
            self.state = ReceiverState.COMPLETE

    @property
    def finished(self) -> bool:
        return self.state is not ReceiverState.RECEIVING

    @property
    def passes(self) -> int:
        """Transmissions of the chunk that took most of them to be delivered."""
        return int(self._pass_of.max(initial=-1)) + 1

    @property
    def missing_share(self) -> float:
        return 1.0 - self.delivered / self.chunks if self.chunks else 0.0

    def accept(self, sequences: IntArray, passes: IntArray) -> IntArray:
        """Positions inside the batch whose payload is new and has to be stored, in arrival order.

        `sequences` (n,) must be in 0..chunks-1 (the IO layer drops what is not); `passes` (n,) belongs to it.
        """
        if self.finished:
            self.late += len(sequences)
            return np.empty(0, np.int64)
        new = self._new(sequences)
        end = self._completes_at(sequences[new])
        taken = len(sequences) if end is None else int(new[end]) + 1
        if end is not None:
            new = new[: end + 1]
            self.late += len(sequences) - taken
        self.duplicate += taken - len(new)
        self._store(sequences[new], passes[new])
        if end is not None:
            self.state = ReceiverState.COMPLETE
            self.completing = (int(sequences[new[-1]]), int(passes[new[-1]]))
        return new

    def _new(self, sequences: IntArray) -> IntArray:
        """Positions of the chunks that were not there before: of a chunk that is twice in the batch, the first."""
        known = self.received[sequences]
        new = np.flatnonzero(~known) if np.count_nonzero(known) else np.arange(len(sequences))
        fresh = sequences[new]
        self._first_at[fresh[::-1]] = new[::-1]  # of several writes to one place the last one counts
        first = self._first_at[fresh]
        # Comparing bytes is much cheaper than comparing small arrays.
        return new if first.tobytes() == new.tobytes() else new[first == new]

    def _completes_at(self, fresh: IntArray) -> int | None:
        """Index into `fresh` of the chunk that completes the round, or None."""
        end = max(self.need - self.delivered, 1) - 1
        if end >= len(fresh):
            return None
        if self._required is not None and self._required_missing:
            required = np.flatnonzero(self._required[fresh])
            if len(required) < self._required_missing:
                return None
            end = max(end, int(required[-1]))
        return end if end < len(fresh) else None

    def _store(self, fresh: IntArray, passes: IntArray) -> None:
        self.received[fresh] = True
        self.delivered += len(fresh)
        self._pass_of[fresh] = passes
        if self._required is not None:
            self._required_missing -= int(self._required[fresh].sum())

    def on_probe(self, probe: Probe) -> Bitmap | Stop | None:
        """The answer to a probe of this round; None for another round or direction.

        The caller has first handed in everything that its socket held, so that the answer is not overtaken by data.
        """
        if probe.round != self.round or probe.direction != self.direction:
            return None
        if self.finished:
            return self.stop()
        return Bitmap(self.round, self.direction, probe.probe, probe.sent, pack_bits(self.received))

    def stop(self) -> Stop:
        """The frame that ends the round for the sender. Raises LocalProtocolError while it still receives."""
        if not self.finished:
            raise LocalProtocolError(f"round {self.round}: no stop before it is complete")
        sequence, pass_ = self.completing or (0xFFFFFFFF, 0)
        outcome = int(self.state is ReceiverState.GIVEN_UP)
        bits = pack_bits(self.received)
        return Stop(self.round, self.direction, outcome, sequence, pass_, self.delivered, bits)

    def give_up(self) -> None:
        """The deadline has passed: freeze what there is."""
        if not self.finished:
            self.state = ReceiverState.GIVEN_UP

    def digest(self) -> str:
        """Short digest of the delivered set; equal sets give equal digests."""
        return hashlib.sha256(pack_bits(self.received)).hexdigest()[:16]
