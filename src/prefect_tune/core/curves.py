"""The learning curves of an experiment, from its journal: of one trial, or of every one, the reports that count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefect_tune.core.events import Absorbed, Cloned, Event, Reported, Started
from prefect_tune.core.experiment import Entry
from prefect_tune.core.values import StepReport

__all__ = ["Curves", "curve"]


def curve(entries: Iterable[Entry], trial: str) -> Sequence[StepReport]:
    """Return the curve of a trial, as `Curves` would, from the journal that the trial itself is in."""
    curves = Curves()
    for event in (event for entry in entries for event in entry.events):
        if isinstance(event, Started | Cloned | Reported) and event.trial == trial:  # no other trial's is kept
            curves.tell_event(event)
    return curves.of(trial)


class Curves:
    """Of every trial one report for each step; of steps that an attempt did again the later one counts.

    The history of a clone begins with the step that it was cloned at; what came before is another trial's.
    """

    def __init__(self) -> None:
        self._reports: dict[str, dict[int, StepReport]] = {}
        self._told = 0

    def tell(self, entry: Entry) -> None:
        """Take in the next entry."""
        for event in entry.events:
            self.tell_event(event)

    def tell_event(self, event: Event) -> None:
        """Take in the next event."""
        for each in event.events if isinstance(event, Absorbed) else (event,):
            self._tell(each)

    @property
    def told(self) -> int:
        """How many reports it was told of."""
        return self._told

    def of(self, trial: str) -> Sequence[StepReport]:
        """Return the curve of a trial, by step; empty where it reported nothing."""
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
                self._told += 1
            case _:
                pass
