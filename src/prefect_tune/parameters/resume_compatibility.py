"""Check today's plan of a resumed experiment against its journal: is it a search, the same metric, the same space."""

from __future__ import annotations

from collections.abc import Mapping

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import LocalTarget, StorageTarget
from prefect_tune.core.errors import InvalidInput, ResumeFailed
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import objective_in
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.shown_text import plural
from prefect_tune.core.values import canonical_json, metric_in
from prefect_tune.journal_access import no_experiment_at, read_known
from prefect_tune.parameters.argument_checks import name_of
from prefect_tune.parameters.search_plan import OPTIONS, Resuming, SearchPlan, only_in_code

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
    for name, why in {name: option.fixed for name, option in OPTIONS.items() if option.fixed}.items():
        before, now = _meaning(name, state.settings), _meaning(name, settings)
        if state.trials and before != now and (name == "seed" or _has_compared(state)):
            raise InvalidInput(
                f"{name}: experiment {state.name!r} was begun with {before!r}, and this run passes {now!r}: "
                f"{why}. Pass {before!r}, or choose another experiment name"
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
            *(plan.num_samples, plural(wanted, "trial", "trials"), there_are),
        )


def log_space(state: Experiment, plan: SearchPlan, log: Log) -> None:
    """Log a warning if existing trials were drawn from another space, and if no trial will be drawn from this one."""
    if not state.trials or _space_in(state.settings) in (None, today := _space_in(plan.settings)) or today is None:
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


def _space_in(settings: Mapping[str, object]) -> bytes | None:
    """Return the space in canonical JSON, for comparison; None if the journal cannot store the space."""
    return None if "space" in only_in_code(settings) else canonical_json(settings.get("space", {}))


# Whether the experiment exists or not, as the run requires.


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
    found = known
    if asked.presence == "must" and not found.number:
        raise ResumeFailed(f"nothing was started: {no_experiment_at(target, experiment)}")
    if asked.presence == "never" and found.number:
        raise InvalidInput(
            f"experiment {experiment!r} at {target.uri} exists already, with {len(found.trials)} trials, but "
            "resume='never' (or False) requires a new one: use another name; no experiment is ever overwritten"
        )
    return known
