"""The drill as a flow and a task: prove that a training of one's own resumes exactly, on a schedule or in CI."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext

from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from prefect_tune.blocks import resolve_target
from prefect_tune.core.errors import NotExact
from prefect_tune.core.values import Number, Whole
from prefect_tune.drills.findings import DrillReport
from prefect_tune.drills.plan import drill_plan
from prefect_tune.drills.run_drill import environment_with_api, require_importable, temporary_folder
from prefect_tune.drills.run_drill import run_drill as run_in_processes
from prefect_tune.parameters.forms import ConfigField, OptionalTargetField
from prefect_tune.prefect_api.flow_with_server import flow_with_server
from prefect_tune.prefect_api.task_runs import public_task

__all__ = ["drill", "run_drill"]


@flow_with_server(name="drill", persist_result=False)
def drill(
    trainable: str,
    config: ConfigField = None,
    *,
    target: OptionalTargetField = None,
    steps: Whole = 12,
    kills: Whole = 3,
    at: list[Whole] | None = None,
    seed: Whole = 0,
    save_every: Whole | None = None,
    hours_between_failures: Number = 24.0,
    processes_per_trial: Whole = 1,
    keep: bool = False,
) -> DrillReport:
    """Train a trainable undisturbed, and again with kills and resumes, and compare the two runs, bit for bit.

    Compared are all metrics of all steps, which steps have a checkpoint, and all files of all checkpoints:
    `torch.save`, safetensors, NumPy, JSON and Parquet files by tensor, array, key or column, others by byte. If that
    does not show whether the training itself is deterministic, a second undisturbed run does; and the states of
    generators, optimizers, schedules, scalers and counters at the resume show what was probably not restored. The runs
    train on this machine, one after another, with one thread for linear algebra, since sums are rounded in an order
    that depends on the number of threads; each attempt with a copy of the working directory.

    Args:
        trainable: the code to train: `package.module:Name`.
        config: its configuration.
        target: where the runs store checkpoints: an absolute path or URI, the `type/name` of a saved block, or the
            block; in a script also a relative path. Default: a temporary folder.
        steps: how many steps each run trains.
        kills: how many times the second run is killed by SIGKILL, after steps that `seed` draws: the trial, the
            process of the search, that process in the middle of an upload, and of several ranks another one, in turn.
        at: kill after these steps instead.
        seed: of the draws.
        save_every: the steps between two saves of a class; a function saves when it reports a checkpoint. Default: a
            quarter of `steps`.
        hours_between_failures: the mean time between failures, for the advice on how often to save.
        processes_per_trial: how many processes train together, as in `pt.durable_trainable`.
        keep: whether the runs' experiments stay on the target.

    Returns:
        DrillReport: the verdict, what was compared, and what saves and kills cost.

    Raises:
        NotExact: the runs differ; its `report` is the report. Its message names the first difference and its cause.
        InvalidInput: an argument is invalid; nothing was trained.
        StoreUnavailable, StoreRefused: the target cannot be used.
        TuneError: a run failed otherwise; the message has its last output.
    """
    plan = drill_plan(
        trainable,
        config,
        steps,
        save_every,
        kills=kills,
        at=at or (),
        seed=seed,
        hours_between_failures=hours_between_failures,
        processes=processes_per_trial,
    )
    require_importable(trainable)
    if target is None and keep:
        target = tempfile.mkdtemp(prefix="prefect-tune-drill-")
    with temporary_folder() if target is None else nullcontext(target) as place:
        api, log = environment_with_api(), get_run_logger().info
        report = run_in_processes(plan, resolve_target(place), api, keep=keep, on_activity=log)
    if keep:
        get_run_logger().info("kept on %s", place)
    for line in report.lines():
        get_run_logger().info("%s", line)
    if not report.is_exact:
        raise NotExact(report.summary(), report)
    return report


run_drill = public_task(
    name="run-drill", task_run_name="drill {trainable}", cache_policy=NO_CACHE, persist_result=False
)(drill.fn)
"""`drill` as a task with the same arguments: `run_drill.map([...], target=unmapped(...))` in a flow of one's own."""
