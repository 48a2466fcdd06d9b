"""What somebody outside asks of a running experiment: a numbered object on the target, heard through the journal.

The owner reads the number after the last one that its journal names, so that looking costs one request.
It journals the write id of what it has read before it acts, and deletes it after that. Whoever asked
finds that id in the journal; another one under the same number means that theirs was not heard: a
number that was deleted can be taken again, and what lies there is read by nobody.
"""

from __future__ import annotations

from typing import Literal

from prefect_tune.core.errors import AlreadyExists, JournalCorrupt, ObjectNotFound, UnknownVersion
from prefect_tune.core.events import StopAsked
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.layout import number_in, request_path, requests_folder
from prefect_tune.core.sealed import seal, unseal
from prefect_tune.core.settle import create_or_recognize
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.trial import ENDED
from prefect_tune.core.values import TrialId, Value

__all__ = ["StopRequest", "ask", "forget_heard", "is_heard", "is_lost", "read_request", "taken_note_of"]


class StopRequest(Value):
    """Save and end: one trial, for good; or all of the experiment, for the owner that has it now."""

    format: Literal["prefect-tune/stop-request"] = "prefect-tune/stop-request"
    version: Literal[1] = 1
    write_id: str
    at: str
    reason: str
    epoch: int
    """Whose owner is asked to end the experiment; a later one goes on. A trial is stopped whoever the owner is."""
    trial: TrialId | None = None
    """None for the whole experiment."""
    unreadable: bool = False
    """Whether this stands for an object that cannot be read; never on a target."""


def ask(store: ObjectStore, experiment: Experiment, request: StopRequest) -> int:
    """Leave `request` where the experiment's owner looks; return its number. Asked again, it is the same request.

    Args:
        experiment: as its journal tells it now.

    Raises:
        CommitUnknown: the target did not say whether it wrote.
    """
    number = len(experiment.heard) + 1
    while True:
        try:
            create_or_recognize(store, request_path(experiment.name, number), seal(request))
        except AlreadyExists:
            number += 1
        else:
            return number


def is_heard(experiment: Experiment, request: StopRequest) -> bool:
    """Return whether the experiment's owner has taken note of it."""
    return request.write_id in experiment.heard


def is_lost(experiment: Experiment, request: StopRequest, number: int) -> bool:
    """Return whether nobody will ever read it under this number, so that it has to be asked again."""
    return len(experiment.heard) >= number and not is_heard(experiment, request)


def read_request(store: ObjectStore, experiment: str, number: int) -> StopRequest | None:
    """Return request `number`; None where nobody has asked. One that cannot be read says so, and asks for nothing."""
    path = request_path(experiment, number)
    try:
        return unseal(StopRequest, store.read(path), path, JournalCorrupt)
    except ObjectNotFound:
        return None
    except (JournalCorrupt, UnknownVersion) as error:
        return StopRequest(write_id=f"unreadable-{number}", at="", reason=str(error), epoch=0, unreadable=True)


def taken_note_of(experiment: Experiment, request: StopRequest) -> StopAsked:
    """Return what the journal is told of a request: what is done, or why nothing is."""
    refused = _why_refused(experiment, request)
    trial = None if refused else request.trial
    return StopAsked(trial=trial, reason=request.reason, request=request.write_id, refused=refused)


def _why_refused(experiment: Experiment, request: StopRequest) -> str:
    if request.unreadable:
        return "it cannot be read"
    if request.write_id in experiment.heard:
        return "it was heard before"
    if request.trial is None:
        old = request.epoch != experiment.epoch
        return f"it was for the owner of epoch {request.epoch}, who is gone" if old else ""
    if request.trial not in experiment.trials:
        return f"there is no trial {request.trial!r}"
    status = experiment.trial(request.trial).status
    return f"trial {request.trial!r} is {status} already" if status in ENDED else ""


def forget_heard(store: ObjectStore, experiment: str, heard_count: int) -> int:
    """Delete the first `heard_count` requests, which the journal names; return how many were there."""
    folder = requests_folder(experiment)
    listed = [(number_in(folder, each.path), each.path) for each in store.list(folder)]
    heard = [path for number, path in listed if number is not None and number <= heard_count]
    if heard:
        store.delete(heard)
    return len(heard)
