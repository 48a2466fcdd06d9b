"""Shared by the callbacks of all frameworks: what to install, select metrics, report a step, paths of one trial."""

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
from prefect_tune.runtime.ranks import START_RANKS
from prefect_tune.runtime.trainable import TrialOver, get_checkpoint, get_trial, report_step, session_of_process

_log = logging.getLogger("prefect_tune")

MetricNames: TypeAlias = str | Sequence[str] | Mapping[str, str] | None
"""A metric, several, `{name here: name there}`, or None for all."""


def chosen(metrics: Mapping[str, object], wanted: MetricNames, *, may_lack: bool = False) -> Mapping[str, object]:
    """Return the wanted ones of a framework's metrics; with `may_lack` those of them that are there.

    Raises:
        BadMetric: one is not among them.
    """
    if wanted is None:
        return dict(metrics)
    names = [wanted] if isinstance(wanted, str) else wanted
    by_name_here = names if isinstance(names, Mapping) else {name: name for name in names}
    absent = [name for name in by_name_here.values() if name not in metrics]
    if absent and not may_lack:
        raise BadMetric(f"expected metrics {absent}, found only {sorted(metrics)}")
    return {here: metrics[there] for here, there in by_name_here.items() if there in metrics}


def goes_on_after(metrics: Mapping[str, object], save: Callable[[str], None], *, may_lack: bool = False) -> bool:
    """Report a step, with a checkpoint if one is due; return False if the trial is over and the loop must end.

    Code after the loop runs as after early stopping; its reports are ignored. With `may_lack` the report may lack the
    metric of the search: no validation, which measures it, has ended yet.
    """
    try:
        report_step(metrics, save, may_lack=may_lack)
    except TrialOver:
        return False
    return True


def require_ranks(framework: str, world_size: int) -> int:
    """Return the rank of this process.

    Raises:
        InvalidInput: the framework trains with another number of processes than the trial.
    """
    trial = get_trial()
    if trial.world_size != world_size:
        raise InvalidInput(
            f"{framework}: expected {trial.world_size} process{'' if trial.world_size == 1 else 'es'}, as the trial "
            f"has, found {world_size}. {START_RANKS}"
        )
    return trial.rank


def restored_directory() -> Path | None:
    """Return the local directory of the checkpoint to resume from; None on a fresh start."""
    checkpoint = get_checkpoint()
    return Path(checkpoint.path) if checkpoint is not None else None


def path_of_trial(path: str, option: str | None = None) -> str:
    """Return where this trial writes what its framework is to write to `path`, which other trials may have as well.

    That is below the trial's directory. A path stays as it is if it contains the trial's ID, or is in the trial's
    directory or in the folder for its temporary files. A URI gets the trial's ID as its last part.

    Args:
        path: a path or a URI.
        option: named in a warning that the path is another one than the user chose.
    """
    trial, place = get_trial(), Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100 - links need not be followed
    # With isolation="thread" the folder for temporary files is that of all trials.
    own = [trial.directory, *([Path(tempfile.gettempdir())] if session_of_process() is not None else ())]
    part = r"\d" if trial.id.isdigit() else r"[^\W_]"  # 00001 is not in run-100001
    if re.search(f"(?<!{part}){re.escape(trial.id)}(?!{part})", path) or any(
        place.is_relative_to(folder) for folder in own
    ):
        return path
    if "://" in path:
        return f"{path.rstrip('/')}/{trial.id}"
    root = Path.cwd() if place.is_relative_to(Path.cwd()) else Path(place.anchor)
    moved = str(trial.directory / place.relative_to(root))
    if option is not None:
        _log.warning(
            "%s: this trial writes to %s instead of %s, where other trials would write too; to choose a path, put "
            "pt.get_trial().id into it",
            option,
            moved,
            path,
        )
    return moved


def callbacks_beside(callback: object) -> Sequence[object]:
    """Return all callbacks of the list whose hook is being called: Keras and XGBoost do not pass it to a callback."""
    frame = sys._getframe(1).f_back  # noqa: SLF001 - the way to the object that calls
    while frame is not None:
        callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
        if isinstance(callbacks, list | tuple) and any(each is callback for each in callbacks):
            return callbacks
        frame = frame.f_back
    return ()


def missing(error: ModuleNotFoundError, extra: str, *modules: str) -> ImportError:
    """Return the error to raise: one that says how to install the extra, or `error` if another module is missing."""
    if (error.name or "").partition(".")[0] not in (modules or (extra,)):
        return error
    install = f"pip install 'prefect-tune[{extra}]'"
    return ImportError(f"prefect_tune.integrations.{extra}: {error}. {install}", name=error.name)
