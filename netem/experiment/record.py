"""What happened in one job: events as they came, planned and actual times of every change, captures, memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from netem.analysis.load import Snapshot, between, snapshot
from netem.analysis.merge import LossPlan, merge_epochs, merge_rounds
from netem.analysis.records import LinkCount
from netem.analysis.run import TransportRun
from netem.analysis.timed import History, timed_loss, timing
from netem.experiment.hub import Event
from netem.experiment.prepare import Job, facts, saturated

PLACE = ("iteration", "bucket", "epoch")


@dataclass
class Recorder:
    """Keeps a job's events, and writes each as a line of events.jsonl. `t` is in seconds since the run began."""

    job: Job
    file: TextIO
    began: float
    per_epoch: int
    watch: Callable[[Event], None] = lambda event: None
    events: list[Event] = field(default_factory=list)
    gate_s: float = 0.0
    lost_workers: set[int] = field(default_factory=set)
    failures: dict[int, str] = field(default_factory=dict)
    """Last words of ranks that failed, by rank, in the order in which they came."""
    before: Snapshot | None = field(default_factory=snapshot)
    """The machine's load when the job began."""

    def __call__(self, event: Event) -> None:
        stamped = {
            "t": round(time.monotonic() - self.began, 6),
            "transport": self.job.name,
            "repeat": self.job.repeat,
            **event,
        }
        self.events.append(stamped)
        self.file.write(json.dumps(stamped, separators=(",", ":")) + "\n")
        if event["event"] == "error":
            self.failures.setdefault(int(event["rank"]), str(event.get("message")))
        self.watch(stamped)

    def placed(self) -> list[Event]:
        """Events with iteration, bucket and epoch: workers report these, the server does not know them.

        A round that no worker has reported was not finished: of it only what the lost worker sent is kept, for the
        others have lost nothing. With one bucket its number is the iteration.
        """
        places: dict[int, dict[str, Any]] = {}
        for event in self.events:
            if event["event"] == "sent" and "iteration" in event:
                places[event["round"]] = {key: event[key] for key in PLACE}
        return [
            {**places.get(event["round"], self._place(event["round"])), **event}
            if event["event"] in ("sent", "received")
            else event
            for event in self.events
            if event["event"] not in ("sent", "received") or event["round"] in places or self._of_lost(event)
        ]

    def _of_lost(self, event: Event) -> bool:
        return event["worker"] in self.lost_workers and event["direction"] == "up"

    def _place(self, round_: int) -> dict[str, Any]:
        return {"iteration": round_, "bucket": 0, "epoch": round_ // self.per_epoch}

    def lost(self, rank: int) -> None:
        """A worker has died: its part of the round that was not finished gets a row, too."""
        sent = [e for e in self.events if e["event"] == "sent" and e["direction"] == "up"]
        own = [e["round"] for e in sent if e["worker"] == rank]
        if rank:
            self.lost_workers.add(rank)
            round_ = max(own, default=-1) + 1  # it reports a round when that is over
            self({"event": "received", "round": round_, "worker": rank, "direction": "up", "outcome": "lost_worker"})

    def total_s(self) -> float | None:
        """From the first send to the last report, without the time that gates took."""
        sent = [event for event in self.events if event["event"] == "sent" and event["direction"] == "up"]
        ends = [event["t"] for event in self.events if event["event"] in ("sent", "epoch", "replicas")]
        if not sent or not ends:
            return None
        first = min(event["t"] - event["latency_s"] - event["wait_s"] for event in sent[: 1 + len(sent) // 10])
        return max(0.0, float(max(ends) - first - self.gate_s))

    def result(
        self,
        counts: list[LinkCount],
        plan: LossPlan,
        history: History | None = None,
        *,
        by_round: bool,
        repeatable: bool,
    ) -> TransportRun:
        """The job's rows."""
        job, events = self.job, self.placed()
        history = history or History()
        phases = [
            {"round": e["round"], "phase": e["phase"], "reason": e["reason"]}
            for e in self.events
            if e["event"] == "phase"
        ]
        return TransportRun(
            name=job.name,
            kind=job.spec.kind,
            repeat=job.repeat,
            rows=tuple(
                merge_rounds(
                    events,
                    counts,
                    plan,
                    transport=job.name,
                    repeat=job.repeat,
                    timed=timed_loss(history, plan.ranks),
                )
            ),
            epochs=tuple(merge_epochs(events, transport=job.name, repeat=job.repeat)),
            counts=tuple(counts),
            total_s=self.total_s(),
            by_round=by_round and job.key is not None,
            reliable_broadcast=job.reliable_broadcast,
            stop_and_wait=job.stop_and_wait,
            mask_seed=job.config.seed if repeatable and job.key is not None else None,
            moments=tuple(history.moments),
            load=between(self.before, snapshot()),
            order=None if job.spec.reliable else job.order(),
            facts={**facts(job), "phases": phases, "saturated": saturated(self.events), **timing(history)},
        )
