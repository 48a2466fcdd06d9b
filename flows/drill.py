"""The drill as a flow and a task: prove, on a schedule or in CI, that your training resumes exactly."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext

from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from prefect_tune.blocks import resolve_target
from prefect_tune.core.errors import NotExact
from prefect_tune.core.values import Number, WholeNumber
from prefect_tune.drills.findings import DrillReport
from prefect_tune.drills.plan import make_drill_plan
from prefect_tune.drills.run_drill import make_run_environment, require_drillable, temporary_folder
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
    steps: WholeNumber = 12,
    kills: WholeNumber = 3,
    at: list[WholeNumber] | None = None,
    seed: WholeNumber = 0,
    save_every: WholeNumber | None = None,
    hours_between_failures: Number = 24.0,
    processes_per_trial: WholeNumber = 1,
    keep: bool = False,
) -> DrillReport:
    """Train a trainable undisturbed, then again with kills and resumes, and compare the two runs bit for bit.

    The drill compares all metrics of all steps, the steps that have a checkpoint, and all files of all checkpoints:
    `torch.save`, safetensors, NumPy, JSON and Parquet files by tensor, array, key or column; other files by byte. If
    this comparison leaves open whether the training is deterministic, the drill trains undisturbed again. To find
    what was probably not restored, it compares the states of random generators, optimizers, learning rate schedules,
    scalers and counters after each resume. The runs train one after another on this machine, each attempt in a copy of
    the working directory. Linear algebra uses one thread, because the order of sums would vary with more threads.

    ```python
    report = pt.drill("prefect_tune.demo.model:Digits", {"width": 32})
    ```

    Args:
        trainable: the code to train: `package.module:Name`.
        config: the configuration of the trainable.
        target: where the runs store checkpoints: an absolute path or URI, the `type/name` of a saved block, or the
            block; in a script also a relative path. Default: a temporary folder.
        steps: how many steps each run trains.
        kills: how many times the drill kills a process of the second run (SIGKILL). `seed` selects the step and the
            process: that of the trial, of the search (perhaps during an upload), or of a rank other than 0, if any.
        at: the steps after which to kill, instead of those that `seed` selects.
        seed: the seed with which the kills are drawn.
        save_every: the number of steps from one save of a class trainable to the next. Default: `steps` / 4. A function
            trainable saves whenever it reports a checkpoint.
        hours_between_failures: the mean time between failures, for the advice on how often to save.
        processes_per_trial: how many processes train together; see `pt.durable_trainable`.
        keep: whether to keep the runs' experiments on the target.

    Returns:
        DrillReport: the verdict, what was compared, and what saves and kills cost.

    Raises:
        NotExact: the runs differ. The error names the first difference and its cause; its `report` is the DrillReport.
        InvalidInput: an argument is invalid; nothing was trained.
        StoreUnavailable, StoreRefused: the target cannot be used.
        TuneError: a run failed for another reason; the message contains the last output of the run.
    """
    plan = make_drill_plan(
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
    require_drillable(trainable)
    if target is None and keep:
        target = tempfile.mkdtemp(prefix="prefect-tune-drill-")
    with temporary_folder() if target is None else nullcontext(target) as location:
        environment, log = make_run_environment(), get_run_logger().info
        report = run_in_processes(plan, resolve_target(location), environment, keep=keep, on_activity=log)
    if keep:
        get_run_logger().info("the experiments of both runs are kept on %s", location)
    for line in report.lines():
        get_run_logger().info("%s", line)
    if not report.is_exact:
        raise NotExact(report.summary(), report)
    return report


run_drill = public_task(
    name="run-drill", task_run_name="drill {trainable}", cache_policy=NO_CACHE, persist_result=False
)(drill.fn)
"""`drill` as a task with the same arguments; call `run_drill.map([...], target=unmapped(...))` in your own flow."""
