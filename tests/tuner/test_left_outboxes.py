"""Outboxes of attempts that outlive their search: a damaged post, an illegal one, a trial that is stopped queued."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import Superseded
from prefect_tune.core.experiment.trial_transitions import Phase
from prefect_tune.core.journal_events import Finished, Started
from prefect_tune.core.messages.target_messages import StopRequest
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.journal_access import read_experiment
from tests.fakes.checkpoints import committed, write
from tests.fakes.searches import planned_search
from tests.fakes.searches.planned_search import PlannedSearch
from tests.fakes.searches.posting_executor import PostingExecutor, RemoteAttempt
from tests.tuner.test_driver import Killed, kill_after, run_killed, trains

KEY = JournalKey(experiment="e", generation=1)


@pytest.fixture
def target(tmp_path: Path) -> LocalTarget:
    return LocalTarget(path=str(tmp_path))


@pytest.mark.parametrize("damaged", [1, 2], ids=["its begin", "its save"])
def test_a_damaged_post_ends_an_attempt_that_has_outlived_its_search_and_loses_no_whole_checkpoint(
    target: LocalTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: int
) -> None:
    first = PostingExecutor(lambda _: None, survives_search=True)
    run_killed(target, first, sync={"sync_period_seconds": 0})
    attempt = first.attempts[0]
    attempt.starts()
    for step in (1, 2):
        saved = CheckpointKey(trial=attempt.spec.trial, step=step, sequence=attempt.outbox.trial.next_sequence)
        with target.open(timeout=timedelta(minutes=1)) as store:
            committed(store, write(tmp_path / f"staged-{step}", {"weights": bytes([step])}), saved)
        attempt.saves(step)
    path = Path(target.path, KEY.trial_key("00000").outbox_path(1, damaged))
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    executor = PostingExecutor(trains, survives_search=True)
    (trial,) = PlannedSearch(target, executor=executor).run(num_samples=1).trials.values()
    assert (trial.phase, trial.attempt) == (Phase.FINISHED, 2)
    assert [(each.step, each.sequence) for each in trial.checkpoints[:1]] == [(2, saved.sequence)]
    assert str(path.relative_to(target.path)) in caplog.text


def test_an_attempt_whose_post_cannot_follow_the_journal_is_fenced_off(target: LocalTarget) -> None:
    replies: list[str] = []

    def act(attempt: RemoteAttempt) -> None:
        if len(executor.attempts) > 1:
            trains(attempt)
            return
        attempt.starts()

    def again(attempt: RemoteAttempt) -> None:
        attempt.outbox.trial = attempt.request.trial  # a fault: it posts its start twice
        attempt.starts()

    class Faulty(PostingExecutor):
        polls = 0

        def poll(self, patience: object) -> Sequence[object]:  # type: ignore[override]  # the fake returns the same
            self.polls += 1
            first = self.attempts[0]
            if self.polls == 2:
                again(first)
            if self.polls == 4:
                try:
                    first.saves(1)
                    replies.append("acknowledged")
                except Superseded:
                    replies.append("refused")
                first.exits()
            return super().poll(patience)  # type: ignore[arg-type]  # as above

    executor = Faulty(act)
    (trial,) = PlannedSearch(target, executor=executor).run(num_samples=1).trials.values()
    assert trial.phase is Phase.FINISHED
    assert replies == ["refused"], "a save was acknowledged that no journal will ever name"


def test_a_queued_attempt_of_a_trial_that_is_stopped_is_fenced_off_though_its_search_ends(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def queued(_: RemoteAttempt) -> None:
        """Do not begin."""

    first = PostingExecutor(queued, survives_search=True)
    with pytest.raises(Killed):
        PlannedSearch(target, slots=2, executor=first).run(kill_after(3), num_samples=2)
    assert [each.trial for each in first.attempts] == ["00000", "00001"]

    class Stops(planned_search._Interrupts):
        taken = 0

        def take(self) -> Sequence[StopRequest]:
            self.taken += 1
            asked = StopRequest(write_id="w", at="", reason="by a person", term=2, trial="00001")
            whole = StopRequest(write_id="x", at="", reason="by a person", term=2)
            return [asked, whole] if self.taken == 2 else []

    monkeypatch.setattr(planned_search, "_Interrupts", Stops)
    second = PostingExecutor(queued, survives_search=True)

    def end_all() -> None:
        for attempt in second.attempts:
            if not attempt.messages:
                attempt.exits()

    monkeypatch.setattr(second, "stop", end_all)
    PlannedSearch(target, slots=1, executor=second).run(num_samples=2)
    third = PostingExecutor(trains, survives_search=True)
    monkeypatch.undo()
    state = PlannedSearch(target, slots=1, executor=third).run(num_samples=2)
    assert state.trial("00001").phase is Phase.FINISHED
    assert {name: each.outbox for name, each in state.trials.items()} == {"00000": None, "00001": None}
    with pytest.raises(Superseded):
        first.attempts[1].posts(Started(trial="00001", attempt=1, from_step=0), Finished(trial="00001", reason="x"))
    assert read_experiment(target, KEY).trial("00001").outbox is None
