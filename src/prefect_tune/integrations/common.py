"""Helpers for the callbacks of all frameworks: metrics, reports, a path for each trial, errors about missing extras."""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.runtime.ranks import RANKS_ADVICE
from prefect_tune.runtime.trainable import StopTraining, get_checkpoint, get_process_session, get_trial, report_step

_log = logging.getLogger("prefect_tune")

MetricNames: TypeAlias = str | Sequence[str] | Mapping[str, str] | None
"""The metrics that a callback reports: a name, several names, `{reported name: framework's name}`, or None for all."""


def select_metrics(
    metrics: Mapping[str, object], wanted: MetricNames, *, allow_missing: bool = False
) -> Mapping[str, object]:
    """Select the wanted metrics from a framework's metrics. With `allow_missing`, skip missing metrics.

    Raises:
        BadMetric: a wanted metric is missing, and `allow_missing` is False.
    """
    if wanted is None:
        return dict(metrics)
    names = [wanted] if isinstance(wanted, str) else wanted
    sources = names if isinstance(names, Mapping) else {name: name for name in names}
    absent = [source for source in sources.values() if source not in metrics]
    if absent and not allow_missing:
        raise BadMetric(f"expected metrics {absent}, found only {sorted(metrics)}")
    return {name: metrics[source] for name, source in sources.items() if source in metrics}


def try_report_step(metrics: Mapping[str, object], save: Callable[[str], None], *, allow_missing: bool = False) -> bool:
    """Report a step, with a checkpoint if one is due; return False if the trial has ended, so the loop must end, too.

    The user's code after the loop still runs, as it does after early stopping, but its reports are ignored. With
    `allow_missing`, the report may lack the search's metric, for example before the first validation has finished.
    """
    try:
        report_step(metrics, save, allow_missing=allow_missing)
    except StopTraining:
        return False
    return True


def get_validated_rank(framework: str, world_size: int) -> int:
    """Return the rank of this process.

    Raises:
        InvalidInput: the framework and the trial have different numbers of processes.
    """
    trial = get_trial()
    if trial.world_size != world_size:
        raise InvalidInput(
            f"{framework}: expected {trial.world_size} process{'' if trial.world_size == 1 else 'es'}, like the trial, "
            f"found {world_size}. {RANKS_ADVICE}"
        )
    return trial.rank


def get_checkpoint_directory() -> Path | None:
    """Return the local directory of the checkpoint to resume from; None on a fresh start."""
    checkpoint = get_checkpoint()
    return Path(checkpoint.path) if checkpoint is not None else None


def make_trial_path(path: str, option: str | None = None) -> str:
    """Return a path that no other trial uses, for files that the framework would write to `path` in every trial.

    The path is below the trial's directory; for a URI, it is the URI with the trial's ID appended. `path` itself is
    returned if it contains the trial's ID, or is in the trial's directory or in the trial's own temporary folder.

    Args:
        path: a path or a URI.
        option: the user's option that set `path`; a warning names it if the path is replaced. None for no warning.
    """
    trial, absolute = get_trial(), Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100 - links need not be followed
    # With isolation="thread", all trials share the folder for temporary files, so it is no trial's own folder.
    own_folders = [trial.directory, *([Path(tempfile.gettempdir())] if get_process_session() is not None else ())]
    part = r"\d" if trial.id.isdigit() else r"[^\W_]"  # so that run-100001 does not contain ID 00001
    has_id = re.search(f"(?<!{part}){re.escape(trial.id)}(?!{part})", path)
    if has_id or any(absolute.is_relative_to(folder) for folder in own_folders):
        return path
    if "://" in path:
        return f"{path.rstrip('/')}/{trial.id}"
    root = Path.cwd() if absolute.is_relative_to(Path.cwd()) else Path(absolute.anchor)
    moved = str(trial.directory / absolute.relative_to(root))
    if option is not None:
        change = f"this trial writes to {moved} instead of {path}, where other trials would also write"
        _log.warning("%s: %s; to choose a path, include pt.get_trial().id in it", option, change)
    return moved


def find_sibling_callbacks(callback: object) -> Sequence[object]:
    """Find in the callers' frames the list that contains `callback`, since Keras and XGBoost do not pass it."""
    frame = sys._getframe(1).f_back  # noqa: SLF001 - the frames lead to the calling object
    while frame is not None:
        callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
        if isinstance(callbacks, list | tuple) and any(other is callback for other in callbacks):
            return callbacks
        frame = frame.f_back
    return ()


def missing_extra_error(error: ModuleNotFoundError, extra: str, *modules: str) -> ImportError:
    """Return an error that names the extra's install command; return `error` itself if another module is missing."""
    if (error.name or "").partition(".")[0] not in (modules or (extra,)):
        return error
    install = f"pip install 'prefect-tune[{extra}]'"
    return ImportError(f"prefect_tune.integrations.{extra}: {error}. {install}", name=error.name)
