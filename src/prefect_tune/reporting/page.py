"""Make the report page of an experiment from its sections, and render the page as Markdown or as one HTML file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from shlex import quote
from typing import TypeAlias, assert_never

from prefect_tune.core.display_text import (
    first_line,
    format_elapsed,
    format_size,
    make_visible,
    make_visible_line,
    pluralize,
    shorten,
)
from prefect_tune.core.experiment.summary import (
    count_by_status,
    format_best_trial_name,
    format_recomputed_steps,
    format_status,
    settings_for_display,
)
from prefect_tune.core.experiment.trial_transitions import (
    ENDED_PHASES,
    Status,
    newest_checkpoint,
    newest_checkpoint_key,
)
from prefect_tune.core.page_elements import (
    Cell,
    Code,
    Figure,
    Heading,
    Link,
    PageElement,
    Table,
    Text,
    Verbatim,
    escape_html,
    make_data_uri,
    render_element,
)
from prefect_tune.core.reasons import format_error
from prefect_tune.core.storage.layout import join_uri
from prefect_tune.core.values import flatten, get_metric
from prefect_tune.reporting.facts import MAX_RUNS, MAX_TRIALS, ReportInput, Totals, compute_elapsed_seconds
from prefect_tune.reporting.svg import (
    MAX_SMALL_PANEL_CURVES,
    draw_learning_curves,
    draw_parallel_coordinates,
    draw_timeline,
)
from prefect_tune.terminal.formatting import MIN_SHOWN_SECONDS, format_cell, format_counts, format_metrics

# The page. The limits on rows, charts and texts keep the page below about 300 KB for any number of trials.

_GOOD_STATUSES = (Status.COMPLETED, Status.PRUNED)
"""The statuses that have no count of their own in the headline, since their trials are counted as done."""
_MAX_PARAMETER_COLUMNS = 5
_BUILT_IN_COLUMNS = ("trial", "status", "step", "host", "attempts", "trained", "checkpoint")
_MAX_CELL = 24
_COLUMN_GAP = 2
_MAX_TABLE_WIDTH = 126
"""The greatest width of a table, in characters, at which the HTML file needs no scroll bar."""
_MAX_SETTING_CHARACTERS = 1000
_MAX_TRACEBACK_CHARACTERS = 4000
_MAX_PARAMETERS = 40
_MAX_DOMAIN_CHARACTERS = 200
_UNSET_VALUES: tuple[object, ...] = (None, "", [], {}, ())
_TIMELINE_LEGEND = (
    "Above, in grey: the runs that owned the experiment. Below: all attempts, colored by how they ended. "
    "✕: the attempt was killed, lost or failed."
)
_FIGURES = (
    ("Learning curves", draw_learning_curves, "Orange: the best. Blue: the next best, with names. Pale: the others."),
    ("Parameters", draw_parallel_coordinates, "Each line is a trial. Orange: the best; blue: the best fifth."),
    ("Timeline", draw_timeline, _TIMELINE_LEGEND),
)
_PARETO_LEGENDS: Mapping[Callable[[ReportInput], str | None], str] = {
    draw_learning_curves: "Orange: the Pareto front. Blue: the others.",
    draw_parallel_coordinates: "Each line is a trial. Orange: the Pareto front.",
}
Column: TypeAlias = tuple[str, Sequence[Cell]]
"""The name and the cells of a column."""


def make_page(report: ReportInput) -> Sequence[PageElement]:
    """Return the elements of the report page."""
    results = (make_headline_section, make_best_trial_section, make_figures_section, make_trials_section)
    sections = (*results, make_errors_section, _make_cost_section, _make_runs_section, _make_settings_section)
    return [element for section in sections for element in section(report)]


def make_headline_section(report: ReportInput) -> Iterator[PageElement]:
    """Yield the title, a headline, and a table of facts."""
    yield Heading(report.experiment.name, 1)
    yield Text([_format_headline(report)], kind="strong")
    objective, periods = report.objective, [period for period, _ in report.runs]
    objectives = zip(objective.modes, objective.metrics, strict=True) if objective else ()
    rows: list[tuple[str, Cell]] = [
        ("trials", format_counts(count_by_status(report.experiment))),
        ("compared by", ", ".join(map(" ".join, objectives))),
        ("target", Verbatim(join_uri(report.uri, report.experiment.name))),
    ]
    if periods:
        owner = f"{periods[-1].term}: {periods[-1].owner}"
        runs = f" in {len(periods)} runs" if len(periods) > 1 else ""
        rows += [
            ("owner", _make_link_cell(owner, report.run_url(periods[-1].owner))),
            ("time", f"{periods[0].began_at:%Y-%m-%d %H:%M:%S} to {report.now:%Y-%m-%d %H:%M:%S} UTC"),
            ("elapsed", format_elapsed(report.elapsed_seconds) + runs),
        ]
    rows += [("as of", report.age), ("ended early", shorten(first_line(report.experiment.stop_reason), 200))]
    yield Table((), [row for row in rows if row[1]])
    if not report.snapshot.is_complete:
        yield Text(["Curves, times and costs cover only this run; ", Verbatim("prefect-tune report"), " covers all."])


def _format_headline(report: ReportInput) -> str:
    """Return one line with the best metric, the progress, and the counts of other statuses, such as errored."""
    parts = []
    if len(report.best_trials) == 1 and report.objective is not None:
        name, best = report.objective.metrics[0], report.best_trials[0]
        value = format_cell(get_metric(best.metrics, name))
        parts.append(f"Best {name}: {value} (trial {format_best_trial_name(best.id, best.status)})")
    elif report.best_trials:
        parts.append(f"{len(report.best_trials)} trials on the Pareto front")
    if not report.is_search and report.trials:
        trial = report.trials[0]
        parts.append(f"{trial.status} at step {trial.step:,}")
        if trial.reason:
            parts.append(first_line(trial.reason))
        return " · ".join(parts)
    expected = max(report.expected_trial_count or 0, len(report.trials))  # an earlier run may have proposed more trials
    # Without an expected number, count the proposed trials: the journal does not say how many will follow.
    kind = "trials" if report.expected_trial_count else "proposed trials"
    parts.append(f"{sum(trial.phase in ENDED_PHASES for trial in report.trials):,} of {expected:,} {kind} done")
    counts = count_by_status(report.experiment).items()
    parts += [f"{count:,} {name}" for name, count in counts if name not in _GOOD_STATUSES]
    return " · ".join(parts)


def make_best_trial_section(report: ReportInput) -> Iterator[PageElement]:
    """Yield the metrics, the configuration and the newest checkpoint of the best trial, or of the only trial."""
    if len(report.best_trials) != 1 and (report.is_search or not report.trials):
        return
    best = report.best_trials[0] if len(report.best_trials) == 1 else report.trials[0]
    yield Heading(f"Best trial: {format_best_trial_name(best.id, best.status)}" if report.best_trials else "The trial")
    attempts, trained = pluralize(best.attempt, "attempt", "attempts"), best.measured_seconds
    effort = f"in {attempts}" if trained is None else f"after {format_elapsed(trained)} of training in {attempts}"
    rows: list[tuple[str, Cell]] = [
        ("status", format_status(best.status, best.step)),
        ("metrics", shorten(format_metrics(best.metrics), 300)),
        ("step", f"{best.step:,}, {effort}"),
    ]
    if host := report.get_host(best):
        rows.append(("host", host))
    if link := report.get_run_url(best):
        rows.append(("run", Link("in the Prefect UI", link)))
    yield Table((), rows)
    config = [(name, value) for name, value in flatten(best.config).items() if name not in report.constants]
    if config:
        parameters = [(name, shorten(format_cell(value), 60)) for name, value in config[:_MAX_PARAMETERS]]
        yield Table(("parameter", "value"), parameters)
    if report.constants:
        constants = [f"{name} {shorten(format_cell(value), 60)}" for name, value in report.constants.items()]
        more = f" and {len(constants) - _MAX_PARAMETERS} more" if len(constants) > _MAX_PARAMETERS else ""
        yield Text([f"The same in every trial: {', '.join(constants[:_MAX_PARAMETERS])}{more}."])
    key = newest_checkpoint_key(report.experiment.key.trial_key(best.id), best)
    if key is not None:
        option = f" --trial {best.id}" if report.is_search else ""
        export = f"prefect-tune export {quote(report.uri)} {report.experiment.name} DIRECTORY{option}"
        yield Text([f"The newest checkpoint, of step {key.step:,}, and the command to download it:"])
        yield Code(f"{join_uri(report.uri, key.folder)}\n{export}", "text")


def make_figures_section(report: ReportInput) -> Iterator[PageElement]:
    """Yield the charts that have data, each with a heading; yield an error message for a chart that cannot be drawn."""
    for title, draw, usual_legend in _FIGURES:
        try:
            svg = draw(report)
        except Exception as error:  # noqa: BLE001  the page must show the error and all other sections
            yield Text([f"{title} could not be drawn: {shorten(f'{type(error).__name__}: {error}', 200)}"])
            continue
        if svg is None:
            continue
        legend = _PARETO_LEGENDS.get(draw, usual_legend) if len(report.best_trials) > 1 else usual_legend
        if draw is draw_learning_curves:
            history = report.snapshot
            parts = [legend] if report.ranking else []
            if history.other_metrics and len(history.curves) > MAX_SMALL_PANEL_CURVES:
                parts.append(f"Small charts: the other metrics of {MAX_SMALL_PANEL_CURVES} trials.")
            if more := history.metric_count - len(history.metrics) - len(history.other_metrics):
                parts.append(f"The results have {pluralize(more, 'more metric', 'more metrics')}.")
            legend = " ".join(parts)
        yield Heading(title)
        yield Figure(svg, f"{title} of {report.experiment.name}", legend)


def make_trials_section(report: ReportInput) -> Iterator[PageElement]:
    """Yield the table of a search's trials, the best first, and the location of their checkpoints."""
    if not report.is_search:
        return
    yield Heading("Trials")
    yield from _make_compact_table(_make_trial_columns(report))
    folders = join_uri(report.uri, f"{report.experiment.key.folder}/trials/TRIAL/checkpoints")
    more = len(report.trials) - MAX_TRIALS
    note = f" The best {MAX_TRIALS} are shown; {more} more are in the journal." if more > 0 else ""
    yield Text(["Checkpoints are stored at ", Verbatim(folders), f".{note}"])


def _make_trial_columns(report: ReportInput) -> Sequence[Column]:
    """Return the columns of the table of trials, with as many parameters as the width allows."""
    trials, metrics = report.first_trials, report.objective.metrics if report.objective else ()
    columns: list[Column] = [
        ("trial", [_make_link_cell(trial.id, report.get_run_url(trial)) for trial in trials]),
        ("status", [format_status(trial.status, trial.step) for trial in trials]),
        ("step", [f"{trial.step:,}" for trial in trials]),
    ]
    if len(metrics) > 1:
        on_front = {trial.id for trial in report.best_trials}
        columns.append(("Pareto front", ["yes" if trial.id in on_front else "no" for trial in trials]))
    hosts = [report.get_host(trial) for trial in trials]
    if any(hosts):
        columns.append(("host", [shorten(host or "", _MAX_CELL) for host in hosts]))
    for metric in metrics:
        name = f"metrics/{metric}" if metric in _BUILT_IN_COLUMNS else metric
        columns.append((name, [shorten(format_cell(get_metric(trial.metrics, metric)), _MAX_CELL) for trial in trials]))
    last: list[Column] = []
    if any(trial.attempt > 1 for trial in trials):
        last.append(("attempts", [f"{trial.attempt:,}" for trial in trials]))
    times, checkpoints = [trial.measured_seconds for trial in trials], [newest_checkpoint(trial) for trial in trials]
    last.append(("trained", ["not measured" if seconds is None else format_elapsed(seconds) for seconds in times]))
    last.append(("checkpoint", [f"step {checkpoint.step:,}" if checkpoint else "" for checkpoint in checkpoints]))
    # Show the first five parameters that differ between trials (for a single trial, the first five), if there is room.
    free_width = _MAX_TABLE_WIDTH - sum(map(_measure_column, (*columns, *last)))
    configs = [flatten(trial.config) for trial in trials]
    names = dict.fromkeys(name for config in configs for name in config if name not in report.constants)
    differing = [name for name in names if len({str(config.get(name)) for config in configs}) > 1 or len(configs) == 1]
    for parameter in differing[:_MAX_PARAMETER_COLUMNS]:
        name = f"config/{parameter}" if parameter in {*_BUILT_IN_COLUMNS, *metrics} else parameter
        column = name[-_MAX_CELL:], [shorten(format_cell(config.get(parameter)), _MAX_CELL) for config in configs]
        free_width -= _measure_column(column)
        if free_width >= 0:
            columns.append(column)
    return [*columns, *last]


def _measure_column(column: Column) -> int:
    """Return the width of a column with its gap, in characters; its name may wrap, so only the longest word counts."""
    name, cells = column
    texts = (cell if isinstance(cell, str) else cell.text for cell in cells)
    return max((*map(len, name.split()), *map(len, texts)), default=0) + _COLUMN_GAP


def _make_compact_table(columns: Iterable[Column]) -> Iterator[PageElement]:
    """Yield a table; with several rows, a column of equal cells (but not the first column) becomes a note above it."""
    first, *others = columns
    kept, parts = [first], list[Cell]()
    for name, cells in others:
        if len(cells) < 2 or len(set(cells)) > 1:
            kept.append((name, cells))
        elif cells[0]:
            parts += [f", {name} " if parts else f"{name} ", cells[0]]
    if parts:
        yield Text(["The same in every row: ", *parts, "."])
    yield Table([name for name, _ in kept], list(zip(*(cells for _, cells in kept), strict=True)))


def make_errors_section(report: ReportInput) -> Iterator[PageElement]:
    """Yield a table with a line for each error; a repeated error refers to the first trial with this error."""
    errors = report.errored_trials
    if not errors:
        return
    count = sum(trial.status is Status.ERRORED for trial in report.trials)
    causes = [format_error(trial.end_reason) for trial in errors]
    if len(set(causes)) > 1:
        first = {cause: trial.id for cause, trial in reversed(list(zip(causes, errors, strict=True)))}
        causes = [
            cause if first[cause] == trial.id else f"the same error as trial {first[cause]}"
            for cause, trial in zip(causes, errors, strict=True)
        ]
    yield Heading(f"Errors ({count})")
    yield from _make_compact_table(
        [
            ("trial", [_make_link_cell(trial.id, report.get_run_url(trial)) for trial in errors]),
            ("step", [f"{trial.step:,}" for trial in errors]),
            ("reason", [shorten(cause, 200) for cause in causes]),
        ]
    )
    if count > len(errors):
        yield Text([f"And {count - len(errors):,} more."])
    if "\n" in (reason := errors[0].reason.strip()):
        yield Text([f"Trial {errors[0].id}:"])
        yield Code(reason[-_MAX_TRACEBACK_CHARACTERS:], language="text")


def _make_cost_section(report: ReportInput) -> Iterator[PageElement]:
    yield Heading("Cost")
    if report.totals.sentence:
        yield Text([f"{report.totals.sentence}."])
    yield Table((), list(make_cost_rows(report.totals).items()))


def make_cost_rows(totals: Totals) -> Mapping[str, str]:
    """Return the rows of a table that shows what was trained, lost, stored and sent."""
    counts = {"killed or lost": totals.attempts_lost, "failed": totals.attempts_failed}
    failures = "".join(f", {count:,} {end}" for end, count in counts.items() if count)
    attempts, trained = f"{pluralize(totals.attempts, 'attempt', 'attempts')}{failures}", totals.useful_seconds
    recomputed = format_recomputed_steps(totals.recomputed_steps, at_least=totals.recomputed_is_lower_bound)
    if not recomputed and totals.lost_seconds < MIN_SHOWN_SECONDS:
        lost = f"no training {'is known to have been' if totals.recomputed_is_lower_bound else 'was'} lost"
    else:
        seconds = f"{format_elapsed(totals.lost_seconds)} after the last checkpoints; " if totals.lost_seconds else ""
        nothing = "no step is known to have been" if totals.recomputed_is_lower_bound else "no step was"
        lost = f"{seconds}{recomputed or nothing} trained again so far"
    training = f"{attempts}; time not measured" if trained is None else f"{format_elapsed(trained)} in {attempts}"
    rows = {"training": training, "lost": lost}
    size, sent, saved = map(format_size, (totals.committed_bytes, totals.sent_bytes, totals.saved_bytes))
    if totals.checkpoints_committed:
        rows["checkpoints"] = f"{totals.checkpoints_committed:,} committed, {size} in all"
    if totals.measured_bytes:
        share = totals.saved_bytes / max(1, totals.saved_bytes + totals.sent_bytes)
        rows["upload"] = f"{sent} sent in {format_elapsed(totals.upload_seconds)}"
        rows["deduplication"] = f"{saved} not sent, {share:.0%}: the target already had them"
    return rows


def _make_runs_section(report: ReportInput) -> Iterator[PageElement]:
    """Yield a table of the last runs: owners, times, and what each run added; yield nothing for a single run."""
    runs = report.runs[-MAX_RUNS:]
    if len(runs) < 2:
        return
    periods = [period for period, _ in runs]
    columns: list[Column] = [
        ("owner", [_make_link_cell(f"{period.term:,}", report.run_url(period.owner)) for period in periods]),
        ("run", [str(period.owner) for period in periods]),
        ("began", [f"{period.began_at:%Y-%m-%d %H:%M:%S}" for period in periods]),
        ("last entry", [f"{period.last_entry_at:%Y-%m-%d %H:%M:%S}" for period in periods]),
        ("elapsed", [format_elapsed(compute_elapsed_seconds(period)) for period in periods]),
        ("samples requested", [f"+{period.sample_count:,}" if period.sample_count else "" for period in periods]),
        ("trials added", [f"{period.trial_count:,}" for period in periods]),
        ("attempts", [f"{attempts:,}" for _, attempts in runs]),
    ]
    yield Heading("Runs")
    yield from _make_compact_table(column for column in columns if any(column[1]))


def _make_settings_section(report: ReportInput) -> Iterator[PageElement]:
    if report.space:
        domains = [(name, shorten(domain, _MAX_DOMAIN_CHARACTERS)) for name, domain in report.space.items()]
        yield Heading("Space")
        yield Table(("parameter", "drawn from"), domains[:_MAX_PARAMETERS])
        if len(domains) > _MAX_PARAMETERS:
            yield Text([f"And {len(domains) - _MAX_PARAMETERS} more."])
    rows: list[tuple[str, Cell]] = []
    for name, value in settings_for_display(report.experiment.settings).items():
        if value in _UNSET_VALUES or (name == "space" and report.space):
            continue
        if isinstance(value, Mapping | list | tuple):
            rows.append((name, Verbatim(shorten(json.dumps(value, ensure_ascii=False), _MAX_SETTING_CHARACTERS))))
        else:
            rows.append((name, shorten(format_cell(value), _MAX_SETTING_CHARACTERS)))
    if rows:
        yield Heading("Settings")
        yield Table((), rows)


def _make_link_cell(text: str, address: str | None) -> Cell:
    return Link(text, address) if address else text


# Render a page as Markdown with embedded pictures, for Prefect's UI, GitHub and editors.

_MARKUP = re.compile(r"([\\`*_\[\]<>|#~$!&])")
_MAX_UNBROKEN_CHARACTERS = 16


def render_markdown(elements: Sequence[PageElement], *, has_pictures: bool = True) -> str:
    """Return the page as Markdown, with pictures or only their descriptions. Names chosen by users are escaped."""
    return "\n".join(line for element in elements for line in _to_markdown(element, has_pictures=has_pictures)) + "\n"


def _to_markdown(element: PageElement, *, has_pictures: bool) -> Iterator[str]:
    match element:
        case Heading(text=text, level=level):
            yield f"{'#' * level} {escape_markdown(text)}"
        case Text(parts=parts, kind=kind):
            text = "".join(map(_render_cell, parts))
            yield f"**{text.strip()}**" if kind == "strong" else text
        case Figure(svg=svg):
            alt_text = escape_markdown(element.description)
            yield f"![{alt_text}]({make_data_uri(svg)})" if has_pictures else f"[{alt_text}: a picture, see --output]"
            if element.legend:
                yield from ("", f"*{escape_markdown(element.legend)}*")
        case Table():
            yield from _render_table(element)
        case Code(text=text, language=language):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            yield from (f"{fence}{language}", make_visible(text), fence)
        case never:
            assert_never(never)
    yield ""


def _render_table(table: Table) -> Iterator[str]:
    """Yield a Markdown table. Markdown requires a header, so the first row becomes the header if the table has none."""
    rows = [list(map(_render_cell, row)) for row in table.rows]
    if not rows:
        return
    if table.head:
        rows = [list(map(escape_markdown, table.head)), *(list(map(_avoid_breaks, row)) for row in rows)]
    else:
        rows = [[f"**{row[0]}**", *row[1:]] for row in rows]
    head, *body = rows
    yield from (f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def _avoid_breaks(cell: str) -> str:
    """Replace the spaces of a short cell by no-break spaces, so that it does not wrap in Prefect's narrow tables."""
    return cell.replace(" ", "\N{NO-BREAK SPACE}") if len(cell) <= _MAX_UNBROKEN_CHARACTERS else cell


def _render_cell(cell: Cell) -> str:
    match cell:
        case Link(text=text, address=address):
            quoted_address = make_visible_line(address).replace("(", "%28").replace(")", "%29").replace(" ", "%20")
            return f"[{escape_markdown(text)}]({quoted_address})"
        case Verbatim(text=text):
            line = make_visible_line(text)
            return escape_markdown(line) if "`" in line or "|" in line else f"`{line}`"
        case str():
            return escape_markdown(cell)


def escape_markdown(text: str) -> str:
    """Return `text` on one line, with markup characters escaped by a backslash."""
    return _MARKUP.sub(r"\\\1", make_visible_line(text))


# Render a page as one self-contained HTML file, in the light or dark mode of the browser.

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328;--soft:#59636e;--line:#d8dee4;--wash:#f6f8fa;--link:#0969da}
@media(prefers-color-scheme:dark){:root{--paper:#0e1116;--ink:#e6edf3;--soft:#9198a1;--line:#30363d;--wash:#161b22;
--link:#58a6ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1000px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:28px;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:18px;margin:36px 0 10px}
p{margin:8px 0}.strong{font-size:17px;font-weight:600}.legend{color:var(--soft);font-size:13px;margin:2px 0 0}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13.5px;margin:12px 0}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);white-space:nowrap;
font-variant-numeric:tabular-nums;vertical-align:top}
th{color:var(--soft);font-weight:600;white-space:normal}table.facts td{white-space:normal;overflow-wrap:anywhere}
table.facts td:first-child{color:var(--soft);white-space:nowrap}
code,pre{font:12.5px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,monospace}pre{background:var(--wash);padding:12px 14px;
border-radius:6px;overflow-x:auto}a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}
img{max-width:100%;height:auto;display:block}
"""


def render_html(elements: Sequence[PageElement]) -> str:
    """Return the page as HTML. Names chosen by users are escaped."""
    title = next((element.text for element in elements if isinstance(element, Heading)), "")
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape_html(title)}</title><style>{_STYLE}</style></head><body><main>\n"
    )
    body = "\n".join(line for element in elements for line in render_element(element))
    return f"{head}{body}\n</main></body></html>\n"
