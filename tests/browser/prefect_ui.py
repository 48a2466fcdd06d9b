"""Prefect's UI in a browser, an installation with a server and workers, and the searches that it shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID, uuid4

from playwright.sync_api import Error, Locator, Page
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import load_experiment
from prefect_tune.prefect_api.local_server import PrefectServer, start_prefect_server
from tests.fakes.checkpoints import first_generation
from tests.fakes.servers.prefect_database import IN_MEMORY

_CONTROL = "textarea, input, [role=switch], .cm-content"
_CLICK_COUNT = 30
_BETWEEN_CLICKS_MS = 1_000
_RESPONSE_MS = 20_000
_RELOAD_COUNT = 12
_LISTED_MS = 5_000
_REDRAWN_MS = 500
"""Time for a canvas to be redrawn: the page gives no signal."""


@dataclass(frozen=True)
class Ui:
    """The UI in a browser's tab."""

    page: Page
    url: str
    pictures: Path
    """The folder for pictures of it."""

    def open_deployment(self, name: str) -> DeploymentPage:
        """Go to the deployments, and to the one of this name."""
        self.page.goto(f"{self.url}/v2/deployments")
        self.page.locator('a[href*="/deployments/deployment/"]').get_by_text(name, exact=True).click()
        return DeploymentPage(self.page)

    def open_run(self, flow_run: UUID) -> RunPage:
        """Go to a flow run's page, as by a link in a message."""
        self.page.goto(f"{self.url}/v2/runs/flow-run/{flow_run}")
        return RunPage(self.page)

    def take_picture(self, name: str) -> None:
        """Take a picture of the whole page in both themes; of a dialog, with what is around it."""
        self.page.evaluate("scrollTo(0, 0)")
        self._take(name, whole=not self.page.get_by_role("dialog").count())

    def _take(self, name: str, *, whole: bool) -> None:
        self.pictures.mkdir(parents=True, exist_ok=True)
        for theme in ("dark", "light"):
            self.page.emulate_media(color_scheme=theme, reduced_motion="reduce")
            self._redraw_graph(can_type=whole)
            self.page.screenshot(path=self.pictures / f"{name}-{theme}.png", full_page=whole, animations="disabled")

    def _redraw_graph(self, *, can_type: bool) -> None:
        """The graph of a run loses its place with the theme; "c" centers it."""
        if can_type and self.page.locator("main canvas").count():
            self.page.wait_for_timeout(_REDRAWN_MS)
            self.page.keyboard.press("c")
        self.page.wait_for_timeout(_REDRAWN_MS)


@dataclass(frozen=True)
class DeploymentPage:
    page: Page

    def open_custom_run(self) -> RunForm:
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Custom run").click()
        return RunForm(self.page, self.page.locator("form"))


@dataclass(frozen=True)
class Form:
    """The fields of a schema, in a page or in a dialog."""

    page: Page
    root: Locator

    def field(self, title: str) -> Locator:
        """Return the field of this title: its label, description and control."""
        label = re.compile(rf"^{title.replace('_', '[ _]')}( \(Optional\))?$", re.IGNORECASE)
        return self.root.locator("div.group").filter(has=self.page.locator("label").filter(has_text=label)).last

    def fill(self, title: str, value: object) -> None:
        """Type this value into the field, or switch it on or off."""
        control = self.field(title).locator(_CONTROL).first
        control.wait_for()
        if isinstance(value, bool):
            control.set_checked(value)
        elif "cm-content" in (control.get_attribute("class") or ""):  # an editor for JSON
            control.fill(json.dumps(value))
        else:
            control.fill(str(value))

    def choose(self, title: str, option: str) -> None:
        """Choose from the field's list."""
        self.field(title).get_by_role("button", name=re.compile("^Select ")).click()
        self.page.get_by_role("option", name=option, exact=True).click()

    def choose_tab(self, title: str, kind: str) -> None:
        """Choose the kind of value for the field."""
        self.field(title).get_by_role("tab", name=kind, exact=True).click()


@dataclass(frozen=True)
class RunForm(Form):
    """The form of a deployment's parameters."""

    def submit(self) -> RunPage:
        """Start the run, and follow the link to it; once more where the server was too busy, as a person would."""
        for _ in range(_CLICK_COUNT):
            with self.page.expect_response("**/create_flow_run") as answer:
                self.root.get_by_role("button", name="Submit").click()
            if answer.value.ok:
                break
            self.page.wait_for_timeout(_BETWEEN_CLICKS_MS)
        self.page.get_by_role("link", name="View run").click()
        return RunPage(self.page)


@dataclass(frozen=True)
class RunPage:
    page: Page

    @property
    def flow_run(self) -> UUID:
        """Return the flow run of this page, from its address."""
        self.page.wait_for_url("**/flow-run/*")
        return UUID(self.page.url.partition("/flow-run/")[2][:36])

    def wait_for_state(self, state: str) -> None:
        """Wait until the page shows the state of this name."""
        self.page.locator("main").locator('[data-slot="badge"]').get_by_text(state, exact=True).first.wait_for()

    def wait_for_log(self, text: str) -> None:
        """Wait until one of the last lines in its log holds this text."""
        self.page.get_by_role("tab", name="Logs").click()
        self.page.get_by_role("combobox").filter(has_text="Oldest to newest").click()
        self.page.get_by_role("option", name="Newest to oldest").click()
        self.page.locator("main").get_by_text(text).first.wait_for()

    def wait_for_attempt(self, state: str) -> None:
        """List the task runs of attempts; wait until one of them is in the state of this name."""
        self.page.get_by_role("tab", name="Task Runs").click()
        search = self.page.get_by_placeholder("Search by run name")
        search.fill("train ")
        self.page.locator("main").get_by_text(re.compile("^train .* · attempt 1$")).first.wait_for()
        self.wait_for_state(state)
        search.blur()  # what is typed for a picture goes to the page

    def open_report(self, key: str) -> Locator:
        """Open the artifact of this key, once there is one; return its text."""
        self.page.get_by_role("tab", name="Artifacts").click()
        link = self.page.get_by_text(key, exact=True).first
        for _ in range(_RELOAD_COUNT):
            with suppress(Error):
                link.wait_for(timeout=_LISTED_MS)
                break
            self.page.reload()  # it does not look again by itself
        link.click()
        self.page.wait_for_url("**/artifacts/artifact/*")
        return self.page.locator("main")

    def confirm(self, dialog: Locator, name: str) -> None:
        """Press this button; again if the server was too busy: the dialog stays until the server accepts."""
        button = dialog.get_by_role("button", name=name, exact=True)
        button.click()
        for _ in range(_CLICK_COUNT):
            with suppress(Error):
                return dialog.wait_for(state="hidden", timeout=_RESPONSE_MS)
            if button.is_enabled():
                button.click()
        raise AssertionError(f"the server did not accept {name!r}: {dialog.inner_text()}")

    def open_dialog(self, name: str) -> Locator:
        """Choose from the run's menu; return the dialog that opens."""
        self.page.get_by_role("button", name="Open menu").first.click()
        self.page.get_by_role("menuitem", name=name, exact=True).click()
        dialog = self.page.get_by_role("dialog").or_(self.page.get_by_role("alertdialog"))
        dialog.wait_for()
        return dialog


# A user's installation: a Prefect server with its UI, a process worker, and the deployments.


_POOL = "training"
_MARK = "PREFECT_TUNE_TEST_INSTALLATION"
_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Installation:
    """A server that answers, and a worker that runs its deployments."""

    api_url: str
    log: Path
    """The output of the worker and its runs."""
    server_log: Path

    @property
    def ui_url(self) -> str:
        return self.api_url.removesuffix("/api")

    @contextmanager
    def client(self) -> Iterator[SyncPrefectClient]:
        with SyncPrefectClient(self.api_url) as client:
            yield client

    def start(self, flow: str, **parameters: Any) -> UUID:
        """Start the deployment of that name, as a user's script would; return its run."""
        with self.client() as client:
            deployment = client.read_deployment_by_name(f"{flow}/{flow}")
            return client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id

    def run(self, flow_run: UUID) -> FlowRun:
        with self.client() as client:
            return client.read_flow_run(flow_run)

    def runs(self) -> Mapping[UUID, FlowRun]:
        with self.client() as client:
            return {run.id: run for run in client.read_flow_runs()}

    def read_log_tail(self) -> str:
        return self.log.read_text()[-3000:]

    def has_reported_kill(self) -> bool:
        """Whether the worker has reported the kill too: it does so 10 to 30 s later, and then logs this line."""
        return "flow_runs.worker - Check whether the flow run exceeded its memory" in self.log.read_text()

    def kill(self, flow_run: UUID) -> None:
        """`kill -9` of the process in which the worker runs it: it is reported as `host:pid`."""
        os.kill(int(str(self.run(flow_run).infrastructure_pid).rpartition(":")[2]), signal.SIGKILL)


@contextmanager
def running_installation(folder: Path, migrated_database: Path) -> Iterator[Installation]:
    """Install it below `folder`, on a copy of a database that has its tables, and end all of it with the block."""
    mark = uuid4().hex
    with TemporaryDirectory(dir=IN_MEMORY) as memory, _server_log(folder).open("wb") as log:
        database = Path(memory, "prefect.db")
        settings = {
            **os.environ,
            _MARK: mark,
            "PREFECT_HOME": str(folder),
            "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
            "PREFECT_API_LOG_RETRYABLE_ERRORS": "true",  # why it was too busy
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PYTHONPATH": str(_REPOSITORY),
        }
        shutil.copy(migrated_database, database)
        server = start_prefect_server(settings, log)
        try:
            assert server.wait_until_healthy(), _server_log(folder).read_text()
            with _running_worker(server, settings, folder) as installation:
                yield installation
        finally:
            server.terminate()
            _end_all(mark)


def _server_log(folder: Path) -> Path:
    return folder / "server.log"


@contextmanager
def _running_worker(server: PrefectServer, settings: Mapping[str, str], folder: Path) -> Iterator[Installation]:
    environment = {**settings, "PREFECT_API_URL": server.url}
    installation = Installation(server.url, folder / "worker.log", _server_log(folder))
    with installation.client() as client:
        client.create_work_pool(WorkPoolCreate(name=_POOL, type="process"))
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", _POOL, "--limit", "4"]
    with installation.log.open("wb") as log:
        worker = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    try:
        _deploy(environment)
        yield installation
    finally:
        worker.terminate()
        with suppress(subprocess.TimeoutExpired):
            worker.wait(10)


def _deploy(environment: Mapping[str, str]) -> None:
    program = str(Path(sys.executable).with_name("prefect-tune"))
    command = [program, "deploy", "tune", "resume", "--work-pool", _POOL, "--no-automations"]
    process = subprocess.run(command, env=environment, cwd=_REPOSITORY, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr


def _end_all(mark: str) -> None:
    """End all processes started here that still run: flows of a dead worker, and their children."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid() and _has_mark(entry, mark):
            with suppress(ProcessLookupError):
                os.kill(int(entry.name), signal.SIGKILL)


def _has_mark(process: Path, mark: str) -> bool:
    with suppress(OSError):
        return f"{_MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
    return False


# Searches that run until a test ends them, and the contents of their journals.


STEPS = 300
SAVE_INTERVAL = 25
LINGERS_AT = SAVE_INTERVAL + 1
"""The step from which on the trials are slow: a checkpoint is committed by then."""
_TIMEOUT = timedelta(minutes=4)


@dataclass(frozen=True)
class Search:
    """A search whose trials are slow until the file `hurry` exists."""

    folder: Path
    experiment: str
    space: Mapping[str, Any]
    num_samples: int = 1
    also: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the flow."""

    @property
    def parameters(self) -> dict[str, Any]:
        files = {"hurry": str(self.folder / "hurry"), "mended": str(self.folder / "mended")}
        return {
            "trainable": "tests.trainables.counting:Descent",
            "space": {**self.space, **files, "lingers_at": LINGERS_AT},
            "target": str(self.folder / "target"),
            "experiment": self.experiment,
            "metric": "loss",
            "num_samples": self.num_samples,
            "stop": {"step": STEPS},
            **self.also,
        }

    def hurry(self) -> None:
        (self.folder / "hurry").touch()

    def mend(self) -> None:
        (self.folder / "mended").touch()

    def trials(self) -> Mapping[str, Trial]:
        """Return its trials by the journals on the target."""
        with LocalTarget(path=str(self.folder / "target")).open(timeout=_TIMEOUT) as store:
            return load_experiment(store, first_generation(self.experiment)).trials


def wait_until(condition: Callable[[], object], what: Callable[[], object]) -> None:
    """Return as soon as the condition holds; fail with `what()` when that takes minutes."""
    end = time.monotonic() + _TIMEOUT.total_seconds()
    while not condition():
        assert time.monotonic() < end, f"not within {_TIMEOUT}: {what()}"
        time.sleep(0.2)
