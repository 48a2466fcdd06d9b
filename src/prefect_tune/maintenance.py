"""Maintain experiments one after the other, and delete one that a person names.

Maintenance verifies, quarantines, prunes and collects garbage. A deletion says before what would go, and is refused
while a run may own the experiment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from functools import partial

from httpx import HTTPError
from prefect.artifacts import MarkdownArtifact
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from prefect_tune.blocks import StorageTarget, resolve_existing
from prefect_tune.clock import new_write_id
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
from prefect_tune.core.messages.target_messages import ExperimentView, live_status_of
from prefect_tune.core.operations.delete_experiment import generation_to_delete, remove
from prefect_tune.core.operations.scrub import DailyShare
from prefect_tune.core.page_elements import Heading, Table, Text, Verbatim
from prefect_tune.core.shown_text import plural, shorten, shown_size
from prefect_tune.core.storage.generations import (
    current_journal,
    is_deleted,
    no_experiment,
    objects_before,
)
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import digest_of, valid_name
from prefect_tune.journal_access import current_owner
from prefect_tune.reporting.page import as_markdown
from prefect_tune.storage_retries import on_target
from prefect_tune.tasks.maintenance import (
    collect_garbage,
    prune_checkpoints,
    quarantine_checkpoints,
    verify_checkpoints,
)
from prefect_tune.terminal.formatting import freshness_of

# The report of a maintenance run: values, and a Markdown page for the Prefect UI.

_SHOWN_ROWS = 200


@dataclass(frozen=True, slots=True)
class DamagedCheckpoint:
    """A committed checkpoint, or a journal, that is damaged."""

    experiment: str
    trial: str | None
    """None for the journal, and so is `step`."""
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


@dataclass(slots=True)
class Upkeep:
    """Findings and actions in one experiment."""

    experiment: str
    live_count: int = 0
    verified_count: int = 0
    verified_bytes: int = 0
    unread_count: int = 0
    """Sampled checkpoints that were not read, because of the limits of the run."""
    damaged: list[DamagedCheckpoint] = field(default_factory=list)
    pruned_count: int = 0
    """Checkpoints that were retired."""
    collected_count: int = 0
    """Objects that were deleted, or would be in a dry run."""
    collected_bytes: int = 0
    undecided_count: int = 0
    """Unreferenced objects that a running save may still use."""
    not_looked_at: list[NotLookedAt] = field(default_factory=list)

    def skip(self, what: str, why: str) -> None:
        """Record work that is left."""
        get_run_logger().warning("%s: skipped %s: %s", self.experiment, what, why)
        self.not_looked_at.append(NotLookedAt(self.experiment, what, why))

    @property
    def work(self) -> str:
        """The actions in one line."""
        return (
            f"{self.verified_count} of {plural(self.live_count, 'checkpoint', 'checkpoints')} read "
            f"({shown_size(self.verified_bytes)}), {self.pruned_count} pruned; "
            f"{plural(self.collected_count, 'object', 'objects')} ({shown_size(self.collected_bytes)}) collected, "
            f"{self.undecided_count} undecided"
        )


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
    """Return the page, one table: first the damage, then the work done, then the work left."""
    rows = list[tuple[str, str, str]]()
    for damaged in report.damaged:
        what = "journal" if damaged.trial is None else f"trial {damaged.trial}, step {damaged.step}"
        quarantined = ", quarantined" if damaged.is_quarantined else ""
        rows.append((damaged.experiment, what, f"damaged{quarantined}: {_shortened(damaged.damage)}"))
    rows += [(each.experiment, "", each.work) for each in report.experiments]
    rows += [(each.experiment, each.what, f"not checked: {_shortened(each.why)}") for each in report.not_looked_at]
    state = "damage" if report.damaged else "no damage found"
    more = len(rows) - _SHOWN_ROWS
    return as_markdown(
        [
            Heading("Dry run: nothing on the target was changed" if report.dry_run else "Maintenance", 1),
            Text([f"{state}: ", Verbatim(report.target)], kind="strong"),
            Text([f"{report.summary}."]),
            Table(("experiment", "what", "result"), rows[:_SHOWN_ROWS]),
            *([Text([f"and {more} more"])] if more > 0 else []),
        ]
    )


def _shortened(text: str) -> str:
    return shorten(" ".join(text.split()), 300)


@dataclass(frozen=True, slots=True)
class MaintenanceOptions:
    """The validated request of one run."""

    target: StorageTarget
    share: DailyShare | None
    """Which checkpoints of each experiment are read; None: none."""
    max_bytes: int | None
    quarantine: bool
    collect: bool
    retention: Retention | None
    until: datetime | None
    dry_run: bool


def maintain_experiments(options: MaintenanceOptions, names: Iterable[str], today: date) -> MaintenanceReport:
    """Maintain one experiment after the other, each day in another order: the time may not suffice for all."""
    done, left = list[Upkeep](), list[NotLookedAt]()
    for name in sorted(names, key=lambda name: digest_of(f"{today.toordinal()}/{name}".encode())):
        if options.until is None or datetime.now(UTC) < options.until:
            done.append(maintain_experiment(options, name))
        else:
            left.append(NotLookedAt(name, "everything", "the time budget was spent"))
    skipped = [each for upkeep in done for each in upkeep.not_looked_at]
    return MaintenanceReport(options.target.uri, tuple(done), (*left, *skipped), dry_run=options.dry_run)


_SKIPPED = (StoreUnavailable, StoreRefused, Superseded, CommitUnknown, UnknownVersion)


def maintain_experiment(options: MaintenanceOptions, name: str) -> Upkeep:
    """Verify, quarantine, prune, collect: in this order, so that damage is found before anything is deleted.

    A failure is reported, and does not stop the acts that follow.
    """
    upkeep, target, retention = Upkeep(name), options.target, options.retention

    def prune() -> None:
        if retention is not None:
            upkeep.pruned_count = prune_checkpoints(target, journal, retention, dry_run=options.dry_run)

    try:
        journal = on_target(target, lambda store: current_journal(store, name))
    except _SKIPPED as error:
        upkeep.skip("everything", str(error))
        return upkeep
    acts: dict[str, Callable[[], None]] = {
        "checkpoints": partial(_verify, options, journal, upkeep),
        "retention": prune,
        "garbage": partial(_collect, options, journal, upkeep),
    }
    for what, act in acts.items():
        try:
            act()
        except JournalCorrupt as error:
            upkeep.skip(what, f"the journal is damaged: {error}")
            if all(each.folder != journal.entries for each in upkeep.damaged):
                damaged = DamagedCheckpoint(name, None, None, journal.entries, str(error), is_quarantined=False)
                upkeep.damaged.append(damaged)
        except _SKIPPED as error:
            upkeep.skip(what, str(error))
    return upkeep


def _verify(options: MaintenanceOptions, journal: JournalKey, upkeep: Upkeep) -> None:
    """Read the share, and quarantine what is damaged after publishing the damage: no later run finds it again."""
    if options.share is None:
        return
    result = verify_checkpoints(options.target, journal, options.share, options.max_bytes, options.until)
    upkeep.live_count, upkeep.verified_count = len(result.live), len(result.inspected)
    upkeep.verified_bytes = sum(each.size_bytes for each in result.inspected)
    upkeep.unread_count = result.unread_count
    for unreadable in result.unreadable:
        upkeep.skip(unreadable.folder, unreadable.why)
    if result.unread_count:
        upkeep.skip(f"{result.unread_count} checkpoints of this sample", "the limits were reached")
    reasons = {each.key: each.damage or "" for each in result.damaged}
    for key, damage in reasons.items():
        get_run_logger().error("%s is damaged: %s", key.folder, damage)
        damaged = DamagedCheckpoint(
            upkeep.experiment, key.trial.trial, key.step, key.folder, damage, is_quarantined=False
        )
        upkeep.damaged.append(damaged)
    if not (reasons and options.quarantine):
        return
    show_report(MaintenanceReport(options.target.uri, (upkeep,), (), dry_run=False))
    try:
        folders = {key.folder for key in quarantine_checkpoints(options.target, journal, reasons)}
    except _SKIPPED as error:
        upkeep.skip("quarantine", str(error))
    else:
        upkeep.damaged = [replace(each, is_quarantined=each.folder in folders) for each in upkeep.damaged]


def _collect(options: MaintenanceOptions, journal: JournalKey, upkeep: Upkeep) -> None:
    if not options.collect:
        return
    garbage = collect_garbage(options.target, journal, dry_run=options.dry_run, until=options.until)
    upkeep.collected_count, upkeep.collected_bytes = garbage.object_count, garbage.size_bytes
    upkeep.undecided_count = sum(each.undecided_count for each in garbage.trials)
    for each in garbage.trials:
        if (why := each.damage or each.kept) is not None:
            upkeep.skip(f"garbage of trial {each.trial}", why)
    if garbage.skipped_count:
        upkeep.skip(f"garbage of {garbage.skipped_count} trials", "the time budget was spent")


# Delete an experiment that a person names.

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

    def __str__(self) -> str:
        trials = plural(self.trial_count, "trial", "trials")
        checkpoints = plural(self.checkpoint_count, "checkpoint", "checkpoints")
        objects = plural(self.object_count, "object", "objects")
        return f"{trials}, {checkpoints}, {shown_size(self.size_bytes)} in {objects}"


def delete_experiment(
    experiment: str, *, target: StorageTarget | str, even_if_running: bool = False, dry_run: bool = False
) -> ExperimentContents:
    """Delete an experiment from its target for good, and return what it had there.

    If the call is interrupted, the experiment can no longer be opened, and a second call deletes the rest. The name can
    be used again from the time at which the first object is deleted; a marker of some 300 bytes stays. Its forks have
    copies of its checkpoints. What Prefect's server has of the experiment, its runs and artifacts, stays.

    Args:
        experiment: its name on the target.
        target: where the experiment is stored: a block, a `"block-type/name"` slug, or a URI.
        even_if_running: whether it is deleted while a run may own it; that run ends with `Superseded`.
        dry_run: make the same checks, and delete nothing.

    Raises:
        InvalidInput: there is no such experiment, or a run may own it; nothing was deleted.
        JournalCorrupt: its journal cannot be read; nothing was deleted.
        Superseded: another process deletes it at the same time.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed.
    """
    resolved = resolve_existing(target)
    owner, stamp = current_owner(), new_write_id()  # the same for every try, so that a retry is the same deletion

    def look(store: ObjectStore) -> tuple[JournalKey, ExperimentContents]:
        # A folder without a journal is no experiment: whatever it holds, it is not deleted.
        if (journal := generation_to_delete(store, valid_name(experiment))) is None:
            raise InvalidInput(no_experiment(store, experiment, resolved.uri))
        trials: Collection[str] = ()
        if not is_deleted(store, journal):  # otherwise an interrupted deletion has left objects
            state = load(store, journal)
            if not (even_if_running or state.is_removed):
                _require_no_run(store, state, resolved)
            trials = state.trials
        listed, folder = objects_before(store, experiment, journal.generation + 1), f"{journal.folder}/trials/"
        paths = [each.path for each in listed if each.path.startswith(folder)]
        named = [(path.removeprefix(folder).split("/")[0], path) for path in paths]
        keys = [CheckpointKey.from_manifest_path(journal.trial_key(trial), path) for trial, path in named]
        return journal, ExperimentContents(
            experiment,
            trial_count=len({trial for trial, _ in named} | set(trials)),
            checkpoint_count=sum(key is not None for key in keys),
            object_count=len(listed),
            size_bytes=sum(each.size_bytes for each in listed),
        )

    journal, contents = on_target(resolved, look, _TIMEOUT)
    if not dry_run:
        on_target(resolved, lambda store: remove(store, journal, owner, stamp), _TIMEOUT)
    return contents


def _require_no_run(store: ObjectStore, state: Experiment, target: StorageTarget) -> None:
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
    end = f"prefect-tune stop {target.argument} {state.name}" if kind_of(state) == "search" else "cancel its flow run"
    raise InvalidInput(
        f"experiment {state.name!r} at {target.uri}: a run may own it, {state.owner}: {runs}. End that run first "
        f"({end}); or, if it has ended or may fail, delete the experiment with even_if_running (--even-if-running)"
    )
