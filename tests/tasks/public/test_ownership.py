"""One flow run owns an experiment: a later run takes over, and writes of the earlier run are refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune import ownership
from prefect_tune.attempt.commit_worker import make_commit_events
from prefect_tune.core.experiment.experiment import make_empty_experiment
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal.journal import read_earlier_owners
from prefect_tune.core.journal_events import Owner, TrialAdded
from prefect_tune.core.operations.delete_experiment import delete_generation
from prefect_tune.core.operations.scrub import quarantine_in_journal
from prefect_tune.core.storage.generations import find_current_generation, find_current_journal
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.values import WriteStamp
from prefect_tune.journal_access import read_experiment_raising_refusals
from prefect_tune.tasks import checkpoints
from tests.fakes.checkpoints import first_generation, read_files
from tests.fakes.searches.experiments import write_search
from tests.fakes.stores.dying_store import WRITES, Crash, DyingStore, Failure
from tests.long_cases import long_after
from tests.tasks.public.conftest import Caller
from tests.tasks.public.test_checkpoints import get_steps

USER = Owner(name="a script", host="elsewhere", pid=2)


def test_a_run_keeps_its_epoch_and_its_attempt(caller: Caller) -> None:
    for step in (1, 2, 3):
        caller.save_checkpoint(step)
    state = caller.load_state()
    assert (state.term, state.trial("trial").attempt, state.trial("trial").status) == (1, 1, Status.RUNNING)


@pytest.mark.parametrize(("run", "run_count"), [("first", 2), ("another", 1)], ids=["a retry", "another run"])
def test_a_later_run_takes_over_and_the_earlier_one_is_refused(caller: Caller, run: str, run_count: int) -> None:
    caller.save_checkpoint(1)
    caller.start_run(run, run_count).save_checkpoint(2)
    state = caller.load_state()
    assert (state.term, state.trial("trial").attempt) == (2, 2)
    caller.start_run("first", 1)
    save, sync = caller.save_checkpoint, caller.sync
    for act in (lambda: save(3), lambda: sync(status="completed"), lambda: save(2)):
        with pytest.raises(
            pt.Superseded, match=rf"{run} \(pid 1 on here, flow run {run}\) has taken it over, and this run"
        ):
            act()
    assert caller.load_state() == state
    caller.start_run(run, run_count).save_checkpoint(3)
    assert get_steps(caller) == [1, 2, 3]


def test_a_run_that_was_superseded_long_ago_is_still_refused(caller: Caller) -> None:
    for number in range(1, 9):
        caller.start_run(f"run {number}").save_checkpoint(2 * number)
        caller.save_checkpoint(2 * number + 1)
    owners = read_earlier_owners(caller.bucket, caller.load_state())
    assert [owner.name for owner in owners] == [f"run {number}" for number in range(1, 8)]
    for number in range(1, 8):
        with pytest.raises(pt.Superseded):
            caller.start_run(f"run {number}").save_checkpoint(100)


def delete_experiment(caller: Caller, by: Owner) -> None:
    stamp = WriteStamp(write_id=f"deletion by {by.name} {find_current_generation(caller.bucket, 'e')}", at="")
    delete_generation(caller.bucket, find_current_journal(caller.bucket, "e"), by, stamp)


@pytest.mark.parametrize("deletions", [1, 2])
def test_a_run_whose_experiment_was_deleted_writes_into_none_that_has_its_name_now(
    caller: Caller, deletions: int
) -> None:
    caller.save_checkpoint(1)
    caller.start_run("another").save_checkpoint(2)
    for number in range(deletions):
        delete_experiment(caller, USER)
        caller.start_run(f"run {number} of theirs").save_checkpoint(1, "of theirs")
    before = dict(caller.bucket.objects)
    for run in ("first", "another"):
        for act in (lambda: caller.save_checkpoint(3), lambda: caller.sync(status="completed")):
            caller.start_run(run)
            with pytest.raises(pt.Superseded, match="the experiment that this run wrote was deleted"):
                act()
    assert caller.bucket.objects == before
    caller.start_run(f"run {deletions - 1} of theirs").save_checkpoint(2, "of theirs")


def test_a_run_whose_experiment_was_deleted_does_not_begin_it_again_unless_it_is_started_again(caller: Caller) -> None:
    caller.save_checkpoint(1)
    delete_experiment(caller, USER)
    with pytest.raises(pt.Superseded, match="Stop here, or start the run again"):
        caller.save_checkpoint(2)
    assert caller.start_run("first", 2).save_checkpoint(1).step == 1


def test_a_run_that_deletes_its_experiment_may_use_the_name_again(caller: Caller) -> None:
    caller.save_checkpoint(1)
    delete_experiment(caller, USER.model_copy(update={"flow_run": "first"}))
    assert "/e/2/trials/trial/checkpoints/" in caller.save_checkpoint(1).uri


def test_opening_an_experiment_fences_the_earlier_run_off_before_any_save(caller: Caller) -> None:
    caller.save_checkpoint(1)
    state = pt.restore_experiment_state.fn(target=caller.start_run("later").target, experiment="e")
    assert (state.trials["trial"].status, state.trials["trial"].step) == (Status.INTERRUPTED, 1)
    with pytest.raises(pt.Superseded):
        caller.start_run("first").save_checkpoint(2)


def test_restoring_takes_nothing_over(caller: Caller) -> None:
    caller.save_checkpoint(1)
    caller.start_run("a reader").restore_checkpoint()
    caller.start_run("first").save_checkpoint(2)
    assert caller.load_state().term == 1


def test_trials_of_one_run_are_saved_side_by_side(caller: Caller) -> None:
    caller.task_run = "one for all"
    caller.write_directory(1)
    with ThreadPoolExecutor(8) as pool:
        checkpoints = list(pool.map(lambda trial: caller.save_again(1, trial=trial), "abcdefgh"))
    state = caller.load_state()
    assert sorted(state.trials) == sorted("abcdefgh") == [checkpoint.trial for checkpoint in checkpoints]
    assert state.term == 1
    assert {(trial.attempt, len(trial.checkpoints)) for trial in state.trials.values()} == {(1, 1)}


def test_tasks_in_several_processes_of_one_run_write_beside_each_other(caller: Caller) -> None:
    """Locks do not reach across processes: without any lock, each call behaves like another process."""

    class NoLock:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    class NoLocks(dict[object, NoLock]):
        def __missing__(self, _key: object) -> NoLock:
            return NoLock()

    caller.patch.setattr(ownership, "_write_locks", NoLocks())
    caller.task_run = "one for all"
    caller.write_directory(1)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda trial: caller.save_again(1, trial=trial), "abcd"))
    state = caller.load_state()
    assert (state.term, sorted(state.trials)) == (1, list("abcd"))
    assert {(trial.attempt, len(trial.checkpoints)) for trial in state.trials.values()} == {(1, 1)}


def test_two_tasks_that_open_the_experiment_at_once_open_it_once(caller: Caller) -> None:
    caller.save_checkpoint(1)
    nothing, read = make_empty_experiment(first_generation("e")), read_experiment_raising_refusals
    answers = iter([nothing])  # this task read the journal before the other task opened it
    caller.patch.setattr(
        ownership, "read_experiment_raising_refusals", lambda *arguments: next(answers, None) or read(*arguments)
    )
    caller.save_checkpoint(2)
    state = caller.load_state()
    assert (state.term, state.trial("trial").attempt, state.trial("trial").step) == (1, 1, 2)


def test_one_step_that_is_saved_twice_at_once_is_one_checkpoint(caller: Caller) -> None:
    caller.task_run = "one for all"
    caller.write_directory(1)
    with ThreadPoolExecutor(4) as pool:
        saved = list(pool.map(lambda _: caller.save_again(1), range(4)))
    assert len({checkpoint.uri for checkpoint in saved}) == 1
    assert len(caller.load_state().trial("trial").checkpoints) == 1


def test_steps_that_were_reported_and_not_saved_are_trained_again_in_a_new_attempt(caller: Caller) -> None:
    caller.save_checkpoint(1)
    caller.sync(reports={2: {"loss": 0.5}, 3: {"loss": 0.4}})
    caller.save_checkpoint(2)  # the same flow run, resumed after a suspension, restarts from its checkpoint
    trial = caller.load_state().trial("trial")
    assert (trial.attempt, trial.step, trial.recomputed_steps) == (2, 2, 2)


def test_a_search_is_not_written_to(caller: Caller, tmp_path: Path) -> None:
    write_search(tmp_path / "runs", "e", {"a": 0.5, "b": 0.25})
    before = read_files(tmp_path / "runs")
    with pytest.raises(pt.InvalidInput, match="is a search, which writes its own journal"):
        caller.save_checkpoint(1, target=str(tmp_path / "runs"))
    assert read_files(tmp_path / "runs") == before


def count_operations(caller: Caller, only: frozenset[str] | None) -> int:
    """Return the number of operations of a run with two saves."""
    store = DyingStore(caller.bucket, 0, only=only)
    caller.experiment = "counted"
    caller.use_store(store)
    caller.save_checkpoint(1, retention=pt.Retention(last=1))
    caller.save_checkpoint(2, retention=pt.Retention(last=1))
    caller.use_store(store.inner)  # type: ignore[arg-type]  # the fixture's bucket
    caller.experiment = "e"
    return store.total


@pytest.mark.parametrize("failure", long_after(1, [Failure.CRASH_BEFORE, Failure.CRASH_AFTER, Failure.TORN]))
def test_a_kill_at_any_write_loses_no_acknowledged_step_and_a_later_run_goes_on(
    caller: Caller, failure: Failure
) -> None:
    bucket = caller.bucket
    for nth in range(1, count_operations(caller, WRITES) + 1):
        caller.experiment, saved_steps = f"e-{nth}", list[int]()
        caller.use_store(DyingStore(bucket, nth, failure, only=WRITES)).start_run("first")
        with pytest.raises(Crash):
            saved_steps.extend(caller.save_checkpoint(step, retention=pt.Retention(last=1)).step for step in (1, 2))
        caller.use_store(bucket).start_run("later")
        restored = caller.restore_checkpoint()
        start = restored.step if restored else 0
        assert max(saved_steps, default=0) <= start <= max(saved_steps, default=0) + 1, nth
        for step in range(start + 1, 4):
            caller.save_checkpoint(step, retention=pt.Retention(last=1))
        assert get_steps(caller) == [3], nth
        manifests = [path for path in bucket.objects if path.startswith(f"e-{nth}/") and "manifest" in path]
        assert len(manifests) == 1, nth


@pytest.mark.parametrize("failure", long_after(1, [Failure.REPLY_LOST, Failure.UNAVAILABLE]))
def test_a_retry_of_the_task_is_the_same_save(
    caller: Caller, failure: Failure, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = caller.bucket
    monkeypatch.setattr("prefect_tune.storage_retries._PAUSES_SECONDS", (0.0,) * 7)
    for nth in range(1, count_operations(caller, None) + 1):
        caller.experiment = f"e-{nth}"
        caller.use_store(DyingStore(bucket, nth, failure)).start_run("first")
        for step in (1, 2):
            caller.task_run = None
            for _ in range(3):
                try:
                    caller.save_again(step, retention=pt.Retention(last=1))
                    break
                except (pt.CommitUnknown, pt.StoreUnavailable):
                    continue
        caller.use_store(bucket)
        trial = caller.load_state().trial("trial")
        assert (get_steps(caller), trial.attempt, caller.load_state().term) == ([2], 1, 1), nth


def test_a_trial_that_other_tasks_keep_changing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_overtaken() -> None:
        raise pt.SaveOvertaken("trial 't' was changed")

    monkeypatch.setattr(ownership, "MAX_WRITE_RACES", 3)
    with pytest.raises(pt.StoreUnavailable, match=r"tried 3 times\. Save a trial from one task at a time"):
        ownership.retry_on_conflict(raise_overtaken)


def test_an_entry_that_was_written_after_those_of_other_tasks_is_written_once(caller: Caller) -> None:
    experiment, stamp = ownership.ensure_ownership(caller.target, "e"), WriteStamp(write_id="mine", at="now")
    caller.sync(trial="b")  # by another task
    mine = [TrialAdded(trial="a", config={})]
    once = ownership.append_entry_after_newer(caller.target, experiment, mine, stamp, lambda _: None)
    again = ownership.append_entry_after_newer(caller.target, experiment, mine, stamp, lambda _: None)
    assert again == once == caller.load_state()
    assert list(once.trials) == ["b", "a"]


def test_a_save_during_which_a_checkpoint_was_quarantined_is_never_adopted(caller: Caller) -> None:
    """Such a save may share damaged bytes; the process is killed before it repeats the save."""
    trial_key = TrialKey(experiment="e", generation=1, trial="trial")
    caller.save_checkpoint(1)
    first = trial_key.checkpoint_key(caller.load_state().trial("trial").checkpoints[0])
    tries: list[int] = []

    def quarantine_first(*arguments: Any) -> Any:
        tries.append(len(tries))
        if len(tries) == 2:
            raise Crash
        journal, stamp = trial_key.journal_key, WriteStamp(write_id="guest", at="now")
        quarantine_in_journal(caller.bucket, journal, {first: "bad"}, stamp)
        return make_commit_events(*arguments)

    caller.patch.setattr(checkpoints, "make_commit_events", quarantine_first)
    with pytest.raises(Crash):
        caller.save_checkpoint(2)
    caller.patch.setattr(checkpoints, "make_commit_events", make_commit_events)
    state = pt.restore_experiment_state.fn(target=caller.start_run("later").target, experiment="e")
    assert tries == [0, 1]
    overtaken, saved_again = sorted(_find_sequences(caller, step=2))
    (checkpoint,) = caller.load_state().trial("trial").checkpoints
    assert checkpoint.sequence == saved_again != overtaken
    assert state.trials["trial"].checkpoint_steps == (2,)


def _find_sequences(caller: Caller, step: int) -> list[int]:
    """Return the sequences of a step's manifests on the target."""
    names = [path.split("/")[-2] for path in caller.bucket.objects if path.endswith("/manifest.json")]
    return [int(name.partition("-")[2]) for name in names if name.startswith(f"{step:010d}-")]
