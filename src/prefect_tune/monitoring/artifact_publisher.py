"""Publish Prefect artifacts from a background thread: create each once, update it in place, delete it in the end."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.runtime import flow_run

from prefect_tune.core.models import digest_of
from prefect_tune.prefect_api.artifacts import update_artifact
from prefect_tune.supervisor.processes.process_output import Log

_FIRST = timedelta(seconds=2)
_LONGEST_PERIOD = timedelta(minutes=10)
_SHARE = 50
"""The pause after a round is at least this multiple of its duration: rounds take no more than 2 % of the time."""
_ANSWERS_WITHIN = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class ArtifactContent:
    """The content of one artifact."""

    key: str
    kind: Literal["markdown", "progress"]
    data: str | float
    description: str
    task_run: str | None = None
    """The id of a task run that shows it as well."""

    @property
    def identity(self) -> tuple[str, str | None]:
        """The key and the task run: these of an artifact never change."""
        return self.key, self.task_run


@dataclass(frozen=True, slots=True)
class EarlierArtifacts:
    """Artifacts that may exist already: earlier runs, or a killed process of this run, did not delete them."""

    kept: frozenset[str]
    """Keys with one artifact in each run: this process updates the artifact of its run."""
    deleted: frozenset[str]
    """Keys of artifacts that do not outlive their process."""
    prefix: str
    """The beginning of the keys in `deleted`; other experiments' keys may begin with it too."""


class ArtifactPublisher:
    """Publishes the result of `render` after 2 s, then at most once in each `period`, and once at the end. Best effort.

    Each flow run creates an artifact once and updates it in place: `create_markdown_artifact` would add a version
    each time. An artifact that `render` no longer returns is deleted.
    While the API is unreachable nothing is published and nothing fails; the next round tries again.
    """

    def __init__(
        self,
        render: Callable[[], Sequence[ArtifactContent]],
        period: timedelta,
        log: Log,
        earlier: EarlierArtifacts | None = None,
    ) -> None:
        self._render = render
        self._period = period
        self._log = log
        self._earlier = earlier
        self._flow_run = flow_run.id
        self._made: dict[tuple[str, str | None], UUID] = {}
        self._shown: dict[tuple[str, str | None], ArtifactContent] = {}
        self._news = threading.Event()
        self._closing = threading.Event()
        self._is_left = False
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run,), name="artifact-publisher", daemon=True
        )
        self._thread.start()

    def stir(self) -> None:
        """Mark the content as changed: the next round publishes it."""
        if not self._news.is_set():
            self._news.set()

    def conclude(self) -> None:
        """Start the last round, and do not wait for it."""
        self._closing.set()
        self._news.set()

    def close(self, patience: timedelta) -> None:
        """Run the last round, and wait up to `patience` for it."""
        self.conclude()
        self._thread.join(patience.total_seconds())

    def leave(self) -> None:
        """Publish nothing more: another process publishes these artifacts now."""
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
            pause = max(self._period, min(_LONGEST_PERIOD, cost * _SHARE))
        if not self._is_left:
            self._round()

    def _round(self) -> bool:
        try:
            sheets = self._render()
        except Exception:  # noqa: BLE001  a failed report must not end the run; the next round tries again
            self._log.exception("the report could not be rendered; the next update tries again")
            return False
        try:
            with get_client(sync_client=True, httpx_settings={"timeout": _ANSWERS_WITHIN.total_seconds()}) as client:
                self._take_over(client)
                for sheet in sheets:
                    self._show(client, sheet)
                self._delete_all_but(client, {sheet.identity for sheet in sheets})
            return True
        except (PrefectException, HTTPError, OSError):
            self._news.set()  # the API is away: the next round tries again
        except Exception:  # noqa: BLE001  as above
            if not self._closing.is_set():  # else the flow has ended without this thread, and closed its client
                self._log.exception("the report could not be published; the next update tries again")
        return False

    def _take_over(self, client: SyncPrefectClient) -> None:
        """Delete what earlier processes left, and continue what this run has; reads nothing in a first run."""
        if self._earlier is None:
            return
        left = ArtifactFilter(key=ArtifactFilterKey(like_=f"{self._earlier.prefix}%"))
        for each in client.read_artifacts(artifact_filter=left, sort=ArtifactSort.CREATED_DESC):
            if each.key in self._earlier.deleted:
                _delete(client, each.id)
        if self._flow_run:
            own = ArtifactFilter(
                key=ArtifactFilterKey(any_=sorted(self._earlier.kept)),
                flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(self._flow_run)]),
            )
            self._made |= {(str(each.key), None): each.id for each in client.read_artifacts(artifact_filter=own)}
        self._earlier = None

    def _show(self, client: SyncPrefectClient, sheet: ArtifactContent) -> None:
        if self._shown.get(sheet.identity) == sheet:
            return
        made = self._made.get(sheet.identity)
        if made is None or not update_artifact(client, made, sheet.data, sheet.description):
            self._made[sheet.identity] = self._make(client, sheet)
        self._shown[sheet.identity] = sheet

    def _delete_all_but(self, client: SyncPrefectClient, current: Collection[tuple[str, str | None]]) -> None:
        for identity in [each for each in self._made if each not in current]:
            _delete(client, self._made[identity])
            del self._made[identity]
            self._shown.pop(identity, None)

    def _make(self, client: SyncPrefectClient, sheet: ArtifactContent) -> UUID:
        made = ArtifactCreate(
            key=sheet.key,
            type=sheet.kind,
            description=sheet.description,
            data=sheet.data,
            flow_run_id=UUID(self._flow_run) if self._flow_run else None,
            task_run_id=UUID(sheet.task_run) if sheet.task_run else None,
        )
        return client.create_artifact(made).id


def _delete(client: SyncPrefectClient, artifact: UUID) -> None:
    with suppress(ObjectNotFound):
        client.delete_artifact(artifact)


def artifact_key(*names: str) -> str:
    """Return an artifact key: lower-case letters, digits and dashes; other names get a digest that keeps them apart."""
    wanted, plain = "-".join(names), plain_key(*names)
    return plain if plain == wanted else f"{plain}-{digest_of(wanted.encode())[:6]}"


def plain_key(*names: str) -> str:
    """Return the names as an artifact key; different names may have the same one."""
    return re.sub(r"[^a-z0-9-]+", "-", "-".join(names).lower()).strip("-")
