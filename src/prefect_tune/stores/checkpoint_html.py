"""A checkpoint as a notebook shows it: its location, what its manifest says, and how to open it."""

from __future__ import annotations

from datetime import timedelta

from prefect_tune.core.checkpoints.manifest import Manifest
from prefect_tune.core.errors import TuneError
from prefect_tune.core.html_tables import Html, cell_html, escaped, facts_table, format_html_value, paragraph, soft
from prefect_tune.core.models import flat, plural, shown_size
from prefect_tune.stores.checkpoint_location import LocalPlace, TargetPlace

_OPENS = "with checkpoint.as_directory() as directory: ..."


def checkpoint_html(place: LocalPlace | TargetPlace, timeout: timedelta) -> Html:
    """Return the checkpoint at `place`. Its manifest is read; an error of the target is shown, and not raised."""
    found: Manifest | None = None
    problem = ""
    try:
        found = _manifest(place.now(), timeout)
    except TuneError as error:
        problem = f"{type(error).__name__}: {error}"
    facts = {
        "location": Html(f"<code>{escaped(place.name, 1000)}</code>"),
        **(_facts_of(found) if found else {}),
        "problem": Html(f'<span class="pt-bad">{escaped(problem)}</span>') if problem else Html(""),
        "open": Html(f"<code>{escaped(_OPENS)}</code>"),
    }
    title = f"Checkpoint of step {found.step}, trial {found.trial} of {found.experiment}" if found else "Checkpoint"
    return cell_html(paragraph(escaped(title), kind="pt-title"), facts_table(facts))


def _manifest(place: LocalPlace | TargetPlace, timeout: timedelta) -> Manifest | None:
    """Return the manifest; None for a plain directory."""
    if isinstance(place, LocalPlace):
        place.require_there()
        return None
    with place.open(timeout=timeout) as store:
        return place.manifest(store)


def _facts_of(found: Manifest) -> dict[str, Html]:
    size_bytes = sum(each.size_bytes for each in found.files)
    metrics = {name: format_html_value(value) for name, value in flat(found.about.metrics).items()}
    return {
        "step": escaped(f"{found.step:,}"),
        "size": escaped(f"{shown_size(size_bytes)} in {plural(len(found.files), 'file', 'files')}"),
        "metrics": facts_table(metrics) if metrics else soft("none"),
        "saved": escaped(f"{found.about.created_at.replace('T', ' ')[:19]} UTC, attempt {found.about.attempt}"),
    }
