"""The event feed of a Prefect server, as its UI reads it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

_PERSISTED_SECONDS = 90.0
_OURS = ("prefect-tune.", "prefect.asset.")
_KINDS = ("prefect-tune.experiment.", "prefect-tune.trial.", "prefect.automation.", "")  # an asset is named by its URI


@dataclass(frozen=True)
class Feed:
    """Events about one experiment, or one automation."""

    api_url: str
    about: str
    """The URI of the experiment's folder, or the id of the automation."""

    def read(self, *prefixes: str) -> list[dict[str, Any]]:
        """Return the events so far, oldest first."""
        event_filter = {
            "event": {"prefix": list(prefixes or _OURS)},
            "any_resource": {"id_prefix": [f"{kind}{self.about}" for kind in _KINDS]},
            "order": "ASC",
        }
        page = httpx.post(
            f"{self.api_url}/events/filter", json={"filter": event_filter, "limit": 50}, timeout=30
        ).json()
        events = list(page["events"])
        while page.get("next_page"):
            page = httpx.get(page["next_page"], timeout=30).json()
            events += page["events"]
        return events

    def names(self, *prefixes: str) -> list[str]:
        return [event["event"] for event in self.read(*prefixes)]

    def wait_until(
        self, condition: Callable[[Sequence[dict[str, Any]]], object], *prefixes: str
    ) -> list[dict[str, Any]]:
        """Return the events once they meet the condition: the server writes them every few seconds."""
        deadline = time.monotonic() + _PERSISTED_SECONDS
        while not condition(events := self.read(*prefixes)):
            assert time.monotonic() < deadline, [event["event"] for event in events]
            time.sleep(0.3)
        return events
