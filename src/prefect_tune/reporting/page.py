"""Compose the report page of an experiment: its sections, their order, and their limits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from shlex import quote

from prefect_tune.core.experiment.summary import named
from prefect_tune.core.models import first_line, flat, metric_in, plural, shown_size
from prefect_tune.core.storage.layout import below
from prefect_tune.reporting.axes import format_number
from prefect_tune.reporting.elements import Block, Cell, Code, Details, Figure, Heading, Link, Table, Text, Verbatim
from prefect_tune.reporting.facts import Facts, Links, TrialFacts, facts_of
from prefect_tune.reporting.report_input import ReportInput
from prefect_tune.reporting.timeline_charts import lineage_chart, timeline
from prefect_tune.reporting.trial_charts import (
    front_chart,
    importance_chart,
    learning_curves,
    parallel_coordinates,
    rung_chart,
)
from prefect_tune.terminal.formatting import format_counts, format_duration, format_value

_SIGN = {"pending": "⏳", "running": "🏃", "paused": "⏸️", "finished": "✅", "errored": "❌"}
_COLUMNS = 5
_WIDEST = 24
_SETTINGS = 6000
_CONFIG = 40
_FIGURES = (
    ("Pareto front", front_chart, "Orange: no other trial beats it in one metric without being beaten in another."),
    ("Learning curves", learning_curves, "Orange: the best. Blue: the next ones, by name; paler: the others."),
    ("Parameters", parallel_coordinates, "A line is a trial. Orange: the best; blue: the best fifth."),
    (
        "What matters",
        importance_chart,
        "The share of the differences between trials that goes with one parameter alone (ε² of the ranks).",
    ),
    ("Rungs", rung_chart, "Trials at each step at which the scheduler compared them. Orange: those that continued."),
    (
        "Lineage",
        lineage_chart,
        "Each member in the color of the member whose weights it trains. Red: it continued from a copy of another's.",
    ),
    (
        "Timeline",
        timeline,
        (
            "Above, in grey, who ran the experiment; below, every attempt. Green: finished; amber: told to stop; "
            "blue: paused, lost, or it still runs; a red ✕: killed, lost or failed."
        ),
    ),
)


def page_of(report_input: ReportInput, links: Links) -> Sequence[Block]:
    """Return the page: at most about 300 KB, for any number of trials."""
    facts = facts_of(report_input, links)
    return [*_top(facts), *_best(facts), *_figures(report_input), *_trials(facts), *_errors(facts), *_end(facts)]


def _top(facts: Facts) -> Iterator[Block]:
    yield Heading(facts.experiment, 1)
    yield Text([_headline(facts)], strong=True)
    by = ", ".join(f"{mode} {name}" for name, mode in zip(facts.metric, facts.mode, strict=True))
    run = facts.runs[-1] if facts.runs else None
    rows: list[tuple[str, Cell]] = [
        ("trials", format_counts(facts.trials_by_status)),
        ("compared by", by),
        ("target", Verbatim(below(facts.where, facts.experiment))),
        ("owner", _linked(f"{run.owner}, run {run.epoch}", run.link) if run else ""),
        ("time", f"{_time(facts.began_at)} to {_time(facts.told_at)} UTC" if facts.began_at else ""),
        ("as of", facts.age),
        ("ended early", _clipped(first_line(facts.ended_because), 200)),
    ]
    yield Table((), [row for row in rows if row[1]])
    if not facts.is_whole:
        yield Text(["Curves, times and costs are of this run only; ", Verbatim("prefect-tune report"), " shows all."])


def _headline(facts: Facts) -> str:
    """Return one line with the best metric, the progress, and the errors."""
    parts = []
    if len(facts.best) == 1 and facts.metric:
        name = facts.metric[0]
        parts.append(
            f"Best {name}: {format_value(metric_in(facts.best[0].metrics, name))} (trial {_named(facts.best[0])})"
        )
    elif facts.best:
        parts.append(f"{len(facts.best)} trials on the Pareto front")
    if facts.kind == "training" and facts.trials:
        trial = facts.trials[0]
        parts.append(f"{_SIGN[trial.status]} {trial.status} at step {trial.step}")
        if trial.reason:
            parts.append(first_line(trial.reason))
        return " · ".join(parts)
    of = f" of {facts.expected_trial_count}" if facts.expected_trial_count else ""
    parts.append(f"{facts.ended_count}{of or f' of {facts.trial_count}'} trials done")
    parts += [f"{_SIGN[name]} {count} {name}" for name, count in facts.trials_by_status.items() if name != "finished"]
    return " · ".join(parts)


def _best(facts: Facts) -> Iterator[Block]:
    if len(facts.best) == 1:
        best = facts.best[0]
    elif facts.kind == "training" and facts.trials:
        best = facts.trials[0]
    else:
        return
    yield Heading(f"Best: trial {_named(best)}" if facts.best else "The trial")
    rows: list[tuple[str, Cell]] = [
        ("metrics", _clipped(format_value(best.metrics), 300)),
        ("step", f"{best.step}, after {_span(best.trained_seconds)} of training, attempts: {best.attempts}"),
    ]
    if best.host:
        rows.append(("host", best.host))
    if best.run:
        rows.append(("run", Link("in the Prefect UI", best.run)))
    yield Table((), rows)
    if config := list(flat(best.config).items()):
        shown = [(name, _clipped(_value(value), 60)) for name, value in config[:_CONFIG]]
        yield Table(("parameter", "value"), shown)
    if best.checkpoint:
        yield Text(["Its newest checkpoint, and the command that downloads it:"])
        yield Code(f"{below(facts.where, best.checkpoint)}\n{_export(facts, best)}", "text")


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
            is_clear = draw is learning_curves and report_input.objective is None
            yield Figure(svg, f"{title} of {report_input.experiment.name}", "" if is_clear else legend)


# ------------------------------------------------------------------------------------------------- the trials


def _trials(facts: Facts) -> Iterator[Block]:
    if facts.kind == "training":
        return
    columns = [*_columns(facts)]
    yield Heading("Trials")
    yield Table([name for name, _ in columns], list(zip(*(cells for _, cells in columns), strict=True)))
    folders = below(facts.where, f"{facts.experiment}/trials/TRIAL/checkpoints")
    more = facts.trial_count - len(facts.trials)
    also = f" The best {len(facts.trials)} are shown; {more} more are in the journal." if more else ""
    yield Text(["Checkpoints are stored at ", Verbatim(folders), f".{also}"])


def _columns(facts: Facts) -> Iterator[tuple[str, Sequence[Cell]]]:
    """Yield the name and the cells of each column of the table of trials."""
    trials = facts.trials
    yield "trial", [_linked(each.trial, each.run) for each in trials]
    yield "status", [f"{_SIGN[each.status]} {each.status}" for each in trials]
    yield "step", [str(each.step) for each in trials]
    if any(each.host for each in trials):
        yield "host", [_clipped(each.host or "") for each in trials]
    for metric in facts.metric:
        yield metric, [_clipped(_value(metric_in(each.metrics, metric))) for each in trials]
    configs = [flat(each.config) for each in trials]
    for parameter in _differing(facts, configs):
        yield parameter, [_clipped(_value(config.get(parameter))) for config in configs]
    if any(each.attempts > 1 for each in trials):
        yield "attempts", [str(each.attempts) for each in trials]
    yield "trained", [_span(each.trained_seconds) for each in trials]
    names = [each.checkpoint.rpartition("/")[2] if each.checkpoint else "" for each in trials]
    yield "checkpoint", [Verbatim(name) if name else "" for name in names]


def _differing(facts: Facts, configs: Sequence[Mapping[str, object]]) -> Sequence[str]:
    """Return the parameters that differ, the most important first."""
    names = dict.fromkeys([*facts.importance, *(name for config in configs for name in config)])
    differ = [name for name in names if len({str(config.get(name)) for config in configs}) > 1 or len(configs) == 1]
    return differ[:_COLUMNS]


def _errors(facts: Facts) -> Iterator[Block]:
    if not facts.errors:
        return
    count = facts.trials_by_status.get("errored", 0)
    yield Heading(f"Errors ({count})")
    rows = [
        (_linked(each.trial, each.run), str(each.step), _clipped(first_line(each.reason), 200)) for each in facts.errors
    ]
    yield Table(("trial", "step", "because"), rows)
    if count > len(rows):
        yield Text([f"And {count - len(rows)} more."])


# ---------------------------------------------------------------------------------------------------- the end


def _end(facts: Facts) -> Iterator[Block]:
    yield Heading("Cost")
    yield Table((), _cost(facts))
    if len(facts.runs) > 1:
        yield Heading("Runs")
        yield _runs(facts)
    if facts.settings:
        settings = json.dumps(dict(facts.settings), indent=2, ensure_ascii=False)
        yield Details("What was asked for", [Code(_clipped(settings, _SETTINGS))])


def _runs(facts: Facts) -> Table:
    """Return a table of all runs, scheduled ones included: owner, times, and what each added."""
    is_extended = any(each.samples_asked for each in facts.runs)
    rows: list[Sequence[Cell]] = [
        (
            _linked(str(each.epoch), each.link),
            each.owner,
            _time(each.began_at),
            _time(each.last_heard_at),
            *[f"+{each.samples_asked}" if each.samples_asked else ""] * is_extended,
            str(each.trials_added),
            str(each.attempts),
        )
        for each in facts.runs
    ]
    samples = ["samples asked for"] * is_extended
    return Table(("run", "owner", "began", "last entry", *samples, "trials added", "attempts"), rows)


def _cost(facts: Facts) -> Sequence[tuple[str, Cell]]:
    cost = facts.cost
    ends = {"killed or lost": cost.attempts_lost, "failed": cost.attempts_failed}
    bad = "".join(f", {count} {how}" for how, count in ends.items() if count)
    steps = f"{plural(cost.wasted_steps, 'step', 'steps')} done again, about {_span(cost.wasted_seconds)}"
    rows: list[tuple[str, Cell]] = [
        ("training", f"{_span(cost.trained_seconds)} in {plural(cost.attempts, 'attempt', 'attempts')}{bad}"),
        ("wasted", steps if cost.wasted_steps else "nothing: no step was done again"),
    ]
    size, sent, saved = map(shown_size, (cost.committed_bytes, cost.sent_bytes, cost.saved_bytes))
    if cost.checkpoints_committed:
        rows.append(("checkpoints", f"{cost.checkpoints_committed} committed, {size} in all"))
    if cost.measured_bytes:
        share = cost.saved_bytes / max(1, cost.saved_bytes + cost.sent_bytes)
        rows.append(("upload", f"{sent} sent in {_span(cost.upload_seconds)}"))
        rows.append(("deduplication", f"{saved} not sent, {share:.0%}: they were on the target already"))
    return rows


def _linked(text: str, address: str | None) -> Cell:
    return Link(text, address) if address else text


def _span(seconds: float) -> str:
    return format_duration(timedelta(seconds=seconds)) if seconds >= 10 else f"{seconds:.2g} s"


def _time(iso: str) -> str:
    return iso.replace("T", " ")[:19]


def _value(value: object) -> str:
    return format_number(value) if isinstance(value, float) else format_value(value)


def _clipped(text: str, most: int = _WIDEST) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
