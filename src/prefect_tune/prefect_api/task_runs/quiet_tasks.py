"""Keep Prefect's messages about the ends of inner tasks, and its events that were not sent, out of a search's log.

To ask upstream: an option of a task that leaves out the message of its end; that a service which fails to process an
item logs no `repr` of it: that of an event has 14 lines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

RUN_TRIAL = "run-trial"
"""The name of the task of an attempt: the log of its search says how it ended."""
_ENGINE = "task_engine"
_ENDED = "Finished in state"
_RETURNED_FAILED = "Task run failed with state"
_SERVICES = "prefect._internal.concurrency"
_NOT_SENT = "Service %r failed to process item %r"
_NOT_SENT_AGAIN_SECONDS = 60.0
_is_quiet: ContextVar[bool] = ContextVar("prefect_tune_is_quiet", default=False)


@contextmanager
def quiet_inner_tasks() -> Iterator[None]:
    """Leave out what Prefect logs about the ends of tasks in this context, except failures, and of attempts.

    An item that one of Prefect's services could not send, such as an event while the server is down, is one line
    without the item, at most once a minute. At the log level DEBUG nothing is left out.
    """
    logging.getLogger(_SERVICES).addFilter(_without_item)  # adding it again has no effect
    logging.getLogger("prefect.task_runs").addFilter(_says_more)
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


_last_logged = {"seconds": -_NOT_SENT_AGAIN_SECONDS}


def _without_item(record: logging.LogRecord) -> bool:
    """Replace the item in the message of a service that could not send it; drop the message within the same minute."""
    if record.msg != _NOT_SENT or not record.args or logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
        return True
    service, now = next(iter(record.args)), time.monotonic()
    if now - _last_logged["seconds"] < _NOT_SENT_AGAIN_SECONDS:
        return False
    _last_logged["seconds"] = now
    record.msg = "Prefect's %s could not send an item: its server may be down. Training continues."
    record.args = (service,)
    return True
