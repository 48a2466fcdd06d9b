"""Check a plan before anything is written, also against the journal that it resumes, and derive what a run needs.

A `require_` refuses, a `log_` or a `warn_of_` says what may not be meant; `with_added_samples` finds the number of
samples, `trial_spec` how the trials are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger
from prefect.task_runners import ThreadPoolTaskRunner

from prefect_tune.attempt.commit_worker import TrialArtifacts
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.trial_spec import TrialSpec, pickled_or_path
from prefect_tune.blocks import LocalTarget, StorageTarget
from prefect_tune.core.errors import InvalidInput, ResumeFailed
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.stoppers import RAYS_NAMES, Stopper, limits_in, of_experiment
from prefect_tune.core.experiment.summary import objective_in
from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.core.reasons import AnyReason
from prefect_tune.core.search.domains import domains_in
from prefect_tune.core.search.objective import Objective, usual_mode
from prefect_tune.core.search.random_search import DEFAULT_SAMPLES, ENDLESS, RandomSearch, default_samples
from prefect_tune.core.search.space import valid_space
from prefect_tune.core.shown_text import plural
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.values import canonical_json, leaves, metric_in
from prefect_tune.journal_access import no_experiment_at, read_known
from prefect_tune.parameters.argument_checks import name_of, search_from
from prefect_tune.parameters.search_plan import OPTIONS, Resuming, SearchPlan, only_in_code
from prefect_tune.prefect_api.call_paths import callers_tags
from prefect_tune.registry import BUILT_IN

if TYPE_CHECKING:
    from prefect.task_runners import TaskRunner


# What a resume may not change, against the journal.

KEEPS_CONFIGURATIONS = (
    "a retried trial keeps its configuration: for configurations from a corrected space raise num_samples, or choose "
    "another experiment name"
)


def require_same(state: Experiment, settings: Mapping[str, object]) -> None:
    """Require that the journal's earlier decisions keep their meaning under these settings.

    Raises:
        InvalidInput: the experiment is a single training, or its seed differs from today's, or its metric or mode if
            trials were compared by it.
        ResumeFailed: the experiment is an incomplete fork, or is being deleted.
    """
    require_goes_on(state)
    if not all(trial.of_search for trial in state.trials.values()):
        raise InvalidInput(f"experiment {state.name!r} {_how_to_continue(state)}; or choose another experiment name")
    for name, option in OPTIONS.items():
        before, now = _meaning(name, state.settings), _meaning(name, settings)
        if option.fixed and state.trials and before != now and (name == "seed" or _has_compared(state)):
            raise InvalidInput(
                f"{name}: experiment {state.name!r} was begun with {before!r}, and this run passes {now!r}: "
                f"{option.fixed}. Pass {before!r}, or choose another experiment name"
            )


def _meaning(name: str, settings: Mapping[str, object]) -> object:
    """Return the value of a setting: settings omit a default, and a list of one metric or mode equals its element."""
    value = settings.get(name, "min" if name == "mode" else None)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def with_seed_of(state: Experiment, plan: SearchPlan) -> SearchPlan:
    """Return the plan with the seed of the experiment's journal if it passes none."""
    seed = state.settings.get("seed")
    return plan.extended(seed=seed) if plan.seed is None and state.trials and seed is not None else plan


def _has_compared(state: Experiment) -> bool:
    """Whether a decision or proposal may have used the metric: not if it is misspelt, so that no report has it."""
    objective, trials = objective_in(state.settings), state.trials.values()
    if objective is None or any(each.what == "decided" for trial in trials for each in trial.past):
        return True
    return all(any(metric_in(each.metrics, name) is not None for each in trials) for name in objective.metrics)


def require_search(state: Experiment, uri: str) -> None:
    """Require a search: no other experiment has settings in its journal, by which it can be resumed.

    Raises:
        InvalidInput: the experiment is a single training, or that of a flow of one's own.
    """
    if not state.settings:
        raise InvalidInput(f"experiment {state.name!r} at {uri} {_how_to_continue(state)}")


def _how_to_continue(state: Experiment) -> str:
    """Return what an experiment is that is no search, and what continues it."""
    owner = state.owner
    if not state.trials and not (owner and owner.attempt):
        return "has no trials and no settings yet: call again what began it, with the same target and experiment"
    # The public tasks count the tries of their flow run; a trial that only they save has no trainable.
    if (owner and owner.attempt) or any(not trial.fingerprint for trial in state.trials.values()):
        return (
            "belongs to a flow of your own, not to a search: run that flow again with the same target and experiment, "
            f"or, if it is of a deployment, Retry its last run, {owner}; it continues from the newest checkpoints"
        )
    return (
        "is a single training, not a search: call pt.durable_trainable(...) again, with the same target and experiment"
    )


def require_same_training(state: Experiment, spec: TrialSpec, config: Mapping[str, object]) -> None:
    """Require that the experiment is new, or the single training that `spec` and `config` specify.

    Raises:
        InvalidInput: the experiment is a search, or trains another trainable or configuration.
        ResumeFailed: the experiment is an incomplete fork, or is being deleted.
    """
    require_goes_on(state)
    where = f"experiment {state.name!r} at {spec.target.uri}"
    if state.settings or any(trial.of_search for trial in state.trials.values()):
        raise InvalidInput(f"{where} is a search: resume it by pt.resume(...), or choose another experiment name")
    trial = state.trials.get(spec.trial.trial)
    if trial is None:
        return
    if trial.config != config:
        raise InvalidInput(
            f"{where}: expected its config {dict(trial.config)}, found {dict(config)}. "
            "Pass the same config, or choose another experiment name"
        )
    before, now = trial.fingerprint.get("trainable"), spec.fingerprint.get("trainable")
    if before and now and before != now:
        raise InvalidInput(
            f"{where}: expected its trainable {before!r}, found {now!r}. Pass the same trainable, or choose another "
            "experiment name; the default name is different for each flow run"
        )


def require_goes_on(state: Experiment) -> None:
    """Require an experiment that is complete and is not being deleted.

    Raises:
        ResumeFailed: the experiment is a fork whose copying was interrupted, or is being deleted.
    """
    if state.is_removed:
        raise ResumeFailed(
            f"experiment {state.name!r} is being deleted: finish the deletion, or choose another experiment name"
        )
    if not state.is_whole:
        raise ResumeFailed(
            f"experiment {state.name!r} is an incomplete fork of {state.origin}: the fork was interrupted; "
            "fork again under the same name to complete it"
        )


def require_presence(
    target: StorageTarget, experiment: str, asked: Resuming, known: Experiment | None = None
) -> Experiment | None:
    """Check, before anything is written, that the experiment exists or not, as `asked`.

    Returns `known`, or the journal if it had to be read; None if neither.

    Raises:
        ResumeFailed: it has to exist and does not, or cannot be read. Nothing was started.
        InvalidInput: it must not exist, and does; or 'local' was asked, and the target is not a `LocalTarget`.
    """
    if asked.local and not isinstance(target, LocalTarget):
        raise InvalidInput(
            f"resume='local': an experiment is stored on its target only, {target.uri}: there is no "
            "copy on this machine that could be newer or older. Use 'must', or a target on this machine"
        )
    if asked.presence == "auto":
        return known
    known = known or read_known(target, experiment)
    if asked.presence == "must" and not known.number:
        raise ResumeFailed(f"nothing was started: {no_experiment_at(target, experiment)}")
    if asked.presence == "never" and known.number:
        raise InvalidInput(
            f"experiment {experiment!r} at {target.uri} exists already, with {len(known.trials)} trials, but "
            "resume='never' (or False) requires a new one: use another name; no experiment is ever overwritten"
        )
    return known


# Whether a trainable's source has changed since its experiment last trained, and what a resume does about that.

CODE_TRAINS = "steps from now on are trained by the new code; earlier reports came from the old code"
CODE_UNUSED = (
    "this run trained nothing with the new code; to train with it, raise num_samples, or choose another experiment name"
)
"""The effect of changed code, when a trial starts, and at the end of a run that has started none."""


def require_code(state: Experiment, plan: SearchPlan) -> None:
    """Refuse a changed trainable, for `on_code_change="refuse"`; called before an earlier owner is superseded.

    Raises:
        InvalidInput: the trainable has changed since the experiment last trained.
    """
    if changed := _changed(state, plan):
        raise InvalidInput(
            f"{changed}, and on_code_change='refuse': choose another experiment name, fork the experiment, or pass "
            "on_code_change='warn'"
        )


def settings_before_training(state: Experiment, settings: Mapping[str, object]) -> Mapping[str, object]:
    """Return today's settings with the code that trained last: the journal holds today's once that trains."""
    code = state.settings.get("code")
    return {**settings, "code": code} if code and state.trials else settings


def log_code(state: Experiment, plan: SearchPlan, effect: str, log: Log) -> None:
    """Log a warning if the trainable has changed since the experiment last trained, and the effect of that."""
    if changed := _changed(state, plan):
        log.warning("%s: %s", changed, effect)


def code_note(state: Experiment, plan: SearchPlan) -> str:
    """Return a line for a form: whether the trainable's source has changed since the experiment last trained."""
    if not (code := plan.code):
        return "code: source unavailable, cannot tell whether it changed"
    return f"⚠️ {changed}" if (changed := _changed(state, plan)) else f"code: unchanged ({code})"


def _changed(state: Experiment, plan: SearchPlan) -> str | None:
    before, now = state.settings.get("code"), plan.code
    if not (state.trials and before and now and before != now):
        return None
    given, (*_, last) = state.settings.get("trainable"), state.trials.values()  # passed as text, or of the last trial
    was = (name_of(given) if isinstance(given, str) else last.fingerprint).get("trainable")
    name = plan.fingerprint.get("trainable")
    if was and name and was != name:
        return (
            f"the trainable has changed since experiment {state.name!r} last trained ({was} {before} -> {name} {now})"
        )
    return f"the source of the trainable has changed since experiment {state.name!r} last trained ({before} -> {now})"


# `samples_per_run`: each run of a search, such as a scheduled one, adds samples to those of earlier runs.


def require_no_fewer(num_samples: int | None, state: Experiment) -> None:
    """Check that the new total of samples is not smaller than that of the experiment, as in the form of a resume.

    Raises:
        InvalidInput: it is smaller.
    """
    known = state.settings.get("num_samples")
    if num_samples is None or (known is None and "search" in only_in_code(state.settings)):
        return
    before = _total_in(known, state.settings.get("search"))
    if isinstance(before, int) and ENDLESS not in (before, num_samples) and num_samples < before:
        raise InvalidInput(
            f"num_samples: experiment {state.name!r} has {before} already, and this run passes {num_samples}: it is "
            f"the new total, with a grid that of each point. Pass {before} or more, or "
            f"samples_per_run={num_samples} to add {num_samples}"
        )


def with_added_samples(
    plan: SearchPlan, state: Experiment, call_path: Callable[[], str]
) -> tuple[SearchPlan, Mapping[str, int]]:
    """Return `plan` with the total number of samples, and by run the samples that this run adds, for the journal.

    This run also proposes the samples that earlier runs were to propose and did not. A run that is started again
    adds none again.

    Raises:
        InvalidInput: the experiment has no number of samples to add to.
    """
    added = plan.samples_per_run
    if added is None:
        return with_default_samples(plan, state), {}
    run, before = call_path(), _samples_before(plan, state)
    chosen = plan.num_samples or 0  # in a resume form
    if run in state.extensions:
        return plan.extended(num_samples=max(before, chosen)), {}
    return plan.extended(num_samples=max(before + added, chosen)), {run: added}


def with_default_samples(plan: SearchPlan, state: Experiment) -> SearchPlan:
    """Return `plan` with the default number of samples if that is not ten, so that the journal stores it.

    A journal without a number means ten, whatever the space: an experiment that was begun with ten keeps them.
    """
    if plan.num_samples is not None or plan.samples_per_run is not None or not _leaves_count_open(plan.search):
        return plan
    default, settings = default_samples(plan.space or {}), state.settings
    if default == DEFAULT_SAMPLES:
        return plan
    before = settings.get("num_samples", DEFAULT_SAMPLES) if _leaves_count_open(settings.get("search")) else None
    return plan.extended(num_samples=DEFAULT_SAMPLES if settings and before == DEFAULT_SAMPLES else default)


def _leaves_count_open(search: object) -> bool:
    match search:
        case None | "RandomSearch":
            return True
        case RandomSearch(num_samples=samples) | {"RandomSearch": {"num_samples": samples}}:
            return samples is None
        case {"RandomSearch": {}}:
            return True
        case _:
            return False


def _samples_before(plan: SearchPlan, state: Experiment) -> int:
    """Return how many samples earlier runs were to propose in all."""
    if not state.settings:
        return 0
    search = state.settings.get("search", plan.search if "search" in only_in_code(state.settings) else None)
    found = _total_in(state.settings.get("num_samples"), search)
    if not isinstance(found, int) or found == ENDLESS:
        raise InvalidInput(
            f"samples_per_run: experiment {state.name!r} was not begun with a fixed number of samples to add to; "
            "leave samples_per_run out, or choose another experiment name"
        )
    return found


def _total_in(num_samples: Any, search: Any) -> object:
    """Return the total number of samples in an experiment's settings; None if they fix none."""
    if num_samples is not None:
        return num_samples
    return DEFAULT_SAMPLES if _leaves_count_open(search) else getattr(search_from(search), "num_samples", None)


# What a plan says that is probably not meant.


def log_errored(state: Experiment, plan: SearchPlan, log: Log) -> None:
    """Log how many errored trials this run does not retry; if it has nothing else to train, its error says so."""
    count = sum(each.status is Status.ERRORED for each in state.trials.values())
    adds_trials = plan.trial_count is None or plan.trial_count > len(state.trials)
    if count and not plan.reruns_errored and (count < len(state.trials) or adds_trials):
        log.warning(
            "%s not retried: to retry with the code as it is now, pass rerun_errored=True (--rerun-errored); %s",
            plural(count, "trial that errored in an earlier run is", "trials that errored in an earlier run are"),
            KEEPS_CONFIGURATIONS,
        )


def log_fewer_samples(state: Experiment, plan: SearchPlan, log: Log) -> None:
    """Log a warning if the experiment has more trials than `num_samples` asks for."""
    wanted, there_are = plan.trial_count, len(state.trials)
    if plan.num_samples is not None and wanted is not None and wanted < there_are:
        log.warning(
            "num_samples=%d has no effect: it is the total, which makes %s, and the experiment has %d already. To add "
            "trials, raise num_samples, or pass samples_per_run",
            plan.num_samples,
            plural(wanted, "trial", "trials"),
            there_are,
        )


def log_space(state: Experiment, plan: SearchPlan, log: Log) -> None:
    """Log a warning if existing trials were drawn from another space, and if no trial will be drawn from this one."""
    before, today = (
        None if "space" in only_in_code(settings) else canonical_json(settings.get("space", {}))
        for settings in (state.settings, plan.settings)
    )
    if not state.trials or before == today or before is None or today is None:
        return
    there_will_be, there_are = plan.trial_count, len(state.trials)
    are_all = there_will_be is not None and there_will_be <= there_are
    log.warning(
        "the search space has changed; %s drawn from the old one%s",
        plural(there_are, "earlier trial was", "earlier trials were"),
        f", and the search proposes {there_will_be} in all: raise num_samples to draw from the new space"
        if are_all
        else "",
    )


def warn_of_limits(stopper: Stopper, objective: Objective | None, log: Log) -> None:
    """Log a warning for each stop limit that is probably not meant.

    That of a metric that is minimized ends most trials at once. That of a name which Ray Tune adds to each report
    makes every trial fail, unless the trainable reports it itself.
    """
    modes = dict(zip(objective.metrics, objective.modes, strict=True)) if objective else {}
    for name, limit in limits_in(stopper).items():
        if name in RAYS_NAMES:
            log.warning(
                "stop={'%s': %g} limits a metric of this name, and trials that do not report it fail. Ray Tune's %s is "
                "%s here",
                name,
                limit,
                name,
                RAYS_NAMES[name],
            )
        if modes.get(name) == "min":
            log.warning(
                "stop={'%s': %g} ends a trial as soon as %s >= %g, but the metric is minimized: most trials end at "
                "their first step. To end a trial that is good enough: stop=lambda metrics: metrics['%s'] <= %g",
                *(name, limit) * 3,
            )


def warn_of_no_metric(plan: SearchPlan, log: Log) -> None:
    """Log a warning if several trials are searched without a metric: none of them is the best."""
    if plan.objective is None and plan.trial_count != 1:
        log.warning(
            "no metric: trials are not compared, and results.best is an error. Pass the name of a reported metric, "
            "as in metric='loss'; or name it later: results.best_trial('loss')"
        )


def warn_of_mode(plan: SearchPlan, log: Log) -> None:
    """Log a warning if the names of metrics say that the other direction is good: an accuracy that is minimized.

    A `min` that was given, or a list with a mode for each metric, is meant: checked are the default and a single `max`.
    """
    objective, given = plan.objective, plan.mode
    if objective is None or isinstance(given, list) or given == "min":
        return
    found = dict(zip(objective.metrics, objective.modes, strict=True))
    usual = {name: usual_mode(name) or mode for name, mode in found.items()}
    wrong = [name for name in found if usual[name] != found[name]]
    if wrong:
        is_max, names = given == "max", " and ".join(wrong)
        meant: object = list(usual.values()) if len(usual) > 1 else usual[wrong[0]]
        as_it_is: object = [given] * len(found) if is_max else "min"
        log.warning(
            "%s: by its name %s values are good, and the search takes the %s ones for the best (mode=%s). Did you mean "
            "mode=%r? If not, mode=%r says so without this warning",
            names,
            "small" if is_max else "large",
            "largest" if is_max else "smallest",
            "'max'" if is_max else "'min', the default",
            meant,
            as_it_is,
        )


def warn_of_constants(plan: SearchPlan, log: Log) -> None:
    """Log a warning if the search has several trials and nothing to draw: all of them train the same.

    A search of the user, or `Repeated` with its index, may propose what the space does not have.
    """
    space = valid_space(plan.space or {})
    proposes_more = type(plan.proposer).__name__ not in BUILT_IN["search"]
    if plan.trial_count == 1 or any(domains_in(space)) or proposes_more:
        return
    count = "" if plan.trial_count is None else f"{plan.trial_count} "
    lists = [(name, value) for name, value in leaves(space) if isinstance(value, list)]
    meant = "draw a value, such as pt.uniform(0, 1)"
    if lists:
        name, value = lists[0]
        meant = f"{name}={value!r} is one value; did you mean pt.choice({value!r}) or pt.grid_search({value!r})?"
    log.warning(
        "the space has no distribution, so all %strials train the same configuration. To train it once: "
        "num_samples=1. Otherwise: %s",
        count,
        meant,
    )


# Refuse searches with several writers of one journal on a target that is safe for one writer only.


def runner_elsewhere() -> TaskRunner[Any] | None:
    """Return the flow's task runner; None if it is a thread pool of this process."""
    context = FlowRunContext.get()
    runner = context.task_runner if context is not None else None
    return None if isinstance(runner, ThreadPoolTaskRunner) else runner


def require_one_runner(uri: str, elsewhere: str = "") -> None:
    """Refuse a flow in which two processes could write one journal at once; call it before anything is written.

    Args:
        uri: of the target, which has no atomic create-if-absent.
        elsewhere: what runs the trials outside this process, if it is not the flow's task runner.

    Raises:
        InvalidInput: `elsewhere` is not empty, or the flow's task runner has other processes.
    """
    if not elsewhere and (runner := runner_elsewhere()) is not None:
        elsewhere = f"task runner: {type(runner).__name__}"
    if elsewhere:
        raise InvalidInput(
            f"{elsewhere}, at {uri}: an attempt in another process may be presumed lost, still run, and write beside "
            "its successor. Expected a target with atomic create-if-absent, found one without (ONE RUNNER ONLY), where "
            "the second of two writers overwrites the first. Nothing was started: use S3, GCS, Azure or a folder "
            "(prefect-tune blocks check TARGET), or trials='tasks' with a thread pool task runner"
        )


@dataclass(frozen=True)
class SearchLimits:
    """The limits of one run of an experiment."""

    options: SearchPlan
    """The plan: its limits, such as `fail_fast`, are read from here where they apply."""
    max_concurrent_trials: int
    """The number of slots, which the options only bound."""
    end_reason: AnyReason | None = None
    """Why the run ends before it trains; None if it trains."""
    has_had_enough: Callable[[Trial], bool] = lambda _: True
    """Whether a finished trial meets today's stop criterion too; otherwise it is requeued."""


# The specification of a plan's trials.


def trial_spec(plan: SearchPlan, stopper: Stopper) -> TrialSpec:
    """Return how the trials of a search are trained, with a placeholder for the trial.

    An option of the trial is a field of both, under one name.

    Raises:
        InvalidInput: a concurrency limit does not exist, or the trainable cannot be sent to a process.
    """
    _require_limits(plan.concurrency_limits or ())
    names = OPTIONS.keys() & {each.name for each in fields(TrialSpec)}
    of_the_trial: dict[str, Any] = {name: value for name in names if (value := getattr(plan, name)) is not None}
    silence = plan.silence_timeout_seconds
    meant = {
        "trainable": pickled_or_path(plan.trainable),
        "concurrency_limits": tuple(plan.concurrency_limits or ()),
    }
    return TrialSpec(
        **{**of_the_trial, **meant},
        trial=TrialKey(experiment=plan.experiment, generation=1, trial="any"),
        fingerprint=plan.fingerprint,
        stopper=pickled_or_path(stopper),
        needs_curve=stopper.looks_back,
        cadence=plan.checkpoint or Cadence(),
        grace=timedelta(seconds=plan.grace_period_seconds),
        silence=None if silence is None else timedelta(seconds=silence),
        tags=tuple(dict.fromkeys([*(plan.trial_tags or ()), *sorted(callers_tags())])),
        required_metrics=plan.objective.metrics if plan.objective and not plan.allow_missing_metric else (),
        of_search=True,
    )


def _require_limits(names: Sequence[str]) -> None:
    """Require that `names` are global concurrency limits of Prefect: a missing one would limit nothing."""
    if not names:
        return
    with get_client(sync_client=True) as client:
        for name in names:
            try:
                client.read_global_concurrency_limit_by_name(name)
            except ObjectNotFound as missing:
                raise InvalidInput(
                    f"concurrency_limits: Prefect has no global concurrency limit {name!r}; create it: "
                    f"prefect gcl create {name} --limit 2"
                ) from missing


def spec_of_one_trial(plan: SearchPlan, trial: str) -> tuple[TrialSpec, Stopper]:
    """As `trial_spec`, of a trial whose attempts write the experiment's journal; and its stop criterion.

    Raises:
        InvalidInput: also if the criterion ends a search of many trials, or as `require_possible`.
    """
    stopper = plan.stopper
    if found := of_experiment(stopper):
        raise InvalidInput(
            f"stop: {found[0]} is for a search of many trials; for one trial use MaxSteps, MaxTime or Plateau"
        )
    spec = trial_spec(plan, stopper)
    spec = replace(spec, trial=spec.trial.of_experiment.trial_key(trial), of_search=False)
    require_possible(spec)
    return spec, stopper


def require_possible(spec: TrialSpec) -> None:
    """Check the sync settings of a specification before anything is written.

    Raises:
        InvalidInput: the syncer or the upload target is invalid.
    """
    TrialArtifacts(spec, Path(), get_run_logger())
