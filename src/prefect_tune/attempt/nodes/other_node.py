"""A node other than the first of an attempt: it trains its ranks, and passes their messages on.

    node 0 ──► arrived ──► begin ──► restores the same checkpoint ──► processes ══ messages both ways ══► over
                                                  parts: sent when node 0 asks for them ──► the target

It writes no journal and commits nothing. It ends when node 0 says that the attempt is over, or the connection is lost;
its processes end with it. Never: a second process of one node; a part that node 0 has not asked for.
"""

from __future__ import annotations

import queue
import socket
import threading
from contextlib import AbstractContextManager, ExitStack, suppress
from contextvars import copy_context
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path

from prefect_tune.attempt.attempt_tasks import AttemptTasks
from prefect_tune.attempt.group_saves import merge, remove_directory
from prefect_tune.attempt.nodes.node_connection import SILENCE_TIMEOUT, NodeConnection
from prefect_tune.attempt.processes.process_channel import TrialChannel
from prefect_tune.attempt.processes.process_output import Log, rank_log
from prefect_tune.attempt.processes.rank_group import Placement, RankEnded, RankGroup, rank_group
from prefect_tune.attempt.search_link import SearchLink
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec, import_path
from prefect_tune.core.checkpoints.commit import refuse_part, reusable, send_part
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.trial_transitions import Phase
from prefect_tune.core.messages.node_messages import (
    Arrived,
    Begin,
    FromRank,
    GroupOver,
    NodeMessage,
    NodeStopping,
    RankGone,
    SendPart,
    ToRank,
    newest_address,
)
from prefect_tune.core.messages.process_messages import FromTrial, Part, Start, TrialEnded
from prefect_tune.core.reasons import ProcessEnd, Reason, make_reason
from prefect_tune.core.resources import processes_on
from prefect_tune.core.restore import manifest_if_readable
from prefect_tune.core.storage.layout import NodesKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.journal_access import read_experiment
from prefect_tune.storage_retries import on_target
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.scratch import ScratchDirectory
from prefect_tune.stores.local.staging import StagedFiles, transfer_pool

_TICK = timedelta(seconds=0.05)
_LOOK_SECONDS = 1.0
_FIRST_NODE_WITHIN = timedelta(minutes=15)
"""How long node 0 may take to begin after this node."""


def train_node(
    spec: TrialSpec, request: AttemptRequest, node: int, link: SearchLink, tasks: AttemptTasks, log: Log
) -> Reason:
    """Train the ranks of a node until the attempt is over; return why it is."""
    link.watch()
    joined = _connect(spec, request, link.stop)
    if isinstance(joined, Reason):
        return joined
    return _OtherNode(spec, request, *joined, node, link, tasks, log).run()


def _connect(spec: TrialSpec, request: AttemptRequest, stop: threading.Event) -> tuple[NodesKey, Connection] | Reason:
    """Connect to node 0 of the requested attempt, or of a later one; or return why there will be none."""
    until, reachable_until = Deadline.after(_FIRST_NODE_WITHIN), None
    at_least, looks = max(1, request.attempt), 0
    while until.remaining_seconds:
        found = on_target(spec.target, lambda store: newest_address(store, spec.trial, at_least))
        if found is not None:
            key, address = found
            with suppress(AuthenticationError, EOFError, OSError):
                return key, Client((address.host, address.port), authkey=address.connection_key(key, request.secret))
            reachable_until = reachable_until or Deadline.after(SILENCE_TIMEOUT)
            if not reachable_until.remaining_seconds:
                return make_reason("node-silent", node=0, seconds=SILENCE_TIMEOUT.total_seconds())
        if looks % 10 == 9 and _is_over(spec, request):
            return make_reason("node-not-needed")
        looks += 1
        if stop.wait(_LOOK_SECONDS):
            return make_reason("stopped-before-start")
    return make_reason("node-0-late", seconds=_FIRST_NODE_WITHIN.total_seconds())


def _is_over(spec: TrialSpec, request: AttemptRequest) -> bool:
    try:
        trial = read_experiment(spec.target, spec.trial.of_experiment).trials.get(spec.trial.trial)
    except TuneError:
        return False
    return trial is not None and (
        trial.attempt > request.attempt or (trial.attempt == request.attempt and trial.phase is not Phase.RUNNING)
    )


class _OtherNode:
    def __init__(
        self,
        spec: TrialSpec,
        request: AttemptRequest,
        key: NodesKey,
        connection: Connection,
        node: int,
        link: SearchLink,
        tasks: AttemptTasks,
        log: Log,
    ) -> None:
        self._spec, self._request, self._key, self._node = spec, request, key, node
        self._link, self._tasks, self._log = link, tasks, log
        self._connection = connection
        self._inbox: queue.SimpleQueue[NodeMessage | Reason] = queue.SimpleQueue()  # a reason: node 0 is lost
        self._over: Reason | None = None
        self._stop_was_asked = False
        self._first_rank = 0
        self._term = 0
        self._parts: dict[int, dict[int, Path]] = {}
        """The directories of each step, by rank."""
        self._merged: dict[int, Path] = {}
        self._sending = threading.Lock()

    def run(self) -> Reason:
        self._node_0 = NodeConnection(self._connection, 0, self._inbox.put, self._inbox.put)
        try:
            self._node_0.send(Arrived(node=self._node, host=socket.gethostname()))
            while self._over is None:
                match self._next(_TICK):
                    case Begin() as begin:
                        self._train(begin)
                    case GroupOver():
                        self._over = make_reason("node-not-needed")
                    case _:
                        self._pass_on_stop()
        finally:
            self._node_0.close()
        return self._over

    def _next(self, timeout: timedelta) -> NodeMessage | None:
        try:
            message = self._inbox.get(timeout=timeout.total_seconds())
        except queue.Empty:
            return None
        if not isinstance(message, Reason):
            return message
        self._over = message
        return None

    def _pass_on_stop(self) -> None:
        if self._link.stop.is_set() and not self._stop_was_asked:
            self._stop_was_asked = True
            self._node_0.send(NodeStopping())

    def _train(self, begin: Begin) -> None:
        place, processes = begin.nodes.index(self._node), processes_on(self._spec.processes_per_trial, 1)
        placement = Placement(processes, len(begin.nodes), place, (begin.address, begin.port))
        self._first_rank, self._term = placement.first_rank, begin.term
        ranks = range(self._first_rank, self._first_rank + processes)
        with ScratchDirectory("staging", "artifacts") as scratch, ExitStack() as opened:
            try:
                start = self._start_here(begin, scratch)
                group = opened.enter_context(rank_group(start, placement, self._process))
            except (TuneError, OSError) as error:
                self._over = make_reason("node-not-started", node=self._node, error=str(error))
                for rank in ranks:
                    self._node_0.send(RankGone(rank=rank, end=ProcessEnd(reason=self._over)))
                return
            self._serve(group)
            group.end_all()

    def _start_here(self, begin: Begin, scratch: Path) -> Start:
        restored = None
        if begin.restored is not None:
            restored = str(self._tasks.restore(begin.restored, scratch / "restored"))
        here = {  # the code is that of this node's own parameters: nothing on the target chooses it
            "trainable": self._spec.trainable,
            "stopper": self._spec.stopper,
            "import_path": import_path(),
            "directory": str(scratch / "artifacts"),
            "staging": str(scratch / "staging"),
            "temporary": str(scratch / "temporary"),
            "restored": restored,
        }
        return begin.start.model_copy(update=here)

    def _process(self, start: Start) -> AbstractContextManager[TrialChannel]:
        return self._link.process(start, rank_log(self._log, start.rank.rank), self._request.environment)

    def _serve(self, group: RankGroup) -> None:
        """Pass messages on, both ways, until the attempt is over."""
        while self._over is None:
            try:
                if (received := group.receive(_TICK)) is not None:
                    self._pass_on(group, *received)
            except RankEnded as ended:
                broken = ProcessEnd(reason=make_reason("invalid-use", text=str(ended)))
                end = group.end(ended.rank) if ended.is_gone else broken
                self._node_0.send(RankGone(rank=self._first_rank + ended.rank, end=end))
            self._pass_on_stop()
            while self._over is None and (message := self._next(timedelta(0))) is not None:
                match message:
                    case ToRank(rank=rank, message=told) if 0 <= rank - self._first_rank < group.world_size:
                        group.tell_rank(rank - self._first_rank, told)
                    case SendPart() as wanted:
                        # A daemon: the end of this node does not wait for a target that does not answer.
                        send = threading.Thread(target=copy_context().run, args=(self._send_part, wanted), daemon=True)
                        send.start()
                    case GroupOver():
                        self._over = make_reason("attempt-over")
                    case _:
                        pass

    def _pass_on(self, group: RankGroup, local_rank: int, message: FromTrial) -> None:
        rank = self._first_rank + local_rank
        if isinstance(message, Part) and message.directory is not None:
            self._parts.setdefault(message.step, {})[rank] = Path(message.directory)
            message = message.model_copy(update={"directory": None, "node": self._node})
        if isinstance(message, TrialEnded):
            group.leave(local_rank)
        self._node_0.send(FromRank(rank=rank, message=message))

    # ------------------------------------------------------------------------------------------------- parts

    def _send_part(self, wanted: SendPart) -> None:
        """Send the files of a step; without any of that step here, nothing is expected of this node."""
        step, of = wanted.key.step, (self._key, self._node, self._term)
        with self._sending:
            if step not in self._parts and step not in self._merged:
                return
            try:
                if step not in self._merged:
                    directories = self._parts.pop(step)
                    first, *others = sorted(directories)
                    merge(directories[first], {rank: directories[rank] for rank in others})
                    self._merged[step] = directories[first]
                directory, within = self._merged[step], timedelta(seconds=self._spec.sync.sync_timeout_seconds)
                on_target(self._spec.target, lambda store: _send(store, wanted, directory, of), within)
            except TuneError as error:
                if self._over:
                    return  # its files are being removed
                self._log.warning("the part of step %d was not sent: %s", step, error)
                reason = f"{type(error).__name__}: {error}"
                try:
                    on_target(self._spec.target, lambda store: refuse_part(store, wanted.key, of, reason))
                except TuneError as untold:  # node 0 waits until its deadline
                    self._log.warning("node 0 does not know that there is no part of step %d: %s", step, untold)
            for earlier in [merged for merged in self._merged if merged < step]:
                remove_directory(self._merged.pop(earlier))


def _send(store: ObjectStore, wanted: SendPart, directory: Path, of: tuple[NodesKey, int, int]) -> None:
    parent = manifest_if_readable(store, wanted.parent)
    with transfer_pool() as transfers:
        reuse = reusable(store, wanted.key.trial, parent, wanted.collected_up_to)
        send_part(store, wanted.key, StagedFiles(directory), of=of, reuse=reuse, side_by_side=transfers)
