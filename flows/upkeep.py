"""What a run of maintenance found and did, as values, and as the page that the Prefect UI shows of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from httpx import HTTPError
from prefect.artifacts import MarkdownArtifact
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from prefect_tune.core.values import digest_of, shown_size

__all__ = ["DamagedCheckpoint", "MaintenanceReport", "NotLookedAt", "Upkeep", "markdown", "show_report"]

_SHOWN_ROWS = 100


@dataclass(frozen=True, slots=True)
class DamagedCheckpoint:
    """Something that is not as it was committed."""

    experiment: str
    trial: str | None
    """None where it is the experiment's journal; of a trial's own journal the step is None."""
    step: int | None
    folder: str
    """Where on the target it lies."""
    damage: str
    is_new: bool
    """Whether no run of maintenance has told of it."""
    is_aside: bool
    """Whether it was put aside, so that nobody goes on from it."""


@dataclass(frozen=True, slots=True)
class NotLookedAt:
    """What this run left to the next one, or cannot do, and why."""

    experiment: str
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What was found and done in one experiment."""

    experiment: str
    live_count: int = 0
    verified_count: int = 0
    verified_bytes: int = 0
    unread_count: int = 0
    """Checkpoints of this sample for which the limits left no room."""
    damaged: tuple[DamagedCheckpoint, ...] = ()
    pruned_count: int = 0
    """Checkpoints that were retired."""
    collected_count: int = 0
    """Objects that were deleted, or in a dry run would be."""
    collected_bytes: int = 0
    undecided_count: int = 0
    """Objects that a save under way may still use."""
    not_looked_at: tuple[NotLookedAt, ...] = ()


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """What a run of `pt.maintain` found and did."""

    target: str
    """The target's URI."""
    experiments: tuple[Upkeep, ...]
    """What was found and done, an experiment each."""
    not_looked_at: tuple[NotLookedAt, ...]
    """What there was no time for, or what could not be read, and why."""
    dry_run: bool
    """Whether nothing was written or deleted."""

    @property
    def damaged(self) -> Sequence[DamagedCheckpoint]:
        """All damage that was found, told of before or not."""
        return [damaged for each in self.experiments for damaged in each.damaged]

    @property
    def new_damage(self) -> Sequence[DamagedCheckpoint]:
        """The damage that no run has told of."""
        return [each for each in self.damaged if each.is_new]

    @property
    def verified_count(self) -> int:
        """How many checkpoints were read."""
        return sum(each.verified_count for each in self.experiments)

    @property
    def collected_bytes(self) -> int:
        """How much was deleted, or in a dry run would be."""
        return sum(each.collected_bytes for each in self.experiments)

    @property
    def summary(self) -> str:
        """All of it in a line."""
        size = sum(each.verified_bytes for each in self.experiments)
        would = "would be " if self.dry_run else ""
        pruned = sum(each.pruned_count for each in self.experiments)
        left = f"; {len(self.not_looked_at)} things not looked at" if self.not_looked_at else ""
        return (
            f"{len(self.experiments)} experiments: {self.verified_count} checkpoints read ({shown_size(size)}), "
            f"{len(self.damaged)} damaged, {len(self.new_damage)} of them new; {pruned} {would}pruned, "
            f"{shown_size(self.collected_bytes)} {would}deleted{left}"
        )

    @property
    def alarm(self) -> str:
        """What is damaged and new, in a line."""
        first = self.new_damage[0]
        more = f" and {len(self.new_damage) - 1} more" if len(self.new_damage) > 1 else ""
        aside = "; what is damaged was put aside" if all(each.is_aside for each in self.new_damage) else ""
        return f"{self.target}: {first.folder}{more} damaged, and not told of before{aside}: {first.damage}"


def show_report(report: MaintenanceReport) -> bool:
    """Make the report an artifact of the run, and return whether it is one.

    Best effort: what was done is done, and the result says it too; but what nobody has seen is told again.
    """
    plain = re.sub(r"[^a-z0-9-]+", "-", report.target.lower()).strip("-")[-40:].strip("-")
    key = f"maintenance-{plain}-{digest_of(report.target.encode())[:6]}"
    try:
        MarkdownArtifact(key=key, markdown=markdown(report), description="Maintenance report").create()
    except (PrefectException, HTTPError, OSError) as error:
        get_run_logger().warning("the report is not shown: %s: %s", type(error).__name__, error)
        return False
    return True


def markdown(report: MaintenanceReport) -> str:
    """Return the page: what is wrong first, then what was done, then what was not."""
    what = "Dry run: nothing on the target was changed" if report.dry_run else "Maintenance"
    sign = "🔴" if report.new_damage else "🟠" if report.damaged else "✅"
    return "\n".join(
        [
            f"# {what}",
            "",
            f"{sign} `{report.target}`",
            "",
            f"{report.summary}.",
            "",
            *_section("Damaged", ("experiment", "trial", "step", "new", "put aside", "what"), _damaged(report)),
            *_section(
                "Experiments",
                ("experiment", "checkpoints", "read", "size", "damaged", "pruned", "deleted", "freed", "undecided"),
                _done(report),
            ),
            *_section("Not looked at", ("experiment", "what", "why"), _left(report)),
        ]
    )


def _damaged(report: MaintenanceReport) -> Iterable[Sequence[object]]:
    for each in report.damaged:
        new, aside = ("yes" if each.is_new else "no"), ("yes" if each.is_aside else "no")
        step = "journal" if each.step is None else each.step
        yield each.experiment, each.trial or "", step, new, aside, each.damage


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
    """Text is somebody's: it must not end the cell, or start markup."""
    line = " ".join(text.split())
    return re.sub(r"([|<>\[\]`])", r"\\\1", line if len(line) <= 300 else f"{line[:299]}…")
