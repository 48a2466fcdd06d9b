"""The link of a trial on another machine: it posts to its outbox, and the search stores answers on the target."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pydantic import TypeAdapter

from prefect_tune.attempt.processes.process_channel import TrialChannel
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.processes.process_pool import TrialProcessPool, worker_pool
from prefect_tune.attempt.search_link import Answer, AnsweringLink
from prefect_tune.attempt.trial_journal import Outbox, TrialJournal
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import StorageTarget, target_reference
from prefect_tune.core.errors import (
    InvalidInput,
    JournalCorrupt,
    StoreUnavailable,
    Superseded,
    TuneError,
    UnknownVersion,
)
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.messages.process_messages import Start, StopAndSave
from prefect_tune.core.messages.target_messages import UNASKED, read_answer
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import StepReport
from prefect_tune.journal_access import current_owner, experiment_id
from prefect_tune.runtime.trainable import Reuse

# The parameters of the flow `train_trial`: a trial's specification and the request for one attempt, as JSON.

_specs: TypeAdapter[TrialSpec] = TypeAdapter(TrialSpec)
_orders: TypeAdapter[AttemptRequest] = TypeAdapter(AttemptRequest)


_AS_TEXT = "json"


def spec_as_parameters(spec: TrialSpec) -> dict[str, Any]:
    """Return `spec` as a parameter, as `train_trial` takes it: without secrets, and valid in any process.

    Raises:
        InvalidInput: the trainable is not an import path, the target needs secrets, or trials are threads.
    """
    if ":" not in spec.trainable:
        raise InvalidInput(
            "trials='deployment': another machine has to import the trainable; pass it as 'package.module:Name'"
        )
    if spec.isolation != "process":
        raise InvalidInput("isolation='thread': trials that run as deployments run in processes")
    plain = _specs.dump_python(spec, mode="json", exclude={"target", "sync"})
    return {**plain, "target": target_reference(spec.target), "sync": spec.sync.parameters()}


def request_as_parameters(request: AttemptRequest) -> dict[str, Any]:
    """Return `request` as a parameter: one JSON text, which Prefect does not interpret.

    It holds configurations and answers from a target. In an object, Prefect would load blocks that it refers to
    (`$ref`), and render templates (`__prefect_kind`).
    """
    return {_AS_TEXT: _orders.dump_json(request).decode()}


def request_from(parameter: Mapping[str, Any]) -> AttemptRequest:
    """Return the request from `request_as_parameters`."""
    return _orders.validate_json(parameter[_AS_TEXT])


_REQUEST = timedelta(seconds=30)
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_UNASKED_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class PoolSharing:
    """Which attempts in one process of a worker share a pool of trial processes, and how."""

    search_term: int = 0
    """Of the run of the search that starts them."""
    reuse: Reuse = "never"
    """How that pool shares the import of the trainable's module."""


class StoreLink(AnsweringLink):
    """A link through the target. It can be pickled and sent to another machine until it is connected.

    The attempt posts a report that needs an answer at once; the owner of the experiment, which may have changed since
    the attempt was started, creates the answer as an object.
    """

    asks_by_report = True

    def __init__(
        self,
        target: StorageTarget,
        trial: TrialKey,
        attempt: int,
        sharing: PoolSharing = PoolSharing(),
    ) -> None:
        super().__init__()
        self._target = target
        self._trial = trial
        self._attempt = attempt
        self._sharing = sharing
        self.stop = threading.Event()
        self._asked: int | None = None
        self._asks = threading.Event()
        self._closed = threading.Event()
        self._was_answered = False
        self._warned = ""
        self._pool: TrialProcessPool | None = None
        self._watching: threading.Thread | None = None

    def __reduce__(self) -> tuple[type[StoreLink], tuple[object, ...]]:
        return StoreLink, (self._target, self._trial, self._attempt, self._sharing)

    def stopped_by(self, stop: threading.Event) -> StoreLink:
        """Let this event of the local process stop the trial too."""
        self.stop = stop
        return self

    def trained_in(self, pool: TrialProcessPool) -> StoreLink:
        """Train in a process of this pool, instead of the pool that attempts in this process share."""
        self._pool = pool
        return self

    @contextmanager
    def process(self, start: Start, log: Log, environment: Mapping[str, str]) -> Iterator[TrialChannel]:
        self.watch()  # a request to stop may arrive while the process waits for its import
        search = self._target.uri, self._trial.of_experiment, self._sharing.search_term
        own = nullcontext(self._pool) if self._pool is not None else worker_pool(search, self._sharing.reuse)
        with own as pool, pool.process(start, log, environment, self.stop) as channel:
            yield channel

    def connect(self, tell: Callable[[Answer], None]) -> None:
        super().connect(tell)
        self.watch()

    @property
    def supervisor(self) -> Owner:
        return current_owner()

    def open_journal(self, spec: TrialSpec, request: AttemptRequest) -> TrialJournal:
        """Return the outbox of the attempt, after checking that the experiment which requested it still exists.

        Raises:
            Superseded: there is no such experiment any more.
        """
        if request.experiment_id and experiment_id(self._target, spec.trial.of_experiment) != request.experiment_id:
            raise Superseded(
                f"experiment {spec.trial.experiment!r} at {self._target.uri} no longer exists: the one that requested "
                f"attempt {self._attempt} of trial {spec.trial.trial!r} was deleted. Nothing was trained or written"
            )
        return Outbox(self._target, spec.trial, request.trial)

    def ask(self, report: StepReport) -> None:
        self._asked = report.step
        self._asks.set()

    def close(self) -> None:
        """Stop polling for answers."""
        self._closed.set()
        self._asks.set()

    def watch(self) -> None:
        """Start the thread that polls the target for answers."""
        if self._watching is None:
            run = copy_context().run
            self._watching = threading.Thread(target=run, args=(self._watch,), name="answers", daemon=True)
            self._watching.start()

    def _watch(self) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while not self._closed.is_set():
            self._asks.wait(_UNASKED_SECONDS)
            if self._look():
                pause_seconds = _FIRST_PAUSE_SECONDS
            elif self._asked is not None:
                self._closed.wait(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _look(self) -> bool:
        """Return whether an answer was found and delivered. An unavailable or refusing target is polled again.

        An answer that is damaged or of an unknown version stops the trial: it saves and ends, and its next attempt
        has other answers.
        """
        try:
            with self._target.open(timeout=_REQUEST) as store:
                self._look_for_unasked(store)
                step = self._asked
                found = read_answer(store, self._trial, self._attempt, step) if step is not None else None
        except StoreUnavailable:
            return False
        except (JournalCorrupt, UnknownVersion) as unreadable:
            self._warn(unreadable)
            self.stop.set()
            return False
        except TuneError as error:  # such as expired credentials, which may be replaced while the trial runs
            self._warn(error)
            return False
        if found is None or isinstance(found, StopAndSave):
            return False
        self._asked = None
        self._asks.clear()
        self.answer(found)
        return True

    def _warn(self, error: TuneError) -> None:
        if (why := f"{type(error).__name__}: {error}") != self._warned:
            self._warned = why
            log = logging.getLogger("prefect_tune")
            log.warning("trial %s cannot read its answers on the target: %s", self._trial.trial, why)

    def _look_for_unasked(self, store: ObjectStore) -> None:
        if self.stop.is_set() or self._was_answered:
            return
        match read_answer(store, self._trial, self._attempt, UNASKED):
            case None:
                return
            case StopAndSave():
                self.stop.set()
            case answer:
                self._was_answered = True
                self.answer(answer)
