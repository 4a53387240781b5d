"""What a person sees while a scenario runs: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from netem.experiment.hub import Event
from netem.experiment.prepare import Job
from netem.spec.loss import loss_of, loss_text


class Display:
    """Shows jobs one after another."""

    def __init__(self, console: Console, iterations: int) -> None:
        self.console, self.iterations = console, iterations
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=console)
        self._task: int | None = None
        self._job: Job | None = None
        self._epoch = -1

    def __enter__(self) -> Display:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, job: Job, number: int, of: int) -> None:
        self._job, self._epoch = job, -1
        label = f"{job.name} ({number}/{of})"
        if self._progress is not None:
            self._task = self._progress.add_task(label, total=self.iterations)
        else:
            self.say(f"{label}: starting {self.iterations} iterations")

    def event(self, event: Event) -> None:
        kind = event["event"]
        if kind == "sent" and event["direction"] == "up" and event["worker"] == 1:
            if self._progress is not None and self._task is not None:
                self._progress.advance(self._task)  # type: ignore[arg-type]
        elif kind == "impairment":
            self._impairment(event)
        elif kind == "missed" and "ended_s" in event:
            self.say(
                f"{event['at']}: planned for {event['planned_s']:g} s, but the job ended at {event['ended_s']:g} s"
            )
        elif kind == "preloaded":
            took = f"in place after {event['took_s'] * 1e3:.1f} ms"
            self.say(f"{event['rules']} rules for all rounds with bursts, {took}; no gates")
        elif kind == "epoch" and event["worker"] == 1 and self._job is not None:
            value = event.get("value")
            shown = "" if value is None else f", {event['metric']} {value:.1%}"
            self.say(f"{self._job.name}: epoch {event['epoch']} done in {event['wall_s']:.1f} s{shown}")

    def _impairment(self, event: Event) -> None:
        planned_s = event.get("planned_s")
        if planned_s is not None and "lateness_s" in event:
            return  # there may be hundreds
        where = f"iteration {event['planned_round']}" if planned_s is None else f"{planned_s:g} s"
        took = f"in place after {event['took_s'] * 1e3:.1f} ms"
        for burst in event["bursts"]:
            loss = loss_text(loss_of(burst["loss"]))
            self.say(f"burst of {loss} loss ({burst['direction']}, {burst['match']}) at {where}, {took}")
        for shift in event.get("shifts", ()):
            self.say(f"{shift['link']} changed at {where}, {took}")
        if not event["bursts"] and not event.get("shifts"):
            self.say(f"no loss from {where} on, {took}")

    def say(self, text: str) -> None:
        self.console.print(text, style="dim", highlight=False, soft_wrap=True)
