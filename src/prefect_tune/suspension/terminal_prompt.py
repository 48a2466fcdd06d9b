"""Ask a trial's question in the terminal of the script that started the search."""

from __future__ import annotations

from collections.abc import Mapping

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.journal_events.experiment_events import Questioned
from prefect_tune.core.journal_events.question_fields import Scalar, answer_to, default_of
from prefect_tune.core.texts import visible

_YES, _NO = frozenset({"y", "yes", "true", "1"}), frozenset({"n", "no", "false", "0"})


def asked_in_terminal(question: Questioned) -> Mapping[str, Scalar]:
    """Read the answer from the terminal, field by field; an empty line is the default."""
    asked = visible(question.question)
    print(f"\nTrial {question.trial} asks: {asked}", flush=True)  # noqa: T201 - a prompt
    return {name: _field(name, field) for name, field in question.fields.items()}


def _field(name: str, field: object) -> Scalar:
    choices = f" ({', '.join(field)})" if isinstance(field, list | tuple) else ""
    while True:
        typed = input(visible(f"  {name}{choices} [{default_of(field)}]: ")).strip()
        try:
            return answer_to({name: field}, {name: _read(typed, default_of(field))} if typed else {})[name]
        except (InvalidInput, ValueError) as bad:
            print(f"  {visible(str(bad))}", flush=True)  # noqa: T201 - a prompt


def _read(typed: str, default: Scalar) -> Scalar:
    if isinstance(default, bool):
        said = typed.lower()
        return said in _YES if said in _YES | _NO else typed
    return type(default)(typed) if isinstance(default, int | float) else typed
