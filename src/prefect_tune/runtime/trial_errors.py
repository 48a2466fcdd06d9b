"""Convert an exception of a trainable to the message that ends its attempt, with cause, advice and traceback."""

from __future__ import annotations

import errno
import pickle
import resource
import signal
import subprocess
import traceback

from prefect_tune.core.errors import BadMetric, BadStop
from prefect_tune.core.journal_events import AttemptEnded, Cause
from prefect_tune.core.messages.process_messages import TrainingEnded
from prefect_tune.core.reasons import Reason, find_code_location, make_reason
from prefect_tune.runtime.message_stream import MalformedMessage

_EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals by which other processes end a trial's process, or a launcher that the trial has started."""
_INTERNAL_MODULES = ("prefect_tune.runtime.", "importlib")


class TrainableLoadError(Exception):
    """The trainable cannot be imported; another attempt would fail too."""


def failure_message(error: BaseException, trial: str) -> TrainingEnded:
    """Return the message that ends an attempt of `trial`, in whose process `error` was raised."""
    if isinstance(error, BadStop):  # the error is in `stop`, so the traceback of the training would mislead
        reason = make_reason("raised", text=str(error))
    else:
        first = error.__traceback__  # skip the frames of prefect-tune that come before the trainable's first frame
        while first is not None and first.tb_frame.f_globals.get("__name__", "").startswith(_INTERNAL_MODULES):
            first = first.tb_next
        shown = "".join(traceback.format_exception(type(error), error, first or error.__traceback__))
        text, name = format_error_text(error), None if isinstance(error, TrainableLoadError) else type(error).__name__
        reason = make_reason(
            "raised",
            type=name if text else None,
            text=text or name,
            advice=_make_advice(error),
            location=find_code_location(shown, is_newest_first=False),
            traceback=shown,
        )
    return TrainingEnded(outcome=AttemptEnded(trial=trial, cause=_classify_error(error), reason=reason), raised=True)


def _make_advice(error: BaseException) -> Reason | None:
    """Return advice on an error that is typical of a trial's process; None for other errors."""
    if type(error).__qualname__ == "BdbQuit":
        return make_reason("advice-no-terminal")
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if was_raised_by_signal_handler(error):
        return make_reason("advice-signal-handler")
    if isinstance(error, SystemExit):
        return make_reason("advice-exit")
    if isinstance(error, MemoryError) and limit_bytes != resource.RLIM_INFINITY:
        return make_reason("advice-address-space", limit_bytes=limit_bytes)
    if isinstance(error, AttributeError) and isinstance(error.obj, dict) and error.name in error.obj:
        return make_reason("advice-config", name=error.name)
    if isinstance(error, pickle.PicklingError | AttributeError) and "__main__" in format_error_text(error):
        return make_reason("advice-main-module")
    return None


def format_error_text(error: BaseException) -> str:
    """Return an error's text, even if its `__str__` raises."""
    try:
        return str(error)
    except Exception as str_error:  # noqa: BLE001 - a user's `__str__` may raise; the failure is reported anyway
        return f"(its text is not available: str() raised {type(str_error).__name__})"


def was_raised_by_signal_handler(error: BaseException) -> bool:
    """Return whether a handler of an external signal raised `error`; if so, training did not finish."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in _EXTERNAL_SIGNALS}
    return any(frame.f_code in handlers for frame, _line in traceback.walk_tb(error.__traceback__))


def _classify_error(error: BaseException) -> Cause:
    match error:
        case TrainableLoadError() | ImportError():
            return Cause.IMPORT
        case OSError(errno=errno.ENOSPC | errno.EDQUOT | errno.EIO) | MalformedMessage():
            return Cause.MACHINE
        case subprocess.CalledProcessError(returncode=code) if -code in _EXTERNAL_SIGNALS:
            return Cause.MACHINE
        case SystemExit() if was_raised_by_signal_handler(error):
            return Cause.MACHINE
        case MemoryError():
            return Cause.OUT_OF_MEMORY
        case BadMetric():
            return Cause.BAD_METRIC
        case BadStop():
            return Cause.BAD_STOP
        case _:
            return Cause.TRAINABLE
