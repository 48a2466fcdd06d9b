"""Fixtures and settings of all tests."""

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
_CERTIFICATE = _HOME / "authority.pem"
_CERTIFICATE.write_text(Path(certifi.where()).read_text().partition(_END_OF_CERTIFICATE)[0] + _END_OF_CERTIFICATE)
os.environ |= {
    # Each client of Prefect reads all authorities: 20 ms of CPU time, for servers without TLS.
    "PREFECT_API_SSL_CERT_FILE": str(_CERTIFICATE),
    "PREFECT_HOME": str(_HOME),
    "PREFECT_SERVER_API_PORT": "9",  # nothing listens there: a script must not use the user's server
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # As in a script's own server: a transaction for each state of a task run is a fifth of a server's work.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    # No test needs these services: an idle server takes 1.5 CPU seconds a minute without them, and 1.9 with them.
    **{
        f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false"
        for service in ("CLEANUP_RECONCILER", "FOREMAN", "LATE_RUNS", "PAUSE_EXPIRATIONS", "REPOSSESSOR")
    },
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "127.0.0.1,localhost",
}
# A background job of a shell and its children ignore Ctrl-C, which some tests press.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A slow machine fails no test: Hypothesis checks correctness, not speed.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


_SHARED_FIXTURE_MODULES = (
    *("tests/notebook/test_kernel.py", "tests/monitoring/test_callback_runner.py", "tests/results/test_results.py"),
    *("tests/flows/deployments/test_deployed.py", "tests/flows/observing/test_events.py", "tests/tuner/test_audit.py"),
    *("tests/stores/test_subprocess_store.py", "tests/test_docs_site.py", "tests/test_packaging.py"),
)
"""Modules whose tests share an expensive fixture: one worker runs each module."""
_BROWSER_FOLDER = "tests/browser/"
"""All modules there share a Prefect server with its UI, a process worker and deployments."""
_MAX_SERVERS = 3
"""The number of workers with a Prefect server: its start takes 10 CPU seconds, and then 2 a minute."""


class _Scheduler(LoadScopeScheduling):
    """Groups tests by module: xdist's own groups do nothing with pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        return _get_scope(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Assign the next tests to a worker; a worker with a server first runs all tests that need one."""
        chosen = None
        if node in self.nodes[:_MAX_SERVERS]:
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
        return dict.fromkeys(_get_scope(nodeid) for nodeid in _get_server_test_file(_HOME).read_text().splitlines())


def _get_scope(nodeid: str) -> str:
    """Return the name of the tests that one worker runs together."""
    if nodeid.startswith(_BROWSER_FOLDER):
        return _BROWSER_FOLDER
    module = nodeid.partition("::")[0]
    return module if module in _SHARED_FIXTURE_MODULES else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Distribute single tests, and modules that share a fixture as a whole."""
    return _Scheduler(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the tests that need a Prefect server a longer timeout, and run them and the longest ones first."""
    for item in items:
        if _needs_server(item) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))
    items.sort(key=lambda item: (_needs_server(item), _get_timeout(item)), reverse=True)
    _get_server_test_file(_get_shared_folder(config)).write_text(
        "\n".join(item.nodeid for item in items if _needs_server(item))
    )


def _needs_server(item: pytest.Item) -> bool:
    return "prefect_server" in getattr(item, "fixturenames", ())


def _get_server_test_file(shared: Path) -> Path:
    """Return the file with the ids of the tests that need a server: workers write it, the scheduler reads it."""
    return shared / "server-tests"


def _get_shared_folder(config: pytest.Config) -> Path:
    """Return the folder that this process shares with the other workers of xdist."""
    return Path(getattr(config, "workerinput", {"shared_folder": _HOME})["shared_folder"])


def _get_timeout(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker is not None else 0.0


def pytest_configure_node(node: WorkerController) -> None:
    """Send the shared folder to a worker of xdist."""
    node.workerinput["shared_folder"] = str(_HOME)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Import all tests in one worker first: on a clean clone, it compiles them and Prefect."""
    with _importing_first(_get_shared_folder(session.config)):
        gc.disable()  # imports and collected tests stay: their garbage collection takes a third of the time
        try:
            return (yield)
        finally:
            gc.freeze()
            gc.enable()


@contextmanager
def _importing_first(shared: Path) -> Iterator[None]:
    """Let one process run the block first; the others run it afterwards, at the same time."""
    imported = shared / "imported"
    with (shared / "importing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if imported.exists():
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield
        imported.touch()


def pytest_unconfigure() -> None:
    """Leave no folder behind."""
    shutil.rmtree(_HOME, ignore_errors=True)


@pytest.fixture(autouse=True)
def _audit_journals(request: pytest.FixtureRequest) -> Iterator[None]:
    """Require a clean audit of each journal that a flow has left in the test's folder."""
    yield
    folder = getattr(request.node, "funcargs", {}).get("tmp_path")
    if folder is not None and request.node.get_closest_marker("altered_journal") is None:
        from tests.fakes.searches.left_experiments import find_differences

        assert find_differences(folder) == []


_SERVER_KEY = pytest.StashKey[ExitStack]()
"""The server that the fixture `prefect_server` has started in this process."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, None]:
    """End the Prefect server when no following test needs it: it takes CPU time as long as it runs."""
    yield
    if nextitem is not None and not _needs_server(nextitem) and _SERVER_KEY in item.config.stash:
        scope = _get_scope(nextitem.nodeid)
        if not any(_needs_server(other) for other in item.session.items if _get_scope(other.nodeid) == scope):
            item.config.stash[_SERVER_KEY].close()
            del item.config.stash[_SERVER_KEY]


@pytest.fixture(scope="session")
def prefect_server(pytestconfig: pytest.Config) -> Iterator[str]:
    """Return the API address of a Prefect server on an empty database, shared by the session's tests.

    Flows and tasks called in the test use it by default; give the address as `PREFECT_API_URL` to child processes.
    """
    from prefect.settings import get_current_settings
    from prefect.testing import utilities

    from tests.fakes.servers.prefect_database import IN_MEMORY, migrated_database

    folder = tempfile.mkdtemp(dir=IN_MEMORY)  # the harness removes it when this process ends
    shutil.copy(migrated_database(pytestconfig), Path(folder, "prefect-test.db"))
    with ExitStack() as stack:
        pytestconfig.stash[_SERVER_KEY] = stack
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(utilities, "mkdtemp", lambda: folder)
            patch.setenv("PREFECT_SERVER_DATABASE_MIGRATE_ON_START", "false")  # this database is migrated
            stack.enter_context(utilities.prefect_test_harness(server_startup_timeout=180))
        yield str(get_current_settings().api.url)


@pytest.fixture
def no_prefect_server() -> Iterator[None]:
    """Run searches without a server."""
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
