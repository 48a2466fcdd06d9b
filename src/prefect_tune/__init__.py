"""Durable training and hyperparameter search as Prefect flows.

This module exports the public names. It imports a name on first use, so that a trial's process and
`prefect-tune --help` need not wait for the import of Prefect.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING

from prefect_tune.registry import BUILT_IN_MODULES as _BUILT_IN

if TYPE_CHECKING:
    from prefect_tune.artifact_sync import Syncer
    from prefect_tune.blocks import (
        AzureTarget,
        FsspecTarget,
        GcsTarget,
        LocalTarget,
        S3Target,
        StorageTarget,
        SyncConfig,
    )
    from prefect_tune.callbacks import Callback, SearchInfo
    from prefect_tune.core.errors import (
        AlreadyCommitted,
        AlreadyExists,
        BadMetric,
        BadStop,
        CheckpointCorrupt,
        CheckpointNotFound,
        CommitUnknown,
        CrashLoop,
        DamageFound,
        DeadlineExceeded,
        IllegalTransition,
        InvalidInput,
        JournalCorrupt,
        NotExact,
        ObjectNotFound,
        PartMissing,
        ResumeFailed,
        SaveOvertaken,
        SearchFailed,
        StagedFilesChanged,
        StoreRefused,
        StoreUnavailable,
        Superseded,
        TrialFailed,
        TuneError,
        UnknownVersion,
        UnsafePayload,
    )
    from prefect_tune.core.experiment.failure_policy import FailurePolicy
    from prefect_tune.core.experiment.retention import Cadence, Retention
    from prefect_tune.core.experiment.stoppers import (
        ExperimentPlateau,
        ExperimentStopper,
        MaxFailures,
        MaxSteps,
        MaxTime,
        Plateau,
        Stopper,
        TimeBudget,
        TrialBudget,
    )
    from prefect_tune.core.schedulers.asha import ASHA
    from prefect_tune.core.schedulers.base import (
        FIFO,
        Continue,
        Decision,
        Exploit,
        Pause,
        Schedule,
        Scheduler,
        Stop,
        TrialReport,
    )
    from prefect_tune.core.schedulers.hyperband import Hyperband
    from prefect_tune.core.schedulers.median_stopping import MedianStopping
    from prefect_tune.core.schedulers.pbt import PBT
    from prefect_tune.core.search.base import Exhausted, Proposed, Repeated, Search, SearchState, Wait
    from prefect_tune.core.search.domains import (
        choice,
        grid_search,
        lograndint,
        loguniform,
        qlograndint,
        qloguniform,
        qrandint,
        qrandn,
        quniform,
        randint,
        randn,
        sample_from,
        uniform,
    )
    from prefect_tune.core.search.objective import Objective
    from prefect_tune.core.search.random_search import RandomSearch
    from prefect_tune.core.search.space_json import space_from_json, space_to_json
    from prefect_tune.drills.findings import DrillReport
    from prefect_tune.flows.drill import drill, run_drill
    from prefect_tune.flows.durable_trainable import TrialResult, durable_trainable
    from prefect_tune.flows.maintain import maintain
    from prefect_tune.flows.resume import resume
    from prefect_tune.flows.tune import tune
    from prefect_tune.integrations.optuna import OptunaPruner, OptunaSearch
    from prefect_tune.loggers import FileLogger, MLflowLogger, TensorBoardLogger, WandbLogger
    from prefect_tune.maintenance import MaintenanceReport, delete_experiment
    from prefect_tune.results import Results, load_results
    from prefect_tune.runtime.checkpoint import Checkpoint
    from prefect_tune.runtime.trainable import Trainable, TrialInfo, get_checkpoint, get_trial, report, report_step
    from prefect_tune.tasks import (
        CommittedCheckpoint,
        ExperimentState,
        RestoredCheckpoint,
        TrialState,
        delete_checkpoint,
        restore_checkpoint,
        restore_experiment_state,
        run_trial,
        save_checkpoint,
        sync_experiment_state,
    )
    from prefect_tune.tuner.audit import AuditDifference, AuditReport, audit
    from prefect_tune.tuner.stop_requests import StopOutcome, stop

    __version__: str

__all__ = [
    "ASHA",
    "FIFO",
    "PBT",
    "AlreadyCommitted",
    "AlreadyExists",
    "AuditDifference",
    "AuditReport",
    "AzureTarget",
    "BadMetric",
    "BadStop",
    "Cadence",
    "Callback",
    "Checkpoint",
    "CheckpointCorrupt",
    "CheckpointNotFound",
    "CommitUnknown",
    "CommittedCheckpoint",
    "Continue",
    "CrashLoop",
    "DamageFound",
    "DeadlineExceeded",
    "Decision",
    "DrillReport",
    "Exhausted",
    "ExperimentPlateau",
    "ExperimentState",
    "ExperimentStopper",
    "Exploit",
    "FailurePolicy",
    "FileLogger",
    "FsspecTarget",
    "GcsTarget",
    "Hyperband",
    "IllegalTransition",
    "InvalidInput",
    "JournalCorrupt",
    "LocalTarget",
    "MLflowLogger",
    "MaintenanceReport",
    "MaxFailures",
    "MaxSteps",
    "MaxTime",
    "MedianStopping",
    "NotExact",
    "ObjectNotFound",
    "Objective",
    "OptunaPruner",
    "OptunaSearch",
    "PartMissing",
    "Pause",
    "Plateau",
    "Proposed",
    "RandomSearch",
    "Repeated",
    "RestoredCheckpoint",
    "Results",
    "ResumeFailed",
    "Retention",
    "S3Target",
    "SaveOvertaken",
    "Schedule",
    "Scheduler",
    "Search",
    "SearchFailed",
    "SearchInfo",
    "SearchState",
    "StagedFilesChanged",
    "Stop",
    "StopOutcome",
    "Stopper",
    "StorageTarget",
    "StoreRefused",
    "StoreUnavailable",
    "Superseded",
    "SyncConfig",
    "Syncer",
    "TensorBoardLogger",
    "TimeBudget",
    "Trainable",
    "TrialBudget",
    "TrialFailed",
    "TrialInfo",
    "TrialReport",
    "TrialResult",
    "TrialState",
    "TuneError",
    "UnknownVersion",
    "UnsafePayload",
    "Wait",
    "WandbLogger",
    "__version__",
    "audit",
    "choice",
    "delete_checkpoint",
    "delete_experiment",
    "drill",
    "durable_trainable",
    "get_checkpoint",
    "get_trial",
    "grid_search",
    "load_results",
    "lograndint",
    "loguniform",
    "maintain",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "report",
    "report_step",
    "restore_checkpoint",
    "restore_experiment_state",
    "resume",
    "run_drill",
    "run_trial",
    "sample_from",
    "save_checkpoint",
    "space_from_json",
    "space_to_json",
    "stop",
    "sync_experiment_state",
    "tune",
    "uniform",
]

_NAMES_BY_MODULE = {
    "prefect_tune.core.schedulers.base": "Continue Decision Exploit Pause Schedule Scheduler Stop TrialReport",
    "prefect_tune.core.search.domains": "choice grid_search lograndint loguniform qlograndint qloguniform "
    "qrandint qrandn quniform randint randn sample_from uniform",
    "prefect_tune.core.search.base": "Exhausted Proposed Repeated Search SearchState Wait",
    "prefect_tune.core.search.space_json": "space_from_json space_to_json",
    "prefect_tune.drills.findings": "DrillReport",
    "prefect_tune.flows.drill": "drill run_drill",
    "prefect_tune.flows.maintain": "maintain",
    "prefect_tune.flows.resume": "resume",
    "prefect_tune.results": "Results load_results",
    "prefect_tune.tuner.audit": "AuditDifference AuditReport audit",
    "prefect_tune.tuner.stop_requests": "StopOutcome stop",
    "prefect_tune.flows.tune": "tune",
    "prefect_tune.maintenance": "MaintenanceReport delete_experiment",
    "prefect_tune.integrations.optuna": "OptunaPruner",
    "prefect_tune.blocks": "AzureTarget FsspecTarget GcsTarget LocalTarget S3Target StorageTarget SyncConfig",
    "prefect_tune.callbacks": "Callback SearchInfo",
    "prefect_tune.runtime.checkpoint": "Checkpoint",
    "prefect_tune.core.experiment.stoppers": "ExperimentStopper Stopper",
    "prefect_tune.core.experiment.failure_policy": "FailurePolicy",
    "prefect_tune.core.search.objective": "Objective",
    "prefect_tune.core.experiment.retention": "Cadence Retention",
    "prefect_tune.flows.durable_trainable": "TrialResult durable_trainable",
    "prefect_tune.tasks": "CommittedCheckpoint ExperimentState RestoredCheckpoint TrialState "
    "delete_checkpoint restore_checkpoint restore_experiment_state run_trial "
    "save_checkpoint sync_experiment_state",
    "prefect_tune.artifact_sync": "Syncer",
    "prefect_tune.loggers": "FileLogger MLflowLogger TensorBoardLogger WandbLogger",
    "prefect_tune.runtime.trainable": "Trainable TrialInfo get_checkpoint get_trial report report_step",
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
_MODULE_BY_NAME |= {name: module for kind in _BUILT_IN.values() for name, module in kind.items()}

_HINTS = {"Proposals": "; it is now called pt.SearchState"} | dict.fromkeys(
    ("CSVLogger", "JSONLogger"), "; use pt.FileLogger(directory, file_format)"
)


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in __all__:
        hint = _HINTS.get(name, "")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    is_gc_enabled = gc.isenabled()
    gc.disable()  # garbage collections, which find nothing here, would take a sixth of Prefect's import time
    try:
        if name == "__version__":
            from importlib.metadata import version

            value: object = version("prefect-tune")
        else:
            value = getattr(import_module(_MODULE_BY_NAME.get(name, "prefect_tune.core.errors")), name)
    except KeyboardInterrupt:
        # The import takes seconds, so users may interrupt it. `from None` omits the long traceback of the import.
        raise KeyboardInterrupt(f"interrupted while {__name__}.{name} was imported: nothing was started") from None
    finally:
        if is_gc_enabled:
            gc.enable()
    globals()[name] = value  # so that Python does not call this function when the name is used again
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
