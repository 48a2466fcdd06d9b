"""Maintain experiments one after the other: verify, quarantine, prune, collect garbage."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from functools import partial

from httpx import HTTPError
from prefect.artifacts import MarkdownArtifact
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import (
    CommitUnknown,
    JournalCorrupt,
    StoreRefused,
    StoreUnavailable,
    Superseded,
    UnknownVersion,
)
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.operations.scrub import Inspection, Unreadable
from prefect_tune.core.shown_text import plural, shown_size, visible
from prefect_tune.core.storage.generations import current_journal, names_among, names_with_dead_objects
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import digest_of
from prefect_tune.storage_retries import on_target
from prefect_tune.tasks.maintenance import (
    Sample,
    collect_garbage,
    prune_checkpoints,
    quarantine_checkpoints,
    verify_checkpoints,
)

# The report of a maintenance run: values, and a Markdown page for the Prefect UI.

_SHOWN_ROWS = 100


@dataclass(frozen=True, slots=True)
class DamagedCheckpoint:
    """A committed checkpoint, or a journal, that is damaged."""

    experiment: str
    trial: str | None
    """None for the experiment's journal; `step` is None for a trial's own journal."""
    step: int | None
    folder: str
    """Its folder on the target."""
    damage: str
    is_quarantined: bool
    """Whether it was quarantined, so that no trial resumes from it."""


@dataclass(frozen=True, slots=True)
class NotLookedAt:
    """Work that this run left to the next one or cannot do, and why."""

    experiment: str
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Findings and actions in one experiment."""

    experiment: str
    live_count: int = 0
    verified_count: int = 0
    verified_bytes: int = 0
    unread_count: int = 0
    """Sampled checkpoints that were not read, because of the limits of the run."""
    damaged: tuple[DamagedCheckpoint, ...] = ()
    pruned_count: int = 0
    """Checkpoints that were retired."""
    collected_count: int = 0
    """Objects that were deleted, or would be in a dry run."""
    collected_bytes: int = 0
    undecided_count: int = 0
    """Unreferenced objects that a running save may still use."""
    not_looked_at: tuple[NotLookedAt, ...] = ()


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """Findings and actions of a run of `pt.maintain`."""

    target: str
    """The target's URI."""
    experiments: tuple[Upkeep, ...]
    """Findings and actions, one item for each experiment."""
    not_looked_at: tuple[NotLookedAt, ...]
    """Work for which there was no time, or that failed, and why."""
    dry_run: bool
    """Whether nothing was written or deleted."""

    @property
    def damaged(self) -> Sequence[DamagedCheckpoint]:
        """All damage that this run found."""
        return [damaged for each in self.experiments for damaged in each.damaged]

    @property
    def verified_count(self) -> int:
        """How many checkpoints were read."""
        return sum(each.verified_count for each in self.experiments)

    @property
    def collected_bytes(self) -> int:
        """Size of the objects that were deleted, or would be in a dry run."""
        return sum(each.collected_bytes for each in self.experiments)

    @property
    def summary(self) -> str:
        """The report in one line."""
        size = sum(each.verified_bytes for each in self.experiments)
        would = "would be " if self.dry_run else ""
        pruned = sum(each.pruned_count for each in self.experiments)
        left = f"; {plural(len(self.not_looked_at), 'item', 'items')} not checked" if self.not_looked_at else ""
        freed = f", {shown_size(self.collected_bytes)} {would}deleted"
        if self.dry_run and pruned:  # they share bytes with other checkpoints: only their deletion shows how many
            freed = f"; their bytes and {shown_size(self.collected_bytes)} more would be deleted"
        return (
            f"{plural(len(self.experiments), 'experiment', 'experiments')}: "
            f"{plural(self.verified_count, 'checkpoint', 'checkpoints')} read ({shown_size(size)}), "
            f"{len(self.damaged)} damaged; {pruned} {would}pruned{freed}{left}"
        )

    @property
    def alarm(self) -> str:
        """The damage in one line, as an error message. There has to be some."""
        first = self.damaged[0]
        more = f" and {len(self.damaged) - 1} more" if len(self.damaged) > 1 else ""
        quarantined = ", and quarantined" if all(each.is_quarantined for each in self.damaged) else ""
        return f"{self.target}: {first.folder}{more} damaged{quarantined}: {first.damage}"


def show_report(report: MaintenanceReport) -> None:
    """Publish the report as an artifact of the flow run; an error is only logged: the run's result holds it too."""
    plain = re.sub(r"[^a-z0-9-]+", "-", report.target.lower()).strip("-")[-40:].strip("-")
    key = f"maintenance-{plain}-{digest_of(report.target.encode())[:6]}"
    try:
        MarkdownArtifact(key=key, markdown=markdown(report), description="Maintenance report").create()
    except (PrefectException, HTTPError, OSError) as error:
        get_run_logger().warning("the report was not published: %s: %s", type(error).__name__, error)


def markdown(report: MaintenanceReport) -> str:
    """Return the page: first the damage, then the work done, then the work left."""
    what = "Dry run: nothing on the target was changed" if report.dry_run else "Maintenance"
    found = "damage" if report.damaged else "no damage found"
    page = "\n".join(
        [
            f"# {what}",
            "",
            f"**{found}**: `{report.target}`",
            "",
            f"{report.summary}.",
            "",
            *_section("Damaged", ("experiment", "trial", "step", "quarantined", "what"), _damaged(report)),
            *_section(
                "Experiments",
                ("experiment", "checkpoints", "read", "size", "damaged", "pruned", "deleted", "freed", "undecided"),
                _done(report),
            ),
            *_section("Not checked", ("experiment", "what", "why"), _left(report)),
        ]
    )
    return visible(page)


def _damaged(report: MaintenanceReport) -> Iterable[Sequence[object]]:
    for each in report.damaged:
        quarantined = "yes" if each.is_quarantined else "no"
        step = "journal" if each.step is None else each.step
        yield each.experiment, each.trial or "", step, quarantined, each.damage


def _done(report: MaintenanceReport) -> Iterable[Sequence[object]]:
    for each in report.experiments:
        yield (
            each.experiment,
            each.live_count,
            each.verified_count,
            shown_size(each.verified_bytes),
            len(each.damaged),
            each.pruned_count,
            each.collected_count,
            shown_size(each.collected_bytes),
            each.undecided_count,
        )


def _left(report: MaintenanceReport) -> Iterable[Sequence[object]]:
    return ((each.experiment, each.what, each.why) for each in report.not_looked_at)


def _section(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    filled = list(rows)
    if not filled:
        return []
    lines = [head, ["---"] * len(head), *([_cell(str(each)) for each in row] for row in filled[:_SHOWN_ROWS])]
    more = [f"\nand {len(filled) - _SHOWN_ROWS} more"] if len(filled) > _SHOWN_ROWS else []
    return [f"## {title}", "", *(f"| {' | '.join(row)} |" for row in lines), *more, ""]


def _cell(text: str) -> str:
    """Escape and shorten text from the target: it must not end the cell, or start markup."""
    line = " ".join(text.split())
    return re.sub(r"([|<>\[\]`])", r"\\\1", line if len(line) <= 300 else f"{line[:299]}…")


@dataclass(frozen=True, slots=True)
class MaintenanceOptions:
    """The validated request of one run."""

    target: StorageTarget
    sample: Sample | None
    """How much of each experiment is read for verification; None: nothing."""
    quarantine: bool
    collect: bool
    retention: Retention | None
    until: datetime | None
    dry_run: bool

    def has_time(self) -> bool:
        return self.until is None or datetime.now(UTC) < self.until


def names_on(target: StorageTarget) -> Sequence[str]:
    """Return the names of the experiments on `target`, and those of which deleted ones have left objects."""

    def look(store: ObjectStore) -> Sequence[str]:
        paths = [each.path for each in store.list("")]
        return sorted({*names_among(paths), *names_with_dead_objects(paths)})

    return on_target(target, look, timedelta(minutes=10))


def maintain_experiments(options: MaintenanceOptions, names: Iterable[str], today: date) -> MaintenanceReport:
    """Maintain one experiment after the other, each day in another order: the time may not suffice for all."""
    done, left = list[Upkeep](), list[NotLookedAt]()
    for name in sorted(names, key=lambda name: digest_of(f"{today.toordinal()}/{name}".encode())):
        if options.has_time():
            done.append(ExperimentMaintenance(options, name).run())
        else:
            left.append(NotLookedAt(name, "everything", "the time budget was spent"))
    skipped = [each for upkeep in done for each in upkeep.not_looked_at]
    return MaintenanceReport(options.target.uri, tuple(done), (*left, *skipped), dry_run=options.dry_run)


class ExperimentMaintenance:
    """The maintenance of one experiment. Its failures are reported, and do not stop the other experiments."""

    def __init__(self, options: MaintenanceOptions, name: str) -> None:
        self._options = options
        self.name = name
        self.upkeep = Upkeep(name)

    def run(self) -> Upkeep:
        """Verify, quarantine, prune, collect: in this order, so that damage is found before anything is deleted."""
        acts: list[tuple[str, Callable[[JournalKey], None]]] = []
        if (sample := self._options.sample) is not None:
            acts.append(("checkpoints", partial(self._verify, sample=sample)))
        if (retention := self._options.retention) is not None:
            acts.append(("retention", partial(self._prune, retention=retention)))
        if self._options.collect:
            acts.append(("garbage", self._collect))
        with self._or_skipped("everything"):
            journal = on_target(self._options.target, lambda store: current_journal(store, self.name))
            for what, act in acts:
                with self._or_reported(what, journal):
                    act(journal)
        return self.upkeep

    # ------------------------------------------------------------------------------------------ failures

    @contextmanager
    def _or_reported(self, what: str, journal: JournalKey) -> Iterator[None]:
        with self._or_skipped(what):
            try:
                yield
            except JournalCorrupt as error:
                self._journal_is_damaged(what, journal, error)

    @contextmanager
    def _or_skipped(self, what: str) -> Iterator[None]:
        try:
            yield
        except (StoreUnavailable, StoreRefused, Superseded, CommitUnknown, UnknownVersion) as error:
            self._skip(what, str(error))

    def _skip(self, what: str, why: str) -> None:
        get_run_logger().warning("%s: skipped %s: %s", self.name, what, why)
        left = NotLookedAt(self.name, what, why)
        self.upkeep = replace(self.upkeep, not_looked_at=(*self.upkeep.not_looked_at, left))

    def _skip_unreadable(self, what: str, unreadable: Sequence[Unreadable]) -> None:
        for each in unreadable:
            self._skip(f"{what} {each.folder}".strip(), each.why)

    def _journal_is_damaged(self, what: str, journal: JournalKey, error: JournalCorrupt) -> None:
        self._skip(what, f"the journal is damaged: {error}")
        self._add([self._damaged(journal.entries, str(error))])

    # ------------------------------------------------------------------------------------------ damage

    def _damaged(self, folder: str, damage: str, key: CheckpointKey | None = None) -> DamagedCheckpoint:
        trial, step = (key.trial.trial, key.step) if key else (None, None)
        return DamagedCheckpoint(self.name, trial, step, folder, damage, is_quarantined=False)

    def _add(self, damaged: Sequence[DamagedCheckpoint]) -> None:
        """Add damage to the report; it replaces what the report says of the same folder."""
        by_folder = {each.folder: each for each in (*self.upkeep.damaged, *damaged)}
        self.upkeep = replace(self.upkeep, damaged=tuple(by_folder.values()))

    def _verify(self, journal: JournalKey, sample: Sample) -> None:
        found = verify_checkpoints(self._options.target, journal, sample)
        self.upkeep = replace(
            self.upkeep,
            live_count=len(found.live),
            verified_count=len(found.inspected),
            verified_bytes=sum(each.size_bytes for each in found.inspected),
            unread_count=found.unread_count,
        )
        self._skip_unreadable("", found.unreadable)
        if found.unread_count:
            self._skip(f"{found.unread_count} checkpoints of this sample", "the limits were reached")
        checkpoints = [self._damaged(each.key.folder, each.damage or "", each.key) for each in found.damaged]
        journals = [
            replace(self._damaged(each.folder, each.why), trial=each.trial)
            for each in found.unreadable
            if each.is_damage
        ]
        self._add([*checkpoints, *journals])
        quarantined = self._quarantine(journal, found, checkpoints)
        folders = {key.folder for key in quarantined}
        self._add([replace(each, is_quarantined=each.folder in folders) for each in checkpoints])

    def _quarantine(
        self, journal: JournalKey, found: Inspection, damaged: Sequence[DamagedCheckpoint]
    ) -> Sequence[CheckpointKey]:
        """Quarantine damaged checkpoints, after publishing their damage: no later run finds it again."""
        for each in damaged:
            get_run_logger().error("%s is damaged: %s", each.folder, each.damage)
        if not damaged or not self._options.quarantine:
            return ()
        quarantined = list[CheckpointKey]()
        show_report(MaintenanceReport(self._options.target.uri, (self.upkeep,), (), dry_run=False))
        with self._or_skipped("quarantine"):
            reasons = {each.key: each.damage or "" for each in found.damaged}
            quarantined += quarantine_checkpoints(self._options.target, journal, reasons)
        return quarantined

    # ------------------------------------------------------------------------------------------ pruning and garbage

    def _prune(self, journal: JournalKey, retention: Retention) -> None:
        options = self._options
        found = prune_checkpoints(options.target, journal, retention, dry_run=options.dry_run)
        self.upkeep = replace(self.upkeep, pruned_count=found.count)
        self._skip_unreadable("retention of", found.unreadable)

    def _collect(self, journal: JournalKey) -> None:
        options = self._options
        found = collect_garbage(options.target, journal, dry_run=options.dry_run, until=options.until)
        self.upkeep = replace(
            self.upkeep,
            collected_count=len(found.dead)
            + sum(len(each.checkpoints) + each.orphan_count + each.answer_count for each in found.trials),
            collected_bytes=sum(each.size_bytes for each in found.dead)
            + sum(each.orphan_bytes for each in found.trials),
            undecided_count=sum(each.undecided_count for each in found.trials),
        )
        for each in found.trials:
            if (why := each.damage or each.kept) is not None:
                self._skip(f"garbage of trial {each.trial}", why)
        self._skip_unreadable("garbage of", found.unreadable)
        if found.skipped_count:
            self._skip(f"garbage of {found.skipped_count} trials", "the time budget was spent")
