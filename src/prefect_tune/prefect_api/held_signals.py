"""While searches run in other threads, hold SIGTERM and Ctrl-C back from the main thread until the trials have saved.

Python installs and calls signal handlers only in the main thread. A search in another thread would therefore miss all
signals: by default, SIGTERM ends the process at once, and after Ctrl-C the main thread exits while the trials train.
So, while a search runs outside of the main thread:

    signal ──► a handler in C stores the signal's number, and calls no other handler
           ──► the thread "signals" reads the number and notifies the searches, whose trials save and end
           ──► all searches have ended: the previous handlers are restored, and the process sends itself the signal

The handlers of Prefect, asyncio and the script are called only after the save. The searches are notified even while the
main thread is blocked in C code.

The handler in C is the C library's function `l64a`. It only writes its argument, in base 64, into its own buffer. So it
is safe in any thread that receives a signal, even in a new thread that Python does not know yet. (The handler of
`faulthandler` would write nothing in such a thread; with `all_threads`, it reads threads that are ending, and crashes.)
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import TerminationSignal

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_INTERVAL_SECONDS = 0.1
"""The time between two checks of the number and the handlers; of several signals in between, only the last is seen."""
_STATE_TIMEOUT_SECONDS = 1.0
"""The delay before SIGTERM ends the process, in which the Prefect runs that called a search can set their states."""

# CPython's own functions that get and set a handler in any thread; `signal.signal` works only in the main thread.
_get_handler = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(("PyOS_getsig", ctypes.pythonapi))
_set_handler = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(("PyOS_setsig", ctypes.pythonapi))
_store_signal = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_long)(("l64a", ctypes.CDLL(None)))
_HANDLER_ADDRESS = ctypes.cast(_store_signal, ctypes.c_void_p).value
_NO_SIGNAL = 1
_signal_buffer = ctypes.c_char.from_address(_store_signal(_NO_SIGNAL))


def _encode_signal(number: int) -> bytes:
    _store_signal(number)
    return _signal_buffer.value


_SIGNALS_BY_LETTER = {_encode_signal(number): number for number in _SIGNALS}
_IDLE_LETTER = _encode_signal(_NO_SIGNAL)


def _take_signal() -> signal.Signals | None:
    """Return and clear the signal that has arrived since the last call; None if there was none."""
    if (letter := _signal_buffer.value) == _IDLE_LETTER:
        return None
    _store_signal(_NO_SIGNAL)
    return _SIGNALS_BY_LETTER.get(letter)


class _HoldableSignal:
    """A signal that can be held back from its handler."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self.is_held = False
        self._handler_before: int | None = None

    def install_handler(self) -> None:
        """Hold the signal; hold it again if other code, such as another flow, has installed its own handler."""
        if self.number == signal.SIGINT and not callable(signal.getsignal(signal.SIGINT)):
            self.restore_handler()  # Ctrl-C is already ignored, as in a notebook between cells or in a background job
        elif (handler := _get_handler(self.number)) != _HANDLER_ADDRESS:
            self._handler_before, self.is_held = handler, True
            _set_handler(self.number, _HANDLER_ADDRESS)

    def restore_handler(self) -> None:
        """Give the signal back to its handler."""
        if self.is_held and _get_handler(self.number) == _HANDLER_ADDRESS:
            _set_handler(self.number, self._handler_before)
        self.is_held = False


@dataclass(eq=False)
class _ActiveCall:
    """A call, such as a search, that ends on a signal. In the main thread, too, it receives the signals held back."""

    signals: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    is_within_run: bool = field(default_factory=lambda: bool(FlowRunContext.get() or TaskRunContext.get()))
    is_signalled: bool = False
    """Whether the call has received a signal."""
    has_trials: bool = False
    """Whether trials of the call are running; they save on a signal."""


class _SignalHolder:
    """Tracks this process's calls, by thread, and holds signals back until the calls outside the main thread end."""

    def __init__(self) -> None:
        self._holdable_signals = [_HoldableSignal(number) for number in _SIGNALS]
        self._reset_state()

    def _reset_state(self) -> None:
        self._changed = threading.Condition()
        self._calls: dict[int, _ActiveCall] = {}
        self._received: list[signal.Signals] = []
        self._is_any_within_run = self._is_main_signalled = False
        self._stopped = threading.Event()
        """Set while no signal is held. Setting this event ends the thread "signals"."""
        self._stopped.set()

    def current_call(self) -> _ActiveCall | None:
        return self._calls.get(threading.get_ident())

    def begin_call(self) -> _ActiveCall:
        with self._changed:
            call = self._calls[threading.get_ident()] = _ActiveCall()
            for number in self._received:
                self._notify_call(call, number)
            if not _is_main_thread() and self._stopped.is_set():
                self._stopped = threading.Event()
                _take_signal()
                for holdable in self._holdable_signals:
                    holdable.install_handler()
                threading.Thread(target=self._poll_signals, args=(self._stopped,), name="signals", daemon=True).start()
            return call

    def end_call(self) -> None:
        """Remove this thread's call. If it received a signal, wait until no call outside the main thread is left."""
        with self._changed:
            call = self._calls.pop(threading.get_ident())
            if not _is_main_thread() and not self._count_background_calls():
                self._release_signals()
            self._changed.notify_all()
            if call.is_signalled:
                self._changed.wait_for(lambda: not self._count_background_calls())

    def before_fork(self) -> None:
        """Block signals until the child has restored its handlers, since the inherited C handler would lose signals."""
        is_held = any(holdable.is_held for holdable in self._holdable_signals)
        _fork_state.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS if is_held else ())

    def after_fork_in_child(self) -> None:
        """Remove the calls, whose threads do not exist in the child, and restore the previous handlers."""
        for holdable in self._holdable_signals:
            holdable.restore_handler()
        self._reset_state()
        _restore_signal_mask()

    def _poll_signals(self, stopped: threading.Event) -> None:
        while not stopped.wait(_POLL_INTERVAL_SECONDS):
            with self._changed:
                if not stopped.is_set() and (number := _take_signal()) is not None:
                    self._handle_signal(number)
                for holdable in self._holdable_signals if not stopped.is_set() else ():
                    holdable.install_handler()

    def _handle_signal(self, number: signal.Signals) -> None:
        if number not in self._received:
            self._received.append(number)
        if all(call.is_signalled and not call.has_trials for call in self._calls.values()):
            self._release_signals()  # no running trial has to save, so the process may end at once
            return
        for thread, call in self._calls.items():
            self._is_main_signalled |= thread == threading.main_thread().ident
            self._is_any_within_run |= call.is_within_run
            self._notify_call(call, number)

    @staticmethod
    def _notify_call(call: _ActiveCall, number: signal.Signals) -> None:
        call.is_signalled = True
        call.signals.put(number)

    def _release_signals(self) -> None:
        """Restore the handlers. Resend the received signals, unless a call in the main thread raises them."""
        self._stopped.set()
        for holdable in self._holdable_signals:
            holdable.restore_handler()
        if (latest := _take_signal()) is not None and latest not in self._received:
            self._received.append(latest)  # this signal arrived after the last poll
        numbers, self._received = self._received, []
        is_main_signalled, self._is_main_signalled = self._is_main_signalled, False
        is_within_run, self._is_any_within_run = self._is_any_within_run, False
        if is_main_signalled:
            return
        is_fatal = any(signal.getsignal(number) is signal.SIG_DFL for number in numbers)
        if is_fatal and is_within_run:
            threading.Timer(_STATE_TIMEOUT_SECONDS, _send_signals, [numbers]).start()
        else:
            _send_signals(numbers)

    def _count_background_calls(self) -> int:
        return sum(thread != threading.main_thread().ident for thread in self._calls)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _send_signals(numbers: Collection[signal.Signals]) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def _restore_signal_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork_state.mask)


_fork_state = threading.local()
_signal_holder = _SignalHolder()
os.register_at_fork(
    before=_signal_holder.before_fork,
    after_in_parent=_restore_signal_mask,
    after_in_child=_signal_holder.after_fork_in_child,
)


@contextmanager
def holding_signals() -> Iterator[None]:
    """Unless this is the main thread, hold signals back from that thread; `raise_held_signal` raises them in this one.

    After a signal, the `with` block ends when all calls outside the main thread have ended; then the signal is resent.
    """
    if _is_main_thread() or _signal_holder.current_call() is not None:
        yield
        return
    _signal_holder.begin_call()
    try:
        yield
    finally:
        _signal_holder.end_call()


@contextmanager
def saving_on_signals() -> Iterator[None]:
    """Hold signals back during this `with` block, whose trials save on a signal.

    In the main thread, the block holds no signals back, but receives those that calls in other threads hold back.
    """
    outer = _signal_holder.current_call()
    call = outer or _signal_holder.begin_call()
    call.has_trials = True
    try:
        yield
    finally:
        call.has_trials = False
        if outer is None:
            _signal_holder.end_call()


def raise_held_signal() -> None:
    """Raise the next signal held back for this thread, if any, as the exception that it raises in the main thread.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        TerminationSignal: SIGTERM.
    """
    call = _signal_holder.current_call()
    if call is None or call.signals.empty():
        return
    number = call.signals.get()
    raise KeyboardInterrupt if number == signal.SIGINT else TerminationSignal(number)
