"""Template processes, which import a trainable and fork its trials: kills, and imports that cannot be forked."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from prefect_tune.attempt.processes import fork_servers, process_pool
from prefect_tune.attempt.processes.process_pool import TrialProcessPool, shared_pool
from prefect_tune.core.messages.process_messages import TrainableLoaded
from prefect_tune.core.reasons import ProcessEnd
from prefect_tune.runtime.trainable import Reuse
from tests.attempt.processes.modules import QUIET, Module, Trainer, count_distinct
from tests.fakes.checkpoints import write_files
from tests.fakes.outcomes import require_failure
from tests.fakes.trial_processes import (
    Family,
    LogRecorder,
    make_log,
    no_leaks,
    receive_messages,
    receive_metrics,
    wait_until,
)
from tests.long_cases import long_after

pytestmark = pytest.mark.usefixtures("processes")  # fails if a process outlives its test

WAITING = """
import subprocess, time
def measure(config):
    if config["x"] == 0:
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    return {"x": config["x"]}
"""


def read_parent_pid(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_process(processes: Family, victim: str) -> None:
    template = processes.wait_for_one("tune-template")
    subreaper = read_parent_pid(template)
    pids = {"the template": template, "its subreaper": subreaper, "the fork server": read_parent_pid(subreaper)}
    os.kill(pids[victim], signal.SIGKILL)


@pytest.mark.parametrize("victim", long_after(1, ["the template", "its subreaper"]))
def test_a_kill_during_the_import_ends_what_it_has_started_and_no_trial(
    module: Module, processes: Family, recorder: LogRecorder, tmp_path: Path, victim: str
) -> None:
    flag = tmp_path / "flag"
    module.write(f"""
        import subprocess, time
        if not os.path.exists({str(flag)!r}):
            subprocess.Popen(["sleep", "600"])
            open({str(flag)!r}, "w").close()
            time.sleep(600)
        def measure(config): return {{"x": config["x"]}}
    """)
    with no_leaks(), TrialProcessPool(slots=2, reuse="auto") as pool:
        pool.start_import(f"{module.name}:train", make_log(recorder))
        wait_until(flag.exists, what=lambda: "an import")
        (template,) = pool.fork_servers._templates.values()
        # without a process it is replaced silently
        wait_until(lambda: template.process is not None, what=lambda: "the answer of the fork server")
        kill_process(processes, victim)
        wait_until(lambda: not processes.pids("sleep"), what=lambda: f"the end of its child, not {processes.names()}")
        with pool.open_process(module.start(1), make_log(recorder)) as channel:
            assert receive_metrics(channel)["x"] == 1
    assert "its import ended the process" in recorder.reasons[0]


@pytest.mark.parametrize("victim", long_after(1, ["the template", "its subreaper"]))
def test_a_kill_while_trials_run_costs_an_attempt_of_each_and_the_next_are_forked_again(
    module: Module, processes: Family, recorder: LogRecorder, victim: str
) -> None:
    module.write(WAITING)

    def run_two_attempts(pool: TrialProcessPool) -> dict[str, Any]:
        with pool.open_process(module.start(0), make_log(recorder)) as channel:
            receive_messages(channel)
            assert channel.end() == ProcessEnd(signal="SIGKILL")
        with pool.open_process(module.start(1), make_log(recorder)) as channel:
            return dict(receive_metrics(channel))

    with no_leaks(), TrialProcessPool(slots=3, reuse="auto") as pool, ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(run_two_attempts, pool) for _ in range(3)]
        wait_until(lambda: len(processes.pids("sleep")) == 3, what=lambda: f"three trials, not {processes.names()}")
        kill_process(processes, victim)
        pids = {future.result()["pid"] for future in futures}
        last = train_again(module, pool, recorder)
    assert len({*pids, last}) == 4
    assert recorder.reasons == []


def train_again(module: Module, pool: TrialProcessPool, recorder: LogRecorder) -> int:
    """Train once more in a process without an import of its own; return its pid."""
    with pool.open_process(module.start(1), make_log(recorder)) as channel:
        pid = int(receive_metrics(channel)["pid"])
    assert pid not in module.imports
    return pid


def test_a_killed_fork_server_leaves_the_template_and_its_trials(
    module: Module, processes: Family, recorder: LogRecorder
) -> None:
    module.write(WAITING)
    pool = TrialProcessPool(slots=2, reuse="auto")
    with pool, pool.open_process(module.start(0), make_log(recorder)) as channel:
        wait_until(lambda: processes.pids("sleep"), what=lambda: "a trial")
        kill_process(processes, "the fork server")
        train_again(module, pool, recorder)
        assert channel.end() == ProcessEnd(signal="SIGKILL")  # this call ends it
    assert len(module.imports) == 1


def test_a_request_that_cannot_be_written_leaves_no_process_that_waits_for_it(
    module: Module, processes: Family, recorder: LogRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with no_leaks(), TrialProcessPool(slots=1, reuse="auto") as pool:
        monkeypatch.setattr("tempfile.TemporaryFile", raise_disk_full)
        with pool.open_process(module.start(7), make_log(recorder)) as channel:
            assert receive_metrics(channel)["x"] == 7
        wait_until(lambda: not processes.pids("tune-template"), what=lambda: f"no template, not {processes.names()}")
    assert "No space left on device" in recorder.reasons[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("process", "expected"), [(1, "was not forked within 3 s"), (2, "did not begin its trial within 3 s")]
)
def test_a_fork_that_hangs_before_its_trial_begins_is_replaced_by_a_process_of_its_own(
    module: Module,
    processes: Family,
    recorder: LogRecorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    process: int,
    expected: str,
) -> None:
    module.write(f"""
        import time
        def hang_later():
            global depth
            depth += 1
            if depth == {process} and os.path.exists({str(tmp_path / "hang")!r}):
                time.sleep(600)
        depth = 0
        os.register_at_fork(after_in_child=hang_later)
        def measure(config):
            open({str(tmp_path / "hang")!r}, "w").close()
            return {{"x": config["x"]}}
    """)
    pids = []
    with no_leaks(), TrialProcessPool(slots=1, reuse="auto") as pool:
        for x in range(3):
            # The start message exceeds the pipe's buffer.
            start = module.start(x).model_copy(update={"config": {"x": x, "of": "a megabyte" * 100_000}})
            with pool.open_process(start, make_log(recorder)) as channel:
                pids.append(receive_metrics(channel)["pid"])
            pool.end_idle_processes()
            wait_until(lambda: len(processes.pids("tune-subreaper")) <= 1, what=lambda: f"one, not {processes.names()}")
            monkeypatch.setattr(fork_servers, "_FORK_TIMEOUT", timedelta(seconds=3))
            monkeypatch.setattr(fork_servers, "_SEND_TIMEOUT", timedelta(seconds=3))
            monkeypatch.setattr(process_pool, "_START_TIMEOUT", timedelta(seconds=3))
    assert pids[0] not in module.imports
    assert pids[1:] == module.imports[1:]
    assert [expected in line for line in recorder.lines if "cannot be forked after its import" in line] == [True]


# ---------------------------------------------------------------------------------------------------- in a worker


def test_attempts_of_a_search_in_one_worker_share_an_import(
    module: Module, processes: Family, recorder: LogRecorder
) -> None:
    def train(search: str) -> int:
        with shared_pool(search, "auto") as pool, pool.open_process(module.start(), make_log(recorder)) as channel:
            return int(receive_metrics(channel)["pid"])

    with ThreadPoolExecutor(3) as threads:
        assert len(set(threads.map(train, ["first"] * 6))) == 6
    assert len(module.imports) == 1
    train("second")
    assert len(module.imports) == 2
    wait_until(lambda: len(processes.pids("tune-forkserver")) == 1, what=lambda: "the end of the first search's pool")
    with shared_pool("another", "never"):
        wait_until(lambda: not processes.pids(), what=lambda: "the end of the second search's")


def test_the_pool_of_a_search_that_sends_no_more_attempts_is_closed(
    module: Module, processes: Family, recorder: LogRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "_IDLE_TIMEOUT", timedelta(0))
    with shared_pool("search", "auto") as pool, pool.open_process(module.start(), make_log(recorder)) as channel:
        receive_metrics(channel)
    processes.require_none()


# ------------------------------------------------------------------------------------------------------ forked


def test_one_process_imports_the_module_and_each_trial_is_a_fork_of_it(
    train_trials: Trainer, module: Module, recorder: LogRecorder
) -> None:
    results = train_trials(3)
    assert (len(module.imports), count_distinct(results)) == (1, 3)
    assert module.imports[0] not in {metrics["pid"] for metrics in results}
    assert recorder.reasons == []


def test_each_process_imports_it_where_that_was_asked_for(train_trials: Trainer, module: Module) -> None:
    results = train_trials(3, "never")
    assert module.imports == [metrics["pid"] for metrics in results]


FORKABLE = {
    "lines, a child, a program that is terminated, and lines of a handler at each fork": (
        """
        import subprocess, sys
        print('hello')
        print('beware', file=sys.stderr)
        if os.fork() == 0:
            raise SystemExit(0)
        os.wait()
        program = subprocess.Popen(['sleep', '600'])
        program.terminate()
        program.wait()
        os.register_at_fork(after_in_parent=lambda: os.write(2, b'x' * 30_000 + b'\\n'))
        """,
        ["beware", "hello", "x" * 30_000],
    ),
    "no stdout": ("import sys\nsys.stdout = None\n", []),
    "a stdout that cannot be flushed": (
        "import sys\nclass Odd:\n    def write(self, text): pass\nsys.stdout = Odd()\n",
        [],
    ),
}


@pytest.mark.parametrize("name", FORKABLE)
def test_what_forks_bear_is_no_reason_against_them(
    train_trials: Trainer, module: Module, recorder: LogRecorder, name: str
) -> None:
    body, lines = FORKABLE[name]
    module.write(dedent(body) + QUIET)
    results = train_trials(3)
    assert [metrics["x"] for metrics in results] == [0, 1, 2]
    assert (len(module.imports), count_distinct(results), sorted({*recorder.reasons})) == (1, 3, lines)


IMPORT_EFFECTS = {
    "a folder that is first on the path": (
        """
        import importlib, sys
        sys.path.insert(0, FOLDER + "/vendored")
        def measure(config):
            sys.modules.pop("part", None)
            return {"origin": importlib.import_module("part").origin}
        """,
        {"part.py": "origin = 'beside'", "vendored/part.py": "origin = 'vendored'"},
        "vendored",
    ),
    "other finders of modules": (
        "import sys\nsys.meta_path[:] = sys.meta_path[1:]\ndef measure(config): return {'origin': 'it trains'}",
        {},
        "it trains",
    ),
    "variables that are set before what reads them is imported": (
        "os.environ['READ_ONCE_VARIABLES'] = '1'\nimport numpy\ndef measure(config): return {'origin': numpy.origin}",
        {
            "numpy/__init__.py": "import os\norigin = os.environ.get('READ_ONCE_VARIABLES')",
            "numpy/random.py": "def seed(number=None): pass\nraise ImportError('wrong ABI')",
        },
        "1",
    ),
    "threads that report for each trial": (
        """
        import concurrent.futures
        import prefect_tune as pt
        threads = concurrent.futures.ThreadPoolExecutor(1)
        threads.submit(int).result()
        def measure(config):
            threads.submit(pt.report, {'origin': 'by a thread'}).result()
            return {'origin': 'by a thread'}
        """,
        {},
        "by a thread",
    ),
}


@pytest.mark.parametrize("reuse", long_after(1, ["auto", "never"]))
@pytest.mark.parametrize("name", IMPORT_EFFECTS)
def test_each_trial_has_what_the_import_has_made(
    train_trials: Trainer, module: Module, tmp_path: Path, name: str, reuse: Reuse
) -> None:
    body, files, expected = IMPORT_EFFECTS[name]
    write_files(tmp_path, {path: text.encode() for path, text in files.items()})
    module.write(body.replace("FOLDER", repr(str(tmp_path))))
    assert [metrics["origin"] for metrics in train_trials(2, reuse)] == [expected] * 2


@pytest.mark.parametrize("reuse", long_after(1, ["auto", "never"]))
def test_what_the_import_sets_is_set_in_each_trial(
    train_trials: Trainer, module: Module, tmp_path: Path, reuse: Reuse
) -> None:
    module.write(f"""
        import random, numpy
        os.environ["SET_BY_IMPORT"] = "yes"
        os.environ.pop("HOME", None)
        os.chdir({str(tmp_path)!r})
        random.seed(7)
        numpy.random.random()  # draws, and does not seed
        def measure(config):
            state = {{"set": os.environ.get("SET_BY_IMPORT"), "home": os.environ.get("HOME"), "here": os.getcwd(),
                     "drawn": random.random(), "numpy": numpy.random.random()}}
            os.environ["SET_BY_IMPORT"] = "changed"
            return state
    """)
    results = train_trials(3, reuse)
    assert {(metrics["set"], metrics["home"], metrics["here"]) for metrics in results} == {("yes", None, str(tmp_path))}
    assert {metrics["drawn"] for metrics in results} == {random.Random(7).random()}
    assert count_distinct(results, "numpy") == 3


def test_the_code_of_a_trial_is_what_was_imported_even_if_the_file_has_changed_since(
    module: Module, recorder: LogRecorder
) -> None:
    digests = []
    with TrialProcessPool(slots=1, reuse="auto") as pool:
        for body in (QUIET, "def measure(config): return {'x': 'changed'}\n# another\ndef train(config): return {}"):
            module.write(body)
            with pool.open_process(module.start(), make_log(recorder)) as channel:
                loaded = [message for message in receive_messages(channel) if isinstance(message, TrainableLoaded)]
            digests += [message.source_digest for message in loaded]
    assert digests[0]
    assert digests == digests[:1] * 2


# ------------------------------------------------------------------------------------ unsafe forks, and the reason

UNSAFE = {
    "its import started threads that still run: Thread-1 (wait)": """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    """,
    "its import left open: /dev/full": """
        left = os.open("/dev/full", os.O_WRONLY)
        os.dup2(left, 1)
        os.close(left)
    """,
    "its import left open: pipe:": """
        import subprocess
        left = subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE)
    """,
    "its import left open: socket:": """
        import socket
        left = socket.socket()
    """,
    "other threads run during its forks: late": """
        import threading
        forks = []
        def start():
            forks.append(1)
            if len(forks) == 1:
                threading.Thread(target=threading.Event().wait, daemon=True, name="late").start()
        os.register_at_fork(after_in_parent=start)
    """,
    "other threads run during its forks: 1 unnamed library thread": """
        import _thread, ctypes, time
        def hold():
            ctypes.CDLL(None).prctl(15, b"")
            time.sleep(3600)
        _thread.start_new_thread(hold, ())
        time.sleep(0.3)
    """,
    "it imports JAX, which cannot be forked": """
        import sys, types
        sys.modules["jax"] = types.ModuleType("jax")
    """,
}


@pytest.mark.long
@pytest.mark.parametrize(("expected", "body"), UNSAFE.items(), ids=[reason.split(":")[0] for reason in UNSAFE])
def test_trials_whose_import_cannot_be_forked_safely_get_processes_of_their_own(
    train_trials: Trainer, module: Module, recorder: LogRecorder, expected: str, body: str
) -> None:
    module.write(dedent(body) + QUIET)
    results = train_trials(3)
    (reason,) = recorder.reasons
    assert expected in reason
    assert "each trial imports it" in reason
    assert [metrics["x"] for metrics in results] == [0, 1, 2]
    assert module.imports[1:] == [metrics["pid"] for metrics in results]


def test_a_script_that_has_blocked_the_signal_of_ended_children_loses_no_time(
    train_trials: Trainer, recorder: LogRecorder
) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        results = train_trials(2)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert ([metrics["x"] for metrics in results], recorder.reasons) == ([0, 1], [])


def test_an_import_that_raises_is_the_error_of_the_trial_and_a_reason_not_to_fork(
    module: Module, recorder: LogRecorder
) -> None:
    module.write(f"raise ValueError({'あ' * 900!r})")  # longer than the message to the supervisor
    pool = TrialProcessPool(slots=1, reuse="auto")
    with pool, pool.open_process(module.start(), make_log(recorder)) as channel:
        (end,) = receive_messages(channel)
    assert "cannot be imported: ValueError: ああ" in str(require_failure(end).reason)
    assert "cannot be imported: ValueError: ああ" in recorder.reasons[0]


def test_a_pool_closes_though_what_its_import_forked_lives(module: Module, recorder: LogRecorder) -> None:
    module.write("import time\nif os.fork() == 0:\n    time.sleep(600)\n    os._exit(0)\ntime.sleep(600)")
    with no_leaks(), TrialProcessPool(slots=1, reuse="auto") as pool:
        pool.start_import(f"{module.name}:train", make_log(recorder))
        wait_until(lambda: module.imports, what=lambda: "an import")


def test_an_import_that_ends_its_process_is_left_to_the_trial(module: Module, recorder: LogRecorder) -> None:
    module.write("os._exit(3)")
    pool = TrialProcessPool(slots=1, reuse="auto")
    with pool, pool.open_process(module.start(), make_log(recorder)) as channel:
        assert receive_messages(channel) == []
        assert channel.end() == ProcessEnd(exit_code=3)
    assert "its import ended the process" in recorder.reasons[0]


def test_a_trial_that_is_stopped_does_not_wait_for_an_import_that_hangs(module: Module, recorder: LogRecorder) -> None:
    module.write("import time; time.sleep(600)")
    stop = threading.Event()
    with no_leaks(), TrialProcessPool(slots=1, reuse="auto") as pool:
        pool.start_import(f"{module.name}:train", make_log(recorder))
        wait_until(lambda: module.imports, what=lambda: "an import")
        stop.set()
        with pool.open_process(module.start(), make_log(recorder), stop=stop) as channel:
            wait_until(lambda: len(module.imports) == 2, what=lambda: "the import of the trial's own process")
            assert channel.receive(timedelta(seconds=0.1)) is None


def test_a_process_that_imports_dies_with_its_supervisor(module: Module, processes: Family, tmp_path: Path) -> None:
    module.write("import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)")
    code = dedent(f"""
        import logging, sys, time
        sys.path.insert(0, {str(tmp_path)!r})
        from prefect_tune.attempt.processes.process_pool import TrialProcessPool
        pool = TrialProcessPool(slots=1, reuse="auto")
        pool.start_import("{module.name}:train", logging.getLogger())
        time.sleep(600)
    """)
    supervisor = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", code])
    wait_until(lambda: module.imports, seconds=60, what=lambda: "an import")
    os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)
    processes.require_none()


@pytest.mark.parametrize("reuse", long_after(1, ["auto", "never"]))
def test_handlers_of_atexit_run_at_the_end_of_each_process_of_trials(
    train_trials: Trainer, module: Module, tmp_path: Path, reuse: Reuse
) -> None:
    module.write(f"""
        import atexit, multiprocessing.util, time
        def note(what):
            time.sleep(0.5)  # longer than a process without handlers takes to exit
            with open({str(tmp_path / "exits")!r}, "a") as file:
                file.write(f"{{what}} {{os.getpid()}}\\n")
        atexit.register(note, "module")
        def measure(config):
            atexit.register(note, "trial")
            return {{"x": config["x"]}}
    """)
    pids = [metrics["pid"] for metrics in train_trials(2, reuse)]
    exits = sorted((tmp_path / "exits").read_text().splitlines())
    imported = set() if reuse == "auto" else {*pids}  # forked trials share the objects of the import
    assert exits == sorted([*(f"module {pid}" for pid in imported), *(f"trial {pid}" for pid in pids)])


# ------------------------------------------- what the first optimizer of PyTorch imports, with a package of its name

TORCH = """
import importlib
from types import SimpleNamespace

class SGD:
    def __init__(self, parameters, lr):
        importlib.import_module("torch._dynamo")

    def step(self):
        pass

optim = SimpleNamespace(SGD=SGD)
cuda = SimpleNamespace(is_initialized=lambda: False)

def nothing(*_, **__):
    return None

zeros = seed = manual_seed = initial_seed = get_rng_state = set_rng_state = nothing
"""
DYNAMO = """
import os
with open({imports!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
"""
TRAIN = """
import sys, torch
def measure(config):
    late = "torch._dynamo" in sys.modules
    torch.optim.SGD([0], lr=0.0).step()
    return {"late": late}
"""
TRAIN_WITHOUT_OPTIMIZER = """
import sys, torch
def measure(config):
    return {"late": "torch._dynamo" in sys.modules}
"""


@pytest.fixture
def imports(tmp_path: Path, module: Module) -> Path:
    """Write the packages; return the file that lists the processes that import `torch._dynamo`."""
    del module  # it put the folder on the path
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    (tmp_path / "torch" / "_dynamo.py").write_text(DYNAMO.format(imports=str(tmp_path / "late imports")))
    return tmp_path / "late imports"


def test_where_the_code_names_an_optimizer_one_process_imports_what_it_needs(
    train_trials: Trainer, module: Module, imports: Path, recorder: LogRecorder
) -> None:
    module.write(TRAIN)
    results = train_trials(3)
    assert [metrics["late"] for metrics in results] == [True] * 3
    assert imports.read_text().split() == [str(pid) for pid in module.imports]
    assert recorder.reasons == []


def test_trials_without_an_optimizer_import_nothing_late(train_trials: Trainer, module: Module, imports: Path) -> None:
    module.write(TRAIN_WITHOUT_OPTIMIZER)
    assert [metrics["late"] for metrics in train_trials(3)] == [False] * 3
    assert not imports.exists()


def test_a_late_import_that_starts_a_thread_ends_the_forks_and_no_trial(
    train_trials: Trainer, module: Module, imports: Path, tmp_path: Path, recorder: LogRecorder
) -> None:
    threads = "threading.Thread(target=threading.Event().wait, daemon=True, name='of dynamo').start()"
    (tmp_path / "torch" / "_dynamo.py").write_text(f"import threading\n{threads}\n")
    module.write(TRAIN)
    results = train_trials(3)
    assert (len(module.imports), count_distinct(results)) == (4, 3)
    (reason,) = recorder.reasons
    assert "trials cannot be forked after its import" in reason
    assert "threads that still run: of dynamo" in reason
    assert not imports.exists()
