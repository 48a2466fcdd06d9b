"""An audit derives each proposal and decision of a journal again, and names the first that differs."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import InvalidInput, JournalCorrupt
from prefect_tune.core.journal.journal import append_events, load_experiment
from prefect_tune.core.journal_events import Cause, DecisionMade, Entry, OwnerChanged, TrialAdded
from prefect_tune.core.schedulers.base import Continue
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import StepReport, WriteStamp
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.searches.experiments import write_experiment
from tests.fakes.searches.left_experiments import find_differences
from tests.fakes.searches.planned_search import STEPS, PlannedSearch, UnreliableExecutor
from tests.fakes.untrusted import VECTORS, Untrusted, make_untrusted_target, write_settings
from tests.long_cases import long_after
from tests.tuner.altered_journals import (
    Alteration,
    iter_alterations,
    iter_inconsistencies,
    load_entries,
    write_altered_journal,
)

KEY = JournalKey(experiment="e", generation=1)
FAILS = {"00001": (Cause.TRAINABLE, 1), "00003": (Cause.TRAINABLE, 9), "00004": (Cause.OUT_OF_MEMORY, 1)}
FindTarget = Callable[[str], LocalTarget]
SEARCHES: Mapping[str, Mapping[str, Any]] = {
    "fifo": {},
    "asha": {"scheduler": pt.ASHA(STEPS, variant="stopping"), "failures": pt.FailurePolicy(max_failures=1)},
    "promotion": {"scheduler": pt.ASHA(STEPS, variant="promotion", brackets=2)},
    "hyperband": {"scheduler": pt.Hyperband(STEPS)},
    "median": {"scheduler": pt.MedianStopping(grace_period=2, min_samples_required=2)},
    "turns": {"scheduler": pt.MedianStopping(interval=2, min_samples_required=3, min_time_slice=3)},
    "pbt": {"scheduler": pt.PBT(2, {"lr": pt.loguniform(1e-4, 1e-1)}), "retention": pt.Retention(last=1, every=4)},
    "failures": {"stop": {"step": STEPS, "MaxFailures": {"failures": 2}}, "failures": pt.FailurePolicy(max_failures=1)},
    "fail-fast": {"fail_fast": True, "failures": pt.FailurePolicy(max_failures=1)},
    "plateau": {"stop": [pt.Plateau("loss", std=0.05, reports=3, grace=3), {"step": STEPS}]},
}


def run_interrupted_search(folder: Path, name: str) -> LocalTarget:
    """Run one of the searches until it is interrupted, and again to its end, with more samples."""
    target = LocalTarget(path=str(folder / name))
    fails = FAILS if name in ("asha", "failures", "fail-fast") else {}
    executor = UnreliableExecutor(failures=fails, retention=SEARCHES[name].get("retention"), seed=1)
    search, polls = PlannedSearch(target, executor=executor), count()
    search.run(lambda: next(polls) > 40, **SEARCHES[name])
    search.run(**SEARCHES[name], num_samples=14, rerun_errored=name == "asha")
    return target


@pytest.fixture(scope="module")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> FindTarget:
    return cache(partial(run_interrupted_search, tmp_path_factory.mktemp("audited")))


@pytest.mark.parametrize("name", long_after(4, SEARCHES))
def test_every_decision_of_a_search_that_was_interrupted_and_extended_is_derived_again(
    name: str, target_of: FindTarget
) -> None:
    report = pt.audit("e", target=target_of(name))
    assert report.difference is None, report.summary
    assert report.not_derived == {}
    total = sum(report.derived.values())
    assert report.summary == f"{total:,} of {total:,} proposals and decisions derived again"
    events = [event for entry in load_entries(Path(target_of(name).path), KEY) for event in entry.events]
    assert sum(report.derived.values()) + sum(report.observed.values()) == len(events)
    assert "trial-added" not in report.observed, "each trial is counted once, as a proposal"


def test_results_that_arrived_in_another_order_decide_otherwise_and_audit_clean(tmp_path: Path) -> None:
    decisions = []
    for seed in (None, 1, 2):
        search = PlannedSearch(LocalTarget(path=str(tmp_path / str(seed))), executor=UnreliableExecutor(seed=seed))
        search.run(scheduler=pt.ASHA(STEPS, variant="promotion"))
        assert pt.audit("e", target=search.target).difference is None
        entries = load_entries(Path(search.target.path), KEY)
        decisions.append([event for entry in entries for event in entry.events if isinstance(event, DecisionMade)])
    assert decisions[0] != decisions[1] != decisions[2]


def test_an_audit_only_reads(target_of: FindTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an audit writes")

    target = target_of("asha")
    before = {path: path.stat().st_mtime_ns for path in Path(target.path).rglob("*")}
    for name in ("create", "put", "delete"):
        monkeypatch.setattr(PosixStore, name, refuse)
    assert pt.audit("e", target=target).difference is None
    assert {path: path.stat().st_mtime_ns for path in Path(target.path).rglob("*")} == before


@pytest.mark.parametrize("road", VECTORS)
def test_an_audit_runs_no_code_that_only_the_journal_names(
    road: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untrusted = make_untrusted_target(tmp_path, monkeypatch)
    untrusted.forge(road)
    write_decision(untrusted)
    report = pt.audit("e", target=untrusted.target)
    assert report.derived or report.not_derived or report.difference
    assert untrusted.module not in sys.modules
    assert not untrusted.marker.exists()


def write_decision(untrusted: Untrusted) -> None:
    """Journal a proposal and a decision; to audit them, all parts of the search are needed."""
    stamps = (WriteStamp(write_id=f"p{number}", at="now") for number in count())
    with untrusted.target.open(timeout=timedelta(seconds=9)) as store:
        state = load_experiment(store, KEY)
        state = append_events(
            store, state, [TrialAdded(trial="00000", config={"x": 1.0}, proposed_by_search=True)], next(stamps)
        )
        decision = DecisionMade(trial="00000", report=StepReport(step=1, metrics={"loss": 1.0}), decision=Continue())
        append_events(store, state, [decision], next(stamps))


class _CountingSearch(pt.Search):
    """Proposes the number of the trial."""

    def begin(self, space: Mapping[str, object], objective: pt.Objective | None, seed: int) -> pt.SearchState:
        del space, objective, seed
        return _CountingState()


class _CountingState(pt.SearchState):
    def suggest(self, number: int) -> pt.Proposed | pt.Exhausted:
        return pt.Proposed({"lr": float(number)}) if number < 5 else pt.Exhausted("enough")

    def restore_trial(self, number: int, config: Mapping[str, object]) -> None:
        pass


def test_a_search_of_ones_own_is_audited_once_it_is_passed_and_all_else_without_it(tmp_path: Path) -> None:
    search = PlannedSearch(LocalTarget(path=str(tmp_path)))
    search.run(search=_CountingSearch(), num_samples=None, scheduler=pt.ASHA(STEPS, variant="stopping"))
    report = pt.audit("e", target=search.target)
    assert report.difference is None
    assert list(report.not_derived.values()) == [5]
    assert "pass it: search=..., or --search MODULE:NAME" in next(iter(report.not_derived))
    assert "decision-made" in report.derived
    report_with_search = pt.audit("e", target=search.target, search=_CountingSearch())
    assert (report_with_search.not_derived, report_with_search.derived["trial-added"]) == ({}, 5)
    report_with_another = pt.audit("e", target=search.target, search=pt.RandomSearch(5))
    assert report_with_another.difference is not None
    assert report_with_another.difference.expected.startswith('trial-added: config {"lr": 0.000')


def test_a_scheduler_and_a_stop_of_ones_own_are_audited_once_they_are_passed(tmp_path: Path) -> None:
    executor, failures = UnreliableExecutor(failures={"00001": (Cause.TRAINABLE, 9)}), pt.MaxFailures(1)
    search = PlannedSearch(LocalTarget(path=str(tmp_path)), executor=executor)
    search.run(scheduler=_OwnScheduler(), stop=[lambda metrics: metrics["step"] >= STEPS, failures])
    report = pt.audit("e", target=search.target)
    assert report.difference is None
    assert {reason.partition(":")[0] for reason in report.not_derived} == {"scheduler", "stop"}
    report_with_both = pt.audit("e", target=search.target, scheduler=_OwnScheduler(), stop=failures)
    assert (report_with_both.difference, report_with_both.not_derived) == (None, {})


class _OwnScheduler(pt.Scheduler):
    """ASHA, under a name that the journal does not know."""

    def begin(self, objective: pt.Objective, seed: int) -> pt.Schedule:
        return pt.ASHA(STEPS, variant="promotion").begin(objective, seed)


def test_a_training_outside_a_search_decides_nothing(tmp_path: Path) -> None:
    write_experiment(tmp_path, "digits", [2, 4])
    report = pt.audit("digits", target=str(tmp_path))
    assert (report.derived, report.not_derived, report.difference) == ({}, {}, None)
    assert report.observed["checkpoint-committed"] == 2


def test_what_cannot_be_audited_is_an_error(target_of: FindTarget, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="'none'"):
        pt.audit("none", target=target_of("fifo"))
    write_settings(LocalTarget(path=str(tmp_path / "odd")), "e", {"scheduler": {"ASHA": {}}})
    with pytest.raises(InvalidInput, match="scheduler"):
        pt.audit("e", target=str(tmp_path / "odd"))
    entries = load_entries(Path(target_of("fifo").path), KEY)
    folder = tmp_path / "damaged"
    write_altered_journal(folder, KEY, entries, Alteration(2, "none", 0, entries[1].events[:1]))
    (folder / KEY.entry_path(3)).write_bytes((folder / KEY.entry_path(4)).read_bytes())
    with pytest.raises(JournalCorrupt, match="0000000003"):
        pt.audit("e", target=str(folder))


# Altered journals: every kind of decision, and the chain of digests made anew.


def choose_alterations(target_of: FindTarget, number: int) -> Iterator[tuple[str, list[Entry], Alteration]]:
    """Yield `number` alterations of all searches, every kind as often as there are enough."""
    candidates = [
        (name, entries, alteration)
        for name in SEARCHES
        for entries in [load_entries(Path(target_of(name).path), KEY)]
        for alteration in iter_alterations(entries)
    ]
    random.Random(0).shuffle(candidates)
    times: Counter[str] = Counter()
    ranked = []
    for candidate in candidates:
        ranked.append((times[candidate[2].kind], candidate))
        times[candidate[2].kind] += 1
    assert 12 <= len(times) <= number, times
    yield from (candidate for _, candidate in sorted(ranked, key=lambda pair: pair[0])[:number])


def find_missed_alterations(target_of: FindTarget, folder: Path, number: int) -> list[str]:
    """Return those of `number` alterations at whose entry the audit finds no difference."""
    missed = []
    for index, (name, entries, alteration) in enumerate(choose_alterations(target_of, number)):
        path = folder / str(index)
        write_altered_journal(path, KEY, entries, alteration)
        difference = pt.audit("e", target=str(path)).difference
        if difference is None or difference.entry != alteration.entry:
            missed.append(f"{name}, entry {alteration.entry}, {alteration.kind}: {difference}")
    return missed


def test_a_changed_decision_of_each_kind_is_named_at_its_entry(target_of: FindTarget, tmp_path: Path) -> None:
    assert find_missed_alterations(target_of, tmp_path, 18) == []


def test_a_search_that_ended_by_its_errors_and_begins_them_again_audits_clean(tmp_path: Path) -> None:
    target, fails = LocalTarget(path=str(tmp_path)), {f"0000{number}": (Cause.TRAINABLE, 1) for number in range(2)}
    search = PlannedSearch(target, slots=1, executor=UnreliableExecutor(failures=fails))
    options: dict[str, Any] = {"num_samples": 5, "stop": {"step": STEPS, "MaxFailures": {"failures": 2}}}
    assert len(search.run(**options, fail_fast=False).trials) == 2
    search.slots = 4
    assert len(search.run(**options, fail_fast=False, rerun_errored=True).trials) == 5
    assert pt.audit("e", target=str(tmp_path)).difference is None


@pytest.mark.parametrize(
    "kind",
    [
        "report of a decision",
        "decision after another report",
        "decision twice",
        "decision at a later step",
        "no decision",
        "decision of an attempt",
    ],
)
def test_a_decision_that_is_missing_or_superfluous_or_about_another_report_is_a_difference(
    kind: str, target_of: FindTarget, tmp_path: Path
) -> None:
    audited = 0
    for name in ("asha", "promotion", "hyperband", "turns", "pbt"):
        entries = load_entries(Path(target_of(name).path), KEY)
        alterations = [alteration for alteration in iter_inconsistencies(entries) if alteration.kind == kind]
        for alteration in alterations[len(alterations) // 2 :][:1]:
            path = tmp_path / name
            write_altered_journal(path, KEY, entries, alteration)
            try:
                difference = pt.audit("e", target=str(path)).difference
            except JournalCorrupt:
                continue  # the next event is impossible after it
            assert difference is not None, (name, alteration)
            assert difference.entry >= alteration.entry
            audited += 1
    assert audited >= 3, kind


@pytest.mark.altered_journal
def test_after_each_test_the_journals_that_flows_have_left_are_audited(target_of: FindTarget, tmp_path: Path) -> None:
    first, *rest = load_entries(Path(target_of("asha").path), KEY)
    opening, *others = first.events
    assert isinstance(opening, OwnerChanged)
    by_flow = opening.model_copy(update={"owner": opening.owner.model_copy(update={"flow_run": "run"})})
    entries = [first.model_copy(update={"events": (by_flow, *others)}), *rest]
    write_altered_journal(tmp_path, KEY, entries, next(iter_alterations(entries)))
    (difference,) = find_differences(tmp_path)
    assert difference.startswith(f"{tmp_path}/e: entry ")


@pytest.mark.deep
def test_of_200_changed_decisions_200_are_named_at_their_entries(target_of: FindTarget, tmp_path: Path) -> None:
    assert find_missed_alterations(target_of, tmp_path, 200) == []
