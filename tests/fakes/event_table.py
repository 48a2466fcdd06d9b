"""The table of events as the page on events shows it, made from the classes that are the schema."""

from __future__ import annotations

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
