"""The checkpoint of several ranks: their parts are collected, merged into one directory, and committed as one.

    rank 0: StepDone(s, its directory) ─┐
    rank 1: Part(s, its directory)      ├──► all there ──► merged (renames) ──► one commit, as of a single process
    rank 2: Part(s, nothing to add)    ─┘    deadline, or a rank has ended ──► this save fails on all ranks

Until the merge nothing is on the target, so a save that fails leaves nothing there.
The metrics of a step, if they are the mean over all ranks, are collected in the same way, before rank 0 reports it.
Never: a commit without the part of a rank; two files with one name and other bytes.
"""

from __future__ import annotations

import filecmp
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from prefect_tune.core.errors import InvalidInput, StagedFilesChanged
from prefect_tune.core.messages.process_messages import MeanMetrics, Part, RankMetrics, StepDone
from prefect_tune.core.metrics import mean_of
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.staging import naming_unreadable
from prefect_tune.stores.posix_files import remove_tree

PARTS_WITHIN = timedelta(minutes=5)
"""How long the other parts of a checkpoint may take after that of rank 0."""


@dataclass(frozen=True, slots=True)
class GroupSave:
    """A checkpoint with all its parts."""

    done: StepDone
    """The report of rank 0, with its directory."""
    parts: Mapping[int, Path]
    """The directories of other ranks, by rank."""
    nodes: tuple[int, ...] = ()
    """The other nodes that hold files of it."""


@dataclass(slots=True)
class _Pending:
    deadline: Deadline
    done: StepDone | None = None
    parts: dict[int, Part] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FailedSave:
    """A checkpoint that is not committed, since ranks did not add their part in time."""

    done: StepDone
    """The report of rank 0."""
    reason: Reason
    ranks: Sequence[int] = ()
    """Those that did not, where that is known."""

    @property
    def step(self) -> int:
        return self.done.report.step


class GroupSaves:
    """Collects the parts of the checkpoints of `world_size` ranks. Rank 0 hands over one checkpoint after the other."""

    def __init__(self, world_size: int, within: timedelta = PARTS_WITHIN) -> None:
        self.world_size = world_size
        self._others = range(1, world_size)
        self._within = within
        self._pending: dict[int, _Pending] = {}
        self._failed: set[int] = set()
        self._over = -1  # the last step of which rank 0 has said that it is over

    def expect(self, step: int) -> None:
        """All ranks are directed to save `step`, of which rank 0 may have said before that it is over."""
        self._over = min(self._over, step - 1)

    def hand_over(self, done: StepDone) -> GroupSave | None:
        """Take the directory of rank 0; return the checkpoint if that was its last part."""
        pending = self._at(done.report.step)
        pending.done, pending.deadline = done, Deadline.after(self._within)
        return self._whole(done.report.step)

    def add(self, rank: int, part: Part) -> GroupSave | None:
        """Take the part of another rank; return the checkpoint if that was its last part.

        Raises:
            InvalidInput: the rank saves at a step at which rank 0 did not.
        """
        if part.step in self._failed:
            remove_directory(part.directory)
            return None
        if part.step <= self._over and part.step not in self._pending:
            _require_no_files(rank, part)
            return None
        pending = self._at(part.step)
        pending.parts[rank] = part
        return self._whole(part.step)

    def close(self, step: int) -> None:
        """Rank 0 hands over no more checkpoint of `step`: what the others added without one is dropped.

        Raises:
            InvalidInput: a rank saved at a step at which rank 0 did not.
        """
        self._over = max(self._over, step)
        for at in [at for at, each in self._pending.items() if at <= step and each.done is None]:
            for rank, part in self._pending.pop(at).parts.items():
                _require_no_files(rank, part)

    def without(self, ended: Collection[int]) -> Reason | None:
        """Return which checkpoint can never be complete, since ranks have ended without their part; else None."""
        for step, each in self._pending.items():
            gone = [rank for rank in self._others if rank not in each.parts and rank in ended]
            if each.done is not None and gone:
                return make_reason("ranks-left-save", ranks=gone, step=step)
        return None

    def overdue(self) -> FailedSave | None:
        """Return a checkpoint whose deadline has passed; its files are removed."""
        for step, each in self._pending.items():
            if each.done is None or each.deadline.remaining_seconds > 0:
                continue
            del self._pending[step]
            self._failed.add(step)
            for directory in (*(part.directory for part in each.parts.values()), each.done.checkpoint):
                remove_directory(directory)
            missing = [rank for rank in self._others if rank not in each.parts]
            reason = make_reason("part-late", ranks=missing, seconds=self._within.total_seconds())
            return FailedSave(each.done, reason, missing)
        return None

    def _at(self, step: int) -> _Pending:
        return self._pending.setdefault(step, _Pending(Deadline.after(self._within)))

    def _whole(self, step: int) -> GroupSave | None:
        found = self._pending[step]
        if found.done is None or not found.parts.keys() >= set(self._others):
            return None
        del self._pending[step]
        parts = {rank: Path(each.directory) for rank, each in sorted(found.parts.items()) if each.directory is not None}
        nodes = tuple(sorted({each.node for each in found.parts.values() if each.node}))
        return GroupSave(found.done, parts, nodes)


class GroupMetrics:
    """Collects the metrics that ranks report for a step, whose mean rank 0 waits for."""

    def __init__(self, world_size: int, within: timedelta = PARTS_WITHIN) -> None:
        self._ranks = range(world_size)
        self._within = within
        self._found: dict[int, dict[int, Mapping[str, object]]] = {}
        self._newest: dict[int, RankMetrics] = {}
        self._directed = 0
        self._step: int | None = None
        self.restart()

    def direct(self, step: int) -> None:
        """Rank 0 has directed what the other ranks do at `step`, for which each waits in `pt.report`."""
        self._directed = step

    def restart(self) -> None:
        """Give the ranks their whole time again: some are not loaded yet."""
        self._deadline = Deadline.after(self._within)

    def add(self, rank: int, reported: RankMetrics) -> MeanMetrics | None:
        """Take what a rank reports; return the mean with the last of them."""
        found = self._found.setdefault(reported.step, {})
        found[rank], self._newest[rank] = reported.metrics, reported
        if rank == 0:
            self._step = reported.step
            self.restart()
        if not found.keys() >= set(self._ranks):
            return None
        self._step = None
        del self._found[reported.step]
        return MeanMetrics(step=reported.step, metrics=mean_of([found[each] for each in self._ranks]))

    def without(self, ended: Collection[int]) -> Reason | None:
        """Return of which step there can never be a mean, since ranks have ended before it; else None."""
        gone = [each for each in self.missing if each in ended]
        return make_reason("ranks-left-mean", ranks=gone, step=self._step) if gone else None

    def surplus(self) -> Reason | None:
        """Return which rank waits in `pt.report` for rank 0, which has ended; else None."""
        for rank, reported in sorted(self._newest.items()):
            if rank and reported.step > self._directed and not reported.returned:
                return make_reason("surplus-report", rank=rank, step=reported.step)
        return None

    def overdue(self) -> Reason | None:
        """Return which ranks have not reported in time the step that rank 0 waits for; else None."""
        if self._deadline.remaining_seconds > 0:
            return None
        seconds = self._within.total_seconds()
        return make_reason("metrics-late", ranks=self.missing, step=self._step, seconds=seconds)

    @property
    def missing(self) -> Sequence[int]:
        """The ranks whose metrics rank 0 waits for."""
        return [] if self._step is None else [each for each in self._ranks if each not in self._found[self._step]]


def remove_directory(directory: str | Path | None) -> None:
    """Remove a directory of this machine, if there is one."""
    if directory is not None:
        remove_tree(directory)


def _require_no_files(rank: int, part: Part) -> None:
    if part.directory is not None or part.node:
        raise InvalidInput(
            f"rank {rank} reported a checkpoint at step {part.step}, and rank 0 did not: report one on rank 0 too, in "
            "each step in which a rank does"
        )


def merge(directory: Path, parts: Mapping[int, Path]) -> None:
    """Move the files of all `parts` into the directory of rank 0; ranks may have written into one directory.

    Raises:
        InvalidInput: two ranks have files of one name with different bytes, or a file where another has a folder; or a
            file cannot be read.
        StagedFilesChanged: a part is not there any more.
    """
    owners: dict[str, int] = {}
    with naming_unreadable(directory):
        for rank, part in parts.items():
            if directory.exists() and part.exists() and part.samefile(directory):
                continue
            for parent, folders, files in os.walk(part, onerror=_raise):
                for name in (*folders, *files):
                    source = Path(parent, name)
                    path = str(source.relative_to(part))
                    _move(source, directory / path, path, (owners.get(path, 0), rank))
                    owners.setdefault(path, rank)
                folders[:] = [each for each in folders if Path(parent, each).exists()]  # a link to a folder was moved
            remove_directory(part)


def _raise(error: OSError) -> None:
    raise StagedFilesChanged(f"the part of a rank cannot be read: {error}") from error


def _move(source: Path, target: Path, path: str, ranks: tuple[int, int]) -> None:
    """Move a file or a link, unless it is there already; make a folder, whose files follow."""
    is_folder = source.is_dir() and not source.is_symlink()
    if is_folder and (target.is_dir() or not os.path.lexists(target)):
        target.mkdir(exist_ok=True)
    elif not os.path.lexists(target):
        source.rename(target)
    elif source.is_dir() or target.is_dir() or not filecmp.cmp(source, target, shallow=False):
        first, second = ranks
        raise InvalidInput(
            f"{path}: ranks {first} and {second} saved different files of this name: save it on one rank, or put "
            "pt.get_trial().rank into the name"
        )
