"""Maintain experiments one after the other, and delete an experiment.

Maintenance verifies, quarantines and prunes checkpoints, and collects garbage. A dry run of a deletion reports what the
deletion would delete. A deletion is rejected while a run may own the experiment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import ClassVar

from httpx import HTTPError
from prefect.artifacts import MarkdownArtifact
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from prefect_tune.blocks import StorageTarget, resolve_existing
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.display_text import format_size, pluralize, shorten
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
from prefect_tune.core.experiment.summary import get_experiment_kind
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal.journal import load_experiment, read_entry_if_exists
from prefect_tune.core.messages.target_messages import ExperimentView, read_live_status
from prefect_tune.core.operations.delete_experiment import delete_generation, find_generation_to_delete
from prefect_tune.core.operations.scrub import DailyShare
from prefect_tune.core.page_elements import Heading, Table, Text, Verbatim
from prefect_tune.core.renamed import RenamedMembers
from prefect_tune.core.storage.generations import (
    find_current_journal,
    is_generation_deleted,
    list_earlier_objects,
    no_experiment_message,
)
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import hash_bytes, validate_name
from prefect_tune.journal_access import make_process_owner
from prefect_tune.reporting.page import render_markdown
from prefect_tune.storage_retries import with_store
from prefect_tune.tasks.maintenance import (
    collect_garbage,
    prune_checkpoints,
    quarantine_checkpoints,
    verify_checkpoints,
)
from prefect_tune.terminal.formatting import compute_freshness

# The report of a maintenance run: values, and a Markdown page for the Prefect UI.

_MAX_ROWS = 200


@dataclass(frozen=True, slots=True)
class DamageFinding:
    """A damaged checkpoint, or a damaged journal."""

    experiment: str
    trial: str | None
    """None if the journal is damaged; then `step` is None, too."""
    step: int | None
    folder: str
    """The folder of the checkpoint, or of the journal's entries, on the target."""
    damage: str
    is_quarantined: bool
    """Whether the checkpoint was quarantined, so that no trial resumes from it."""


@dataclass(frozen=True, slots=True)
class SkippedWork:
    """Work that this run could not do, or leaves to the next run, with the reason."""

    experiment: str
    work: str
    reason: str


@dataclass(slots=True)
class ExperimentMaintenance:
    """The findings and actions in one experiment."""

    experiment: str
    live_count: int = 0
    verified_count: int = 0
    verified_bytes: int = 0
    unread_count: int = 0
    """Checkpoints of today's share (`DailyShare`) that were not read, because a limit of this run was reached."""
    damaged: list[DamageFinding] = field(default_factory=list)
    pruned_count: int = 0
    """Checkpoints that this run retired; in a dry run, checkpoints that it would retire."""
    collected_count: int = 0
    """Deleted objects; in a dry run, objects that would be deleted."""
    collected_bytes: int = 0
    undecided_count: int = 0
    """Unreferenced objects that a running save may still use."""
    skipped: list[SkippedWork] = field(default_factory=list)

    def record_skipped(self, work: str, reason: str) -> None:
        """Record and log skipped work."""
        get_run_logger().warning("%s: skipped %s: %s", self.experiment, work, reason)
        self.skipped.append(SkippedWork(self.experiment, work, reason))

    @property
    def action_summary(self) -> str:
        return (
            f"{self.verified_count} of {pluralize(self.live_count, 'checkpoint', 'checkpoints')} read "
            f"({format_size(self.verified_bytes)}), {self.pruned_count} pruned; "
            f"{pluralize(self.collected_count, 'object', 'objects')} ({format_size(self.collected_bytes)}) collected, "
            f"{self.undecided_count} undecided"
        )


@dataclass(frozen=True, slots=True)
class MaintenanceReport(RenamedMembers):
    """The findings and actions of a run of `pt.maintain`."""

    _renamed: ClassVar[Mapping[str, str]] = {
        "not_looked_at": "skipped",
        "damaged": "damaged_checkpoints",
        "alarm": "damage_message",
    }

    target: str
    """The target's URI."""
    experiments: tuple[ExperimentMaintenance, ...]
    """The findings and actions by experiment."""
    skipped: tuple[SkippedWork, ...]
    """Work that failed or exceeded the time budget, with the reason."""
    dry_run: bool
    """Whether the run wrote and deleted nothing."""

    @property
    def damaged_checkpoints(self) -> Sequence[DamageFinding]:
        """All damage that this run found."""
        return [damaged for experiment in self.experiments for damaged in experiment.damaged]

    @property
    def verified_count(self) -> int:
        """How many checkpoints were read."""
        return sum(experiment.verified_count for experiment in self.experiments)

    @property
    def collected_bytes(self) -> int:
        """The size of all deleted objects; in a dry run, of all objects that would be deleted."""
        return sum(experiment.collected_bytes for experiment in self.experiments)

    @property
    def summary(self) -> str:
        """The report in one line."""
        verified_bytes = sum(experiment.verified_bytes for experiment in self.experiments)
        would = "would be " if self.dry_run else ""
        pruned_count = sum(experiment.pruned_count for experiment in self.experiments)
        skipped_text = f"; {pluralize(len(self.skipped), 'item', 'items')} not checked" if self.skipped else ""
        deleted_text = f", {format_size(self.collected_bytes)} {would}deleted"
        if self.dry_run and pruned_count:  # checkpoints share bytes, so it is unknown how many bytes become free
            deleted_text = f"; their bytes and {format_size(self.collected_bytes)} more would be deleted"
        return (
            f"{pluralize(len(self.experiments), 'experiment', 'experiments')}: "
            f"{pluralize(self.verified_count, 'checkpoint', 'checkpoints')} read ({format_size(verified_bytes)}), "
            f"{len(self.damaged_checkpoints)} damaged; {pruned_count} {would}pruned{deleted_text}{skipped_text}"
        )

    @property
    def damage_message(self) -> str:
        """A one-line error message about the damage. Use it only if there is damage."""
        first, *others = self.damaged_checkpoints
        more_text = f" and {len(others)} more" if others else ""
        quarantine_text = ", and quarantined" if all(damage.is_quarantined for damage in (first, *others)) else ""
        return f"{self.target}: {first.folder}{more_text} damaged{quarantine_text}: {first.damage}"


def publish_report(report: MaintenanceReport) -> None:
    """Publish the report as an artifact of the flow run; only log errors, since the run also returns the report."""
    slug = re.sub(r"[^a-z0-9-]+", "-", report.target.lower()).strip("-")[-40:].strip("-")
    key = f"maintenance-{slug}-{hash_bytes(report.target.encode())[:6]}"
    try:
        MarkdownArtifact(key=key, markdown=format_report(report), description="Maintenance report").create()
    except (PrefectException, HTTPError, OSError) as error:
        get_run_logger().warning("the report was not published: %s: %s", type(error).__name__, error)


def format_report(report: MaintenanceReport) -> str:
    """Return the report as Markdown, with one table: first the damage, then completed work, then skipped work."""
    rows = list[tuple[str, str, str]]()
    for damage in report.damaged_checkpoints:
        subject = "journal" if damage.trial is None else f"trial {damage.trial}, step {damage.step}"
        quarantine_text = ", quarantined" if damage.is_quarantined else ""
        rows.append((damage.experiment, subject, f"damaged{quarantine_text}: {_shorten_text(damage.damage)}"))
    rows += [(item.experiment, "", item.action_summary) for item in report.experiments]
    rows += [(item.experiment, item.work, f"not checked: {_shorten_text(item.reason)}") for item in report.skipped]
    state = "damage" if report.damaged_checkpoints else "no damage found"
    hidden_count = len(rows) - _MAX_ROWS
    return render_markdown(
        [
            Heading("Dry run: nothing on the target was changed" if report.dry_run else "Maintenance", 1),
            Text([f"{state}: ", Verbatim(report.target)], kind="strong"),
            Text([f"{report.summary}."]),
            Table(("experiment", "what", "result"), rows[:_MAX_ROWS]),
            *([Text([f"and {hidden_count} more"])] if hidden_count > 0 else []),
        ]
    )


def _shorten_text(text: str) -> str:
    return shorten(" ".join(text.split()), 300)


@dataclass(frozen=True, slots=True)
class MaintenanceOptions:
    """The validated options of one run."""

    target: StorageTarget
    daily_share: DailyShare | None
    """Which checkpoints of each experiment are read today; None to read no checkpoint."""
    max_bytes: int | None
    quarantine: bool
    collect: bool
    retention: Retention | None
    until: datetime | None
    dry_run: bool


def maintain_experiments(options: MaintenanceOptions, names: Iterable[str], today: date) -> MaintenanceReport:
    """Maintain the experiments one by one; their order changes daily, because the time may not suffice for all."""
    maintained, unstarted = list[ExperimentMaintenance](), list[SkippedWork]()
    for name in sorted(names, key=lambda name: hash_bytes(f"{today.toordinal()}/{name}".encode())):
        if options.until is None or datetime.now(UTC) < options.until:
            maintained.append(maintain_experiment(options, name))
        else:
            unstarted.append(SkippedWork(name, "everything", "the time budget was spent"))
    skipped = [item for upkeep in maintained for item in upkeep.skipped]
    return MaintenanceReport(options.target.uri, tuple(maintained), (*unstarted, *skipped), dry_run=options.dry_run)


_SKIPPABLE_ERRORS = (StoreUnavailable, StoreRefused, Superseded, CommitUnknown, UnknownVersion)


def maintain_experiment(options: MaintenanceOptions, name: str) -> ExperimentMaintenance:
    """Verify, quarantine, prune and collect, in this order, because damage must be found before anything is deleted.

    An action that fails is reported, and does not prevent the next actions.
    """
    upkeep, target, retention = ExperimentMaintenance(name), options.target, options.retention

    def prune() -> None:
        if retention is not None:
            upkeep.pruned_count = prune_checkpoints(target, journal, retention, dry_run=options.dry_run)

    try:
        journal = with_store(target, lambda store: find_current_journal(store, name))
    except _SKIPPABLE_ERRORS as error:
        upkeep.record_skipped("everything", str(error))
        return upkeep
    actions: dict[str, Callable[[], None]] = {
        "checkpoints": partial(_verify_and_quarantine, options, journal, upkeep),
        "retention": prune,
        "garbage": partial(_run_garbage_collection, options, journal, upkeep),
    }
    for what, action in actions.items():
        try:
            action()
        except JournalCorrupt as error:
            upkeep.record_skipped(what, f"the journal is damaged: {error}")
            if all(damage.folder != journal.entries_folder for damage in upkeep.damaged):
                damaged = DamageFinding(name, None, None, journal.entries_folder, str(error), is_quarantined=False)
                upkeep.damaged.append(damaged)
        except _SKIPPABLE_ERRORS as error:
            upkeep.record_skipped(what, str(error))
    return upkeep


def _verify_and_quarantine(options: MaintenanceOptions, journal: JournalKey, upkeep: ExperimentMaintenance) -> None:
    """Verify today's share. Publish damage before the quarantine, since later runs skip quarantined checkpoints."""
    if options.daily_share is None:
        return
    result = verify_checkpoints(options.target, journal, options.daily_share, options.max_bytes, options.until)
    upkeep.live_count, upkeep.verified_count = len(result.live), len(result.inspected)
    upkeep.verified_bytes = sum(item.size_bytes for item in result.inspected)
    upkeep.unread_count = result.unread_count
    for unreadable in result.unreadable:
        upkeep.record_skipped(unreadable.folder, unreadable.reason)
    if result.unread_count:
        upkeep.record_skipped(f"{result.unread_count} checkpoints of this sample", "the limits were reached")
    reasons = {item.key: item.damage or "" for item in result.corrupt_checkpoints}
    for key, damage in reasons.items():
        get_run_logger().error("%s is damaged: %s", key.folder, damage)
        item = DamageFinding(upkeep.experiment, key.trial.trial, key.step, key.folder, damage, is_quarantined=False)
        upkeep.damaged.append(item)
    if not (reasons and options.quarantine):
        return
    publish_report(MaintenanceReport(options.target.uri, (upkeep,), (), dry_run=False))
    try:
        folders = {key.folder for key in quarantine_checkpoints(options.target, journal, reasons)}
    except _SKIPPABLE_ERRORS as error:
        upkeep.record_skipped("quarantine", str(error))
    else:
        upkeep.damaged = [replace(item, is_quarantined=item.folder in folders) for item in upkeep.damaged]


def _run_garbage_collection(options: MaintenanceOptions, journal: JournalKey, upkeep: ExperimentMaintenance) -> None:
    if not options.collect:
        return
    garbage = collect_garbage(options.target, journal, dry_run=options.dry_run, until=options.until)
    upkeep.collected_count, upkeep.collected_bytes = garbage.object_count, garbage.size_bytes
    upkeep.undecided_count = sum(trial.undecided_count for trial in garbage.trials)
    for trial in garbage.trials:
        if (reason := trial.damage or trial.kept_reason) is not None:
            upkeep.record_skipped(f"garbage of trial {trial.trial}", reason)
    if garbage.skipped_count:
        upkeep.record_skipped(f"garbage of {garbage.skipped_count} trials", "the time budget was spent")


# Delete an experiment.

_DELETION_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class ExperimentContents:
    """The contents of an experiment on its target."""

    experiment: str
    trial_count: int
    checkpoint_count: int
    """Checkpoints whose manifest exists: live, quarantined, or retired and not yet collected."""
    object_count: int
    size_bytes: int

    def __str__(self) -> str:
        trials = pluralize(self.trial_count, "trial", "trials")
        checkpoints = pluralize(self.checkpoint_count, "checkpoint", "checkpoints")
        objects = pluralize(self.object_count, "object", "objects")
        return f"{trials}, {checkpoints}, {format_size(self.size_bytes)} in {objects}"


def delete_experiment(
    experiment: str, *, target: StorageTarget | str, even_if_running: bool = False, dry_run: bool = False
) -> ExperimentContents:
    """Permanently delete an experiment from its target, and return its former contents.

    If the call is interrupted, the experiment can no longer be resumed, and a second call deletes the rest. The name
    can be used again as soon as the first object is deleted; a marker of some 300 bytes stays. Forks of the experiment
    keep their copies of its checkpoints. The experiment's runs and artifacts on Prefect's server stay.

    ```python
    pt.delete_experiment("digits", target="runs")
    ```

    Args:
        target: where the experiment is stored: a block, a `"block-type/name"` slug, or a URI.
        even_if_running: delete the experiment even if a run may own it; that run ends with `Superseded`.
        dry_run: check everything as usual, but delete nothing.

    Raises:
        InvalidInput: there is no such experiment, or a run may own it; nothing was deleted.
        JournalCorrupt: its journal cannot be read; nothing was deleted.
        Superseded: another process is deleting the experiment.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed.
    """
    resolved = resolve_existing(target)
    owner, stamp = make_process_owner(), new_write_stamp()  # all tries use these, so that a retry is recognized

    def inspect_experiment(store: ObjectStore) -> tuple[JournalKey, ExperimentContents]:
        # A folder without a journal is no experiment, and is not deleted.
        if (journal := find_generation_to_delete(store, validate_name(experiment))) is None:
            raise InvalidInput(no_experiment_message(store, experiment, resolved.uri))
        trials: Collection[str] = ()
        if not is_generation_deleted(store, journal):  # if it is deleted, an interrupted deletion has left objects
            state = load_experiment(store, journal)
            if not (even_if_running or state.is_being_deleted):
                _require_no_live_run(store, state, resolved)
            trials = state.trials
        objects, folder = list_earlier_objects(store, experiment, journal.generation + 1), f"{journal.folder}/trials/"
        paths = [entry.path for entry in objects if entry.path.startswith(folder)]
        trial_paths = [(path.removeprefix(folder).split("/")[0], path) for path in paths]
        keys = [CheckpointKey.from_manifest_path(journal.trial_key(trial), path) for trial, path in trial_paths]
        return journal, ExperimentContents(
            experiment,
            trial_count=len({trial for trial, _ in trial_paths} | set(trials)),
            checkpoint_count=sum(key is not None for key in keys),
            object_count=len(objects),
            size_bytes=sum(entry.size_bytes for entry in objects),
        )

    journal, contents = with_store(resolved, inspect_experiment, _DELETION_TIMEOUT)
    if not dry_run:
        with_store(resolved, lambda store: delete_generation(store, journal, owner, stamp), _DELETION_TIMEOUT)
    return contents


def _require_no_live_run(store: ObjectStore, state: Experiment, target: StorageTarget) -> None:
    """Raise `InvalidInput` if a run may own the experiment: a trial runs, or a live status exists.

    A search between two trials has only a live status, which a killed process no longer updates. Stale information does
    not count; this machine's clock decides what is stale. This check misses a search in its first second, and a search
    with `live_period_seconds=None` while none of its trials runs.
    """
    last, live = read_entry_if_exists(store, state.key, state.entry_count), read_live_status(store, state)
    as_of = max(live.at if live else "", last.at if last else "")
    freshness = compute_freshness(ExperimentView(state, as_of, live), datetime.now(UTC))
    freshness = replace(freshness, is_running=freshness.is_running or live is not None)
    if not freshness.is_running or freshness.is_stale:
        return
    running_count = sum(trial.status is Status.RUNNING for trial in state.trials.values())
    count = max(running_count, len(live.trials) if live is not None else 0)  # the live status may be newer than `state`
    sign = pluralize(count, "trial was running", "trials were running") if count else "its process was alive"
    signs = f"{sign} as of {freshness.describe()}"
    is_search = get_experiment_kind(state) == "search"
    how = f"prefect-tune stop {target.cli_argument} {state.name}" if is_search else "cancel its flow run"
    raise InvalidInput(
        f"experiment {state.name!r} at {target.uri}: {state.owner} may still own it: {signs}. End that run first "
        f"({how}). If it has ended or you let it fail, delete the experiment with even_if_running (--even-if-running)"
    )
