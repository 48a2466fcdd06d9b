"""Replies of the search to trials on other machines: objects on the target, which survive both processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from prefect_tune.core.errors import AlreadyExists, JournalCorrupt, ObjectNotFound
from prefect_tune.core.messages.process_messages import Leave, Proceed, StopAndSave
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.storage.object_store import Listed, ObjectStore, create_or_recognize

__all__ = ["UNASKED", "TrialReply", "answer", "answers_up_to", "read_answer", "take_back"]

UNASKED = 0
"""The step number of a message that the trial did not ask for."""


class TrialReply(Document):
    """A reply as it is stored on the target."""

    format: Literal["prefect-tune/answer"] = "prefect-tune/answer"
    version: Literal[1] = 1
    answer: Annotated[Proceed | Leave | StopAndSave, Field(discriminator="type")]


def answer(store: ObjectStore, trial: TrialKey, attempt: int, step: int, said: Proceed | Leave | StopAndSave) -> None:
    """Reply to an attempt that asks at `step`. The first reply counts: it was journaled before it was written.

    A message to stop, at step `UNASKED`, may also come from an external process when no owner is left to journal it.
    """
    try:
        create_or_recognize(store, trial.answer_path(attempt, step), seal(TrialReply(answer=said)))
    except AlreadyExists:
        return  # an earlier owner has sent the reply that the journal holds


def read_answer(store: ObjectStore, trial: TrialKey, attempt: int, step: int) -> Proceed | Leave | StopAndSave | None:
    """Return the reply to the attempt at `step`; None while there is none.

    Raises:
        JournalCorrupt: the reply is damaged.
    """
    path = trial.answer_path(attempt, step)
    try:
        return read_sealed(store, TrialReply, path, JournalCorrupt).answer
    except ObjectNotFound:
        return None


def take_back(store: ObjectStore, trial: TrialKey, attempt: int) -> None:
    """Delete an earlier owner's unasked message, before an attempt is started or found running.

    The message was for the earlier owner's run only, or is in the experiment's journal and is sent again.
    """
    path = trial.answer_path(attempt, UNASKED)
    if store.size(path) is not None:
        store.delete([path])


def answers_up_to(store: ObjectStore, trial: TrialKey, attempt: int) -> Sequence[Listed]:
    """Return the replies to attempts of `trial` up to `attempt`; after the end of an attempt no process reads them."""
    return [each for each in store.list(trial.answers) if 0 < _attempt_of(trial, each.path) <= attempt]


def _attempt_of(trial: TrialKey, path: str) -> int:
    """Return the attempt that the reply at `path` is for; 0 for a foreign file."""
    attempt, _, step = path.removeprefix(f"{trial.answers}/").removesuffix(".json").partition("-")
    if not all(each.isascii() and each.isdecimal() for each in (attempt, step)):
        return 0
    return int(attempt) if trial.answer_path(int(attempt), int(step)) == path else 0
