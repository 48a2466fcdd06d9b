"""What an import does to forks of its process: trials train all the same, each in its own process if need be."""

from __future__ import annotations

import signal

import pytest

from tests.attempt.processes.modules import Module, Trains, different
from tests.fakes.trial_processes import LogRecorder

pytestmark = [pytest.mark.usefixtures("ours"), pytest.mark.timeout(120)]

LOCKED = "lock.acquire(), lock.release()"


IMPORTS = "import _thread, ctypes, os, resource, signal, sys, threading, time"


def measures(body: str, value: str = "1") -> str:
    return f"{IMPORTS}\n{body}\ndef measured(config):\n    {value}\n    return {{'x': config['x']}}\n"


IN_ITS_OWN_PROCESS = {
    "too few descriptors": (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (10, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
        "1",
        "cannot be forked",
    ),
    "memory that forks do not get": (
        (
            "import mmap\nmemory = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
            "memory[0] = 1\nmemory.madvise(mmap.MADV_DONTFORK)"
        ),
        "memory[0]",
        "a process that was forked after it ended by SIGSEGV before its first report",
    ),
    "a thread without a name": (
        (
            "lock = threading.Lock()\n"
            "def hold():\n    ctypes.CDLL(None).prctl(15, b'')\n    with lock: time.sleep(3600)\n"
            "_thread.start_new_thread(hold, ())\ntime.sleep(0.3)"
        ),
        f"os.getppid() and lock.locked() or ({LOCKED})",
        "started threads that still run: 1 thread of libraries, without names",
    ),
    "a thread that a later fork starts": (
        (
            "forks, lock = [], threading.Lock()\n"
            "def hold():\n    with lock: time.sleep(3600)\n"
            "def before():\n    forks.append(1)\n    if len(forks) == 3:\n"
            "        threading.Thread(target=hold, daemon=True, name='third').start()\n        time.sleep(0.1)\n"
            "os.register_at_fork(before=before)"
        ),
        LOCKED,
        "it started threads after its import: third",
    ),
    "blocked signals": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})",
        "1",
        "its import changed which signals are blocked: SIGUSR1",
    ),
    "forks that exit": (
        "os.register_at_fork(after_in_child=lambda: os._exit(3))",
        "1",
        "a fork of it ended before it could be inspected",
    ),
    "forks that take long": (
        "os.register_at_fork(after_in_child=lambda: time.sleep(2.5))",
        "1",
        "a fork of it takes 5 s: handlers of os.register_at_fork wait",
    ),
    "a child process": (
        "import subprocess\nchild = subprocess.Popen(['sleep', '3600'])",
        "1",
        "its import started processes that still run: sleep 3600 (",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("hazard", IN_ITS_OWN_PROCESS)
def test_trials_train_in_a_process_of_their_own_and_the_reason_is_logged_once(
    hazard: str, trains: Trains, module: Module, recorder: LogRecorder
) -> None:
    body, value, why = IN_ITS_OWN_PROCESS[hazard]
    module.write(measures(body, value))
    found = trains(2)
    assert ([each["x"] for each in found], different(found)) == ([0, 1], 2)
    reasons = [each for each in recorder.reasons if "trials cannot be forked after its import" in each]
    assert len(reasons) == 1, recorder.reasons
    assert why in reasons[0]
    assert "a fork of it started processes" not in reasons[0]


FORKED = {
    "no stdout": "sys.stdout = None",
    "a stdout that cannot be flushed": "class Odd:\n    def write(self, text): pass\nsys.stdout = Odd()",
}


@pytest.mark.parametrize("hazard", FORKED)
def test_what_forks_bear_is_no_reason(hazard: str, trains: Trains, module: Module, recorder: LogRecorder) -> None:
    module.write(measures(FORKED[hazard]))
    assert [each["x"] for each in trains(3)] == [0, 1, 2]
    assert (len(module.imports), recorder.reasons) == (1, [])


def test_a_script_that_has_blocked_the_signal_of_ended_children_loses_no_time(
    trains: Trains, module: Module, recorder: LogRecorder
) -> None:
    module.write(measures("import atexit"))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        found = trains(2)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert ([each["x"] for each in found], recorder.reasons) == ([0, 1], [])
