"""Render the progress of a search: as much as fits a terminal, or one line."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from prefect_tune.core.experiment.summary import best_label, named
from prefect_tune.core.experiment.trial import status_label
from prefect_tune.core.experiment.trial_transitions import Status, Trial, newest_checkpoint
from prefect_tune.core.shown_text import first_line, visible
from prefect_tune.core.values import flat, metric_in
from prefect_tune.terminal.formatting import borderless_table, format_counts, format_duration, format_value, plain_cells
from prefect_tune.terminal.progress_state import Note, ProgressState

# The trials of a search as a table that fits its terminal.

_GAP = 2
_WIDEST_CELL = 24
_NO_TIME = format_duration(timedelta(0))


def trials_table(
    trials: Sequence[Trial],
    metrics: Sequence[str],
    more: Mapping[str, list[str]] = MappingProxyType({}),
    *,
    width: int | None = None,
    styles: Mapping[Status, str] = MappingProxyType({}),
) -> Table:
    """Return a table with a row per trial: metrics, the columns `more`, and the differing parameters that fit.

    `width` is that of the terminal by default; `styles` are Rich's styles of rows.
    """
    names, rows = cells_of(trials, metrics, width or Console().width, more)
    table = borderless_table()
    for name in names:
        table.add_column(Text(visible(name)), no_wrap=True)
    for trial, row in zip(trials, rows, strict=True):
        table.add_row(*plain_cells(row), style=styles.get(trial.status, ""))
    return table


def cells_of(
    trials: Sequence[Trial], metrics: Sequence[str], width: int, more: Mapping[str, list[str]] = MappingProxyType({})
) -> tuple[list[str], list[list[str]]]:
    """Return column names and rows that are no wider than `width` if that is possible."""
    kept: dict[str, list[str]] = {
        "trial": [each.trial for each in trials],
        "status": [status_label(each.status, each.step) for each in trials],
        "step": [str(each.step) for each in trials],
    }
    for name in metrics:
        kept[_free(name, kept, "metrics/")] = [_on_one_line(metric_in(each.metrics, name)) for each in trials]
    for name, cells in more.items():
        kept[_free(name, kept, "trial's ")] = cells
    used = sum(_width(name, cells) + _GAP for name, cells in kept.items()) - _GAP
    for name, cells in _configuration(trials).items():
        used += _width(name, cells) + _GAP
        if used <= width:
            kept[_free(name, kept, "config/")] = cells
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def _free(name: str, taken: Collection[str], prefix: str) -> str:
    """Return `name`, or with a prefix if another column has it."""
    return f"{prefix}{name}" if name in taken else name


def config_cells(trial: Trial) -> Sequence[tuple[str, str]]:
    """Return the names and values of a configuration, each short."""
    return [(name, cells[0]) for name, cells in _configuration([trial]).items()]


def _width(name: str, cells: Sequence[str]) -> int:
    return max(len(name), *map(len, cells), 0)


def _configuration(trials: Sequence[Trial]) -> Mapping[str, list[str]]:
    """Return the parameters that differ between the trials; all parameters for a single trial."""
    configs = [flat(each.config) for each in trials]
    names = dict.fromkeys(name for config in configs for name in config)
    found = {name: [_short(_on_one_line(config.get(name))) for config in configs] for name in names}
    return {name: cells for name, cells in found.items() if len(set(cells)) > 1 or len(cells) == 1}


def _on_one_line(value: object) -> str:
    return " ".join(format_value(value).split())


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST_CELL else f"{text[: _WIDEST_CELL - 1]}…"


_MOST_ROWS = 16
_MOST_NOTES = 5
_HEAD = 8  # lines of everything that is neither a trial nor an event
_STYLES = {
    Status.RUNNING: "green",
    Status.ERRORED: "red",
    Status.INTERRUPTED: "yellow",
    Status.PAUSED: "cyan",
    Status.PRUNED: "dim",
    Status.PENDING: "dim",
}
_LONG_RUNGS = 8


def frame(state: ProgressState, width: int, height: int) -> RenderableType:
    """Render for a terminal of `width` columns and `height` lines, leaving its last line free."""
    room = max(0, height - 1 - _HEAD)
    notes = state.notes[-min(_MOST_NOTES, room // 3) :] if room >= 3 else ()
    rows = chosen_trials(state, min(_MOST_ROWS, room - len(notes)))
    parts: list[RenderableType] = [_cut(each) for each in _head(state)]
    if rows:
        objective = state.outlook.objective
        metrics = objective.metrics if objective else common_metrics(rows)
        parts += [Text(), trials_table(rows, metrics, width=width, styles=_STYLES)]
    if notes:
        parts += [Text(), *map(_note_of, notes)]
    return Group(*parts)


def line(state: ProgressState) -> str:
    """Return the progress as one line, for a log."""
    if state.outlook.is_training:
        return f"{state.outlook.experiment}: {'; '.join(_of_training(state))}"
    parts = [f"{_trial_counts(state)} after {format_duration(state.elapsed)}"]
    if state.running and (left := time_left(state)):
        parts.append(left)
    if state.lacking_count and state.outlook.objective is not None:
        parts.append(f"{state.lacking_count} without {', '.join(state.outlook.objective.metrics)} in the last report")
    if state.best is not None and state.outlook.objective is not None:
        name = named(state.best.trial, state.best.status)
        parts.append(f"{best_label(state.outlook.objective)}: trial {name}, {_compared(state, state.best)}")
    return f"{state.outlook.experiment}: {'; '.join(parts)}"


def _head(state: ProgressState) -> Iterator[Text]:
    yield _title(state)
    yield from (_labelled(name, text) for name, text in head_facts(state).items())


def head_facts(state: ProgressState) -> Mapping[str, str]:
    """Return the progress beside the table of trials: counts, rungs, the best trial, and below it its configuration.

    A single training has no table: its step, metrics, newest checkpoint and configuration.
    """
    if state.outlook.is_training:
        return _training_facts(state)
    facts = {"trials": _trial_counts(state)}
    if state.rungs:
        facts["rungs"] = _rungs(state)
    if state.best is not None and state.outlook.objective is not None:
        best = state.best
        of_another = ", of the checkpoint that it continues from" if best.inherits else ""
        said = f"trial {named(best.trial, best.status)}, {_compared(state, best)} at step {best.step}{of_another}"
        facts["best"] = f"{best_label(state.outlook.objective).removeprefix('best ')}: {said}"
        facts[""] = ", ".join(f"{name} {value}" for name, value in config_cells(best))
    return facts


def _training_facts(state: ProgressState) -> Mapping[str, str]:
    trial = next(iter((*state.running, *state.others)), None)
    if trial is None:
        return {"step": "none yet"}
    of_all = f" of {state.outlook.step_count}" if state.outlook.step_count else ""
    attempt = f", attempt {trial.attempt}" if trial.attempt > 1 else ""
    ended = "" if trial.status is Status.RUNNING else f", {trial.status}"
    newest = newest_checkpoint(trial)
    facts = {
        "step": f"{trial.step}{of_all}{attempt}{ended}",
        "metrics": ", ".join(f"{name} {format_value(value)}" for name, value in flat(trial.metrics).items()),
        "saved": f"step {newest.step}" if newest else "",
        "config": ", ".join(f"{name} {value}" for name, value in config_cells(trial)),
    }
    return {name: text for name, text in facts.items() if text}


def _of_training(state: ProgressState) -> Iterator[str]:
    facts = _training_facts(state)
    metrics = f", {facts['metrics']}" if "metrics" in facts else ""
    yield f"step {facts['step']}{metrics} after {format_duration(state.elapsed)}"
    if state.running:
        yield from filter(None, (_pace(state), time_left(state)))
    if "saved" in facts:
        yield f"saved: {facts['saved']}"


def _pace(state: ProgressState) -> str:
    unit = "steps/s" if state.outlook.is_training else "reports/s"
    return f"{state.reports_per_second:.3g} {unit}" if state.reports_per_second else ""


def time_left(state: ProgressState) -> str:
    """Return the estimate of the time left in words, or why the search ends early; empty if there is neither."""
    if state.ended_because:
        return f"ending: {first_line(state.ended_because)}"
    left = "" if state.left is None else format_duration(state.left)
    if not left or (state.may_take_longer and left == _NO_TIME):
        return ""
    return f"{'at least' if state.may_take_longer else 'about'} {left} left"


def _title(state: ProgressState) -> Text:
    title = Text.assemble((state.outlook.experiment, "bold"), f"  {format_duration(state.elapsed)}")
    if left := time_left(state):
        title.append(visible(f", {left}"))
    if pace := _pace(state):
        title.append(f"  {pace}", "dim")
    return title


def _trial_counts(state: ProgressState) -> str:
    counts = {str(status): state.counts[status] for status in Status if state.counts.get(status)}
    asked = state.outlook.trial_count
    if asked is None:
        return format_counts(counts)
    # An earlier run of the experiment may have passed a larger `num_samples`.
    return f"{format_counts(counts)} of {max(asked, sum(state.counts.values()))}"


def _rungs(state: ProgressState) -> str:
    """Return the number of trials that the scheduler has judged at each rung."""
    rungs = list(state.rungs.items())
    shown = rungs if len(rungs) <= _LONG_RUNGS else [*rungs[: _LONG_RUNGS // 2], *rungs[-_LONG_RUNGS // 2 :]]
    said_rungs = [f"{count} at step {step}" for step, count in shown]
    if len(shown) < len(rungs):
        said_rungs.insert(_LONG_RUNGS // 2, "…")
    return ", ".join(said_rungs)


def _compared(state: ProgressState, trial: Trial) -> str:
    metrics = state.outlook.objective.metrics if state.outlook.objective else ()
    return ", ".join(f"{name} {format_value(metric_in(trial.metrics, name))}" for name in metrics)


def chosen_trials(state: ProgressState, most: int) -> Sequence[Trial]:
    """Return the trials to show: running ones, with a third of the lines for the best of the others.

    None for a single training, which `head_facts` shows.
    """
    if state.outlook.is_training:
        return ()
    others = min(len(state.others), max(most // 3, most - len(state.running)))
    return [*state.running[: most - others], *state.others[:others]] if most > 0 else ()


def common_metrics(trials: Sequence[Trial]) -> Sequence[str]:
    """Return the metrics that the first trial with any has reported."""
    return next((tuple(each.metrics) for each in trials if each.metrics), ())


def _note_of(note: Note) -> Text:
    text = (visible(f"{note.trial} {note.text}"), "red" if note.is_bad else "")
    return _cut(Text.assemble((note.at.strftime("%H:%M:%S"), "dim"), "  ", text))


def _labelled(name: str, text: str) -> Text:
    return Text.assemble((f"{name:<8}", "dim"), visible(text))


def _cut(text: Text) -> Text:
    """Truncate instead of wrapping."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
