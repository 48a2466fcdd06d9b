"""What ends before there is nothing more to do: the experiment, or a single trial; journaled before it is acted on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from prefect_tune.core.events import Finished, StopAsked
from prefect_tune.core.requests import StopRequest, taken_note_of
from prefect_tune.core.wire import Leave
from prefect_tune.flows.council import Council
from prefect_tune.flows.crew import Crew
from prefect_tune.flows.limits import Limits
from prefect_tune.flows.page import Page
from prefect_tune.tasks.trial_channel import Log

__all__ = ["Outside", "Stopping"]


class Outside(Protocol):
    """What reaches a search from outside."""

    def is_interrupted(self) -> bool:
        """Whether the process is to end."""
        ...

    def take(self) -> Sequence[StopRequest]:
        """Return what was asked since."""
        ...

    def heard(self, count: int) -> None:
        """Take note that the journal names the first `count` requests."""
        ...


class Stopping:
    """Whether one owner's run of an experiment is to end, by whoever's wish."""

    def __init__(self, limits: Limits, council: Council, crew: Crew, page: Page, log: Log) -> None:
        self._limits = limits
        self._council = council
        self._crew = crew
        self._page = page
        self._log = log
        self._began = time.monotonic()
        self.ends = False
        """Whether nothing is begun any more, and everything saves and ends."""

    def heed(self, outside: Outside) -> None:
        """Find out whether the experiment, or a trial, is to end, and have it end."""
        if outside.is_interrupted():
            self.ends = True
            self._crew.stop()  # the time for it is short: a target that hangs is not waited for
        for request in outside.take():
            self._hear(taken_note_of(self._page.state, request))
        if self._limits.ends:
            self.end(self._limits.ends)
        elapsed = timedelta(seconds=time.monotonic() - self._began)
        if self._limits.time is not None and elapsed >= self._limits.time:
            self.end(f"the time budget of {self._limits.time} is spent")
        elif (why := self._council.why_end()) is not None:
            self.end(why)
        if self.ends:
            self._page.then(self._crew.stop)

    def end(self, why: str) -> None:
        """Have every trial save and end."""
        if not self.ends:
            self._end(StopAsked(reason=why))

    def finish(self, trial: str) -> None:
        """Take a trial for finished that is asked to stop, and that nobody trains."""
        self._page.put(Finished(trial=trial, reason=self._page.state.stops[trial], left=True))

    def tell(self, trial: str) -> None:
        """Tell a trial that trains to save and leave; how it does is in its own journal."""
        leave = Leave(reason=self._page.state.stops[trial], save=True, for_good=True)
        self._page.then(lambda: self._crew.answer(trial, leave))

    def _hear(self, asked: StopAsked) -> None:
        if asked.refused:
            self._log.warning("a request to stop comes to nothing: %s (%s)", asked.refused, asked.reason)
            self._page.put(asked)
        elif asked.trial is None:
            self._end(asked)
        else:
            self._log.warning("trial %s is to save and end: %s", asked.trial, asked.reason)
            self._page.put(asked)
            self._stop_trial(asked.trial)

    def _end(self, asked: StopAsked) -> None:
        self._log.warning("%s: every trial saves and ends, resumable", asked.reason)
        self._page.put(asked)
        self.ends = True

    def _stop_trial(self, trial: str) -> None:
        if trial in self._crew:
            self.tell(trial)
        else:
            self.finish(trial)
