"""The commands of the panel *Inspect*: `ls`, `show`, `logs`, `report` and `audit`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from prefect_tune.cli.app import (
    DAMAGED_JOURNAL_ADVICE,
    AsJson,
    ExperimentName,
    Target,
    TrialName,
    add_working_directory_to_path,
    command,
    exit_without_verdict,
    load_view,
    open_existing_store,
    open_store_and_load_experiment,
    option_without_default,
    read_last_entry_time,
    resolve_existing_target,
    select_trials,
)
from prefect_tune.core.display_text import first_line, format_size, make_visible
from prefect_tune.core.errors import InvalidInput, JournalCorrupt, Superseded, TuneError, UnknownVersion
from prefect_tune.core.experiment.cost import AttemptCost, compute_cost, format_cost
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import (
    count_by_status,
    find_best_trial,
    format_best_trial_name,
    get_experiment_kind,
    list_exploits,
    may_have_several_trials,
    objective_from_settings,
    settings_for_display,
    sort_trials,
)
from prefect_tune.core.experiment.trial_transitions import Phase, Status, Trial
from prefect_tune.core.journal.journal import load_experiment, read_entries
from prefect_tune.core.journal_events import AttemptEnded, AttemptStarted, TrialFinished, TrialPaused
from prefect_tune.core.messages.target_messages import ExperimentView, RunningAttempt, read_view
from prefect_tune.core.search_view import SearchView
from prefect_tune.core.storage.generations import find_current_journal, find_experiment_names
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import get_metric, parse_time
from prefect_tune.reporting.facts import make_report_input, report_to_json, select_curve_trials, trial_to_json
from prefect_tune.reporting.page import make_page, render_html, render_markdown
from prefect_tune.terminal.formatting import (
    UNKNOWN_FRESHNESS,
    Freshness,
    append_last_output,
    attempt_cost_to_json,
    compute_freshness,
    cost_to_json,
    format_age,
    format_counts,
    format_steps,
    format_trial_names,
    format_value,
    group_trials_by_error,
    make_attempts_table,
    make_borderless_table,
    make_cost_table,
    make_facts_table,
    print_to_stdout,
    to_plain_cells,
)
from prefect_tune.terminal.progress_view import make_trials_table


@command
def ls(target: Target, as_json: AsJson = False) -> None:
    """List the experiments on TARGET: their trials, the best trial, and the time and age of the data."""
    with open_existing_store(target) as store:
        rows = list(_read_experiment_rows(store, find_experiment_names(listed.path for listed in store.list(""))))
    if as_json:
        print(json.dumps([{**asdict(row), **fresh.to_json()} for row, fresh in rows], indent=2))
    elif rows:
        table = make_borderless_table("experiment", "kind", "trials", "best", "as of (UTC)")
        for row, fresh in rows:
            best = ""
            if row.best:
                best = f"{format_value(row.best)} ({format_best_trial_name(str(row.best_trial), str(row.best_status))})"
            cells = (row.experiment, row.kind, row.damage or format_counts(row.trials), best, fresh.format_short())
            table.add_row(*to_plain_cells(cells), style="red" if row.damage else "dim" if fresh.is_stale else "")
        print_to_stdout(table)
        if stale := [row.experiment for row, fresh in rows if fresh.is_stale]:
            print_to_stdout("", f"no updates for a while, so the process has probably ended: {', '.join(stale)}")
    else:
        print(f"{target}: no experiments")


@dataclass(frozen=True)
class _ExperimentRow:
    """The row of an experiment in the output of `ls`."""

    experiment: str
    kind: str
    trials: Mapping[str, int] = field(default_factory=dict)
    best: Mapping[str, object] | None = None
    best_trial: str | None = None
    best_status: str | None = None
    written_at: str = ""
    """The time of the last journal entry."""
    damage: str | None = None


def _read_experiment_rows(store: ObjectStore, names: Sequence[str]) -> Iterator[tuple[_ExperimentRow, Freshness]]:
    """For each experiment, yield its row and the freshness of the row's data."""
    for name in names:
        try:
            loaded = load_experiment(store, find_current_journal(store, name))
            last_write = read_last_entry_time(store, loaded)
            view = read_view(store, loaded, last_write)
            state, best = view.experiment, find_best_trial(view.experiment)
            objective = objective_from_settings(state.settings)
        except (JournalCorrupt, UnknownVersion) as error:
            kind = "damaged" if isinstance(error, JournalCorrupt) else "not read"
            yield _ExperimentRow(name, kind, damage=str(error)), UNKNOWN_FRESHNESS
            continue
        except Superseded:
            continue  # the experiment was deleted after the listing
        metrics = objective.metrics if objective else ()
        row = _ExperimentRow(
            state.name,
            get_experiment_kind(state),
            trials=count_by_status(state),
            best={name: get_metric(best.metrics, name) for name in metrics} if best else None,
            best_trial=best.id if best else None,
            best_status=str(best.status) if best else None,
            written_at=last_write,
        )
        yield row, compute_freshness(view, datetime.now(UTC))


_MAX_TRIALS = 50
_MAX_ERRORS = 5
_MAX_VERIFIED_ENTRIES = 200  # a longer journal is not checked: each entry takes one request
_TIME_FIELDS = ("attempt_began_at", "reported_at")


@command
def show(target: Target, experiment: ExperimentName, trial: TrialName = None, as_json: AsJson = False) -> None:
    """Show the status of an experiment: its trials, the best trial first; or all details of one trial."""
    with open_store_and_load_experiment(target, experiment) as (store, state):
        if state.entry_count <= _MAX_VERIFIED_ENTRIES:  # loading skips the entries before a snapshot: check them, too
            try:
                read_entries(store, state.key)
            except JournalCorrupt as error:
                print(f"warning: {make_visible(str(error))}; {DAMAGED_JOURNAL_ADVICE}", file=sys.stderr)
        view = load_view(store, state)
        if may_have_several_trials(state) and trial is None:
            show_search(view, as_json=as_json, resume_with=shlex.join(["prefect-tune", "resume", target, experiment]))
            return
        selected = next(iter(select_trials(state, trial)), None)
        extra: dict[str, object] = {}
        if selected is not None and selected.last_clone_sequence is not None and trial is not None:
            exploits = list_exploits(read_entries(store, state.key), selected.id)
            extra["exploited"] = [asdict(exploit) for exploit in exploits]
        if selected is not None and selected.phase in (Phase.PENDING, Phase.ERRORED):  # its last attempt failed
            output = _read_attempt_outputs(store, state, selected).get(selected.attempt)
            extra["last_output"] = output.last_output if output is not None else ""
    state, now = view.experiment, datetime.now(UTC)
    fresh, cost = compute_freshness(view, now), compute_cost(state, parse_time(view.cost_cutoff) or now)
    selected = next(iter(select_trials(state, trial)), None)
    attempts = cost.group_attempts_by_trial().get(selected.id, ()) if selected is not None else ()
    facts = _collect_trial_facts(view, selected, attempts) if selected is not None else {}
    facts |= {name: value for name, value in extra.items() if value}
    if as_json:
        header = {"experiment": state.name, "term": state.term, "owner": str(state.owner or "")}
        print(json.dumps({**header, **fresh.to_json(), **facts}, indent=2))
        return
    head = {"experiment": state.name, "owner": _format_owner(state), "as of": fresh.describe()}
    print_to_stdout(make_facts_table({**head, **_format_trial_facts(facts, selected, now)}))
    if attempts:
        print_to_stdout("", make_attempts_table(attempts))
    reason = append_last_output(selected.reason, str(facts.get("last_output", ""))) if selected is not None else ""
    if "\n" in reason:
        print(f"\n{reason}")  # not wrapped, so that users can copy lines of code


@command
def logs(
    target: Target,
    experiment: ExperimentName,
    trial: Annotated[str | None, typer.Argument(metavar="[TRIAL]", help="A trial of a search, such as 3.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the last lines of output of each attempt of a trial, and how the attempt ended."""
    with open_store_and_load_experiment(target, experiment) as (store, state):
        trials = select_trials(state, trial)
        if len(trials) != 1:
            raise InvalidInput(f"experiment {state.name!r} has {len(trials)} trials: name one trial")
        outputs = _read_attempt_outputs(store, state, trials[0])
    if as_json:
        print(json.dumps([asdict(output) for output in outputs.values()], indent=2))
        return
    for attempt, output in outputs.items():
        if output.reason is None:
            print(f"attempt {attempt} has no end in the journal yet; its output so far is in the log of its task run")
        else:
            print(f"attempt {attempt}: {append_last_output(output.reason, output.last_output or '(none is stored)')}")
    if not outputs:
        print(f"trial {trials[0].id} has not begun")


def show_search(view: ExperimentView, *, as_json: bool, resume_with: str = "") -> None:
    """Print the trials of a search, the best trial first; as JSON, also the settings of the search.

    If the search's process has probably ended, also print `resume_with`, the command that resumes the search.
    """
    state, now = view.experiment, datetime.now(UTC)
    fresh, cost = compute_freshness(view, now), compute_cost(state, parse_time(view.cost_cutoff) or now)
    objective = objective_from_settings(state.settings)
    trials = sort_trials(list(state.trials.values()), objective)
    if as_json:
        attempts = cost.group_attempts_by_trial()
        shown = {
            "experiment": state.name,
            "metric": list(objective.metrics) if objective else None,
            "mode": list(objective.modes) if objective else None,
            "trials_by_status": count_by_status(state),
            "term": state.term,
            "owner": str(state.owner or ""),
            **fresh.to_json(),
            "settings": settings_for_display(state.settings),
            "cost": cost_to_json(cost),
            "trials": [_collect_trial_facts(view, trial, attempts.get(trial.id, ())) for trial in trials],
        }
        print(json.dumps(shown, indent=2))
        return
    head = {"experiment": state.name}
    if objective is not None:
        by = zip(objective.modes, objective.metrics, strict=True)
        head["by"] = f"{', '.join(map(' '.join, by))} of the last report, the best first"
    head |= {"trials": format_counts(count_by_status(state)), "owner": _format_owner(state), "as of": fresh.describe()}
    if resume_with and fresh.is_stale:
        head["resume with"] = resume_with
    shown_trials = trials[:_MAX_TRIALS]
    running = [view.get_running_attempt(trial.id) for trial in shown_trials]
    extra = {}
    if any(running):
        extra["host"] = [(attempt.host or "") if attempt else "" for attempt in running]
        extra["last report"] = [format_last_report_age(attempt, now) if attempt else "" for attempt in running]
    styles = {Status.RUNNING: "dim"} if fresh.is_stale else {}
    table, hidden = make_trials_table(shown_trials, objective.metrics if objective else (), extra, styles=styles)
    print_to_stdout(make_facts_table(head), "", table)
    if hidden:
        print_to_stdout(hidden)
    if len(trials) > _MAX_TRIALS:
        print_to_stdout(f"and {len(trials) - _MAX_TRIALS} more; --json prints all")
    if sentence := format_cost(cost):
        print_to_stdout("", make_facts_table({"cost": sentence}), "", make_cost_table(cost))
    errored = sorted((trial for trial in trials if trial.status is Status.ERRORED), key=lambda trial: trial.id)
    if causes := group_trials_by_error(errored):
        table = make_borderless_table("errored", "reason")
        for cause, alike in causes[:_MAX_ERRORS]:
            table.add_row(*to_plain_cells((format_trial_names(alike), cause)))
        print_to_stdout("", table)
        if len(causes) > _MAX_ERRORS:
            print_to_stdout(f"and {len(causes) - _MAX_ERRORS} more errors; --json prints all")
        if _has_traceback(first := causes[0][1][0]):
            print_to_stdout(f"--trial {first.id} prints its traceback")


def _format_trial_facts(facts: Mapping[str, Any], trial: Trial | None, now: datetime) -> Mapping[str, object]:
    """Return a trial's facts as `show` prints them: times as ages, steps as ranges, and no empty facts.

    A reason with a traceback is shortened to its first line, because `show` prints the whole reason below the table.
    """
    if trial is None:
        return {}
    shown = {name: format_age(str(at), now) for name in _TIME_FIELDS if (at := facts.get(name))}
    if trial.checkpoints:
        size_bytes = sum(checkpoint.size_bytes for checkpoint in trial.checkpoints)
        in_all = f", {format_size(size_bytes)} in all" if size_bytes else ""
        shown["checkpoints"] = format_steps([checkpoint.step for checkpoint in trial.checkpoints]) + in_all
    if _has_traceback(trial):
        shown["reason"] = first_line(trial.reason)
    exploits = []
    for exploit in facts.get("exploited", ()):
        changed = exploit["changed"].items()
        changes = [f"{name} {format_value(old)} → {format_value(new)}" for name, (old, new) in changed]
        from_step = f"step {exploit['step']} of trial {exploit['source']}"
        exploits.append(f"{from_step}: {', '.join(changes)}" if changes else from_step)
    readable = {**facts, **shown, "recomputed_steps": trial.recomputed_steps_text, "exploited": "\n".join(exploits)}
    hidden = ("recomputed_is_lower_bound", "cost", "last_output")
    return {name: value for name, value in readable.items() if facts.get(name) not in (None, "") and name not in hidden}


@dataclass(frozen=True)
class _AttemptOutput:
    attempt: int
    reason: str | None = None  # how the attempt ended; None if it has not ended
    last_output: str = ""


def _read_attempt_outputs(store: ObjectStore, state: Experiment, trial: Trial) -> Mapping[int, _AttemptOutput]:
    """Return the last output of each attempt of a trial, by the attempt's number."""
    outputs: dict[int, _AttemptOutput] = {}
    name, number = trial.id, trial.attempt
    for event in (event for entry in read_entries(store, state.key) for event in entry.events):
        match event:
            case AttemptStarted(trial=trial.id, attempt=number):
                outputs[number] = _AttemptOutput(number)
            case AttemptEnded(reason=reason) | TrialFinished(reason=reason) | TrialPaused(reason=reason) if (
                event.trial == name
            ):
                if number not in outputs or outputs[number].reason is None:  # the attempt may end before its trial does
                    outputs[number] = _AttemptOutput(number, str(reason), event.usage.output if event.usage else "")
    return outputs


def _has_traceback(trial: Trial) -> bool:
    return "\n" in trial.reason.strip()


def format_last_report_age(attempt: RunningAttempt, now: datetime) -> str:
    """Return how long ago a running attempt reported; if no report is known, how long ago the attempt began."""
    began_ago = f"; began {format_age(attempt.began_at, now)}" if attempt.began_at else ""
    return format_age(attempt.reported_at, now) or f"none known{began_ago}"


def _format_owner(state: Experiment) -> str:
    return f"{state.term}: {state.owner}" if state.owner else ""


def _collect_trial_facts(view: ExperimentView, trial: Trial, attempts: Sequence[AttemptCost]) -> dict[str, Any]:
    attempt, fields = view.get_running_attempt(trial.id), trial_to_json(trial)
    config = fields.pop("config")
    return {
        **fields,
        "checkpoints": [checkpoint.step for checkpoint in trial.checkpoints],
        "quarantined": len(trial.quarantined_sequences),
        "host": attempt.host if attempt else None,
        "attempt_began_at": attempt.began_at if attempt else None,
        "reported_at": attempt.reported_at if attempt else None,
        "config": config,
        "cost": [attempt_cost_to_json(cost) for cost in attempts],
    }


_OUTPUT_HELP = "A .html or .md file, with pictures. Default: Markdown without pictures, to stdout."


@command
def report(
    target: Target,
    experiment: ExperimentName,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help=_OUTPUT_HELP, show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the report that the Prefect UI shows: the best trial, charts, all trials, errors, cost.

    An .html file is self-contained, and follows the light or dark mode of the browser.
    """
    ending = output.suffix.lower() if output is not None else ""
    if output is not None and (as_json or ending not in {".html", ".md"}):
        raise InvalidInput(f"--output {output}: expected a file ending in .html or .md; --json prints to stdout")
    from prefect_tune.monitoring.live_report import make_run_url

    with open_store_and_load_experiment(target, experiment) as (store, loaded):
        view, entries = load_view(store, loaded), read_entries(store, loaded.key)
    state, fresh = view.experiment, compute_freshness(view, datetime.now(UTC))
    now = fresh.as_of or datetime.now(UTC)
    search = SearchView(state)
    for entry in entries:
        if entry.number <= state.entry_count:
            search.apply_entry(entry)
    for name in state.trials:
        if (attempt := view.get_running_attempt(name)) and attempt.report:
            search.apply_report(name, attempt.report, now)
    age = fresh.describe("before this page was made") if fresh.is_running else ""
    uri = resolve_existing_target(target).uri
    snapshot = search.take_snapshot(select_curve_trials(state))
    facts = make_report_input(snapshot, uri=uri, now=now, run_url=make_run_url, age=age)
    if as_json:
        text = json.dumps({**report_to_json(facts), **fresh.to_json()}, indent=2, default=str) + "\n"
    elif ending == ".html":
        text = render_html(make_page(facts))
    else:  # no pictures on stdout, where each would be a line of thousands of characters
        text = render_markdown(make_page(facts), has_pictures=output is not None)
    if output is None:
        print(text, end="")
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{output}: {error.strerror}") from error
    print(f"the report of {experiment} is in {output}", file=sys.stderr)


@command
def audit(
    target: Target,
    experiment: ExperimentName,
    space: Annotated[
        str | None, option_without_default("--space", "MODULE:NAME", "The space, if it contains functions.")
    ] = None,
    search: Annotated[
        str | None, option_without_default("--search", "MODULE:NAME", "The search, if custom or Optuna's.")
    ] = None,
    scheduler: Annotated[
        str | None, option_without_default("--scheduler", "MODULE:NAME", "The scheduler, if it is custom.")
    ] = None,
    stop: Annotated[
        str | None, option_without_default("--stop", "MODULE:NAME", "The stop criterion, if it contains functions.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute each proposal and decision of an experiment from its journal, and print the first difference.

    The audit writes nothing, and imports only the code that you name in its options.
    Exits with 1 after a difference or a damaged journal, and with 2 if the audit could not run.
    """
    from prefect_tune.runtime.load_named import load_object
    from prefect_tune.tuner.audit import audit as run_audit

    named = {"space": space, "search": search, "scheduler": scheduler, "stop": stop}
    for option, name in named.items():
        if name is not None and ":" not in name:
            raise InvalidInput(f"--{option} {name!r}: expected MODULE:NAME, such as my_project.search:{option.upper()}")
    add_working_directory_to_path()
    components = {option: load_object(name, f"--{option}") for option, name in named.items() if name is not None}
    try:
        resolve_existing_target(target)
        report = run_audit(experiment, target=target, **components)
    except JournalCorrupt:
        raise
    except (TuneError, OSError) as error:  # exit with 2, since an unreachable target is not a difference
        exit_without_verdict(error)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print(make_visible(report.summary))
        for cause, count in report.not_derived.items():
            print(make_visible(f"not derived: {count:,} ({cause})"))
        table = make_borderless_table("events", "count", "of them")
        for name, events in (("derived", report.derived), ("observed", report.observed)):
            of_them = ", ".join(f"{count:,} {event}" for event, count in sorted(events.items()))
            table.add_row(*to_plain_cells((name, f"{sum(events.values()):,}", of_them)))
        print_to_stdout("", table)
    if report.difference is not None:
        raise typer.Exit(1)
