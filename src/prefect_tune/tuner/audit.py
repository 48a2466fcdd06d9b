"""Audit an experiment: derive each proposal and decision of its journal again, and name the first one that differs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from prefect_tune.blocks import StorageTarget, resolve_existing
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment, after_event, apply, nothing_yet
from prefect_tune.core.journal.journal import each_entry
from prefect_tune.core.journal_events import Entry, Event, Writer
from prefect_tune.core.storage.generations import current_journal, no_experiment
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import Digest
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.tuner.derivation import Derivation, Expected, Finding, Observed, Unknown, is_same

_TIMEOUT = timedelta(minutes=30)
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class AuditDifference:
    """The first proposal or decision of a journal that differs from the one derived."""

    entry: int
    """The number of its entry in the experiment's journal."""
    trial: str | None
    """Its trial; None if it is of the whole search."""
    expected: str
    """What the search had to decide."""
    found: str
    """What the journal holds."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit: how many events of the journal were derived again, by the type of the event."""

    experiment: str
    """Its name."""
    entry_count: int
    """The entries read: all of them, or those up to the difference."""
    derived: Mapping[str, int]
    """Proposals and decisions that were derived again, and are the same."""
    not_derived: Mapping[str, int]
    """Decisions that cannot be derived, by the reason."""
    observed: Mapping[str, int]
    """Events that are no decisions, such as reports: they are the input of the decisions."""
    difference: AuditDifference | None = None
    """The first difference, at which the audit ended; None if there is none."""

    @property
    def summary(self) -> str:
        """The result in one line: `412 of 412 proposals and decisions derived again`, or the difference."""
        if (found := self.difference) is not None:
            where = f"entry {found.entry}" + (f", trial {found.trial}" if found.trial else "")
            return f"{where}: expected {found.expected}; found {found.found}"
        derived = sum(self.derived.values())
        total = derived + sum(self.not_derived.values())
        return f"{derived:,} of {total:,} proposals and decisions derived again"


def audit(
    experiment: str,
    *,
    target: StorageTarget | str,
    space: object = None,
    search: object = None,
    scheduler: object = None,
    stop: object = None,
) -> AuditReport:
    """Derive each proposal and decision of an experiment again from its journal, and compare them with the journal.

    It only reads, from one object after the other, and imports nothing that only the journal names. What the journal
    does not hold, such as a search of your own, is not derived unless it is passed here; all else is.

    Args:
        experiment: its name on the target.
        target: where the experiment is stored: a block, a `"block-type/name"` slug, or a URI.
        space: the space, where the journal names functions in it, or does not hold it.
        search: the search, where the journal does not hold it, or it is one of Optuna's.
        scheduler: the scheduler, where the journal does not hold it.
        stop: the stop criterion, where the journal names functions in it, or does not hold it.

    Returns:
        AuditReport: what was derived, what was not, and the first difference.

    Raises:
        InvalidInput: there is no such experiment, or a parameter is invalid.
        JournalCorrupt: an entry is missing or altered, or its events are impossible after the ones before.
        UnknownVersion: a newer prefect-tune wrote an entry.
        StoreUnavailable: the target did not answer.
    """
    place = resolve_existing(target)
    given = {"space": space, "search": search, "scheduler": scheduler, "stop": stop}
    with place.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
        key = current_journal(store, experiment)
        entries = each_entry(store, key, side_by_side=transfers)
        report = _Audit(key, Derivation(place, given)).report_on(entries)
        if not report.entry_count:
            raise InvalidInput(no_experiment(store, experiment, place.uri))
        return report


class _DiffersError(Exception):
    """The audit ends here."""


class _Audit:
    """Applies each entry to the state before it, and compares each event first."""

    def __init__(self, key: JournalKey, derivation: Derivation) -> None:
        self._derivation = derivation
        self._state = nothing_yet(key)
        self._derived: Counter[str] = Counter()
        self._not_derived: Counter[str] = Counter()
        self._observed: Counter[str] = Counter()
        self._difference: AuditDifference | None = None

    def report_on(self, entries: Iterable[tuple[Entry, Digest]]) -> AuditReport:
        """Return the report. Raises `JournalCorrupt` if an entry cannot follow the one before."""
        number = 0
        try:
            for entry, digest in entries:
                number = entry.number
                self._derivation.begin(entry)
                self._state = apply(self._state, entry, digest, self._compared)
        except _DiffersError:
            pass
        counts = (dict(self._derived), dict(self._not_derived), dict(self._observed))
        return AuditReport(self._state.name, number, *counts, self._difference)

    def _compared(self, before: Experiment, event: Event, number: int, writer: Writer) -> Experiment:
        self._count(event, self._derivation.finding(before, event), number)
        now = after_event(before, event, number, writer)
        self._derivation.record(before, event, now)
        return now

    def _count(self, event: Event, finding: Finding, number: int) -> None:
        match finding:
            case Observed():
                self._observed[event.type] += 1
            case Unknown(why=why):
                self._not_derived[why] += 1
            case Expected(events=events) if any(is_same(event, each) for each in events):
                self._derived[event.type] += 1
            case Expected(events=events, otherwise=otherwise):
                wanted = " or ".join(_shown(each, event) for each in events) or otherwise
                found = _shown(event, *events[:1])
                self._difference = AuditDifference(number, getattr(event, "trial", None), wanted, found)
                raise _DiffersError


def _shown(event: Event, *others: Event) -> str:
    """Return the type of an event, and its values that differ from those of the first of `others` of this type."""
    other = next((each.model_dump(mode="json") for each in others if each.type == event.type), {})
    long = set() if other else {"report", "fingerprint", "of_search"}
    fields = event.model_dump(mode="json", exclude={"type", *long})
    differing = {name: value for name, value in fields.items() if not other or value != other.get(name)}
    words = ", ".join(f"{name} {json.dumps(value)}" for name, value in differing.items() if other or value)
    text = f"{event.type}: {words}" if words else event.type
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
