"""Whether a trainable's source has changed since its experiment last trained, and what a resume does about that."""

from __future__ import annotations

from collections.abc import Mapping

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.parameters.checks.argument_checks import name_of
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.supervisor.processes.process_output import Log

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


def say_code(state: Experiment, plan: SearchPlan, effect: str, log: Log) -> None:
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
    was, name = _trained_last(state), plan.fingerprint.get("trainable")
    if was and name and was != name:
        return (
            f"the trainable has changed since experiment {state.name!r} last trained ({was} {before} -> {name} {now})"
        )
    return f"the source of the trainable has changed since experiment {state.name!r} last trained ({before} -> {now})"


def _trained_last(state: Experiment) -> str | None:
    """Return the trainable's name: of the journal's settings if it was passed as text, else of the last trial."""
    given = state.settings.get("trainable")
    *_, last = state.trials.values()
    return (name_of(given) if isinstance(given, str) else last.fingerprint).get("trainable")
