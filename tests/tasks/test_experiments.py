"""Opening an experiment when replies are lost or the target is unavailable for a moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from prefect_tune.attempt.attempt import Attempt
from prefect_tune.attempt.search_link import SearchLink
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.core.errors import CommitUnknown, ResumeFailed, StoreRefused, StoreUnavailable, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal import journal
from prefect_tune.core.journal_events import Adopted, Event, Owner, Quarantined, Started, TrialAdded
from prefect_tune.core.storage.layout import JournalKey, TrialKey
from prefect_tune.core.storage.object_store import Buffer
from prefect_tune.core.values import Stamp
from prefect_tune.journal_access import JournalWriter, Opening, open_journal
from prefect_tune.tasks.experiments import check_target, open_experiment, write_entry
from tests.attempt.direct_tasks import DirectTasks
from tests.fakes.artifacts import BUCKETS, Bucket, BucketTarget
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.far_attempts import require_experiment

ME = Owner(name="me", host="here", pid=1)
STAMP = Stamp(write_id="w", at="now")


class Late(Bucket):
    """Loses the reply to the `nth` create, whose object is visible only after it arrives."""

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
    bucket = BUCKETS[request.node.name] = Late(nth)
    target = BucketTarget(name=request.node.name)
    with pytest.raises(CommitUnknown):
        open_experiment.fn(target, first_generation("e"), ME, STAMP)
    if arrives == "before the retry":
        bucket.arrive()
    elif arrives == "never":
        bucket.on_its_way.clear()
    opened = open_experiment.fn(target, first_generation("e"), ME, STAMP)
    assert (opened.number, opened.term, opened.owner, opened.settled_from) == (2, 1, ME, 1)
    assert journal.load(bucket, first_generation("e"), side_by_side=map) == opened
    assert open_experiment.fn(target, first_generation("e"), ME, STAMP) == opened


class Mute(Bucket):
    """Loses the reply to the `nth` create, and the first read of its object fails."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self._nth = nth
        self._unsaid = ""

    def create(self, path: str, data: Buffer) -> None:
        super().create(path, data)
        self._nth -= 1
        if self._nth == 0:
            self._unsaid = path
            raise CommitUnknown("no reply in time")

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if path == self._unsaid:
            self._unsaid = ""
            raise StoreUnavailable("no reply in time")
        return super().read(path, offset=offset, length=length)


@pytest.mark.parametrize("nth", [0, 1, 2])
@pytest.mark.parametrize("says", ["what comes first", "nothing"])
def test_what_is_heard_of_an_opening_whose_reply_was_lost_is_what_is_written(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, nth: int, says: str
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    bucket = BUCKETS[request.node.name] = Mute(nth)
    received: dict[int, Sequence[Event]] = {}
    began = Started(trial="t", attempt=1, from_step=0, from_sequence=None)
    first = (Adopted(), TrialAdded(trial="t", config={}), began) if says == "what comes first" else ()
    opening = Opening(
        ME,
        STAMP,
        also=lambda found: () if found.trials else first,
        listener=lambda events, state: received.update({state.number: tuple(events)}),
    )
    target, key = BucketTarget(name=request.node.name), JournalKey(experiment="e", generation=1)
    require_experiment(target, key)
    open_journal(target, key.of_trial("t"), opening)
    written = journal.history(bucket, JournalKey(experiment="e", generation=1, trial="t"), side_by_side=map)
    assert received == {entry.number: tuple(entry.events) for entry in written}


# ---------------------------------------------------------------------------------------------- the target


class Failing(Bucket):
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
    BUCKETS[request.node.name] = Failing(error)
    with pytest.raises(TuneError) as caught:
        check_target.fn(BucketTarget(name=request.node.name))
    assert type(caught.value) is raised


# --------------------------------------------------------------------------------------- damaged checkpoints


def _with_quarantined(bucket: Bucket, spoil: Callable[[Experiment], Experiment]) -> Experiment:
    state = journal.take_over(bucket, first_generation("e"), ME, STAMP, side_by_side=map)
    torn = Quarantined(trial="t", sequence=2, reason="a torn manifest of an unacknowledged save")
    begun = [Adopted(), TrialAdded(trial="t", config={}), Started(trial="t", attempt=1, from_step=0), torn]
    return spoil(journal.append(bucket, state, begun, Stamp(write_id="w2", at="now")))


@pytest.mark.parametrize("lost", [0, 1])
def test_only_a_checkpoint_that_was_acknowledged_can_be_missed(request: pytest.FixtureRequest, lost: int) -> None:
    bucket = BUCKETS[request.node.name] = Bucket()
    plan = TrialSpec(
        target=BucketTarget(name=request.node.name),
        trial=TrialKey(experiment="e", generation=1, trial="t"),
        trainable="",
        stopper="",
        needs_curve=False,
    )

    def losing(state: Experiment) -> Experiment:
        trial = state.trial("t").model_copy(update={"lost_checkpoints": lost})
        return state.model_copy(update={"trials": {"t": trial}})

    state = _with_quarantined(bucket, losing)
    journal_writer = JournalWriter(plan.target, state, write_entry, lambda _events, _state: None)
    attempt = Attempt(plan, AttemptRequest(), cast("SearchLink", None), DirectTasks(plan), logging.getLogger("tests"))
    if lost:
        with pytest.raises(ResumeFailed, match="Nothing was restarted from zero"):
            attempt._restore_newest(journal_writer, Path())
    else:
        assert attempt._restore_newest(journal_writer, Path()) is None
        assert journal_writer.experiment == state
