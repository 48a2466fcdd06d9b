"""The tables of events as their docs pages show them, generated from the event classes."""

from __future__ import annotations

import re
from inspect import getdoc
from typing import Any, get_args

from prefect_tune.core.journal_events import Event, TrialEvent
from prefect_tune.core.prefect_events import NOT_EMITTED, ExperimentEvent
from prefect_tune.monitoring.event_emitter import NEVER_DROPPED_EVENTS

KINDS = {kind.__name__: kind for kind in get_args(get_args(Event)[0])}
TYPES = {name: kind.model_fields["type"].default for name, kind in KINDS.items()}


def events_table() -> str:
    """Return the table of the page on events: events about experiments, then events of the journal."""
    rows = ["| event | when | fields |", "|---|---|---|"]
    rows += [
        f"| `{kind.name}` | {_describe(kind)} | {_format_fields(kind)} |" for kind in ExperimentEvent.__subclasses__()
    ]
    for name, kind in KINDS.items():
        if TYPES[name] not in NOT_EMITTED:
            is_limited = issubclass(kind, TrialEvent) and kind not in get_args(NEVER_DROPPED_EVENTS)
            rows.append(
                f"| `prefect-tune.{TYPES[name]}`{' *' * is_limited} | {_describe(kind)} | {_format_fields(kind)} |"
            )
    return "\n".join(rows)


def journal_events_table() -> str:
    """Return the table of the page on the storage layout: the types of all events, and what each means."""
    rows = ["| event | meaning |", "|---|---|"]
    rows += [f"| `{TYPES[name]}` | {_describe(kind)} |" for name, kind in KINDS.items()]
    return "\n".join(rows)


def _describe(kind: Any) -> str:
    first = " ".join(str(getdoc(kind)).partition("\n\n")[0].split())
    return re.sub(r"`([A-Z]\w+)`", lambda match: f"`{TYPES[match[1]]}`", first)


def _format_fields(kind: Any) -> str:
    return ", ".join(f"`{name}`" for name in kind.model_fields if name != "type")
