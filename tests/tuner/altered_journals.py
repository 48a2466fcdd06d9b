"""Alter one decision of a journal, and compute the chain of digests again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_tune.core.journal.journal import decode_entry
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCloned,
    DecisionMade,
    Entry,
    Event,
    FinishKind,
    StepReported,
    StopRequested,
    TrialAdded,
    TrialFinished,
    TrialPaused,
    TrialResumed,
)
from prefect_tune.core.reasons import AnyReason, Reason, make_reason
from prefect_tune.core.schedulers.base import Continue, Exploit, Pause, Stop
from prefect_tune.core.storage.documents import seal
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import hash_bytes


@dataclass(frozen=True)
class Alteration:
    """One event of a journal, and the events that replace it."""

    entry: int
    kind: str
    index: int
    """Of the event in the entry."""
    events: tuple[Event, ...]


def load_entries(target: Path, key: JournalKey) -> list[Entry]:
    paths = sorted((target / key.entries_folder).iterdir())
    return [decode_entry(path.read_bytes(), f"{key.entries_folder}/{path.name}") for path in paths]


def iter_alterations(entries: Sequence[Entry]) -> Iterator[Alteration]:
    """Yield every alteration of a proposal or decision, in journal order."""
    trials = [event.trial for entry in entries for event in entry.events if isinstance(event, TrialAdded)]
    running: set[str] = set()
    for entry in entries:
        for index, event in enumerate(entry.events):
            for kind, changes in _iter_changes(event, trials, running):
                yield Alteration(entry.number, kind, index, (event.model_copy(update=changes),))
            if isinstance(event, AttemptStarted):
                running.add(event.trial)
            elif isinstance(event, AttemptEnded | TrialFinished | TrialPaused):
                running.discard(event.trial)


def _iter_changes(event: Event, trials: Sequence[str], running: set[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    match event:
        case TrialAdded():
            yield "configuration", {"config": {**event.config, "width": 10}}
            yield "trial", {"trial": f"{int(event.trial) + 1:05d}"}
        case DecisionMade(decision=decision):
            yield from ((kind, {"decision": other}) for kind, other in _iter_decisions(decision, event.trial, trials))
        case TrialResumed():
            yield "resumed trial", {"trial": next(other for other in trials if other != event.trial)}
        case TrialFinished(kind=kind) if event.trial not in running:  # else it is the end of an attempt
            yield "end", {"reason": _alter_reason(event.reason)}
            yield from (("kind of end", {"kind": other}) for other in FinishKind if other is not kind)
        case CheckpointCloned(config=config, source=source):
            yield "configuration of a clone", {"config": {**(config or {}), "lr": 7.0}}
            yield "source of a clone", {"source": next(other for other in trials if other not in (event.trial, source))}
        case StopRequested(request=None):
            yield event.type, {"reason": _alter_reason(event.reason)}
        case _:
            pass


def _alter_reason(reason: AnyReason) -> Reason:
    assert isinstance(reason, Reason), f"an audit does not compare texts: {reason}"
    return make_reason(reason.code, **reason.arguments, altered=True)


def iter_inconsistencies(entries: Sequence[Entry]) -> Iterator[Alteration]:
    """Yield alterations that remove or repeat a decision, or change its report."""
    for entry in entries:
        for index, event in enumerate(entry.events):
            for kind, events in _iter_inconsistencies(event):
                yield Alteration(entry.number, kind, index, events)
            if isinstance(event, DecisionMade) and _has_later_report(entries, entry.number, event):
                yield Alteration(entry.number, "no decision", index, ())


def _has_later_report(entries: Sequence[Entry], number: int, decision: DecisionMade) -> bool:
    """Whether the attempt reports a later step after the decision, before another attempt starts."""
    for event in (event for entry in entries if entry.number > number for event in entry.events):
        match event:
            case StepReported(trial=decision.trial, report=report) if report.step > decision.report.step:
                return True
            case AttemptStarted(trial=decision.trial):
                return False
            case _:
                pass
    return False


def _iter_inconsistencies(event: Event) -> Iterator[tuple[str, tuple[Event, ...]]]:
    match event:
        case DecisionMade(report=report):
            changed = report.model_copy(update={"metrics": {**report.metrics, "added": 1.0}})
            yield "report of a decision", (event.model_copy(update={"report": changed}),)
            yield "decision twice", (event, event)
            yield "decision after another report", (StepReported(trial=event.trial, report=changed), event)
            later = report.model_copy(update={"step": report.step + 1})
            yield "decision at a later step", (event.model_copy(update={"report": later}),)
        case StepReported(trial=trial, report=report):
            yield "decision of an attempt", (event, DecisionMade(trial=trial, report=report, decision=Continue()))
        case _:
            pass


def _iter_decisions(decision: object, trial: str, trials: Sequence[str]) -> Iterator[tuple[str, object]]:
    match decision:
        case Continue():
            yield "stop for continue", Stop(reason="not good enough")
            yield "pause for continue", Pause(reason="not good enough")
        case Stop() | Pause():
            yield f"continue for {decision.type}", Continue()
            yield f"reason of {decision.type}", decision.model_copy(update={"reason": _alter_reason(decision.reason)})
        case Exploit():
            other = next(other for other in trials if other not in (trial, decision.source))
            yield "donor", decision.model_copy(update={"source": other})
            yield "explored configuration", decision.model_copy(update={"config": {**decision.config, "lr": 7.0}})


def write_altered_journal(target: Path, key: JournalKey, entries: Sequence[Entry], alteration: Alteration) -> None:
    """Write the altered journal to another target; later entries contain the new digests."""
    folder, digest = target / key.entries_folder, ""
    folder.mkdir(parents=True)
    for entry in entries:
        is_altered = entry.number == alteration.entry
        events_before, events_after = entry.events[: alteration.index], entry.events[alteration.index + 1 :]
        events = (*events_before, *alteration.events, *events_after) if is_altered else entry.events
        data = seal(entry.model_copy(update={"events": events, "previous": digest}))
        (target / key.entry_path(entry.number)).write_bytes(data)
        digest = hash_bytes(data)
