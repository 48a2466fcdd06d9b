"""Hold SIGTERM and Ctrl-C back from the main thread while searches run in other threads, until these have saved.

Python calls signal handlers in the main thread, and lets no other thread install one. A search in another thread would
therefore miss each signal: the default of SIGTERM ends the process at once, and after Ctrl-C the main thread leaves
while the trials train. So, while a search runs outside of the main thread:

    signal ──► a handler in C, which stores the signal's number, and calls no other handler
           ──► the thread "signals" reads it, and tells the searches, each of which has its trials save and end
           ──► all have ended: the handlers of before are back, and the process sends itself the signal again

The handlers of Prefect, asyncio and the script stay in place, and are called after the save, as they are after that of
a search in the main thread. It may be blocked in C code meanwhile.

The handler is `l64a` of the C library, which writes its argument, in base 64, into a buffer of its own, and nothing
else: a signal may arrive in any thread, also in one that has only begun and is none of Python's yet. (There the
handler of `faulthandler` writes nothing, or, with `all_threads`, reads threads that end at that moment, and crashes.)
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
_PERIOD_SECONDS = 0.1
"""How often the number is read, and the handler installed again: what arrives within one period is one signal."""
_STATES_SECONDS = 1.0
"""How long the runs around a search have to set their states before SIGTERM ends the process."""

# The handlers in C: those of Python's `signal.signal` are set in the main thread only.
_get_handler = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(("PyOS_getsig", ctypes.pythonapi))
_set_handler = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(("PyOS_setsig", ctypes.pythonapi))
_store = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_long)(("l64a", ctypes.CDLL(None)))
_STORE_ADDRESS = ctypes.cast(_store, ctypes.c_void_p).value
_NO_SIGNAL = 1
_stored = ctypes.c_char.from_address(_store(_NO_SIGNAL))


def _letter_of(number: int) -> bytes:
    _store(number)
    return _stored.value


_LETTERS = {_letter_of(number): number for number in _SIGNALS}
_IDLE_LETTER = _letter_of(_NO_SIGNAL)


def _take_stored() -> signal.Signals | None:
    """Return the signal that has arrived since the last call; None if there was none."""
    if (letter := _stored.value) == _IDLE_LETTER:
        return None
    _store(_NO_SIGNAL)
    return _LETTERS.get(letter)


class _Hold:
    """One signal, held back from its handler while it `is_held`."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self.is_held = False
        self._handler_before: int | None = None

    def renew(self) -> None:
        """Hold the signal, also if a handler was installed meanwhile, such as that of another flow."""
        if self.number == signal.SIGINT and not callable(signal.getsignal(signal.SIGINT)):
            self.end()  # as it is ignored: in a kernel without a running cell, in the background of a shell
        elif (handler := _get_handler(self.number)) != _STORE_ADDRESS:
            self._handler_before, self.is_held = handler, True
            _set_handler(self.number, _STORE_ADDRESS)

    def end(self) -> None:
        """Give the signal back to its handler."""
        if self.is_held and _get_handler(self.number) == _STORE_ADDRESS:
            _set_handler(self.number, self._handler_before)
        self.is_held = False


@dataclass(eq=False)
class _Call:
    """A call that ends by signals; one in the main thread takes part while other threads run one."""

    signals: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    is_nested: bool = field(default_factory=lambda: bool(FlowRunContext.get() or TaskRunContext.get()))
    is_signalled: bool = False
    """Whether it got a signal."""
    has_trials: bool = False
    """Whether its trials run, and save on a signal."""


class _HeldSignals:
    """The calls of this process, by thread, and the signals that are held back for them."""

    def __init__(self) -> None:
        self._holds = [_Hold(number) for number in _SIGNALS]
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._received: list[signal.Signals] = []
        self._is_nested = self._is_main_signalled = False
        self._over = threading.Event()
        """Set unless signals are held: the thread "signals" then ends."""
        self._over.set()

    def call_here(self) -> _Call | None:
        return self._calls.get(threading.get_ident())

    def enter(self) -> _Call:
        with self._changed:
            call = self._calls[threading.get_ident()] = _Call()
            for number in self._received:
                self._signal(call, number)
            if not _is_main() and self._over.is_set():
                self._begin()
            return call

    def leave(self) -> None:
        """Forget the call of this thread; after a signal wait for the other threads, and hand the signal over."""
        with self._changed:
            call = self._calls.pop(threading.get_ident())
            if not _is_main() and not self._count_threads():
                self._hand_over()
            self._changed.notify_all()
            if call.is_signalled:
                self._changed.wait_for(lambda: not self._count_threads())

    def before_fork(self) -> None:
        """Keep signals to the child waiting until it has its own handlers: those of the parent tell the parent."""
        is_held = any(hold.is_held for hold in self._holds)
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS if is_held else ())

    def after_fork_in_child(self) -> None:
        """Forget the calls, which the child does not have, and give signals to the handlers of before."""
        for hold in self._holds:
            hold.end()
        self._reset()
        _unblock()

    def _begin(self) -> None:
        self._over = threading.Event()
        _take_stored()
        for hold in self._holds:
            hold.renew()
        threading.Thread(target=self._watch, args=(self._over,), name="signals", daemon=True).start()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(_PERIOD_SECONDS):
            with self._changed:
                if not over.is_set() and (number := _take_stored()) is not None:
                    self._receive(number)
                for hold in self._holds if not over.is_set() else ():
                    hold.renew()

    def _receive(self, number: signal.Signals) -> None:
        if number not in self._received:
            self._received.append(number)
        if all(call.is_signalled and not call.has_trials for call in self._calls.values()):
            self._hand_over()  # no trial runs any more: what still runs does not keep the process from its end
            return
        for thread, call in self._calls.items():
            self._is_main_signalled |= thread == threading.main_thread().ident
            self._is_nested |= call.is_nested
            self._signal(call, number)

    @staticmethod
    def _signal(call: _Call, number: signal.Signals) -> None:
        call.is_signalled = True
        call.signals.put(number)

    def _hand_over(self) -> None:
        """End the holds, and send the process the signals that it has received, unless the main thread raises them."""
        self._over.set()
        for hold in self._holds:
            hold.end()
        if (last := _take_stored()) is not None and last not in self._received:
            self._received.append(last)  # since the thread "signals" has read the number
        numbers, self._received = self._received, []
        is_main_signalled, self._is_main_signalled = self._is_main_signalled, False
        is_nested, self._is_nested = self._is_nested, False
        if is_main_signalled:
            return
        ends = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
        if ends and is_nested:
            threading.Timer(_STATES_SECONDS, _send, [numbers]).start()
        else:
            _send(numbers)

    def _count_threads(self) -> int:
        return sum(thread != threading.main_thread().ident for thread in self._calls)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _send(numbers: Collection[signal.Signals]) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


_forking = threading.local()
_held_signals = _HeldSignals()
os.register_at_fork(
    before=_held_signals.before_fork,
    after_in_parent=_unblock,
    after_in_child=_held_signals.after_fork_in_child,
)


@contextmanager
def holding_signals() -> Iterator[None]:
    """Hold signals back from the main thread during a call outside of it; they are raised by `raise_held_signal`.

    After such a signal, exiting waits until the calls of all threads have ended, and sends the process the signal.
    """
    if _is_main() or _held_signals.call_here() is not None:
        yield
        return
    _held_signals.enter()
    try:
        yield
    finally:
        _held_signals.leave()


@contextmanager
def saving_on_signals() -> Iterator[None]:
    """Hold signals back while trials run that save on a signal. In the main thread, for calls of other threads."""
    outer = _held_signals.call_here()
    call = outer or _held_signals.enter()
    call.has_trials = True
    try:
        yield
    finally:
        call.has_trials = False
        if outer is None:
            _held_signals.leave()


def raise_held_signal() -> None:
    """Raise a signal that was held back for this thread, once, as Python and Prefect raise it in the main thread.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        TerminationSignal: SIGTERM.
    """
    call = _held_signals.call_here()
    if call is None or call.signals.empty():
        return
    number = call.signals.get()
    raise KeyboardInterrupt if number == signal.SIGINT else TerminationSignal(number)
