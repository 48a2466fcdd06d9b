"""What the journal of an experiment and what is asked for today have to agree on."""

from __future__ import annotations

from collections.abc import Mapping

from prefect_tune.core.errors import InvalidInput, ResumeFailed
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.trial import Status
from prefect_tune.core.values import canonical_json, plural
from prefect_tune.flows.asked import Asked, only_in_code, settings_of, space_of
from prefect_tune.flows.extending import search_of
from prefect_tune.flows.limits import Limits
from prefect_tune.flows.request import name_of
from prefect_tune.flows.source_code import code_of
from prefect_tune.tasks.trial_channel import Log

__all__ = [
    "code_note",
    "require_code",
    "require_goes_on",
    "require_same",
    "say_code",
    "say_errored",
    "say_space",
    "settings_today",
]

_FIXED = {
    "metric": "what was decided by one metric is not true of another",
    "mode": "what was good would be bad",
    "seed": "the search would not propose what it proposed",
}


def settings_today(asked: Asked) -> Mapping[str, object]:
    """Return what the journal keeps of what is asked for, and the digest of the trainable's source."""
    code = code_of(asked.trainable)
    return {**settings_of(asked), **({"code": code} if code else {})}


def require_code(state: Experiment, asked: Asked) -> None:
    """Where a changed trainable is to be refused, find out before anybody else is disturbed.

    Raises:
        InvalidInput: it has changed.
    """
    if changed := _changed(state, asked):
        raise InvalidInput(
            f"{changed}, and on_code_change='refuse': give another experiment name, fork it, or take 'warn'"
        )


def require_same(state: Experiment, settings: Mapping[str, object]) -> None:
    """What the journal says must mean today what it meant when it was written.

    Raises:
        InvalidInput: it does not.
        ResumeFailed: the experiment is a fork that was cut short.
    """
    require_goes_on(state)
    if not all(trial.apart for trial in state.trials.values()):
        raise InvalidInput(
            f"experiment {state.name!r} is one training, and no search: go on with it by pt.durable_trainable(...), "
            "or take another name"
        )
    for name, why in _FIXED.items():
        before, now = state.settings.get(name, "the default"), settings.get(name, "the default")
        if state.trials and before != now:
            raise InvalidInput(
                f"{name}: experiment {state.name!r} was begun with {before!r}, and is asked "
                f"to go on with {now!r}: {why}. Give the same, or another experiment name"
            )


def require_goes_on(state: Experiment) -> None:
    """Whatever it is, it must be all there, and to stay.

    Raises:
        ResumeFailed: it is a fork that was cut short, or is being deleted.
    """
    if state.is_removed:
        raise ResumeFailed(f"experiment {state.name!r} is being deleted: finish that, or take another name")
    if not state.is_whole:
        raise ResumeFailed(
            f"{state.name!r} is to be a fork of {state.origin}, which was cut short: fork it again under the same name"
        )


def say_code(state: Experiment, asked: Asked, log: Log) -> None:
    """Say what of the code has changed since the experiment last ran."""
    if changed := _changed(state, asked):
        log.warning(
            "%s: what is trained from now on is the new one's, what was reported before is the old one's", changed
        )


def say_errored(state: Experiment, limits: Limits, log: Log) -> None:
    """Say how many trials errored that this run leaves as they are: it may train nothing at all."""
    count = sum(each.status is Status.ERRORED for each in state.trials.values())
    if count and not limits.reruns_errored:
        log.warning(
            "%s not tried again: pass rerun_errored=True (prefect-tune resume … --rerun-errored)",
            plural(count, "trial that errored in an earlier run is", "trials that errored in an earlier run are"),
        )


def say_space(state: Experiment, asked: Asked, log: Log) -> None:
    """Say so where the trials there are were drawn from another space, and whether any will be from this one."""
    if not state.trials or _space_in(state.settings) in (None, today := _space_in(settings_of(asked))) or today is None:
        return
    there_will_be, there_are = search_of(asked).trial_count(space_of(asked.space or {})), len(state.trials)
    are_all = there_will_be is not None and there_will_be <= there_are
    log.warning(
        "the space is another one; %s of the old one%s",
        plural(there_are, "earlier trial is", "earlier trials are"),
        f", and there are to be {there_will_be} in all: raise num_samples to draw from it" if are_all else "",
    )


def _space_in(settings: Mapping[str, object]) -> bytes | None:
    """What tells it from another one; None where the journal cannot hold it."""
    return None if "space" in only_in_code(settings) else canonical_json(settings.get("space", {}))


def code_note(state: Experiment, asked: Asked) -> str:
    """Say for a form whether the code is what it was when the experiment last ran."""
    code = code_of(asked.trainable)
    if not code:
        return "code: its source cannot be had, so that nobody can say whether it has changed"
    return f"⚠️ {changed}" if (changed := _changed(state, asked)) else f"code: unchanged ({code})"


def _changed(state: Experiment, asked: Asked) -> str | None:
    before, now = state.settings.get("code"), code_of(asked.trainable)
    if not (state.trials and before and now and before != now):
        return None
    was, name = _trained_last(state), name_of(asked.trainable).get("trainable")
    if was and name and was != name:
        return (
            f"the trainable is another one than when experiment {state.name!r} last ran "
            f"({was} {before} -> {name} {now})"
        )
    return f"the source of the trainable has changed since experiment {state.name!r} last ran ({before} -> {now})"


def _trained_last(state: Experiment) -> str | None:
    """The name of the trainable; the journal holds all of it where it was given as text."""
    given = state.settings.get("trainable")
    *_, last = state.trials.values()
    return (name_of(given) if isinstance(given, str) else last.fingerprint).get("trainable")
