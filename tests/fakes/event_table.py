"""The tables of events as their docs pages show them, generated from the event classes."""

from __future__ import annotations

import re
from inspect import getdoc
from typing import get_args

from prefect_tune.core.journal_events.experiment_events import Event
from prefect_tune.core.notifications import prefect_events
from prefect_tune.core.notifications.prefect_events import LifecycleEvent, TrialLifecycleEvent


def events_table() -> str:
    rows = ["| event | when | it says |", "|---|---|---|"]
    for kind in vars(prefect_events).values():
        if isinstance(kind, type) and issubclass(kind, LifecycleEvent) and "name" in vars(kind):
            fields = ", ".join(f"`{name}`" for name in kind.model_fields)
            name = (
                f"`{kind.name}`" if not issubclass(kind, TrialLifecycleEvent) or kind.is_urgent else f"`{kind.name}` *"
            )
            rows.append(f"| {name} | {' '.join(str(kind.__doc__).split())} | {fields} |")
    return "\n".join(rows)


def journal_events_table() -> str:
    """Return the table of the page on the storage layout: the types of all events, and what each means."""
    kinds = {kind.__name__: kind for kind in get_args(get_args(Event)[0])}
    types = {name: kind.model_fields["type"].default for name, kind in kinds.items()}
    rows = ["| event | meaning |", "|---|---|"]
    for name, kind in kinds.items():
        first = " ".join(str(getdoc(kind)).partition("\n\n")[0].split())
        meaning = re.sub(r"`([A-Z]\w+)`", lambda found: f"`{types[found[1]]}`", first)
        rows.append(f"| `{types[name]}` | {meaning} |")
    return "\n".join(rows)
