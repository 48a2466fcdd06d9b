"""Run a search, from its plan to its results."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

from prefect.logging import get_run_logger

from prefect_tune.blocks import SyncConfig
from prefect_tune.callbacks import SearchInfo
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.experiment_stoppers import of_experiment, of_trials
from prefect_tune.core.experiment.trial_stoppers import Stopper, metrics_needed
from prefect_tune.core.journal.journal import LoadedJournal
from prefect_tune.core.journal_events.experiment_events import Described, Event
from prefect_tune.core.schedulers.base import Schedule, Scheduler
from prefect_tune.core.schedulers.fifo import FIFO
from prefect_tune.core.search.objective import UNNAMED, Objective
from prefect_tune.executors.launchers import DeploymentLauncher, TaskRunnerLauncher
from prefect_tune.executors.prestart import process_pool
from prefect_tune.executors.remote_executor import RemoteExecutor
from prefect_tune.executors.trial_executor import LocalExecutor, TrialExecutor, attempts_on
from prefect_tune.executors.trial_slots import Slots, slots_elsewhere, slots_here
from prefect_tune.monitoring.assets import ExperimentAddress
from prefect_tune.monitoring.callback_runner import callbacks_for
from prefect_tune.monitoring.event_builder import EventContext, budgets_of
from prefect_tune.monitoring.event_emitter import this_run
from prefect_tune.monitoring.search_observer import ObserverGroup
from prefect_tune.monitoring.subscribers import Subscribers
from prefect_tune.parameters import samples_per_run
from prefect_tune.parameters.checks.code_change import (
    CODE_TRAINS,
    CODE_UNUSED,
    require_code,
    say_code,
    settings_before_training,
)
from prefect_tune.parameters.checks.import_check import require_importable
from prefect_tune.parameters.checks.resume_compatibility import (
    require_same,
    say_errored,
    say_fewer_samples,
    say_space,
    with_seed_of,
)
from prefect_tune.parameters.checks.search_limits import (
    SearchLimits,
    require_possible,
    warn_of_constants,
    warn_of_limits,
    warn_of_mode,
)
from prefect_tune.parameters.checks.target_requirements import require_one_runner, runner_elsewhere
from prefect_tune.parameters.search_plan import SearchPlan, trial_spec
from prefect_tune.prefect_api.flow_runs.call_path import call_path
from prefect_tune.prefect_api.flow_runs.returned_failure import failed_by
from prefect_tune.prefect_api.task_runs.quiet_tasks import quiet_inner_tasks
from prefect_tune.prefect_api.task_runs.task_runner import max_workers_here
from prefect_tune.results.results import Results
from prefect_tune.storage_retries import retrying_refusals
from prefect_tune.supervisor.cancel_and_suspend import interruptible
from prefect_tune.supervisor.journal_writer import JournalWriter
from prefect_tune.supervisor.processes.process_output import Log
from prefect_tune.supervisor.trial_spec import TrialSpec
from prefect_tune.suspension.answers import unjournaled
from prefect_tune.suspension.search_answers import QUESTION, first_search_turn
from prefect_tune.suspension.suspend_loop import STOPPED_HERE, Turn, as_one_owner, next_turn, take_over
from prefect_tune.tasks.existing_experiment import read_known, require_presence
from prefect_tune.tasks.experiment_state import check_target, write_directly
from prefect_tune.tasks.trial_attempt import has_had_enough
from prefect_tune.terminal.time_left import SearchEstimate, first_pause, resumes_paused
from prefect_tune.trust.require_trusted import signed_settings
from prefect_tune.tuner.driver import Driver
from prefect_tune.tuner.exploration_check import ExplorationCheck
from prefect_tune.tuner.failed_search_error import failure_of
from prefect_tune.tuner.metric_check import MetricCheck
from prefect_tune.tuner.opening_summary import log_finished, log_opening, warn_of_takeover
from prefect_tune.tuner.policy import SearchPolicy
from prefect_tune.tuner.stopping.stop_request_poller import StopRequestPoller
from prefect_tune.tuner.warm_start import lessons_known, new_lessons, source_names

_LOOK_EVERY = timedelta(seconds=0.5)


def searched(plan: SearchPlan, known: LoadedJournal | None = None) -> Results:
    """Run a search within a flow run; a `known` journal is not read again. Raises what `tune` raises.

    The flow has to return what this returns: if every trial errored, that is its Failed state with a `SearchFailed`.
    """
    metric_check = MetricCheck(plan.objective, get_run_logger(), metrics_needed(of_trials(plan.stopper)))
    if known is None:  # a search that is resumed by its name was warned of, and keeps its mode
        warn_of_mode(plan, get_run_logger())
    with quiet_inner_tasks():
        turn: Turn | None = first_search_turn(plan, known)
        while turn is not None:
            results, found = _searched(turn, metric_check), turn.found
            turn = next_turn(turn, QUESTION, results.experiment)
    error = failure_of(results, found, metric_check)
    return results if error is None else failed_by(error, Results)


def _searched(turn: Turn, metric_check: MetricCheck) -> Results:
    plan, name, objective = turn.plan, turn.plan.experiment, turn.plan.objective
    stopper = of_trials(plan.stopper)
    require_possible(spec := trial_spec(plan, stopper))
    warn_of_limits(stopper, objective, get_run_logger())
    warn_of_constants(plan, get_run_logger())
    policy = _policy(plan)
    opening, slots, where = _executor(plan, spec)
    limits = _limits(turn, spec, stopper, slots, metric_check)
    subscribers = _subscribers(plan, slots)
    known = require_presence(plan.target, name, plan.resume, turn.known)
    seen = turn.known.experiment if turn.known is not None else turn.state
    learned = new_lessons(source_names(plan.warm_start or ()), plan.target, name, seen)

    def search(stop: threading.Event) -> Experiment:
        with opening as executor, retrying_refusals():  # first, since its fork server takes a moment to start
            _require_fit(plan, policy)
            state, now, changes = _opened(turn, known or read_known(plan.target, name))
            turn.reached(state)
            journal_writer = JournalWriter(plan.target, state, write_directly, lambda _events, now: turn.reached(now))
            learns = [each for each in learned if each.source not in state.learned]
            if news := [*unjournaled(turn.news, state), *changes, *learns]:
                journal_writer.write(news)
            if journal_writer.experiment.questions:
                return journal_writer.experiment  # no trial starts before they are answered
            # Another run may have added samples between the reading and the opening; the journal has the seed.
            asks = policy if (now.num_samples, now.seed) == (plan.num_samples, plan.seed) else _policy(now)
            _learn(asks, journal_writer)
            log = get_run_logger()
            log_opening(now, state, slots, where, log)
            with (
                StopRequestPoller(plan.target, name, len(state.heard), spec.sync.sync_period, stop) as stop_requests,
                subscribers.listening(journal_writer, executor.__contains__, stop, log) as listener,
            ):
                observers = ObserverGroup([metric_check, ExplorationCheck(objective, log), listener])
                driver = Driver(
                    *(spec, limits, asks, executor, journal_writer),
                    log=log,
                    listener=observers,
                    before_training=lambda: _changed_code(now, state, log),
                )
                ended = driver.run(stop_requests)
                say_code(ended, now, CODE_UNUSED, log)
                if not stop.is_set():
                    log_finished(now, state, ended, log)
                return ended

    with as_one_owner(turn):
        return Results(interruptible(search, grace=spec.grace), plan.target, objective)


def _opened(turn: Turn, known: LoadedJournal) -> tuple[Experiment, SearchPlan, Sequence[Event]]:
    """Take ownership of the experiment, and log what has changed since its last run.

    Returns:
        its state, the plan with the samples that this run adds, and the events that journal both changes.
    """
    plan, log = turn.plan, get_run_logger()
    # Check before the takeover: a refused run must not disturb the present owner.
    require_same(known.experiment, with_seed_of(known.experiment, plan).settings)
    if plan.on_code_change == "refuse":
        require_code(known.experiment, plan)
    state = take_over(turn, known)
    warn_of_takeover(known.experiment, log)
    now, added = samples_per_run.extended(with_seed_of(state, plan), state, call_path)
    require_same(state, today := now.settings)
    settings = signed_settings(plan.target, state, settings_before_training(state, today))
    say_space(state, now, log)
    say_fewer_samples(state, now, log)
    if not turn.answered:  # errors of this run were logged before the question
        say_errored(state, now, log)
    return state, now, [*([Described(settings=settings)] if settings != state.settings else []), *added]


def _changed_code(plan: SearchPlan, state: Experiment, log: Log) -> Sequence[Event]:
    """Log that the trainable has changed, if it has, and return the event that journals its code."""
    say_code(state, plan, CODE_TRAINS, log)
    if settings_before_training(state, plan.settings) == plan.settings:
        return ()
    return [Described(settings=signed_settings(plan.target, state, plan.settings))]


def _require_fit(plan: SearchPlan, policy: SearchPolicy) -> None:
    """Refuse a search with several writers of one journal if the target cannot keep them apart; write nothing."""
    if check_target(plan.target).conditional_create:
        return
    require_one_runner(
        plan.target.uri,
        exploiting=type(plan.scheduler).__name__ if policy.saves_first else "",
        elsewhere="trials='deployment'" if plan.trials == "deployment" else "",
    )


def _subscribers(plan: SearchPlan, slots: Slots) -> Subscribers:
    stopper, target, objective = plan.stopper, plan.target, plan.objective
    sync = plan.sync or SyncConfig()
    outlook = SearchEstimate(
        plan.experiment,
        objective,
        trial_count=plan.trial_count,
        step_count=of_trials(stopper).step_count,
        time=plan.time_budget,
        slot_count=slots.count,
        first_pause=first_pause(plan.scheduler),
        resumes_paused=resumes_paused(plan.scheduler),
    )
    budgets = budgets_of(stopper, time=plan.time_budget, trial_count=plan.trial_count)
    place = ExperimentAddress(target.uri, plan.experiment)
    return Subscribers(
        target,
        SearchInfo(plan.experiment, target.uri, objective),
        callbacks_for(plan.callbacks),
        outlook,
        in_terminal=plan.isolation == "process",  # with threads, a debugger may use the terminal
        news=EventContext(place, objective, budgets, sync.sync_period, this_run()),
        live_period=sync.live_period,
    )


def _learn(policy: SearchPolicy, journal_writer: JournalWriter) -> None:
    if journal_writer.experiment.learned:
        lessons = lessons_known(journal_writer)
        used, names = policy.warm_start(lessons), ", ".join(journal_writer.experiment.learned)
        get_run_logger().info("warm start: %d finished trials of %s; the search can use %d", len(lessons), names, used)


def _limits(turn: Turn, spec: TrialSpec, stopper: Stopper, slots: Slots, metric_check: MetricCheck) -> SearchLimits:
    return SearchLimits(
        options=turn.plan,
        max_concurrent_trials=slots.count,
        why_end=lambda state, undecided: STOPPED_HERE if turn.stops else metric_check.why_end(state, undecided),
        has_had_enough=lambda trial: has_had_enough(spec, trial, stopper),
    )


def _policy(plan: SearchPlan) -> SearchPolicy:
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
