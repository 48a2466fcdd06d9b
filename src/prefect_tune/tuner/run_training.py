"""Run a single training, as a search with one trial and a fixed configuration, and write the experiment's journal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from prefect_tune.attempt.attempt import ReportReader, stays_finished
from prefect_tune.attempt.graceful_stop import run_interruptible
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.core.display_text import first_line, make_visible, pluralize
from prefect_tune.core.errors import TrialFailed
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, newest_checkpoint
from prefect_tune.core.schedulers.base import FIFO
from prefect_tune.core.search.base import Exhausted, Proposed, SearchState, Suggestion
from prefect_tune.core.search.objective import PLACEHOLDER_OBJECTIVE
from prefect_tune.executors.trial_executor import LocalExecutor, launch_in_thread
from prefect_tune.journal_access import JournalWriter, read_experiment_to_resume
from prefect_tune.monitoring.event_emitter import EventEmitter, ExperimentAddress, emitting_events
from prefect_tune.monitoring.live_report import ReportObserver, publishing_report
from prefect_tune.monitoring.progress import SearchLog, showing_progress
from prefect_tune.monitoring.search_observer import LiveStatusPublisher, ObserverGroup, SearchObserver, SearchRecorder
from prefect_tune.parameters.argument_checks import config_to_json
from prefect_tune.parameters.import_check import require_importable
from prefect_tune.parameters.plan_checks import SearchLimits, make_single_trial_spec, require_same_training
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.task_runs import quieting_inner_tasks
from prefect_tune.storage_retries import retrying_refusals
from prefect_tune.suspension import (
    TRAINING_QUESTION,
    RunSegment,
    acquire_run_ownership,
    apply_answers,
    code_change_warning,
    handling_takeover_and_interrupt,
    make_answer_events,
    raise_pause_if_suspended,
    read_last_form,
)
from prefect_tune.tasks.experiments import check_target, write_entry
from prefect_tune.terminal.live_display import NOTICE
from prefect_tune.terminal.progress_view import SearchExtent
from prefect_tune.tuner.driver import Driver
from prefect_tune.tuner.search_policy import ONLY_TRIAL, SearchPolicy
from prefect_tune.tuner.stop_requests import StopSource


def run_training(plan: SearchPlan, config: object) -> tuple[TrialSpec, Trial] | TrialFailed:
    """Train the one trial of `plan` within a flow run, until the trial is finished or a retry budget is spent.

    Returns:
        The trial's specification and state; or, if a retry budget is spent, the error to raise. The other errors of
        `durable_trainable` are raised here.
    """
    with quieting_inner_tasks():
        segment = apply_answers(RunSegment(plan), TRAINING_QUESTION, read_last_form())
        spec, stopper = make_single_trial_spec(segment.plan, ONLY_TRIAL)
        require_importable(plan.trainable, plan.isolation, get_run_logger(), spec.cadence)
        state = _run_training_segment(spec, config_to_json(config), stopper, segment)
        raise_pause_if_suspended(segment.plan, TRAINING_QUESTION, state)
    trial = state.trial(ONLY_TRIAL)
    if trial.phase is Phase.ERRORED:
        return TrialFailed(f"{state.name}: {first_line(trial.reason)}")
    newest = newest_checkpoint(trial)
    saved_step = newest.step if newest else 0
    if trial.phase is Phase.FINISHED and saved_step < trial.step:
        message = "the newest checkpoint is of step %d; the %d steps after it were reported but not saved"
        get_run_logger().warning(message, saved_step, trial.step - saved_step)
    return replace(spec, trial=state.trial_key(ONLY_TRIAL)), trial


def _run_training_segment(
    spec: TrialSpec, config: Mapping[str, object], stopper: Stopper, segment: RunSegment
) -> Experiment:
    target, plan = spec.target, segment.plan

    def train(stop: threading.Event) -> Experiment:
        check_target(target)
        state_before = segment.loaded_experiment or read_experiment_to_resume(target, plan.experiment)
        trial_spec = replace(spec, trial=state_before.trial_key(ONLY_TRIAL))
        require_same_training(state_before, trial_spec, config)  # first: a rejected run must not supersede an owner
        was_finished = ONLY_TRIAL in state_before.trials and state_before.trial(ONLY_TRIAL).phase is Phase.FINISHED
        if spec.isolation == "process" and not was_finished:
            pool.start_import(spec.trainable, get_run_logger())  # so that the fork server starts during the takeover
        state = acquire_run_ownership(segment, state_before, slots=1)
        require_same_training(state, trial_spec, config)  # again, since another run may have started meanwhile
        journal_writer = segment.set_journal_writer(JournalWriter(target, state, write_entry))
        with retrying_refusals():
            if follow_up_events := make_answer_events(trial_spec, state, segment):
                journal_writer.write(follow_up_events)
            return drive(trial_spec, journal_writer, state_before, stop)

    def drive(spec: TrialSpec, journal_writer: JournalWriter, before: Experiment, stop: threading.Event) -> Experiment:
        state, trial = journal_writer.experiment, journal_writer.experiment.trials.get(ONLY_TRIAL)
        is_finished = (
            trial is not None
            and trial.phase is Phase.FINISHED
            and stays_finished(trial, stopper, ReportReader(target, state.key))  # the stop criterion may have changed
        )
        _log_resume_point(spec, plan, state, is_finished=is_finished)
        retry_plan = plan.with_changes(rerun_errored=True)
        limits = SearchLimits(plan=retry_plan, max_concurrent_trials=1, stays_finished=lambda _: is_finished)
        policy = SearchPolicy(_SingleConfigSearchState(config), FIFO().begin(PLACEHOLDER_OBJECTIVE, 0))
        extent = SearchExtent(state.name, None, 1, stopper.step_count, is_training=True)
        executor, log = LocalExecutor(pool, launch=launch_in_thread), get_run_logger()
        observing = observing_run(state, spec, extent, stop, state_before=before, emits_events=not is_finished)
        with observing as (observers, reporter):
            observer = ObserverGroup(observers, log)
            driver = Driver(spec, limits, policy, executor, journal_writer, log=log, observer=observer)
            state = driver.run(StopSource(stop))
            reporter.begin_final_report()  # draws the last page while the event emitter ends
        return state

    with TrialProcessPool(slots=0) as pool, handling_takeover_and_interrupt(segment):
        return run_interruptible(train, grace=spec.grace_period, poll_interval=spec.sync.request_period)


@contextmanager
def observing_run(
    state: Experiment,
    spec: TrialSpec,
    extent: SearchExtent,
    stop: threading.Event,
    *,
    is_running: Callable[[str], bool] = lambda _: True,
    state_before: Experiment | None = None,
    emits_events: bool = True,
) -> Iterator[tuple[Sequence[SearchObserver], ReportObserver]]:
    """Yield the observers that show a run in the log, the terminal, Prefect's UI and events, and the live status.

    Args:
        state: the experiment after the run has acquired it.
        spec: how its trials are trained.
        extent: the expected number of trials and steps, and the time budget.
        stop: set when a stop of the run is requested.
        is_running: returns whether the trial with this id is running now.
        state_before: the experiment before this run, see `EventEmitter.emit_start`.
        emits_events: whether the run emits events to Prefect.
    """
    target, log, recorder = spec.target, get_run_logger(), SearchRecorder(state)
    search_log = SearchLog(recorder, extent.objective, target.uri, log)
    emitter = EventEmitter(ExperimentAddress(target.uri, extent.experiment), extent.objective, recorder, log)
    in_terminal = spec.isolation == "process"  # with threads, a debugger may use the terminal
    with (
        publishing_report(ReportObserver(target, recorder, extent, log), stop) as reporter,
        emitting_events(emitter, stop, state_before) if emits_events else nullcontext(),
        showing_progress(recorder, extent, search_log.notes, log, stop, in_terminal=in_terminal) as progress_view,
        LiveStatusPublisher(target, recorder.read_search_snapshot, spec.sync.live_period, is_running),
    ):
        yield [recorder, search_log, emitter, progress_view, reporter], reporter


class _SingleConfigSearchState(SearchState):
    """Proposes the one configuration that was passed."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config

    def suggest(self, number: int) -> Suggestion:
        return Exhausted(reason="its one trial was added") if number else Proposed(config=self._config)

    def restore_trial(self, number: int, config: Mapping[str, object]) -> None:
        del number, config


def _log_resume_point(spec: TrialSpec, plan: SearchPlan, state: Experiment, *, is_finished: bool) -> None:
    trial, log = state.trials.get(ONLY_TRIAL), get_run_logger()
    location = f"experiment {state.name!r} at {spec.target.uri}"
    newest = newest_checkpoint(trial) if trial else None
    if trial is not None and is_finished:
        log.info("%s: already finished, at step %d: %s", location, trial.step, make_visible(trial.reason), extra=NOTICE)
    elif trial is not None and newest is not None:
        attempts = pluralize(trial.attempt, "attempt", "attempts")
        log.info("%s: resumes from step %d after %s", location, newest.step, attempts, extra=NOTICE)
        if code_change := code_change_warning(spec.target, spec.trial, trial, plan.trainable):
            log.warning("%s: training continues with the new code", code_change)
    elif (trial and trial.attempt) or (flow_run.run_count or 1) > 1:
        log.warning("%s: no checkpoint was committed, so training restarts from step 0", location)
    else:
        log.info("%s: starts from step 0", location)
