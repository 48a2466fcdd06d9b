"""Compose the report page of an experiment: its sections, their order, and their limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from shlex import quote

from prefect_tune.core.experiment.summary import named
from prefect_tune.core.experiment.trial import Status, status_label, wasted_words
from prefect_tune.core.shown_text import first_line, format_span, plural, shown_size
from prefect_tune.core.storage.layout import below
from prefect_tune.core.values import flat, metric_in
from prefect_tune.reporting.facts import Cost, Facts, Links, ReportInput, TrialFacts, facts_of
from prefect_tune.reporting.render import Block, Cell, Code, Figure, Heading, Link, Table, Text, Verbatim
from prefect_tune.reporting.timeline_charts import timeline
from prefect_tune.reporting.trial_charts import (
    SMALL_CURVES,
    learning_curves,
    parallel_coordinates,
)
from prefect_tune.terminal.cost_view import LEAST_SECONDS
from prefect_tune.terminal.formatting import (
    format_cell,
    format_counts,
    format_metrics,
)

_UNREMARKABLE = (Status.COMPLETED, Status.PRUNED)
"""Statuses that the headline leaves to the table below it."""
_COLUMNS = 5
_BUILT_IN = ("trial", "status", "step", "host", "attempts", "trained", "checkpoint")
_WIDEST = 24
_GAP = 2
_ROOM = 126
"""The width of a table, in characters, that needs no scroll bar in the HTML file."""
_SETTING = 1000
_TRACEBACK = 4000
_CONFIG = 40
_DOMAIN = 200
_NOT_SET: tuple[object, ...] = (None, "", [], {}, ())
_FIGURES = (
    ("Learning curves", learning_curves, "Orange: the best. Blue: the next ones, by name; paler: the others."),
    ("Parameters", parallel_coordinates, "A line is a trial. Orange: the best; blue: the best fifth."),
    (
        "Timeline",
        timeline,
        (
            "Above, in grey, which run owned the experiment; below, every attempt, by how it ended. "
            "✕: it was killed, lost or failed."
        ),
    ),
)
_LEGENDS_OF_A_FRONT: Mapping[Callable[[ReportInput], str | None], str] = {
    learning_curves: "Orange: the Pareto front. Blue: the others.",
    parallel_coordinates: "A line is a trial. Orange: the Pareto front.",
}


def page_of(report_input: ReportInput, links: Links) -> Sequence[Block]:
    """Return the page: at most about 300 KB, for any number of trials."""
    facts = facts_of(report_input, links)
    return [
        *_top(facts),
        *_best(facts),
        *_figures(report_input),
        *_trials(facts),
        *_errors(facts),
        *_end(facts),
    ]


def _top(facts: Facts) -> Iterator[Block]:
    yield Heading(facts.experiment, 1)
    yield Text([_headline(facts)], strong=True)
    by = ", ".join(f"{mode} {name}" for name, mode in zip(facts.metric, facts.mode, strict=True))
    run = facts.runs[-1] if facts.runs else None
    rows: list[tuple[str, Cell]] = [
        ("trials", format_counts(facts.trials_by_status)),
        ("compared by", by),
        ("target", Verbatim(below(facts.where, facts.experiment))),
        ("owner", _linked(f"{run.term}: {run.owner}", run.link) if run else ""),
        ("time", f"{_time(facts.began_at)} to {_time(facts.as_of)} UTC" if facts.began_at else ""),
        ("elapsed", format_span(facts.elapsed_seconds) + _in_runs(facts) if facts.began_at else ""),
        ("as of", facts.age),
        ("ended early", _clipped(first_line(facts.ended_because), 200)),
    ]
    yield Table((), [row for row in rows if row[1]])
    if not facts.is_whole:
        yield Text(["Curves, times and costs are of this run only; ", Verbatim("prefect-tune report"), " shows all."])


def _in_runs(facts: Facts) -> str:
    return f" in {facts.run_count} runs" if facts.run_count > 1 else ""


def _headline(facts: Facts) -> str:
    """Return one line with the best metric, the progress, and the errors."""
    parts = []
    if len(facts.best) == 1 and facts.metric:
        name, best = facts.metric[0], facts.best[0]
        value = format_cell(metric_in(best.metrics, name))
        parts.append(f"Best {name}: {value} (trial {_named(best)})")
    elif facts.best:
        parts.append(f"{len(facts.best)} trials on the Pareto front")
    if facts.kind == "training" and facts.trials:
        trial = facts.trials[0]
        parts.append(f"{trial.status} at step {trial.step:,}")
        if trial.reason:
            parts.append(first_line(trial.reason))
        return " · ".join(parts)
    expected = max(facts.expected_trial_count or 0, facts.trial_count)  # an earlier run may have asked for more
    parts.append(f"{facts.ended_count:,} of {expected:,} trials done")
    counts = facts.trials_by_status.items()
    parts += [f"{count:,} {name}" for name, count in counts if name not in _UNREMARKABLE]
    return " · ".join(parts)


def _best(facts: Facts) -> Iterator[Block]:
    if len(facts.best) == 1:
        best = facts.best[0]
    elif facts.kind == "training" and facts.trials:
        best = facts.trials[0]
    else:
        return
    yield Heading(f"Best trial: {_named(best)}" if facts.best else "The trial")
    rows: list[tuple[str, Cell]] = [
        ("status", status_label(best.status, best.step)),
        ("metrics", _clipped(format_metrics(best.metrics), 300)),
        ("step", f"{best.step:,}, {_effort(best)}"),
    ]
    if best.host:
        rows.append(("host", best.host))
    if best.run:
        rows.append(("run", Link("in the Prefect UI", best.run)))
    yield Table((), rows)
    config = [(name, value) for name, value in flat(best.config).items() if name not in facts.constants]
    if config:
        shown = [(name, _clipped(format_cell(value), 60)) for name, value in config[:_CONFIG]]
        yield Table(("parameter", "value"), shown)
    if facts.constants:
        constants = [f"{name} {_clipped(format_cell(value), 60)}" for name, value in facts.constants.items()]
        more = f" and {len(constants) - _CONFIG} more" if len(constants) > _CONFIG else ""
        yield Text([f"The same in every trial: {', '.join(constants[:_CONFIG])}{more}."])
    if best.checkpoint:
        at = f"Its newest checkpoint, of step {best.checkpoint_step or 0:,}"
        yield Text([f"{at}, and the command that downloads it:"])
        yield Code(f"{below(facts.where, best.checkpoint)}\n{_export(facts, best)}", "text")


def _effort(best: TrialFacts) -> str:
    attempts = plural(best.attempts, "attempt", "attempts")
    if best.trained_seconds is None:
        return f"in {attempts}"
    return f"after {format_span(best.trained_seconds)} of training in {attempts}"


def _named(best: TrialFacts) -> str:
    return named(best.trial, best.status)


def _export(facts: Facts, best: TrialFacts) -> str:
    which = f" --trial {best.trial}" if facts.kind == "search" else ""
    return f"prefect-tune export {quote(facts.where)} {facts.experiment} DIRECTORY{which}"


def _figures(report_input: ReportInput) -> Iterator[Block]:
    for title, draw, legend in _FIGURES:
        try:
            svg = draw(report_input)
        except Exception as error:  # noqa: BLE001  show the rest of the page, with the error
            yield Text([f"{title} could not be drawn: {_clipped(f'{type(error).__name__}: {error}', 200)}"])
            continue
        if svg is not None:
            yield Heading(title)
            if len(report_input.best) > 1:
                legend = _LEGENDS_OF_A_FRONT.get(draw, legend)  # noqa: PLW2901  no trial is the best
            said = _legend_of_curves(report_input, legend) if draw is learning_curves else legend
            yield Figure(svg, f"{title} of {report_input.experiment.name}", said)


def _legend_of_curves(report_input: ReportInput, legend: str) -> str:
    history = report_input.history
    said = [legend] if report_input.ranking else []
    if history.others and len(history.curves) > SMALL_CURVES:
        said.append(f"Small: the other metrics, of {SMALL_CURVES} trials.")
    if more := history.metric_count - len(history.metrics) - len(history.others):
        said.append(f"{plural(more, 'more metric is', 'more metrics are')} in the results.")
    return " ".join(said)


# ------------------------------------------------------------------------------------------------- the trials


def _trials(facts: Facts) -> Iterator[Block]:
    if facts.kind == "training":
        return
    yield Heading("Trials")
    yield from _without_repetition(_columns(facts))
    folders = below(facts.where, f"{facts.folder}/trials/TRIAL/checkpoints")
    more = facts.trial_count - len(facts.trials)
    also = f" The best {len(facts.trials)} are shown; {more} more are in the journal." if more else ""
    yield Text(["Checkpoints are stored at ", Verbatim(folders), f".{also}"])


def _columns(facts: Facts) -> Sequence[tuple[str, Sequence[Cell]]]:
    """Return the name and the cells of each column of the table of trials; there are parameters if they fit."""
    trials, on_front = facts.trials, {each.trial for each in facts.best}
    columns: list[tuple[str, Sequence[Cell]]] = [
        ("trial", [_linked(each.trial, each.run) for each in trials]),
        ("status", [status_label(each.status, each.step) for each in trials]),
        ("step", [f"{each.step:,}" for each in trials]),
    ]
    if len(facts.metric) > 1:
        columns.append(("Pareto front", ["yes" if each.trial in on_front else "no" for each in trials]))
    if any(each.host for each in trials):
        columns.append(("host", [_clipped(each.host or "") for each in trials]))
    for metric in facts.metric:
        name = f"metrics/{metric}" if metric in _BUILT_IN else metric
        columns.append((name, [_clipped(format_cell(metric_in(each.metrics, metric))) for each in trials]))
    place = len(columns)
    if any(each.attempts > 1 for each in trials):
        columns.append(("attempts", [f"{each.attempts:,}" for each in trials]))
    columns.append(("trained", [_span(each.trained_seconds) for each in trials]))
    saved = [each.checkpoint_step for each in trials]
    columns.append(("checkpoint", ["" if step is None else f"step {step:,}" for step in saved]))
    columns[place:place] = _parameters(facts, _ROOM - sum(map(_width, columns)))
    return columns


def _parameters(facts: Facts, room: int) -> Iterator[tuple[str, Sequence[Cell]]]:
    """Yield columns of parameters that differ, at most five, that are not wider than `room`; of one trial, of all."""
    configs = [flat(each.config) for each in facts.trials]
    names = dict.fromkeys(name for config in configs for name in config if name not in facts.constants)
    differ = [name for name in names if len({str(config.get(name)) for config in configs}) > 1 or len(configs) == 1]
    for parameter in differ[:_COLUMNS]:
        name = f"config/{parameter}" if parameter in {*_BUILT_IN, *facts.metric} else parameter
        column = name[-_WIDEST:], [_clipped(format_cell(config.get(parameter))) for config in configs]
        room -= _width(column)
        if room >= 0:
            yield column


def _width(column: tuple[str, Sequence[Cell]]) -> int:
    """Return the width of a column in characters; a name is broken at its spaces."""
    name, cells = column
    texts = (cell if isinstance(cell, str) else cell.text for cell in cells)
    return max((*map(len, name.split()), *map(len, texts)), default=0) + _GAP


def _without_repetition(columns: Iterable[tuple[str, Sequence[Cell]]]) -> Iterator[Block]:
    """Yield a table; what a column has in each row, but for the first column, is said once above it."""
    first, *others = columns
    is_repeated = [len(cells) > 1 and len(set(cells)) == 1 for _, cells in others]
    said = [(name, cells[0]) for (name, cells), is_same in zip(others, is_repeated, strict=True) if is_same]
    if parts := [part for name, cell in said if cell for part in (f", {name} ", cell)]:
        yield Text(["The same in every row: ", str(parts[0]).removeprefix(", "), *parts[1:], "."])
    shown = [first, *(each for each, is_same in zip(others, is_repeated, strict=True) if not is_same)]
    yield Table([name for name, _ in shown], list(zip(*(cells for _, cells in shown), strict=True)))


def _errors(facts: Facts) -> Iterator[Block]:
    if not facts.errors:
        return
    count = facts.trials_by_status.get(Status.ERRORED, 0)
    yield Heading(f"Errors ({count})")
    yield from _without_repetition(
        [
            ("trial", [_linked(each.trial, each.run) for each in facts.errors]),
            ("step", [f"{each.step:,}" for each in facts.errors]),
            ("reason", [_clipped(cause, 200) for cause in _causes(facts.errors)]),
        ]
    )
    if count > len(facts.errors):
        yield Text([f"And {count - len(facts.errors):,} more."])
    if "\n" in (reason := (first := facts.errors[0]).reason.strip()):
        yield Text([f"Trial {first.trial}:"])
        yield Code(reason[-_TRACEBACK:], language="text")


def _causes(errors: Sequence[TrialFacts]) -> Sequence[str]:
    """Return the errors in one line each; of several, one that an earlier trial has too is said once."""
    causes = [each.error for each in errors]
    if len(set(causes)) == 1:
        return causes
    first = {cause: each.trial for cause, each in reversed(list(zip(causes, errors, strict=True)))}
    return [
        cause if first[cause] == each.trial else f"the same error as trial {first[cause]}"
        for cause, each in zip(causes, errors, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------- the end


def _end(facts: Facts) -> Iterator[Block]:
    yield Heading("Cost")
    if facts.cost.sentence:
        yield Text([f"{facts.cost.sentence}."])
    yield Table((), _cost(facts))
    if len(facts.runs) > 1:
        yield Heading("Runs")
        yield from _without_repetition(_runs(facts))
    if facts.space:
        drawn = [(name, _clipped(domain, _DOMAIN)) for name, domain in facts.space.items()]
        yield Heading("Space")
        yield Table(("parameter", "drawn from"), drawn[:_CONFIG])
        if len(drawn) > _CONFIG:
            yield Text([f"And {len(drawn) - _CONFIG} more."])
    settings = {name: value for name, value in facts.settings.items() if name != "space" or not facts.space}
    if shown := [(name, _setting(value)) for name, value in settings.items() if value not in _NOT_SET]:
        yield Heading("Settings")
        yield Table((), shown)


def _setting(value: object) -> Cell:
    """Return a parameter of the run: what is nested as JSON."""
    if isinstance(value, Mapping | list | tuple):
        return Verbatim(_clipped(json.dumps(value, ensure_ascii=False), _SETTING))
    return _clipped(format_cell(value), _SETTING)


def _runs(facts: Facts) -> Iterator[tuple[str, Sequence[Cell]]]:
    """Yield the columns of a table of all runs, scheduled ones included: owner, times, and what each added."""
    runs = facts.runs
    yield "owner", [_linked(f"{each.term:,}", each.link) for each in runs]
    yield "run", [each.owner for each in runs]
    yield "began", [_time(each.began_at) for each in runs]
    yield "last entry", [_time(each.last_entry_at) for each in runs]
    yield "elapsed", [format_span(each.elapsed_seconds) for each in runs]
    if any(each.samples_asked for each in runs):
        yield (
            "samples requested",
            [f"+{each.samples_asked:,}" if each.samples_asked else "" for each in runs],
        )
    yield "trials added", [f"{each.trials_added:,}" for each in runs]
    yield "attempts", [f"{each.attempts:,}" for each in runs]


def _cost(facts: Facts) -> Sequence[tuple[str, Cell]]:
    cost = facts.cost
    ends = {"killed or lost": cost.attempts_lost, "failed": cost.attempts_failed}
    bad = "".join(f", {count:,} {how}" for how, count in ends.items() if count)
    attempts, trained = f"{plural(cost.attempts, 'attempt', 'attempts')}{bad}", cost.useful_seconds
    rows: list[tuple[str, Cell]] = [
        ("training", f"{attempts}; time not measured" if trained is None else f"{format_span(trained)} in {attempts}"),
        ("lost", _lost(cost)),
    ]
    size, sent, saved = map(shown_size, (cost.committed_bytes, cost.sent_bytes, cost.saved_bytes))
    if cost.checkpoints_committed:
        rows.append(("checkpoints", f"{cost.checkpoints_committed:,} committed, {size} in all"))
    if cost.measured_bytes:
        share = cost.saved_bytes / max(1, cost.saved_bytes + cost.sent_bytes)
        rows.append(("upload", f"{sent} sent in {format_span(cost.upload_seconds)}"))
        rows.append(("deduplication", f"{saved} not sent, {share:.0%}: they were on the target already"))
    return rows


def _lost(cost: Cost) -> str:
    """Return the training that was lost, and the steps of it that were trained again so far."""
    again = wasted_words(cost.wasted_steps, at_least=cost.wasted_at_least)
    if not again and cost.lost_seconds < LEAST_SECONDS:
        return f"no training {'is known to have been' if cost.wasted_at_least else 'was'} lost"
    none = "no step is known to have been" if cost.wasted_at_least else "no step was"
    seconds = f"{format_span(cost.lost_seconds)} after the last checkpoints; " if cost.lost_seconds else ""
    return f"{seconds}{again or none} trained again so far"


def _span(seconds: float | None) -> str:
    return "not measured" if seconds is None else format_span(seconds)


def _linked(text: str, address: str | None) -> Cell:
    return Link(text, address) if address else text


def _time(iso: str) -> str:
    return iso.replace("T", " ")[:19]


def _clipped(text: str, most: int = _WIDEST) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
