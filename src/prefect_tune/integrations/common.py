"""Shared by the callbacks of all frameworks: what to install, select metrics, report a step, stop at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.runtime.ranks import START_RANKS
from prefect_tune.runtime.trainable import TrialOver, get_checkpoint, get_trial, report_step

MetricNames: TypeAlias = str | Sequence[str] | Mapping[str, str] | None
"""A metric, several, `{name here: name there}`, or None for all."""


def chosen(metrics: Mapping[str, object], wanted: MetricNames) -> Mapping[str, object]:
    """Return the wanted ones of a framework's metrics.

    Raises:
        BadMetric: one is not among them.
    """
    if wanted is None:
        return dict(metrics)
    names = _by_name_here(wanted)
    if absent := [name for name in names.values() if name not in metrics]:
        raise BadMetric(f"expected metrics {absent}, found only {sorted(metrics)}")
    return {here: metrics[there] for here, there in names.items()}


def goes_on_after(metrics: Mapping[str, object], save: Callable[[str], None]) -> bool:
    """Report a step, with a checkpoint if one is due; return False if the trial is over and the loop must end.

    Code after the loop runs as after early stopping; its reports are ignored.
    """
    try:
        report_step(metrics, save)
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


def _by_name_here(wanted: str | Sequence[str] | Mapping[str, str]) -> Mapping[str, str]:
    if isinstance(wanted, str):
        return {wanted: wanted}
    return wanted if isinstance(wanted, Mapping) else {name: name for name in wanted}


def missing(error: ModuleNotFoundError, extra: str, *modules: str) -> ImportError:
    """Return the error to raise: one that says how to install the extra, or `error` if another module is missing."""
    if (error.name or "").partition(".")[0] not in (modules or (extra,)):
        return error
    install = f"pip install 'prefect-tune[{extra}]'"
    return ImportError(f"prefect_tune.integrations.{extra}: {error}. {install}", name=error.name)
