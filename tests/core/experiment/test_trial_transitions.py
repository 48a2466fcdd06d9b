"""The table of transitions: every pair of phase and event, the resulting trial, and the words for its status."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import get_args

import pytest

from prefect_tune.core.errors import IllegalTransition
from prefect_tune.core.experiment.summary import format_recomputed_steps, format_status
from prefect_tune.core.experiment.trial_transitions import (
    Clone,
    Phase,
    Status,
    Trial,
    apply_adoption,
    apply_fork,
    apply_trial_event,
    is_deletable_checkpoint,
    is_kept_by_clones,
    is_live_checkpoint,
    newest_checkpoint,
    newest_checkpoint_key,
)
from prefect_tune.core.journal_events import (
    AnyTrialEvent,
    AttemptEnded,
    AttemptLaunched,
    AttemptStarted,
    Cause,
    CheckpointCloned,
    CheckpointCommitted,
    CheckpointOrigin,
    CheckpointQuarantined,
    CheckpointRef,
    CheckpointsAdopted,
    CheckpointsRetired,
    DecisionMade,
    FinishKind,
    ForkedTrial,
    OutboxClosed,
    PostReceived,
    SlotFreed,
    StepReported,
    StopRequested,
    TrialErrored,
    TrialFinished,
    TrialPaused,
    TrialRequeued,
    TrialResumed,
)
from prefect_tune.core.schedulers.base import Continue, Decision, Pause, Stop
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.values import StepReport
from tests.fakes.searches.journal_builder import JournalBuilder

PENDING, RUNNING, PAUSED, FINISHED, ERRORED = Phase
SAVED = CheckpointRef(step=3, sequence=7, metrics={"loss": 0.5}, trained_seconds=30.0)
BASE = Trial(id="t", config={}, attempt=1, step=5, checkpoints=(SAVED,), next_sequence=8, trained_seconds=50.0)

ORIGIN = CheckpointOrigin(trial="u", step=2, sequence=4)
COPY = CheckpointRef(step=2, sequence=8, metrics={"loss": 0.3}, trained_seconds=20.0, origin=ORIGIN)

EVENTS: Mapping[str, AnyTrialEvent] = {
    "attempt-started": AttemptStarted(trial="t", attempt=2, from_step=3, from_sequence=7),
    "step-reported": StepReported(trial="t", report=StepReport(step=6, metrics={"loss": 0.1})),
    "checkpoint-committed": CheckpointCommitted(trial="t", checkpoint=CheckpointRef(step=5, sequence=8)),
    "checkpoints-retired": CheckpointsRetired(trial="t", retired_sequences=()),
    "checkpoint-quarantined": CheckpointQuarantined(trial="t", sequence=7, reason="damaged"),
    "checkpoint-cloned": CheckpointCloned(trial="t", checkpoint=COPY, source="u", config={"rate": 2}, reason="behind"),
    "attempt-ended": AttemptEnded(trial="t", cause=Cause.TRAINABLE, reason="ValueError"),
    "trial-errored": TrialErrored(trial="t", cause=Cause.TRAINABLE, reason="spent"),
    "trial-finished": TrialFinished(trial="t", reason="enough", kind=FinishKind.RETURNED),
    "trial-requeued": TrialRequeued(trial="t", reason="more"),
    "trial-paused": TrialPaused(trial="t", reason="rung 3"),
    "trial-resumed": TrialResumed(trial="t"),
    "decision-made": DecisionMade(trial="t", report=StepReport(step=3, metrics={"loss": 0.5}), decision=Continue()),
    "attempt-launched": AttemptLaunched(trial="t", outbox=3),
    "post-received": PostReceived(trial="t", post=5),
    "outbox-closed": OutboxClosed(trial="t"),
    "slot-freed": SlotFreed(trial="t", attempt=1, since="2026-11-26T03:00:00+00:00", seconds=2.5),
}
OF_AN_OUTBOX = ("attempt-launched", "post-received", "outbox-closed")
LEGAL = {
    (PENDING, "attempt-started"): RUNNING,
    (PENDING, "trial-errored"): ERRORED,
    (PENDING, "trial-finished"): FINISHED,
    (RUNNING, "step-reported"): RUNNING,
    (RUNNING, "checkpoint-committed"): RUNNING,
    (RUNNING, "attempt-ended"): PENDING,
    (RUNNING, "trial-errored"): ERRORED,
    (RUNNING, "trial-finished"): FINISHED,
    (FINISHED, "trial-requeued"): PENDING,
    (FINISHED, "trial-errored"): ERRORED,
    (ERRORED, "trial-requeued"): PENDING,
    (PENDING, "trial-requeued"): PENDING,
    (RUNNING, "trial-paused"): PAUSED,
    (PAUSED, "trial-resumed"): PENDING,
    (PAUSED, "trial-finished"): FINISHED,
    (PAUSED, "trial-errored"): ERRORED,
    (PENDING, "trial-paused"): PAUSED,
    (PENDING, "trial-resumed"): PENDING,
    (RUNNING, "trial-resumed"): RUNNING,
    (PENDING, "checkpoint-cloned"): PENDING,
    (PAUSED, "checkpoint-cloned"): PAUSED,
    **{
        (status, event): status
        for status in Phase
        for event in ("checkpoints-retired", "checkpoint-quarantined", "decision-made", "slot-freed", *OF_AN_OUTBOX)
    },
}


def trial_in(status: Phase, **changes: object) -> Trial:
    return BASE.model_copy(update={"phase": status, **changes})


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("status", Phase)
def test_every_pair_of_status_and_event_is_legal_or_refused(status: Phase, name: str) -> None:
    outbox = 2 if name in ("post-received", "outbox-closed") else None
    if (status, name) in LEGAL:
        assert (
            apply_trial_event(trial_in(status, outbox=outbox, outbox_count=2, last_post=4), EVENTS[name]).phase
            is LEGAL[status, name]
        )
    else:
        with pytest.raises(IllegalTransition, match=f"{status}.*'{name}'"):
            apply_trial_event(trial_in(status), EVENTS[name])


def test_every_event_of_a_trial_is_in_that_table() -> None:
    assert {type(event) for event in EVENTS.values()} == set(get_args(AnyTrialEvent))


@pytest.mark.parametrize("status", Phase)
def test_a_trial_of_a_fork_has_its_own_checkpoints_and_is_not_running(status: Phase) -> None:
    clone = Clone(step=3, sequence=7, trial="u", clone_sequence=4)
    origin = trial_in(
        status,
        last_clone_sequence=7,
        quarantined_sequences=(6,),
        collected_up_to=5,
        lost_checkpoint_count=1,
        restored_sequence=7,
        outbox=2,
    )
    forked = apply_fork(origin.model_copy(update={"clones": (clone,)}), ForkedTrial(checkpoints=(COPY,)))
    assert forked.phase is (PENDING if status is RUNNING else status)
    assert (forked.checkpoints, forked.clones, forked.outbox, forked.step) == ((COPY,), (clone,), None, 5)
    assert (forked.last_clone_sequence, forked.quarantined_sequences, forked.restored_sequence) == (None, (), None)
    assert (forked.next_sequence, forked.adopted_up_to, forked.collected_up_to) == (8, 8, 8)


@pytest.mark.parametrize(
    ("event", "outbox", "post"),
    [
        pytest.param(AttemptLaunched(trial="t", outbox=3), 2, 4, id="a second outbox beside an open one"),
        pytest.param(AttemptLaunched(trial="t", outbox=2), None, 4, id="an outbox that was used before"),
        pytest.param(AttemptLaunched(trial="t", outbox=4), None, 4, id="an outbox that is skipped"),
        pytest.param(PostReceived(trial="t", post=4), 2, 4, id="a post twice"),
        pytest.param(PostReceived(trial="t", post=6), 2, 4, id="a post after one that is missing"),
        pytest.param(PostReceived(trial="t", post=5), None, 4, id="a post of a closed outbox"),
        pytest.param(OutboxClosed(trial="t"), None, 4, id="an end without an outbox"),
    ],
)
def test_an_outbox_is_used_once_and_its_posts_are_received_in_order(
    event: AnyTrialEvent, outbox: int | None, post: int
) -> None:
    with pytest.raises(IllegalTransition, match="cannot follow post 4 of outbox"):
        apply_trial_event(trial_in(RUNNING, outbox=outbox, outbox_count=2, last_post=post), event)


def test_saves_attempts_and_limits_count_the_sequence_up() -> None:
    trial = apply_trial_event(trial_in(PENDING), EVENTS["attempt-started"])
    assert (trial.next_sequence, trial.adopted_up_to) == (9, 9), "an earlier attempt may still save"
    trial = apply_trial_event(trial, CheckpointCommitted(trial="t", checkpoint=CheckpointRef(step=5, sequence=9)))
    assert (trial.next_sequence, trial.collected_up_to) == (10, 0)
    trial = apply_trial_event(trial, CheckpointsRetired(trial="t", retired_sequences=()))
    assert (trial.next_sequence, trial.collected_up_to) == (11, 11)
    trial = apply_adoption(trial, CheckpointsAdopted(last_known_steps={"t": 5}))
    assert (trial.next_sequence, trial.adopted_up_to) == (12, 12)
    first = apply_trial_event(Trial(id="n", config={}), AttemptStarted(trial="n", attempt=1, from_step=0))
    assert (first.next_sequence, first.adopted_up_to) == (1, 1)


def test_an_attempt_elsewhere_may_still_hand_over_its_saves_when_an_owner_vanished() -> None:
    lost = apply_adoption(trial_in(RUNNING, outbox=1), CheckpointsAdopted(last_known_steps={"t": 9}))
    assert (lost.next_sequence, lost.adopted_up_to, lost.is_owner_lost) == (8, 1, False)


def test_an_attempt_goes_on_from_its_checkpoint_and_counts_what_it_does_again() -> None:
    started = apply_trial_event(trial_in(PENDING), EVENTS["attempt-started"])

    assert (started.attempt, started.step, started.metrics, started.trained_seconds) == (2, 3, {"loss": 0.5}, 30)
    assert started.recomputed_steps == 2
    assert started.restored_sequence == 7


@pytest.mark.parametrize(
    ("attempt", "step", "sequence", "checkpoints"),
    [
        pytest.param(2, 0, None, (SAVED,), id="from nothing, though there is a checkpoint"),
        pytest.param(2, 3, None, (), id="from step 3, though there is no checkpoint"),
        pytest.param(2, 3, 8, (SAVED,), id="from a checkpoint that is not live"),
        pytest.param(2, 4, 7, (SAVED,), id="from a step that is not the checkpoint's"),
        pytest.param(3, 3, 7, (SAVED,), id="the attempt after the next"),
        pytest.param(1, 3, 7, (SAVED,), id="the same attempt again"),
    ],
)
def test_no_attempt_starts_from_anything_but_a_live_checkpoint(
    attempt: int, step: int, sequence: int | None, checkpoints: tuple[CheckpointRef, ...]
) -> None:
    started = AttemptStarted(trial="t", attempt=attempt, from_step=step, from_sequence=sequence)
    with pytest.raises(IllegalTransition):
        apply_trial_event(trial_in(PENDING, checkpoints=checkpoints), started)


def test_a_trial_without_any_checkpoint_starts_from_nothing() -> None:
    started = apply_trial_event(
        trial_in(PENDING, checkpoints=(), quarantined_sequences=(7,)), AttemptStarted(trial="t", attempt=2, from_step=0)
    )
    assert (started.step, started.metrics, started.recomputed_steps) == (0, {}, 5)


@pytest.mark.parametrize("step", [5, 4, 0])
def test_no_step_is_counted_twice(step: int) -> None:
    with pytest.raises(IllegalTransition, match=f"step {step} cannot follow step 5"):
        apply_trial_event(trial_in(RUNNING), StepReported(trial="t", report=StepReport(step=step, metrics={})))


@pytest.mark.parametrize(
    ("sequence", "changes"),
    [
        pytest.param(7, {}, id="as old as a live one"),
        pytest.param(6, {}, id="older than a live one"),
        pytest.param(8, {"quarantined_sequences": (8,)}, id="quarantined"),
        pytest.param(8, {"collected_up_to": 9}, id="begun before the last retirement"),
        pytest.param(8, {"adopted_up_to": 9}, id="of an earlier attempt"),
    ],
)
def test_a_save_that_was_overtaken_is_never_committed(sequence: int, changes: Mapping[str, object]) -> None:
    new = CheckpointRef(step=5, sequence=sequence)
    with pytest.raises(IllegalTransition, match=f"has sequence {sequence}"):
        apply_trial_event(trial_in(RUNNING, **changes), CheckpointCommitted(trial="t", checkpoint=new))
    with pytest.raises(IllegalTransition):
        apply_adoption(trial_in(RUNNING, **changes), CheckpointsAdopted(checkpoints={"t": (new,)}))


def test_a_commit_draws_the_line_only_if_it_retires() -> None:
    new = CheckpointRef(step=5, sequence=8)
    kept = apply_trial_event(trial_in(RUNNING), CheckpointCommitted(trial="t", checkpoint=new))
    retired = apply_trial_event(
        trial_in(RUNNING), CheckpointCommitted(trial="t", checkpoint=new, retired_sequences=(7,))
    )

    assert (kept.checkpoints, kept.collected_up_to) == ((SAVED, new), 0)
    assert (retired.checkpoints, retired.collected_up_to) == ((new,), 9)


def test_a_retirement_draws_the_line_even_for_nothing() -> None:
    trial = apply_trial_event(trial_in(PENDING), CheckpointsRetired(trial="t", retired_sequences=()))
    assert (trial.checkpoints, trial.collected_up_to) == ((SAVED,), 9)


def test_a_commit_is_progress_and_clears_the_machines_failures_but_not_the_users() -> None:
    failing = trial_in(RUNNING, machine_failures=3, trainable_failures=2, consecutive_start_failures=2)
    committed = apply_trial_event(failing, EVENTS["checkpoint-committed"])
    adopted = apply_adoption(failing, CheckpointsAdopted(checkpoints={"t": (CheckpointRef(step=5, sequence=8),)}))

    for trial in (committed, adopted):
        assert (trial.machine_failures, trial.trainable_failures, trial.consecutive_start_failures) == (0, 2, 0)


def test_what_is_quarantined_is_not_gone_on_from_and_nothing_of_it_is_reused() -> None:
    trial = apply_trial_event(trial_in(PENDING), EVENTS["checkpoint-quarantined"])

    assert newest_checkpoint(trial) is None
    assert (trial.quarantined_sequences, trial.collected_up_to) == ((7,), 9)


@pytest.mark.parametrize(
    ("cause", "machine", "user"),
    [
        (Cause.MACHINE, 1, 0),
        (Cause.PREEMPTED, 0, 0),
        (Cause.TRAINABLE, 0, 1),
        (Cause.IMPORT, 0, 1),
        (Cause.OUT_OF_MEMORY, 0, 1),
        (Cause.BAD_METRIC, 0, 1),
        (Cause.BAD_STOP, 0, 1),
    ],
)
def test_each_failure_is_counted_in_one_budget_or_in_none(cause: Cause, machine: int, user: int) -> None:
    ended = apply_trial_event(trial_in(RUNNING), AttemptEnded(trial="t", cause=cause, reason="why"))
    assert (ended.machine_failures, ended.trainable_failures, ended.reason) == (machine, user, "why")


def test_a_running_trial_has_no_reason_although_an_earlier_attempt_ended_for_one() -> None:
    ended = apply_trial_event(
        trial_in(RUNNING), AttemptEnded(trial="t", cause=Cause.MACHINE, reason="its owner vanished")
    )
    assert ended.reason == "its owner vanished"
    restart = AttemptStarted(trial="t", attempt=ended.attempt + 1, from_step=3, from_sequence=7)
    assert apply_trial_event(ended, restart).reason == ""


def test_deaths_at_one_and_the_same_start_are_counted_until_something_else_happens() -> None:
    trial = trial_in(PENDING)
    for count in (1, 2, 3):
        trial = apply_trial_event(
            trial, AttemptStarted(trial="t", attempt=trial.attempt + 1, from_step=3, from_sequence=7)
        )
        died = AttemptEnded(trial="t", cause=Cause.MACHINE, reason="", before_first_step=True)
        trial = apply_trial_event(trial, died)
        assert trial.consecutive_start_failures == count
    other = trial.model_copy(update={"checkpoints": (CheckpointRef(step=2, sequence=5),)})
    other = apply_trial_event(other, AttemptStarted(trial="t", attempt=5, from_step=2, from_sequence=5))
    assert other.consecutive_start_failures == 0
    later = apply_trial_event(trial, AttemptStarted(trial="t", attempt=5, from_step=3, from_sequence=7))
    later = apply_trial_event(later, AttemptEnded(trial="t", cause=Cause.TRAINABLE, reason=""))
    assert later.consecutive_start_failures == 0


@pytest.mark.parametrize(
    ("last_known_step", "is_remote", "steps", "at_least"),
    [
        pytest.param(None, False, 2, False, id="its owner has journaled its end"),
        pytest.param(0, False, 2, True, id="no live status"),
        pytest.param(4, False, 2, True, id="a live status older than the journal"),
        pytest.param(9, False, 6, True, id="a live status newer than the journal"),
        pytest.param(9, True, 6, False, id="the search took over, and its attempt ended in order"),
    ],
)
def test_steps_of_a_lost_attempt_are_wasted_up_to_the_last_that_is_known(
    last_known_step: int | None, steps: int, *, is_remote: bool, at_least: bool
) -> None:
    """The journal has steps up to 5, and a checkpoint of step 3."""
    adoption = CheckpointsAdopted(last_known_steps={} if last_known_step is None else {"t": last_known_step})
    ended = AttemptEnded(trial="t", cause=Cause.MACHINE, reason="lost")
    trial = apply_trial_event(apply_adoption(trial_in(RUNNING, outbox=1 if is_remote else None), adoption), ended)
    trial = apply_trial_event(trial, started := AttemptStarted(trial="t", attempt=2, from_step=3, from_sequence=7))
    assert (trial.recomputed_steps, trial.recomputed_is_lower_bound) == (steps, at_least)
    trial_again = apply_trial_event(trial, ended)
    trial_again = apply_trial_event(trial_again, started.model_copy(update={"attempt": 3}))
    assert (trial_again.recomputed_steps, trial_again.recomputed_is_lower_bound) == (steps, at_least)  # counted once
    count = f"{'at least ' * at_least}{steps}"
    assert trial.recomputed_steps_text == count
    text = f"{count} steps"
    assert format_recomputed_steps(trial.recomputed_steps, at_least=trial.recomputed_is_lower_bound) == text
    assert f", {text} trained again" in trial._repr_html_()


@pytest.mark.parametrize(("at_least", "text"), [(True, "none known"), (False, "0")])
def test_no_wasted_step_is_not_at_least_none(*, at_least: bool, text: str) -> None:
    assert trial_in(RUNNING).model_copy(update={"recomputed_is_lower_bound": at_least}).recomputed_steps_text == text


def test_giving_up_and_finishing_say_why() -> None:
    assert apply_trial_event(trial_in(RUNNING), EVENTS["trial-errored"]).reason == "spent"
    finished = apply_trial_event(trial_in(RUNNING), EVENTS["trial-finished"])
    assert (finished.reason, finished.finish_kind) == ("enough", FinishKind.RETURNED)
    assert apply_trial_event(finished, EVENTS["trial-requeued"]).finish_kind is None


def test_who_is_requeued_has_fresh_budgets() -> None:
    spent = trial_in(ERRORED, trainable_failures=4, machine_failures=11, consecutive_start_failures=3)
    requeued = apply_trial_event(spent, EVENTS["trial-requeued"])
    assert (requeued.trainable_failures, requeued.machine_failures, requeued.consecutive_start_failures) == (0, 0, 0)
    assert requeued.reason == "more"


def test_the_newest_checkpoint_has_a_key_on_the_target() -> None:
    folder = TrialKey(experiment="e", generation=1, trial="t")
    assert newest_checkpoint_key(folder, BASE) == CheckpointKey(trial=folder, step=3, sequence=7)
    assert newest_checkpoint_key(folder, trial_in(PENDING, checkpoints=())) is None


def test_a_clone_is_where_the_trial_goes_on_from_and_no_budget_is_renewed() -> None:
    failing = trial_in(PENDING, machine_failures=3, trainable_failures=2, recomputed_steps=1)
    cloned = apply_trial_event(failing, EVENTS["checkpoint-cloned"])

    assert (cloned.step, cloned.metrics, cloned.trained_seconds) == (2, {"loss": 0.3}, 20)
    assert (cloned.config, cloned.reason, cloned.checkpoints) == ({"rate": 2}, "behind", (SAVED, COPY))
    assert (cloned.machine_failures, cloned.trainable_failures, cloned.recomputed_steps) == (3, 2, 1)
    started = apply_trial_event(cloned, AttemptStarted(trial="t", attempt=2, from_step=2, from_sequence=8))
    assert (started.phase, started.step, started.recomputed_steps) == (RUNNING, 2, 1)


def test_a_clone_without_a_configuration_leaves_the_trial_its_own() -> None:
    clone = CheckpointCloned(trial="t", checkpoint=COPY, source="u", reason="behind")
    assert apply_trial_event(trial_in(PAUSED, config={"rate": 1}), clone).config == {"rate": 1}


def test_a_clone_that_was_overtaken_is_none() -> None:
    with pytest.raises(IllegalTransition, match="has sequence 8"):
        apply_trial_event(trial_in(PENDING, collected_up_to=9), EVENTS["checkpoint-cloned"])


def test_what_a_clone_has_is_held_beyond_its_retirement() -> None:
    folder = TrialKey(experiment="e", generation=1, trial="t")
    key = CheckpointKey(trial=folder, step=3, sequence=7)
    trial = trial_in(FINISHED, clones=(Clone(step=3, sequence=7, trial="u", clone_sequence=4),))
    predicates = (is_live_checkpoint, is_kept_by_clones, is_deletable_checkpoint)
    assert [predicate(trial, key) for predicate in predicates] == [True, False, False]
    trial = apply_trial_event(trial, CheckpointsRetired(trial="t", retired_sequences=(7,)))
    assert [predicate(trial, key) for predicate in predicates] == [False, True, False]
    trial = trial.model_copy(update={"clones": ()})
    assert (is_kept_by_clones(trial, key), is_deletable_checkpoint(trial, key)) == (False, True)
    origin = CheckpointOrigin(trial=key.trial.trial, step=key.step, sequence=key.sequence)
    other = Trial(id="u", config={}, checkpoints=(CheckpointRef(step=3, sequence=4, origin=origin),))
    assert is_live_checkpoint(other, key)
    assert folder.journal_key.trial_key("u").checkpoint_key(other.checkpoints[0]) == key


# ------------------------------------------------------------------------------------------------ the words for people


def describe_status(*events: AnyTrialEvent | StopRequested, steps: int = 3) -> tuple[str, str]:
    """Return the status and label of a trial after `steps` steps and these events."""
    search = JournalBuilder()
    search.add_trial("t", {"x": 1})
    if steps:
        search.start_attempt("t")
    for step in range(1, steps + 1):
        search.report("t", step, {"loss": 1 / step})
    for event in events:
        search.record(event)
    trial = search.state.trial("t")
    return str(trial.status), format_status(trial.status, trial.step)


def make_decision(decision: Decision) -> DecisionMade:
    return DecisionMade(trial="t", report=StepReport(step=3, metrics={"loss": 0.3}), decision=decision)


def make_finish(kind: FinishKind) -> TrialFinished:
    return TrialFinished(trial="t", reason="enough", kind=kind)


PAUSE, RESUME = TrialPaused(trial="t", reason="rung 3"), TrialResumed(trial="t")
SECOND_START = AttemptStarted(trial="t", attempt=2, from_step=0)
BY_ADA = (StopRequested(trial="t", reason="stopped by ada"), make_finish(FinishKind.STOPPED))


@pytest.mark.parametrize(
    ("events", "status", "label"),
    [
        ([], "running", "running"),
        ([make_finish(FinishKind.CRITERION)], "completed", "completed"),
        ([make_finish(FinishKind.RETURNED)], "completed", "completed"),
        ([make_decision(Stop(reason="all", early=False)), make_finish(FinishKind.ALL_STEPS)], "completed", "completed"),
        ([make_decision(Stop(reason="bad")), make_finish(FinishKind.PRUNED)], "pruned", "pruned @3"),
        ([make_decision(Pause(reason="rung 3")), PAUSE], "paused", "paused @3"),
        ([make_decision(Pause(reason="rung 3")), PAUSE, make_finish(FinishKind.PRUNED)], "pruned", "pruned @3"),
        ([make_decision(Continue()), *BY_ADA], "interrupted", "interrupted @3"),
        ([make_decision(Pause(reason="rung 3")), *BY_ADA], "interrupted", "interrupted @3"),
        *(
            ([AttemptEnded(trial="t", cause=cause, reason="stopped")], "interrupted", "interrupted @3")
            for cause in Cause
        ),
        ([EVENTS["attempt-ended"], SECOND_START], "running", "running"),
        ([EVENTS["attempt-ended"], SECOND_START, PAUSE, RESUME], "pending", "pending"),
        ([PAUSE, RESUME, EVENTS["trial-finished"], EVENTS["trial-requeued"]], "pending", "pending"),
        ([EVENTS["attempt-ended"], EVENTS["trial-errored"]], "errored", "errored"),
    ],
)
def test_a_status_follows_from_the_events_of_a_trial(events: list[AnyTrialEvent], status: str, label: str) -> None:
    assert describe_status(*events) == (status, label)


def test_before_its_first_step_a_trial_is_pending_or_interrupted_at_no_step() -> None:
    assert describe_status(steps=0) == ("pending", "pending")
    first, end = (
        AttemptStarted(trial="t", attempt=1, from_step=0),
        AttemptEnded(trial="t", cause=Cause.PREEMPTED, reason=""),
    )
    assert describe_status(first, end, steps=0) == ("interrupted", "interrupted")


def test_a_target_holds_the_phases_that_earlier_releases_wrote() -> None:
    """These literals are stored on targets and never change."""
    assert [str(phase) for phase in Phase] == ["pending", "running", "paused", "finished", "errored"]
    document = Trial(id="t", config={}, phase=Phase.FINISHED).model_dump_json()
    assert json.loads(document)["phase"] == "finished"
    assert Trial.model_validate_json(document).status is Status.COMPLETED


def test_every_phase_has_a_status_and_every_status_a_word_of_its_own() -> None:
    assert [str(status) for status in Status] == [
        *("completed", "pruned", "interrupted", "errored", "running", "paused", "pending")
    ]
    assert {Trial(id="t", config={}, phase=phase).status for phase in Phase} <= set(Status)
