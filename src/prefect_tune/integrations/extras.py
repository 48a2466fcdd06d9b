"""What is said where a library is missing that an extra brings."""

from __future__ import annotations

__all__ = ["missing"]


def missing(error: ModuleNotFoundError, extra: str, *modules: str) -> ImportError:
    """Return what to raise for `error`: how to install the extra, or the error itself if something else is missing."""
    if (error.name or "").partition(".")[0] not in (modules or (extra,)):
        return error
    install = f"pip install 'prefect-tune[{extra}]'"
    return ImportError(f"prefect_tune.integrations.{extra}: {error}. {install}", name=error.name)
