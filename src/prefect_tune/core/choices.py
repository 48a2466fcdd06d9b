"""How a run that was suspended goes on: what a person may choose, and what that makes of what the run was asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias

from pydantic import Field, ValidationError

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.values import Value

__all__ = ["Choice", "Standing", "Way", "choice_of", "stop_extended"]

Way: TypeAlias = Literal["continue", "extend", "other checkpoint", "stop here"]


class Choice(Value):
    """What was chosen. A number of 0 says nothing: it stays as it is."""

    way: Way = "continue"
    samples: int = Field(default=0, ge=0)
    """In all."""
    steps: int = Field(default=0, ge=0)
    """Of each trial, in all."""
    hours: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Of a search: until this run saves and ends. Of a training: of training, in all."""
    checkpoint: int = Field(default=0, ge=0)
    """The step of the one to go on from."""


class Standing(Value):
    """What there is to choose from; 0 where there is no such limit."""

    samples: int = 0
    steps: int = 0
    hours: float = 0
    checkpoints: tuple[int, ...] = ()
    """The steps of those that a training can go back to."""
    stop_is_code: bool = False
    """Whether its stop criterion is a function, or one of the user's own: no number can change it."""


def choice_of(answer: Mapping[str, object], standing: Standing) -> Choice:
    """Return what a form was answered with.

    Raises:
        InvalidInput: it cannot be done. The message is for whoever has answered.
    """
    try:
        choice = Choice.model_validate(answer)
    except ValidationError as invalid:
        problem = invalid.errors(include_url=False)[0]
        raise InvalidInput(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from invalid
    match choice.way:
        case "extend":
            _require_more(choice, standing)
        case "other checkpoint":
            _require_there(choice, standing)
        case "continue" | "stop here":
            pass
    return choice


def _require_more(choice: Choice, standing: Standing) -> None:
    asked = {"samples": choice.samples, "steps": choice.steps, "hours": choice.hours}
    there = {"samples": standing.samples, "steps": standing.steps, "hours": standing.hours}
    if less := [name for name, value in asked.items() if 0 < value < there[name]]:
        said = ", ".join(f"{name} {asked[name]:g} (it has {there[name]:g})" for name in less)
        raise InvalidInput(f"extend: less than before: {said}")
    if not any(value > there[name] for name, value in asked.items()):
        raise InvalidInput("extend: nothing is larger than before; give more samples, steps or hours, or continue")
    if standing.stop_is_code and choice.steps:
        raise InvalidInput("steps: the stop criterion of this run is code, which a number cannot change")


def _require_there(choice: Choice, standing: Standing) -> None:
    if choice.checkpoint not in standing.checkpoints:
        there = ", ".join(map(str, standing.checkpoints)) or "none"
        raise InvalidInput(f"checkpoint: there is none of step {choice.checkpoint}; there are those of steps {there}")


def stop_extended(stop: object, steps: int, hours: float) -> Sequence[object]:
    """Return a stop criterion, as JSON says it, with these limits in place of its own; 0 leaves one as it is."""
    replaced = {"step", "MaxSteps"} if steps else set()
    if hours:
        replaced.add("MaxTime")
    parts = stop if isinstance(stop, list | tuple) else [stop]
    rest = [_without(replaced, each) for each in parts]
    limits: list[object] = [{"step": steps}] if steps else []
    if hours:
        limits.append({"MaxTime": {"time_seconds": 3600 * hours}})
    return [*(each for each in rest if each), *limits]


def _without(names: Collection[str], part: object) -> object:
    if not isinstance(part, Mapping):
        return part
    return {name: limit for name, limit in part.items() if name not in names}
