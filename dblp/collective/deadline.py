"""When one direction of a round has to be over: by this side's own clock, or for all threads of the server alike."""

from __future__ import annotations

import threading

from dblp.io import clock

LOOK_S = 0.25
"""A thread of the server sees after at most this time that another one has begun the round, or that it is over."""


class Deadline:
    """`first_limit_s` from now for the first sign of the round, then `limit_s` from that sign. Times in seconds."""

    def __init__(self, first_limit_s: float, limit_s: float) -> None:
        self.first_limit_s, self.limit_s = first_limit_s, limit_s
        self._at = clock() + first_limit_s
        self._begun = False

    @property
    def begun(self) -> bool:
        return self._begun

    def begin(self) -> None:
        """The first sign of the round has come; later ones change nothing."""
        if not self._begun:
            self._begun, self._at = True, clock() + self.limit_s

    def at(self) -> float:
        """When the direction is over, as far as is known now."""
        return self._at

    def look(self) -> float:
        """Until when one may sleep before asking again."""
        return self.at()


class Rounds:
    """When each round of a server began, and which one a worker has left: shared by the threads of all workers.

    A round begins with the first sign of it from any worker. Were it the first sign from each, a worker of which
    nothing gets through would be waited for as if it still computed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began: dict[int, float] = {}
        self._left = -1

    def begin(self, round_: int) -> None:
        with self._lock:
            self._began.setdefault(round_, clock())
            for old in [known for known in self._began if known < round_ - 1]:
                del self._began[old]

    def began(self, round_: int) -> float | None:
        with self._lock:
            return self._began.get(round_)

    def leave(self, round_: int) -> None:
        """A worker has left this round and those before it without its broadcast: they cannot count any more."""
        with self._lock:
            self._left = max(self._left, round_)

    def left(self, round_: int) -> bool:
        with self._lock:
            return round_ <= self._left


class SharedDeadline(Deadline):
    """The deadline of one worker's thread of the server: all threads have the same, as Rounds says."""

    def __init__(self, rounds: Rounds, round_: int, first_limit_s: float, limit_s: float) -> None:
        super().__init__(first_limit_s, limit_s)
        self.rounds, self.round = rounds, round_

    @property
    def begun(self) -> bool:
        return self.rounds.left(self.round) or self.rounds.began(self.round) is not None

    def begin(self) -> None:
        self.rounds.begin(self.round)

    def leave(self) -> None:
        """This thread's worker has gone on without the round: it is over for all now."""
        self.rounds.leave(self.round)

    def at(self) -> float:
        if self.rounds.left(self.round):
            return 0.0
        began = self.rounds.began(self.round)
        return self._at if began is None else began + self.limit_s

    def look(self) -> float:
        return min(self.at(), clock() + min(LOOK_S, self.limit_s / 4))
