"""Attempt requests that run twice, too late, or for an owner that has been superseded."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from prefect.logging import disable_run_logger

from prefect_tune.attempt.attempt import Attempt, AttemptResult, next_start
from prefect_tune.attempt.search_link import SearchLink
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.checkpoints.manifest import About
from prefect_tune.core.errors import StoreUnavailable, Superseded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Phase, Trial
from prefect_tune.core.journal.journal import history, load
from prefect_tune.core.journal_events import (
    Adopted,
    AttemptEnded,
    Cause,
    CheckpointRef,
    Cloned,
    Committed,
    Event,
    Finished,
    FinishKind,
    Opened,
    Owner,
    Paused,
    Quarantined,
    Reported,
    Requeued,
    Started,
    TrialAdded,
)
from prefect_tune.core.operations.delete_experiment import remove
from prefect_tune.core.schedulers.base import Exploit
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.values import StepReport, Value
from prefect_tune.journal_access import (
    JournalWriter,
    Opening,
    experiment_id,
    new_write_id,
    open_journal,
    write_directly,
)
from prefect_tune.tasks.checkpoints import publish_checkpoint
from tests.attempt.direct_tasks import DirectTasks
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.far_attempts import require_experiment

journal_access = importlib.import_module("prefect_tune.journal_access")
transient = importlib.import_module("prefect_tune.storage_retries")

TRIAL, SOURCE = "00000", "00001"
EXPLOIT = Exploit(source=SOURCE, config={"x": 2}, reason="better")
_MINUTE = timedelta(minutes=1)


class CommitHarness:
    """A trial with its own journal, and the task that runs attempt requests for it."""

    def __init__(self, target: LocalTarget) -> None:
        self.target = target
        self.plan = TrialSpec(
            target=target,
            trial=TrialKey(experiment="e", generation=1, trial=TRIAL),
            trainable="",
            stopper="",
            needs_curve=False,
            own_journal=True,
        )
        stop = threading.Event()
        self.link = cast("SearchLink", SimpleNamespace(stop=stop, wrote=lambda _events, _state: None))

    def attempt(self, request: AttemptRequest) -> Attempt:
        return Attempt(self.plan, request, self.link, DirectTasks(self.plan), logging.getLogger("tests"))

    def given(self, request: AttemptRequest) -> JournalWriter:
        """Process a request up to the start of its attempt."""
        return cast("JournalWriter", self.attempt(request)._own_journal())

    def begun(self, request: AttemptRequest) -> JournalWriter:
        journal_writer = self.given(request)
        trial = journal_writer.experiment.trial(TRIAL)
        if trial.phase is not Phase.RUNNING:
            journal_writer.write([next_start(trial)])
        return journal_writer

    def run(self, request: AttemptRequest) -> AttemptResult:
        return self.attempt(request).run()

    def saves(self, journal_writer: JournalWriter, *steps: int) -> None:
        for step in steps:
            self._save(journal_writer, self.plan.trial, step)

    def source(self, *steps: int, ends: Sequence[Event] = ()) -> None:
        """Another trial, with a checkpoint of each of the steps."""
        began: list[Event] = [
            Adopted(),
            TrialAdded(trial=SOURCE, config={}),
            Started(trial=SOURCE, attempt=1, from_step=0),
        ]
        opening = Opening(Owner(name="it", host="h", pid=1), new_write_id(), lambda _: began)
        state = open_journal(self.target, JournalKey(experiment="e", generation=1, trial=SOURCE), opening)
        journal_writer = JournalWriter(self.target, state, write_directly, lambda _events, _state: None)
        for step in steps:
            self._save(journal_writer, TrialKey(experiment="e", generation=1, trial=SOURCE), step)
        if ends:
            journal_writer.write(list(ends))

    def _save(self, journal_writer: JournalWriter, trial: TrialKey, step: int) -> None:
        directory = Path(self.target.path).parent / f"{trial.trial}-{step}-{journal_writer.experiment.number}"
        directory.mkdir()
        (directory / "weights").write_text(str(step))
        key = CheckpointKey(trial=trial, step=step, sequence=journal_writer.experiment.number)
        stamp = new_write_id()
        about = About(attempt=1, term=1, write_id=stamp.write_id, created_at=stamp.at)
        publish_checkpoint.fn(self.target, key, directory, about)
        report = StepReport(step=step, metrics={})
        ref = CheckpointRef(step=step, sequence=key.sequence)
        journal_writer.write([Reported(trial=trial.trial, report=report), Committed(trial=trial.trial, checkpoint=ref)])

    def state(self) -> Experiment:
        with self.target.open(timeout=_MINUTE) as store:
            return load(store, self.plan.journal, side_by_side=map)

    def trial(self) -> Trial:
        return self.state().trial(TRIAL)

    def count(self, kind: type[Value]) -> int:
        with self.target.open(timeout=_MINUTE) as store:
            entries = history(store, self.plan.journal, side_by_side=map)
        return sum(isinstance(event, kind) for entry in entries for event in entry.events)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[CommitHarness]:
    with disable_run_logger():
        harness = CommitHarness(LocalTarget(path=str(tmp_path / "target")))
        require_experiment(harness.target, harness.plan.trial.of_experiment)
        yield harness


def attempt_request(attempt: int, *, search_term: int = 1, exploit: Exploit | None = None) -> AttemptRequest:
    return AttemptRequest(config={"x": 1}, attempt=attempt, search_term=search_term, exploit=exploit)


# ------------------------------------------------------------------------------------- the same request twice


def test_an_exploit_is_not_carried_out_again_by_a_second_run_of_the_orders_for_it(harness: CommitHarness) -> None:
    """The machine died without a reply, and the executor runs the same request again."""
    harness.source(2)
    request = attempt_request(1, exploit=EXPLOIT)
    harness.saves(harness.begun(request), 3, 4, 5)
    again = harness.begun(request)
    assert again.experiment.trial(TRIAL).step == 5
    assert again.experiment.trial(TRIAL).attempt == 2
    assert harness.count(Cloned) == 1


@pytest.mark.parametrize(
    ("last_step", "ends"),
    [(4, ()), (None, [Finished(trial=SOURCE, reason="step 4 of 4")])],
    ids=["at the last step", "completed"],
)
def test_an_exploit_never_continues_from_the_end_of_its_source(
    harness: CommitHarness, last_step: int | None, ends: Sequence[Event]
) -> None:
    harness.source(2, 4, ends=ends)
    trial = harness.begun(replace(attempt_request(1, exploit=EXPLOIT), last_step=last_step)).experiment.trial(TRIAL)
    assert (trial.step, trial.config) == (2, EXPLOIT.config)


def test_a_source_with_nothing_but_its_end_leaves_the_trial_its_own_weights(harness: CommitHarness) -> None:
    harness.source(4)
    journal_writer = harness.begun(attempt_request(1))
    harness.saves(journal_writer, 3)
    journal_writer.write([Paused(trial=TRIAL, reason="its turn is over")])
    trial = harness.begun(replace(attempt_request(2, exploit=EXPLOIT), last_step=4)).experiment.trial(TRIAL)
    assert (trial.step, trial.config) == (3, EXPLOIT.config)


def test_an_exploit_is_carried_out_by_the_second_run_where_the_first_died_before_its_attempt_began(
    harness: CommitHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise StoreUnavailable("for longer than the retries last")

    harness.source(2)
    harness.given(attempt_request(1, exploit=None)).write([AttemptEnded(trial=TRIAL, cause=Cause.MACHINE, reason="x")])
    request = attempt_request(2, exploit=EXPLOIT)
    with monkeypatch.context() as patch:
        patch.setattr(Attempt, "_exploit", dies)
        with pytest.raises(StoreUnavailable):
            harness.given(request)
    assert harness.begun(request).experiment.trial(TRIAL).step == 2
    assert harness.count(Cloned) == 1


def test_what_was_put_aside_and_released_since_is_not_put_aside_by_a_second_run(harness: CommitHarness) -> None:
    journal_writer = harness.begun(attempt_request(1))
    harness.saves(journal_writer, 1, 2)
    journal_writer.write([AttemptEnded(trial=TRIAL, cause=Cause.USER, reason="x")])
    bad = Quarantined(
        trial=TRIAL, sequence=journal_writer.experiment.trial(TRIAL).checkpoints[-1].sequence, reason="kills"
    )
    request = replace(attempt_request(2), quarantines=(bad,))
    harness.saves(harness.begun(request), 3)
    harness.begun(request)
    assert harness.count(Quarantined) == 1
    assert harness.trial().step == 3


def test_a_trial_that_has_finished_is_not_trained_again_by_a_second_run_of_its_orders(harness: CommitHarness) -> None:
    request = attempt_request(1)
    journal_writer = harness.begun(request)
    harness.saves(journal_writer, 1)
    finished = Finished(trial=TRIAL, reason="enough", kind=FinishKind.RETURNED)
    journal_writer.write([finished])
    assert harness.run(request).outcome == finished
    assert (harness.trial().phase, harness.trial().attempt) == (Phase.FINISHED, 1)


@pytest.mark.parametrize("ends", [True, False], ids=["finished", "running"])
def test_a_second_run_whose_opening_has_to_be_tried_again_does_and_tells_what_is_written(
    harness: CommitHarness, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    adopt, tries = journal_access.adopt, iter([StoreUnavailable("a moment")])

    def breaks_off(*arguments: object, **more: object) -> Sequence[Event]:
        for error in tries:
            raise error
        adopted: Sequence[Event] = adopt(*arguments, **more)
        return adopted

    request = attempt_request(1)
    journal_writer = harness.begun(request)
    harness.saves(journal_writer, 1)
    if ends:
        journal_writer.write([Finished(trial=TRIAL, reason="enough", kind=FinishKind.RETURNED)])
    received: dict[int, Sequence[Event]] = {}

    def receive(events: Sequence[Event], state: Experiment) -> None:
        received[state.number] = tuple(events)

    harness.link = cast("SearchLink", SimpleNamespace(stop=harness.link.stop, wrote=receive))
    monkeypatch.setattr(journal_access, "adopt", breaks_off)
    monkeypatch.setattr(transient.time, "sleep", lambda _seconds: None)
    assert isinstance(harness.given(request), AttemptResult if ends else JournalWriter)
    assert harness.count(Requeued) == 0
    with harness.target.open(timeout=_MINUTE) as store:
        written = {each.number: each.events for each in history(store, harness.plan.journal, side_by_side=map)}
    assert received == {number: written[number] for number in received}


def test_a_trial_that_has_paused_stays_so_in_a_second_run_of_its_orders(harness: CommitHarness) -> None:
    request = attempt_request(1)
    journal_writer = harness.begun(request)
    harness.saves(journal_writer, 1)
    paused = Paused(trial=TRIAL, reason="rung")
    journal_writer.write([paused])
    assert harness.run(request).outcome == paused
    assert harness.trial().phase is Phase.PAUSED
    assert harness.begun(attempt_request(2)).experiment.trial(TRIAL).attempt == 2


def test_a_trial_that_has_finished_goes_on_where_it_is_ordered_to(harness: CommitHarness) -> None:
    journal_writer = harness.begun(attempt_request(1))
    harness.saves(journal_writer, 1)
    journal_writer.write([Finished(trial=TRIAL, reason="enough")])
    assert harness.begun(attempt_request(2)).experiment.trial(TRIAL).attempt == 2


# ---------------------------------------------------------------------------------------- requests that are too late


@pytest.mark.parametrize(
    "late", [attempt_request(1), attempt_request(3, search_term=1)], ids=["of an older attempt", "of an older owner"]
)
def test_orders_that_newer_ones_have_replaced_take_nothing_from_the_attempt_that_runs(
    harness: CommitHarness, late: AttemptRequest
) -> None:
    """A user retries the run of an attempt that failed long ago, or another owner took over the search."""
    harness.begun(attempt_request(1)).write([AttemptEnded(trial=TRIAL, cause=Cause.MACHINE, reason="x")])
    runs = harness.begun(attempt_request(2, search_term=2))
    before = harness.count(Opened)
    with pytest.raises(Superseded, match="a newer request replaced this one"):
        harness.given(late)
    harness.saves(runs, 1)
    assert harness.count(Opened) == before


def test_what_is_ordered_again_by_who_owns_it_now_is_carried_out(harness: CommitHarness) -> None:
    harness.begun(attempt_request(1))
    assert harness.begun(attempt_request(2)).experiment.trial(TRIAL).attempt == 2
    assert harness.begun(attempt_request(3, search_term=5)).experiment.trial(TRIAL).attempt == 3


# ------------------------------------------------------------------------- requests of a deleted experiment


def searched(target: LocalTarget, generation: int = 1) -> str:
    """Create the experiment; return its id."""
    key = JournalKey(experiment="e", generation=generation)
    open_journal(target, key, Opening(Owner(name="it", host="h", pid=1), new_write_id()))
    found = experiment_id(target, key)
    assert found
    return found


def test_orders_of_an_experiment_that_was_deleted_begin_nothing(harness: CommitHarness) -> None:
    late = replace(attempt_request(1), experiment_id=searched(harness.target))
    with harness.target.open(timeout=_MINUTE) as store:
        remove(store, first_generation("e"), Owner(name="it", host="h", pid=1), new_write_id(), side_by_side=map)
        with pytest.raises(Superseded, match="no longer exists"):
            harness.given(late)
        assert [each.path for each in store.list("")] == ["e/generations/0000000002.json"]


def test_orders_of_an_experiment_that_was_begun_again_under_its_name_leave_its_trials_to_the_new_one(
    harness: CommitHarness,
) -> None:
    late = replace(attempt_request(1, search_term=3), config={"x": 0}, experiment_id=searched(harness.target))
    with harness.target.open(timeout=_MINUTE) as store:
        remove(store, first_generation("e"), Owner(name="it", host="h", pid=1), new_write_id(), side_by_side=map)
    now = replace(attempt_request(1), experiment_id=searched(harness.target, 2))
    with pytest.raises(Superseded, match="no longer exists"):
        harness.given(late)
    harness.plan = replace(harness.plan, trial=TrialKey(experiment="e", generation=2, trial=TRIAL))
    assert harness.begun(now).experiment.trial(TRIAL).config == {"x": 1}


# -------------------------------------------------------------------------------------------- a single training


def test_a_training_that_has_finished_is_reported_by_a_retry_of_its_task(harness: CommitHarness) -> None:
    began: list[Event] = [Adopted(), TrialAdded(trial=TRIAL, config={}), Started(trial=TRIAL, attempt=1, from_step=0)]
    finished = Finished(trial=TRIAL, reason="enough")
    began.append(finished)
    opening = Opening(Owner(name="it", host="h", pid=1), new_write_id(), lambda _: began)
    state = open_journal(harness.target, JournalKey(experiment="e", generation=1), opening)
    harness.plan = replace(harness.plan, own_journal=False)
    result = harness.run(AttemptRequest(search_term=state.term))
    assert result.outcome == finished
    assert result.experiment == state


# ------------------------------------------------------------------------------- a process that cannot be started


def test_an_attempt_whose_process_cannot_be_started_leaves_no_thread(harness: CommitHarness) -> None:
    def no_process(*_: object) -> None:
        raise OSError("cannot fork a trial's process")

    stop = threading.Event()
    link = SimpleNamespace(stop=stop, wrote=lambda _events, _state: None, process=no_process)
    harness.link = cast("SearchLink", link)
    with pytest.raises(OSError, match="cannot fork"):
        harness.run(attempt_request(1))
    for thread in threading.enumerate():
        if thread.name == "commit-worker":
            thread.join(30)
            assert not thread.is_alive()
