"""The rows of a search's trials as an HTML table: those of the terminal's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.html_tables import Html, escaped, paragraph, rows_table, soft
from prefect_tune.core.models import plural
from prefect_tune.reporting.charts.svg import GREY
from prefect_tune.reporting.charts.timeline_charts import FILLS
from prefect_tune.terminal.formatting import errors_by_cause, names_of
from prefect_tune.terminal.trials_table import cells_of

_WIDTH = 150
"""In characters: more parameters than fit are left out, as in a terminal of this width."""
_CELL = 80
_ERRORS = 3


def trials_html(
    trials: Sequence[Trial],
    metrics: Sequence[str],
    *,
    best: str | None = None,
    more: Mapping[str, list[str]] = MappingProxyType({}),
) -> Html:
    """Return a table with a row per trial: status, step, metrics, the columns `more`, the differing parameters."""
    if not trials:
        return Html("")
    names, rows = cells_of(trials, metrics, _WIDTH, more)
    place = names.index("status")
    cells = [
        [_status(trial, cell) if index == place else escaped(cell, _CELL) for index, cell in enumerate(row)]
        for trial, row in zip(trials, rows, strict=True)
    ]
    marked = next((index for index, each in enumerate(trials) if each.trial == best), None)
    return rows_table(names, cells, marked=marked)


def _status(trial: Trial, label: str) -> Html:
    ink = FILLS[trial.status].ink if trial.status in FILLS else GREY
    return Html(f'<span class="pt-dot" style="background:{ink}"></span>{escaped(label)}')


def errors_html(errored: Sequence[Trial], count: int) -> Html:
    """Return the errors of the first trials of `count` that errored, each different one in one line."""
    shown = errored[:_ERRORS]
    causes = [f"{names_of(alike)} {cause}" for cause, alike in errors_by_cause(shown)]
    lines = [paragraph(escaped(cause), kind="pt-bad") for cause in causes]
    if count > len(shown):
        lines.append(paragraph(soft(f"and {plural(count - len(shown), 'more error', 'more errors')}: results.errors")))
    return Html("".join(lines))
