"""Messages between machines: objects on the target, which survive the processes, and TCP messages between nodes.

- A search answers its trials on other machines.
- Any process can ask a running experiment to stop.
- The owner of a search publishes its live status for readers.
- The nodes of an attempt find one another through the target, and communicate over TCP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from prefect_tune.core.errors import AlreadyExists, JournalCorrupt, UnknownVersion
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import ENDED_PHASES, Status, apply_report
from prefect_tune.core.journal_events import Owner, StopRequested
from prefect_tune.core.messages.process_messages import (
    CheckpointAndStop,
    CheckpointSaved,
    ContinueTraining,
    FromTrial,
    RankCommand,
    SaveFailed,
    Start,
    StopTrial,
)
from prefect_tune.core.reasons import AnyReason, ProcessEnd, Reason, make_reason
from prefect_tune.core.storage.documents import Document, read_newest_document, read_sealed, seal
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, NodesKey, TrialKey, delete_older_documents
from prefect_tune.core.storage.object_store import ListedObject, ObjectStore, create_idempotently
from prefect_tune.core.values import MAX_LIVE_PERIOD_SECONDS, Message, StepReport, TrialId, Value, canonical_json

# The answers of a search to trials on other machines.

UNSOLICITED_STEP = 0
"""The step number of an unsolicited answer: a message to a trial that does not wait for an answer."""
AnyAnswer: TypeAlias = ContinueTraining | StopTrial | CheckpointAndStop


class TrialAnswer(Document):
    """The document in which an answer is stored on the target."""

    format: Literal["prefect-tune/answer"] = "prefect-tune/answer"
    version: Literal[4] = 4
    answer: Annotated[AnyAnswer, Field(discriminator="type")]


def write_answer(store: ObjectStore, trial: TrialKey, attempt: int, step: int, answer: AnyAnswer) -> None:
    """Answer an attempt that waits at `step`. An existing answer stays, because it was journaled before it was written.

    If there is no owner to journal an answer, another process can write a stop as an answer at `UNSOLICITED_STEP`.
    """
    with suppress(AlreadyExists):  # an earlier owner has sent the journaled answer
        create_idempotently(store, trial.answer_path(attempt, step), seal(TrialAnswer(answer=answer)))


def read_answer(store: ObjectStore, trial: TrialKey, attempt: int, step: int) -> AnyAnswer | None:
    """Return the answer to the attempt at `step`; None if there is none yet. Raises JournalCorrupt if it is damaged."""
    document = read_sealed(store, TrialAnswer, trial.answer_path(attempt, step), JournalCorrupt)
    return document.answer if document else None


def delete_unsolicited_answer(store: ObjectStore, trial: TrialKey, attempt: int) -> None:
    """Delete an earlier owner's unsolicited answer. Call this before an attempt is started or taken over.

    This loses nothing: the answer was only for the earlier owner's run, or it is journaled and will be sent again.
    """
    path = trial.answer_path(attempt, UNSOLICITED_STEP)
    if store.size(path) is not None:
        store.delete([path])


def list_answers(store: ObjectStore, trial: TrialKey, last_attempt: int) -> Sequence[ListedObject]:
    """Return the answer objects of attempts up to `last_attempt`; no process reads the answers to an ended attempt."""
    return [
        listed for listed in store.list(trial.answers_folder) if 0 < _parse_attempt(trial, listed.path) <= last_attempt
    ]


def _parse_attempt(trial: TrialKey, path: str) -> int:
    """Return the number of the attempt to which the answer at `path` is addressed; 0 for a foreign file."""
    attempt, _, step = path.removeprefix(f"{trial.answers_folder}/").removesuffix(".json").partition("-")
    if not all(digits.isascii() and digits.isdecimal() for digits in (attempt, step)):
        return 0
    return int(attempt) if trial.answer_path(int(attempt), int(step)) == path else 0


# Stop requests from other processes to a running experiment: numbered objects on the target.
#
# The owner looks only for the request after the last journaled request, so that a poll costs one read. It journals the
# write id of a request, then acts on the request, and then deletes the object. The requesting process looks for its
# write id in the journal. If the journal has another id under the number of its request, an earlier request, deleted
# since, had the same number. The new request is then lost, because the owner reads no number twice.


class StopRequest(Document):
    """Asks one trial to save and end for good, or the present owner to save and end the whole experiment."""

    format: Literal["prefect-tune/stop-request"] = "prefect-tune/stop-request"
    version: Literal[2] = 2
    write_id: str
    at: str
    reason: AnyReason
    term: int
    """The term of the owner that is to save and end; a later owner refuses the request. Ignored if `trial` is set."""
    trial: TrialId | None = None
    """The trial to stop; None for the whole experiment."""
    unreadable: bool = False
    """Whether this request stands for an unreadable object; False in every object on the target."""


def write_stop_request(store: ObjectStore, experiment: Experiment, request: StopRequest) -> int:
    """Write `request` for the present owner of the experiment; return the number of the request.

    A repeated call with the same write id has no effect. Raises CommitUnknown if the request may or may not exist.
    """
    number = len(experiment.stop_requests) + 1
    while True:
        try:
            create_idempotently(store, experiment.key.request_path(number), seal(request))
        except AlreadyExists:
            number += 1
        else:
            return number


def is_request_journaled(experiment: Experiment, request: StopRequest) -> bool:
    """Return whether the experiment's owner has journaled the request."""
    return request.write_id in experiment.stop_requests


def is_request_lost(experiment: Experiment, request: StopRequest, number: int) -> bool:
    """Return whether another request was journaled under this number; if so, the request must be written again."""
    return len(experiment.stop_requests) >= number and not is_request_journaled(experiment, request)


def read_stop_request(store: ObjectStore, experiment: JournalKey, number: int) -> StopRequest | None:
    """Return request `number`, marked as `unreadable` if it is damaged; None if it does not exist."""
    try:
        return read_sealed(store, StopRequest, experiment.request_path(number), JournalCorrupt)
    except (JournalCorrupt, UnknownVersion) as error:
        reason = make_reason("stop-unreadable", error=str(error))
        return StopRequest(write_id=f"unreadable-{number}", at="", reason=reason, term=0, unreadable=True)


def make_stop_event(experiment: Experiment, request: StopRequest) -> StopRequested:
    """Return the journal event for a request; it says what to stop, or why the request is refused."""
    refused: Reason | None = None
    if request.unreadable:
        refused = make_reason("request-unreadable")
    elif is_request_journaled(experiment, request):
        refused = make_reason("request-repeated")
    elif request.trial is None:
        if request.term != experiment.term:
            refused = make_reason("request-outdated", owner=request.term, successor=experiment.term)
    elif (trial := experiment.trials.get(request.trial)) is None:
        refused = make_reason("request-without-trial", trial=request.trial)
    elif trial.phase in ENDED_PHASES:
        refused = make_reason("request-for-ended-trial", trial=trial.id, status=trial.status.value)
    trial_to_stop = None if refused is not None else request.trial
    return StopRequested(trial=trial_to_stop, reason=request.reason, request=request.write_id, refused=refused)


# The live status of a search: an object on the target that tells readers which trials the journal's owner runs.
#
# No decision depends on it. During the search, the owner writes the status not at each step, which would cost more, but
# every few seconds, as a new object; then it deletes the previous object. The path contains the owner's term, so that
# owners never write to one another's objects, and readers ignore the object of an earlier owner. The owner deletes its
# last object when its trials have ended. If the owner is killed, its last object stays until the next owner deletes it;
# the time in the object shows how old the status is.


class RunningAttempt(Value):
    """A running attempt of a trial, with its newest report, in the live status."""

    trial: TrialId
    attempt: int
    began_at: str | None = None
    """The wall-clock time at which the attempt began; None if an earlier owner started it."""
    host: str | None = None
    """The machine of the attempt's supervisor; None if an earlier owner started the attempt."""
    report: StepReport | None = None
    """The newest report; None before the attempt's first step."""
    reported_at: str | None = None


class LiveStatus(Document):
    """The running trials of one owner at one time."""

    format: Literal["prefect-tune/live-status"] = "prefect-tune/live-status"
    version: Literal[2] = 2
    term: int
    owner: Owner | None
    """The owner that wrote the status; in a deleted experiment of this name, another owner may have had this term."""
    number: int
    """The number of this status; each owner numbers its statuses from 1."""
    at: str
    run_at: str | None = None
    """The same moment as `at`, but by the run's clock, which is never adjusted; used only for the cost."""
    period_seconds: Annotated[float, Field(gt=0, le=MAX_LIVE_PERIOD_SECONDS)]
    """The time until the owner writes the next status."""
    trials: tuple[RunningAttempt, ...]


@dataclass(frozen=True, slots=True)
class ExperimentView:
    """An experiment for readers: its journaled state, with the newest reports of its running trials."""

    experiment: Experiment
    as_of: str
    """The time of the live status, or of the last journal entry if that is later; empty if unknown."""
    live: LiveStatus | None = None
    """The live status of the journal's present owner; None if no trial runs, or if it is missing or unreadable."""

    @property
    def cost_cutoff(self) -> str:
        """The time up to which the cost counts running attempts: by the run's clock if it is known, else `as_of`."""
        return (self.live.run_at if self.live is not None else None) or self.as_of

    def get_running_attempt(self, trial: str) -> RunningAttempt | None:
        """Return the running attempt of a trial; None if the trial does not run, or there is no live status."""
        return _list_running_attempts(self.live, self.experiment).get(trial)


def write_live_status(store: ObjectStore, key: JournalKey, status: LiveStatus) -> None:
    """Write `status`; then delete the owner's previous status, or, if this is its first, those of earlier owners.

    Raises:
        InvalidInput: a report holds a value that JSON cannot represent.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed. Do not retry, because another status follows.
    """
    path = key.live_status_path(status.term, status.number)
    store.put(path, seal(status))
    if status.number > 1:
        store.delete([key.live_status_path(status.term, status.number - 1)])
    else:
        delete_older_documents(store, before=path)


def delete_live_status(store: ObjectStore, key: JournalKey, term: int) -> None:
    """Delete the live statuses of the owner with term `term` and of earlier owners."""
    delete_older_documents(store, before=key.live_status_path(term + 1, 0))


def read_newest_live_status(store: ObjectStore, key: JournalKey) -> LiveStatus | None:
    """Return the newest live status, of any owner; None if it is missing or unreadable."""
    try:
        return read_newest_document(store, LiveStatus, key.live_folder, JournalCorrupt)
    except (JournalCorrupt, UnknownVersion):
        return None  # the caller then uses only the journal


def read_live_status(store: ObjectStore, experiment: Experiment) -> LiveStatus | None:
    """Return the live status of the experiment's present owner; None if it is missing or unreadable."""
    live = read_newest_live_status(store, experiment.key)
    return live if live and (live.term, live.owner) == (experiment.term, experiment.owner) else None


@dataclass(frozen=True, slots=True)
class LastKnownReports:
    """The last reports that an earlier owner's live status has for the trials that run according to the journal."""

    reports: Mapping[str, StepReport] = field(default_factory=dict)
    """The last report of each trial."""
    at: str | None = None
    """The time of the live status by the clock of its run; None without a live status."""


NO_LAST_REPORTS = LastKnownReports()


def _has_running_trial(experiment: Experiment) -> bool:
    return any(trial.status is Status.RUNNING for trial in experiment.trials.values())


def read_last_reports(store: ObjectStore, experiment: Experiment) -> LastKnownReports:
    """Return the last reports from an earlier owner's live status. This usually sends two requests if a trial runs."""
    live = read_newest_live_status(store, experiment.key) if _has_running_trial(experiment) else None
    attempts = _list_running_attempts(live, experiment)
    reports = {name: attempt.report for name, attempt in attempts.items() if attempt.report}
    return LastKnownReports(reports, (live.run_at or live.at) if live else None)


def read_view(store: ObjectStore, experiment: Experiment, written_at: str) -> ExperimentView:
    """Return a view of an experiment last written at `written_at`. This usually sends two requests if a trial runs."""
    live = read_live_status(store, experiment) if _has_running_trial(experiment) else None
    if live is None:
        return ExperimentView(experiment, written_at)
    trials = experiment.trials
    for name, attempt in _list_running_attempts(live, experiment).items():
        trials = trials.with_trial(apply_report(trials[name], attempt.report))
    return ExperimentView(experiment.model_copy(update={"trials": trials}), max(live.at, written_at), live)


def _list_running_attempts(live: LiveStatus | None, experiment: Experiment) -> Mapping[str, RunningAttempt]:
    """Return, by trial, those attempts of `live` that, according to the (possibly newer) journal, still run."""
    live_attempts = {attempt.trial: attempt for attempt in live.trials} if live is not None else {}
    pairs = ((attempt, experiment.trials.get(name)) for name, attempt in live_attempts.items())
    return {
        attempt.trial: attempt
        for attempt, trial in pairs
        if trial is not None and trial.status is Status.RUNNING and trial.attempt == attempt.attempt
    }


# Nodes of an attempt.
#
#     nodes/<attempt>/address.json    the address of node 0
#     each other node ◄══ TCP ══► node 0: each message is one JSON document, no pickle
#
# Both sides of a connection prove that they have the secret of their search, which is not on the target, and that they
# have read the same address. Therefore, write access to the target is not enough to direct ranks to another machine, or
# to impersonate a rank. No message contains or names code to run.


class NodeArrived(Value):
    """The first message of a node: the node is ready, and waits for `BeginAttempt`."""

    type: Literal["node-arrived"] = "node-arrived"
    node: int
    host: Message
    """The host name of the node, for display."""


class BeginAttempt(Value):
    """All nodes are ready, so the attempt begins."""

    type: Literal["begin-attempt"] = "begin-attempt"
    nodes: tuple[int, ...]
    """The participating nodes, node 0 first; their order determines the ranks."""
    address: str
    """The rendezvous address of the ranks, on node 0 (`MASTER_ADDR`)."""
    port: int
    term: int
    """The term of the journal's owner."""
    start: Start
    """The start message of the ranks, without the code, the folders and the rank; each node fills these in."""
    restored: CheckpointKey | None
    """The checkpoint from which the attempt begins."""


class ToRank(Value):
    """A message for one rank."""

    type: Literal["to-rank"] = "to-rank"
    rank: int
    message: Annotated[
        RankCommand | CheckpointSaved | SaveFailed | CheckpointAndStop | ContinueTraining | StopTrial,
        Field(discriminator="type"),
    ]


class FromRank(Value):
    """A message from one rank. If the message is a `CheckpointPart`, the part's directory stays on the rank's node."""

    type: Literal["from-rank"] = "from-rank"
    rank: int
    message: FromTrial


class RankExited(Value):
    """The process of a rank has ended; this is the last message from that rank."""

    type: Literal["rank-exited"] = "rank-exited"
    rank: int
    end: ProcessEnd


class SendPart(Value):
    """Requests the files of a step: each node that has files of the step adds its part to the checkpoint."""

    type: Literal["send-part"] = "send-part"
    key: CheckpointKey
    parent: CheckpointKey | None
    """The newest live checkpoint; a node does not send its bytes again."""
    collected_up_to: int
    """See `find_reusable_bytes` in `core/checkpoints/commit.py`."""


class NodeStopping(Value):
    """The node has received a stop request, for example from its infrastructure, so the attempt saves and ends."""

    type: Literal["node-stopping"] = "node-stopping"


class NodeAlive(Value):
    """The heartbeat of a node; the node sends it if it has sent no other message for a while."""

    type: Literal["node-alive"] = "node-alive"


class GroupEnded(Value):
    """The attempt has ended, so the node ends its processes."""

    type: Literal["group-ended"] = "group-ended"


_NodeMessage: TypeAlias = (
    NodeArrived | BeginAttempt | ToRank | FromRank | RankExited | SendPart | NodeStopping | NodeAlive | GroupEnded
)
NodeMessage: TypeAlias = Annotated[_NodeMessage, Field(discriminator="type")]
node_message_adapter: TypeAdapter[_NodeMessage] = TypeAdapter(NodeMessage)


class NodeAddress(Document):
    """The address at which node 0 of an attempt waits for the other nodes."""

    format: Literal["prefect-tune/node-address"] = "prefect-tune/node-address"
    version: Literal[1] = 1
    host: str
    port: int
    request: str
    """A digest of the secret; it identifies the request that started the attempt."""

    def connection_key(self, key: NodesKey, secret: str) -> bytes:
        """Return the key that both sides of a connection must have; it depends on the address."""
        return canonical_json([secret, key.folder, self.host, self.port])


def find_newest_address(store: ObjectStore, trial: TrialKey, at_least: int) -> tuple[NodesKey, NodeAddress] | None:
    """Return the newest attempt and its address; None if its number is below `at_least`, or its address unreadable."""
    keys = [NodesKey.from_path(trial, listed.path) for listed in store.list(trial.nodes_folder)]
    newest = max((key for key in keys if key is not None), key=lambda key: key.attempt, default=None)
    if newest is None or newest.attempt < at_least:
        return None
    with suppress(JournalCorrupt, UnknownVersion):
        if (address := read_sealed(store, NodeAddress, newest.address_path, JournalCorrupt)) is not None:
            return newest, address
    return None


def list_node_objects(store: ObjectStore, trial: TrialKey, last_attempt: int) -> Sequence[ListedObject]:
    """Return what the nodes of attempts up to `last_attempt` stored; no process needs the objects of ended attempts."""
    return [
        listed
        for listed in store.list(trial.nodes_folder)
        if (key := NodesKey.from_path(trial, listed.path)) is not None and key.attempt <= last_attempt
    ]
