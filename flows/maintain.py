"""The maintenance flow: verify, quarantine, prune, collect garbage and report, on a target that may be in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal

from prefect.logging import get_run_logger

from prefect_tune.blocks import StorageTarget, resolve_existing
from prefect_tune.core.errors import (
    CommitUnknown,
    DamageFound,
    InvalidInput,
    JournalCorrupt,
    StoreRefused,
    StoreUnavailable,
    UnknownVersion,
)
from prefect_tune.core.inspection import Inspection
from prefect_tune.core.layout import CheckpointKey, JournalKey
from prefect_tune.core.retention import Retention
from prefect_tune.core.rounds import Change, Remembered, Untold, amended, next_round, reported, told_before
from prefect_tune.core.unreadable import Unreadable
from prefect_tune.flows.own_server import flow_with_server
from prefect_tune.flows.upkeep import DamagedCheckpoint, MaintenanceReport, NotLookedAt, Upkeep, show_report
from prefect_tune.tasks.maintenance import (
    Sample,
    collect_garbage,
    is_there,
    names_on,
    prune_checkpoints,
    quarantine_checkpoints,
    recall,
    remember,
    verify_checkpoints,
)
from prefect_tune.tasks.stamp import new_stamp

__all__ = ["maintain"]


@dataclass(frozen=True, slots=True)
class _Wanted:
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


@flow_with_server(name="maintain", persist_result=False)
def maintain(
    target: StorageTarget | str,
    *,
    experiments: list[str] | None = None,
    verify: Literal["sample", "all", "none"] = "sample",
    sample_rounds: int = 24,
    max_verify_bytes: int | None = None,
    quarantine: bool = True,
    collect: bool = True,
    retention: Retention | None = None,
    time_budget_seconds: float | None = None,
    dry_run: bool = False,
) -> MaintenanceReport:
    """Maintain a target: verify checkpoints, quarantine damaged ones, collect garbage, and report.

    The flow may run at any time, beside running experiments and beside itself: it takes no experiment over, and deletes
    nothing that is referenced or that a save in progress may reference. A run that is interrupted anywhere is
    completed by the next one. The flow fails if it or an earlier run that died found damage that no report has shown,
    and only after all other work is done; the report, an artifact of the run, holds all damage. An object that cannot
    be read does not stop the rest, and is in the report of each run.

    Args:
        target: the target to maintain: a block, a `"block-type/name"` slug, or a URI.
        experiments: names of experiments, or patterns such as `"nightly-*"`. Default: all on the target.
        verify: which checkpoints are read and checked, byte by byte: a `"sample"`, another one in each run;
            `"all"`; or `"none"`.
        sample_rounds: number of runs in which the samples cover every checkpoint once. Default: 24, a day of hourly
            runs.
        max_verify_bytes: bytes of each experiment after which no further checkpoint is read; the next run continues
            there. Default: no limit.
        quarantine: whether damaged checkpoints are quarantined, so that no trial resumes from them. Release them by
            `prefect-tune verify --release`.
        collect: whether retired checkpoints and the leftovers of interrupted saves are deleted.
        retention: which checkpoints of finished experiments to keep, such as `{"last": 1}`. Always kept are pinned and
            cloned ones, each trial's newest, and all of the best trial. Default: keep all.
        time_budget_seconds: seconds after which no further work begins; the next run begins with the experiment that
            has waited longest. Default: no limit.
        dry_run: check, and report what would be done, without changing the target.

    Returns:
        MaintenanceReport: what was read, what is damaged, what was deleted, what was skipped and why.

    Raises:
        DamageFound: a checkpoint or a journal is damaged, and no earlier run has reported it; its `report` is the
            report.
        InvalidInput: an argument is invalid, or there is no such experiment; nothing was begun.
        StoreUnavailable, StoreRefused: the target cannot be reached, or refuses requests.
    """
    _require_possible(sample_rounds, max_verify_bytes, time_budget_seconds)
    budget = None if time_budget_seconds is None else timedelta(seconds=time_budget_seconds)
    until = None if budget is None else datetime.now(UTC) + budget
    sample = Sample(share=1.0 if verify == "all" else 1 / sample_rounds, max_bytes=max_verify_bytes, until=until)
    wanted = _Wanted(
        target=resolve_existing(target),
        sample=None if verify == "none" else sample,
        quarantine=quarantine and not dry_run,
        collect=collect,
        retention=retention,
        until=until,
        dry_run=dry_run,
    )
    rounds = [_Rounds(wanted, name, recall(wanted.target, name)) for name in _chosen(wanted.target, experiments)]
    report = _maintained(wanted, rounds)
    get_run_logger().info("%s", report.summary)
    if show_report(report):
        for each in rounds:
            each.was_reported()
    if report.new_damage:
        raise DamageFound(report.alarm, report)
    return report


def _require_possible(sample_rounds: int, max_verify_bytes: int | None, time_budget_seconds: float | None) -> None:
    given = {
        "sample_rounds": sample_rounds,
        "max_verify_bytes": max_verify_bytes,
        "time_budget_seconds": time_budget_seconds,
    }
    for name, value in given.items():
        if value is not None and not value > 0:
            raise InvalidInput(f"{name}: expected more than 0, found {value}; nothing was begun")


def _chosen(target: StorageTarget, patterns: Sequence[str] | None) -> Sequence[str]:
    """Return the names of the experiments that match; a pattern without a match is an error."""
    names = names_on(target)
    if not patterns:
        return names
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InvalidInput(
                f"experiments: none of the {len(names)} at {target.uri} matches {pattern!r}; nothing was begun"
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _maintained(wanted: _Wanted, rounds: Sequence[_Rounds]) -> MaintenanceReport:
    """Maintain one experiment after the other, beginning with the one that has waited longest."""
    done, left = list[Upkeep](), list[NotLookedAt]()
    for each in sorted(rounds, key=lambda each: each.waits_since):
        if wanted.has_time():
            done.append(each.run())
        else:
            left.append(NotLookedAt(each.name, "everything", "the time budget was spent"))
            done += [each.upkeep] if each.upkeep.damaged else []  # found by a run that died before its report
    skipped = [each for upkeep in done for each in upkeep.not_looked_at]
    return MaintenanceReport(wanted.target.uri, tuple(done), (*left, *skipped), dry_run=wanted.dry_run)


class _Rounds:
    """One round of maintenance of one experiment. Its failures are reported, and do not stop the other experiments."""

    def __init__(self, wanted: _Wanted, name: str, known: Remembered) -> None:
        self._wanted = wanted
        self._told = told_before(known.last)
        self._known = known
        self._is_left = False
        self.name = name
        self.waits_since = (known.last.at if known.last else "", name)
        """The time of its last round, for sorting; experiments without one come first."""
        untold = known.last.untold if known.last else ()
        self.upkeep = Upkeep(name, damaged=tuple(_not_told_of(name, each) for each in untold))

    def run(self) -> Upkeep:
        """Verify, quarantine, prune, collect: in this order, so that damage is found before anything is deleted."""
        acts: list[tuple[str, Callable[[], None]]] = []
        if (sample := self._wanted.sample) is not None:
            acts.append(("checkpoints", partial(self._verify, sample)))
        if (retention := self._wanted.retention) is not None:
            acts.append(("retention", partial(self._prune, retention)))
        if self._wanted.collect:
            acts.append(("garbage", self._collect))
        for what, act in acts:
            with self._or_told(what):
                act()
        if not self._is_left:
            with self._or_skipped("the record of this round"):
                self._leave(partial(amended, stamp=new_stamp()))
        return self.upkeep

    def was_reported(self) -> None:
        """Record that its damage is reported; if this run dies before that, the next run reports it again."""
        if self._known.last is not None and self._known.last.untold:
            folders = {each.folder for each in self.upkeep.damaged}
            with self._or_skipped("the record that damage is reported"):
                self._leave(partial(reported, stamp=new_stamp(), folders=folders))

    def _leave(self, change: Change) -> None:
        if not self._wanted.dry_run:
            self._known = remember(self._wanted.target, self.name, self._known, change)

    # ------------------------------------------------------------------------------------------ failures

    @contextmanager
    def _or_told(self, what: str) -> Iterator[None]:
        with self._or_skipped(what):
            try:
                yield
            except JournalCorrupt as error:
                self._journal_is_damaged(what, error)

    @contextmanager
    def _or_skipped(self, what: str) -> Iterator[None]:
        try:
            yield
        except (StoreUnavailable, StoreRefused, CommitUnknown, UnknownVersion) as error:
            self._skip(what, str(error))

    def _skip(self, what: str, why: str) -> None:
        get_run_logger().warning("%s: skipped %s: %s", self.name, what, why)
        left = NotLookedAt(self.name, what, why)
        self.upkeep = replace(self.upkeep, not_looked_at=(*self.upkeep.not_looked_at, left))

    def _skip_unreadable(self, what: str, unreadable: Sequence[Unreadable]) -> None:
        for each in unreadable:
            self._skip(f"{what} {each.folder}".strip(), each.why)

    def _journal_is_damaged(self, what: str, error: JournalCorrupt) -> None:
        if not is_there(self._wanted.target, self.name):
            self._skip(what, "the experiment is being deleted")
            return
        self._skip(what, f"the journal is damaged: {error}")
        folder = JournalKey(experiment=self.name).entries
        damaged = self._damaged(folder, str(error))
        self._add([damaged])
        self._leave(partial(amended, stamp=new_stamp(), told=[folder], untold=_to_tell([damaged])))
        self._is_left = True

    # ------------------------------------------------------------------------------------------ damage

    def _damaged(self, folder: str, damage: str, key: CheckpointKey | None = None) -> DamagedCheckpoint:
        trial, step = (key.trial.trial, key.step) if key else (None, None)
        is_new = folder not in self._told
        return DamagedCheckpoint(self.name, trial, step, folder, damage, is_new=is_new, is_aside=False)

    def _add(self, damaged: Sequence[DamagedCheckpoint]) -> None:
        """Add damage to the report; it replaces what an earlier run knew of the same folder."""
        by_folder = {each.folder: each for each in (*self.upkeep.damaged, *damaged)}
        self.upkeep = replace(self.upkeep, damaged=tuple(by_folder.values()))

    def _verify(self, sample: Sample) -> None:
        last = self._known.last
        here = replace(sample, begins_at=last.begins_at if last else 0)
        found = verify_checkpoints(self._wanted.target, self.name, here)
        self.upkeep = replace(
            self.upkeep,
            live_count=len(found.live),
            verified_count=len(found.inspected),
            verified_bytes=sum(each.size_bytes for each in found.inspected),
            unread_count=found.unread_count,
        )
        self._skip_unreadable("", found.unreadable)
        if found.unread_count:
            self._skip(f"{found.unread_count} checkpoints of this sample", "the limits were reached; they are next")
        checkpoints = [self._damaged(each.key.folder, each.damage or "", each.key) for each in found.damaged]
        journals = [
            replace(self._damaged(each.folder, each.why), trial=each.trial)
            for each in found.unreadable
            if each.is_damage
        ]
        self._add([*checkpoints, *journals])
        aside = self._put_aside(found, checkpoints)
        now = [replace(each, is_aside=each.folder in {key.folder for key in aside}) for each in checkpoints]
        self._add(now)
        untold = _to_tell([*now, *journals])
        self._is_left = True
        with self._or_skipped("the record of this round"):
            self._leave(partial(next_round, stamp=new_stamp(), inspection=found, aside=aside, untold=untold))

    def _put_aside(self, found: Inspection, damaged: Sequence[DamagedCheckpoint]) -> Sequence[CheckpointKey]:
        """Quarantine damaged checkpoints; record them as unreported first, since no later run finds them again."""
        for each in damaged:
            get_run_logger().error("%s is damaged: %s", each.folder, each.damage)
        if not damaged or not self._wanted.quarantine:
            return ()
        aside = list[CheckpointKey]()
        with self._or_skipped("quarantine"):
            untold = _to_tell([replace(each, is_aside=True) for each in damaged])
            self._leave(partial(amended, stamp=new_stamp(), untold=untold))
            reasons = {each.key: each.damage or "" for each in found.damaged}
            aside += quarantine_checkpoints(self._wanted.target, self.name, reasons)
        return aside

    # ------------------------------------------------------------------------------------------ pruning and garbage

    def _prune(self, retention: Retention) -> None:
        wanted = self._wanted
        found = prune_checkpoints(wanted.target, self.name, retention, dry_run=wanted.dry_run)
        self.upkeep = replace(self.upkeep, pruned_count=found.count)
        self._skip_unreadable("retention of", found.unreadable)

    def _collect(self) -> None:
        wanted = self._wanted
        found = collect_garbage(wanted.target, self.name, dry_run=wanted.dry_run, until=wanted.until)
        self.upkeep = replace(
            self.upkeep,
            collected_count=sum(len(each.checkpoints) + each.orphan_count + each.answer_count for each in found.trials),
            collected_bytes=sum(each.orphan_bytes for each in found.trials),
            undecided_count=sum(each.undecided_count for each in found.trials),
        )
        for each in found.trials:
            if (why := each.damage or each.kept) is not None:
                self._skip(f"garbage of trial {each.trial}", why)
        self._skip_unreadable("garbage of", found.unreadable)
        if found.skipped_count:
            self._skip(f"garbage of {found.skipped_count} trials", "the time budget was spent")


def _not_told_of(experiment: str, known: Untold) -> DamagedCheckpoint:
    """Return damage that an earlier round found before it died without a report."""
    return DamagedCheckpoint(
        experiment, known.trial, known.step, known.folder, known.damage, is_new=True, is_aside=known.is_aside
    )


def _to_tell(damaged: Sequence[DamagedCheckpoint]) -> Sequence[Untold]:
    return [
        Untold(trial=each.trial, step=each.step, folder=each.folder, damage=each.damage, is_aside=each.is_aside)
        for each in damaged
        if each.is_new
    ]
