"""The error for a missing library that an extra installs."""

from __future__ import annotations


def missing(error: ModuleNotFoundError, extra: str, *modules: str) -> ImportError:
    """Return the error to raise: one that says how to install the extra, or `error` if another module is missing."""
    if (error.name or "").partition(".")[0] not in (modules or (extra,)):
        return error
    install = f"pip install 'prefect-tune[{extra}]'"
    return ImportError(f"prefect_tune.integrations.{extra}: {error}. {install}", name=error.name)
