"""The choices of a person who resumes a suspended run, their validation, and their effect on the run's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from pydantic import Field, ValidationError

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.values import Value, argument_error

Way: TypeAlias = Literal["continue", "extend", "other checkpoint", "stop here"]


class ResumeChoice(Value):
    """The chosen way to resume. A number of 0 leaves that limit unchanged."""

    way: Way = "continue"
    samples: int = Field(default=0, ge=0)
    """The new total of samples."""
    steps: int = Field(default=0, ge=0)
    """The new total of steps of each trial."""
    hours: float = Field(default=0, ge=0, le=1e6, allow_inf_nan=False)
    """For a search: hours until this run saves and ends. For a single training: its total training hours."""
    checkpoint: int = Field(default=0, ge=0)
    """The step of the checkpoint to resume from."""


class ResumeLimits(Value):
    """The present limits and checkpoints of a suspended run; 0 where there is no such limit."""

    samples: int = 0
    stop_trials: int = 0
    """The trials after which the stop criterion proposes no more."""
    steps: int = 0
    hours: float = 0
    checkpoints: tuple[int, ...] = ()
    """The steps of the checkpoints that a training can go back to."""
    stop_is_code: bool = False
    """Whether its stop criterion is a function or a stopper class of the user, which no number can change."""
    scheduler_steps: int = 0
    """The step at which the scheduler ends every trial."""


_NUMBERS = {"samples", "steps", "hours"}


def choice_of(answer: Mapping[str, object], limits: ResumeLimits) -> ResumeChoice:
    """Return the choice that a form's `answer` makes.

    Raises:
        InvalidInput: the choice is impossible, or does not use a number that was typed. The message is shown to the
            person who answered.
    """
    try:
        choice = ResumeChoice.model_validate(answer)
    except ValidationError as invalid:
        raise argument_error(invalid) from invalid
    asked, present = choice.model_dump(include=_NUMBERS), limits.model_dump(include=_NUMBERS)
    changed = [name for name, value in asked.items() if value not in {0, present[name]}]
    if changed and choice.way != "extend":
        numbers = ", ".join(f"{name} {asked[name]:g} (it has {present[name]:g})" for name in changed)
        raise InvalidInput(f"{choice.way}: changes no numbers, and the form has {numbers}; choose extend to use them")
    newest = max(limits.checkpoints, default=0)
    if choice.way != "other checkpoint" and choice.checkpoint not in {0, newest}:
        raise InvalidInput(
            f"{choice.way}: uses the newest checkpoint, of step {newest}, and the form has step {choice.checkpoint}; "
            "choose other checkpoint to go back to it"
        )
    if choice.way == "extend":
        _require_more(choice, limits, asked, present)
    if choice.way == "other checkpoint" and choice.checkpoint not in limits.checkpoints:
        steps = ", ".join(map(str, limits.checkpoints)) or "none"
        raise InvalidInput(f"checkpoint: expected the step of a checkpoint ({steps}), found {choice.checkpoint}")
    return choice


def _require_more(
    choice: ResumeChoice, limits: ResumeLimits, asked: Mapping[str, float], present: Mapping[str, float]
) -> None:
    if less := [name for name, value in asked.items() if 0 < value < present[name]]:
        numbers = ", ".join(f"{name} {asked[name]:g} (it has {present[name]:g})" for name in less)
        raise InvalidInput(f"extend: less than before: {numbers}")
    if not any(value > present[name] for name, value in asked.items()):
        raise InvalidInput("extend: nothing is larger than before; give more samples, steps or hours, or continue")
    if choice.samples and not limits.samples:
        raise InvalidInput("samples: the search of this run has no number of samples that a form can change")
    if 0 < limits.stop_trials < choice.samples:
        raise InvalidInput(
            f"samples: the stop criterion TrialBudget ends the search after {limits.stop_trials} trials, and the form "
            f"has {choice.samples}; a run of the deployment resume can pass another stop"
        )
    if limits.stop_is_code and choice.steps:
        raise InvalidInput("steps: the stop criterion of this run is code, which a number cannot change")
    if limits.scheduler_steps and choice.steps > max(limits.scheduler_steps, limits.steps):
        raise InvalidInput(
            f"steps: the scheduler ends each trial at step {limits.scheduler_steps}, and the form has {choice.steps}; "
            "a run of the deployment resume can pass a scheduler with a larger max_t"
        )


def stop_extended(stop: object, steps: int, hours: float) -> Sequence[object]:
    """Return a stop criterion in its JSON form, with these limits in place of its own; 0 keeps a limit."""
    limits: list[object] = [{"step": steps}] if steps else []
    limits += [{"MaxTime": {"time_seconds": 3600 * hours}}] if hours else []
    replaced = {*(("step", "MaxSteps") if steps else ()), *(("MaxTime",) if hours else ())}
    parts = stop if isinstance(stop, list | tuple) else [stop]
    rest = (
        {name: limit for name, limit in part.items() if name not in replaced} if isinstance(part, Mapping) else part
        for part in parts
    )
    return [*(part for part in rest if part), *limits]
