"""Ask whoever runs an experiment to stop it, or one of its trials, from anywhere that reaches the target."""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal, TypeVar

from prefect_tune.blocks import StorageTarget, resolve_existing
from prefect_tune.core.answers import UNASKED, answer
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.journal import load
from prefect_tune.core.layout import JournalKey, TrialKey
from prefect_tune.core.published import results_path
from prefect_tune.core.requests import StopRequest, ask, is_heard, is_lost
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.trial import ENDED, Status
from prefect_tune.core.wire import Leave, StopAndSave
from prefect_tune.stores.staging import side_by_side
from prefect_tune.tasks.stamp import new_stamp
from prefect_tune.tasks.transient import retrying

__all__ = ["StopOutcome", "stop"]

_TIMEOUT = timedelta(minutes=2)
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StopOutcome:
    """What became of a request to stop."""

    status: Literal["stopped", "had-ended", "stopping", "refused", "unanswered"]
    """`stopping`: it was heard, and does not have an end yet; `unanswered`: nobody has heard it."""
    message: str
    """For a person."""
    experiment: Experiment
    """As it stood then."""


def stop(
    experiment: str,
    *,
    target: StorageTarget | str,
    trial: str | None = None,
    reason: str = "",
    wait_seconds: float = 60,
) -> StopOutcome:
    """Have a running search, or one trial of it, save and end; wait until it has.

    A stopped trial is finished: it saves a checkpoint, and no larger budget makes it go on. A stopped experiment
    is resumable: every trial saves, and `pt.tune` or `pt.resume` goes on. Whoever runs the experiment looks every
    few seconds, and journals what is asked before acting on it.

    Where nobody runs it, a trial is finished when the experiment is opened next, before anything is begun; a stop
    of the whole experiment concerns nobody then: it is never an order to a run that begins later.

    Args:
        experiment: its name on the target.
        target: where it lives: a block, a `"block-type/name"` slug, or a URI.
        trial: only this one.
        reason: why, for the journal and whoever reads it.
        wait_seconds: how long to wait for an answer, and for the end; 0 to ask only.

    Raises:
        InvalidInput: there is no such search or trial; nothing was asked.
        StoreUnavailable: the target cannot be had.
    """
    asking = _Asking(resolve_existing(target), experiment, trial, _said(reason))
    return asking.until_answered(wait_seconds)


def _said(reason: str) -> str:
    who = socket.gethostname()
    with suppress(OSError, KeyError):  # a container's user may have no name
        who = f"{getpass.getuser()}@{who}"
    return f"stopped by {who}: {reason}" if reason else f"stopped by {who}"


def _answer(trial: TrialKey, attempt: int, said: Leave | StopAndSave, store: ObjectStore) -> None:
    answer(store, trial, attempt, UNASKED, said)


class _Asking:
    """One wish, asked under another number where somebody else's request was heard in place of it."""

    def __init__(self, target: StorageTarget, experiment: str, trial: str | None, reason: str) -> None:
        self._target = target
        self._name = experiment
        self._trial = trial
        self._reason = reason
        self._told: set[str] = set()

    def until_answered(self, wait_seconds: float) -> StopOutcome:
        state = self._looked_at()
        if (ended := self._ended(state)) is not None:
            return StopOutcome("had-ended", ended, state)
        stamp = new_stamp()
        request = StopRequest(
            write_id=stamp.write_id, at=stamp.at, reason=self._reason, epoch=state.epoch, trial=self._trial
        )
        number, pause_seconds = self._asked(state, request), _FIRST_PAUSE_SECONDS
        began, until = time.monotonic(), time.monotonic() + wait_seconds
        while True:
            state = self._looked_at()
            if not is_heard(state, request) and time.monotonic() - began > wait_seconds / 4 > 0:
                self._tell_attempts(state)
            if is_lost(state, request, number):
                number = self._asked(state, request)
            outcome = self._outcome(state, request)
            if outcome.status not in ("stopping", "unanswered") or time.monotonic() + pause_seconds > until:
                return outcome
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _asked(self, state: Experiment, request: StopRequest) -> int:
        return self._on_store(lambda store: ask(store, state, request))

    def _tell_attempts(self, state: Experiment) -> None:
        """Attempts on other machines may have outlived whoever ran the search: they look for answers of their own."""
        if state.settings.get("trials") != "deployment":
            return
        said = Leave(reason=self._reason, save=True, for_good=True) if self._trial else StopAndSave()
        for name in [self._trial] if self._trial else list(state.trials):
            key = TrialKey(experiment=self._name, trial=name)
            if name not in self._told and state.trial(name).status not in ENDED:
                own = self._loaded(JournalKey(experiment=self._name, trial=name)).trials.get(name)
                if own is not None and own.status is Status.RUNNING:
                    self._on_store(partial(_answer, key, own.attempt, said))
                    self._told.add(name)

    def _looked_at(self) -> Experiment:
        return self._checked(self._loaded(JournalKey(experiment=self._name)))

    def _loaded(self, journal: JournalKey) -> Experiment:
        def look(store: ObjectStore) -> Experiment:
            with side_by_side() as transfers:
                return load(store, journal, side_by_side=transfers)

        return self._on_store(look)

    def _on_store(self, act: Callable[[ObjectStore], _T]) -> _T:
        def acted() -> _T:
            with self._target.open(timeout=_TIMEOUT) as store:
                return act(store)

        return retrying(acted)

    def _checked(self, state: Experiment) -> Experiment:
        where = f"experiment {self._name!r} at {self._target.uri}"
        if not state.number:
            raise InvalidInput(f"there is no {where}")
        if not state.settings:
            raise InvalidInput(
                f"{where} is no search: cancel its flow run, or send it SIGTERM; it saves, and can be resumed"
            )
        if self._trial is not None and self._trial not in state.trials:
            raise InvalidInput(f"{where}: there is no trial {self._trial!r} among its {len(state.trials)}")
        return state

    def _ended(self, state: Experiment) -> str | None:
        """Say how the trial, or the whole search, has ended; None where it has not."""
        if self._trial is None:
            over = f"experiment {self._name!r} has ended: all of its {len(state.trials)} trials have"
            return over if self._is_over(state) else None
        if (trial := state.trial(self._trial)).status not in ENDED:
            return None
        return f"trial {self._trial} is {trial.status} at step {trial.step}: {trial.reason}"

    def _is_over(self, state: Experiment) -> bool:
        """Whether its last run has ended by itself: then its results are those after the journal's last entry.

        That no trial is open does not say it: the next one may be about to be proposed.
        """
        if any(each.status not in ENDED for each in state.trials.values()):
            return False
        path = results_path(self._name, "trials", state.number)
        return path in self._on_store(lambda store: {each.path for each in store.list(path.rpartition("/")[0])})

    def _outcome(self, state: Experiment, request: StopRequest) -> StopOutcome:
        if not is_heard(state, request):
            return self._unheard(state, request)
        if self._trial is not None:
            ended = self._ended(state)
            waiting = f"trial {self._trial} was told to stop, and is saving or finishing a step"
            return StopOutcome("stopped" if ended else "stopping", ended or waiting, state)
        running = sum(each.status is Status.RUNNING for each in state.trials.values())
        if running and state.epoch == request.epoch:
            return StopOutcome("stopping", f"{running} trials were told to stop, and are saving", state)
        if running:
            message = f"the run that was asked has ended, and another one has begun since, by {state.owner}"
            return StopOutcome("stopped", message, state)
        resumable = sum(each.status not in ENDED for each in state.trials.values())
        message = f"experiment {self._name!r} has ended; {resumable} of its {len(state.trials)} trials can be resumed"
        return StopOutcome("stopped", message, state)

    def _unheard(self, state: Experiment, request: StopRequest) -> StopOutcome:
        owner = f"nobody has answered, {state.owner} neither" if state.owner else "nobody has answered"
        if self._told:
            owner = f"{owner}, so that {len(self._told)} attempts were told where they run"
        if self._trial is not None:
            later = f"trial {self._trial} is finished as soon as the experiment is opened again"
            return StopOutcome("unanswered", f"{owner}: {later}", state)
        if state.epoch != request.epoch:
            return StopOutcome("refused", f"another run has begun meanwhile, by {state.owner}: ask again", state)
        later = "where nobody runs it, there is nothing to stop, and a run that begins later is not stopped by this"
        return StopOutcome("unanswered", f"{owner}: {later}", state)
