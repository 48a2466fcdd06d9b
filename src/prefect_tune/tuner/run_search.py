"""Run a search, from its plan to its results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from prefect_tune.attempt.attempt import ReportReader, stays_finished
from prefect_tune.attempt.graceful_stop import run_interruptible
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import StorageTarget, resolve_target
from prefect_tune.blocks.resolve_target import validate_target
from prefect_tune.callbacks import Callback, SearchInfo
from prefect_tune.core.display_text import make_visible, pluralize, shorten
from prefect_tune.core.errors import InvalidInput, JournalCorrupt, SearchFailed, TuneError
from prefect_tune.core.experiment.experiment import Experiment, last_report
from prefect_tune.core.experiment.failure_policy import repeated_error_reason
from prefect_tune.core.experiment.stoppers import extract_experiment_stoppers, extract_trial_stopper
from prefect_tune.core.experiment.summary import count_by_status, find_best_trial, format_best_label
from prefect_tune.core.experiment.trial_transitions import Phase, Status
from prefect_tune.core.journal.journal import read_entry_if_exists
from prefect_tune.core.journal_events import Event, ExperimentConfigured, PriorTrial, WarmStart
from prefect_tune.core.reasons import Reason, find_root_error
from prefect_tune.core.schedulers.base import FIFO, Schedule, Scheduler
from prefect_tune.core.search.objective import PLACEHOLDER_OBJECTIVE, Objective
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import canonical_json, iter_leaves, validate_name
from prefect_tune.executors.launchers import DeploymentLauncher, TaskRunnerLauncher
from prefect_tune.executors.remote_executor import RemoteExecutor
from prefect_tune.executors.trial_executor import (
    LocalExecutor,
    Slots,
    TrialExecutor,
    make_local_slots,
    make_remote_slots,
    make_thread_pool_launcher,
)
from prefect_tune.journal_access import (
    JournalWriter,
    missing_experiment_message,
    read_experiment_to_resume,
    write_entry_directly,
)
from prefect_tune.monitoring.callback_runner import CallbackRunner, resolve_callbacks
from prefect_tune.monitoring.event_emitter import ExperimentAddress
from prefect_tune.monitoring.search_observer import CurveCollector, ObserverGroup, SearchObserver
from prefect_tune.parameters import plan_checks
from prefect_tune.parameters.import_check import require_importable
from prefect_tune.parameters.plan_checks import (
    NEW_CODE_TRAINS,
    NEW_CODE_UNUSED,
    RETRY_KEEPS_CONFIGURATION,
    SearchLimits,
    find_external_task_runner,
    make_trial_spec,
    require_compatible_settings,
    require_presence,
    require_single_writer,
    require_unchanged_code,
    require_valid_sync,
    warn_of_code_change,
    warn_of_constant_space,
    warn_of_errored_trials,
    warn_of_no_metric,
    warn_of_space_change,
    warn_of_too_few_samples,
    warn_of_unusual_mode,
    warn_of_unusual_stop_limits,
    with_journal_digest,
    with_journal_seed,
)
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.call_paths import current_call_path
from prefect_tune.prefect_api.flow_runs import make_failed_result
from prefect_tune.prefect_api.task_runs import current_max_workers, quieting_inner_tasks, skip_prefect_introspection
from prefect_tune.results import Results
from prefect_tune.storage_retries import retrying_refusals, with_store
from prefect_tune.suspension import (
    SEARCH_QUESTION,
    STOPPED_ON_RESUME,
    RunSegment,
    acquire_run_ownership,
    handling_takeover_and_interrupt,
    is_form_answered,
    prepare_search_segment,
    raise_pause_if_suspended,
)
from prefect_tune.tasks.experiments import check_target, publish_results
from prefect_tune.terminal.formatting import format_counts, format_trial, format_value, group_trials_by_error
from prefect_tune.terminal.live_display import NOTICE
from prefect_tune.terminal.progress_view import SearchExtent, resumes_all_paused_trials
from prefect_tune.trust import sign_settings
from prefect_tune.tuner.driver import Driver
from prefect_tune.tuner.run_training import observing_run
from prefect_tune.tuner.search_policy import SearchPolicy
from prefect_tune.tuner.stop_requests import StopRequestPoller

# The lines that a search logs when it starts, and when there was nothing to train.

_MAX_LINE_LENGTH = 400


def log_search_start(plan: SearchPlan, state: Experiment, slots: Slots, where: str, log: Log) -> None:
    """Log four lines: the experiment's trials and target, the space, the scheduler, and the slots.

    `state` is the experiment before this run changes it; `where` says where the trials run, like `on this machine`.
    """
    count, objective, resources = plan.trial_count, plan.objective, plan.resources_per_trial
    space = ", ".join(f"{name} {value!r}" for name, value in iter_leaves(plan.space or {})) or "empty"
    trials = "trials" if count is None else pluralize(count, "trial", "trials")
    scheduler = "none, every trial trains to its end" if plan.scheduler is None else repr(plan.scheduler)
    metrics = "no metric"
    if objective is not None:
        metrics = ", ".join(f"{name} ({mode})" for name, mode in zip(objective.metrics, objective.modes, strict=True))
    trial_size = (f", each with {format_value(resources)}" if resources else "") + _describe_processes(plan, slots)
    for line in (
        f"experiment {plan.experiment!r} at {plan.target.uri}: {_describe_trials(state, objective)}",
        f"space: {space}; {trials} by {type(plan.effective_search).__name__}, seed {plan.effective_seed}",
        f"scheduler: {scheduler}; {metrics}",
        f"slots: {pluralize(slots.count, 'trial', 'trials')} at once {where}{trial_size}",
    ):
        log.info("%s", make_visible(shorten(line, _MAX_LINE_LENGTH)))


def warn_of_takeover(state_before: Experiment, log: Log) -> None:
    """Warn if the previous owner left trials running in `state_before`, the experiment before the takeover."""
    running = sum(trial.phase is Phase.RUNNING for trial in state_before.trials.values())
    if running and state_before.owner is not None:
        owner = state_before.owner
        is_same_run = owner.flow_run is not None and owner.flow_run == flow_run.id
        other_owner = f"an earlier process of this run, pid {owner.pid} on {owner.host}," if is_same_run else str(owner)
        log.warning(
            "%s left %s running, and this %s takes over: if the earlier one is still alive, its next write fails "
            "with Superseded, and it ends",
            make_visible(other_owner),
            pluralize(running, "trial", "trials"),
            "process" if is_same_run else "run",
        )


def log_if_already_finished(plan: SearchPlan, state_before: Experiment, state_after: Experiment, log: Log) -> None:
    """Log how to train more, if the experiment was already finished before this run and this run trained nothing.

    For errored trials, `warn_of_errored_trials` or the error of the search says what to do.
    """
    before, after = state_before.trials.values(), state_after.trials.values()
    was_finished = len(before) > 0 and all(trial.phase is Phase.FINISHED for trial in before)
    trained_nothing = [trial.attempt for trial in after] == [trial.attempt for trial in before]
    if was_finished and trained_nothing and not state_after.stop_reason and plan.effective_rerun_errored != "only":
        log.info(
            "experiment %r was already finished, and this run trained nothing: to train more, raise num_samples or "
            "stop, or choose another experiment name",
            state_before.name,
            extra=NOTICE,
        )


def _describe_processes(plan: SearchPlan, slots: Slots) -> str:
    """Return how many processes each trial has, with a note if they share processors; empty for one process."""
    if (process_count := plan.processes_per_trial) == 1:
        return ""
    if not isinstance(process_count, int):
        return f", each of {process_count[0]} to {process_count[1]} processes"
    total, share = slots.count * process_count, ""
    if slots.cpu_count is not None and total > slots.cpu_count:
        share = f"; {total} processes share {pluralize(slots.cpu_count, 'processor', 'processors')}"
    return f", each of {process_count} processes{share}"


def _describe_trials(state: Experiment, objective: Objective | None) -> str:
    if not state.trials:
        return "new"
    counts = {
        "left running" if name == Status.RUNNING else name: count for name, count in count_by_status(state).items()
    }
    description = f"{pluralize(len(state.trials), 'trial', 'trials')} found: {format_counts(counts)}"
    best = find_best_trial(state)
    if best is None or objective is None:
        return description
    return f"{description}; {format_best_label(objective)}: {format_trial(best, objective.metrics)}"


_POLL_INTERVAL = timedelta(seconds=0.5)


def run_search(plan: SearchPlan, experiment: Experiment | None = None) -> Results:
    """Run a search within a flow run. Raises like `tune`. `experiment` is the state that the caller has read, or None.

    The calling flow must return the value: the results or, if every trial errored, a Failed state with `SearchFailed`.
    """
    if experiment is None:  # a search that is resumed by name keeps its mode, and its first run has already warned
        warn_of_unusual_mode(plan, get_run_logger())
        warn_of_no_metric(plan, get_run_logger())
    with quieting_inner_tasks():
        segment = prepare_search_segment(plan, experiment)
        results = _run_search_segment(segment)
        raise_pause_if_suspended(segment.plan, SEARCH_QUESTION, results.experiment)
    error = search_failed_error(results, segment.initial_experiment)
    return results if error is None else make_failed_result(error, Results)


def _run_search_segment(segment: RunSegment) -> Results:
    plan, objective, log = segment.plan, segment.plan.objective, get_run_logger()
    stopper = extract_trial_stopper(plan.stopper)
    require_valid_sync(spec := make_trial_spec(plan, stopper))
    warn_of_unusual_stop_limits(stopper, objective, log)
    warn_of_constant_space(plan, log)
    policy = make_search_policy(plan)
    opening_executor, slots, location = _make_executor(plan, spec)
    callbacks = resolve_callbacks(plan.callbacks)
    known_state = require_presence(plan.target, plan.experiment, plan.resume, segment.loaded_experiment)
    names = parse_warm_start(plan.warm_start or ())
    warm_starts = read_warm_starts(names, plan.target, plan.experiment, segment.loaded_experiment)

    def search(stop: threading.Event) -> Experiment:
        with opening_executor as executor, retrying_refusals():  # opened first, since its fork server starts slowly
            if not check_target(plan.target).conditional_create:
                require_single_writer(plan.target.uri, "trials='deployment'" if plan.trials == "deployment" else "")
            state_before = known_state or read_experiment_to_resume(plan.target, plan.experiment)
            state, now, changes = _take_over_search(segment, state_before, warm_starts, slots)
            journal_writer = segment.set_journal_writer(JournalWriter(plan.target, state, write_entry_directly))
            if segment.answer is not None and not is_form_answered(state, segment.answer.event.key):
                changes = [segment.answer.event, *changes]
            if changes:
                journal_writer.write(changes)
            # The plan has changed if another run has added samples meanwhile, or if the journal has another seed.
            search_policy = (
                policy if (now.num_samples, now.seed) == (plan.num_samples, plan.seed) else make_search_policy(now)
            )
            if sources := journal_writer.experiment.warm_starts:
                prior = read_prior_trials(journal_writer)
                message = "warm start: %d finished trials of %s; the search uses %d of them"
                log.info(message, len(prior), ", ".join(sources), search_policy.add_prior_trials(prior), extra=NOTICE)
            log_search_start(now, state, slots, location, log)
            curves = ReportReader(plan.target, state.key)
            limits = SearchLimits(
                plan=plan,
                max_concurrent_trials=slots.count,
                end_reason=STOPPED_ON_RESUME if segment.is_stopping else None,
                stays_finished=lambda trial: stays_finished(trial, stopper, curves),
            )
            period, request_count = spec.sync.request_period, len(state.stop_requests)
            with (
                StopRequestPoller(plan.target, state.key, request_count, period, stop) as stop_requests,
                _observing_search(plan, spec, callbacks, journal_writer, executor.__contains__, stop) as observer,
            ):
                driver = Driver(
                    spec,
                    limits,
                    search_policy,
                    executor,
                    journal_writer,
                    log=log,
                    observer=observer,
                    make_code_change_events=lambda: _make_code_change_events(now, state, log),
                )
                final_state = driver.run(stop_requests)
                warn_of_code_change(final_state, now, NEW_CODE_UNUSED, log)
            if not stop.is_set():
                log_if_already_finished(now, state, final_state, log)
            return final_state

    with handling_takeover_and_interrupt(segment):
        final_state = run_interruptible(search, grace=spec.grace_period, poll_interval=spec.sync.request_period)
        return Results(final_state, plan.target, objective)


def _take_over_search(
    segment: RunSegment, state_before: Experiment, warm_starts: Sequence[WarmStart], slots: Slots
) -> tuple[Experiment, SearchPlan, Sequence[Event]]:
    """Take ownership of the experiment, and log what has changed since its last run.

    Return the state, the plan with the samples that this run adds, and the events to journal.
    """
    plan, log = segment.plan, get_run_logger()
    # Check before the takeover, since a rejected run must not disturb the present owner.
    require_compatible_settings(state_before, with_journal_seed(state_before, plan).settings)
    if plan.on_code_change == "refuse":
        require_unchanged_code(state_before, plan)
    state = acquire_run_ownership(segment, state_before, slots.count)
    warn_of_takeover(state_before, log)
    current_plan, added_samples = plan_checks.with_added_samples(
        with_journal_seed(state, plan), state, lambda: current_call_path(plan.experiment).key
    )
    require_compatible_settings(state, settings_now := current_plan.settings)
    settings = sign_settings(plan.target, state, with_journal_digest(state, settings_now))
    warn_of_space_change(state, current_plan, log)
    warn_of_too_few_samples(state, current_plan, log)
    warn_of_errored_trials(state, current_plan, log)
    new_warm_starts = tuple(warm_start for warm_start in warm_starts if warm_start.source not in state.warm_starts)
    configured = ExperimentConfigured(settings=settings, extensions=added_samples, warm_starts=new_warm_starts)
    return state, current_plan, [configured] if settings != state.settings or added_samples or new_warm_starts else []


def _make_code_change_events(plan: SearchPlan, state: Experiment, log: Log) -> Sequence[Event]:
    """If the trainable has changed, log the change, and return the event that journals the digest of the new code."""
    warn_of_code_change(state, plan, NEW_CODE_TRAINS, log)
    if not plan.source_digest or with_journal_digest(state, plan.settings) == plan.settings:
        return ()  # the code is unchanged or unknown, so the journal keeps the digest of the code that trained last
    return [ExperimentConfigured(settings=sign_settings(plan.target, state, plan.settings))]


def make_search_policy(plan: SearchPlan) -> SearchPolicy:
    """Return the policy of a search that has no trial yet.

    Raises:
        InvalidInput: the search, scheduler and space do not fit together, or a required metric is missing.
    """
    objective, seed, scheduler = plan.objective, plan.effective_seed, plan.scheduler or FIFO()
    stopper_states = [stopper.begin(objective) for stopper in extract_experiment_stoppers(plan.stopper)]
    proposals = plan.effective_search.begin(space := plan.space or {}, objective, seed)
    scheduler.require_supported_space(space)
    return SearchPolicy(proposals, begin_schedule(scheduler, objective, seed), stopper_states)


def begin_schedule(scheduler: Scheduler, objective: Objective | None, seed: int) -> Schedule:
    """Return the schedule of a new experiment. Raise `InvalidInput` if the scheduler needs a metric and has none."""
    if objective is None and not isinstance(scheduler, FIFO):
        raise InvalidInput(f"metric: {type(scheduler).__name__} compares trials by a metric; pass one: metric='loss'")
    return scheduler.begin(objective or PLACEHOLDER_OBJECTIVE, seed)


def _make_executor(plan: SearchPlan, spec: TrialSpec) -> tuple[AbstractContextManager[TrialExecutor], Slots, str]:
    """Return the executor of trials (local, task runner or deployment), its slots, and where the trials run."""
    if plan.trials == "deployment":
        launcher = DeploymentLauncher(plan.trial_deployment, plan.trial_job_variables)
        launcher.check_deployment(spec)
        location = f"as runs of the deployment {plan.trial_deployment!r}"
        return nullcontext(RemoteExecutor(plan.target, launcher, _POLL_INTERVAL)), make_remote_slots(plan), location
    if (runner := find_external_task_runner()) is not None:
        tasks = TaskRunnerLauncher(runner, plan.resources)
        location = f"by the {type(runner).__name__}"
        return nullcontext(RemoteExecutor(plan.target, tasks, _POLL_INTERVAL)), make_remote_slots(plan), location
    if plan.nodes_per_trial > 1:
        raise InvalidInput(
            f"nodes_per_trial={plan.nodes_per_trial}: expected trials='deployment' (a flow run per node), or "
            "pt.tune.with_options(task_runner=...) with the task runner of Dask or Ray (a task per node). To train "
            "with several processes on this machine, pass processes_per_trial"
        )
    # Check the import on this machine; on other machines, only an attempt can check it.
    require_importable(plan.trainable, plan.isolation, get_run_logger(), spec.cadence)
    max_workers, location = current_max_workers(), "on this machine"
    if max_workers is not None:
        location = f"{location} (its task runner has max_workers={max_workers})"
    return _running_local_executor(spec, slots := make_local_slots(plan, max_workers)), slots, location


@contextmanager
def _running_local_executor(spec: TrialSpec, slots: Slots) -> Iterator[TrialExecutor]:
    with (
        ThreadPoolExecutor(slots.count, "run-trial") as threads,
        TrialProcessPool(slots=slots.count, reuse=spec.reuse) as pool,
    ):
        if spec.isolation == "process":
            pool.start_import(spec.trainable, get_run_logger(), next(iter(slots.environments), {}))
        yield LocalExecutor(pool, slots.environments, launch=make_thread_pool_launcher(threads))


# The observers of a running search: callbacks, progress, events, report and learning curves.

_OBSERVER_TIMEOUT = timedelta(seconds=30)
_OBSERVER_TIMEOUT_WHEN_STOPPED = timedelta(seconds=2)


@contextmanager
def _observing_search(
    plan: SearchPlan,
    spec: TrialSpec,
    callbacks: Sequence[Callback],
    journal_writer: JournalWriter,
    is_running: Callable[[str], bool],
    stop: threading.Event,
) -> Iterator[SearchObserver]:
    """Yield the observer that the driver notifies; on exit, wait until the observers have processed their queues.

    On exit, publish the results, unless a stop was requested. All callbacks together get 30 s to finish, or only 2 s if
    a stop was requested.
    """
    target, objective, log, state = plan.target, plan.objective, get_run_logger(), journal_writer.experiment
    search = SearchInfo(plan.experiment, target.uri, objective, state.key.generation)
    extent = SearchExtent(
        plan.experiment,
        objective,
        trial_count=plan.trial_count,
        max_steps=extract_trial_stopper(plan.stopper).step_count,
        time_budget=plan.time_budget,
        resumes_all_paused=resumes_all_paused_trials(plan.scheduler),
    )
    runner, curve_collector = CallbackRunner(callbacks, target, search, log), CurveCollector(state)
    runner.start(state)
    try:
        with observing_run(state, spec, extent, stop, is_running=is_running) as (observers, reporter):
            yield ObserverGroup([curve_collector, *runner.threads, *observers], log)
            reporter.begin_final_report()  # draws the last page while the other observers end
            if not stop.is_set():
                final_state, curves = journal_writer.experiment, skip_prefect_introspection(curve_collector.curves)
                try:
                    publish_results(target, skip_prefect_introspection(final_state), objective, curves)
                except TuneError as error:  # the search still succeeds, since the journal has the same results
                    log.error("the results could not be published as files: %s", error)  # noqa: TRY400 - no trace: it is handled
    finally:
        runner.finish(journal_writer.experiment, _OBSERVER_TIMEOUT_WHEN_STOPPED if stop.is_set() else _OBSERVER_TIMEOUT)


# Warm start: results of earlier experiments. They are read once, and stored in the new experiment's journal.

_WARM_START_TIMEOUT = timedelta(minutes=5)


def parse_warm_start(warm_start: Sequence[object]) -> Sequence[str]:
    """Return the experiments to warm-start from, without duplicates: each is `name` (on this target) or `target/name`.

    Raises:
        InvalidInput: an element of `warm_start` has another form.
    """
    for source in warm_start:
        if not isinstance(source, str):
            type_name = type(source).__name__
            raise InvalidInput(f"warm_start: expected names of experiments, such as 'first', found a {type_name}")
        if "://" in source:
            validate_target(source)  # first, since an error about the name could quote a password in the location
        location, _, name = source.rpartition("/")
        validate_name(name)
        if location:
            validate_target(location)
    return list(dict.fromkeys(str(source) for source in warm_start))


def read_warm_starts(
    names: Sequence[str], target: StorageTarget, experiment: str, loaded: Experiment | None = None
) -> Sequence[WarmStart]:
    """Read the finished trials of the experiments `names`, even of running ones; skip sources that `experiment` used.

    `loaded` is the state of `experiment` that the caller has read; if it is None, the state is read here. The
    sources in this state are not read again, even if they have more finished trials now.

    Raises:
        InvalidInput: a source does not exist, or is `experiment` itself.
        ResumeFailed: a source cannot be read.
    """
    warm_starts: list[WarmStart] = []
    if not names:
        return warm_starts
    earlier_sources = (loaded or read_experiment_to_resume(target, experiment)).warm_starts
    for name in names:
        if name not in earlier_sources:
            location, _, source_name = name.rpartition("/")
            source_target = resolve_target(location) if location else target
            source_uri = ExperimentAddress(source_target.uri, source_name).experiment_uri
            if source_uri == ExperimentAddress(target.uri, experiment).experiment_uri:
                raise InvalidInput(
                    f"warm_start: {experiment!r} is the search itself, which has its own trials: pass other experiments"
                )
            state = read_experiment_to_resume(source_target, source_name)
            if not state.entry_count:
                raise InvalidInput(f"warm_start: {missing_experiment_message(source_target, source_name)}")
            trials = (
                PriorTrial(
                    trial=trial.id,
                    config=trial.config,
                    report=last_report(trial),
                    stopped=trial.policy_events[-1].stopped,
                )
                for trial in state.trials.values()
                if trial.phase is Phase.FINISHED and trial.step
            )
            warm_starts.append(WarmStart(source=name, location=source_uri, trials=tuple(trials)))
    return warm_starts


def read_prior_trials(journal_writer: JournalWriter) -> Sequence[PriorTrial]:
    """Return the other experiments' trials that the journal holds, without duplicates, in the order of the entries."""
    state = journal_writer.experiment

    def read_entries(store: ObjectStore) -> Sequence[WarmStart]:
        warm_starts: list[WarmStart] = []
        for number in sorted(set(state.warm_starts.values())):
            if (entry := read_entry_if_exists(store, state.key, number)) is None:
                raise JournalCorrupt(f"{state.key}: entry {number} is missing")
            configured = (event for event in entry.events if isinstance(event, ExperimentConfigured))
            warm_starts.extend(warm_start for event in configured for warm_start in event.warm_starts)
        return warm_starts

    return deduplicate_prior_trials(with_store(journal_writer.target, read_entries, _WARM_START_TIMEOUT))


def deduplicate_prior_trials(warm_starts: Sequence[WarmStart]) -> Sequence[PriorTrial]:
    """Return the trials of `warm_starts` in their order, without duplicates.

    Two trials are duplicates if their configurations and last reports are equal, as in a fork and its origin.
    """
    unique = {
        canonical_json([trial.config, trial.report.step, trial.report.metrics]): trial
        for warm_start in reversed(warm_starts)
        for trial in reversed(warm_start.trials)
    }
    return list(reversed(unique.values()))


# The error of a search in which every trial errored.

_MAX_CAUSES = 3
"""The maximum number of different errors that the message names."""


def search_failed_error(results: Results, state_before: Experiment | None) -> SearchFailed | None:
    """Return the error of a search whose trials all errored, or that ended by a repeated error; None otherwise.

    `state_before` is the experiment before this run; None if the run has not read it.
    """
    trials = results.trials
    if not trials or (len(results.errors) < len(trials) and not repeated_error_reason(trials.values())):
        return None
    old = {} if state_before is None else state_before.trials
    skipped = sum(trial.attempt == old[name].attempt for name, trial in trials.items() if name in old)
    return SearchFailed(_all_errored_message(results, skipped), results)


def _all_errored_message(results: Results, skipped: int) -> str:
    name, count = results.experiment.name, len(results.trials)
    causes = group_trials_by_error([trial for trial in results.trials.values() if trial.id in results.errors])
    (cause, (first, *_)), *others = causes
    if count == 1:
        summary = f"its only trial errored: {cause}"
    elif not others:
        summary = f"{len(results.errors)} of {count} trials errored, all with: {cause}"
    else:
        parts = [f"{len(trials)} with: {cause} (such as {trials[0].id})" for cause, trials in causes[:_MAX_CAUSES]]
        if (more := len(causes) - _MAX_CAUSES) > 0:
            parts.append(pluralize(more, "other error", "other errors"))
        summary = f"{count} of {count} trials errored: {'; '.join(parts)}"
    if isinstance(results.experiment.settings.get("trainable"), str):
        how_to_rerun = (
            f"pass rerun_errored=True (prefect-tune resume {results.target.cli_argument} {name} --rerun-errored)"
        )
    else:  # a script's function, which no other program can import
        how_to_rerun = f"pass experiment={name!r} and rerun_errored=True"
    rerun = f"{how_to_rerun}; {RETRY_KEEPS_CONFIGURATION}"
    if not skipped:
        message = f"{summary}. Remove the cause, then run the search again: {rerun}"
    else:
        not_retried = f"{pluralize(skipped, 'errored trial was', 'errored trials were')} not retried"
        note = f"{not_retried}: to retry with the code as it is now, {rerun}"
        message = f"{note}. In the earlier run {summary}" if skipped == count else f"{summary}. {note}"
    message = f"experiment {name!r}: {message}"
    error = find_root_error(first.end_reason)
    if not isinstance(error, Reason) or "traceback" not in error.arguments:  # its process crashed
        return message
    return f"{message}. To see the traceback: prefect-tune show {results.target.cli_argument} {name} --trial {first.id}"
