"""The interface of a search: it proposes configurations, and receives the reports and ends of their trials."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from prefect_tune.core.models import StepReport
from prefect_tune.core.search.objective import Objective

__all__ = ["Exhausted", "Proposals", "Proposed", "Search", "Suggestion", "Wait"]

Space: TypeAlias = Mapping[str, object]
"""A configuration in which some values are drawn: `{"lr": pt.loguniform(1e-4, 1), "model": {"depth": 3}}`."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """The next trial, with this `config`: JSON, every value of the space resolved."""

    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Wait:
    """No proposal now; ask again when a running trial has ended."""


@dataclass(frozen=True, slots=True)
class Exhausted:
    """There will be no more proposals."""

    reason: str
    """For the log."""


Suggestion: TypeAlias = Proposed | Wait | Exhausted


class Search(ABC):
    """The configuration of a search: a frozen value. Its state is the `Proposals` that `begin` returns."""

    @abstractmethod
    def begin(self, space: Space, objective: Objective | None, seed: int) -> Proposals:
        """Return the proposals for an experiment that has no trial yet.

        Raises:
            InvalidInput: the space holds a domain that this search does not support, or the objective is missing.
        """

    def trial_count(self, space: Space) -> int | None:
        """Return how many trials it proposes for `space` in all; None where that is not known beforehand."""
        del space
        return None


class Proposals(ABC):
    """The state of a search: a deterministic function of the sequence of calls.

    Trials are numbered from 0 in the order in which they were proposed. A resumed experiment replays the journal to a
    new instance, in the journal's order: `recall` in place of each `suggest`, each `reported` and `ended`. From then
    on both suggest the same: draws for trial `number` come from a generator seeded by (seed, number), never from one
    whose state carries over from trial to trial.
    """

    @abstractmethod
    def suggest(self, number: int) -> Suggestion:
        """Propose the configuration of trial `number`, which is one more than the last."""

    @abstractmethod
    def recall(self, number: int, config: Mapping[str, object]) -> None:
        """Record that trial `number` was proposed with `config` before, possibly from another space.

        A configuration that the present space cannot give counts as data, too.
        """

    def reported(self, number: int, report: StepReport) -> None:
        """Record a running trial's report at a milestone."""
        del number, report

    def stopped(self, number: int) -> None:
        """Record that the scheduler stops trial `number` early; `ended` follows."""
        del number

    def ended(self, number: int, last: StepReport | None, *, failed: bool) -> None:
        """Record that a trial has ended, with its last report; None if it has none.

        A trial that is tried again, or trained further, ends again: the last call counts.
        """
        del number, last, failed

    def learn(self, config: Mapping[str, object], last: StepReport, *, stopped: bool) -> bool:
        """Record a finished trial of another experiment, before all other calls; return whether it is used.

        It has no number here, and does not count as a sample. `stopped` says that a scheduler ended it early.
        """
        del config, last, stopped
        return False
