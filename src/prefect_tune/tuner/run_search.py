"""Run a search, from its plan to its results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from prefect_tune.attempt.attempt import CurveReader, has_had_enough
from prefect_tune.attempt.graceful_stop import interruptible
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import StorageTarget, resolve_target
from prefect_tune.blocks.resolve_target import validate_target
from prefect_tune.callbacks import Callback, SearchInfo
from prefect_tune.core.errors import InvalidInput, JournalCorrupt, SearchFailed, TuneError
from prefect_tune.core.experiment.experiment import Experiment, last_report
from prefect_tune.core.experiment.failure_policy import same_errors_reason
from prefect_tune.core.experiment.stoppers import of_experiment, of_trials
from prefect_tune.core.experiment.summary import best_label, best_of, counted
from prefect_tune.core.experiment.trial_transitions import Phase, Status
from prefect_tune.core.journal.journal import next_entry
from prefect_tune.core.journal_events import Configured, Event, PriorTrial, WarmStart
from prefect_tune.core.reasons import Reason, error_of
from prefect_tune.core.schedulers.base import FIFO, Schedule, Scheduler
from prefect_tune.core.search.objective import UNNAMED, Objective
from prefect_tune.core.shown_text import plural, shorten, visible
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import canonical_json, leaves, valid_name
from prefect_tune.executors.launchers import DeploymentLauncher, TaskRunnerLauncher
from prefect_tune.executors.remote_executor import RemoteExecutor
from prefect_tune.executors.trial_executor import (
    LocalExecutor,
    Slots,
    TrialExecutor,
    attempts_on,
    slots_elsewhere,
    slots_here,
)
from prefect_tune.journal_access import JournalWriter, no_experiment_at, read_known, write_directly
from prefect_tune.monitoring.callback_runner import Callbacks, callbacks_for
from prefect_tune.monitoring.event_emitter import ExperimentAddress
from prefect_tune.monitoring.search_observer import CurveKeeper, ObserverGroup, SearchObserver
from prefect_tune.parameters import plan_checks
from prefect_tune.parameters.import_check import require_importable
from prefect_tune.parameters.plan_checks import (
    CODE_TRAINS,
    CODE_UNUSED,
    KEEPS_CONFIGURATIONS,
    SearchLimits,
    log_code,
    log_errored,
    log_fewer_samples,
    log_space,
    require_code,
    require_one_runner,
    require_possible,
    require_presence,
    require_same,
    runner_elsewhere,
    settings_before_training,
    trial_spec,
    warn_of_constants,
    warn_of_limits,
    warn_of_mode,
    warn_of_no_metric,
    with_seed_of,
)
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.call_paths import call_path
from prefect_tune.prefect_api.flow_runs import failed_by
from prefect_tune.prefect_api.task_runs import max_workers_here, quiet_inner_tasks, skip_prefect_introspection
from prefect_tune.results import Results
from prefect_tune.storage_retries import on_target, retrying_refusals
from prefect_tune.suspension import (
    SEARCH_QUESTION,
    STOPPED_HERE,
    Turn,
    as_one_owner,
    ask_if_suspended,
    first_search_turn,
    is_answered,
    take_over,
)
from prefect_tune.tasks.experiments import check_target, publish_results
from prefect_tune.terminal.formatting import errors_by_cause, format_counts, format_trial, format_value
from prefect_tune.terminal.live_display import NOTICE
from prefect_tune.terminal.progress_view import SearchEstimate, resumes_paused
from prefect_tune.trust import signed_settings
from prefect_tune.tuner.driver import Driver
from prefect_tune.tuner.run_training import showing
from prefect_tune.tuner.search_policy import SearchPolicy
from prefect_tune.tuner.stop_requests import StopRequestPoller

# The summary that a search logs when it opens its experiment, and its last line if there was nothing to train.

_LONGEST = 400


def log_opening(plan: SearchPlan, found: Experiment, slots: Slots, where: str, log: Log) -> None:
    """Log what the experiment holds, its target, space, scheduler and slots: one line each.

    Args:
        found: the experiment as it was opened, before this run changes it.
        where: where the trials run, such as `on this machine`.
    """
    count, objective, needed = plan.trial_count, plan.objective, plan.resources_per_trial
    space = ", ".join(f"{name} {value!r}" for name, value in leaves(plan.space or {})) or "empty"
    trials = "trials" if count is None else plural(count, "trial", "trials")
    scheduler = "none, every trial trains to its end" if plan.scheduler is None else repr(plan.scheduler)
    metrics = "no metric"
    if objective is not None:
        metrics = ", ".join(f"{name} ({mode})" for name, mode in zip(objective.metrics, objective.modes, strict=True))
    each = f", each with {format_value(needed)}" if needed else ""
    for line in (
        f"experiment {plan.experiment!r} at {plan.target.uri}: {_found(found, objective)}",
        f"space: {space}; {trials} by {type(plan.proposer).__name__}, seed {plan.seed_of_draws}",
        f"scheduler: {scheduler}; {metrics}",
        f"slots: {plural(slots.count, 'trial', 'trials')} at once {where}{each}{_of_processes(plan, slots)}",
    ):
        log.info("%s", visible(shorten(line, _LONGEST)))


def warn_of_takeover(found: Experiment, log: Log) -> None:
    """Warn that the run that owned the experiment has not ended it: it may be alive, and ends then.

    Args:
        found: the experiment before this run took it over.
    """
    running = sum(each.phase is Phase.RUNNING for each in found.trials.values())
    if running and found.owner is not None:
        owner = found.owner
        is_same_run = owner.flow_run is not None and owner.flow_run == flow_run.id
        earlier = f"an earlier process of this run, pid {owner.pid} on {owner.host}," if is_same_run else str(owner)
        log.warning(
            "%s left %s running, and this %s takes over: if the other one is alive, its next write fails with "
            "Superseded, and it ends",
            visible(earlier),
            plural(running, "trial", "trials"),
            "process" if is_same_run else "run",
        )


def log_finished(plan: SearchPlan, found: Experiment, ended: Experiment, log: Log) -> None:
    """Log how to train more, if the experiment was finished when this run opened it, and nothing was trained.

    If trials had errored, `log_errored` or the error of the search says what can be done.
    """
    if (
        found.trials
        and all(each.phase is Phase.FINISHED for each in found.trials.values())
        and all(ended.trials[name].attempt == each.attempt for name, each in found.trials.items())
        and len(ended.trials) == len(found.trials)
        and not ended.ends
        and plan.reruns_errored != "only"
    ):
        log.info(
            "experiment %r was finished already, and this run trained nothing: to train more, raise num_samples or "
            "stop, or choose another experiment name",
            found.name,
            extra=NOTICE,
        )


def _of_processes(plan: SearchPlan, slots: Slots) -> str:
    """Return of how many processes each trial is, and whether there are as many processors."""
    if (each := plan.processes_per_trial) == 1:
        return ""
    if not isinstance(each, int):
        return f", each of {each[0]} to {each[1]} processes"
    count = slots.count * each
    are_few = slots.cpu_count is not None and count > slots.cpu_count
    share = f"; {count} processes share {plural(slots.cpu_count or 0, 'processor', 'processors')}" if are_few else ""
    return f", each of {each} processes{share}"


def _found(found: Experiment, objective: Objective | None) -> str:
    if not found.trials:
        return "new"
    counts = {"left running" if status == Status.RUNNING else status: count for status, count in counted(found).items()}
    said = f"{plural(len(found.trials), 'trial', 'trials')} found: {format_counts(counts)}"
    best = best_of(found)
    if best is None or objective is None:
        return said
    return f"{said}; {best_label(objective)}: {format_trial(best, objective.metrics)}"


_LOOK_EVERY = timedelta(seconds=0.5)


def searched(plan: SearchPlan, known: Experiment | None = None) -> Results:
    """Run a search within a flow run; a `known` journal is not read again. Raises what `tune` raises.

    The flow has to return what this returns: if every trial errored, that is its Failed state with a `SearchFailed`.
    """
    if known is None:  # a search that is resumed by its name was warned of, and keeps its mode
        warn_of_mode(plan, get_run_logger())
        warn_of_no_metric(plan, get_run_logger())
    with quiet_inner_tasks():
        turn = first_search_turn(plan, known)
        results = _searched(turn)
        ask_if_suspended(turn.plan, SEARCH_QUESTION, results.experiment)
    error = failure_of(results, turn.found)
    return results if error is None else failed_by(error, Results)


def _searched(turn: Turn) -> Results:
    plan, objective, log = turn.plan, turn.plan.objective, get_run_logger()
    stopper = of_trials(plan.stopper)
    require_possible(spec := trial_spec(plan, stopper))
    warn_of_limits(stopper, objective, log)
    warn_of_constants(plan, log)
    policy = policy_of(plan)
    opening, slots, where = _executor(plan, spec)
    callbacks = callbacks_for(plan.callbacks)
    known = require_presence(plan.target, plan.experiment, plan.resume, turn.known)
    warm_starts = new_warm_starts(source_names(plan.warm_start or ()), plan.target, plan.experiment, turn.known)

    def search(stop: threading.Event) -> Experiment:
        with opening as executor, retrying_refusals():  # first, since its fork server takes a moment to start
            if not check_target(plan.target).conditional_create:
                require_one_runner(plan.target.uri, "trials='deployment'" if plan.trials == "deployment" else "")
            found = known or read_known(plan.target, plan.experiment)
            state, now, changes = _opened(turn, found, warm_starts, slots)
            journal_writer = turn.begin_writing(JournalWriter(plan.target, state, write_directly))
            if turn.answer is not None and not is_answered(state, turn.answer.event.key):
                changes = [turn.answer.event, *changes]
            if changes:
                journal_writer.write(changes)
            # Another run may have added samples between the reading and the opening; the journal has the seed.
            asks = policy if (now.num_samples, now.seed) == (plan.num_samples, plan.seed) else policy_of(now)
            if names := journal_writer.experiment.warm_starts:
                prior = known_prior_trials(journal_writer)
                line = "warm start: %d finished trials of %s; the search can use %d"
                log.info(line, len(prior), ", ".join(names), asks.warm_start(prior), extra=NOTICE)
            log_opening(now, state, slots, where, log)
            curves = CurveReader(plan.target, state.key)
            limits = SearchLimits(
                options=plan,
                max_concurrent_trials=slots.count,
                end_reason=STOPPED_HERE if turn.stops else None,
                has_had_enough=lambda trial: has_had_enough(trial, stopper, curves),
            )
            period, request_count = spec.sync.request_period, len(state.stop_requests)
            with (
                StopRequestPoller(plan.target, state.key, request_count, period, stop) as stop_requests,
                _observing(plan, spec, callbacks, journal_writer, executor.__contains__, stop) as listener,
            ):
                driver = Driver(
                    spec,
                    limits,
                    asks,
                    executor,
                    journal_writer,
                    log=log,
                    listener=listener,
                    before_training=lambda: _changed_code(now, state, log),
                )
                ended = driver.run(stop_requests)
                log_code(ended, now, CODE_UNUSED, log)
            if not stop.is_set():
                log_finished(now, state, ended, log)
            return ended

    with as_one_owner(turn):
        ended = interruptible(search, grace=spec.grace, request_period=spec.sync.request_period)
        return Results(ended, plan.target, objective)


def _opened(
    turn: Turn, known: Experiment, warm_starts: Sequence[WarmStart], slots: Slots
) -> tuple[Experiment, SearchPlan, Sequence[Event]]:
    """Take ownership of the experiment, and log what has changed since its last run.

    Returns:
        its state, the plan with the samples that this run adds, and the events that journal what is new.
    """
    plan, log = turn.plan, get_run_logger()
    # Check before the takeover: a refused run must not disturb the present owner.
    require_same(known, with_seed_of(known, plan).settings)
    if plan.on_code_change == "refuse":
        require_code(known, plan)
    state = take_over(turn, known, slots.count)
    warn_of_takeover(known, log)
    now, added = plan_checks.with_added_samples(
        with_seed_of(state, plan), state, lambda: call_path(plan.experiment).key
    )
    require_same(state, today := now.settings)
    settings = signed_settings(plan.target, state, settings_before_training(state, today))
    log_space(state, now, log)
    log_fewer_samples(state, now, log)
    log_errored(state, now, log)
    new = tuple(each for each in warm_starts if each.source not in state.warm_starts)
    configured = Configured(settings=settings, extensions=added, warm_starts=new)
    return state, now, [configured] if settings != state.settings or added or new else []


def _changed_code(plan: SearchPlan, state: Experiment, log: Log) -> Sequence[Event]:
    """Log that the trainable has changed, if it has, and return the event that journals its code."""
    log_code(state, plan, CODE_TRAINS, log)
    if not plan.code or settings_before_training(state, plan.settings) == plan.settings:
        return ()  # without its source, the code that trained last is still what a later run compares with
    return [Configured(settings=signed_settings(plan.target, state, plan.settings))]


def policy_of(plan: SearchPlan) -> SearchPolicy:
    """Return the policy of a search that has no trial yet.

    Raises:
        InvalidInput: its parts do not fit each other, or the scheduler needs a metric and has none.
    """
    objective, seed, scheduler = plan.objective, plan.seed_of_draws, plan.scheduler or FIFO()
    tallies = [each.begin(objective) for each in of_experiment(plan.stopper)]
    proposals = plan.proposer.begin(space := plan.space or {}, objective, seed)
    scheduler.require_serves(space)
    return SearchPolicy(proposals, begun(scheduler, objective, seed), tallies)


def begun(scheduler: Scheduler, objective: Objective | None, seed: int) -> Schedule:
    """Return the schedule of a new experiment. Raises `InvalidInput` if the scheduler needs a metric and has none."""
    if objective is None and not isinstance(scheduler, FIFO):
        raise InvalidInput(f"metric: {type(scheduler).__name__} compares trials by a metric; name it: metric='loss'")
    return scheduler.begin(objective or UNNAMED, seed)


def _executor(plan: SearchPlan, spec: TrialSpec) -> tuple[AbstractContextManager[TrialExecutor], Slots, str]:
    """Return the executor of trials (local, task runner or deployment), its slots, and where the trials run."""
    if plan.trials == "deployment":
        deployment = DeploymentLauncher(plan.trial_deployment, plan.trial_job_variables)
        deployment.require(spec)
        where = f"as runs of the deployment {plan.trial_deployment!r}"
        return nullcontext(RemoteExecutor(plan.target, deployment, _LOOK_EVERY)), slots_elsewhere(plan), where
    if (runner := runner_elsewhere()) is not None:
        there = TaskRunnerLauncher(runner, plan.resources)
        where = f"by the {type(runner).__name__}"
        return nullcontext(RemoteExecutor(plan.target, there, _LOOK_EVERY)), slots_elsewhere(plan), where
    if plan.nodes_per_trial > 1:
        raise InvalidInput(
            f"nodes_per_trial={plan.nodes_per_trial}: expected trials='deployment', with a flow run for each node, or "
            "pt.tune.with_options(task_runner=...) with Dask's or Ray's, with a task for each; to train with several "
            "processes of this machine pass processes_per_trial"
        )
    # Elsewhere the first attempts tell.
    require_importable(plan.trainable, plan.isolation, get_run_logger(), spec.cadence)
    most, where = max_workers_here(), "on this machine"
    if most is not None:
        where = f"{where} (its task runner has max_workers={most})"
    return _local_executor(spec, slots := slots_here(plan, most)), slots, where


@contextmanager
def _local_executor(spec: TrialSpec, slots: Slots) -> Iterator[TrialExecutor]:
    with (
        ThreadPoolExecutor(slots.count, "run-trial") as threads,
        TrialProcessPool(slots=slots.count, reuse=spec.reuse) as pool,
    ):
        if spec.isolation == "process":
            pool.prepare(spec.trainable, get_run_logger(), next(iter(slots.environments), {}))
        yield LocalExecutor(pool, slots.environments, launch=attempts_on(threads))


# What observes a running search: callbacks, progress, events, the report, and its learning curves.

_PATIENCE = timedelta(seconds=30)
_PATIENCE_WHEN_STOPPED = timedelta(seconds=2)


@contextmanager
def _observing(
    plan: SearchPlan,
    spec: TrialSpec,
    callbacks: Sequence[Callback],
    journal_writer: JournalWriter,
    runs: Callable[[str], bool],
    stop: threading.Event,
) -> Iterator[SearchObserver]:
    """Yield the listener that the driver notifies; on exit, wait for the observers to process what is queued.

    Results are published if the search ended without a request to stop. On exit, callbacks get 30 s together, or 2 s
    after a request to stop.
    """
    target, objective, log, found = plan.target, plan.objective, get_run_logger(), journal_writer.experiment
    search = SearchInfo(plan.experiment, target.uri, objective, found.key.generation)
    outlook = SearchEstimate(
        plan.experiment,
        objective,
        trial_count=plan.trial_count,
        step_count=of_trials(plan.stopper).step_count,
        time=plan.time_budget,
        resumes_paused=resumes_paused(plan.scheduler),
    )
    runner, keeper = Callbacks(callbacks, target, search, log), CurveKeeper(found)
    runner.start(found)
    try:
        with showing(found, spec, outlook, stop, runs=runs) as (observers, reporter):
            yield ObserverGroup([keeper, *runner.threads, *observers], log)
            reporter.conclude()  # it draws the last page while the other observers end
            if not stop.is_set():
                ended, curves = journal_writer.experiment, skip_prefect_introspection(keeper.curves)
                try:
                    publish_results(target, skip_prefect_introspection(ended), objective, curves)
                except TuneError as error:  # the journal holds the same results
                    log.error("the results could not be published as files: %s", error)  # noqa: TRY400 - no trace: it is handled
    finally:
        runner.end(journal_writer.experiment, _PATIENCE_WHEN_STOPPED if stop.is_set() else _PATIENCE)


# Warm start: results of earlier experiments, read once, stored in the new experiment's journal for its search.

_WARM_START_TIMEOUT = timedelta(minutes=5)


def source_names(warm_start: Sequence[object]) -> Sequence[str]:
    """Return the experiments to warm-start from, each once: a name on the same target, or `target/name`.

    Raises:
        InvalidInput: one of them is neither.
    """
    for each in warm_start:
        if not isinstance(each, str):
            kind = type(each).__name__
            raise InvalidInput(f"warm_start: expected names of experiments, such as 'first', found a {kind}")
        if "://" in each:
            validate_target(each)  # as a whole: a password in it must not end up in an error about the name
        place, _, name = each.rpartition("/")
        valid_name(name)
        if place:
            validate_target(place)
    return list(dict.fromkeys(str(each) for each in warm_start))


def new_warm_starts(
    names: Sequence[str], target: StorageTarget, own: str, known: Experiment | None = None
) -> Sequence[WarmStart]:
    """Read the finished trials of the experiments that are new to `own`; those may still be running.

    Args:
        names: as `source_names` returns them.
        target: the target of `own`.
        own: the experiment that warm-starts.
        known: its state as of the check of what its journal may choose; None to read it here. Experiments that
            `known` names are not opened, even if the journal has changed since.

    Raises:
        InvalidInput: a source does not exist, or is `own` itself.
        ResumeFailed: a source cannot be read.
    """
    found: list[WarmStart] = []
    if not names:
        return found
    there = (known or read_known(target, own)).warm_starts
    for name in names:
        if name not in there:
            place, _, experiment = name.rpartition("/")
            where = resolve_target(place) if place else target
            at = ExperimentAddress(where.uri, experiment).uri
            if at == ExperimentAddress(target.uri, own).uri:
                raise InvalidInput(
                    f"warm_start: {own!r} is the search itself, which has its own trials: name other experiments"
                )
            state = read_known(where, experiment)
            if not state.number:
                raise InvalidInput(f"warm_start: {no_experiment_at(where, experiment)}")
            trials = (
                PriorTrial(
                    trial=each.trial, config=each.config, report=last_report(each), stopped=each.past[-1].stopped
                )
                for each in state.trials.values()
                if each.phase is Phase.FINISHED and each.step
            )
            found.append(WarmStart(source=name, place=at, trials=tuple(trials)))
    return found


def known_prior_trials(journal_writer: JournalWriter) -> Sequence[PriorTrial]:
    """Return the trials of other experiments that the journal holds, each once, in the order in which it got them."""
    state = journal_writer.experiment

    def read(store: ObjectStore) -> Sequence[WarmStart]:
        found: list[WarmStart] = []
        for number in sorted(set(state.warm_starts.values())):
            if (entry := next_entry(store, state.key, number - 1)) is None:
                raise JournalCorrupt(f"{state.key}: entry {number} is missing")
            found += (each for event in entry.events if isinstance(event, Configured) for each in event.warm_starts)
        return found

    return prior_trials_of(on_target(journal_writer.target, read, _WARM_START_TIMEOUT))


def prior_trials_of(warm_starts: Sequence[WarmStart]) -> Sequence[PriorTrial]:
    """Return the trials of `warm_starts`, each once, in their order.

    Forks share trials: one is the same by its configuration and its last report.
    """
    unique = {
        canonical_json([trial.config, trial.report.step, trial.report.metrics]): trial
        for each in reversed(warm_starts)
        for trial in reversed(each.trials)
    }
    return list(reversed(unique.values()))


# The error with which a search fails: every trial errored.

_CAUSES = 3
"""Different errors in the message."""


def failure_of(results: Results, found: Experiment | None) -> SearchFailed | None:
    """Return the error of a search whose trials all errored; None for any other.

    Args:
        found: the experiment as this run found it; None if it did not read it.
    """
    trials = results.trials
    if not trials or (len(results.errors) < len(trials) and not same_errors_reason(trials.values())):
        return None
    earlier = {} if found is None else found.trials
    skipped = sum(trial.attempt == earlier[name].attempt for name, trial in trials.items() if name in earlier)
    return SearchFailed(_all_errored(results, skipped), results)


def _all_errored(results: Results, skipped: int) -> str:
    name, count = results.experiment.name, len(results.trials)
    causes = errors_by_cause([trial for trial in results.trials.values() if trial.trial in results.errors])
    (cause, (first, *_)), *others = causes
    if count == 1:
        errored = f"its only trial errored: {cause}"
    elif not others:
        errored = f"{len(results.errors)} of {count} trials errored, all with: {cause}"
    else:
        shown = [f"{len(trials)} with: {cause} (such as {trials[0].trial})" for cause, trials in causes[:_CAUSES]]
        if (more := len(causes) - _CAUSES) > 0:
            shown.append(plural(more, "other error", "other errors"))
        errored = f"{count} of {count} trials errored: {'; '.join(shown)}"
    if isinstance(results.experiment.settings.get("trainable"), str):
        again = f"pass rerun_errored=True (prefect-tune resume {results.target.argument} {name} --rerun-errored)"
    else:  # a script's function, which no other program finds
        again = f"pass experiment={name!r} and rerun_errored=True"
    rerun = f"{again}; {KEEPS_CONFIGURATIONS}"
    if not skipped:
        failed = f"{errored}. Remove the cause, then run the search again: {rerun}"
    else:
        old = f"{plural(skipped, 'errored trial was', 'errored trials were')} not retried"
        asked = f"{old}: to retry with the code as it is now, {rerun}"
        failed = f"{asked}. In the earlier run {errored}" if skipped == count else f"{errored}. {asked}"
    failed = f"experiment {name!r}: {failed}"
    error = error_of(first.end_reason)
    if not isinstance(error, Reason) or "traceback" not in error.arguments:  # its process has died
        return failed
    return f"{failed}. Traceback: prefect-tune show {results.target.argument} {name} --trial {first.trial}"
