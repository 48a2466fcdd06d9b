"""The maintenance flow: verify, quarantine, prune, collect garbage and report, on a target that may be in use."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from prefect.logging import get_run_logger
from pydantic import Field

from prefect_tune.blocks import StorageTarget, resolve_existing
from prefect_tune.core.errors import DamageFound, InvalidInput
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.operations.scrub import FULL_SHARE, parse_share
from prefect_tune.core.storage.generations import find_experiment_names, find_names_with_garbage
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import INTEGER_VALIDATOR
from prefect_tune.maintenance import MaintenanceOptions, MaintenanceReport, maintain_experiments, publish_report
from prefect_tune.parameters.forms import TargetField
from prefect_tune.parameters.search_plan import PositiveSeconds
from prefect_tune.prefect_api.flow_runs import ignore_broken_log_pipe
from prefect_tune.prefect_api.flow_with_server import flow_with_server
from prefect_tune.storage_retries import with_store

__all__ = ["maintain"]


_DAILY_SHARE = "1/7"


@flow_with_server(name="maintain", persist_result=False)
def maintain(
    target: TargetField,
    *,
    experiments: list[str] | None = None,
    verify: Literal["sample", "all", "none"] = "sample",
    share: str = _DAILY_SHARE,
    max_verify_bytes: Annotated[int, Field(gt=0), INTEGER_VALIDATOR] | None = None,
    quarantine: bool = True,
    collect: bool = True,
    retention: Retention | None = None,
    time_budget_seconds: PositiveSeconds | None = None,
    dry_run: bool = False,
) -> MaintenanceReport:
    """Maintain a target: verify checkpoints, quarantine damaged ones, collect garbage, and report.

    The flow can run at any time, even during experiments or another maintenance. It takes over no experiment, and
    deletes nothing that is referenced or that a running save may still reference. The next run completes the work of
    an interrupted run. If the flow finds damage, it first completes all other work, and then fails. The report lists
    all damage, and is a Prefect artifact of the run. If an object cannot be read, the flow reports it and continues.

    ```python
    report = pt.maintain("runs", verify="all", retention=pt.Retention(last=1))
    ```

    Args:
        target: the target to maintain: an absolute path or URI, such as `s3://bucket/runs`, the `type/name` of a saved
            block, or the block; in a script also a relative path.
        experiments: names of experiments, or patterns such as `"nightly-*"`. Default: all on the target.
        verify: which checkpoints to verify byte by byte: `"all"`, `"none"`, or a `"sample"`, which differs each day.
        share: the share of the checkpoints in a sample. With `"1/7"`, daily runs read every checkpoint within 7 days.
        max_verify_bytes: bytes per experiment after which no further checkpoint is read. Default: no limit.
        quarantine: whether to quarantine damaged checkpoints, so that no trial resumes from them. Release them with
            `prefect-tune verify --release`.
        collect: whether to delete retired checkpoints and the remains of interrupted saves.
        retention: which checkpoints of finished experiments to keep, such as `{"last": 1}`. Default: all. Always kept:
            the best checkpoint, all checkpoints of the best trial, the newest of each trial, and cloned checkpoints.
        time_budget_seconds: seconds after which no work begins. The experiments' order changes daily. Default: none.
        dry_run: check and report only; do not change the target.

    Returns:
        MaintenanceReport: what was read, deleted or found damaged; and what was skipped, with the reason.

    Raises:
        DamageFound: a checkpoint or a journal is damaged; the error's `report` is the MaintenanceReport.
        InvalidInput: an argument is invalid, or an experiment does not exist; nothing was begun.
        StoreUnavailable, StoreRefused: the target cannot be reached, or refuses requests.
    """
    ignore_broken_log_pipe()
    if verify != "sample" and share != _DAILY_SHARE:
        raise InvalidInput(f"share={share!r}: it needs verify='sample', found {verify!r}; nothing was begun")
    if verify == "none" and max_verify_bytes is not None:
        raise InvalidInput(f"max_verify_bytes={max_verify_bytes}: verify='none' reads nothing; nothing was begun")
    now = datetime.now(UTC)
    sampled_share = FULL_SHARE if verify == "all" else parse_share(share, now.date())
    deadline = None if time_budget_seconds is None else now + timedelta(seconds=time_budget_seconds)
    options = MaintenanceOptions(
        target=resolve_existing(target),
        daily_share=None if verify == "none" else sampled_share,
        max_bytes=max_verify_bytes,
        quarantine=quarantine and not dry_run,
        collect=collect,
        retention=retention,
        until=deadline,
        dry_run=dry_run,
    )
    report = maintain_experiments(options, _match_experiments(options.target, experiments), now.date())
    get_run_logger().info("%s", report.summary)
    publish_report(report)
    if report.damaged_checkpoints:
        raise DamageFound(report.damage_message, report)
    return report


def _match_experiments(target: StorageTarget, patterns: Sequence[str] | None) -> Sequence[str]:
    """Return the names that match a pattern (None: all names), including deleted experiments whose objects remain.

    Raises `InvalidInput` if a pattern matches no name.
    """

    def list_names(store: ObjectStore) -> Sequence[str]:
        paths = [listed.path for listed in store.list("")]
        return sorted({*find_experiment_names(paths), *find_names_with_garbage(paths)})

    names = with_store(target, list_names, timedelta(minutes=10))
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InvalidInput(
                f"experiments: none of the {len(names)} at {target.uri} matches {pattern!r}; nothing was begun"
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns or ["*"])]
