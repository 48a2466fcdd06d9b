"""Check a plan, and the journal of an experiment to resume, before anything is written; make the trials' specification.

A `require_` function raises; a `warn_of_` function logs a warning about settings that are probably not intended.
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
from prefect_tune.attempt.trial_spec import TrialSpec, serialize_for_trial
from prefect_tune.blocks import LocalTarget, StorageTarget
from prefect_tune.core.display_text import pluralize
from prefect_tune.core.errors import InvalidInput, ResumeFailed
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.stoppers import (
    RAY_EQUIVALENTS,
    Stopper,
    collect_metric_limits,
    extract_experiment_stoppers,
)
from prefect_tune.core.experiment.summary import objective_from_settings
from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.core.reasons import AnyReason
from prefect_tune.core.search.domains import find_domains
from prefect_tune.core.search.objective import Objective, infer_mode
from prefect_tune.core.search.random_search import DEFAULT_NUM_SAMPLES, UNLIMITED, RandomSearch, get_default_num_samples
from prefect_tune.core.search.space import validate_space
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.values import canonical_json, get_metric, iter_leaves
from prefect_tune.journal_access import missing_experiment_message, read_experiment_to_resume
from prefect_tune.parameters.argument_checks import make_trainable_fingerprint, parse_search
from prefect_tune.parameters.search_plan import OPTIONS, ResumeOption, SearchPlan, list_unstored_options
from prefect_tune.prefect_api.call_paths import get_caller_tags
from prefect_tune.registry import BUILT_IN_MODULES

if TYPE_CHECKING:
    from prefect.task_runners import TaskRunner


# Check that a resume changes no setting that must stay as it is in the journal.

RETRY_KEEPS_CONFIGURATION = (
    "a retried trial keeps its configuration: for configurations from a corrected space, raise num_samples, or choose "
    "another experiment name"
)


def require_compatible_settings(state: Experiment, settings: Mapping[str, object]) -> None:
    """Require that the journal's earlier decisions stay valid with these settings.

    Raises:
        InvalidInput: the experiment is a single training; or it has trials, and its seed differs; or it has compared
            its trials by another metric or mode.
        ResumeFailed: the experiment is an incomplete fork, or is being deleted.
    """
    require_continuable(state)
    if not all(trial.proposed_by_search for trial in state.trials.values()):
        raise InvalidInput(f"experiment {state.name!r} {_make_resume_hint(state)}; or choose another experiment name")
    for name, option in OPTIONS.items():
        before, now = _get_effective_setting(name, state.settings), _get_effective_setting(name, settings)
        if option.fixed_reason and state.trials and before != now and (name == "seed" or _may_have_used_metric(state)):
            raise InvalidInput(
                f"{name}: experiment {state.name!r} was begun with {before!r}, and this run passes {now!r}, but "
                f"{option.fixed_reason}. Pass {before!r}, or choose another experiment name"
            )


def _get_effective_setting(name: str, settings: Mapping[str, object]) -> object:
    """Return the value of a setting, or its default; a list of one metric or mode is replaced by its element."""
    value = settings.get(name, "min" if name == "mode" else None)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def with_journal_seed(state: Experiment, plan: SearchPlan) -> SearchPlan:
    """Return the plan, with the seed from the experiment's journal if the plan has no seed."""
    seed = state.settings.get("seed")
    return plan.with_changes(seed=seed) if plan.seed is None and state.trials and seed is not None else plan


def _may_have_used_metric(state: Experiment) -> bool:
    """Return whether the objective may have been used: a decision is journaled, or all its metrics were reported."""
    objective, trials = objective_from_settings(state.settings), state.trials.values()
    if objective is None or any(record.kind == "decided" for trial in trials for record in trial.policy_events):
        return True
    return all(any(get_metric(record.metrics, name) is not None for record in trials) for name in objective.metrics)


def require_search(state: Experiment, uri: str) -> None:
    """Require that the experiment is a search, because only a search's journal has the settings for a resume.

    Raises:
        InvalidInput: the experiment is a single training, or belongs to a user's own flow.
    """
    if not state.settings:
        raise InvalidInput(f"experiment {state.name!r} at {uri} {_make_resume_hint(state)}")


def _make_resume_hint(state: Experiment) -> str:
    """Return the end of a message about an experiment that is not a search: its kind, and how to continue it."""
    owner = state.owner
    if not state.trials and not (owner and owner.attempt):
        return "has no trials and no settings yet: repeat the call that began it, with the same target and experiment"
    # Only a user's own flow journals the run count (as `attempt`), or has trials without a trainable's fingerprint.
    if (owner and owner.attempt) or any(not trial.fingerprint for trial in state.trials.values()):
        return (
            "belongs to your own flow, not to a search: run that flow again with the same target and experiment, or "
            f"retry the last run of its deployment, {owner}; the flow continues from the newest checkpoints"
        )
    return "is a single training, not a search: call pt.durable_trainable again with the same target and experiment"


def require_same_training(state: Experiment, spec: TrialSpec, config: Mapping[str, object]) -> None:
    """Require that the experiment is new, or is the single training that `spec` and `config` specify.

    Raises:
        InvalidInput: the experiment is a search, or trains another trainable or configuration.
        ResumeFailed: the experiment is an incomplete fork, or is being deleted.
    """
    require_continuable(state)
    where = f"experiment {state.name!r} at {spec.target.uri}"
    if state.settings or any(trial.proposed_by_search for trial in state.trials.values()):
        raise InvalidInput(f"{where} is a search: resume it with pt.resume(...), or choose another experiment name")
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


def require_continuable(state: Experiment) -> None:
    """Require an experiment that is complete and not being deleted.

    Raises:
        ResumeFailed: the experiment is an incomplete fork, or is being deleted.
    """
    if state.is_being_deleted:
        raise ResumeFailed(f"experiment {state.name!r} is being deleted: finish the deletion, or choose another name")
    if not state.is_complete:
        raise ResumeFailed(f"experiment {state.name!r} is an incomplete fork of {state.origin}: repeat the fork first")


def require_presence(
    target: StorageTarget, experiment: str, resume: ResumeOption, state: Experiment | None = None
) -> Experiment | None:
    """Check, before anything is written, that the experiment exists or does not exist, as `resume` requires.

    Returns `state`; if `state` is None, the state that was read from the journal, or None if none was read.

    Raises:
        ResumeFailed: the experiment must exist, but does not; or its journal cannot be read. Nothing was started.
        InvalidInput: the experiment must not exist, but exists; or `resume` is 'local', but the target is remote.
    """
    if resume.requires_local_target and not isinstance(target, LocalTarget):
        raise InvalidInput(
            f"resume='local': the experiment is stored only on its target, {target.uri}, not on this machine. "
            "Use 'must', or a target on this machine"
        )
    if resume.presence == "auto":
        return state
    state = state or read_experiment_to_resume(target, experiment)
    if resume.presence == "must" and not state.entry_count:
        raise ResumeFailed(f"nothing was started: {missing_experiment_message(target, experiment)}")
    if resume.presence == "never" and state.entry_count:
        raise InvalidInput(
            f"experiment {experiment!r} at {target.uri} already exists, with {len(state.trials)} trials, but "
            "resume='never' (or False) requires a new experiment: use another name; experiments are never overwritten"
        )
    return state


# Detect whether a trainable's source has changed since its experiment last trained.

NEW_CODE_TRAINS = "steps from now on are trained by the new code; earlier reports came from the old code"
NEW_CODE_UNUSED = "this run did not use the new code: to train with it, raise num_samples, or choose another name"
"""How changed code affects a run: the first text if the run starts a trial, the second if it started none."""


def require_unchanged_code(state: Experiment, plan: SearchPlan) -> None:
    """Reject a changed trainable, for `on_code_change="refuse"`; called before this run supersedes an earlier owner.

    Raises:
        InvalidInput: the trainable has changed since the experiment last trained.
    """
    if changed := _describe_code_change(state, plan):
        raise InvalidInput(
            f"{changed}, and on_code_change='refuse': choose another experiment name, fork the experiment, or pass "
            "on_code_change='warn'"
        )


def with_journal_digest(state: Experiment, settings: Mapping[str, object]) -> Mapping[str, object]:
    """Return settings with the digest of the code that trained last, if any; the next attempt journals a new digest."""
    code = state.settings.get("code")
    return {**settings, "code": code} if code and state.trials else settings


def warn_of_code_change(state: Experiment, plan: SearchPlan, effect: str, log: Log) -> None:
    """Log a warning with the `effect` of the change if the trainable has changed since the experiment last trained."""
    if changed := _describe_code_change(state, plan):
        log.warning("%s: %s", changed, effect)


def format_code_note(state: Experiment, plan: SearchPlan) -> str:
    """Return a line that says, in a form, whether the trainable has changed since the experiment last trained."""
    if not (code := plan.source_digest):
        return "code: source unavailable, so it may have changed"
    return f"⚠️ {changed}" if (changed := _describe_code_change(state, plan)) else f"code: unchanged ({code})"


def _describe_code_change(state: Experiment, plan: SearchPlan) -> str | None:
    before, now = state.settings.get("code"), plan.source_digest
    if not (state.trials and before and now and before != now):
        return None
    old_trainable, (*_, last_trial) = state.settings.get("trainable"), state.trials.values()
    old = make_trainable_fingerprint(old_trainable) if isinstance(old_trainable, str) else last_trial.fingerprint
    old_name, name = old.get("trainable"), plan.fingerprint.get("trainable")
    if old_name and name and old_name != name:
        what, before, now = "trainable", f"{old_name} {before}", f"{name} {now}"
    else:
        what = "source of the trainable"
    return f"the {what} has changed since experiment {state.name!r} last trained ({before} -> {now})"


# `samples_per_run`: each run of a search, such as a scheduled run, adds samples.


def require_no_fewer_samples(num_samples: int | None, state: Experiment) -> None:
    """Require that the new total number of samples, such as one from a resume form, is not below the old total.

    Raises:
        InvalidInput: the number is smaller.
    """
    stored_count = state.settings.get("num_samples")
    if num_samples is None or (stored_count is None and "search" in list_unstored_options(state.settings)):
        return
    old_count = _get_stored_sample_count(stored_count, state.settings.get("search"))
    if isinstance(old_count, int) and UNLIMITED not in (old_count, num_samples) and num_samples < old_count:
        raise InvalidInput(
            f"num_samples: experiment {state.name!r} already has {old_count} samples, and this run passes "
            f"{num_samples} as the new total (with a grid, per grid point). Pass {old_count} or more, or "
            f"samples_per_run={num_samples} to add {num_samples}"
        )


def with_added_samples(
    plan: SearchPlan, state: Experiment, call_path: Callable[[], str]
) -> tuple[SearchPlan, Mapping[str, int]]:
    """Return `plan` with the new total of samples, and a mapping from the run's key to the number that this run adds.

    This run also proposes what earlier runs should have proposed but did not. A run that is started again adds none.

    Raises:
        InvalidInput: the experiment has no fixed number of samples.
    """
    added = plan.samples_per_run
    if added is None:
        return with_default_samples(plan, state), {}
    run_key, count_before = call_path(), _count_earlier_samples(plan, state)
    form_count = plan.num_samples or 0  # a resume form passes the new total
    if run_key in state.extensions:
        return plan.with_changes(num_samples=max(count_before, form_count)), {}
    return plan.with_changes(num_samples=max(count_before + added, form_count)), {run_key: added}


def with_default_samples(plan: SearchPlan, state: Experiment) -> SearchPlan:
    """Return `plan`; if the default number of samples applies and is not ten, set the number, so that it is journaled.

    A journal without a number of samples stands for ten samples, for any space. An experiment begun with ten keeps ten.
    """
    if plan.num_samples is not None or plan.samples_per_run is not None or not _uses_default_count(plan.search):
        return plan
    default, settings = get_default_num_samples(plan.space or {}), state.settings
    if default == DEFAULT_NUM_SAMPLES:
        return plan
    before = settings.get("num_samples", DEFAULT_NUM_SAMPLES) if _uses_default_count(settings.get("search")) else None
    return plan.with_changes(num_samples=DEFAULT_NUM_SAMPLES if settings and before == DEFAULT_NUM_SAMPLES else default)


def _uses_default_count(search: object) -> bool:
    match search:
        case None | "RandomSearch":
            return True
        case RandomSearch(num_samples=samples) | {"RandomSearch": {"num_samples": samples}}:
            return samples is None
        case {"RandomSearch": {}}:
            return True
        case _:
            return False


def _count_earlier_samples(plan: SearchPlan, state: Experiment) -> int:
    """Return the total number of samples that earlier runs requested."""
    if not state.settings:
        return 0
    search = state.settings.get("search", plan.search if "search" in list_unstored_options(state.settings) else None)
    count = _get_stored_sample_count(state.settings.get("num_samples"), search)
    if not isinstance(count, int) or count == UNLIMITED:
        raise InvalidInput(
            f"samples_per_run: experiment {state.name!r} has no fixed number of samples to add to; "
            "omit samples_per_run, or choose another experiment name"
        )
    return count


def _get_stored_sample_count(num_samples: Any, search: Any) -> object:
    """Return the total number of samples that stored settings require; None if the settings do not determine it."""
    if num_samples is not None:
        return num_samples
    return DEFAULT_NUM_SAMPLES if _uses_default_count(search) else getattr(parse_search(search), "num_samples", None)


# Warn of parameters that are probably not intended.


def warn_of_errored_trials(state: Experiment, plan: SearchPlan, log: Log) -> None:
    """Log how many errored trials are not retried; log nothing if the run has no other trials, as it then fails."""
    count = sum(trial.status is Status.ERRORED for trial in state.trials.values())
    adds_trials = plan.trial_count is None or plan.trial_count > len(state.trials)
    if count and not plan.effective_rerun_errored and (count < len(state.trials) or adds_trials):
        log.warning(
            "%s not retried: to retry with the code as it is now, pass rerun_errored=True (--rerun-errored); %s",
            pluralize(count, "trial that errored in an earlier run is", "trials that errored in an earlier run are"),
            RETRY_KEEPS_CONFIGURATION,
        )


def warn_of_too_few_samples(state: Experiment, plan: SearchPlan, log: Log) -> None:
    """Log a warning if the experiment has more trials than `num_samples` requires."""
    requested_count, trial_count = plan.trial_count, len(state.trials)
    if plan.num_samples is not None and requested_count is not None and requested_count < trial_count:
        log.warning(
            "num_samples=%d has no effect: it is the total (%s), and the experiment already has %d. To add trials, "
            "raise num_samples, or pass samples_per_run",
            plan.num_samples,
            pluralize(requested_count, "trial", "trials"),
            trial_count,
        )


def warn_of_space_change(state: Experiment, plan: SearchPlan, log: Log) -> None:
    """Log a warning if existing trials were drawn from another space; say so if none will be drawn from the new one."""
    space_before, space_now = (
        None if "space" in list_unstored_options(settings) else canonical_json(settings.get("space", {}))
        for settings in (state.settings, plan.settings)
    )
    if not state.trials or space_before == space_now or space_before is None or space_now is None:
        return
    total_count, trial_count = plan.trial_count, len(state.trials)
    is_total_reached = total_count is not None and total_count <= trial_count
    advice = f", and the search proposes only {total_count} in total: raise num_samples to draw from the new space"
    log.warning(
        "the search space has changed; %s drawn from the old one%s",
        pluralize(trial_count, "earlier trial was", "earlier trials were"),
        advice if is_total_reached else "",
    )


def warn_of_unusual_stop_limits(stopper: Stopper, objective: Objective | None, log: Log) -> None:
    """Log a warning for each stop limit that is probably not intended.

    A limit on a minimized metric ends most trials at once. Ray Tune adds some metrics to each report; here, a limit on
    such a metric makes a trial fail if its trainable does not report the metric.
    """
    modes = dict(zip(objective.metrics, objective.modes, strict=True)) if objective else {}
    for name, limit in collect_metric_limits(stopper).items():
        if name in RAY_EQUIVALENTS:
            log.warning(
                "stop={'%s': %g} limits a metric of this name; a trial that does not report the metric fails. The "
                "equivalent of Ray Tune's %s is %s",
                name,
                limit,
                name,
                RAY_EQUIVALENTS[name],
            )
        if modes.get(name) == "min":
            log.warning(
                "stop={'%s': %g} ends a trial once %s >= %g, but the metric is minimized, so most trials end at their "
                "first step. To end a trial that is good enough: stop=lambda metrics: metrics['%s'] <= %g",
                *(name, limit) * 3,
            )


def warn_of_no_metric(plan: SearchPlan, log: Log) -> None:
    """Log a warning if a search of several trials has no metric, because such a search has no best trial."""
    if plan.objective is None and plan.trial_count != 1:
        log.warning(
            "no metric: trials are not compared, and results.best raises. Pass the name of a reported metric, such as "
            "metric='loss', or compare the trials later: results.best_trial('loss')"
        )


def warn_of_unusual_mode(plan: SearchPlan, log: Log) -> None:
    """Log a warning if the name of a metric suggests the other direction, such as an accuracy that is minimized.

    Only the default and a single `max` are checked, because an explicit `min`, or a list of modes, is intended.
    """
    objective, mode_option = plan.objective, plan.mode
    if objective is None or isinstance(mode_option, list) or mode_option == "min":
        return
    modes = dict(zip(objective.metrics, objective.modes, strict=True))
    usual_modes = {name: infer_mode(name) or mode for name, mode in modes.items()}
    unusual_names = [name for name in modes if usual_modes[name] != modes[name]]
    if unusual_names:
        is_max, names = mode_option == "max", " and ".join(unusual_names)
        suggested_mode: object = list(usual_modes.values()) if len(usual_modes) > 1 else usual_modes[unusual_names[0]]
        explicit_mode: object = [mode_option] * len(modes) if is_max else "min"
        log.warning(
            "%s: the name suggests that %s values are good, but the search prefers the %s ones (mode=%s). Did you mean "
            "mode=%r? If not, pass mode=%r to silence this warning",
            names,
            "small" if is_max else "large",
            "largest" if is_max else "smallest",
            "'max'" if is_max else "'min', the default",
            suggested_mode,
            explicit_mode,
        )


def warn_of_constant_space(plan: SearchPlan, log: Log) -> None:
    """Log a warning if the search has several trials but nothing to draw, so that all trials are equal.

    Does not warn if the search is a user's own or `Repeated`: it may propose values that the space does not have.
    """
    space = validate_space(plan.space or {})
    proposes_more = type(plan.effective_search).__name__ not in BUILT_IN_MODULES["search"]
    if plan.trial_count == 1 or any(find_domains(space)) or proposes_more:
        return
    count = "" if plan.trial_count is None else f"{plan.trial_count} "
    lists = [(name, value) for name, value in iter_leaves(space) if isinstance(value, list)]
    advice = "draw a value, such as pt.uniform(0, 1)"
    if lists:
        name, value = lists[0]
        advice = f"{name}={value!r} is one value; did you mean pt.choice({value!r}) or pt.grid_search({value!r})?"
    log.warning(
        "the space has no distribution, so all %strials train the same configuration. To train it once: "
        "num_samples=1. Otherwise: %s",
        count,
        advice,
    )


# Reject searches in which several processes write one journal, on a target that supports only one writer.


def find_external_task_runner() -> TaskRunner[Any] | None:
    """Return the flow's task runner; None outside of a flow, or if the runner is a thread pool of this process."""
    context = FlowRunContext.get()
    runner = context.task_runner if context is not None else None
    return None if isinstance(runner, ThreadPoolTaskRunner) else runner


def require_single_writer(uri: str, external: str = "") -> None:
    """Reject a flow in which two processes could write one journal at once; called before anything is written.

    Args:
        uri: the URI of the target, which has no atomic create-if-absent.
        external: what runs the trials in other processes; empty to check the flow's task runner.

    Raises:
        InvalidInput: `external` is not empty, or the flow's task runner uses other processes.
    """
    if not external and (runner := find_external_task_runner()) is not None:
        external = f"task runner: {type(runner).__name__}"
    if external:
        raise InvalidInput(
            f"{external}, at {uri}: an attempt that is presumed lost may still run in another process, and write while "
            "the next attempt writes. On a target without atomic create-if-absent (ONE RUNNER ONLY), the second writer "
            "overwrites the first. Nothing was started: use S3, GCS, Azure or a folder (prefect-tune blocks check "
            "TARGET), or trials='tasks' with a thread pool task runner"
        )


@dataclass(frozen=True)
class SearchLimits:
    """The limits of one run of an experiment."""

    plan: SearchPlan
    """The plan, with limits such as `fail_fast`."""
    max_concurrent_trials: int
    """The number of slots; `plan` has only an upper bound of this number."""
    end_reason: AnyReason | None = None
    """Why the run ends without training; None if it trains."""
    stays_finished: Callable[[Trial], bool] = lambda _: True
    """Returns whether a finished trial meets the present stop criterion; if False, the trial is requeued."""


# Make the specification of a plan's trials.


def make_trial_spec(plan: SearchPlan, stopper: Stopper) -> TrialSpec:
    """Return the specification of a search's trials, with a placeholder for the trial's key.

    Options that have the same name in `SearchPlan` and `TrialSpec` are copied.

    Raises:
        InvalidInput: a concurrency limit does not exist, or the trainable cannot be sent to a process.
    """
    limits, silence_seconds = tuple(plan.concurrency_limits or ()), plan.silence_timeout_seconds
    _require_concurrency_limits(limits)
    names = OPTIONS.keys() & {field.name for field in fields(TrialSpec)}
    trial_options: dict[str, Any] = {name: value for name in names if (value := getattr(plan, name)) is not None}
    trial_options |= {"trainable": serialize_for_trial(plan.trainable), "concurrency_limits": limits}
    return TrialSpec(
        **trial_options,
        trial=TrialKey(experiment=plan.experiment, generation=1, trial="any"),
        fingerprint=plan.fingerprint,
        stopper=serialize_for_trial(stopper),
        needs_history=stopper.needs_history,
        cadence=plan.checkpoint or Cadence(),
        grace_period=timedelta(seconds=plan.grace_period_seconds),
        silence_timeout=None if silence_seconds is None else timedelta(seconds=silence_seconds),
        tags=tuple(dict.fromkeys([*(plan.trial_tags or ()), *sorted(get_caller_tags())])),
        required_metrics=plan.objective.metrics if plan.objective and not plan.allow_missing_metric else (),
        proposed_by_search=True,
    )


def _require_concurrency_limits(names: Sequence[str]) -> None:
    """Require that the global concurrency limits exist in Prefect, because a missing limit would limit nothing."""
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


def make_single_trial_spec(plan: SearchPlan, trial: str) -> tuple[TrialSpec, Stopper]:
    """Return the specification and the stopper of a single trial, whose attempts write the experiment's journal.

    Raises:
        InvalidInput: the stopper is for a search of many trials; or `make_trial_spec` or `require_valid_sync` raises.
    """
    stopper = plan.stopper
    if wrong := extract_experiment_stoppers(stopper):
        raise InvalidInput(f"stop: {wrong[0]} is for a search of many trials: use MaxSteps, MaxTime or Plateau")
    spec = make_trial_spec(plan, stopper)
    spec = replace(spec, trial=spec.trial.journal_key.trial_key(trial), proposed_by_search=False)
    require_valid_sync(spec)
    return spec, stopper


def require_valid_sync(spec: TrialSpec) -> None:
    """Require valid sync settings in a specification, before anything is written.

    Raises:
        InvalidInput: the syncer or the upload target is invalid.
    """
    TrialArtifacts(spec, Path(), get_run_logger())
