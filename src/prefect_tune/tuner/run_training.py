"""Run a single training: a search of one trial, with a given configuration, that writes the experiment's journal."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from prefect_tune.attempt.attempt import CurveReader, has_had_enough
from prefect_tune.attempt.graceful_stop import interruptible
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.core.errors import TrialFailed
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, newest_checkpoint
from prefect_tune.core.schedulers.base import FIFO
from prefect_tune.core.search.base import Exhausted, Proposals, Proposed, Suggestion
from prefect_tune.core.search.objective import UNNAMED
from prefect_tune.core.shown_text import first_line, plural, visible
from prefect_tune.executors.trial_executor import LocalExecutor, TrialExecutor, call_attempt
from prefect_tune.journal_access import JournalWriter, read_known
from prefect_tune.monitoring.event_emitter import EventEmitter, ExperimentAddress, emitting_events
from prefect_tune.monitoring.live_report import Reporter, reported
from prefect_tune.monitoring.progress import SearchLog, progress
from prefect_tune.monitoring.search_observer import DisplayGroup, LiveStatusPublisher, SearchRecorder
from prefect_tune.parameters.argument_checks import storable_config
from prefect_tune.parameters.import_check import require_importable
from prefect_tune.parameters.plan_checks import SearchLimits, require_same_training, spec_of_one_trial
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.task_runs import quiet_inner_tasks
from prefect_tune.storage_retries import retrying_refusals
from prefect_tune.suspension.resume_forms import last_form
from prefect_tune.suspension.suspend_and_resume import (
    TRAINING_QUESTION,
    Turn,
    as_one_owner,
    ask_if_suspended,
    code_changed,
    first_turn,
    follow_up,
    take_over,
)
from prefect_tune.tasks.experiments import check_target, write_entry
from prefect_tune.terminal.live_display import NOTICE
from prefect_tune.terminal.progress_view import SearchEstimate
from prefect_tune.tuner.driver import Driver
from prefect_tune.tuner.search_policy import ONLY_TRIAL, SearchPolicy
from prefect_tune.tuner.stop_requests import StopSource


def trained(plan: SearchPlan, config: object) -> tuple[TrialSpec, Trial] | TrialFailed:
    """Train the one trial of `plan` within a flow run, until it is done or a retry budget is spent.

    Returns:
        its specification, and its state; the error of a trial whose budget is spent. Raises what
        `durable_trainable` raises otherwise.
    """
    with quiet_inner_tasks():
        turn = first_turn(Turn(plan), TRAINING_QUESTION, last_form())
        spec, stopper = spec_of_one_trial(turn.plan, ONLY_TRIAL)
        require_importable(plan.trainable, plan.isolation, get_run_logger(), spec.cadence)
        state = _trained(_TrainingPlan(spec, storable_config(config), stopper, plan), turn)
        ask_if_suspended(turn.plan, TRAINING_QUESTION, state)
    trial = state.trial(ONLY_TRIAL)
    if trial.phase is Phase.ERRORED:
        return TrialFailed(f"{state.name}: {first_line(trial.reason)}")
    _log_unsaved_steps(trial)
    return replace(spec, trial=state.trial_key(ONLY_TRIAL)), trial


@dataclass(frozen=True, slots=True)
class _TrainingPlan:
    """The resolved parameters of the flow run."""

    spec: TrialSpec
    config: Mapping[str, object]
    stopper: Stopper
    options: SearchPlan

    def of(self, state: Experiment) -> _TrainingPlan:
        """Return the plan for the generation of the experiment that was found."""
        return replace(self, spec=replace(self.spec, trial=state.trial_key(ONLY_TRIAL)))

    def is_done(self, state: Experiment) -> bool:
        """Whether the trial has finished, by today's stop criterion too."""
        trial = state.trials.get(ONLY_TRIAL)
        return (
            trial is not None
            and trial.phase is Phase.FINISHED
            and has_had_enough(trial, self.stopper, CurveReader(self.spec.target, state.key))
        )


def _trained(begun: _TrainingPlan, turn: Turn) -> Experiment:
    target = begun.spec.target

    def train(stop: threading.Event) -> Experiment:
        check_target(target)
        known = turn.known or read_known(target, turn.plan.experiment)
        training = begun.of(known)
        spec = training.spec
        require_same_training(known, spec, training.config)  # before an earlier owner is superseded
        if spec.isolation == "process" and not _is_finished(known):
            pool.prepare(spec.trainable, get_run_logger())  # its fork server starts while the experiment opens
        opened = _opened(training, turn, known)
        journal_writer = JournalWriter(spec.target, opened, write_entry, turn.reached)
        with retrying_refusals():
            if news := follow_up(spec, opened, turn):
                journal_writer.write(news)
            return _driven(training, journal_writer, known, LocalExecutor(pool, launch=call_attempt), stop)

    with TrialProcessPool(slots=0) as pool, as_one_owner(turn):
        return interruptible(train, grace=begun.spec.grace, request_period=begun.spec.sync.request_period)


def _driven(
    training: _TrainingPlan,
    journal_writer: JournalWriter,
    before: Experiment,
    executor: TrialExecutor,
    stop: threading.Event,
) -> Experiment:
    spec, log, state = training.spec, get_run_logger(), journal_writer.experiment
    is_done = training.is_done(state)
    _log_progress(training, state, is_done=is_done)
    limits = SearchLimits(
        options=training.options.extended(rerun_errored=True),
        max_concurrent_trials=1,
        has_had_enough=lambda _: is_done,
    )
    policy = SearchPolicy(_OneConfig(training.config), FIFO().begin(UNNAMED, 0))
    outlook = SearchEstimate(state.name, None, 1, training.stopper.step_count, is_training=True)
    recorder = SearchRecorder(state)
    address = ExperimentAddress(spec.target.uri, spec.trial.experiment)
    emitter = EventEmitter(address, None, recorder, log)
    reporter = Reporter(spec.target, recorder, outlook, log)
    lines = SearchLog(recorder, None, spec.target.uri, log)
    with (
        reported(reporter, stop),
        nullcontext() if is_done else emitting_events(emitter, stop, before),
        progress(recorder, outlook, lines.notes, log, stop, in_terminal=spec.isolation == "process") as shown,
        LiveStatusPublisher(spec.target, recorder.read, spec.sync.live_period),
    ):
        observers = DisplayGroup([recorder, lines, emitter, reporter, shown], log)
        driver = Driver(spec, limits, policy, executor, journal_writer, log=log, listener=observers)
        state = driver.run(StopSource(stop))
        reporter.conclude()  # it draws the last page while the event emitter ends
    return state


class _OneConfig(Proposals):
    """Proposes the one configuration that was passed."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config

    def suggest(self, number: int) -> Suggestion:
        return Exhausted(reason="its one trial was added") if number else Proposed(config=self._config)

    def recall(self, number: int, config: Mapping[str, object]) -> None:
        del number, config


def _opened(training: _TrainingPlan, turn: Turn, known: Experiment) -> Experiment:
    state = take_over(turn, known, slots=1)
    require_same_training(state, training.spec, training.config)  # another run may have begun it since it was read
    turn.reached(state)
    return state


def _is_finished(state: Experiment) -> bool:
    return ONLY_TRIAL in state.trials and state.trial(ONLY_TRIAL).phase is Phase.FINISHED


def _log_progress(training: _TrainingPlan, state: Experiment, *, is_done: bool) -> None:
    spec, trial, log = training.spec, state.trials.get(ONLY_TRIAL), get_run_logger()
    where = f"experiment {state.name!r} at {spec.target.uri}"
    newest = newest_checkpoint(trial) if trial else None
    if trial is not None and is_done:
        log.info("%s: finished already, at step %d: %s", where, trial.step, visible(trial.reason), extra=NOTICE)
    elif trial is not None and newest is not None:
        attempts = plural(trial.attempt, "attempt", "attempts")
        log.info("%s: resumes from step %d, after %s", where, newest.step, attempts, extra=NOTICE)
        if changed := code_changed(spec.target, spec.trial, trial, training.options.trainable):
            log.warning("%s: training continues with the new code", changed)
    elif (trial and trial.attempt) or (flow_run.run_count or 1) > 1:
        log.warning("%s: no checkpoint was ever committed, so training starts again from step 0", where)
    else:
        log.info("%s: starts from step 0", where)


def _log_unsaved_steps(trial: Trial) -> None:
    newest = newest_checkpoint(trial)
    saved = newest.step if newest else 0
    if trial.phase is Phase.FINISHED and saved < trial.step:
        get_run_logger().warning(
            "the newest checkpoint is of step %d; the %d steps after it were reported, but not saved",
            saved,
            trial.step - saved,
        )
