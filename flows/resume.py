"""Resume a search by its name, with the settings in its journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from prefect.logging import get_run_logger

from prefect_tune.blocks import StorageTarget, resolve_target
from prefect_tune.core.errors import InvalidInput, ResumeFailed
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.values import ExperimentName, Number, WholeNumber, validate_name
from prefect_tune.journal_access import missing_experiment_message, read_experiment_to_resume
from prefect_tune.parameters.forms import (
    CallbacksField,
    ConfigField,
    OptionalTrainableField,
    RerunField,
    ResourcesField,
    SchedulerField,
    SearchField,
    StopField,
    SyncField,
    TargetField,
    WarmStartField,
)
from prefect_tune.parameters.plan_checks import require_no_fewer_samples, require_search
from prefect_tune.parameters.search_plan import (
    OPTIONS,
    SearchOptions,
    SearchPlan,
    list_unstored_options,
    plan_from_settings,
)
from prefect_tune.prefect_api.flow_with_server import flow_with_server, showing_search_output
from prefect_tune.results import Results
from prefect_tune.suspension import get_earlier_choices
from prefect_tune.tasks.experiments import ForkRequest, fork_experiment, load_fork_origin
from prefect_tune.trust import require_trusted_code, resolve_trusted_packages
from prefect_tune.tuner.run_search import run_search

__all__ = ["resume"]


@flow_with_server(name="resume", persist_result=False, call_context=showing_search_output)
def resume(
    experiment: ExperimentName,
    *,
    target: TargetField,
    num_samples: WholeNumber | None = None,
    samples_per_run: WholeNumber | None = None,
    stop: StopField = None,
    rerun_errored: RerunField = False,
    time_budget_seconds: Number | None = None,
    fork: str | None = None,
    at: WholeNumber | None = None,
    strict_fork: bool = False,
    space: ConfigField = None,
    search: SearchField = None,
    scheduler: SchedulerField = None,
    warm_start: WarmStartField = None,
    allow_missing_metric: bool | None = None,
    max_concurrent_trials: WholeNumber | None = None,
    resources_per_trial: ResourcesField = None,
    resources_total: ResourcesField = None,
    processes_per_trial: WholeNumber | tuple[WholeNumber, WholeNumber] | None = None,
    nodes_per_trial: WholeNumber | None = None,
    min_nodes: WholeNumber | None = None,
    metrics_from: Literal["rank 0", "mean"] | None = None,
    trainable: OptionalTrainableField = None,
    callbacks: CallbacksField = None,
    sync: SyncField = None,
    trial_job_variables: dict[str, Any] | None = None,
    trusted_packages: list[str] | None = None,
    on_code_change: Literal["warn", "refuse"] = "warn",
) -> Results:
    """Resume the search `experiment` with the settings in its journal; parameters given here replace these settings.

    The search continues as with `tune` and the same experiment name, but `resume` needs no code, so that a form, a
    schedule or a command line can call it. `resume` never creates an experiment; a missing experiment is an error.

    ```python
    results = pt.resume("digits", target="runs", num_samples=20)
    ```

    Args:
        experiment: name of the experiment on the target.
        target: where the experiment is stored. An absolute path or URI, such as `s3://bucket/runs`, the `type/name` of
            a saved block, such as `s3-target/prod`, or the block; in a script also a relative path.
        num_samples: new total number of samples, not smaller than before; the search continues where it ended. With a
            grid, how many times each point is tried in total; see `tune`. Default: the number in the journal.
        samples_per_run: how many samples this run adds, instead of `num_samples`; see `tune`.
        stop: new stop criterion of the trials, such as `{"step": 200}`; trials that do not meet it yet continue.
        rerun_errored: retry errored trials, with their configurations; `only` trains only these.
        time_budget_seconds: seconds after which all trials save and the run ends; another run continues. Default: none.
        fork: name of a new experiment that continues from `experiment`, which stays unchanged and may be running. The
            target copies the checkpoints. If the fork exists already, for example after a retry, it is resumed.
        at: only with `fork`: number of the journal entry after which the fork begins. Default: the last entry.
        strict_fork: refuse to fork if a checkpoint that was live at the entry `at` has been deleted since. By default,
            a trial whose checkpoint was deleted continues from its newest remaining one or from step 0, with a warning.
        space: another space for new trials, such as `{"lr": {"loguniform": [1e-5, 0.01]}}`; earlier trials stay data.
        search: another search algorithm from now on; required if the journal's algorithm has no JSON form.
        scheduler: another scheduler, such as `{"ASHA": {"max_t": 81}}`; required if the old one has no JSON form.
        warm_start: experiments whose finished trials the search learns from; see `tune`.
        allow_missing_metric: whether reports may lack the metric from now on; see `tune`.
        max_concurrent_trials: how many trials train at once from now on.
        resources_per_trial: resources of each trial from now on, such as `{"cpu": 2, "gpu": 1}`; see `tune`.
        resources_total: resources of this machine; not stored in the journal; see `tune`.
        processes_per_trial: how many processes train a trial together from now on; see `tune`.
        nodes_per_trial: how many nodes train a trial together from now on; see `tune`.
        min_nodes: number of nodes with which an attempt begins from now on; see `tune`.
        metrics_from: which metrics a step of several processes reports from now on; see `tune`.
        trainable: `package.module:Name`; required if the journal has no import path for it, or an untrusted one.
        callbacks: callbacks from now on. The journal cannot store callback objects: if they are not passed here, the
            search continues without them, and logs a warning.
        sync: periods and timeouts in seconds, and artifacts, from now on.
        trial_job_variables: job variables of trials that run as deployments from now on; see `tune`.
        trusted_packages: packages whose classes and functions the journal may name, such as `my_project`. Default:
            the packages in PREFECT_INTEGRATIONS_TUNE_TRUSTED_PACKAGES. The journal may name any code if the target is
            a local folder that only this user can write to. If the target has a `signing_key`, only a journal that is
            signed with this key may name code, and it may name any code.
        on_code_change: whether to `warn` or to `refuse` if the source of the trainable has changed.

    Returns:
        Results: see `tune`.

    Raises:
        ResumeFailed: the experiment does not exist, or cannot be read. Nothing was started.
        InvalidInput: the journal lacks a setting; the message says what to pass.
        UnsafePayload: the journal names untrusted code; the message says what to pass.
        CheckpointNotFound: with `strict_fork`, a checkpoint has been deleted.
        Superseded: another run has taken over the experiment.
        SearchFailed: every trial errored, or three errored in the same way before any trial reported a second
            step; the Results are in the error's `results`. The flow run ends Failed.
        CrashLoop: automations restarted this run too often without progress.
        StoreUnavailable: the target did not answer for too long. Run the flow again to continue.
        StoreRefused: the target refused requests (wrong credentials) at the start or for too long; run the flow again.
    """
    parameters = dict(locals())  # each option that a resume accepts is a parameter of the same name
    resolved = resolve_target(target)
    options = {name: parameters[name] for name, option in OPTIONS.items() if option.at_resume}
    passed = {name: value for name, value in options.items() if value is not None}
    SearchOptions(**{"trainable": print, **passed, "target": resolved, "experiment": experiment})  # validate first
    if fork is None and (at is not None or strict_fork):
        raise InvalidInput("at: a resume starts at the last entry; to start at another entry, pass fork='name'")
    make_plan = partial(_make_plan, resolved, options, resolve_trusted_packages(trusted_packages))
    if fork is not None:
        request = ForkRequest(experiment=experiment, into=validate_name(fork), at=at, strict=strict_fork)
        if (source := load_fork_origin(resolved, request)) is not None:
            make_plan(source)  # only to find an invalid plan before the fork is created
        experiment = fork_experiment(resolved, request).name
    state = read_experiment_to_resume(resolved, experiment)
    if not state.entry_count:
        raise ResumeFailed(f"nothing was started: {missing_experiment_message(resolved, experiment)}")
    require_search(state, resolved.uri)
    plan = make_plan(state)
    if callbacks is None and "callbacks" in list_unstored_options(state.settings):
        get_run_logger().warning("the journal cannot store callback objects, so the search runs without them")
    return run_search(plan, state)


def _make_plan(
    target: StorageTarget, options: Mapping[str, Any], trusted: Sequence[str], state: Experiment
) -> SearchPlan:
    """Return the plan that continues `state` with these options. Raises the errors of `resume`."""
    run_options = {name: value for name, value in options.items() if not OPTIONS[name].stored}
    changed = {name: value for name, value in options.items() if name not in run_options and value is not None}
    require_trusted_code(target, state, changed.keys(), trusted)
    if options["search"] is None and not get_earlier_choices(state):  # otherwise, a form may have raised the number
        require_no_fewer_samples(options["num_samples"], state)
    fixed = {"target": target, "experiment": state.name, "resume": "must"}
    return plan_from_settings(state.settings, {**run_options, **fixed}, changed)
