"""Run a search, from its request to its results."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from prefect_tune.callbacks import SearchInfo
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.events.experiment_events import Described, Event
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.experiment_stoppers import of_experiment, of_trials
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.trial_stoppers import Stopper
from prefect_tune.core.journal.journal import LoadedJournal
from prefect_tune.core.schedulers.base import Schedule, Scheduler
from prefect_tune.core.schedulers.fifo import FIFO
from prefect_tune.core.search.objective import Objective, objective_of
from prefect_tune.core.seeded_random import seed_named
from prefect_tune.executors.launchers import DeploymentLauncher, TaskRunnerLauncher
from prefect_tune.executors.remote_executor import RemoteExecutor
from prefect_tune.executors.trial_executor import LocalExecutor, TrialExecutor
from prefect_tune.executors.trial_slots import Slots, resources_asked, slots_elsewhere, slots_here
from prefect_tune.monitoring.assets import ExperimentAddress
from prefect_tune.monitoring.callback_runner import callbacks_for
from prefect_tune.monitoring.event_builder import EventContext, budgets_of
from prefect_tune.monitoring.event_emitter import this_run
from prefect_tune.monitoring.subscribers import Subscribers
from prefect_tune.parameters import samples_per_run
from prefect_tune.parameters.json_specs import scheduler_from
from prefect_tune.parameters.limits import SearchLimits, has_had_enough, require_possible, warn_of_limits
from prefect_tune.parameters.resume_compatibility import (
    require_code,
    require_same,
    say_code,
    say_errored,
    say_space,
    settings_today,
)
from prefect_tune.parameters.resume_mode import read_known, require_presence, resuming
from prefect_tune.parameters.samples_per_run import search_of
from prefect_tune.parameters.search_request import SearchRequest, space_of
from prefect_tune.parameters.target_requirements import require_one_runner
from prefect_tune.parameters.training_request import stopper_for, trial_spec
from prefect_tune.prefect_api.call_path import call_path
from prefect_tune.results.results import Results
from prefect_tune.retry_policy import retrying_refusals, skip_prefect_introspection
from prefect_tune.supervisor.graceful_shutdown import interruptible
from prefect_tune.supervisor.journal_writer import JournalWriter
from prefect_tune.supervisor.process_pool import TrialProcessPool
from prefect_tune.supervisor.run_identity import new_write_id
from prefect_tune.supervisor.trial_spec import TrialSpec
from prefect_tune.suspension.answers import unjournaled
from prefect_tune.suspension.restart_guard import owner_after
from prefect_tune.suspension.search_answers import QUESTION, first_search_turn
from prefect_tune.suspension.suspend_loop import STOPPED_HERE, Turn, as_one_owner, next_turn, say_what_is_resumable
from prefect_tune.tasks import restore_experiment_state
from prefect_tune.tasks.experiment_state import check_target, write_directly
from prefect_tune.terminal.progress_state import SearchEstimate
from prefect_tune.trust.require_trusted import signed_settings
from prefect_tune.tuner.driver import Driver
from prefect_tune.tuner.policy import SearchPolicy
from prefect_tune.tuner.stop_request_poller import StopRequestPoller
from prefect_tune.tuner.warm_start import lessons_known, new_lessons, source_names

__all__ = ["begun", "searched"]

_LOOK_EVERY = timedelta(seconds=0.5)
_LOOK_FOR_REQUESTS = timedelta(seconds=5)
_NAMELESS = Objective(metrics=("unnamed",), modes=("min",))


def searched(asked: SearchRequest, known: LoadedJournal | None = None) -> Results:
    """Run the requested search within a flow run; a `known` journal is not read again. Raises what `tune` raises."""
    turn: Turn | None = first_search_turn(asked, known)
    while turn is not None:
        results = _searched(turn)
        turn = next_turn(turn, QUESTION, results.experiment)
    return results


def _searched(turn: Turn) -> Results:
    asked, name = turn.request, turn.experiment
    objective = objective_of(asked.metric, asked.mode)
    stopper = of_trials(whole := stopper_for(asked.stop))
    require_possible(plan := trial_spec(asked, name, stopper))
    warn_of_limits(stopper, objective, get_run_logger())
    policy = _policy(asked, name, objective, whole)
    executor, slots = _executor(asked, plan)
    limits = _limits(turn, plan, stopper, slots)
    subscribers = _subscribers(asked, plan, _outlook(asked, name, objective, stopper), whole)
    known = require_presence(plan.target, name, resuming(asked.resume), turn.known)
    seen = turn.known.experiment if turn.known is not None else turn.state
    learned = new_lessons(source_names(asked.warm_start or ()), plan.target, name, seen)

    def search(stop: threading.Event) -> Experiment:
        with executor as who, retrying_refusals():  # first, since its fork server takes a moment to start
            _require_fit(asked, plan, policy)
            state, now, changes = _opened(turn, plan, limits, known or read_known(plan.target, name))
            turn.reached(state)
            journal_writer = JournalWriter(plan.target, state, write_directly, lambda _events, now: turn.reached(now))
            learns = [each for each in learned if each.source not in state.learned]
            if news := [*unjournaled(turn.news, state), *changes, *learns]:
                journal_writer.write(news)
            if journal_writer.experiment.questions:
                return journal_writer.experiment  # no trial starts before they are answered
            # Another run may have added samples between the reading and the opening.
            asks = policy if now.num_samples == asked.num_samples else _policy(now, name, objective, whole)
            _learn(asks, journal_writer)
            log, look_every = get_run_logger(), min(_LOOK_FOR_REQUESTS, max(_LOOK_EVERY, plan.sync.sync_period))
            with (
                StopRequestPoller(plan.target, name, len(state.heard), look_every, stop) as desk,
                subscribers.listening(journal_writer, stop, log) as listener,
            ):
                return Driver(plan, limits, asks, who, journal_writer, log=log, listener=listener).run(desk)

    with as_one_owner(plan.target, name), say_what_is_resumable(lambda: turn.state):
        return Results(interruptible(search, grace=plan.grace), plan.target, objective)


def _opened(
    turn: Turn, plan: TrialSpec, limits: SearchLimits, known: LoadedJournal
) -> tuple[Experiment, SearchRequest, Sequence[Event]]:
    """Take ownership of the experiment, and log what has changed since its last run.

    Returns:
        its state, the request with the samples that this run adds, and the events that journal both changes.
    """
    asked, log = turn.request, get_run_logger()
    # Check before the takeover: a refused run must not disturb the present owner.
    require_same(known.experiment, settings_today(asked))
    if asked.on_code_change == "refuse":
        require_code(known.experiment, asked)
    owner = owner_after(known.experiment, limits.failures.max_restarts, answered=turn.answered)
    state = restore_experiment_state(
        plan.target, turn.experiment, owner, new_write_id(), skip_prefect_introspection(known)
    )
    now, added = samples_per_run.extended(asked, state, call_path)
    require_same(state, today := settings_today(now))
    settings = signed_settings(plan.target, state, today)
    say_code(state, now, log)
    say_space(state, now, log)
    if not turn.answered:  # errors of this run were logged before the question
        say_errored(state, limits, log)
    return state, now, [*([Described(settings=settings)] if settings != state.settings else []), *added]


def _require_fit(asked: SearchRequest, plan: TrialSpec, policy: SearchPolicy) -> None:
    """Refuse a search with several writers of one journal if the target cannot keep them apart; write nothing."""
    if check_target(plan.target).conditional_create:
        return
    runner = _runner_elsewhere()
    there = "" if runner is None else f"task runner: {type(runner).__name__}"
    require_one_runner(
        plan.target.uri,
        exploiting=type(scheduler_from(asked.scheduler)).__name__ if policy.saves_first else "",
        elsewhere="trials='deployment'" if asked.trials == "deployment" else there,
    )


def _subscribers(asked: SearchRequest, plan: TrialSpec, outlook: SearchEstimate, stopper: Stopper) -> Subscribers:
    return Subscribers(
        plan.target,
        SearchInfo(plan.trial.experiment, plan.target.uri, outlook.objective),
        callbacks_for(asked.callbacks),
        outlook,
        in_terminal=asked.isolation == "process",  # with threads, a debugger may use the terminal
        news=_subject(plan, outlook, stopper),
    )


def _learn(policy: SearchPolicy, journal_writer: JournalWriter) -> None:
    if journal_writer.experiment.learned:
        lessons = lessons_known(journal_writer)
        used, names = policy.warm_start(lessons), ", ".join(journal_writer.experiment.learned)
        get_run_logger().info("warm start: %d finished trials of %s; the search can use %d", len(lessons), names, used)


def _limits(turn: Turn, plan: TrialSpec, stopper: Stopper, slots: Slots) -> SearchLimits:
    asked = turn.request
    budget = asked.time_budget_seconds
    if budget is not None and budget <= 0:
        raise InvalidInput(f"time_budget_seconds: expected more than 0, found {budget:g}")
    rerun = asked.rerun_errored or resuming(asked.resume).rerun_errored
    return SearchLimits(
        max_concurrent_trials=slots.count,
        failures=asked.failures or FailurePolicy(),
        fail_fast=asked.fail_fast,
        time=None if budget is None else timedelta(seconds=budget),
        ends=STOPPED_HERE if turn.stops else "",
        reruns_errored=bool(rerun),
        only_errored=rerun == "only",
        has_had_enough=lambda trial: has_had_enough(plan, trial, stopper),
    )


def _policy(asked: SearchRequest, experiment: str, objective: Objective | None, stopper: Stopper) -> SearchPolicy:
    seed = asked.seed if asked.seed is not None else seed_named(experiment)
    search = search_of(asked)
    scheduler = FIFO() if asked.scheduler is None else scheduler_from(asked.scheduler)
    tallies = [each.begin(objective) for each in of_experiment(stopper)]
    proposals = search.begin(space := space_of(asked.space or {}), objective, seed)
    scheduler.require_serves(space)
    return SearchPolicy(proposals, begun(scheduler, objective, seed), tallies)


def _outlook(asked: SearchRequest, experiment: str, objective: Objective | None, stopper: Stopper) -> SearchEstimate:
    budget = asked.time_budget_seconds
    return SearchEstimate(
        experiment,
        objective,
        trial_count=search_of(asked).trial_count(space_of(asked.space or {})),
        step_count=stopper.step_count,
        time=None if budget is None else timedelta(seconds=budget),
    )


def _subject(plan: TrialSpec, outlook: SearchEstimate, stopper: Stopper) -> EventContext:
    budgets = budgets_of(stopper, time=outlook.time, trial_count=outlook.trial_count)
    place = ExperimentAddress(plan.target.uri, plan.trial.experiment)
    return EventContext(place, outlook.objective, budgets, plan.sync.sync_period, this_run())


def begun(scheduler: Scheduler, objective: Objective | None, seed: int) -> Schedule:
    """Return the schedule of a new experiment. Raises `InvalidInput` if the scheduler needs a metric and has none."""
    if objective is None and not isinstance(scheduler, FIFO):
        raise InvalidInput(f"metric: {type(scheduler).__name__} compares trials by a metric; name it: metric='loss'")
    return scheduler.begin(objective or _NAMELESS, seed)


def _executor(asked: SearchRequest, plan: TrialSpec) -> tuple[AbstractContextManager[TrialExecutor], Slots]:
    """Return the executor of trials (local, task runner or deployment) and its slots."""
    if asked.trials == "deployment":
        if asked.resources_per_trial is not None:
            raise InvalidInput(
                "resources_per_trial: with trials='deployment' the work pool assigns resources; pass "
                "trial_job_variables={...}, with the variables of its base job template"
            )
        deployment = DeploymentLauncher(asked.trial_deployment, asked.trial_job_variables)
        deployment.require(plan)
        return nullcontext(RemoteExecutor(plan.target, deployment, _LOOK_EVERY)), slots_elsewhere(asked)
    if asked.trial_job_variables is not None:
        raise InvalidInput("trial_job_variables: they require trials='deployment'")
    if (runner := _runner_elsewhere()) is not None:
        there = TaskRunnerLauncher(runner, resources_asked(asked))
        return nullcontext(RemoteExecutor(plan.target, there, _LOOK_EVERY)), slots_elsewhere(asked)
    return _local_crew(plan, slots := slots_here(asked)), slots


def _runner_elsewhere() -> TaskRunner[Any] | None:
    """Return the flow's task runner; None if it is a thread pool of this process."""
    context = FlowRunContext.get()
    runner = context.task_runner if context is not None else None
    return None if isinstance(runner, ThreadPoolTaskRunner) else runner


@contextmanager
def _local_crew(plan: TrialSpec, slots: Slots) -> Iterator[TrialExecutor]:
    with TrialProcessPool(slots=slots.count) as pool:
        if plan.isolation == "process":
            pool.prepare()
        yield LocalExecutor(pool, slots.environments)
