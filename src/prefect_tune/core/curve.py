"""A trial's learning curve, from the journal: what was reported and still counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefect_tune.core.events import Cloned, Reported, Started
from prefect_tune.core.experiment import Entry
from prefect_tune.core.values import StepReport

__all__ = ["curve"]


def curve(entries: Iterable[Entry], trial: str) -> Sequence[StepReport]:
    """Return one report for each step, in order; of steps that an attempt did again the later one counts.

    The history of a clone begins with the step that it was cloned at; what came before is another trial's.
    """
    reports: dict[int, StepReport] = {}
    for event in (event for entry in entries for event in entry.events):
        match event:
            case Started() if event.trial == trial:
                reports = {step: report for step, report in reports.items() if step <= event.from_step}
            case Cloned(checkpoint=copy) if event.trial == trial:
                reports = {
                    copy.step: StepReport(step=copy.step, metrics=copy.metrics, trained_seconds=copy.trained_seconds)
                }
            case Reported() if event.trial == trial:
                reports[event.report.step] = event.report
            case _:
                pass
    return [reports[step] for step in sorted(reports)]
