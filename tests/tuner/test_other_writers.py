"""A search beside other writers of its journal."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from prefect_tune import journal_access, ownership
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.checkpoints.commit import Reusable, commit
from prefect_tune.core.checkpoints.manifest import About
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal_events import AttemptEnded, Cause, CheckpointRef, Committed, Reported
from prefect_tune.core.operations.scrub import quarantine
from prefect_tune.core.restore import adopt
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.core.values import StepReport
from prefect_tune.executors.trial_executor import Message
from prefect_tune.journal_access import new_write_id, read_experiment
from prefect_tune.ownership import opening_events, own, write_if_unchanged
from prefect_tune.storage_retries import on_target
from tests.fakes.searches.planned_search import PlannedSearch
from tests.fakes.searches.posting_executor import PostingExecutor, RemoteAttempt
from tests.fakes.stores.memory_files import MemoryFiles

KEY = JournalKey(experiment="e", generation=1)
TRIAL = KEY.trial_key("00000")
Script = Callable[[RemoteAttempt], Iterator[None]]


class Scripted(PostingExecutor):
    """Carries out the next part of a script with each poll, once the journal has all posts before it."""

    def __init__(self, script: Script) -> None:
        super().__init__(self._begin)
        self._script = script
        self._parts: Iterator[None] = iter(())

    def _begin(self, attempt: RemoteAttempt) -> None:
        self._parts = self._script(attempt)

    def poll(self, patience: timedelta) -> list[Message]:
        next(self._parts, None)
        return super().poll(patience)


def saves(attempt: RemoteAttempt, step: int, *retires: int) -> CheckpointKey:
    """Publish a checkpoint with bytes of its own, and post it."""
    report = StepReport(step=step, metrics={"loss": 1.0})
    trial = attempt.outbox.trial
    key = CheckpointKey(trial=attempt.spec.trial, step=step, sequence=trial.next_sequence)
    about = About(attempt=trial.attempt, term=1, write_id=f"{key.name}", created_at="now", metrics=report.metrics)
    files = MemoryFiles({"head": f"step {step}".encode()})
    on_target(attempt.spec.target, lambda store: commit(store, key, files, about, reuse=Reusable()))
    ref = CheckpointRef(sequence=key.sequence, **report.model_dump())
    attempt.posts(
        Reported(trial=attempt.trial, report=report), Committed(trial=attempt.trial, checkpoint=ref, retires=retires)
    )
    return key


def quarantined_by_guest(target: LocalTarget, key: CheckpointKey) -> None:
    on_target(target, lambda store: quarantine(store, KEY, {key: "damaged"}, new_write_id()))


def require_bytes(target: LocalTarget, state: Experiment) -> None:
    for trial in state.trials.values():
        for ref in trial.checkpoints:
            path = state.trial_key(trial.trial).checkpoint_key(ref).manifest_path
            assert on_target(target, lambda store, path=path: store.size(path)) is not None, (
                f"{path} is live in the journal, and deleted"
            )


def test_what_a_post_does_not_retire_since_a_guest_was_faster_is_not_deleted(tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path))

    def script(attempt: RemoteAttempt) -> Iterator[None]:
        attempt.starts()
        saves(attempt, 1)
        second = saves(attempt, 2)
        yield
        while len(read_experiment(target, KEY).trial("00000").checkpoints) < 2:
            yield
        quarantined_by_guest(target, second)
        saves(attempt, 3, 1)  # Retention(last=2): the attempt does not know of the quarantine
        yield
        attempt.posts(AttemptEnded(trial=attempt.trial, cause=Cause.PREEMPTED, reason="x"))
        attempt.exits()

    executor = Scripted(script)
    state = PlannedSearch(target, executor=executor, slots=1).run(
        lambda: len(executor.attempts) > 0 and not len(executor), num_samples=1, sync={"sync_period_seconds": 0.01}
    )
    trial = state.trial("00000")
    assert [ref.step for ref in trial.checkpoints] == [1], "the save of step 3 was overtaken, and retired nothing"
    time.sleep(2)  # the janitor works in the background
    require_bytes(target, state)


# Several processes of one flow run begin an experiment at once; and a task is retried that died while it began it.


def test_two_processes_of_a_flow_run_begin_an_experiment_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = LocalTarget(path=str(tmp_path))
    monkeypatch.setattr(ownership, "_writing", defaultdict(threading.RLock))  # two processes have no common lock
    calls: list[int] = []

    def meanwhile(*arguments: Any, **options: Any) -> Any:
        if not calls:
            calls.append(1)
            state = own(target, "e")
            write_if_unchanged(target, state, "b", opening_events(None, "b", 1))
        return adopt(*arguments, **options)

    monkeypatch.setattr(journal_access, "adopt", meanwhile)
    assert "b" in own(target, "e").trials


def test_a_retried_task_adopts_what_its_first_try_had_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = LocalTarget(path=str(tmp_path))

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(journal_access, "append_entry", dies)
        with pytest.raises(KeyboardInterrupt):
            own(target, "e")
    state = own(target, "e")
    assert state.adopted_in == state.term
