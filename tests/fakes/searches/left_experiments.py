"""Checks of the experiments that a test has left: each decision is derived again, each second is booked once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

from prefect_tune.core.errors import InvalidInput, TuneError
from prefect_tune.core.experiment.cost import AttemptCost, compute_cost
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal import journal
from prefect_tune.core.journal_events import Entry, OwnerChanged
from prefect_tune.core.messages.target_messages import read_live_status
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.stores.posix_store import PosixStore

_FIRST_ENTRY = "0000000001.json"


def find_differences(folder: Path) -> list[str]:
    """Return a line for each journal below `folder` that a run of a flow has begun and that does not audit clean.

    A journal that cannot be read is left out: a test has damaged it.
    """
    return [line for target, name in _iter_experiments(folder) if (line := _describe_difference(target, name))]


def _iter_experiments(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the target and the name of each experiment that the name means now."""
    for parent, names, _ in os.walk(folder):
        journals = [Path(parent, name, "journal") for name in names if name.isdecimal()]
        is_experiment = any(journal.is_dir() for journal in journals)
        names[:] = [] if is_experiment else [name for name in names if not name.startswith(".")]
        if any(map(_is_written_by_flow, journals)):
            yield Path(parent).parent, Path(parent).name


def _is_written_by_flow(journal: Path) -> bool:
    try:
        first = json.loads((journal / _FIRST_ENTRY).read_text())
        return first["events"][0]["owner"]["flow_run"] is not None
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _describe_difference(target: Path, name: str) -> str:
    from prefect_tune.tuner.audit import audit

    try:
        report = audit(name, target=str(target))
    except InvalidInput as error:
        return f"{target}/{name}: {error}"
    except TuneError:
        return ""
    return f"{target}/{name}: {report.summary}" if report.difference else ""


RELATIVE_TOLERANCE = 0.01
HEARTBEAT = timedelta(seconds=5)
LAST_ENTRY_DELAY = timedelta(seconds=1)
"""What a busy machine may take between the end of the last attempt and the last entry."""
_Span = tuple[datetime, datetime]


def require_booked_seconds(folder: Path) -> int:
    """Check each experiment below `folder`; return how many runs of searches were checked.

    The expected time is that of the journal's entries, which the ledger does not use.
    """
    count = 0
    for path in folder.rglob(f"journal/{_FIRST_ENTRY}"):
        *_, name, generation, _, _ = path.parts
        if generation.isdecimal() and "trials" not in path.relative_to(folder).parts:
            key = JournalKey(experiment=name, generation=int(generation))
            try:
                journal_contents = _read_journal(PosixStore(path.parents[3]), key)
            except (TuneError, ValueError):  # the test has damaged or deleted it, or its times are texts
                continue
            count += _require_cost(*journal_contents)
    return count


def _read_journal(store: PosixStore, key: JournalKey) -> tuple[Experiment, Sequence[Entry], datetime]:
    experiment = journal.load_experiment(store, key)
    entries = journal.read_entries(store, key)
    last = max(datetime.fromisoformat(entry.at) for entry in entries if entry.writer == "owner")
    # Of a killed search the live status tells what became of running trials; while none ran, its entries tell all.
    live = read_live_status(store, experiment) if _has_running_trial(experiment) else None
    return experiment, entries, max(datetime.fromisoformat(live.at), last) if live else last


def _has_running_trial(experiment: Experiment) -> bool:
    return any(trial.status is Status.RUNNING for trial in experiment.trials.values())


def _require_cost(experiment: Experiment, entries: Sequence[Entry], until: datetime) -> int:
    cost, runs = compute_cost(experiment, until), list(_iter_runs(entries, until))
    message = f"{experiment.name}: {cost.seconds}, runs {cost.runs}, by entries {[end - begin for begin, end in runs]}"
    assert all(seconds >= 0 for seconds in cost.seconds.values()), message
    assert all(seconds >= -1e-6 for attempt in cost.attempts for seconds in attempt.seconds.values()), message
    if any(run.slots is None for run in cost.runs) or len(runs) != len(cost.runs):
        return 0
    # The entry that ends a search frees a slot. Nobody sees the end of one that was killed.
    types = [{event.type for event in entry.events} for entry in entries]
    killed_count = sum("opened" in first and "slot-freed" not in last for last, first in pairwise(types))
    # Between two runs, attempts on other machines may go on.
    gaps = [(end, begin) for (_, end), (begin, _) in pairwise(runs)]
    outlived = [
        sum(_seconds_within(gap, attempt) for attempt in cost.attempts if attempt.usage is not None) for gap in gaps
    ]
    unseen = HEARTBEAT * (killed_count + _has_running_trial(experiment) + sum(map(bool, outlived)))
    slots = [run.slots or 0 for run in cost.runs]
    expected = sum((end - begin).total_seconds() * count for (begin, end), count in zip(runs, slots, strict=True))
    expected += sum(outlived)
    absolute_tolerance = max(slots, default=0) * (LAST_ENTRY_DELAY * len(runs) + unseen).total_seconds()
    difference = abs(sum(cost.seconds.values()) - expected)
    assert difference <= max(RELATIVE_TOLERANCE * expected, absolute_tolerance), message
    return len(runs)


def _seconds_within(span: _Span, attempt: AttemptCost) -> float:
    """Return for how many seconds an attempt had its slot in `span`."""
    begin, end = attempt.began_at, attempt.began_at + timedelta(seconds=attempt.total_seconds)
    return max(0.0, (min(end, span[1]) - max(begin, span[0])).total_seconds())


def _iter_runs(entries: Sequence[Entry], until: datetime) -> Iterator[_Span]:
    """Yield the first and the last entry of each owner, or the last sign of life that was seen of a killed one."""
    terms = sorted({entry.term for entry in entries})
    seen = {
        terms[terms.index(entry.term) - 1]: datetime.fromisoformat(event.last_seen_at)
        for entry in entries
        for event in entry.events
        if event.type == "checkpoints-adopted" and event.last_seen_at
    }
    for term in terms:
        of_term = [entry for entry in entries if entry.term == term]
        times = [datetime.fromisoformat(entry.at) for entry in of_term if entry.writer == "owner"]
        assert any(isinstance(event, OwnerChanged) for entry in of_term for event in entry.events)
        yield times[0], max(times[-1], until if term == terms[-1] else seen.get(term, times[-1]))
