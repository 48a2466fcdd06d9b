"""Journals in which one decision is altered, and the chain of digests made anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_tune.core.journal.journal import decode_entry
from prefect_tune.core.journal_events import (
    Absorbed,
    AttemptEnded,
    Cause,
    Cloned,
    Committed,
    Decided,
    Entry,
    Event,
    Finished,
    FinishKind,
    GaveUp,
    Paused,
    Quarantined,
    Reported,
    Requeued,
    Resumed,
    Started,
    StopAsked,
    TrialAdded,
)
from prefect_tune.core.reasons import AnyReason, Reason, make_reason
from prefect_tune.core.schedulers.base import Continue, Exploit, Pause, Stop
from prefect_tune.core.storage.documents import seal
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import digest_of


@dataclass(frozen=True)
class Alteration:
    """One event of a journal, and what stands in its place."""

    entry: int
    kind: str
    place: tuple[int, int | None]
    """The index of the event in the entry, and of the event in that if it is absorbed."""
    events: tuple[Event, ...]


def entries_of(target: Path, key: JournalKey) -> list[Entry]:
    paths = sorted((target / key.entries).iterdir())
    return [decode_entry(path.read_bytes(), f"{key.entries}/{path.name}") for path in paths]


def alterations_of(entries: Sequence[Entry]) -> Iterator[Alteration]:
    """Yield every alteration of a proposal or decision, in the order of the journal."""
    trials = [event.trial for entry in entries for event in entry.events if isinstance(event, TrialAdded)]
    for entry in entries:
        for index, event in enumerate(entry.events):
            inner = event.events if isinstance(event, Absorbed) else (event,)
            for within, each in enumerate(inner):
                place = (index, within if isinstance(event, Absorbed) else None)
                if isinstance(each, TrialAdded) and place[1] is not None:
                    continue  # a copy of the proposal
                for kind, changes in _changes(each, trials):
                    yield Alteration(entry.number, kind, place, (each.model_copy(update=changes),))


def _changes(event: Event, trials: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    match event:
        case TrialAdded():
            yield "configuration", {"config": {**event.config, "width": 10}}
            yield "trial", {"trial": f"{int(event.trial) + 1:05d}"}
        case Decided(decision=decision):
            yield from ((kind, {"decision": each}) for kind, each in _decisions(decision, event.trial, trials))
        case Resumed():
            yield "resumed trial", {"trial": next(each for each in trials if each != event.trial)}
        case Finished(kind=kind) if kind is not FinishKind.RETURNED:
            yield "end", {"reason": _alter_reason(event.reason)}
            others = [other for other in FinishKind if other is not kind]
            yield from (("kind of end", {"kind": other}) for other in others)
        case Paused() | Requeued() | StopAsked(request=None) | GaveUp() | Quarantined(kills=True):
            yield event.type, {"reason": _alter_reason(event.reason)}
        case Committed(retires=(_, *_)):
            yield "retention", {"retires": ()}
        case Cloned():
            yield "clone", {"config": {**(event.config or {}), "lr": 7.0}}
        case _:
            pass


def _alter_reason(reason: AnyReason) -> Reason:
    assert isinstance(reason, Reason), f"an audit does not compare texts: {reason}"
    return make_reason(reason.code, **reason.arguments, altered=True)


def inconsistencies_of(entries: Sequence[Entry], config: Mapping[str, Any]) -> Iterator[Alteration]:
    """Yield alterations after which a value differs from its copy, or an event is where no release writes it."""
    for entry in entries:
        for index, event in enumerate(entry.events):
            inner = event.events if isinstance(event, Absorbed) else (event,)
            for within, each in enumerate(inner):
                place = (index, within if isinstance(event, Absorbed) else None)
                for kind, events in _inconsistencies(each, config):
                    yield Alteration(entry.number, kind, place, events)
                if isinstance(each, Decided) and _trains_on(entries, entry.number, each):
                    yield Alteration(entry.number, "no decision", place, ())
                if isinstance(each, Reported) and _is_last(entries, each):
                    yield Alteration(entry.number, "no last report", place, ())


def _is_last(entries: Sequence[Entry], reported: Reported) -> bool:
    """Whether a decision is about the report, and the attempt reports nothing more and ends by itself."""
    outer = [event for entry in entries for event in entry.events]
    events = [each for event in outer for each in (event.events if isinstance(event, Absorbed) else (event,))]
    of_trial = [each for each in events if getattr(each, "trial", None) == reported.trial]
    steps = [each.report.step for each in of_trial if isinstance(each, Decided)]
    later = of_trial[of_trial.index(reported) + 1 :]
    kinds = (Reported, Paused, Finished, AttemptEnded, Started)
    following = next((each for each in later if isinstance(each, kinds)), None)
    return reported.report.step in steps and isinstance(following, Paused | Finished)


def _trains_on(entries: Sequence[Entry], number: int, decided: Decided) -> bool:
    """Whether the attempt reports a later step after the decision, before another attempt starts."""
    later = (event for entry in entries if entry.number > number for event in entry.events)
    inner = (each for event in later for each in (event.events if isinstance(event, Absorbed) else ()))
    for event in inner:
        match event:
            case Reported(trial=decided.trial, report=report) if report.step > decided.report.step:
                return True
            case Started(trial=decided.trial):
                return False
            case _:
                pass
    return False


def _inconsistencies(event: Event, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Event, ...]]]:
    match event:
        case Decided(report=report):
            metrics = {**report.metrics, "added": 1.0}
            yield (
                "report of a decision",
                (event.model_copy(update={"report": report.model_copy(update={"metrics": metrics})}),),
            )
            yield "decision twice", (event, event)
        case Committed(checkpoint=checkpoint):
            metrics = {name: value + 1e-9 for name, value in checkpoint.metrics.items()}
            changed = checkpoint.model_copy(update={"metrics": metrics})
            yield "metrics of a checkpoint", (event.model_copy(update={"checkpoint": changed}),)
            later = checkpoint.model_copy(update={"step": checkpoint.step + 500})
            yield "step of a checkpoint", (event.model_copy(update={"checkpoint": later}),)
        case Reported(trial=trial, report=report):
            decided = Decided(trial=trial, report=report, decision=Continue())
            yield "decision of an attempt", (event, decided)
            yield "end by an attempt", (event, GaveUp(trial=trial, cause=Cause.USER, reason="gave up"))
        case Cloned():
            yield "configuration of a clone", (event.model_copy(update={"config": config}),)
        case _:
            pass


def _decisions(decision: object, trial: str, trials: Sequence[str]) -> Iterator[tuple[str, object]]:
    match decision:
        case Continue():
            yield "stop for continue", Stop(reason="not good enough")
            yield "pause for continue", Pause(reason="not good enough")
        case Stop() | Pause():
            yield f"continue for {decision.type}", Continue()
            yield f"reason of {decision.type}", decision.model_copy(update={"reason": _alter_reason(decision.reason)})
        case Exploit():
            other = next(each for each in trials if each not in (trial, decision.source))
            yield "donor", decision.model_copy(update={"source": other})
            yield "explored configuration", decision.model_copy(update={"config": {**decision.config, "lr": 7.0}})


def write_altered(target: Path, key: JournalKey, entries: Sequence[Entry], alteration: Alteration) -> None:
    """Write the journal with this alteration to another target; the entries after it name the new digests."""
    folder, digest = target / key.entries, ""
    folder.mkdir(parents=True)
    for entry in entries:
        is_altered = entry.number == alteration.entry
        events = _with(entry.events, alteration) if is_altered else entry.events
        data = seal(entry.model_copy(update={"events": events, "previous": digest}))
        (target / key.entry_path(entry.number)).write_bytes(data)
        digest = digest_of(data)


def _with(events: tuple[Event, ...], alteration: Alteration) -> tuple[Event, ...]:
    index, within = alteration.place
    changed, outer = alteration.events, events[index]
    if within is not None and isinstance(outer, Absorbed):
        inner = (*outer.events[:within], *changed, *outer.events[within + 1 :])
        changed = (outer.model_copy(update={"events": inner}),)
    return (*events[:index], *changed, *events[index + 1 :])
