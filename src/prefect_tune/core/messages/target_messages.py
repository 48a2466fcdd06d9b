"""Messages between processes that share nothing but the target: objects on it, which survive the processes.

- the nodes of an attempt find one another, and add parts to a checkpoint;
- a search replies to its trials on other machines;
- any process asks a running experiment to stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from prefect_tune.core.errors import AlreadyExists, JournalCorrupt, UnknownVersion
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import ENDED
from prefect_tune.core.journal_events import StopAsked
from prefect_tune.core.messages.process_messages import (
    Leave,
    Proceed,
    StopAndSave,
)
from prefect_tune.core.reasons import AnyReason, Reason, make_reason
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import JournalKey, NodesKey, TrialKey
from prefect_tune.core.storage.object_store import Listed, ObjectStore, create_or_recognize
from prefect_tune.core.values import TrialId


def node_objects_up_to(store: ObjectStore, trial: TrialKey, attempt: int) -> Sequence[Listed]:
    """Return what nodes of attempts up to `attempt` have written for one another; no process reads it afterwards."""
    return [
        listed
        for listed in store.list(trial.nodes)
        if (key := NodesKey.from_path(trial, listed.path)) is not None and key.attempt <= attempt
    ]


# Replies of the search to trials on other machines.

UNASKED = 0
"""The step number of a message that the trial did not ask for."""


class TrialReply(Document):
    """A reply as it is stored on the target."""

    format: Literal["prefect-tune/answer"] = "prefect-tune/answer"
    version: Literal[2] = 2
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
    reply = read_sealed(store, TrialReply, trial.answer_path(attempt, step), JournalCorrupt)
    return reply.answer if reply else None


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


# Stop requests from other processes to a running experiment: numbered objects on the target.
#
# The owner reads the number after the last one in its journal, so that a poll costs one read. It journals the write
# id of a request before it acts on it, and deletes the object after that. The requesting process finds that id in the
# journal. If the journal holds another id for its number, its request is lost: the number of a deleted request can be
# taken again, and the owner does not read that object.


class StopRequest(Document):
    """A request to save and end: one trial, for good; or the whole experiment, for its present owner."""

    format: Literal["prefect-tune/stop-request"] = "prefect-tune/stop-request"
    version: Literal[2] = 2
    write_id: str
    at: str
    reason: AnyReason
    term: int
    """The number of the owner that is asked to end the experiment; later owners continue it. Ignored for a trial."""
    trial: TrialId | None = None
    """None for the whole experiment."""
    unreadable: bool = False
    """Whether this stands for an object that cannot be read; never set on a target."""


def ask(store: ObjectStore, experiment: Experiment, request: StopRequest) -> int:
    """Write `request` for the experiment's owner, and return its number. Idempotent by its write id.

    Args:
        experiment: the present state of its journal.

    Raises:
        CommitUnknown: the target did not say whether it wrote.
    """
    number = len(experiment.stop_requests) + 1
    while True:
        try:
            create_or_recognize(store, experiment.key.request_path(number), seal(request))
        except AlreadyExists:
            number += 1
        else:
            return number


def is_journaled(experiment: Experiment, request: StopRequest) -> bool:
    """Return whether the experiment's owner has journaled the request."""
    return request.write_id in experiment.stop_requests


def is_lost(experiment: Experiment, request: StopRequest, number: int) -> bool:
    """Return whether no owner will read the request under this number, so that it has to be written again."""
    return len(experiment.stop_requests) >= number and not is_journaled(experiment, request)


def read_request(store: ObjectStore, experiment: JournalKey, number: int) -> StopRequest | None:
    """Return request `number`; None where there is none. An unreadable one has `unreadable` set, and is refused."""
    try:
        return read_sealed(store, StopRequest, experiment.request_path(number), JournalCorrupt)
    except (JournalCorrupt, UnknownVersion) as error:
        return StopRequest(
            write_id=f"unreadable-{number}",
            at="",
            reason=make_reason("stop-unreadable", error=str(error)),
            term=0,
            unreadable=True,
        )


def stop_event(experiment: Experiment, request: StopRequest) -> StopAsked:
    """Return the journal's event for a request: what is stopped, or why it is refused."""
    refused = _refusal_reason(experiment, request)
    trial = None if refused is not None else request.trial
    return StopAsked(trial=trial, reason=request.reason, request=request.write_id, refused=refused)


def _refusal_reason(experiment: Experiment, request: StopRequest) -> Reason | None:
    if request.unreadable:
        return make_reason("request-unreadable")
    if request.write_id in experiment.stop_requests:
        return make_reason("request-repeated")
    if request.trial is None:
        if request.term == experiment.term:
            return None
        return make_reason("request-outdated", owner=request.term, successor=experiment.term)
    if request.trial not in experiment.trials:
        return make_reason("request-without-trial", trial=request.trial)
    trial = experiment.trial(request.trial)
    if trial.phase not in ENDED:
        return None
    return make_reason("request-for-ended-trial", trial=request.trial, status=trial.status.value)
