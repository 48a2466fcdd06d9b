"""Go on with a search by its name alone: everything else is in its journal."""

from __future__ import annotations

from typing import Any, Literal

from prefect.logging import get_run_logger

from prefect_tune.blocks import StorageTarget, resolve_target
from prefect_tune.core.errors import InvalidInput, ResumeFailed
from prefect_tune.core.journal import Loaded
from prefect_tune.core.values import valid_name
from prefect_tune.flows.asked import OF_THE_RUN, from_settings, only_in_code
from prefect_tune.flows.extending import require_one_count
from prefect_tune.flows.forms import (
    CallbacksField,
    OtherTrainableField,
    RerunField,
    SyncField,
    TargetField,
)
from prefect_tune.flows.own_server import flow_with_server
from prefect_tune.flows.results import Results
from prefect_tune.flows.resuming import read_known
from prefect_tune.flows.search import searched
from prefect_tune.flows.trust import require_trusted, trusted_here
from prefect_tune.tasks.forking import ForkRequest, fork_experiment

__all__ = ["resume"]

_WHICH = frozenset({"experiment", "target", "fork", "at", "strict_fork", "trusted_packages"})
"""They say which experiment goes on, and what is trusted in it. All others are of this run, or change it."""


@flow_with_server(name="resume", persist_result=False)
def resume(
    experiment: str,
    *,
    target: TargetField,
    num_samples: int | None = None,
    samples_per_run: int | None = None,
    stop: Any = None,
    rerun_errored: RerunField = False,
    time_budget_seconds: float | None = None,
    fork: str | None = None,
    at: int | None = None,
    strict_fork: bool = False,
    space: dict[str, Any] | None = None,
    search: Any = None,
    scheduler: Any = None,
    warm_start: list[str] | None = None,
    max_concurrent_trials: int | None = None,
    resources_per_trial: dict[str, float] | None = None,
    resources_total: dict[str, float] | None = None,
    trainable: OtherTrainableField = None,
    callbacks: CallbacksField = None,
    sync: SyncField = None,
    trial_job_variables: dict[str, Any] | None = None,
    trusted_packages: list[str] | None = None,
    on_code_change: Literal["warn", "refuse"] = "warn",
) -> Results:
    """Go on with the search `experiment` as its journal describes it; what is given here is changed.

    It is `tune` with the same experiment name, for whoever has no code at hand: a form, a schedule, a
    command line. Nothing is ever started afresh: an experiment that is not there is an error.

    Args:
        experiment: its name on the target.
        target: where it lives. A URI such as `s3://bucket/runs`, the `type/name` of a saved block, such as
            `s3-target/prod`, or the block.
        num_samples: more samples in all than before: the search goes on where it ended. With fewer than there are
            already, none is added. Default: as many as before.
        samples_per_run: in place of `num_samples`: how many this run adds, as in `tune`.
        stop: a larger budget for each trial, such as `{"step": 200}`: those that met the old criterion go on.
        rerun_errored: try trials again that errored; `only` those, and nothing else.
        time_budget_seconds: seconds, after which everything saves and ends; running it again goes on. Default: none.
        fork: a name: leave `experiment` as it is, and go on under this one. No checkpoint is copied, and the other
            may be running. Asked for again, by a retry for one, the fork that is there goes on.
        at: with `fork`: the entry of its journal to fork from; of each trial that is what had been absorbed by then.
            Default: the last one.
        strict_fork: refuse to fork where a checkpoint of that entry has been deleted since. Otherwise a trial goes on
            from the newest that is left, or from nothing, and the log says so.
        space: another space for the trials to come, such as `{"lr": {"loguniform": [1e-5, 0.01]}}`; earlier ones stay
            data.
        search: another one than before proposes from now on; needed where it was an object without a JSON form.
        scheduler: likewise; another one than before decides from now on: `{"ASHA": {"max_t": 81}}`.
        warm_start: experiments whose finished trials the search learns from, as in `tune`.
        max_concurrent_trials: how many train at once from now on.
        resources_per_trial: what each trial has for itself from now on, as in `tune`: `{"cpu": 2, "gpu": 1}`.
        resources_total: what this machine may give, as in `tune`; it is not kept.
        trainable: `package.module:Name`; needed where the experiment was begun with an object that has no import path,
            and where nothing else here says that the journal may name it: see `trusted_packages`.
        callbacks: who hears of the trials from now on. Those that are objects the journal does not hold: without them
            here it goes on without them, and says so.
        sync: periods and timeouts in seconds, and artifacts, from now on.
        trial_job_variables: what a trial that runs as a deployment has of a machine, from now on, as in `tune`.
        trusted_packages: packages whose classes and functions the journal may name, such as `my_project`. Default:
            those in PREFECT_INTEGRATIONS_TUNE_TRUSTED_PACKAGES. What is not theirs has to be passed here, unless the
            target is a folder that only this user can write to, or has a `signing_key` that has signed the journal.
        on_code_change: whether it goes on when the trainable's source has changed, or is refused.

    Returns:
        Results: as `tune` does.

    Raises:
        ResumeFailed: there is no such experiment, or it cannot be read. Nothing was started.
        InvalidInput: its journal does not hold all that is needed; the message says what to pass.
        UnsafePayload: its journal chooses what is run, and nothing here trusts that; the message says what to pass.
        CheckpointNotFound: with `strict_fork`.
        Superseded: another run has taken the experiment over.
        CrashLoop: automations started this run again and again, and nothing came of it.
        StoreUnavailable: the target did not answer for too long. Running it again goes on.
        StoreRefused: the target refuses, for its credentials say: from the start, or for too long. Running it again
            goes on.
    """
    given = dict(locals())  # the parameters: `Asked` names them alike
    require_one_count(num_samples, samples_per_run)
    where = resolve_target(target)
    if fork is None and (at is not None or strict_fork):
        raise InvalidInput("at: an experiment goes on from its end; to go on from an entry, name the fork: fork='name'")
    if fork is not None:
        request = ForkRequest(experiment=experiment, into=valid_name(fork), at=at, strict=strict_fork)
        experiment = fork_experiment(where, request).name
    known = _found(where, experiment)
    said = {name: value for name, value in given.items() if name not in _WHICH}
    changed = {name: value for name, value in said.items() if name not in OF_THE_RUN and value is not None}
    require_trusted(where, known.experiment, changed.keys(), trusted_here(trusted_packages))
    if callbacks is None and "callbacks" in only_in_code(known.experiment.settings):
        get_run_logger().warning("the callbacks were objects, which no journal holds: it goes on without them")
    run = {name: value for name, value in said.items() if name in OF_THE_RUN}
    here = {"target": where, "experiment": experiment, "resume": "must"}
    return searched(from_settings(known.experiment.settings, {**run, **here}, changed), known)


def _found(target: StorageTarget, experiment: str) -> Loaded:
    known = read_known(target, experiment)
    state = known.experiment
    if not state.number:
        raise ResumeFailed(f"there is no experiment {experiment!r} at {target.uri}. Nothing was started")
    if not state.settings:
        raise InvalidInput(
            f"experiment {experiment!r} at {target.uri} is no search: go on with it by pt.durable_trainable(...)"
        )
    return known
