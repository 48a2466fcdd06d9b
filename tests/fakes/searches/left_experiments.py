"""Checks of the experiments that a test has left: each decision is derived again, each second is booked once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

from prefect_tune.core.errors import InvalidInput, TuneError
from prefect_tune.core.experiment.cost import AttemptCost, ExperimentCost, compute_cost
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
    return [found for target, name in _journals_below(folder) if (found := _difference(target, name))]


def _journals_below(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the target and the name of each experiment that the name means now."""
    for place, folders, _ in os.walk(folder):
        journals = [Path(place, each, "journal") for each in folders if each.isdecimal()]
        is_experiment = any(each.is_dir() for each in journals)
        folders[:] = [] if is_experiment else [each for each in folders if not each.startswith(".")]
        if any(map(_is_of_a_flow, journals)):
            yield Path(place).parent, Path(place).name


def _is_of_a_flow(journal: Path) -> bool:
    try:
        first = json.loads((journal / _FIRST_ENTRY).read_text())
        return first["events"][0]["owner"]["flow_run"] is not None
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _difference(target: Path, name: str) -> str:
    from prefect_tune.tuner.audit import audit

    try:
        report = audit(name, target=str(target))
    except InvalidInput as error:
        return f"{target}/{name}: {error}"
    except TuneError:
        return ""
    return f"{target}/{name}: {report.summary}" if report.difference else ""


SHARE = 0.01
HEARTBEAT = timedelta(seconds=5)
MOMENT = timedelta(seconds=1)
"""What a busy machine may take between the end of the last attempt and the last entry."""
_Span = tuple[datetime, datetime]


def require_booked_seconds(folder: Path) -> int:
    """Check each experiment below `folder`; return how many runs of searches were checked.

    The expected time is that of the journal's entries, which the ledger does not use.
    """
    count = 0
    for place in folder.rglob("journal/0000000001.json"):
        *_, name, generation, _, _ = place.parts
        if generation.isdecimal() and "trials" not in place.relative_to(folder).parts:
            key = JournalKey(experiment=name, generation=int(generation))
            try:
                found = _read(PosixStore(place.parents[3]), key)
            except (TuneError, ValueError):  # the test has damaged or deleted it, or its times are texts
                continue
            count += _require(*found)
    return count


def _read(store: PosixStore, key: JournalKey) -> tuple[Experiment, Sequence[Entry], datetime]:
    experiment = journal.load_experiment(store, key)
    entries = journal.read_entries(store, key)
    last = max(datetime.fromisoformat(each.at) for each in entries if each.writer == "owner")
    # Of a killed search the live status tells what became of running trials; while none ran, its entries tell all.
    live = read_live_status(store, experiment) if _is_running(experiment) else None
    return experiment, entries, max(datetime.fromisoformat(live.at), last) if live else last


def _is_running(experiment: Experiment) -> bool:
    return any(each.status is Status.RUNNING for each in experiment.trials.values())


def _require(experiment: Experiment, entries: Sequence[Entry], until: datetime) -> int:
    cost, runs = compute_cost(experiment, until), list(_runs(entries, until))
    said = f"{experiment.name}: {cost.seconds}, runs {cost.runs}, by entries {[end - begin for begin, end in runs]}"
    assert all(found >= 0 for found in cost.seconds.values()), said
    assert all(found >= -1e-6 for each in cost.attempts for found in each.seconds.values()), said
    if any(each.slots is None for each in cost.runs) or len(runs) != len(cost.runs):
        return 0
    # The entry that ends a search frees a slot. Nobody sees the end of one that was killed.
    types = [{event.type for event in each.events} for each in entries]
    killed_count = sum("opened" in first and "slot-freed" not in last for last, first in pairwise(types))
    outlived = [sum(_held_in(gap, each) for each in cost.attempts if each.usage is not None) for gap in _gaps(runs)]
    unseen = HEARTBEAT * (killed_count + _is_running(experiment) + sum(map(bool, outlived)))
    _require_sum(cost, runs, sum(outlived), said, unseen=unseen)
    return len(runs)


def _require_sum(
    cost: ExperimentCost, runs: Sequence[_Span], outlived_seconds: float, said: str, *, unseen: timedelta
) -> None:
    slots = [each.slots or 0 for each in cost.runs]
    expected = sum((end - begin).total_seconds() * count for (begin, end), count in zip(runs, slots, strict=True))
    expected += outlived_seconds
    tolerance = max(SHARE * expected, max(slots, default=0) * (MOMENT * len(runs) + unseen).total_seconds())
    assert abs(sum(cost.seconds.values()) - expected) <= tolerance, said


def _gaps(runs: Sequence[_Span]) -> Sequence[_Span]:
    """Return the times between two runs, in which attempts on other machines may go on."""
    return [(end, begin) for (_, end), (begin, _) in pairwise(runs)]


def _held_in(span: _Span, attempt: AttemptCost) -> float:
    """Return for how many seconds an attempt had its slot in `span`."""
    begin, end = attempt.began_at, attempt.began_at + timedelta(seconds=attempt.total_seconds)
    return max(0.0, (min(end, span[1]) - max(begin, span[0])).total_seconds())


def _runs(entries: Sequence[Entry], until: datetime) -> Iterator[_Span]:
    """Yield the first and the last entry of each owner, or the last sign of life that was seen of a killed one."""
    terms = sorted({each.term for each in entries})
    seen = {
        terms[terms.index(each.term) - 1]: datetime.fromisoformat(event.last_seen_at)
        for each in entries
        for event in each.events
        if event.type == "checkpoints-adopted" and event.last_seen_at
    }
    for term in terms:
        mine = [datetime.fromisoformat(each.at) for each in entries if each.term == term and each.writer == "owner"]
        assert any(isinstance(event, OwnerChanged) for each in entries if each.term == term for event in each.events)
        yield mine[0], max(mine[-1], until if term == terms[-1] else seen.get(term, mine[-1]))
