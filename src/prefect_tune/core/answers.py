"""What a trial elsewhere is told, by way of the target: the one channel between machines that outlives both ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from prefect_tune.core.errors import AlreadyExists, JournalCorrupt, ObjectNotFound
from prefect_tune.core.layout import TrialKey
from prefect_tune.core.sealed import seal, unseal
from prefect_tune.core.settle import create_or_recognize
from prefect_tune.core.store import Listed, ObjectStore
from prefect_tune.core.values import Value
from prefect_tune.core.wire import GoOn, Leave, StopAndSave

__all__ = ["UNASKED", "Answered", "answer", "answers_up_to", "read_answer", "take_back"]

UNASKED = 0
"""The step under which a trial is told what it did not ask for."""


class Answered(Value):
    """An answer as it lies on the target."""

    format: Literal["prefect-tune/answer"] = "prefect-tune/answer"
    version: Literal[1] = 1
    answer: Annotated[GoOn | Leave | StopAndSave, Field(discriminator="type")]


def answer(store: ObjectStore, trial: TrialKey, attempt: int, step: int, said: GoOn | Leave | StopAndSave) -> None:
    """Tell an attempt that asks at `step`. The first answer stands: it was journaled before it was given.

    Unasked it may also be told to stop by somebody outside, where nobody is left to journal that.
    """
    try:
        create_or_recognize(store, trial.answer_path(attempt, step), seal(Answered(answer=said)))
    except AlreadyExists:
        return  # an owner before us has told it what the journal says


def read_answer(store: ObjectStore, trial: TrialKey, attempt: int, step: int) -> GoOn | Leave | StopAndSave | None:
    """Return what the attempt is told at `step`; None as long as nobody has said.

    Raises:
        JournalCorrupt: it is damaged.
    """
    path = trial.answer_path(attempt, step)
    try:
        return unseal(Answered, store.read(path), path, JournalCorrupt).answer
    except ObjectNotFound:
        return None


def take_back(store: ObjectStore, trial: TrialKey, attempt: int) -> None:
    """Have an attempt that is begun, or found again, not be told what an earlier owner told it unasked.

    That was for the earlier one's run, or is in the experiment's journal, and is told again.
    """
    path = trial.answer_path(attempt, UNASKED)
    if store.size(path) is not None:
        store.delete([path])


def answers_up_to(store: ObjectStore, trial: TrialKey, attempt: int) -> Sequence[Listed]:
    """Return what was told to the attempts of `trial` up to `attempt`; where those are over, nobody reads it."""
    return [each for each in store.list(trial.answers) if 0 < _attempt_of(trial, each.path) <= attempt]


def _attempt_of(trial: TrialKey, path: str) -> int:
    """The attempt that was told; 0 for a foreign file."""
    attempt, _, step = path.removeprefix(f"{trial.answers}/").removesuffix(".json").partition("-")
    if not all(each.isascii() and each.isdecimal() for each in (attempt, step)):
        return 0
    return int(attempt) if trial.answer_path(int(attempt), int(step)) == path else 0
