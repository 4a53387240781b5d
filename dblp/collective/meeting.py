"""Where the server's threads meet: the last one to come acts for all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from dblp.errors import DblpError

T = TypeVar("T")


class Meeting:
    """A reusable barrier of `parties` threads that carries a value in and a result out."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self._condition = threading.Condition()
        self._offers: dict[int, Any] = {}
        self._turn = 0
        self._result: Any = None
        self._failure: BaseException | None = None

    def meet(self, rank: int, offer: Any, action: Callable[[dict[int, Any]], T], limit_s: float) -> T:
        """Waits for all parties; the last runs `action` on what all have offered (by rank), and all get its result.

        Raises DblpError when another thread has failed, when `action` fails, or after `limit_s`.
        """
        with self._condition:
            self._check()
            turn = self._turn
            self._offers[rank] = offer
            if len(self._offers) == self.parties:
                self._act(action)
            else:
                self._condition.wait_for(lambda: self._turn != turn or self._failure is not None, limit_s)
                if self._turn == turn:
                    self._check()
                    missing = sorted(set(range(1, self.parties + 1)) - set(self._offers))
                    raise DblpError(f"worker(s) {missing} did not reach the end of the round within {limit_s:g} s")
            result: T = self._result
            return result

    def _act(self, action: Callable[[dict[int, Any]], Any]) -> None:
        offers, self._offers = self._offers, {}
        try:
            self._result = action(offers)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._turn += self._failure is None
            self._condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """Wakes everybody who waits, now and later, with this failure."""
        with self._condition:
            self._failure = self._failure or error
            self._condition.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise DblpError(f"stopped because of another worker: {self._failure}") from self._failure
