"""Which flow run owns an experiment: it alone writes the journal, in the term that its opening began.

    a search, a training    one process: `owner_after` says whether it may open the journal; its attempts write there
                            through it, or post to outboxes that it reads
    a flow of one's own     its tasks, in any processes: the first one opens the journal by `own`, all write one entry
                            after another by `append_beside_others`

No process watches a run: the next one that opens the journal owns it, without asking. Only a scheduled run gives way
to one that lives (`is_alive` in `prefect_api/flow_runs.py`: its state and heartbeats). Whether the attempts of an
earlier owner have crashed: `has_process_ended` in `journal_access.py`; *stale* in `show`, and whether `delete` is
refused: `terminal/formatting.py`.

The tasks remember nothing. Whether their flow run owns the experiment, has lost it, or has never owned it, is read from
the journal, whose openings name the flow run and its run count. Never: a run that lost the experiment opens it again.
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

from prefect_tune.attempt.attempt import next_start
from prefect_tune.blocks import StorageTarget, TargetCheck
from prefect_tune.clock import new_write_id, utc_now
from prefect_tune.core.errors import (
    CrashLoop,
    InvalidInput,
    SaveOvertaken,
    StoreRefused,
    StoreUnavailable,
    Superseded,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Trial, is_acceptable, newest_checkpoint
from prefect_tune.core.journal.journal import earlier_owners, history, load
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    CheckpointRef,
    Committed,
    Event,
    Owner,
    Requeued,
    Resumed,
    Started,
    TrialAdded,
)
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.core.storage.generations import call_that_has, claim_name, require_not_of_before
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Stamp, digest_of
from prefect_tune.journal_access import (
    EntryWriter,
    Opening,
    adopt_unjournaled,
    append_entry,
    current_owner,
    open_journal,
    read_known,
    read_undamaged,
)
from prefect_tune.parameters.plan_checks import require_goes_on, require_one_runner
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.call_paths import call_path, require_order
from prefect_tune.prefect_api.flow_runs import is_alive, is_started_by_hand
from prefect_tune.storage_retries import READ_TIMEOUT, on_target, run_log, with_retries

MOST_RACES = 16
"""How often a task that other writers have overtaken tries again."""
_PROCESS = uuid4().hex[:8]
"""Tells the processes of scripts apart, which have no flow run."""
_writing: defaultdict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)
"""One write at a time to each experiment from this process: a target without create-if-absent needs it."""
_Result = TypeVar("_Result")


def check_target(target: StorageTarget) -> TargetCheck:
    """Test by writing and reading whether `target` can store checkpoints safely; an error says why not, in one line.

    Raises:
        StoreRefused: it cannot, or not with this configuration.
        StoreUnavailable: it did not answer.
    """
    found = target.check(timeout=timedelta(seconds=30))
    if found.may_pass:
        raise StoreUnavailable(found.message)
    if not found.ok:
        raise StoreRefused(found.message)
    if not found.conditional_create:
        run_log().warning("%s", found.message)
    return found


# The experiment of a call without a name.

_first_targets: dict[str, str] = {}
"""By root run, the target on which its first call has the root's id as the name of its experiment."""
_callers: dict[tuple[str, str], tuple[str, UUID | None, int]] = {}
"""By target and experiment, the try of the caller that has asked for it last in this process."""


def name_by_call(plan: SearchPlan, config: object = None) -> SearchPlan:
    """Return the plan of a call without an experiment name, with the name that each repetition of the call has, too.

    Each experiment of a root run has a document that says which call has it: where the call is made, and a digest of
    what it trains. The first call has the root's id as its name, each other one the id and a digest of its number. So a
    retry may repeat the calls in another order, or only some of them.

    Raises:
        InvalidInput: another call runs now from which a retry could not tell this one; or no earlier try has made this
            call, and one that it has made is neither finished nor repeated: this may be that one, changed.
    """
    decisive = (plan.trainable, plan.space, plan.metric, plan.mode, plan.search, plan.scheduler, plan.seed, config)
    path, uri = call_path(decisive), plan.target.uri
    root = path.key.partition("/")[0]
    if not path.place:
        return plan.extended(experiment=root)
    require_order(path.key)

    def find(store: ObjectStore) -> tuple[str, list[str]]:
        """Return the name of this call, or the first free one, and the experiments that no call of this try has."""
        free, left = "", []
        for name in chain([root], (f"{root}-{digest_of(f'{path.place}:{n}'.encode())[:12]}" for n in count())):
            call = call_that_has(store, name)
            if call == path.key:
                return name, []
            is_root_of_other_target = name == root and _first_targets.setdefault(root, uri) != uri
            if not call and not free and not is_root_of_other_target:
                free = name
            if call is None and name != root:
                break
            if call and call.rpartition("-")[0] == path.place and is_of_earlier_try(name):
                left.append(name)
        return free, left

    def is_of_earlier_try(name: str) -> bool:
        execution, task, task_try = _callers.get((uri, name), ("", None, 0))
        return execution != path.caller[0] or (task == path.caller[1] and task_try != path.caller[2])

    with _writing[uri, root]:
        is_claimed = False
        while not is_claimed:
            name, left = on_target(plan.target, find)
            for other in left:
                trials = with_retries(partial(read_known, plan.target, other)).trials.values()
                if any(trial.phase is not Phase.FINISHED for trial in trials):
                    raise InvalidInput(
                        f"experiment: an earlier try of this run has begun {other!r} by a call without a name, and it "
                        "is not finished. This call trains something else: its trainable or what that holds, space, "
                        "config, metric, mode, search, scheduler or seed differs. If it is the same call, changed, "
                        f"pass experiment={other!r}, which continues it; if it is another call, pass another name"
                    )
            is_claimed = on_target(plan.target, partial(claim_name, experiment=name, call=path.key))
        _callers[uri, name] = path.caller
    return plan.extended(experiment=name)


# The flow run of a search or a training: not in a crash loop, and not beside a live run.


def owner_after(known: Experiment, max_restarts: int) -> Owner:
    """Return the owner with which this run is to open the experiment.

    Args:
        known: the experiment, before it is opened.
        max_restarts: how many automatic restarts in a row may end without progress.

    Raises:
        CrashLoop: this run was restarted automatically `max_restarts` times without progress.
        Abort: a schedule started this run, and the experiment's last run is alive, or waits for a person: this run is
            set to Cancelled, and the target is unchanged.
    """
    owner, before = current_owner(), known.owner
    if before is None or before.flow_run is None or owner.flow_run is None:
        return owner
    if before.flow_run != owner.flow_run:
        _leave_to_the_living(known.name, before)
        return owner
    with suppress(PrefectException, HTTPError, OSError), get_client(sync_client=True) as client:
        if is_started_by_hand(client.read_flow_run_states(UUID(owner.flow_run))):
            return owner.model_copy(update={"by_hand": True})
    if known.restarts >= max_restarts:
        raise CrashLoop(
            f"experiment {known.name!r}: this run was restarted {known.restarts} times in a row, and each time it "
            "ended before it committed a checkpoint or decided about a trial. It is not restarted automatically any "
            "more. Read the log of its last start, remove the cause, then press Retry or resume the experiment: "
            "the count starts at 0 again"
        )
    return owner


def _leave_to_the_living(experiment: str, owner: Owner) -> None:
    """Cancel a scheduled run while the last run is alive: a takeover would lose its unsaved steps."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None or not run.auto_scheduled or owner.flow_run is None:
        return
    # A journal may name what is no id of a run.
    with suppress(PrefectException, HTTPError, OSError, ValueError), get_client(sync_client=True) as client:
        other = client.read_flow_run(UUID(owner.flow_run))
        if is_alive(other, client):
            why = f"experiment {experiment!r}: its last run, {other.name}, has not ended"
            run_log().warning("%s: this scheduled run ends, and changes nothing", why)
            client.set_flow_run_state(run.id, Cancelled(name="Skipped", message=f"Skipped: {why}."))
            raise Abort(why)


# All tasks of one flow run of a user's own flow.


def this_writer() -> Owner:
    """Return the identity of the flow run that calls a public task, for all its tasks, in whatever process they run.

    `attempt` is the run count, which a retry raises: the retried run supersedes the one before. Without a flow run
    the writer is this process.
    """
    owner = current_owner(attempt=flow_run.run_count or 0)
    name = owner.name if owner.flow_run else f"script {_PROCESS}"
    return owner.model_copy(update={"name": name, "task_run": None})


def is_same_writer(one: Owner | None, other: Owner) -> bool:
    """Return whether two owners from `this_writer` are the same run of a flow, or the same process without one."""
    return one is not None and one.identity == other.identity


class _OpenedMeanwhileError(Exception):
    """Another task of this flow run has opened the experiment."""


def own(target: StorageTarget, experiment: str) -> Experiment:
    """Return the experiment, which this flow run owns: since an earlier task of the run, or from now on.

    Another flow run's writes, and those of an earlier try of this one, fail from then on.

    Raises:
        Superseded: this flow run owned the experiment, and another one has taken it over; or it was deleted.
        InvalidInput: the experiment is a search, which writes its own journal; or the target serves one process only,
            and the flow has a task runner with others.
        ResumeFailed: its journal is damaged, or it is being deleted; nothing was started.
        StoreRefused: the target refuses access.
    """
    me, stamp = this_writer(), new_write_id()

    def require_unopened(found: Experiment) -> Sequence[Event]:
        if is_same_writer(found.owner, me):
            raise _OpenedMeanwhileError
        return ()

    with _writing[target.uri, experiment]:
        while True:
            known = read_undamaged(target, experiment)
            if not is_same_writer(known.owner, me):
                require_goes_on(known)
                if known.settings or any(trial.of_search for trial in known.trials.values()):
                    raise InvalidInput(
                        f"experiment {experiment!r} at {target.uri} is a search, which writes its journal itself: "
                        "expected a name that is free, or an experiment of these tasks. Nothing was written: choose "
                        "another experiment name"
                    )
                _require_not_superseded(known, target, me)
                # By another task of this run; after any other takeover the next turn raises.
                with suppress(_OpenedMeanwhileError, Superseded):
                    if not check_target(target).conditional_create:
                        require_one_runner(target.uri)
                    return open_journal(target, known.key, Opening(me, new_write_id(), require_unopened, known=known))
            elif known.adopted_in == known.term:
                return known
            else:  # a task of this run has opened the experiment, and was killed, or does the same now
                with suppress(Superseded):
                    return on_target(target, partial(adopt_unjournaled, opened=known, stamp=stamp))


def _require_not_superseded(state: Experiment, target: StorageTarget, me: Owner) -> None:
    def was_owned_by_me(store: ObjectStore) -> bool:
        return any(is_same_writer(owner, me) for owner in earlier_owners(store, state))

    if state.key.generation > 1:
        on_target(target, lambda store: require_not_of_before(store, state.key, me.identity))
    if state.owner is None:
        return
    is_older = state.owner.flow_run == me.flow_run is not None and me.attempt < state.owner.attempt
    if is_older or on_target(target, was_owned_by_me):
        raise _superseded(state, target)


def _superseded(state: Experiment, target: StorageTarget) -> Superseded:
    return Superseded(
        f"experiment {state.name!r} at {target.uri}: {state.owner} has taken it over from this run, which may no "
        "longer write to it. Stop here: every committed checkpoint is kept. Flow runs that train at the same time "
        "need an experiment each"
    )


def append_beside_others(
    target: StorageTarget,
    known: Experiment,
    events: Sequence[Event],
    stamp: Stamp,
    require: Callable[[Experiment], None],
) -> Experiment:
    """Write `events` as one entry after `known`, or after entries that other tasks of this run have added since.

    `require` gets the state after those, and raises if the events cannot follow it. Writing again with the same
    stamp writes once.

    Raises:
        Superseded: another flow run owns the experiment now.
        StoreUnavailable: other tasks were faster 16 times.
    """
    with _writing[target.uri, known.name], target.open(timeout=READ_TIMEOUT) as store:
        state = known
        for _ in range(MOST_RACES):
            try:
                return append_entry(store, state, events, stamp)
            except Superseded:
                state = load(store, known.key)
            beyond = history(store, known.key, known.number)
            if any(entry.write_id == stamp.write_id for entry in beyond):
                return state
            if not is_same_writer(state.owner, known.owner or this_writer()):
                raise _superseded(state, target)
            require(state)
    raise StoreUnavailable(f"{known.key}: {MOST_RACES} other writers were faster; try again")


def trying_again(act: Callable[[], _Result]) -> _Result:
    """Return `act()`, repeated while other tasks of this flow run change the trial meanwhile.

    Raises:
        StoreUnavailable: they did so 16 times.
    """
    for _ in range(MOST_RACES):
        try:
            return act()
        except SaveOvertaken as overtaken:
            last = overtaken
    raise StoreUnavailable(f"{last}; tried {MOST_RACES} times: save one trial from one task at a time") from last


def write_if_unchanged(target: StorageTarget, known: Experiment, trial: str, events: Sequence[Event]) -> Experiment:
    """Write `events` of `trial` as one entry; raise `SaveOvertaken` if another task has changed the trial."""

    def require_same(now: Experiment) -> None:
        if now.trials.get(trial) != known.trials.get(trial):
            raise SaveOvertaken(f"{now.key}: another task has changed trial {trial!r} meanwhile")

    return append_beside_others(target, known, events, new_write_id(), require_same)


def writer_of_trial(trial: str) -> EntryWriter:
    """Return the journal writer of an attempt of `trial` that runs beside other tasks of this flow run.

    It raises `Superseded` also if another attempt of the trial has begun, or this one was ended; `SaveOvertaken` if
    another task has committed or retired a checkpoint of the trial since a save of these events began.
    """

    def write(
        target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: Stamp | None = None
    ) -> Experiment:
        once, mine = stamp or new_write_id(), experiment.trials.get(trial)

        def require(now: Experiment) -> None:
            theirs = now.trials.get(trial)
            if mine and theirs and (mine.attempt, mine.phase) != (theirs.attempt, theirs.phase):
                raise Superseded(
                    f"trial {trial!r} of {now.key}: another task of the same flow run has begun attempt "
                    f"{theirs.attempt} or ended this one. Stop here: every committed checkpoint is kept"
                )
            saves = [event.checkpoint for event in events if isinstance(event, Committed)]
            if theirs and any(not is_acceptable(theirs, save.sequence) for save in saves):
                raise SaveOvertaken(f"{now.key}: another task has changed the checkpoints of trial {trial!r} meanwhile")

        return with_retries(lambda: append_beside_others(target, experiment, events, once, require))

    return write


# An attempt in a flow of one's own begins with the first report or save.


def opening_events(
    trial: Trial | None, name: str, step: int, config: Mapping[str, object] | None = None
) -> Sequence[Event]:
    """Return the events after which the trial runs and may report `step`; none if it may already."""
    if trial is None:
        began = Started(trial=name, attempt=1, from_step=0, at=utc_now())
        return [TrialAdded(trial=name, config=config or {}), began]
    started = next_start(trial, utc_now())
    if trial.phase is Phase.RUNNING:
        reason = make_reason("step-repeated", step=step, start=started.from_step)
        return [] if step >= trial.step else _restarted(trial, reason)
    if trial.phase in ENDED:
        return [Requeued(trial=name, reason=make_reason("trained-on", status=trial.status.value)), started]
    return [Resumed(trial=name), started] if trial.phase is Phase.PAUSED else [started]


def _restarted(trial: Trial, reason: Reason) -> Sequence[Event]:
    """Return the events that end the running attempt of `trial` and begin the next, from its newest checkpoint."""
    return [AttemptEnded(trial=trial.trial, cause=Cause.PREEMPTED, reason=reason), next_start(trial, utc_now())]


def going_back(found: Trial, going: Sequence[CheckpointRef]) -> Sequence[Event]:
    """Return the events by which a running trial goes back to the checkpoint before those of `going`."""
    newest = newest_checkpoint(found)
    if found.phase is not Phase.RUNNING or newest is None or newest not in going:
        return []
    left = tuple(each for each in found.checkpoints if each not in going)
    reason = make_reason("checkpoint-deleted", step=newest.step, start=left[-1].step if left else 0)
    return _restarted(found.model_copy(update={"checkpoints": left}), reason)
