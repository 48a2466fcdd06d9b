"""Learning curves of one trial, or of all trials, from the journal of an experiment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefect_tune.core.journal_events.experiment_events import Cloned, Event, Reported, Started, events_in
from prefect_tune.core.journal_events.journal_entry import Entry
from prefect_tune.core.models import StepReport

__all__ = ["Curves", "curve"]


def curve(entries: Iterable[Entry], trial: str) -> Sequence[StepReport]:
    """Return the curve of a trial, as `Curves` does, from its own journal or, if it has none, the experiment's."""
    curves = Curves()
    for event in (event for entry in entries for event in entry.events):
        if isinstance(event, Started | Cloned | Reported) and event.trial == trial:  # keeps this trial's reports only
            curves.tell_event(event)
    return curves.of(trial)


class Curves:
    """The reports of every trial, one for each step; for a step that was trained again, the later report.

    The curve of a trial that was cloned into begins with the clone's step.
    """

    def __init__(self) -> None:
        self._reports: dict[str, dict[int, StepReport]] = {}
        self._report_count = 0

    def tell(self, entry: Entry) -> None:
        """Add the reports of the next entry."""
        for event in entry.events:
            self.tell_event(event)

    def tell_event(self, event: Event) -> None:
        """Add the reports of the next event."""
        for each in events_in(event):
            self._tell(each)

    @property
    def report_count(self) -> int:
        """How many reports were added so far, repeated steps included."""
        return self._report_count

    def of(self, trial: str) -> Sequence[StepReport]:
        """Return the curve of a trial, by step; empty where it has no report."""
        reports = self._reports.get(trial, {})
        return [reports[step] for step in sorted(reports)]

    def _tell(self, event: Event) -> None:
        match event:
            case Started(trial=trial, from_step=start) if trial in self._reports:
                reports = self._reports[trial]
                self._reports[trial] = {step: each for step, each in reports.items() if step <= start}
            case Cloned(trial=trial, checkpoint=copy):
                report = StepReport(step=copy.step, metrics=copy.metrics, trained_seconds=copy.trained_seconds)
                self._reports[trial] = {copy.step: report}
            case Reported(trial=trial, report=report):
                self._reports.setdefault(trial, {})[report.step] = report
                self._report_count += 1
            case _:
                pass
