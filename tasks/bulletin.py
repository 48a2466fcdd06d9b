"""What the Prefect UI shows beside the runs: artifacts, made once and then kept current, off the training path."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal
from uuid import UUID

from httpx import HTTPError, HTTPStatusError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.runtime import flow_run

from prefect_tune.core.values import digest_of
from prefect_tune.tasks.trial_output import Log

__all__ = ["Bulletin", "Sheet", "artifact_key"]

_FIRST = timedelta(seconds=2)
_PERIOD = timedelta(seconds=15)
_LONGEST_PERIOD = timedelta(minutes=10)
_SHARE = 50
"""Between two rounds is at least so many times what the last one took: they cost no more than 2 % of the time."""
_ANSWERS_WITHIN = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Sheet:
    """An artifact as it is to be shown from now on."""

    key: str
    kind: Literal["markdown", "progress"]
    data: str | float
    description: str
    task_run: str | None = None
    """Under which it is shown, too."""


class Bulletin:
    """Shows what `render` returns: after 2 s, then every 15 s at most, and in the end. Best effort.

    An artifact is made once in each run of a flow, and changed in place: no version is added each time, as
    `create_markdown_artifact` would, and no event with all of its text is sent, as by the client's `update_artifact`.
    Without an API everything goes on, and it is shown when there is one again.
    """

    def __init__(self, render: Callable[[], Sequence[Sheet]], log: Log) -> None:
        self._render = render
        self._log = log
        self._flow_run = flow_run.id
        self._made: dict[str, UUID] = {}
        self._shown: dict[str, Sheet] = {}
        self._news = threading.Event()
        self._closing = threading.Event()
        self._is_left = False
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="bulletin", daemon=True)
        self._thread.start()

    def stir(self) -> None:
        """Take note that there is something new to be shown."""
        if not self._news.is_set():
            self._news.set()

    def conclude(self) -> None:
        """Begin to show the last of it."""
        self._closing.set()
        self._news.set()

    def close(self, patience: timedelta) -> None:
        """Show the last of it, or give up after so long."""
        self.conclude()
        self._thread.join(patience.total_seconds())

    def leave(self) -> None:
        """Show nothing more: what is shown from now on is somebody else's."""
        self._is_left = True
        self.conclude()

    def _run(self) -> None:
        pause = _FIRST
        while not self._closing.wait(pause.total_seconds()):
            self._news.wait()
            self._news.clear()
            if self._closing.is_set():
                break
            began = time.monotonic()
            is_shown = self._round()
            cost = timedelta(seconds=time.monotonic() - began) if is_shown else timedelta(0)
            pause = max(_PERIOD, min(_LONGEST_PERIOD, cost * _SHARE))
        if not self._is_left:
            self._round()

    def _round(self) -> bool:
        try:
            sheets = self._render()
        except Exception:  # noqa: BLE001  what is only looked at must not end what it shows; the next round tries again
            self._log.exception("the report cannot be drawn")
            return False
        try:
            with get_client(sync_client=True, httpx_settings={"timeout": _ANSWERS_WITHIN.total_seconds()}) as client:
                for sheet in sheets:
                    self._show(client, sheet)
            return True
        except (PrefectException, HTTPError, OSError):
            self._news.set()  # the API is away: the next round tries again
        except RuntimeError:
            if not self._closing.is_set():
                raise
            # The flow gave up waiting for this thread, ended, and closed its client.
        return False

    def _show(self, client: SyncPrefectClient, sheet: Sheet) -> None:
        if self._shown.get(sheet.key) == sheet:
            return
        if sheet.key not in self._made or not self._changed(client, sheet):
            self._made[sheet.key] = self._make(client, sheet)
        self._shown[sheet.key] = sheet

    def _make(self, client: SyncPrefectClient, sheet: Sheet) -> UUID:
        made = ArtifactCreate(
            key=sheet.key,
            type=sheet.kind,
            description=sheet.description,
            data=sheet.data,
            flow_run_id=UUID(self._flow_run) if self._flow_run else None,
            task_run_id=UUID(sheet.task_run) if sheet.task_run else None,
        )
        return client.create_artifact(made).id

    def _changed(self, client: SyncPrefectClient, sheet: Sheet) -> bool:
        """False where somebody has deleted it."""
        content = {"data": sheet.data, "description": sheet.description}
        try:
            client.request("PATCH", "/artifacts/{id}", path_params={"id": self._made[sheet.key]}, json=content)
        except ObjectNotFound:
            return False
        except HTTPStatusError as error:
            if error.response.status_code != 404:
                raise
            return False
        return True


def artifact_key(*names: str) -> str:
    """Return a key, which knows small letters, digits and dashes only: other names are told apart by their digest."""
    wanted = "-".join(names)
    plain = re.sub(r"[^a-z0-9-]+", "-", wanted.lower()).strip("-")
    return plain if plain == wanted else f"{plain}-{digest_of(wanted.encode())[:6]}"
