"""What is declared with each option of `pt.tune`, beside its type and default in `SearchPlan`.

    name: Annotated[type, Option(stored, at_resume, fixed), Flag(flag, metavar, help, panel)] = default
                              │       │          │               └──► `prefect-tune run` and `resume`, and messages
                              │       └──────────┴──► what a resume may change
                              └──► the settings in the journal, and the check of what a journal may choose

The flows repeat name, type and default in their signatures, for checkers and forms: tests compare them.
The options themselves are in `search_plan.py`.
Nothing here imports Prefect: the help of a command reads these declarations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from prefect_tune.core.values import Value, argument_error


class Stored(Enum):
    """What the values of an option in a journal may choose."""

    DATA = "data"
    """No value names code, a file, a place or a command."""
    CHOICE = "choice"
    """A value may name one of these: `prefect_tune.trust` examines it before a resume uses it."""


class Panel(StrEnum):
    """The panels of the help of `prefect-tune run`, in their order."""

    SEARCH = "Options"
    FAILURES = "Checkpoints and failures"
    MORE = "More on the search"
    RESUME = "If EXPERIMENT exists"
    WHERE = "Where trials run"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the command line that sets an option of the search; unless it is given, the default stays."""

    metavar: str | None
    """None for a switch."""
    help: str
    panel: Panel | None = Panel.SEARCH
    """Its panel in the help of `run`; None if `run` does not have it."""
    kind: Any = None
    """The type of its values; None for a number with `at_least`, else that of the option, or text for a value."""
    at_least: int | None = None
    flag: str = ""
    """By default the option's name: `--keep-best` for `keep_best`."""
    resume_place: int | None = None
    """Its place in the help of `resume`; None if `resume` does not have it."""

    @property
    def name(self) -> str:
        """Its name among the parameters of a command: `keep_best` for `--keep-best`."""
        return self.flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option of a search, beside its flags."""

    stored: Stored | None = None
    """What its values in the journal may choose; None if it is of one run: the journal does not store it."""
    at_resume: bool = False
    """Whether `pt.resume` takes it."""
    fixed: str = ""
    """Why a resume may not change it; empty if it may."""


def options_of(plan: type[BaseModel]) -> Mapping[str, Option]:
    """Return what a class declares of each option, in the order of its fields."""
    return {name: each for name, field in plan.model_fields.items() for each in field.metadata if type(each) is Option}


def flags_of(plan: type[BaseModel]) -> Mapping[str, Sequence[Flag]]:
    """Return the flags of each option that a class declares, in the order of its fields."""
    return {
        name: [
            replace(each, flag=each.flag or f"--{name.replace('_', '-')}")
            for each in field.metadata
            if isinstance(each, Flag)
        ]
        for name, field in plan.model_fields.items()
    }


class ValidatedParameters(Value):
    """Parsed and validated parameters of a flow or task; the fields have the names and defaults of the parameters.

    Raises:
        InvalidInput: a parameter is invalid; the message names it.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def __init__(self, **parameters: Any) -> None:
        invalid: Exception | None = None
        try:
            super().__init__(**parameters)
        except ValidationError as error:
            invalid = argument_error(error)
        if invalid is not None:
            raise invalid  # outside of `except`: pydantic's error would print the values, which may be secret
