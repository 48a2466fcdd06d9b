"""Acquisition of an experiment when replies are lost or the target is briefly unavailable."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from prefect_tune.attempt.attempt import Attempt
from prefect_tune.attempt.search_channel import SearchChannel, WritingJournal
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.core.errors import CommitUnknown, ResumeFailed, StoreRefused, StoreUnavailable, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal import journal
from prefect_tune.core.journal_events import (
    AttemptStarted,
    CheckpointQuarantined,
    CheckpointsAdopted,
    Owner,
    TrialAdded,
)
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.storage.object_store import Buffer
from prefect_tune.core.values import WriteStamp
from prefect_tune.journal_access import JournalWriter
from prefect_tune.tasks.experiments import acquire_experiment, check_target, write_entry
from tests.attempt.direct_tasks import DirectTasks
from tests.fakes.artifacts import BUCKETS, Bucket, BucketTarget
from tests.fakes.checkpoints import first_generation

ME = Owner(name="me", host="here", pid=1)
STAMP = WriteStamp(write_id="w", at="now")


class LateBucket(Bucket):
    """Loses the reply to the `nth` create; its object is visible only after `arrive`."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self._nth = nth
        self.on_its_way: list[tuple[str, bytes]] = []

    def arrive(self) -> None:
        while self.on_its_way:
            super().create(*self.on_its_way.pop())

    def create(self, path: str, data: Buffer) -> None:
        self.arrive()
        self._nth -= 1
        if self._nth == 0:
            self.on_its_way.append((path, bytes(data)))
            raise CommitUnknown("no reply in time")
        super().create(path, data)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("arrives", ["before the retry", "during the retry", "never"])
def test_opening_again_after_a_lost_reply_is_opening_once(
    request: pytest.FixtureRequest, nth: int, arrives: str
) -> None:
    bucket = BUCKETS[request.node.name] = LateBucket(nth)
    target = BucketTarget(name=request.node.name)
    with pytest.raises(CommitUnknown):
        acquire_experiment.fn(target, first_generation("e"), ME, STAMP)
    if arrives == "before the retry":
        bucket.arrive()
    elif arrives == "never":
        bucket.on_its_way.clear()
    state = acquire_experiment.fn(target, first_generation("e"), ME, STAMP)
    assert (state.entry_count, state.term, state.owner, state.last_adopting_term) == (2, 1, ME, 1)
    assert journal.load_experiment(bucket, first_generation("e")) == state
    assert acquire_experiment.fn(target, first_generation("e"), ME, STAMP) == state


# ---------------------------------------------------------------------------------------------- the target


class FailingBucket(Bucket):
    def __init__(self, error: TuneError) -> None:
        super().__init__()
        self._error = error

    def create(self, path: str, data: Buffer) -> None:
        assert len(data) > 0, path
        raise self._error


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (StoreUnavailable("503 slow down"), StoreUnavailable),
        (CommitUnknown("no reply in time"), StoreUnavailable),
        (StoreRefused("AccessDenied"), StoreRefused),
    ],
)
def test_a_target_that_is_away_is_asked_again_and_one_that_refuses_is_not(
    request: pytest.FixtureRequest, error: TuneError, raised: type[TuneError]
) -> None:
    BUCKETS[request.node.name] = FailingBucket(error)
    with pytest.raises(TuneError) as caught:
        check_target.fn(BucketTarget(name=request.node.name))
    assert type(caught.value) is raised


# --------------------------------------------------------------------------------------- damaged checkpoints


def _quarantine_checkpoint(bucket: Bucket, change_state: Callable[[Experiment], Experiment]) -> Experiment:
    state = journal.acquire_ownership(bucket, first_generation("e"), ME, STAMP)
    quarantined = CheckpointQuarantined(trial="t", sequence=2, reason="a torn manifest of an unacknowledged save")
    started = [TrialAdded(trial="t", config={}), AttemptStarted(trial="t", attempt=1, from_step=0)]
    events = [CheckpointsAdopted(), *started, quarantined]
    return change_state(journal.append_events(bucket, state, events, WriteStamp(write_id="w2", at="now")))


@pytest.mark.parametrize("lost", [0, 1])
def test_only_a_checkpoint_that_was_acknowledged_can_be_missed(request: pytest.FixtureRequest, lost: int) -> None:
    bucket = BUCKETS[request.node.name] = Bucket()
    plan = TrialSpec(
        target=BucketTarget(name=request.node.name),
        trial=TrialKey(experiment="e", generation=1, trial="t"),
        trainable="",
        stopper="",
        needs_history=False,
    )

    def set_lost_count(state: Experiment) -> Experiment:
        trial = state.trial("t").model_copy(update={"lost_checkpoint_count": lost})
        return state.model_copy(update={"trials": {"t": trial}})

    state = _quarantine_checkpoint(bucket, set_lost_count)
    journal = WritingJournal("t", JournalWriter(plan.target, state, write_entry))
    attempt_request, channel = AttemptRequest(owner_term=1, trial=state.trial("t")), cast("SearchChannel", None)
    attempt = Attempt(plan, attempt_request, channel, DirectTasks(plan), logging.getLogger("tests"))
    if lost:
        with pytest.raises(ResumeFailed, match="Nothing was restarted from zero"):
            attempt._restore_newest_checkpoint(journal, Path())
    else:
        assert attempt._restore_newest_checkpoint(journal, Path()) is None
        assert journal.trial == state.trial("t")
