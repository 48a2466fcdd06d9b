"""What a search is: it proposes configurations, and hears what became of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from prefect_tune.core.objective import Objective
from prefect_tune.core.values import StepReport

__all__ = ["Exhausted", "Proposals", "Proposed", "Search", "Suggestion", "Wait"]

Space: TypeAlias = Mapping[str, object]
"""A configuration in which some values are drawn: `{"lr": pt.loguniform(1e-4, 1), "model": {"depth": 3}}`."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """The next trial, with this `config`: JSON, every value of the space resolved."""

    config: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing now; ask again when a running trial has ended."""


@dataclass(frozen=True, slots=True)
class Exhausted:
    """There will be nothing more."""

    reason: str
    """For the log."""


Suggestion: TypeAlias = Proposed | Wait | Exhausted


class Search(ABC):
    """How one is configured: a frozen value. Its state is the `Proposals` that it begins."""

    @abstractmethod
    def begin(self, space: Space, objective: Objective | None, seed: int) -> Proposals:
        """Return the proposals for an experiment that has no trial yet.

        Raises:
            InvalidInput: the space holds what this search cannot draw, or it needs an objective and has none.
        """

    def trial_count(self, space: Space) -> int | None:
        """Return how many trials it proposes for `space` in all; None where only time tells."""
        del space
        return None


class Proposals(ABC):
    """The state of a search: a function of what it was told, in that order, and of nothing else.

    Trials are numbered from 0 in the order in which they were proposed. A resumed experiment tells a new
    one everything that the journal holds, in the journal's order: `recall` in place of each `suggest`, then
    each `reported` and `ended`. From then on both suggest the same: what is drawn for trial `number` comes
    from a generator seeded by (seed, number), never from one that runs on.
    """

    @abstractmethod
    def suggest(self, number: int) -> Suggestion:
        """Propose the configuration of trial `number`, which is one more than the last."""

    @abstractmethod
    def recall(self, number: int, config: Mapping[str, object]) -> None:
        """Hear that trial `number` was proposed with `config`, by an earlier owner or by an earlier space.

        A configuration that the space of today would not give is data all the same.
        """

    def reported(self, number: int, report: StepReport) -> None:
        """Hear what a running trial reported at a milestone."""
        del number, report

    def stopped(self, number: int) -> None:
        """Hear that the scheduler stops trial `number` before its time; that it `ended` follows."""
        del number

    def ended(self, number: int, last: StepReport | None, *, failed: bool) -> None:
        """Hear that a trial is over, and its last report; None if it never made one.

        A trial that is tried again, or trained further, ends again: what was said last counts.
        """
        del number, last, failed

    def learn(self, config: Mapping[str, object], last: StepReport, *, stopped: bool) -> bool:
        """Hear, before anything else, of a finished trial of another experiment; return whether that is of use.

        It is none of this experiment's, has no number here, and counts as no sample. `stopped` says that a
        scheduler ended it before its time.
        """
        del config, last, stopped
        return False
