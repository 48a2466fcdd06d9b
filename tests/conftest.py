"""What every test may ask for, and the surroundings in which all of them run."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer  # type: ignore[import-untyped]  # it has no types of its own
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # nor has this
from xdist.workermanage import WorkerController  # type: ignore[import-untyped]  # nor this

_END_OF_CERTIFICATE = "-----END CERTIFICATE-----\n"

# Before anything imports Prefect: the settings and the server of the user that runs the tests stay untouched,
# and nothing is sent anywhere. Child processes inherit it.
_HOME = Path(tempfile.mkdtemp(prefix="prefect-tune-tests-"))
for _name in [name for name in os.environ if name.startswith("PREFECT_")]:
    del os.environ[_name]
_ONE_AUTHORITY = _HOME / "authority.pem"
_ONE_AUTHORITY.write_text(Path(certifi.where()).read_text().partition(_END_OF_CERTIFICATE)[0] + _END_OF_CERTIFICATE)
os.environ |= {
    # Each client of Prefect's reads all authorities: 20 ms of CPU time, for servers that are asked without TLS.
    "PREFECT_API_SSL_CERT_FILE": str(_ONE_AUTHORITY),
    "PREFECT_HOME": str(_HOME),
    "PREFECT_SERVER_API_PORT": "9",  # where nothing listens: a script must not use the server of who runs the tests
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # As a script's own server has it: a transaction for each state of a task run is a fifth of what a server computes.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    # What no test is about: an idle server, one for each worker, takes 1.5 CPU seconds a minute, and 1.9 with them.
    **{
        f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false"
        for service in ("CLEANUP_RECONCILER", "FOREMAN", "LATE_RUNS", "PAUSE_EXPIRATIONS", "REPOSSESSOR")
    },
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "127.0.0.1,localhost",
}
# What a shell starts in the background ignores Ctrl-C, and so does all that it starts: some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A slow machine fails no test: Hypothesis checks correctness, not speed.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


_TOGETHER = frozenset(
    {
        "tests/notebook/test_kernel.py",
        "tests/monitoring/test_callback_runner.py",
        "tests/flows/deployments/test_deployed.py",
        "tests/flows/observing/test_events.py",
        "tests/results/test_results.py",
        "tests/stores/test_subprocess_store.py",
        "tests/test_docs_site.py",
        "tests/test_packaging.py",
        "tests/tuner/test_audit.py",
    }
)
"""Modules whose tests share an expensive fixture: one worker runs them all."""

_BROWSER = "tests/browser/"
"""All modules there share a Prefect server with its UI, a process worker and deployments."""


_SERVERS = 3
"""The number of workers with a Prefect server: to start one takes 10 CPU seconds, and to keep it 2 a minute."""


class _Scheduling(LoadScopeScheduling):
    """xdist's own groups do nothing with pytest 9.2: it does not see them any more in the names of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Assign the next tests that the worker may run; end it if none are left for it.

        A worker with a server first runs all that need it: afterwards its server ends.
        """
        chosen = None
        if node in self.nodes[:_SERVERS]:
            chosen = next((scope for scope in self._server_scopes if scope in self.workqueue), None)
        if chosen is None:
            chosen = next((scope for scope in self.workqueue if scope not in self._server_scopes), None)
        if chosen is None:
            node.shutdown()
            return
        self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)

    @cached_property
    def _server_scopes(self) -> Mapping[str, None]:
        """The scopes with a test that needs a server, the longest first."""
        return dict.fromkeys(_scope_of(nodeid) for nodeid in _server_tests(_HOME).read_text().splitlines())


def _scope_of(nodeid: str) -> str:
    """Return the name of the tests that one worker runs together."""
    if nodeid.startswith(_BROWSER):
        return _BROWSER
    module = nodeid.partition("::")[0]
    return module if module in _TOGETHER else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Hand out the tests one by one, but for those that belong together."""
    return _Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the tests that need a Prefect server time, and begin with them and with those that take longest.

    The first that needs a server waits for it to start; and a long one at the end has all other workers wait.
    """
    for item in items:
        if _needs_server(item) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))
    items.sort(key=lambda item: (_needs_server(item), _patience(item)), reverse=True)
    _server_tests(_shared_folder(config)).write_text("\n".join(item.nodeid for item in items if _needs_server(item)))


def _needs_server(item: pytest.Item) -> bool:
    return "prefect_server" in getattr(item, "fixturenames", ())


def _server_tests(shared: Path) -> Path:
    """Return the file with the ids of the tests that need a server: workers write it, the scheduler reads it."""
    return shared / "server-tests"


def _shared_folder(config: pytest.Config) -> Path:
    """Return the folder that this process shares with the other workers of xdist."""
    return Path(getattr(config, "workerinput", {"shared_folder": _HOME})["shared_folder"])


def _patience(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker is not None else 0.0


def pytest_configure_node(node: WorkerController) -> None:
    """Give a worker of xdist the folder that is the same for all."""
    node.workerinput["shared_folder"] = str(_HOME)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Import all tests, in one worker before the others do: on a clean clone it compiles them, and all of Prefect."""
    with _first_alone(_shared_folder(session.config)):
        gc.disable()  # what is imported and collected stays: to look through it for garbage takes a third of the time
        try:
            return (yield)
        finally:
            gc.freeze()
            gc.enable()


@contextmanager
def _first_alone(shared: Path) -> Iterator[None]:
    """Have all others wait until one has left the block; then they run it at the same time."""
    done = shared / "imported"
    with (shared / "importing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield
        done.touch()


def pytest_unconfigure() -> None:
    """Leave no folder behind."""
    shutil.rmtree(_HOME, ignore_errors=True)


@pytest.fixture(autouse=True)
def _audited(request: pytest.FixtureRequest) -> Iterator[None]:
    """Require that each journal which a flow has left in the test's folder audits clean."""
    yield
    folder = getattr(request.node, "funcargs", {}).get("tmp_path")
    if folder is not None and request.node.get_closest_marker("altered_journal") is None:
        from tests.fakes.searches.left_experiments import find_differences

        assert find_differences(folder) == []


_SERVER = pytest.StashKey[ExitStack]()
"""What the fixture `prefect_server` has opened in this process."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, None]:
    """End the Prefect server when no following test needs it: it takes CPU time as long as it runs."""
    yield
    if nextitem is not None and not _needs_server(nextitem) and _SERVER in item.config.stash:
        scope = _scope_of(nextitem.nodeid)
        if not any(_needs_server(other) for other in item.session.items if _scope_of(other.nodeid) == scope):
            item.config.stash[_SERVER].close()
            del item.config.stash[_SERVER]


@pytest.fixture(scope="session")
def prefect_server(pytestconfig: pytest.Config) -> Iterator[str]:
    """Return the API address of a Prefect server on an empty database, shared by the session's tests.

    Started when first asked for, ended after the last test that asks for it. Flows and tasks called in the test use it
    by default; give the address as `PREFECT_API_URL` to child processes.
    """
    from prefect.settings import get_current_settings
    from prefect.testing import utilities

    from tests.fakes.servers.prefect_database import IN_MEMORY, migrated_database

    folder = tempfile.mkdtemp(dir=IN_MEMORY)  # the harness removes it when this process ends
    shutil.copy(migrated_database(pytestconfig), Path(folder, "prefect-test.db"))
    with ExitStack() as stack:
        pytestconfig.stash[_SERVER] = stack
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(utilities, "mkdtemp", lambda: folder)
            patch.setenv("PREFECT_SERVER_DATABASE_MIGRATE_ON_START", "false")  # this database is migrated
            stack.enter_context(utilities.prefect_test_harness(server_startup_timeout=180))
        yield str(get_current_settings().api.url)


@pytest.fixture
def no_prefect_server() -> Iterator[None]:
    """Let searches run without a server, for tests that look at nothing on it."""
    from prefect_tune.testing import without_server

    with without_server():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests recorded with `record_property("figure: ...", number)`, summed by name."""
    figures: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        figures.update({name: value for name, value in report.user_properties if name.startswith("figure: ")})
    for name, total in sorted(figures.items()):
        terminalreporter.write_line(f"{name.removeprefix('figure: ')}: {total}")
