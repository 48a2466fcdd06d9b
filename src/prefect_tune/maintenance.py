"""Maintain experiments one after the other, and delete one that a person names.

Maintenance verifies, quarantines, prunes and collects garbage. A deletion says before what would go, and is refused
while a run may own the experiment.
"""

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

from prefect_tune.blocks import StorageTarget, resolve_existing
from prefect_tune.core.errors import (
    CommitUnknown,
    InvalidInput,
    JournalCorrupt,
    StoreRefused,
    StoreUnavailable,
    Superseded,
    UnknownVersion,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.summary import kind_of
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal.journal import load, next_entry
from prefect_tune.core.messages.live_status import ExperimentView, live_status_of
from prefect_tune.core.operations.delete_experiment import generation_to_delete, remove
from prefect_tune.core.operations.scrub import Inspection, Unreadable
from prefect_tune.core.shown_text import plural, shown_size, visible
from prefect_tune.core.storage.generations import (
    current_journal,
    is_deleted,
    names_among,
    names_with_dead_objects,
    no_experiment,
    objects_before,
)
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.core.storage.object_store import Listed, ObjectStore
from prefect_tune.core.values import digest_of, valid_name
from prefect_tune.journal_access import current_owner, new_write_id
from prefect_tune.storage_retries import on_target
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.tasks.maintenance import (
    Sample,
    collect_garbage,
    prune_checkpoints,
    quarantine_checkpoints,
    verify_checkpoints,
)
from prefect_tune.terminal.freshness import freshness_of

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
            *_section(
                "Not checked",
                ("experiment", "what", "why"),
                ((each.experiment, each.what, each.why) for each in report.not_looked_at),
            ),
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


_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class ExperimentContents:
    """What an experiment has on its target."""

    experiment: str
    trial_count: int
    checkpoint_count: int
    """Those whose manifest exists: live, quarantined, and retired ones that are not collected yet."""
    object_count: int
    size_bytes: int


def delete_experiment(experiment: str, *, target: StorageTarget | str, even_if_running: bool = False) -> int:
    """Delete an experiment from its target for good, and return the number of deleted objects.

    If the call is interrupted, the experiment can no longer be opened, and a second call deletes the rest. The name can
    be used again from the time at which the first object is deleted; a marker of some 300 bytes stays. A fork releases
    the checkpoints of its origin. What Prefect's server has of the experiment, its runs and artifacts, stays.

    Args:
        experiment: its name on the target.
        target: where the experiment is stored: a block, a `"block-type/name"` slug, or a URI.
        even_if_running: whether it is deleted while a run may own it; that run ends with `Superseded`.

    Raises:
        InvalidInput: there is no such experiment, a run may own it, or another experiment, such as a fork, needs bytes
            of its checkpoints; nothing was deleted.
        JournalCorrupt: its journal cannot be read; nothing was deleted.
        Superseded: another process deletes it at the same time.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed.
    """
    place = resolve_existing(target)
    journal = on_target(
        place, lambda store: _found(store, experiment, place.uri, even_if_running=even_if_running).journal, _TIMEOUT
    )
    owner, stamp = current_owner(), new_write_id()  # the same for every try, so that a retry is the same deletion

    def delete(store: ObjectStore) -> int:
        with transfer_pool() as transfers:
            return remove(store, journal, owner, stamp, side_by_side=transfers)

    return on_target(place, delete, _TIMEOUT)


def contents_of(experiment: str, *, target: StorageTarget | str, even_if_running: bool = False) -> ExperimentContents:
    """Return what `delete_experiment` would delete, after the same checks; claims of forks are checked only by it.

    Raises:
        InvalidInput: there is no such experiment, or a run may own it.
        JournalCorrupt: its journal cannot be read, and no deletion explains that.
    """
    place = resolve_existing(target)

    def look(store: ObjectStore) -> ExperimentContents:
        found = _found(store, experiment, place.uri, even_if_running=even_if_running)
        return _contents(found, objects_before(store, experiment, found.journal.generation + 1))

    return on_target(place, look, _TIMEOUT)


@dataclass(frozen=True, slots=True)
class _Found:
    """The generation to delete, and its experiment; None if only an interrupted deletion has left objects."""

    journal: JournalKey
    state: Experiment | None


def _found(store: ObjectStore, name: str, uri: str, *, even_if_running: bool) -> _Found:
    """Find what a deletion would delete, after the same checks.

    A folder without a journal is no experiment: whatever it holds, it is not deleted.
    """
    if (journal := generation_to_delete(store, valid_name(name))) is None:
        raise InvalidInput(no_experiment(store, name, uri))
    if is_deleted(store, journal):
        return _Found(journal, None)
    with transfer_pool() as transfers:
        state = load(store, journal, side_by_side=transfers)
    if not (even_if_running or state.is_removed):
        _require_no_run(store, state, uri)
    return _Found(journal, state)


def _require_no_run(store: ObjectStore, state: Experiment, uri: str) -> None:
    """Refuse while a trial runs by the journal, or its owner still publishes, by this machine's clock.

    A search between two trials has none that runs; a process that was killed stops publishing. Not noticed is a search
    in its first second, or one with `live_period_seconds=None` while none of its trials runs.
    """
    last, live = next_entry(store, state.key, state.number - 1), live_status_of(store, state)
    as_of = max(live.at if live else "", last.at if last else "")
    fresh = freshness_of(ExperimentView(state, as_of, live), datetime.now(UTC))
    fresh = replace(fresh, is_running=fresh.is_running or live is not None)
    if not fresh.is_running or fresh.is_stale:
        return
    by_journal = sum(each.status is Status.RUNNING for each in state.trials.values())
    count = max(by_journal, len(live.trials) if live is not None else 0)  # the journal of a search may be older
    alive = plural(count, "trial was running", "trials were running") if count else "its process was alive"
    runs = f"{alive} as of {fresh.words()}"
    end = f"prefect-tune stop {uri} {state.name}" if kind_of(state) == "search" else "cancel its flow run"
    raise InvalidInput(
        f"experiment {state.name!r} at {uri}: a run may own it, {state.owner}: {runs}. End that run first "
        f"({end}); or, if it has ended or may fail, delete the experiment with even_if_running (--even-if-running)"
    )


def _contents(found: _Found, listed: Sequence[Listed]) -> ExperimentContents:
    folder = f"{found.journal.folder}/trials/"
    named = [
        (each.path.removeprefix(folder).split("/")[0], each.path) for each in listed if each.path.startswith(folder)
    ]
    keys = (CheckpointKey.from_manifest_path(found.journal.trial_key(trial), path) for trial, path in named)
    return ExperimentContents(
        found.journal.experiment,
        trial_count=len({trial for trial, _ in named} | set(found.state.trials if found.state else ())),
        checkpoint_count=sum(key is not None for key in keys),
        object_count=len(listed),
        size_bytes=sum(each.size_bytes for each in listed),
    )
