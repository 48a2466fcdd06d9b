"""Ownership of experiments by flow runs: only the owner writes the journal; each takeover begins a new term.

    a search, a training    one process takes over the journal, with the owner from `make_next_owner`; the attempts
                            write the journal through this process, or post to outboxes that this process reads
    a user's own flow       its tasks write the journal from any processes: `ensure_ownership` takes it over in the
                            first task, and `append_entry_after_newer` writes each entry after those of other tasks

No process watches a run. The next run takes over the journal without asking the present owner. The exception is a
scheduled run, which ends if `check_run_alive` in `prefect_api/flow_runs.py` finds, by state and heartbeats, that the
owner is alive. `has_process_ended` in `journal_access.py` decides whether the attempts of an earlier owner have
crashed. `terminal/formatting.py` decides what `show` calls *stale* and when `delete` is rejected.

The tasks of a user's own flow share no memory, so they read from the journal whether their flow run is the owner, was
the owner, or never was: each takeover's entry names the flow run and its run count. A superseded run stays superseded.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import chain, count
from typing import TypeVar
from uuid import UUID, uuid4

from httpx import HTTPError
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, PrefectException
from prefect.runtime import flow_run
from prefect.states import Cancelled

from prefect_tune.attempt.attempt import make_attempt_started
from prefect_tune.blocks import StorageTarget, TargetCheck
from prefect_tune.clock import new_write_stamp, utc_now
from prefect_tune.core.errors import CrashLoop, InvalidInput, SaveOvertaken, StoreRefused, StoreUnavailable, Superseded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import (
    ENDED_PHASES,
    Phase,
    Trial,
    can_commit_save,
    newest_checkpoint,
)
from prefect_tune.core.journal.journal import load_experiment, read_earlier_owners, read_entries
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    CheckpointCommitted,
    CheckpointRef,
    Event,
    Owner,
    TrialAdded,
    TrialRequeued,
    TrialResumed,
)
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.core.storage.generations import claim_experiment, read_claiming_call, reject_earlier_writer
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import WriteStamp, hash_bytes
from prefect_tune.journal_access import (
    EntryWriter,
    OwnershipRequest,
    acquire_and_adopt_with_retries,
    adopt_unjournaled_saves,
    append_entry,
    make_process_owner,
    read_experiment_raising_refusals,
    read_experiment_to_resume,
)
from prefect_tune.parameters.plan_checks import require_continuable, require_single_writer
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.call_paths import claim_call_key, current_call_path
from prefect_tune.prefect_api.flow_runs import check_run_alive, was_restarted_by_user
from prefect_tune.storage_retries import READ_TIMEOUT, get_run_log, with_retries, with_store

MAX_WRITE_RACES = 16
"""How many times a task tries to write while other writers are faster."""
_PROCESS_ID = uuid4().hex[:8]
"""Identifies the process of a script, which has no flow run."""
_write_locks: defaultdict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)
"""A lock for each target and experiment: without create-if-absent, one write of this process may overwrite another."""
_Result = TypeVar("_Result")


def check_target(target: StorageTarget) -> TargetCheck:
    """Test, by writing and reading, whether `target` can store checkpoints safely. Error messages have one line.

    Raises:
        StoreRefused: the target cannot store checkpoints safely, at least not with this configuration.
        StoreUnavailable: the target did not answer.
    """
    check = target.check(timeout=timedelta(seconds=30))
    if check.may_be_temporary:
        raise StoreUnavailable(check.message)
    if not check.ok:
        raise StoreRefused(check.message)
    if not check.conditional_create:
        get_run_log().warning("%s", check.message)
    return check


# Choose the experiment's name for a call that passes none.

_root_targets: dict[str, str] = {}
"""For each root run's id: the target of the first call without a name; that call's experiment is named by the id."""
_last_callers: dict[tuple[str, str], tuple[str, UUID | None, int]] = {}
"""For each target and experiment name: the `CallPath.caller` of the last call in this process that claimed the name."""


def with_experiment_name(plan: SearchPlan, config: object = None) -> SearchPlan:
    """Return `plan` with a name for its experiment, for a call that passes no name; a repeated call gets the same name.

    For each experiment of a root run, a document on the target records the call that claimed its name: the call's
    location, and a digest of what the call trains. The name for the first call is the root's id; for every other call,
    the id and a digest of `CallPath.prefix` and a number. So a retry may repeat only some calls, in any order.

    Raises:
        InvalidInput: a retry could not distinguish this call from a running call; or an earlier try left an unfinished
            experiment, which no call of this try has claimed, so this call may be the changed call that began it.
    """
    values = (plan.trainable, plan.space, plan.metric, plan.mode, plan.search, plan.scheduler, plan.seed, config)
    path, uri = current_call_path(values), plan.target.uri
    root = path.key.partition("/")[0]
    if not path.prefix:
        return plan.with_changes(experiment=root)
    claim_call_key(path.key)

    def find_name(store: ObjectStore) -> tuple[str, list[str]]:
        """Return the name that this call has claimed, or the first free name and the names claimed by earlier tries."""
        free_name, unclaimed_names = "", []
        for name in chain([root], (f"{root}-{hash_bytes(f'{path.prefix}:{n}'.encode())[:12]}" for n in count())):
            call = read_claiming_call(store, name)
            if call == path.key:
                return name, []
            is_root_of_other_target = name == root and _root_targets.setdefault(root, uri) != uri
            if not call and not free_name and not is_root_of_other_target:
                free_name = name
            if call is None and name != root:
                break
            if call and call.rpartition("-")[0] == path.prefix and was_called_by_earlier_try(name):
                unclaimed_names.append(name)
        return free_name, unclaimed_names

    def was_called_by_earlier_try(name: str) -> bool:
        execution, task, task_try = _last_callers.get((uri, name), ("", None, 0))
        return execution != path.caller[0] or (task == path.caller[1] and task_try != path.caller[2])

    with _write_locks[uri, root]:
        is_claimed = False
        while not is_claimed:
            name, unclaimed_names = with_store(plan.target, find_name)
            for other in unclaimed_names:
                trials = with_retries(partial(read_experiment_to_resume, plan.target, other)).trials.values()
                if any(trial.phase is not Phase.FINISHED for trial in trials):
                    raise InvalidInput(
                        f"experiment: an earlier try of this run began {other!r} by a call without a name, and the "
                        "experiment is not finished. This call differs in its trainable (or an object in it), "
                        "space, config, metric, mode, search, scheduler or seed. To continue the experiment with the "
                        f"changed call, pass experiment={other!r}; to train something else, pass another name"
                    )
            is_claimed = with_store(plan.target, partial(claim_experiment, experiment=name, call=path.key))
        _last_callers[uri, name] = path.caller
    return plan.with_changes(experiment=name)


# Make the owner for a search or a training; reject a run in a crash loop, and a scheduled run beside a live owner.


def make_next_owner(state: Experiment, max_restarts: int) -> Owner:
    """Return the owner with which this run takes over the experiment.

    Args:
        state: the experiment before the takeover.
        max_restarts: how many consecutive automatic restarts may end without progress.

    Raises:
        CrashLoop: this run was restarted automatically `max_restarts` times without progress.
        Abort: a schedule started this run, and the experiment's last run is alive or waits for the user. This run is
            set to Cancelled; the target is unchanged.
    """
    owner, previous_owner = make_process_owner(), state.owner
    if previous_owner is None or previous_owner.flow_run is None or owner.flow_run is None:
        return owner
    if previous_owner.flow_run != owner.flow_run:
        _cancel_if_owner_alive(state.name, previous_owner)
        return owner
    with suppress(PrefectException, HTTPError, OSError), get_client(sync_client=True) as client:
        if was_restarted_by_user(client.read_flow_run_states(UUID(owner.flow_run))):
            return owner.model_copy(update={"is_manual": True})
    if state.restarts >= max_restarts:
        raise CrashLoop(
            f"experiment {state.name!r}: this run was restarted {state.restarts} times in a row, and each time it "
            "ended before it committed a checkpoint or decided about a trial. No automatic restart follows. Read the "
            "log of its last start, remove the cause, then press Retry or resume the experiment: this resets the count"
        )
    return owner


def _cancel_if_owner_alive(experiment: str, owner: Owner) -> None:
    """If this run is scheduled and the last run is alive, cancel this run, as a takeover would lose unsaved steps."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None or not run.auto_scheduled or owner.flow_run is None:
        return
    # `UUID` raises ValueError if the run id in the journal is invalid.
    with suppress(PrefectException, HTTPError, OSError, ValueError), get_client(sync_client=True) as client:
        other = client.read_flow_run(UUID(owner.flow_run))
        if check_run_alive(other, client):
            reason = f"experiment {experiment!r}: its last run, {other.name}, has not ended"
            get_run_log().warning("%s: this scheduled run ends without any change", reason)
            client.set_flow_run_state(run.id, Cancelled(name="Skipped", message=f"Skipped: {reason}."))
            raise Abort(reason)


# Take over an experiment, and write its journal, for all tasks of one flow run of a user's own flow.


def make_run_owner() -> Owner:
    """Return the owner for a public task: the calling flow run, which is the same owner in all tasks and processes.

    The owner's `attempt` is the run count, which a retry increments, so a retry supersedes the earlier try. Without a
    flow run, the owner is this process.
    """
    owner = make_process_owner(attempt=flow_run.run_count or 0)
    name = owner.name if owner.flow_run else f"script {_PROCESS_ID}"
    return owner.model_copy(update={"name": name, "task_run": None})


def has_same_identity(one: Owner | None, other: Owner) -> bool:
    """Return whether two owners from `make_run_owner` are the same flow run, or the same process without a flow run."""
    return one is not None and one.identity == other.identity


class _AlreadyOwnedError(Exception):
    """Another task of this flow run has taken over the experiment."""


def ensure_ownership(target: StorageTarget, experiment: str) -> Experiment:
    """Take over the experiment for this flow run, unless an earlier task has done so; return the experiment's state.

    From then on, writes of other flow runs, and of earlier tries of this flow run, fail.

    Raises:
        Superseded: this flow run owned the experiment until another run took it over; or the experiment was deleted.
        InvalidInput: the experiment is a search, which writes its own journal; or the target is safe for one process
            only, and the flow's task runner uses several.
        ResumeFailed: the journal is damaged, or the experiment is being deleted; nothing was started.
        StoreRefused: the target refuses access.
    """
    owner, stamp = make_run_owner(), new_write_stamp()

    def require_not_owned(current: Experiment) -> Sequence[Event]:
        if has_same_identity(current.owner, owner):
            raise _AlreadyOwnedError
        return ()

    with _write_locks[target.uri, experiment]:
        while True:
            state = read_experiment_raising_refusals(target, experiment)
            if not has_same_identity(state.owner, owner):
                require_continuable(state)
                if state.settings or any(trial.proposed_by_search for trial in state.trials.values()):
                    raise InvalidInput(
                        f"experiment {experiment!r} at {target.uri} is a search, which writes its own journal: "
                        "expected a new name, or an experiment of these tasks. Nothing was written: choose another "
                        "experiment name"
                    )
                _require_not_superseded(state, target, owner)
                # Ignore a takeover by another task of this run; after any other takeover, the next iteration raises.
                with suppress(_AlreadyOwnedError, Superseded):
                    if not check_target(target).conditional_create:
                        require_single_writer(target.uri)
                    request = OwnershipRequest(owner, new_write_stamp(), require_not_owned, loaded=state)
                    return acquire_and_adopt_with_retries(target, state.key, request)
            elif state.last_adopting_term == state.term:
                return state
            else:  # a task of this run has begun the takeover, and was killed or is still running
                with suppress(Superseded):
                    return with_store(target, partial(adopt_unjournaled_saves, experiment=state, stamp=stamp))


def _require_not_superseded(state: Experiment, target: StorageTarget, owner: Owner) -> None:
    if state.key.generation > 1:
        with_store(target, lambda store: reject_earlier_writer(store, state.key, owner.identity))
    if state.owner is None:
        return
    is_older_try = state.owner.flow_run == owner.flow_run is not None and owner.attempt < state.owner.attempt
    earlier_owners = () if is_older_try else with_store(target, partial(read_earlier_owners, experiment=state))
    if is_older_try or any(has_same_identity(earlier, owner) for earlier in earlier_owners):
        raise _superseded_error(state, target)


def _superseded_error(state: Experiment, target: StorageTarget) -> Superseded:
    return Superseded(
        f"experiment {state.name!r} at {target.uri}: {state.owner} has taken it over, and this run may no longer write "
        "to it. Stop here: every committed checkpoint is kept. Use one experiment per concurrent flow run"
    )


def append_entry_after_newer(
    target: StorageTarget,
    state_before: Experiment,
    events: Sequence[Event],
    stamp: WriteStamp,
    check_state: Callable[[Experiment], None],
) -> Experiment:
    """Write `events` as one entry after `state_before`, or after newer entries of other tasks of this run.

    `check_state` gets the state after the newer entries, and raises if the events cannot follow this state. A repeated
    call with the same stamp writes no second entry.

    Raises:
        Superseded: another flow run owns the experiment now.
        StoreUnavailable: other tasks were faster 16 times.
    """
    with _write_locks[target.uri, state_before.name], target.open(timeout=READ_TIMEOUT) as store:
        state = state_before
        for _ in range(MAX_WRITE_RACES):
            try:
                return append_entry(store, state, events, stamp)
            except Superseded:
                state = load_experiment(store, state_before.key)
            newer_entries = read_entries(store, state_before.key, state_before.entry_count)
            if any(entry.write_id == stamp.write_id for entry in newer_entries):
                return state
            if not has_same_identity(state.owner, state_before.owner or make_run_owner()):
                raise _superseded_error(state, target)
            check_state(state)
    raise StoreUnavailable(f"{state_before.key}: other writers were faster {MAX_WRITE_RACES} times; try again")


def retry_on_conflict(action: Callable[[], _Result]) -> _Result:
    """Return `action()`; repeat it after `SaveOvertaken`, and raise `StoreUnavailable` after 16 tries."""
    for _ in range(MAX_WRITE_RACES):
        try:
            return action()
        except SaveOvertaken as overtaken:
            error = overtaken
    raise StoreUnavailable(f"{error}; tried {MAX_WRITE_RACES} times. Save a trial from one task at a time") from error


def write_if_unchanged(target: StorageTarget, before: Experiment, trial: str, events: Sequence[Event]) -> Experiment:
    """Write `events` of `trial` as one entry; raise `SaveOvertaken` if another task has changed the trial."""

    def require_unchanged(state: Experiment) -> None:
        if state.trials.get(trial) != before.trials.get(trial):
            raise SaveOvertaken(f"{state.key}: another task has changed trial {trial!r} in the meantime")

    return append_entry_after_newer(target, before, events, new_write_stamp(), require_unchanged)


def make_trial_entry_writer(trial: str) -> EntryWriter:
    """Return a function that journals the events of an attempt of `trial` while other tasks of this run may write too.

    The function raises `Superseded` if another attempt of the trial has begun, or this attempt was ended. It raises
    `SaveOvertaken` if an event commits a save, but another task has meanwhile changed the checkpoints of the trial.
    """

    def write(
        target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: WriteStamp | None = None
    ) -> Experiment:
        write_stamp, ours = stamp or new_write_stamp(), experiment.trials.get(trial)

        def check_state(state: Experiment) -> None:
            theirs = state.trials.get(trial)
            if ours and theirs and (ours.attempt, ours.phase) != (theirs.attempt, theirs.phase):
                raise Superseded(
                    f"trial {trial!r} of {state.key}: another task of the same flow run has begun attempt "
                    f"{theirs.attempt} or ended this one. Stop here: every committed checkpoint is kept"
                )
            saves = [event.checkpoint for event in events if isinstance(event, CheckpointCommitted)]
            if theirs and any(not can_commit_save(theirs, checkpoint.sequence) for checkpoint in saves):
                raise SaveOvertaken(f"{state.key}: another task has changed the checkpoints of trial {trial!r}")

        return with_retries(lambda: append_entry_after_newer(target, experiment, events, write_stamp, check_state))

    return write


# In a user's own flow, an attempt begins with the first report or save.


def make_attempt_start_events(
    trial: Trial | None, name: str, step: int, config: Mapping[str, object] | None = None
) -> Sequence[Event]:
    """Return the events that start or restart the trial, so that it may report `step`; empty if none are needed."""
    if trial is None:
        start = AttemptStarted(trial=name, attempt=1, from_step=0, at=utc_now())
        return [TrialAdded(trial=name, config=config or {}), start]
    next_attempt = make_attempt_started(trial, utc_now())
    if trial.phase is Phase.RUNNING:
        reason = make_reason("step-repeated", step=step, start=next_attempt.from_step)
        return [] if step >= trial.step else _make_restart_events(trial, reason)
    if trial.phase in ENDED_PHASES:
        return [TrialRequeued(trial=name, reason=make_reason("trained-on", status=trial.status.value)), next_attempt]
    return [TrialResumed(trial=name), next_attempt] if trial.phase is Phase.PAUSED else [next_attempt]


def _make_restart_events(trial: Trial, reason: Reason) -> Sequence[Event]:
    """Return the events that end the running attempt of `trial` and start the next attempt at its newest checkpoint."""
    return [AttemptEnded(trial=trial.id, cause=Cause.PREEMPTED, reason=reason), make_attempt_started(trial, utc_now())]


def make_rollback_events(trial: Trial, deleted: Sequence[CheckpointRef]) -> Sequence[Event]:
    """Return the events that restart a running trial at an earlier checkpoint if the newest one is in `deleted`."""
    newest = newest_checkpoint(trial)
    if trial.phase is not Phase.RUNNING or newest is None or newest not in deleted:
        return []
    remaining = tuple(checkpoint for checkpoint in trial.checkpoints if checkpoint not in deleted)
    reason = make_reason("checkpoint-deleted", step=newest.step, start=remaining[-1].step if remaining else 0)
    return _make_restart_events(trial.model_copy(update={"checkpoints": remaining}), reason)
