"""The command `report`: a report of one experiment on one page."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from prefect_tune.cli.shared.app import AsJson, ExperimentName, Target, command
from prefect_tune.cli.shared.open_target import existing_place, opened, viewed
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.summary import objective_in
from prefect_tune.core.journal.journal import history
from prefect_tune.reporting.facts import facts_of
from prefect_tune.reporting.history import history_of
from prefect_tune.reporting.page import page_of
from prefect_tune.reporting.render_html import as_html as html
from prefect_tune.reporting.render_markdown import as_markdown
from prefect_tune.reporting.report_input import ReportInput, drawn_trials, report_input_of
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.terminal.data_age import Freshness, freshness_of

_FORMS = {".html": "HTML", ".htm": "HTML", ".md": "Markdown", ".markdown": "Markdown", "": "Markdown"}
_FORMS_OF_JSON = {".json": "JSON", "": "JSON"}
"""The format of the output file, by its ending."""


@command
def report(
    target: Target,
    experiment: ExperimentName,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="A .html or .md file, with the pictures. Default: Markdown without them, to stdout.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a report of an experiment, as in the Prefect UI: the best trial, charts, all trials, errors, cost.

    An .html file is self-contained, and light or dark as the reader's browser prefers.
    """
    form = _form_of(output, as_json=as_json)
    found = _material(target, experiment)
    has_pictures = output is not None  # each is a line of thousands of characters: not for a terminal, a pipe or a log
    written = _written(*found, as_json=as_json, as_html=form == "HTML", has_pictures=has_pictures)
    if output is None:
        print(written, end="")
        return
    try:
        output.write_text(written, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{output}: {error.strerror}") from error
    print(f"{form} of {experiment}: in {output}", file=sys.stderr)


def _form_of(output: Path | None, *, as_json: bool) -> str:
    ending = output.suffix.lower() if output is not None else ""
    forms = _FORMS_OF_JSON if as_json else _FORMS
    if ending not in forms:
        hint = "; for JSON use --json" if ending == ".json" else ""
        endings = " or ".join(filter(None, forms))
        raise InvalidInput(f"--output {output}: expected a file that ends in {endings}{hint}")
    return forms[ending]


def _written(found: ReportInput, fresh: Freshness, *, as_json: bool, as_html: bool, has_pictures: bool) -> str:
    from prefect_tune.monitoring.live_report import link_to

    if as_json:
        return json.dumps({**asdict(facts_of(found, link_to)), **fresh.fields()}, indent=2, default=str) + "\n"
    page = page_of(found, link_to)
    return html(page) if as_html else as_markdown(page, has_pictures=has_pictures)


def _material(target: str, experiment: str) -> tuple[ReportInput, Freshness]:
    with opened(target, experiment) as (store, loaded), transfer_pool() as transfers:
        view = viewed(store, loaded)
        entries = history(store, experiment, side_by_side=transfers)
    state = view.experiment
    objective = objective_in(state.settings)
    metrics = objective.metrics if objective else ()
    found = history_of((each for each in entries if each.number <= state.number), metrics)
    for name in state.trials:
        if (attempt := view.running(name)) and attempt.report:
            found.add_report(name, attempt.report)
    fresh = freshness_of(view, datetime.now(UTC))
    now = fresh.as_of or datetime.now(UTC)
    age = fresh.words("before this page was drawn") if fresh.is_running else ""
    uri, drawn = existing_place(target).uri, found.view(drawn_trials(state))
    return report_input_of(state, drawn, uri=uri, now=now, age=age), fresh
