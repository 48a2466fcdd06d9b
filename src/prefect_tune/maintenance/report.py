"""The report of a maintenance run: values, and a Markdown page for the Prefect UI."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from httpx import HTTPError
from prefect.artifacts import MarkdownArtifact
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from prefect_tune.core.models import digest_of, plural, shown_size
from prefect_tune.core.texts import visible

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
    is_aside: bool
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
        aside = ", and quarantined" if all(each.is_aside for each in self.damaged) else ""
        return f"{self.target}: {first.folder}{more} damaged{aside}: {first.damage}"


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
        aside = "yes" if each.is_aside else "no"
        step = "journal" if each.step is None else each.step
        yield each.experiment, each.trial or "", step, aside, each.damage


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
