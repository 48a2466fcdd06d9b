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

from prefect_tune.blocks import LocalTarget, StorageTarget, resolve_target
from prefect_tune.core.errors import (
    CommitUnknown,
    DamageFound,
    InvalidInput,
    JournalCorrupt,
    StoreUnavailable,
    UnknownVersion,
)
from prefect_tune.core.inspection import Inspection, next_round, told_before
from prefect_tune.core.layout import CheckpointKey
from prefect_tune.core.retention import Retention
from prefect_tune.flows.own_server import flow_with_server
from prefect_tune.flows.upkeep import DamagedCheckpoint, MaintenanceReport, NotLookedAt, Upkeep, show_report
from prefect_tune.tasks.maintenance import (
    Remembered,
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
    finished by the next run. It fails where it finds damage that no run before it told of, and only after all else is
    done; every damage is in the report, which is an artifact of the run.

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
    where = resolve_target(target)
    wanted = _Wanted(
        target=where.model_copy(update={"must_exist": True}) if isinstance(where, LocalTarget) else where,
        sample=None if verify == "none" else sample,
        quarantine=quarantine and not dry_run,
        collect=collect,
        retention=retention,
        until=until,
        dry_run=dry_run,
    )
    report = _maintained(wanted, _chosen(wanted.target, experiments))
    show_report(report)
    get_run_logger().info("%s", report.summary)
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


def _maintained(wanted: _Wanted, names: Sequence[str]) -> MaintenanceReport:
    """One experiment after the other, beginning with the one that waits longest."""
    known = {name: recall(wanted.target, name) for name in names}
    waiting = sorted(names, key=lambda name: (last.at if (last := known[name].last) else "", name))
    done, left = list[Upkeep](), list[NotLookedAt]()
    for name in waiting:
        if wanted.has_time():
            done.append(_Rounds(wanted, name, known[name]).run())
        else:
            left.append(NotLookedAt(name, "everything", "the time budget was spent"))
    skipped = [each for upkeep in done for each in upkeep.not_looked_at]
    return MaintenanceReport(wanted.target.uri, tuple(done), (*left, *skipped), dry_run=wanted.dry_run)


class _Rounds:
    """The round of one experiment. What fails of it is told, and the others are looked after all the same."""

    def __init__(self, wanted: _Wanted, name: str, known: Remembered) -> None:
        self._wanted = wanted
        self._name = name
        self._known = known
        self._upkeep = Upkeep(name)

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
        return self._upkeep

    @contextmanager
    def _or_told(self, what: str) -> Iterator[None]:
        try:
            yield
        except (StoreUnavailable, CommitUnknown, UnknownVersion) as error:
            self._skip(what, str(error))
        except JournalCorrupt as error:
            if is_there(self._wanted.target, self._name):
                self._journal_is_damaged(what, error)
            else:
                self._skip(what, "it is being deleted")

    def _skip(self, what: str, why: str) -> None:
        get_run_logger().warning("%s: %s not looked at: %s", self._name, what, why)
        left = NotLookedAt(self._name, what, why)
        self._upkeep = replace(self._upkeep, not_looked_at=(*self._upkeep.not_looked_at, left))

    def _journal_is_damaged(self, what: str, error: JournalCorrupt) -> None:
        self._skip(what, f"its journal is damaged: {error}")
        folder = f"{self._name}/journal"
        if any(each.folder == folder for each in self._upkeep.damaged):
            return
        is_new = folder not in told_before(self._known.last)
        damaged = DamagedCheckpoint(self._name, None, None, folder, str(error), is_new=is_new, is_aside=False)
        self._upkeep = replace(self._upkeep, damaged=(*self._upkeep.damaged, damaged))
        if not self._wanted.dry_run and is_new:
            nothing = Inspection(live=(), ends_at=self._known.last.begins_at if self._known.last else 0)
            told = next_round(self._known.last, new_stamp(), nothing, ())
            left = told.model_copy(update={"told": (*told_before(self._known.last), folder)})
            remember(self._wanted.target, self._name, self._known.number + 1, left)

    def _verify(self, sample: Sample) -> None:
        wanted, last = self._wanted, self._known.last
        here = replace(sample, begins_at=last.begins_at if last else 0)
        found = verify_checkpoints(wanted.target, self._name, here)
        aside = self._put_aside(found)
        self._upkeep = replace(
            self._upkeep,
            live_count=len(found.live),
            verified_count=len(found.inspected),
            verified_bytes=sum(each.size_bytes for each in found.inspected),
            unread_count=found.unread_count,
            damaged=tuple(self._damaged(found, aside)),
        )
        if found.unread_count:
            self._skip(f"{found.unread_count} checkpoints of this sample", "the limits were reached; they are next")
        if not wanted.dry_run:
            remember(wanted.target, self._name, self._known.number + 1, next_round(last, new_stamp(), found, aside))

    def _put_aside(self, found: Inspection) -> Sequence[CheckpointKey]:
        damaged = {each.key: each.damage for each in found.damaged if each.damage is not None}
        for key, damage in damaged.items():
            get_run_logger().error("%s step %d is damaged: %s", key.trial.folder, key.step, damage)
        if not damaged or not self._wanted.quarantine:
            return ()
        return quarantine_checkpoints(self._wanted.target, self._name, damaged)

    def _damaged(self, found: Inspection, aside: Sequence[CheckpointKey]) -> Iterator[DamagedCheckpoint]:
        told = told_before(self._known.last)
        for each in found.damaged:
            yield DamagedCheckpoint(
                self._name,
                each.key.trial.trial,
                each.key.step,
                each.key.folder,
                each.damage or "",
                is_new=each.key.folder not in told,
                is_aside=each.key in aside,
            )

    def _prune(self, retention: Retention) -> None:
        wanted = self._wanted
        count = prune_checkpoints(wanted.target, self._name, retention, dry_run=wanted.dry_run)
        self._upkeep = replace(self._upkeep, pruned_count=count)

    def _collect(self) -> None:
        wanted = self._wanted
        found = collect_garbage(wanted.target, self._name, dry_run=wanted.dry_run, until=wanted.until)
        self._upkeep = replace(
            self._upkeep,
            collected_count=sum(len(each.checkpoints) + each.orphan_count for each in found.trials),
            collected_bytes=sum(each.orphan_bytes for each in found.trials),
            undecided_count=sum(each.undecided_count for each in found.trials),
        )
        for each in found.trials:
            if each.damage is not None:
                self._skip(f"garbage of trial {each.trial}", each.damage)
        if found.skipped_count:
            self._skip(f"garbage of {found.skipped_count} trials", "the time budget was spent")
