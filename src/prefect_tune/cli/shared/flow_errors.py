"""Errors of a flow that a command runs in this process, each printed as one line."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from prefect_tune.core.errors import InvalidInput, TuneError

_INTERRUPTED = 130


@contextmanager
def short_errors(when_interrupted: str) -> Iterator[None]:
    """Print Prefect's errors as one line, and an interrupt, Ctrl-C or SIGTERM, as `when_interrupted`."""
    import httpx
    from prefect.exceptions import PrefectException
    from pydantic import ValidationError

    from prefect_tune.prefect_api.flow_with_server import has_begun

    # During a flow Prefect handles SIGTERM; when the run has ended, it sends the signal again, to this handler.
    terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _without_traces():
            yield
    except KeyboardInterrupt as interrupt:
        advice = when_interrupted if has_begun(interrupt) else "stopped before it began; nothing was started"
        print(advice, file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    except (httpx.HTTPError, PrefectException) as error:
        raise TuneError(f"Prefect: {_in_one_line(error)}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        raise InvalidInput(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
    except RuntimeError as error:
        if "API" in str(error):  # what Prefect raises when no server answers
            raise TuneError(f"Prefect: {_in_one_line(error)}") from error
        raise
    finally:
        signal.signal(signal.SIGTERM, terminate)


@contextmanager
def _without_traces() -> Iterator[None]:
    """Keep each `TuneError` out of Prefect's log: `main` prints the message, and the state has it."""
    from prefect_tune.prefect_api.flow_with_server import is_without_trace

    def says_more(record: logging.LogRecord) -> bool:
        return not is_without_trace(record)

    logger = logging.getLogger("prefect.flow_runs")
    logger.addFilter(says_more)
    try:
        yield
    finally:
        logger.removeFilter(says_more)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
