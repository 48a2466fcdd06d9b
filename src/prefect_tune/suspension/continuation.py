"""How a suspended search or training continues: the form, and a person's choice, carried out once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import CheckpointNotFound, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.resume_choice import ResumeChoice, ResumeLimits
from prefect_tune.core.experiment.trial_transitions import ENDED, Trial, newest_key
from prefect_tune.core.journal.journal import LoadedJournal
from prefect_tune.core.journal_events import Cloned, Event, Finished, Requeued
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.search.random_search import DEFAULT_SAMPLES
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.journal_access import new_write_id, read_known
from prefect_tune.parameters import search_limits
from prefect_tune.parameters.argument_checks import code_of
from prefect_tune.parameters.resume_compatibility import code_note
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.flow_runs import call_path
from prefect_tune.storage_retries import skip_prefect_introspection, with_retries
from prefect_tune.suspension.resume_forms import (
    InputForm,
    form_of_search,
    form_of_training,
    last_form,
    limits_of,
    page_of,
    stop_after,
    unjournaled,
)
from prefect_tune.suspension.suspend_loop import STOPPED_HERE, ResumeQuestion, Turn, first_turn
from prefect_tune.tasks.checkpoints import clone_checkpoint
from prefect_tune.tasks.maintenance import damage_of_checkpoint


def first_search_turn(plan: SearchPlan, known: LoadedJournal | None) -> Turn:
    """Return the first turn of a search's flow run, with the samples that it adds. Raises what `first_turn` raises."""
    shown = last_form()
    if shown is None and plan.samples_per_run is None:
        return Turn(plan if known is None else search_limits.with_default_samples(plan, known.experiment), known)
    known = known or with_retries(lambda: read_known(plan.target, plan.experiment))
    plan, _ = search_limits.extended(plan, known.experiment, call_path)
    return first_turn(Turn(plan, known), SEARCH_QUESTION, shown)


def _search_limits(plan: SearchPlan, _state: Experiment) -> ResumeLimits:
    return limits_of(plan.stop, samples=_samples(plan)).model_copy(update={"hours": 0.0})


def _samples(plan: SearchPlan) -> int:
    return plan.num_samples or (0 if plan.search is not None else DEFAULT_SAMPLES)


def _search_extended(plan: SearchPlan, choice: ResumeChoice) -> SearchPlan:
    if choice.way != "extend":
        return plan
    return plan.extended(
        num_samples=choice.samples if choice.samples > _samples(plan) else plan.num_samples,
        stop=stop_after(plan.stop, choice.model_copy(update={"hours": 0.0})),
        time_budget_seconds=3600 * choice.hours if choice.hours else plan.time_budget_seconds,
    )


def _search_form(plan: SearchPlan, state: Experiment, why: str) -> InputForm:
    page = page_of(state, plan.target.uri, plan.objective, code_note(state, plan), why)
    return form_of_search(_search_limits(search_limits.with_default_samples(plan, state), state), page)


SEARCH_QUESTION = ResumeQuestion(_search_limits, _search_extended, _search_form)
"""How to continue a search."""


def _why_not_back(target: StorageTarget, state: Experiment, choice: ResumeChoice) -> str:
    """Return why the training cannot resume from the chosen checkpoint; empty if it can, or none was chosen."""
    if choice.way != "other checkpoint":
        return ""
    (trial,) = state.trials.values()
    key = _checkpoint_at(state.trial_key(trial.trial), trial, choice.checkpoint)
    damage = damage_of_checkpoint(target, key)
    return damage and f"checkpoint: step {choice.checkpoint} cannot be used: {damage}"


def follow_up(spec: TrialSpec, state: Experiment, turn: Turn) -> Sequence[Event]:
    """Return the answer's events, and those that carry it out: one entry, so that a retry after a kill does it.

    Nothing if another start of this run has carried out the answer.
    """
    if not (news := unjournaled(turn.news, state)):
        return ()
    trial = state.trials.get(spec.trial.trial)
    return [*news, *(_follows(spec, state, trial, turn.choice) if trial and turn.choice else ())]


def _follows(spec: TrialSpec, state: Experiment, trial: Trial, choice: ResumeChoice) -> Sequence[Event]:
    match choice.way:
        case "stop here":
            finished = Finished(trial=trial.trial, reason=STOPPED_HERE, ended_early=True)
            return [] if trial.phase in ENDED else [finished]
        case "other checkpoint":
            back = Requeued(trial=trial.trial, reason=f"it returns to step {choice.checkpoint}, as chosen on Resume")
            return [back, _copy(spec, state, trial, choice.checkpoint)]
        case "continue" | "extend":
            return []


def _copy(spec: TrialSpec, state: Experiment, trial: Trial, step: int) -> Cloned:
    """Clone an earlier checkpoint of the trial as its newest. It writes one manifest; later checkpoints stay."""
    key = _checkpoint_at(state.trial_key(trial.trial), trial, step)
    cloned = clone_checkpoint(spec.target, key, skip_prefect_introspection(state), trial.trial, new_write_id())
    reason = f"returned to step {step}, as chosen on Resume"
    return Cloned(trial=trial.trial, checkpoint=cloned.checkpoint, source=cloned.source, reason=reason)


def _checkpoint_at(place: TrialKey, trial: Trial, step: int) -> CheckpointKey:
    """Return the newest checkpoint of a step. Raises `CheckpointNotFound` if it was retired since the choice."""
    found = [each for each in trial.checkpoints if each.step == step]
    if not found:
        raise CheckpointNotFound(f"{place.folder}: the checkpoint of step {step} is gone; press Retry to choose again")
    return place.checkpoint_key(found[-1])


def _training_limits(plan: SearchPlan, state: Experiment) -> ResumeLimits:
    steps = [each.step for trial in state.trials.values() for each in trial.checkpoints]
    return limits_of(plan.stop, checkpoints=sorted(set(steps)))


def _training_extended(plan: SearchPlan, choice: ResumeChoice) -> SearchPlan:
    return plan.extended(stop=stop_after(plan.stop, choice))


def _training_form(plan: SearchPlan, state: Experiment, why: str) -> InputForm:
    page = page_of(state, plan.target.uri, None, _code_note(plan.target, plan.trainable, state), why)
    return form_of_training(_training_limits(plan, state), page)


def _code_note(target: StorageTarget, trainable: object, state: Experiment) -> str:
    for name, trial in state.trials.items():
        if changed := code_changed(target, state.trial_key(name), trial, trainable):
            return f"⚠️ {changed}"
    return "code: unchanged since the newest checkpoint, as far as can be told"


def code_changed(target: StorageTarget, folder: TrialKey, trial: Trial, trainable: object) -> str:
    """Return a warning if the trainable's source has changed since the newest checkpoint.

    Empty if it has not, or if one of the two is unknown.
    """
    key, now = newest_key(folder, trial), code_of(trainable)
    before = _code_of_checkpoint(target, key) if key and now else ""
    if key is None or not before or before == now:
        return ""
    return f"the source of the trainable has changed since the checkpoint of step {key.step} ({before} -> {now})"


def _code_of_checkpoint(target: StorageTarget, key: CheckpointKey) -> str:
    """Return the digest of the trainable's source that wrote `key`; empty if it is unknown or cannot be read now."""
    try:
        with target.open(timeout=timedelta(seconds=30)) as store:
            return read_manifest(store, key).about.fingerprint.get("code", "")
    except TuneError:
        return ""


TRAINING_QUESTION = ResumeQuestion(_training_limits, _training_extended, _training_form, _why_not_back)
"""How to continue a single training."""
