"""Keep Prefect's messages about the ends of inner tasks out of the log: a search runs many of them.

To ask upstream: an option of a task that leaves out the message of its end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

RUN_TRIAL = "run-trial"
"""The name of the task of an attempt: the log of its search says how it ended."""
_ENGINE = "task_engine"
_ENDED = "Finished in state"
_RETURNED_FAILED = "Task run failed with state"
_is_quiet: ContextVar[bool] = ContextVar("prefect_tune_is_quiet", default=False)


@contextmanager
def quiet_inner_tasks() -> Iterator[None]:
    """Leave out what Prefect logs about the ends of tasks in this context, except failures, and of attempts.

    At the log level DEBUG nothing is left out.
    """
    logging.getLogger("prefect.task_runs").addFilter(_says_more)  # adding it again has no effect
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


def _says_more(record: logging.LogRecord) -> bool:
    """Whether a record says more than that a task has ended. Messages that Prefect words otherwise are kept."""
    if record.module != _ENGINE or logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
        return True
    message, is_attempt = str(record.msg), getattr(record, "task_name", "") == RUN_TRIAL
    if message.startswith(_ENDED):
        return not (is_attempt or (_is_quiet.get() and record.levelno <= logging.INFO))
    return not (is_attempt and message.startswith(_RETURNED_FAILED))
