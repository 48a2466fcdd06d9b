"""Where each second of the slots goes: the sum is that of slots and time, whatever has ended an attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import pytest

from prefect_tune.core.experiment.cost import CostCategory, ExperimentCost, compute_cost
from prefect_tune.core.experiment.experiment import Experiment, apply_event, make_empty_experiment
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    CheckpointCommitted,
    CheckpointRef,
    CheckpointsAdopted,
    Event,
    Owner,
    OwnerChanged,
    SlotFreed,
    StepReported,
    TrialAdded,
    TrialErrored,
    TrialFinished,
    TrialPaused,
    TrialRequeued,
    TrialResumed,
)
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.usage_records import (
    AttemptUsage,
    GroupUsage,
    PhaseSeconds,
    RankEnd,
    RunRecord,
    extend_last_run,
    extend_previous_run,
)
from prefect_tune.core.values import StepReport

KEY = JournalKey(experiment="e", generation=1)
BEGIN = datetime(2026, 11, 26, 3, tzinfo=UTC)


def time_at(seconds: float) -> str:
    return (BEGIN + timedelta(seconds=seconds)).isoformat()


def open_run(term: int, seconds: float, slots: int | None = 2) -> OwnerChanged:
    owner = Owner(name="run", host="here", pid=1, slots=slots)
    return OwnerChanged(experiment="e", generation=1, term=term, owner=owner, at=time_at(seconds))


def add_trial(trial: str = "t") -> TrialAdded:
    return TrialAdded(trial=trial, config={}, proposed_by_search=False)


def start(attempt: int, seconds: float | None, step: int = 0, sequence: int | None = None) -> AttemptStarted:
    started_at = None if seconds is None else time_at(seconds)
    return AttemptStarted(trial="t", attempt=attempt, from_step=step, from_sequence=sequence, at=started_at)


def report(step: int, trained: float) -> StepReported:
    return StepReported(trial="t", report=StepReport(step=step, metrics={}, trained_seconds=trained))


def commit(step: int, sequence: int, trained: float, seconds: PhaseSeconds | None = None) -> CheckpointCommitted:
    checkpoint = CheckpointRef(step=step, sequence=sequence, trained_seconds=trained)
    return CheckpointCommitted(trial="t", checkpoint=checkpoint, seconds=seconds)


def free_slot(attempt: int, since: float, seconds: float) -> SlotFreed:
    return SlotFreed(trial="t", attempt=attempt, since=time_at(since), seconds=seconds)


def usage(**seconds: float) -> AttemptUsage:
    return AttemptUsage(seconds=PhaseSeconds(**seconds), cpu_seconds=3.0, peak_memory_bytes=100, mean_memory_bytes=50)


def lose(message: str = "") -> AttemptEnded:
    return AttemptEnded(trial="t", cause=Cause.MACHINE, reason=message)


def apply_events(events: Sequence[Event]) -> Experiment:
    experiment = make_empty_experiment(KEY)
    for number, event in enumerate(events, 1):
        experiment = apply_event(experiment, event, number)
    return experiment


def cost(*events: Event, until: float = 0.0) -> ExperimentCost:
    return compute_cost(apply_events(events), BEGIN + timedelta(seconds=until))


def seconds_of(cost: ExperimentCost) -> Mapping[str, float]:
    return {category.key: round(seconds, 6) for category, seconds in cost.seconds.items() if seconds}


ALL = {"start": 2.0, "restoring": 1.0, "training": 10.0, "saving": 3.0, "waiting": 1.5, "ending": 0.5}


def test_an_attempt_that_ends_in_order_has_each_second_where_it_was_measured_and_the_rest_is_idle() -> None:
    result = cost(
        *(open_run(1, 0), add_trial(), start(1, 1), report(4, 10)),
        *(TrialFinished(trial="t", reason="enough", usage=usage(**ALL)), free_slot(1, 0.5, 20)),
    )

    assert seconds_of(result) == {**ALL, "start": 2.5, "ending": 0.5 + 1.5, "idle": 21.0}
    assert (result.slot_seconds, result.run_seconds) == (41.0, 20.5)
    (attempt,) = result.attempts
    assert (attempt.trial, attempt.attempt, attempt.total_seconds) == ("t", 1, 20.0)
    assert attempt.usage == usage(**ALL)
    assert list(result.group_attempts_by_trial()) == ["t"]


def test_what_a_lost_attempt_did_after_its_last_commit_is_trained_again_until_the_runs_last_sign_of_life() -> None:
    at_commit = PhaseSeconds(start=2, training=4)
    result = cost(
        *(open_run(1, 0, slots=1), add_trial(), start(1, 1), report(4, 4), commit(4, 4, 4.0, at_commit)),
        *(
            report(6, 6),
            open_run(2, 100, slots=1),
            CheckpointsAdopted(last_known_steps={"t": 7}, last_seen_at=time_at(12)),
            lose(),
        ),
        *(start(2, 101, 4, 4), TrialFinished(trial="t", reason="", usage=usage(training=2)), free_slot(2, 101, 2)),
    )

    # 12 s of the first run, of which 1 s precedes the attempt; 3 s of the second one.
    assert seconds_of(result) == {"start": 2, "training": 4 + 2, "lost": 5, "idle": 1 + 1}
    assert [run.seconds for run in result.runs] == [12, 3]


def test_a_killed_attempt_without_a_commit_trains_its_reported_time_again_and_the_rest_is_its_start() -> None:
    result = cost(
        *(open_run(1, 0, slots=1), add_trial(), start(1, 0), report(2, 5)),
        *(open_run(2, 100, slots=1), CheckpointsAdopted(last_known_steps={"t": 2}, last_seen_at=time_at(8)), lose()),
    )
    assert seconds_of(result) == {"start": 3, "lost": 5}
    published = CheckpointsAdopted(last_known_steps={"t": 3}, trained_seconds={"t": 6.0}, last_seen_at=time_at(8))
    result = cost(*(open_run(1, 0, slots=1), add_trial(), start(1, 0), open_run(2, 100, slots=1), published, lose()))
    assert seconds_of(result) == {"start": 2, "lost": 6}


def test_a_commit_that_is_adopted_counts_what_was_trained_for_it() -> None:
    ref = CheckpointRef(step=4, sequence=5, trained_seconds=7.0)
    result = cost(
        *(open_run(1, 0, slots=1), add_trial(), start(1, 0), commit(2, 4, 3.0, PhaseSeconds(start=1, training=3))),
        *(open_run(2, 100, slots=1), CheckpointsAdopted(checkpoints={"t": (ref,)}, last_seen_at=time_at(9)), lose()),
    )
    assert seconds_of(result) == {"start": 1, "training": 7, "lost": 1}


def test_an_attempt_that_fails_loses_what_follows_its_last_commit_and_one_that_saved_in_order_loses_nothing() -> None:
    events = (open_run(1, 0, slots=1), add_trial(), start(1, 0), report(2, 4))
    save = commit(2, 4, 4.0, PhaseSeconds(training=4))
    failure = AttemptEnded(trial="t", cause=Cause.TRAINABLE, reason="", usage=usage(training=6))
    preemption = failure.model_copy(update={"cause": Cause.PREEMPTED})

    assert seconds_of(cost(*events, save, failure, free_slot(1, 0, 6))) == {"training": 4, "lost": 2}
    assert seconds_of(cost(*events, save, preemption, free_slot(1, 0, 6))) == {"training": 6}
    assert seconds_of(cost(*events, preemption, free_slot(1, 0, 6))) == {"lost": 6}
    assert seconds_of(cost(*events, save, TrialErrored(trial="t", cause=Cause.TRAINABLE, reason=""))) == {"training": 4}


def test_a_pause_without_a_checkpoint_is_lost_once_the_trial_starts_again_from_nothing() -> None:
    pause = (
        *(open_run(1, 0, slots=1), add_trial(), start(1, 0), report(2, 4)),
        *(TrialPaused(trial="t", reason="", usage=usage(training=4)), free_slot(1, 0, 4)),
    )
    restart = (TrialResumed(trial="t"), start(2, 5), free_slot(2, 5, 1))

    assert seconds_of(cost(*pause)) == {"training": 4}
    assert seconds_of(cost(*pause, *restart, until=6.0)) == {"lost": 4, "start": 1, "idle": 1}


def test_an_attempt_that_runs_has_lasted_until_now() -> None:
    events = (open_run(1, 0, slots=1), add_trial(), start(1, 1))
    save = commit(2, 4, 4.0, PhaseSeconds(start=1, training=4))

    assert seconds_of(cost(*events, until=9.0)) == {"start": 8, "idle": 1}
    assert seconds_of(cost(*events, report(2, 4), save, until=9.0)) == {"start": 1, "training": 7, "idle": 1}
    assert seconds_of(cost(*events, report(2, 4), save, until=0.0)) == {"start": 1, "training": 4, "idle": 1}


def test_attempts_of_one_slot_follow_one_another() -> None:
    """A task that Prefect retries trains two attempts in the slot of one request."""
    result = cost(
        *(open_run(1, 0, slots=1), add_trial(), start(1, 1), report(1, 1), lose()),
        *(start(2, 4), TrialFinished(trial="t", reason="", usage=usage(training=3)), free_slot(2, 0, 8)),
    )
    assert [attempt.total_seconds for attempt in result.attempts] == [3, 4]
    assert seconds_of(result) == {"start": 2, "lost": 1, "training": 3, "ending": 1, "idle": 1}


def test_an_attempt_that_outlives_its_search_adds_the_time_between_the_runs() -> None:
    result = cost(
        *(
            open_run(1, 0, slots=1),
            add_trial(),
            start(1, 0),
            open_run(2, 10, slots=1),
            CheckpointsAdopted(last_seen_at=time_at(4)),
        ),
        *(TrialFinished(trial="t", reason="", usage=usage(start=1, training=13)), free_slot(1, 10, 5)),
    )
    assert seconds_of(result) == {"start": 1, "training": 13, "idle": 1}
    assert (result.slot_seconds, sum(run.seconds for run in result.runs)) == (15, 4 + 5)


def test_a_clock_that_jumps_between_two_runs_adds_nothing_to_an_attempt_that_outlives_its_search() -> None:
    hours = 8 * 3600
    result = cost(
        *(
            open_run(1, 0, slots=1),
            add_trial(),
            start(1, 0),
            open_run(2, hours, slots=1),
            CheckpointsAdopted(last_seen_at=time_at(4)),
        ),
        *(TrialFinished(trial="t", reason="", usage=usage(start=1, training=13)), free_slot(1, hours, 5)),
    )
    assert [attempt.total_seconds for attempt in result.attempts] == [14]


@pytest.mark.parametrize("offset", [-3600, 8 * 3600])
def test_the_begin_of_an_attempt_by_another_machines_clock_is_kept_within_its_slot(offset: float) -> None:
    result = cost(
        *(open_run(1, 0, slots=1), add_trial(), start(1, offset + 1)),
        *(TrialFinished(trial="t", reason="", usage=usage(training=4)), free_slot(1, 0, 6)),
    )
    assert sum(seconds_of(result).values()) == 6
    assert [attempt.is_begin_clamped for attempt in result.attempts] == [True]
    same = cost(
        open_run(1, 0, 1),
        add_trial(),
        start(1, 1),
        TrialFinished(trial="t", reason="", usage=usage()),
        free_slot(1, 0, 6),
    )
    assert [attempt.is_begin_clamped for attempt in same.attempts] == [False]


@pytest.mark.parametrize("offset", [-3600, 8 * 3600])
def test_a_lost_attempt_whose_machine_has_another_clock_is_kept_within_its_run(offset: float) -> None:
    result = cost(
        *(open_run(1, 0, slots=1), add_trial(), start(1, offset + 1), report(2, 4)),
        *(open_run(2, 100, slots=1), CheckpointsAdopted(last_known_steps={"t": 2}, last_seen_at=time_at(8)), lose()),
    )
    assert result.slot_seconds <= 110
    assert [attempt.is_begin_clamped for attempt in result.attempts] == [True]


def test_a_run_that_begins_before_the_last_one_by_the_clock_has_its_own_attempts() -> None:
    result = cost(
        *(open_run(1, 3600, slots=1), add_trial(), start(1, 3601), report(2, 4)),
        *(open_run(2, 100, slots=1), CheckpointsAdopted(last_known_steps={"t": 2}, last_seen_at=time_at(3608)), lose()),
        *(start(2, 101), TrialFinished(trial="t", reason="", usage=usage(training=2)), free_slot(2, 101, 2)),
    )
    assert [run.seconds for run in result.runs] == [8, 3]
    assert result.slot_seconds == 11


def test_a_slot_that_is_freed_before_its_attempt_is_known_belongs_to_that_attempt() -> None:
    result = cost(
        *(open_run(1, 0, slots=1), add_trial(), free_slot(1, 0, 6), start(1, 2)),
        TrialFinished(trial="t", reason="", usage=usage(training=4)),
    )
    assert seconds_of(result) == {"start": 2, "training": 4}
    assert seconds_of(cost(open_run(1, 0, slots=1), add_trial(), free_slot(1, 0, 6))) == {"start": 6}


def test_a_clock_that_differs_changes_no_sum() -> None:
    result = cost(
        *(open_run(1, 0, slots=1), add_trial(), start(1, 0)),
        *(TrialFinished(trial="t", reason="", usage=usage(start=2, training=10)), free_slot(1, 0, 6)),
    )
    assert seconds_of(result) == {"start": 1, "training": 5}


def test_steps_of_a_finished_trial_that_are_trained_again_are_lost_and_an_end_is_booked_once() -> None:
    finished = TrialFinished(trial="t", reason="", usage=usage(training=4))
    result = cost(
        *(open_run(1, 0, slots=1), add_trial(), start(1, 0), report(2, 4), finished, free_slot(1, 0, 4)),
        *(TrialRequeued(trial="t", reason=""), start(2, 4), AttemptEnded(trial="t", cause=Cause.TRAINABLE, reason="")),
        *(free_slot(2, 4, 1), finished),
    )
    assert seconds_of(result) == {"lost": 4, "start": 1}


def test_a_flow_of_ones_own_has_no_slots_and_counts_what_its_saves_say() -> None:
    result = cost(
        *(open_run(1, 0, slots=None), add_trial(), start(1, 0), report(2, 4), commit(2, 4, 4.0)),
        *(report(3, 6), TrialFinished(trial="t", reason=""), open_run(2, 90, slots=None)),
    )
    assert seconds_of(result) == {"training": 6}
    assert [run.slots for run in result.runs] == [None, None]


@pytest.mark.parametrize("time", [None, "yesterday"])
def test_an_attempt_whose_times_are_not_known_is_left_out(time: str | None) -> None:
    attempt_start = start(1, None).model_copy(update={"at": time})
    assert cost(open_run(1, 0), add_trial(), attempt_start).attempts == []


def test_a_journal_without_times_has_attempts_of_what_they_measured_and_no_idle_slots() -> None:
    untimed = open_run(1, 0).model_copy(update={"at": None})
    result = cost(untimed, add_trial(), start(1, 0), TrialFinished(trial="t", reason="", usage=usage(training=3)))
    assert seconds_of(result) == {"training": 3}
    assert result.runs == []
    assert seconds_of(cost(untimed, add_trial(), start(1, 0), lose())) == {}


def test_the_end_of_a_run_is_its_last_sign_of_life() -> None:
    first, second = RunRecord(term=1, began_at=time_at(0)), RunRecord(term=2, began_at=time_at(50))

    assert extend_last_run((), time_at(0), 1.0) == ()
    assert extend_previous_run((first,), time_at(5)) == (first,)
    assert extend_previous_run((first, second), None) == (first, second)
    assert extend_previous_run((first, second), "yesterday") == (first, second)
    assert extend_previous_run((first, second), time_at(-5)) == (first, second)
    (ended, same) = extend_previous_run((first, second), time_at(5))
    assert (ended.ended_at, same) == ("2026-11-26T03:00:05.000+00:00", second)
    assert extend_last_run((ended,), time_at(1), 3.0) == (ended,)
    assert extend_last_run((first,), "9999-12-31T00:00:00+00:00", 1e9) == (first,)


def test_each_category_has_a_key_and_says_what_it_means() -> None:
    assert [category.key for category in CostCategory][:3] == ["training", "lost", "start"]
    assert str(CostCategory.START) == "start and import"
    assert all(category.meaning.endswith(".") for category in CostCategory)


def test_the_ends_of_ranks_are_journaled_with_the_end_of_an_attempt() -> None:
    ends = (RankEnd(ranks=(1,), how="exited with code 3", is_cause=True),)
    event = AttemptEnded(
        trial="t", cause=Cause.TRAINABLE, reason="x", usage=GroupUsage(seconds=PhaseSeconds(), ends=ends)
    )
    read = AttemptEnded.model_validate_json(event.model_dump_json())
    assert read == event
    [attempt] = cost(open_run(1, 0), add_trial(), start(1, 10), read, free_slot(1, 5, 100), until=200).attempts
    assert attempt.rank_ends == ends


def test_the_measures_of_a_single_process_have_no_field_of_ranks() -> None:
    event = TrialFinished(trial="t", reason="", usage=usage(training=1))
    assert event.usage is not None
    assert event.usage.model_dump().keys() == AttemptUsage.model_fields.keys()
    assert event.usage.model_dump()["seconds"].keys() == PhaseSeconds.model_fields.keys()
    assert TrialFinished.model_validate_json(event.model_dump_json()) == event


def test_the_cost_is_printed_in_a_sentence_and_shown_in_a_notebook_as_a_table() -> None:
    result = cost(
        open_run(1, 0, 1),
        add_trial(),
        start(1, 0),
        report(4, 8.0),
        commit(1, 1, 8.0),
        TrialFinished(trial="t", reason="done", usage=usage(start=1.0, training=8.0)),
        free_slot(1, 0, 10),
        until=10,
    )
    assert repr(result).startswith("<ExperimentCost of 1 attempt: ")
    assert len(repr(result)) < 200
    assert "\n" not in repr(result)
    html = result._repr_html_()
    assert html.count("<tr") == 1 + sum(1 for value in result.seconds.values() if value)
    assert len(html) < 6_000
    nothing = cost()
    assert repr(nothing) == "<ExperimentCost of 0 attempts: no slot was held yet>"
    assert "no slot was held yet" in nothing._repr_html_()
