"""Look after a target, once or every hour: verify, quarantine, prune, collect garbage, report; whoever runs there."""

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
    """What one run is to do."""

    target: StorageTarget
    sample: Sample | None
    """How much is read of each experiment; None for nothing."""
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
    """Look after what lies on a target: verify checkpoints, put damaged ones aside, delete what nobody needs, report.

    It may run at any time, beside running experiments too, and beside itself: it takes over nothing, and deletes
    nothing that is needed or may be needed by a save that is under way. Cut short anywhere, it is
    finished by the next run. It fails where there is damage that no run before it told of, found by it or by one
    that died, and only after all else is done; every damage is in the report, which is an artifact of the run.
    What cannot be read keeps it from nothing else, and is in the report of each run.

    Args:
        target: what to look after: a block, a `"block-type/name"` slug, or a URI.
        experiments: their names, or patterns such as `"nightly-*"`. Default: all on the target.
        verify: how many of the checkpoints are read and checked, byte by byte: a `"sample"`, another one each time;
            `"all"`; or `"none"`.
        sample_rounds: a sample is one of so many shares: in that many runs every checkpoint has been read once.
            Default: 24, a day of hourly runs.
        max_verify_bytes: of each experiment no further checkpoint is read after so many bytes; the next run goes on
            there. Default: no limit.
        quarantine: whether damaged checkpoints are put aside, so that nobody goes on from them. They can be released:
            `prefect-tune verify --release`.
        collect: whether retired checkpoints and what saves that died have left are deleted.
        retention: which checkpoints stay of experiments that are finished, such as `{"last": 1}`. In any case what is
            pinned or cloned stays, each trial's newest, and all of the best trial's. Default: all stay.
        time_budget_seconds: after so long nothing more is begun; the next run begins with what waits longest.
            Default: no limit.
        dry_run: look, and report what would be done; nothing on the target changes.

    Returns:
        MaintenanceReport: what was read, what is damaged, what was deleted, what was not looked at and why.

    Raises:
        DamageFound: a checkpoint or a journal is damaged, and no run has told of it; `report` of it is the report.
        InvalidInput: what was asked for cannot be done, or there is no such experiment; nothing was begun.
        StoreUnavailable, StoreRefused: the target cannot be had.
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
    """The experiments that are meant; a pattern that means none is a mistake."""
    names = names_on(target)
    if not patterns:
        return names
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InvalidInput(
                f"experiments: none of the {len(names)} at {target.uri} is named {pattern!r}; nothing was begun"
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _maintained(wanted: _Wanted, rounds: Sequence[_Rounds]) -> MaintenanceReport:
    """One experiment after the other, beginning with the one that waits longest."""
    done, left = list[Upkeep](), list[NotLookedAt]()
    for each in sorted(rounds, key=lambda each: each.waits_since):
        if wanted.has_time():
            done.append(each.run())
        else:
            left.append(NotLookedAt(each.name, "everything", "the time budget was spent"))
            done += [each.upkeep] if each.upkeep.damaged else []  # which a run that died has not told of
    skipped = [each for upkeep in done for each in upkeep.not_looked_at]
    return MaintenanceReport(wanted.target.uri, tuple(done), (*left, *skipped), dry_run=wanted.dry_run)


class _Rounds:
    """The round of one experiment. What fails of it is told, and the others are looked after all the same."""

    def __init__(self, wanted: _Wanted, name: str, known: Remembered) -> None:
        self._wanted = wanted
        self._told = told_before(known.last)
        self._known = known
        self._is_left = False
        self.name = name
        self.waits_since = (known.last.at if known.last else "", name)
        """When it was last looked at; those that were never are first."""
        untold = known.last.untold if known.last else ()
        self.upkeep = Upkeep(name, damaged=tuple(_not_told_of(name, each) for each in untold))

    def run(self) -> Upkeep:
        """Verify, put aside, prune, collect; in this order, so that what is damaged is deleted by nobody."""
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
            with self._or_skipped("when it was looked at"):
                self._leave(partial(amended, stamp=new_stamp()))
        return self.upkeep

    def was_reported(self) -> None:
        """Remember that its damage need not be told of again; where this run dies before, the next tells of it too."""
        if self._known.last is not None and self._known.last.untold:
            folders = {each.folder for each in self.upkeep.damaged}
            with self._or_skipped("what was told of"):
                self._leave(partial(reported, stamp=new_stamp(), folders=folders))

    def _leave(self, change: Change) -> None:
        if not self._wanted.dry_run:
            self._known = remember(self._wanted.target, self.name, self._known, change)

    # ------------------------------------------------------------------------------------------ what fails

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
        get_run_logger().warning("%s: %s not looked at: %s", self.name, what, why)
        left = NotLookedAt(self.name, what, why)
        self.upkeep = replace(self.upkeep, not_looked_at=(*self.upkeep.not_looked_at, left))

    def _skip_unreadable(self, what: str, unreadable: Sequence[Unreadable]) -> None:
        for each in unreadable:
            self._skip(f"{what} {each.folder}".strip(), each.why)

    def _journal_is_damaged(self, what: str, error: JournalCorrupt) -> None:
        if not is_there(self._wanted.target, self.name):
            self._skip(what, "it is being deleted")
            return
        self._skip(what, f"its journal is damaged: {error}")
        folder = JournalKey(experiment=self.name).entries
        damaged = self._damaged(folder, str(error))
        self._add([damaged])
        self._leave(partial(amended, stamp=new_stamp(), told=[folder], untold=_to_tell([damaged])))
        self._is_left = True

    # ------------------------------------------------------------------------------------------ what is damaged

    def _damaged(self, folder: str, damage: str, key: CheckpointKey | None = None) -> DamagedCheckpoint:
        trial, step = (key.trial.trial, key.step) if key else (None, None)
        is_new = folder not in self._told
        return DamagedCheckpoint(self.name, trial, step, folder, damage, is_new=is_new, is_aside=False)

    def _add(self, damaged: Sequence[DamagedCheckpoint]) -> None:
        """What was found now says more than what was known of it."""
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
        with self._or_skipped("when it was looked at"):
            self._leave(partial(next_round, stamp=new_stamp(), inspection=found, aside=aside, untold=untold))

    def _put_aside(self, found: Inspection, damaged: Sequence[DamagedCheckpoint]) -> Sequence[CheckpointKey]:
        """First it is written down that this is still to be told: what is aside is found by no later run."""
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

    # ------------------------------------------------------------------------------------------ what nobody needs

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
            self._skip(f"garbage of {found.skipped_count} trials", "there was no more time")


def _not_told_of(experiment: str, known: Untold) -> DamagedCheckpoint:
    """What a round has found that died before it could tell."""
    return DamagedCheckpoint(
        experiment, known.trial, known.step, known.folder, known.damage, is_new=True, is_aside=known.is_aside
    )


def _to_tell(damaged: Sequence[DamagedCheckpoint]) -> Sequence[Untold]:
    return [
        Untold(trial=each.trial, step=each.step, folder=each.folder, damage=each.damage, is_aside=each.is_aside)
        for each in damaged
        if each.is_new
    ]
