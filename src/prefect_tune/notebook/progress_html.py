"""A running search as the output of its cell: progress, the best trial so far, a table of trials, errors, events."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.html_tables import Html, cell_html, escaped, facts_table, paragraph, soft
from prefect_tune.core.models import plural
from prefect_tune.notebook.cell_output import Ending
from prefect_tune.notebook.trials_html import errors_html, trials_html
from prefect_tune.reporting.charts.svg import BLUE, GREEN, ORANGE, RED
from prefect_tune.terminal.formatting import format_duration
from prefect_tune.terminal.progress_state import Note, ProgressState
from prefect_tune.terminal.progress_view import chosen_trials, common_metrics, head_facts, time_left

_MOST_ROWS = 20
_MOST_NOTES = 4
_INKS = {Ending.RUNNING: BLUE, Ending.DONE: GREEN, Ending.INTERRUPTED: ORANGE, Ending.FAILED: RED}


def progress_html(state: ProgressState, ending: Ending, why: str, link: str | None = None) -> Html:
    """Return the output: at most 20 trials and the first errors, for any number of trials.

    Args:
        state: the search at this moment.
        ending: how it ended, if it has.
        why: the error of a failure.
        link: the URL of its run in the Prefect UI; None if it is not known.
    """
    return cell_html(*_parts(state, ending, why, link))


def _parts(state: ProgressState, ending: Ending, why: str, link: str | None) -> Iterator[Html]:
    yield paragraph(escaped(state.outlook.experiment), kind="pt-title")
    yield paragraph(*_headline(state, ending, why), kind="pt-bad" if ending is Ending.FAILED else "")
    if state.share is not None:
        has_failed = state.counts.get(Status.ERRORED, 0) == sum(state.counts.values()) > 0
        yield _bar(state.share, RED if has_failed else _INKS[ending])
    facts = {name: escaped(text) for name, text in head_facts(state).items()}
    yield facts_table({**facts, "run": _link(link) if link else Html("")})
    objective = state.outlook.objective
    trials = chosen_trials(state, _MOST_ROWS)
    best = state.best.trial if state.best is not None and objective is not None else None
    yield trials_html(trials, objective.metrics if objective else common_metrics(trials), best=best)
    if (hidden := sum(state.counts.values()) - len(trials)) > 0 and trials:
        yield paragraph(soft(f"and {plural(hidden, 'more trial', 'more trials')}"))
    yield errors_html(state.errored, state.counts.get(Status.ERRORED, 0))
    if ending is Ending.RUNNING:
        yield from (paragraph(soft(_words_of(each))) for each in state.notes[-_MOST_NOTES:])


def _headline(state: ProgressState, ending: Ending, why: str) -> Iterator[Html]:
    after = f"after {format_duration(state.elapsed)}"
    match ending:
        case Ending.RUNNING:
            yield escaped(" · ".join(_pace(state)))
        case Ending.DONE if state.ended_because:
            yield escaped(f"ended early {after}: {state.ended_because}")
        case Ending.DONE if not state.has_trained:
            yield escaped("nothing to train: every trial had ended before. A new experiment name begins a new search")
        case Ending.DONE:
            yield escaped(f"done {after}")
        case Ending.INTERRUPTED:
            yield escaped(f"interrupted {after}. To resume it, run the cell again with")
            yield Html(f" <code>experiment={escaped(repr(state.outlook.experiment))}</code>")
        case Ending.FAILED:
            yield escaped(f"failed {after}: {why}")


def _pace(state: ProgressState) -> Iterator[str]:
    yield f"running for {format_duration(state.elapsed)}"
    if left := time_left(state):
        yield left
    if state.reports_per_second:
        yield f"{state.reports_per_second:.3g} reports/s"


def _link(address: str) -> Html:
    return Html(f'<a href="{escape(address)}" target="_blank" rel="noopener">in the Prefect UI</a>')


def _words_of(note: Note) -> str:
    return f"{note.at:%H:%M:%S} {note.trial} {note.text}"


def _bar(share: float, ink: str) -> Html:
    percent = f"{100 * share:.1f}"
    return Html(
        f'<div class="pt-bar" role="progressbar" aria-valuenow="{percent}" aria-valuemin="0" aria-valuemax="100">'
        f'<div style="width:{percent}%;background:{ink}"></div></div>'
    )
