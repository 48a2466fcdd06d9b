"""Signals to the whole process group: a trial's process ignores them, and what it forks does not."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["ignore_group_signals"]

_GROUP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_handlers_before: dict[signal.Signals, Any] = {}
_forking = threading.local()  # the signal mask before the fork, of each thread that forks


def ignore_group_signals() -> None:
    """A group-wide SIGTERM (SLURM, a terminal) must not end training before the supervisor has asked for the state.

    A handler, unlike SIG_IGN, is not inherited by what the trainable executes. What it forks has the handlers from
    before: `Process.terminate()` must end it.
    """
    global _handlers_before  # noqa: PLW0603 - of this process, as the handlers are; nothing is passed to those at a fork
    if not _handlers_before:
        _handlers_before = {number: signal.signal(number, _ignore) for number in _GROUP_SIGNALS}
        os.register_at_fork(
            before=_block_ignored_signals,
            after_in_parent=_unblock_signals,
            after_in_child=_restore_handlers,
        )


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal to the group in a trial's process."""


def _block_ignored_signals() -> None:
    """One that reaches the child before it has its handlers back would be lost: it waits until then."""
    ignored = [number for number in _GROUP_SIGNALS if signal.getsignal(number) is _ignore]
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore_handlers() -> None:
    """Handlers that the trainable has installed since are its own, and inherited like any others."""
    for number, handler in _handlers_before.items():
        if signal.getsignal(number) is _ignore:
            signal.signal(number, handler)
    _unblock_signals()
