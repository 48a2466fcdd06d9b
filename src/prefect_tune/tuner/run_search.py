"""Run a search, from its plan to its results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta

from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from prefect_tune.attempt.attempt import CurveReader, has_had_enough
from prefect_tune.attempt.graceful_stop import interruptible
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import StorageTarget, SyncConfig
from prefect_tune.callbacks import Callback, SearchInfo
from prefect_tune.core.errors import InvalidInput, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.stoppers import Stopper, of_experiment, of_trials
from prefect_tune.core.experiment.summary import Curves, best_label, best_of, counted, named
from prefect_tune.core.experiment.trial_transitions import Phase, Status
from prefect_tune.core.journal_events import Configured, Event, WarmStart
from prefect_tune.core.schedulers.base import FIFO, Schedule, Scheduler
from prefect_tune.core.search.objective import UNNAMED, Objective
from prefect_tune.core.shown_text import plural, visible
from prefect_tune.core.values import leaves, metric_in
from prefect_tune.executors.launchers import DeploymentLauncher, TaskRunnerLauncher
from prefect_tune.executors.remote_executor import RemoteExecutor
from prefect_tune.executors.trial_executor import (
    LocalExecutor,
    Slots,
    TrialExecutor,
    attempts_on,
    process_pool,
    slots_elsewhere,
    slots_here,
)
from prefect_tune.journal_access import JournalWriter, read_known, write_directly
from prefect_tune.monitoring.callback_runner import Callbacks, callbacks_for
from prefect_tune.monitoring.event_emitter import EventEmitter, ExperimentAddress, emitting_events
from prefect_tune.monitoring.live_report import Reporter, reported
from prefect_tune.monitoring.progress import SearchLog, progress
from prefect_tune.monitoring.search_observer import (
    DisplayGroup,
    LiveStatusPublisher,
    ObserverGroup,
    SearchObserver,
    SearchRecorder,
)
from prefect_tune.parameters import plan_checks
from prefect_tune.parameters.import_check import require_importable
from prefect_tune.parameters.plan_checks import (
    CODE_TRAINS,
    CODE_UNUSED,
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
from prefect_tune.prefect_api.task_runs import max_workers_here, quiet_inner_tasks
from prefect_tune.results import Results
from prefect_tune.storage_retries import retrying_refusals, skip_prefect_introspection
from prefect_tune.suspension.resume_forms import is_answered
from prefect_tune.suspension.suspend_and_resume import (
    SEARCH_QUESTION,
    STOPPED_HERE,
    Turn,
    as_one_owner,
    ask_if_suspended,
    first_search_turn,
    take_over,
)
from prefect_tune.tasks.experiments import check_target, publish_results
from prefect_tune.terminal.formatting import format_counts, format_value
from prefect_tune.terminal.live_display import NOTICE
from prefect_tune.terminal.progress_view import SearchEstimate, resumes_paused
from prefect_tune.trust import signed_settings
from prefect_tune.tuner.driver import Driver
from prefect_tune.tuner.search_failure import failure_of
from prefect_tune.tuner.search_policy import SearchPolicy
from prefect_tune.tuner.stop_requests import StopRequestPoller
from prefect_tune.tuner.warm_start import known_prior_trials, new_warm_starts, source_names

# The summary that a search logs when it opens its experiment, and its last line if there was nothing to train.

_LONGEST = 400


def log_opening(plan: SearchPlan, found: Experiment, slots: Slots, where: str, log: Log) -> None:
    """Log what the experiment holds, its target, space, scheduler and slots: one line each.

    Args:
        found: the experiment as it was opened, before this run changes it.
        where: where the trials run, such as `on this machine`.
    """
    for line in _lines(plan, found, slots, where):
        log.info("%s", visible(line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"))


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
        and _attempts(found) == _attempts(ended)
        and not ended.ends
        and plan.reruns_errored != "only"
    ):
        log.info(
            "experiment %r was finished already, and this run trained nothing: to train more, raise num_samples or "
            "stop, or choose another experiment name",
            found.name,
            extra=NOTICE,
        )


def _attempts(experiment: Experiment) -> Mapping[str, int]:
    return {name: each.attempt for name, each in experiment.trials.items()}


def _lines(plan: SearchPlan, found: Experiment, slots: Slots, where: str) -> Iterator[str]:
    yield f"experiment {plan.experiment!r} at {plan.target.uri}: {_found(found, plan.objective)}"
    count = plan.trial_count
    trials = "trials" if count is None else plural(count, "trial", "trials")
    yield f"space: {_space(plan.space or {})}; {trials} by {type(plan.proposer).__name__}, seed {plan.seed_of_draws}"
    scheduler = "none, every trial trains to its end" if plan.scheduler is None else repr(plan.scheduler)
    yield f"scheduler: {scheduler}; {_objective(plan.objective)}"
    needed = plan.resources_per_trial
    each = f", each with {format_value(needed)}" if needed else ""
    yield f"slots: {plural(slots.count, 'trial', 'trials')} at once {where}{each}{_of_processes(plan, slots)}"


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
    values = ", ".join(f"{name} {format_value(metric_in(best.metrics, name))}" for name in objective.metrics)
    return f"{said}; {best_label(objective)}: trial {named(best.trial, best.status)}, {values}"


def _space(space: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in leaves(space)) or "empty"


def _objective(objective: Objective | None) -> str:
    if objective is None:
        return "no metric"
    return ", ".join(f"{name} ({mode})" for name, mode in zip(objective.metrics, objective.modes, strict=True))


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
    plan, name, objective = turn.plan, turn.plan.experiment, turn.plan.objective
    stopper = of_trials(plan.stopper)
    require_possible(spec := trial_spec(plan, stopper))
    warn_of_limits(stopper, objective, get_run_logger())
    warn_of_constants(plan, get_run_logger())
    policy = policy_of(plan)
    opening, slots, where = _executor(plan, spec)
    subscribers = _subscribers(plan)
    known = require_presence(plan.target, name, plan.resume, turn.known)
    seen = turn.known if turn.known is not None else None
    warm_starts = new_warm_starts(source_names(plan.warm_start or ()), plan.target, name, seen)

    def search(stop: threading.Event) -> Experiment:
        with opening as executor, retrying_refusals():  # first, since its fork server takes a moment to start
            if not check_target(plan.target).conditional_create:
                require_one_runner(plan.target.uri, "trials='deployment'" if plan.trials == "deployment" else "")
            state, now, changes = _opened(turn, known or read_known(plan.target, name), warm_starts, slots)
            turn.reached(state)
            journal_writer = JournalWriter(plan.target, state, write_directly, turn.reached)
            if turn.answer is not None and not is_answered(state, turn.answer.event.key):
                changes = [turn.answer.event, *changes]
            if changes:
                journal_writer.write(changes)
            # Another run may have added samples between the reading and the opening; the journal has the seed.
            asks = policy if (now.num_samples, now.seed) == (plan.num_samples, plan.seed) else policy_of(now)
            _warm_start(asks, journal_writer)
            log = get_run_logger()
            log_opening(now, state, slots, where, log)
            limits = _limits(turn, CurveReader(plan.target, state.key), stopper, slots)
            with (
                StopRequestPoller(
                    plan.target, state.key, len(state.stop_requests), spec.sync.request_period, stop
                ) as stop_requests,
                subscribers.listening(journal_writer, executor.__contains__, stop, log) as listener,
            ):
                driver = Driver(
                    *(spec, limits, asks, executor, journal_writer),
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
    now, added = plan_checks.extended(with_seed_of(state, plan), state, lambda: call_path(plan.experiment).key)
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
    if settings_before_training(state, plan.settings) == plan.settings:
        return ()
    return [Configured(settings=signed_settings(plan.target, state, plan.settings))]


def _subscribers(plan: SearchPlan) -> Subscribers:
    stopper, target, objective = plan.stopper, plan.target, plan.objective
    sync = plan.sync or SyncConfig()
    outlook = SearchEstimate(
        plan.experiment,
        objective,
        trial_count=plan.trial_count,
        step_count=of_trials(stopper).step_count,
        time=plan.time_budget,
        resumes_paused=resumes_paused(plan.scheduler),
    )
    return Subscribers(
        target,
        SearchInfo(plan.experiment, target.uri, objective),
        callbacks_for(plan.callbacks),
        outlook,
        in_terminal=plan.isolation == "process",  # with threads, a debugger may use the terminal
        address=ExperimentAddress(target.uri, plan.experiment),
        live_period=sync.live_period,
    )


def _warm_start(policy: SearchPolicy, journal_writer: JournalWriter) -> None:
    if journal_writer.experiment.warm_starts:
        prior = known_prior_trials(journal_writer)
        used, names = policy.warm_start(prior), ", ".join(journal_writer.experiment.warm_starts)
        line = "warm start: %d finished trials of %s; the search can use %d"
        get_run_logger().info(line, len(prior), names, used, extra=NOTICE)


def _limits(turn: Turn, curves: CurveReader, stopper: Stopper, slots: Slots) -> SearchLimits:
    return SearchLimits(
        options=turn.plan,
        max_concurrent_trials=slots.count,
        end_reason=STOPPED_HERE if turn.stops else None,
        has_had_enough=lambda trial: has_had_enough(trial, stopper, curves),
    )


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
        process_pool(get_run_logger(), slots=slots.count, reuse=spec.reuse) as pool,
    ):
        if spec.isolation == "process":
            pool.prepare(spec.trainable, get_run_logger(), next(iter(slots.environments), {}))
        yield LocalExecutor(pool, slots.environments, launch=attempts_on(threads))


# The subscribers of a running search: callbacks, progress, events, the report, and its learning curves.

_PATIENCE = timedelta(seconds=30)
_PATIENCE_WHEN_STOPPED = timedelta(seconds=2)
_MOST_REPORTS = 300_000


class Subscribers:
    """The subscribers of one run of a search, from its start to its end."""

    def __init__(
        self,
        target: StorageTarget,
        search: SearchInfo,
        callbacks: Sequence[Callback],
        outlook: SearchEstimate,
        *,
        in_terminal: bool,
        address: ExperimentAddress,
        live_period: timedelta | None,
    ) -> None:
        self._target = target
        self._outlook = outlook
        self._in_terminal = in_terminal
        self._search = search
        self._address = address
        self._live_period = live_period
        self._callbacks = callbacks

    @contextmanager
    def listening(
        self, journal_writer: JournalWriter, runs: Callable[[str], bool], stop: threading.Event, log: Log
    ) -> Iterator[SearchObserver]:
        """Yield the listener that the driver notifies; on exit, wait for the subscribers to process what is queued.

        `runs` returns whether a trial is running now.

        Results are published if the search ended without a request to stop. On exit, callbacks get 30 s together,
        or 2 s after a request to stop.
        """
        search = replace(self._search, generation=journal_writer.experiment.key.generation)
        callbacks = Callbacks(self._callbacks, self._target, search, log)
        keeper = _CurveKeeper(journal_writer.experiment)
        recorder = SearchRecorder(journal_writer.experiment)
        lines = SearchLog(recorder, self._search.objective, self._target.uri, log)
        callbacks.start(journal_writer.experiment)
        try:
            with (
                reported(Reporter(self._target, recorder, self._outlook, log), stop) as reporter,
                emitting_events(EventEmitter(self._address, self._search.objective, recorder, log), stop) as emitter,
                progress(recorder, self._outlook, lines.notes, log, stop, in_terminal=self._in_terminal) as seen,
                LiveStatusPublisher(self._target, recorder.read, self._live_period, runs),
            ):
                shows = DisplayGroup([recorder, lines, emitter, seen, reporter], log)
                yield ObserverGroup([keeper, callbacks, shows])
                reporter.conclude()  # it draws the last page while the other subscribers end
                if not stop.is_set():
                    self._publish(journal_writer.experiment, keeper.curves, log)
        finally:
            callbacks.end(journal_writer.experiment, _PATIENCE_WHEN_STOPPED if stop.is_set() else _PATIENCE)

    def _publish(self, experiment: Experiment, curves: Curves | None, log: Log) -> None:
        """Publish the results as files; log an error if that fails, since the journal holds the same results."""
        try:
            publish_results(
                self._target,
                skip_prefect_introspection(experiment),
                self._search.objective,
                skip_prefect_introspection(curves),
            )
        except TuneError as error:
            log.error("the results could not be published as files: %s", error)  # noqa: TRY400 - no trace: it is handled


class _CurveKeeper(SearchObserver):
    """Collects the learning curves of a new experiment while it runs: publishing them need not read the journal."""

    def __init__(self, experiment: Experiment) -> None:
        self.curves: Curves | None = None if experiment.trials else Curves()

    def applied(self, event: Event, experiment: Experiment) -> None:
        del experiment
        if self.curves is not None:
            self.curves.tell_event(event)
            if self.curves.report_count > _MOST_REPORTS:
                self.curves = None  # to bound the memory; publishing reads them from the journal
