"""Every sampler and every pruner of Optuna as a search and a scheduler that a resume continues exactly."""

from __future__ import annotations

try:
    import optuna as _optuna  # noqa: F401 - only to say what to install where it is missing
except ModuleNotFoundError as error:
    if error.name != "optuna":
        raise
    raise ImportError(
        "OptunaSearch and OptunaPruner need Optuna 5: pip install 'prefect-tune[optuna]'", name="optuna"
    ) from error

from prefect_tune.integrations.optuna.search import Constraints, OptunaPruner, OptunaSearch

__all__ = ["Constraints", "OptunaPruner", "OptunaSearch"]
