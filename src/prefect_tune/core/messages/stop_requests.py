"""Stop requests from other processes to a running experiment: numbered objects on the target.

The owner reads the number after the last one in its journal, so that a poll costs one read. It journals the write
id of a request before it acts on it, and deletes the object after that. The requesting process finds that id in the
journal. If the journal holds another id for its number, its request is lost: the number of a deleted request can be
taken again, and the owner does not read that object.
"""

from __future__ import annotations

from typing import Literal

from prefect_tune.core.errors import AlreadyExists, JournalCorrupt, ObjectNotFound, UnknownVersion
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import ENDED
from prefect_tune.core.journal_events import StopAsked
from prefect_tune.core.models import TrialId
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import JournalKey, number_in
from prefect_tune.core.storage.object_store import ObjectStore, create_or_recognize

__all__ = ["StopRequest", "ask", "delete_journaled", "is_journaled", "is_lost", "read_request", "stop_event"]


class StopRequest(Document):
    """A request to save and end: one trial, for good; or the whole experiment, for its present owner."""

    format: Literal["prefect-tune/stop-request"] = "prefect-tune/stop-request"
    version: Literal[1] = 1
    write_id: str
    at: str
    reason: str
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
    path = experiment.request_path(number)
    try:
        return read_sealed(store, StopRequest, path, JournalCorrupt)
    except ObjectNotFound:
        return None
    except (JournalCorrupt, UnknownVersion) as error:
        return StopRequest(write_id=f"unreadable-{number}", at="", reason=str(error), term=0, unreadable=True)


def stop_event(experiment: Experiment, request: StopRequest) -> StopAsked:
    """Return the journal's event for a request: what is stopped, or why it is refused."""
    refused = _why_refused(experiment, request)
    trial = None if refused else request.trial
    return StopAsked(trial=trial, reason=request.reason, request=request.write_id, refused=refused)


def _why_refused(experiment: Experiment, request: StopRequest) -> str:
    if request.unreadable:
        return "it cannot be read"
    if request.write_id in experiment.stop_requests:
        return "it was journaled before"
    if request.trial is None:
        old = request.term != experiment.term
        return f"it was for owner {request.term}, and owner {experiment.term} has taken over" if old else ""
    if request.trial not in experiment.trials:
        return f"there is no trial {request.trial!r}"
    trial = experiment.trial(request.trial)
    return f"trial {request.trial!r} is {trial.status} already" if trial.phase in ENDED else ""


def delete_journaled(store: ObjectStore, experiment: JournalKey, journaled_count: int) -> int:
    """Delete the first `journaled_count` requests, which the journal names; return the number of deleted objects."""
    folder = experiment.requests
    listed = [(number_in(folder, each.path), each.path) for each in store.list(folder)]
    paths = [path for number, path in listed if number is not None and number <= journaled_count]
    if paths:
        store.delete(paths)
    return len(paths)
