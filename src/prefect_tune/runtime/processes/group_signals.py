"""Ignore SIGTERM and SIGINT in a trial's process, but not in the processes that it forks or executes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

_GROUP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_handlers_before: dict[int, Any] = {}
_forking = threading.local()  # the signal mask before the fork, of each thread that forks


def ignore_group_signals() -> None:
    """Ignore SIGTERM and SIGINT, which SLURM and terminals send to the whole group, so that the trial can still save.

    A handler, unlike SIG_IGN, is not inherited by programs that the trainable executes. Forked children get the
    earlier handlers back, so that `Process.terminate()` ends them.
    """
    global _handlers_before  # noqa: PLW0603 - handlers are global too, and functions called at a fork take no arguments
    if not _handlers_before:
        _handlers_before = {number: signal.signal(number, _ignore) for number in _GROUP_SIGNALS}
        os.register_at_fork(
            before=_block_ignored_signals,
            after_in_parent=_unblock_signals,
            after_in_child=_restore_handlers,
        )


def handlers_in_fork(handlers: Mapping[int, Any]) -> Mapping[int, Any]:
    """Return which signal handlers a fork of a process with these ones has."""
    return {each: _handlers_before.get(each, own) if own is _ignore else own for each, own in handlers.items()}


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Ignore a signal to the group: the supervisor asks the trial to save and end."""


def _block_ignored_signals() -> None:
    """Block the signals around the fork: one that reaches the child before it has its handlers back would be lost."""
    ignored = [number for number in _GROUP_SIGNALS if signal.getsignal(number) is _ignore]
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore_handlers() -> None:
    """Restore the earlier handlers in a forked child; those that the trainable installed are inherited."""
    for number, handler in _handlers_before.items():
        if signal.getsignal(number) is _ignore:
            signal.signal(number, handler)
    _unblock_signals()
