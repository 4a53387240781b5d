"""Sender of one direction of one round: a state machine without sockets, clocks or threads.

The caller takes batches of chunks and sends them, hands in what the receiver answered, and passes the time in.

| state    | take               | on_bitmap         | on_stop  | handle_timer     | abort    |
|----------|--------------------|-------------------|----------|------------------|----------|
| SENDING  | SENDING or WAITING | SENDING           | STOPPED  | SENDING          | ABORTED  |
| WAITING  | no batch           | SENDING or WAITING| STOPPED  | WAITING (probe)  | ABORTED  |
| STOPPED  | no batch           | ignored (stale)   | ignored  | ignored          | ignored  |
| ABORTED  | no batch           | ignored (stale)   | ignored  | ignored          | ignored  |

A chunk counts as lost only when a bitmap misses it that answers a probe sent after the chunk's last transmission.
So nothing is sent again while it may still be on its way, whether or not the sender waits for its probes: except,
pipelined and on a long path, where nothing else is left to send (dblp/early.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from dblp.chunks import BoolArray, IntArray, unpack_bits
from dblp.early import lacking, silent
from dblp.errors import LocalProtocolError, PeerProtocolError
from dblp.pacing import PACE_SLACK_S, paced_batch
from dblp.wire import Bitmap, Probe, Stop

MAX_PASS = 0xFFFF
FIRST_REPROBE_S = 0.05
"""Before any round trip has been measured."""
REPROBE_GROWTH, REPROBE_GROWTH_STEPS = 1.25, 10
RTT_GROWTH = 1.05
LONG_PATH, PROBES_UNDER_WAY = 2, 8
"""A path is long where a round trip holds so many overruns; near the end so many probes are under way on it."""


class SenderState(Enum):
    SENDING = "sending"
    WAITING = "waiting"
    STOPPED = "stopped"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Batch:
    """Chunks to send now, in this order. `sequences` and `passes` have the same length, at least 1."""

    sequences: IntArray
    passes: IntArray


@dataclass(frozen=True)
class SendProbe:
    """A probe to send. `again`: it repeats one that is already on the reliable channel, so a hint is enough."""

    probe: Probe
    again: bool


class Sender:
    """One direction of one round.

    Args:
        order: permutation of 0..chunks-1, the order of the first transmission.
        window: most datagrams that may be unanswered by a bitmap (what the receiver's buffer holds).
        pipelined: keep sending while a probe is outstanding; otherwise every pass waits for its bitmap.
        probe_every: pipelined only: datagrams between two probes.
        reprobe_s: repeat an unanswered probe as a hint after this time; None = never (reliable channel only).
        pass_overhead_s: pause before every pass after the first.
        rtt_s: the round-trip time that earlier rounds have measured, if any.
        need: chunks that complete the round, as far as the sender knows; None = nothing holds it back.
        path_rtt_s: the shortest round-trip time of the path; None = not known, then nothing holds it back.
        pace_hz: datagrams a second, on average; None = as fast as they are taken.
        overrun: datagrams, besides those of a round trip, that may go out unanswered where the round may be over.
    """

    def __init__(
        self,
        round_: int,
        direction: int,
        order: IntArray,
        *,
        window: int,
        pipelined: bool,
        probe_every: int = 1024,
        reprobe_s: float | None = None,
        pass_overhead_s: float = 0.0,
        rtt_s: float | None = None,
        need: int | None = None,
        path_rtt_s: float | None = None,
        overrun: int = 64,
        pace_hz: float | None = None,
    ) -> None:
        if window < 1 or probe_every < 1:
            raise LocalProtocolError("window and probe_every must be at least 1")
        chunks = len(order)
        self.round, self.direction, self.order = round_, direction, order
        self.window, self.pipelined, self.probe_every = window, pipelined, probe_every
        self.reprobe_s, self.pass_overhead_s = reprobe_s, pass_overhead_s
        self.state = SenderState.SENDING
        self.stop: Stop | None = None
        self.sent = 0
        self.probes = 0
        self.rtt_s = rtt_s
        self.need, self.overrun, self.path_rtt_s = need, overrun, path_rtt_s
        # From this many datagrams on the round may be over: without a loss, `need` of them are enough.
        self._may_end = need
        self._began: float | None = None
        self.pace_hz = pace_hz
        self._due: float | None = None  # when the next datagram may go out
        self._answered = 0
        self._answered_probe = -1
        self._probed = 0  # datagrams that the last probe covers
        self._outstanding: Probe | None = None
        self._probed_at = 0.0
        self._repeats = 0
        self._asked_at: dict[int, float] = {}
        self._repeated = -1
        self._resume_at: float | None = None
        self._times_sent = np.zeros(chunks, np.int64)
        self._often = False  # whether some chunk was sent as often as the pass field can count
        self._last_sent = np.full(chunks, -1, np.int64)
        self._unanswered: IntArray = np.empty(0, np.int64)  # sequences of the datagrams under way, in order
        self._missing = np.ones(chunks, np.bool_)  # by the last answer
        self._share = 0.0  # of what was sent, what had arrived by the last answer
        self._silent = (0, 0)  # datagrams and chunks that do not count in it
        self._repeated_early = False
        self._queued = np.ones(chunks, np.bool_)
        # What is to be sent, up to `_at` taken already: taking is two slices, the books follow in `_settle`.
        self._queue: IntArray = order
        self._queue_passes = np.zeros(chunks, np.int64)
        self._at = 0
        self._early = False  # the queue is of chunks that may be under way
        self._effects: list[SendProbe] = []

    @property
    def passes(self) -> int:
        """Transmissions of the chunk that was sent most often; under stop-and-wait the number of passes."""
        self._settle()
        return int(self._times_sent.max(initial=0))

    @property
    def finished(self) -> bool:
        return self.state in (SenderState.STOPPED, SenderState.ABORTED)

    def take(self, now: float, limit: int) -> Batch | None:
        """The next batch of at most `limit` chunks, or None when there is nothing to send now."""
        if self.state is not SenderState.SENDING or (self._resume_at is not None and now < self._resume_at):
            return None
        self._resume_at = None
        self._began = now if self._began is None else self._began
        if self.pace_hz is not None:
            self._due = now if self._due is None else max(self._due, now - PACE_SLACK_S)
            if now < self._due:
                self._resume_at = self._due
                return None
            limit = min(limit, paced_batch(self.pace_hz, now - self._due))
        start, ahead = self._at, self._ahead(now)
        end = min(start + min(limit, self.window - (self.sent - self._answered), ahead), len(self._queue))
        batch: Batch | None = None
        if end > start:
            batch = Batch(self._queue[start:end], self._queue_passes[start:end])
            if self._often and batch.passes.max() > MAX_PASS:
                raise LocalProtocolError(f"round {self.round}: a chunk was sent {MAX_PASS} times")
            self._at = end
            self.sent += end - start
            if self.pace_hz is not None and self._due is not None:
                self._due += (end - start) / self.pace_hz
        self._probe_when_due(now)
        return batch

    def _settle(self) -> None:
        """Enters what was taken from the queue into the books of the single chunks."""
        taken = self._queue[: self._at]
        if len(taken):
            self._last_sent[taken] = np.arange(self.sent - len(taken), self.sent)
            self._times_sent[taken] = self._queue_passes[: self._at] + 1  # of several copies the last one counts
            self._queued[taken] = False
            self._unanswered = np.concatenate([self._unanswered, taken])
            self._queue, self._queue_passes, self._at = self._queue[self._at :], self._queue_passes[self._at :], 0

    def _ahead(self, now: float) -> int:
        """How many datagrams may go out before it is known whether the round is over.

        Where it may be, no more than a round trip and `overrun` hold: so little is sent in vain, and a receiver that
        waits for this very core gets it.
        """
        if self._may_end is None or self.path_rtt_s is None or self._began is None:
            return len(self._queue)
        return max(0, self._may_end + self.overrun + self._in_flight(now) - self.sent)

    def _in_flight(self, now: float) -> int:
        """Datagrams that a round trip of the path holds, at the rate of this round; 0 where it is not known."""
        if not self.path_rtt_s or self._began is None or now <= self._began:
            return 0
        return int(self.path_rtt_s * self.sent / (now - self._began))

    def _long(self, now: float) -> bool:
        """Whether to wait for answers would cost more than to repeat what may be under way."""
        return self.pipelined and not self.pass_overhead_s and self._in_flight(now) >= max(1, LONG_PATH * self.overrun)

    def _probe_when_due(self, now: float) -> None:
        if self._at >= len(self._queue):
            self._repeat_early(now)
        if self._at >= len(self._queue) or self.sent - self._answered >= self.window:
            if self._outstanding is None or self._outstanding.sent < self.sent:
                self._probe(now)
            self.state = SenderState.WAITING
            return
        unasked = self._may_end is not None and self._probed < self._may_end <= self.sent
        blocked = not self._ahead(now)
        if unasked or self._due_probe(now) or (blocked and self._outstanding is None):
            self._probe(now)
        if blocked:
            self.state = SenderState.WAITING

    def _due_probe(self, now: float) -> bool:
        """Whether enough was sent since the last answer; on a long path, since the last probe."""
        if not self.pipelined:
            return False
        if not self._long(now):
            return self._outstanding is None and self.sent - self._answered >= self.probe_every
        every, in_flight = min(self.probe_every, max(1, self.window // 4)), self._in_flight(now)
        if len(self._queue) - self._at < 2 * in_flight:  # before the next answer there may be nothing left to send
            every = min(every, max(self.overrun, in_flight // PROBES_UNDER_WAY))
        return self.sent - max(self._answered, self._probed) >= every

    def _repeat_early(self, now: float) -> None:
        """Nothing is left but chunks under way. On a long path the missing ones are sent again, those first that
        were sent the longest time ago, until the round is likely to end by what is under way."""
        if self.need is None or not self._long(now):
            return
        self._settle()
        missing = np.flatnonzero(self._missing)
        to_go = max(1, self.need - (len(self.order) - len(missing)))
        copies = np.bincount(self._unanswered, minlength=len(self.order))[missing]
        count = lacking(copies, to_go, 1.0 - self._share, min(self._in_flight(now), self.window))
        if count:
            missing = missing[np.argsort(self._last_sent[missing], kind="stable")]
            self._queue = np.resize(missing, count)
            self._queue_passes = self._times_sent[self._queue] + np.arange(count) // len(missing)
            self._often = bool(self._queue_passes.max() > MAX_PASS)
            self._early = self._repeated_early = True

    def _probe(self, now: float) -> None:
        self._outstanding = Probe(self.round, self.direction, self.probes, self.sent)
        self._probed_at = self._asked_at[self.probes] = now
        self._probed = self.sent
        self._repeats = 0
        self.probes += 1
        self._effects.append(SendProbe(self._outstanding, again=False))

    def effects(self) -> list[SendProbe]:
        """Probes to send since the last call, in order; they go after the batch that `take` returned."""
        effects, self._effects = self._effects, []
        return effects

    def on_bitmap(self, bitmap: Bitmap, now: float) -> None:
        """What had arrived when the receiver answered a probe. Stale and repeated answers are ignored.

        Raises PeerProtocolError for an answer to a probe that was never sent, or of the wrong length.
        """
        if self.finished or not self._mine(bitmap.round, bitmap.direction) or bitmap.probe <= self._answered_probe:
            return
        if bitmap.probe >= self.probes or not self._answered <= bitmap.sent <= self.sent:
            raise PeerProtocolError(f"round {self.round}: bitmap for probe {bitmap.probe}, {self.probes} were sent")
        received = self._unpack(bitmap.bits)
        self._close(received, bitmap.sent)
        self._answered_probe, self._answered = bitmap.probe, bitmap.sent
        if self._outstanding is not None and bitmap.probe == self._outstanding.probe:
            self._outstanding = None
        self._measure(bitmap.probe, now)
        # The answer counts chunks that went out behind its probe too: they say nothing of those before it.
        behind = self._unanswered[received[self._unanswered]]
        overtaken = int(np.count_nonzero(self._times_sent[behind] == 1))
        self._foresee(int(np.count_nonzero(received)) - overtaken, bitmap.sent)
        self._requeue(received, bitmap.sent, now)

    def _close(self, received: BoolArray, sent: int) -> None:
        """The first `sent` datagrams are answered."""
        self._settle()
        answered, self._unanswered = np.split(self._unanswered, [sent - self._answered])
        if self._repeated_early:
            datagrams, chunks = silent(answered, self._missing, received)
            self._silent = self._silent[0] + datagrams, self._silent[1] + chunks
        self._missing = ~received

    def _foresee(self, delivered: int, sent: int) -> None:
        """From how many datagrams on the round may be over, after `delivered` of `sent`: two standard deviations
        before it is to be expected, and never before the fewest that can complete it."""
        if self.need is None:
            return
        to_go = max(1, self.need - delivered)
        telling, came = sent - self._silent[0], delivered - self._silent[1]
        self._share = share = min(1.0, came / telling) if telling else 1.0
        soon = to_go - 2 * (to_go * (1 - share)) ** 0.5
        self._may_end = sent + max(to_go, int(soon / share) if share else len(self.order))

    def _requeue(self, received: BoolArray, sent: int, now: float) -> None:
        if self._early:  # what has not gone out of them is chosen anew
            self._queue, self._queue_passes = self._queue[:0], self._queue_passes[:0]
            self._early = False
        waiting = self._queue[~received[self._queue]]
        lost = ~received & ~self._queued & (self._last_sent >= 0) & (self._last_sent < sent)
        if not self.pipelined and (len(waiting) or sent < self.sent):
            lost[:] = False  # a probe inside the pass; the one at its end tells what was lost
        again = self.order[lost[self.order]]
        self._queued[:] = False
        self._queue = np.concatenate([waiting, again])
        self._queued[self._queue] = True
        self._queue_passes = self._times_sent[self._queue]
        self._often = bool(self._queue_passes.max(initial=0) > MAX_PASS)
        if len(again) and not len(waiting) and self.pass_overhead_s:
            self._resume_at = now + self.pass_overhead_s
        if not len(self._queue):
            self._repeat_early(now)
        if len(self._queue) and self.sent - self._answered < self.window:
            self.state = SenderState.SENDING
        elif self._outstanding is None and self.sent > self._answered:
            self._probe(now)

    def on_stop(self, stop: Stop) -> None:
        """The receiver needs no more of this round; of another round it is ignored.

        Raises PeerProtocolError when its bitmap does not fit the number of chunks.
        """
        if not self.finished and self._mine(stop.round, stop.direction):
            self._unpack(stop.bits)
            self.stop, self.state = stop, SenderState.STOPPED
            self._effects.clear()

    def abort(self) -> None:
        """Give the round up (its deadline has passed)."""
        if not self.finished:
            self.state = SenderState.ABORTED
            self._effects.clear()

    def next_timer(self) -> float | None:
        """When handle_timer or take wants to be called next, in the caller's clock; None = only after an answer."""
        if self.finished:
            return None
        if self.state is SenderState.SENDING:
            return self._resume_at if self._resume_at is not None else 0.0
        if self.reprobe_s is None or self._outstanding is None:
            return None
        return self._probed_at + self._reprobe_after()

    def handle_timer(self, now: float) -> None:
        """Repeats an outstanding probe when its answer is overdue."""
        due = self.next_timer()
        if self.state is SenderState.WAITING and due is not None and now >= due and self._outstanding is not None:
            self._probed_at, self._repeated = now, self._outstanding.probe
            self._repeats += 1
            self._effects.append(SendProbe(self._outstanding, again=True))

    def packets_at(self, stop: Stop) -> int:
        """Datagrams sent up to the transmission that completed the round.

        Exact unless that transmission was overtaken by an answered probe and the chunk was sent again, which only a
        reordering network can cause: then the last one counts.
        """
        self._settle()
        if stop.sequence >= len(self.order):
            return self.sent
        later = int(self._times_sent[stop.sequence]) - 1 - stop.pass_
        places = np.flatnonzero(self._unanswered == stop.sequence)
        if 0 < later < len(places):
            return self._answered + int(places[-1 - later]) + 1
        return int(self._last_sent[stop.sequence]) + 1

    def _reprobe_after(self) -> float:
        """Twice the round-trip time, and longer with every repetition: the receiver may just be busy."""
        floor = self.reprobe_s or 0.0
        first = max(floor, 2 * self.rtt_s) if self.rtt_s is not None else max(floor, FIRST_REPROBE_S)
        return first * REPROBE_GROWTH ** min(self._repeats, REPROBE_GROWTH_STEPS)

    def _measure(self, probe: int, now: float) -> None:
        """Karn: which copy of a repeated probe was answered is not known, so it gives no sample. Only where there is
        none at all, the time since the first copy counts: too long is harmless, too short would repeat for ever."""
        sample_s = now - self._asked_at[probe]
        self._asked_at = {later: asked for later, asked in self._asked_at.items() if later > probe}
        if self.rtt_s is None:
            self.rtt_s = sample_s
        elif probe != self._repeated:
            # The shortest, slowly forgotten. A mean would grow without limit: answers that TCP had to send again
            # come late, and a longer wait lets even later ones count.
            self.rtt_s = min(sample_s, RTT_GROWTH * self.rtt_s)

    def _unpack(self, bits: bytes) -> BoolArray:
        try:
            return unpack_bits(bits, len(self.order))
        except ValueError as error:
            raise PeerProtocolError(f"round {self.round}: {error}") from error

    def _mine(self, round_: int, direction: int) -> bool:
        return round_ == self.round and direction == self.direction
