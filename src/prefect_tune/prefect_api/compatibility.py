"""The error of a guard: this Prefect lacks something that the package needs and Prefect does not promise."""

from __future__ import annotations

import prefect

from prefect_tune.core.errors import TuneError

OLDEST_TESTED = "3.8.0"
"""The oldest release that `make test-prefect` runs the tests with: the lower bound in pyproject.toml."""


def prefect_changed(what: str) -> TuneError:
    """Return the error that `what` of Prefect is not as it was, with the next move."""
    return TuneError(
        f"Prefect {prefect.__version__} has changed: {what}. This release of prefect-tune is tested with Prefect "
        f"{OLDEST_TESTED} up to the newest 3.x at its release: install one of these, or a newer prefect-tune"
    )
