"""What the Prefect UI shows of a trial: one markdown artifact, kept current off the training path."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from contextvars import copy_context
from datetime import timedelta
from itertools import islice

from httpx import HTTPError
from prefect.artifacts import MarkdownArtifact
from prefect.exceptions import PrefectException

from prefect_tune.core.experiment import Experiment
from prefect_tune.core.trial import Status, Trial
from prefect_tune.core.values import digest_of, shown_size

__all__ = ["Bulletin", "show_once", "trial_markdown"]

_DESCRIPTION = "The trial, as the journal tells it"
_PERIOD = timedelta(seconds=15)
_GOODBYE = timedelta(seconds=10)
_SHOWN_CHECKPOINTS = 20
_SHOWN_METRICS = 6
_SIGN = {Status.PENDING: "⏸️", Status.RUNNING: "🏃", Status.FINISHED: "✅", Status.ERRORED: "❌"}


class Bulletin:
    """Publishes the newest text it was given, at most every 15 s. Best effort: without an API training goes on."""

    def __init__(self, experiment: str) -> None:
        self._key = _key(experiment)
        self._newest: str | None = None
        self._guard = threading.Lock()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="bulletin", daemon=True)
        self._thread.start()

    def post(self, markdown: str) -> None:
        """Show this from now on."""
        with self._guard:
            self._newest = markdown
        self._changed.set()

    def close(self) -> None:
        """Publish what is still to be published, or give up after 10 s."""
        self._closing.set()
        self._changed.set()
        self._thread.join(_GOODBYE.total_seconds())

    def _run(self) -> None:
        while not self._closing.is_set():
            self._changed.wait()
            self._changed.clear()
            self._publish()
            self._closing.wait(_PERIOD.total_seconds())
        self._publish()

    def _publish(self) -> None:
        with self._guard:
            markdown, self._newest = self._newest, None
        if markdown is None:
            return
        try:
            MarkdownArtifact(
                key=self._key, markdown=markdown, description="The trial, as the journal tells it"
            ).create()
        except (PrefectException, HTTPError, OSError):
            self._put_back(markdown)  # the API is away: the next round tries again
        except RuntimeError:
            if not self._closing.is_set():
                raise
            # The flow gave up waiting for this thread, ended, and closed its client.

    def _put_back(self, markdown: str) -> None:
        with self._guard:
            if self._newest is None:
                self._newest = markdown


def _key(experiment: str) -> str:
    """Keys know small letters, digits and dashes only: a name that has others is told apart by its digest."""
    plain = re.sub(r"[^a-z0-9-]+", "-", experiment.lower()).strip("-")
    return f"trial-{plain}" if plain == experiment else f"trial-{plain}-{digest_of(experiment.encode())[:6]}"


def show_once(experiment: Experiment, trial: Trial, uri: str) -> None:
    """Publish the trial as it stands now, for what happens outside an attempt."""
    bulletin = Bulletin(experiment.name)
    bulletin.post(trial_markdown(experiment, trial, uri))
    bulletin.close()


def trial_markdown(experiment: Experiment, trial: Trial, uri: str) -> str:
    """Return a page on the trial: how it stands, its metrics, its checkpoints, its attempts."""
    facts = {
        "status": f"{_SIGN[trial.status]} {trial.status}{f': {trial.reason}' if trial.reason else ''}",
        "step": f"{trial.step}{f', and {trial.wasted_steps} done again after failures' if trial.wasted_steps else ''}",
        "trained for": str(timedelta(seconds=round(trial.trained_seconds))),
        "attempts": f"{trial.attempt}, epoch {experiment.epoch}, owner {experiment.owner}",
        "target": f"{uri}/{experiment.name}",
    }
    return "\n".join(
        [
            f"# {experiment.name}",
            "",
            _table(("trial", trial.trial), [(f"**{name}**", _cell(value)) for name, value in facts.items()]),
            "",
            *_section("Metrics of the last step", ("metric", "value"), _shown(trial.metrics).items()),
            *_section("Configuration", ("name", "value"), _shown(trial.config, 50).items()),
            *_checkpoints(trial),
        ]
    )


def _checkpoints(trial: Trial) -> list[str]:
    names = list(islice(trial.checkpoints[-1].metrics, _SHOWN_METRICS)) if trial.checkpoints else []
    rows = [
        (str(each.step), shown_size(each.size_bytes), *(_value(each.metrics.get(name)) for name in names))
        for each in reversed(trial.checkpoints[-_SHOWN_CHECKPOINTS:])
    ]
    count = len(trial.checkpoints)
    lines = _section(f"Committed checkpoints ({count})", ("step", "size", *map(_cell, names)), rows)
    if trial.quarantined:
        lines.append(f"⚠️ {len(trial.quarantined)} more were put aside: damaged, or they kill the trainable.")
    return lines


def _section(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    filled = list(rows)
    return [f"## {title}", "", _table(head, filled), ""] if filled else []


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, tuple("---" for _ in head), *rows))


def _shown(values: Mapping[str, object], most: int = 50) -> dict[str, str]:
    return {_cell(name): _value(value) for name, value in islice(values.items(), most)}


def _value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else _cell(str(value))


def _cell(text: str) -> str:
    """Text is somebody's: it must not end the cell, or start markup."""
    line = " ".join(text.split())
    return re.sub(r"([|<>\[\]`])", r"\\\1", line if len(line) <= 200 else f"{line[:199]}…")
