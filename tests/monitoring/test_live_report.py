"""The artifacts of an experiment in Prefect's UI, on a real server."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import (
    ArtifactCollectionFilter,
    ArtifactCollectionFilterKey,
    ArtifactFilter,
    ArtifactFilterKey,
)
from prefect.client.schemas.objects import Artifact
from prefect.settings import PREFECT_API_URL, temporary_settings

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import AttemptStarted, Owner, StepReported, TrialAdded
from prefect_tune.core.values import StepReport
from prefect_tune.monitoring import live_report
from prefect_tune.monitoring.live_report import ArtifactContent, ArtifactPublisher, EarlierArtifacts, make_artifact_key
from prefect_tune.monitoring.search_observer import ObserverGroup, SearchRecorder
from prefect_tune.reporting.page import make_page
from prefect_tune.terminal.formatting import format_cell
from prefect_tune.terminal.progress_view import SearchExtent
from tests.fakes.searches.journal_builder import JournalBuilder
from tests.fakes.servers.tcp_proxy import TcpProxy
from tests.fakes.trial_processes import wait_until
from tests.trainables.counting import Patient

pytestmark = pytest.mark.usefixtures("prefect_server")
LOG = logging.getLogger("a flow run")
TIMEOUT = timedelta(seconds=20)
INTERVAL = timedelta(seconds=0.05)


@pytest.fixture
def no_refresh_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refresh the artifacts without pauses."""
    monkeypatch.setattr(live_report, "_FIRST_DELAY", timedelta(0))
    monkeypatch.setattr(live_report, "MIN_REFRESH_INTERVAL", INTERVAL)
    monkeypatch.setattr(live_report, "_PAUSE_FACTOR", 1)


def read_artifacts(key: str) -> Sequence[Artifact]:
    """All artifacts with this key, the newest last."""
    only = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
    with get_client(sync_client=True) as client:
        return sorted(client.read_artifacts(artifact_filter=only), key=lambda artifact: str(artifact.created))


def artifact_keys(experiment: str) -> Sequence[str]:
    """The keys of an experiment's artifacts; a key appears once for each of its versions."""
    only = ArtifactFilter(key=ArtifactFilterKey(like_=f"%{experiment}%"))
    with get_client(sync_client=True) as client:
        return sorted(str(artifact.key) for artifact in client.read_artifacts(artifact_filter=only))


def read_page(key: str) -> str:
    return str(read_artifacts(key)[-1].data)


def run_search(
    folder: Path,
    name: str,
    trainable: type[pt.Trainable] | str = "tests.trainables.digits_table:DigitsTable",
    **options: Any,
) -> pt.Results:
    common: dict[str, Any] = {
        "space": {"row": pt.randint(0, 159)},
        "target": str(folder / "target"),
        "experiment": name,
        "metric": "error",
        "num_samples": 4,
        "stop": {"step": 9},
        "scheduler": pt.ASHA(max_t=9, variant="stopping"),
        "checkpoint": pt.Cadence(every_steps=3),
        "max_concurrent_trials": 2,
        "isolation": "thread",
    }
    return pt.tune(trainable, **{**common, **options})


def test_a_search_leaves_one_report_and_how_far_it_came(tmp_path: Path) -> None:
    results = run_search(tmp_path, "reported")
    (report,) = read_artifacts("report-reported")
    text = str(report.data)
    assert report.flow_run_id is not None
    best = f"{format_cell(results.best.metrics['error'])} (trial {results.best.id})"
    assert f"**Best error: {best} · 4 of 4 trials done" in text
    assert text.count("](data:image/svg+xml;base64,") >= 3
    assert text.count("/runs/task-run/") >= 4
    (progress,) = read_artifacts("progress-reported")
    assert (progress.type, progress.data) == ("progress", 100.0)
    assert progress.description == "Experiment reported: 4 of 4 trials done"


@pytest.mark.usefixtures("no_refresh_delay")
def test_after_a_resume_the_report_tells_of_both_runs_and_each_run_has_a_version_of_the_two_keys(
    tmp_path: Path,
) -> None:
    run_search(tmp_path, "twice", space={"row": pt.randint(0, 159), "step_seconds": 0.1})
    assert artifact_keys("twice") == ["progress-twice", "report-twice"]
    pt.resume("twice", target=str(tmp_path / "target"), num_samples=5)
    assert artifact_keys("twice") == ["progress-twice"] * 2 + ["report-twice"] * 2
    first, second = read_artifacts("report-twice")
    assert "5 of 5 trials done" in str(second.data)
    assert "## Runs" in str(second.data)
    assert "## Runs" not in str(first.data)
    assert first.flow_run_id != second.flow_run_id
    with get_client(sync_client=True) as client:
        only = ArtifactCollectionFilter(key=ArtifactCollectionFilterKey(any_=["report-twice"]))
        latest = client.read_latest_artifacts(artifact_filter=only)
    assert [artifact.latest_id for artifact in latest] == [second.id]


def test_what_a_killed_run_left_of_its_trials_is_deleted_by_the_next_one_on_the_same_target(tmp_path: Path) -> None:
    results = run_search(tmp_path, "killed")
    uri = results.target.uri
    own_keys, other_keys = (
        [live_report._make_progress_artifact_key(results.experiment, trial, target_uri) for trial in ("00000", "00002")]
        for target_uri in (uri, f"{uri}-2")
    )
    other_keys.append("progress-killed-again")
    with get_client(sync_client=True) as client:
        for key in (*own_keys, *other_keys):
            client.create_artifact(ArtifactCreate(key=key, type="progress", data=50.0))
    pt.resume("killed", target=str(tmp_path / "target"), num_samples=5)
    assert {key for key in artifact_keys("killed") if key in (*own_keys, *other_keys)} == set(other_keys)


class Watcher(pt.Callback):
    """Looks at the UI while the trial trains, which goes on when there is something to be seen."""

    name = "looks"

    def __init__(self, resume_file: Path) -> None:
        self.resume_file = resume_file
        self.seen: list[tuple[str, float]] = []
        self.task_runs: set[object] = set()

    def on_trial_result(self, trial: Trial, report: StepReport) -> None:
        if trial.id == "00000" and report.step == 2:
            wait_until(self._poll, seconds=240, what=lambda: f"{artifact_keys('watched')}")
            self.resume_file.touch()
        elif trial.id == "00000" and report.step > 2:
            self._poll()

    def _poll(self) -> bool:
        artifacts = [artifact for key in artifact_keys("watched-00000-") for artifact in read_artifacts(key)]
        if not artifacts or not float(str(artifacts[-1].data)) or not read_artifacts("report-watched"):
            return False
        self.seen.append((read_page("report-watched"), float(str(artifacts[-1].data))))
        self.task_runs |= {artifact.task_run_id for artifact in artifacts}
        return True


@pytest.mark.usefixtures("no_refresh_delay")
def test_while_it_runs_the_report_and_the_progress_are_kept_current_in_place(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path / "goes-on")
    options = {"space": {"until": str(watcher.resume_file)}, "num_samples": 2, "max_concurrent_trials": 1}
    run_search(tmp_path, "watched", Patient, **options, metric="loss", scheduler=None, callbacks=[watcher])
    pages = [report for report, _ in watcher.seen]
    assert "· 1 running" in pages[0]
    assert re.search(r"\| \d{4}-\d\d-\d\d [\d:]{8} UTC; refreshed at most every .* until the run ends \|", pages[0])
    assert re.search(rf"\| running \| \d+ \| {re.escape(socket.gethostname())} \|", pages[0])
    assert "· 1 running" not in read_page("report-watched")
    assert "**as of**" not in read_page("report-watched")
    shares = [share for _, share in watcher.seen]
    assert shares == sorted(shares)
    assert 0 < shares[0] < 100
    assert len(watcher.task_runs - {None}) == 1, "the progress artifact is created once, by its task run"
    assert artifact_keys("watched") == ["progress-watched", "report-watched"]
    assert read_artifacts("progress-watched")[0].data == 100.0


def test_where_it_is_not_known_how_far_there_is_to_go_there_is_no_progress(tmp_path: Path) -> None:
    search = JournalBuilder(name="endless")
    recorder = SearchRecorder(search.state)
    observer = live_report.ReportObserver(LocalTarget(path=str(tmp_path)), recorder, SearchExtent("endless"), LOG)
    added = TrialAdded(trial="0", config={"x": 1})
    search.record(added)
    ObserverGroup([recorder, observer], LOG).on_event(added, search.state)
    observer.publisher.close(TIMEOUT)
    assert "1 pending" in read_page("report-endless")
    assert read_artifacts("progress-endless") == []


def test_a_trial_that_begins_while_the_report_is_drawn_is_on_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    search, plan = JournalBuilder(name="hurried"), SearchExtent("hurried", trial_count=3, max_steps=9)
    recorder = SearchRecorder(search.state)
    observer = live_report.ReportObserver(LocalTarget(path=str(tmp_path)), recorder, plan, LOG)
    observers = ObserverGroup([recorder, observer], LOG)

    def begin_trial(name: str) -> None:
        report = StepReported(trial=name, report=StepReport(step=3, metrics={"loss": 0.5}))
        started = AttemptStarted(trial=name, attempt=1, from_step=0)
        for event in (TrialAdded(trial=name, config={"x": 1}), started, report):
            search.record(event)
            observers.on_event(event, search.state)

    def begin_and_make_page(*args: Any) -> Any:
        begin_trial("1")
        return make_page(*args)

    monkeypatch.setattr(live_report, "make_page", begin_and_make_page)
    begin_trial("0")
    observer.publisher.close(TIMEOUT)
    assert "could not be" not in caplog.text + read_page("report-hurried")
    assert "0 of 3 trials done · 1 running" in read_page("report-hurried")
    keys = [key[:19] for key in artifact_keys("hurried")]
    assert keys == ["progress-hurried", "progress-hurried-0-", "report-hurried"]


@pytest.fixture
def proxy(prefect_server: str) -> Iterator[TcpProxy]:
    port = urlsplit(prefect_server).port
    assert port is not None
    with TcpProxy(port) as proxy, temporary_settings({PREFECT_API_URL: f"{proxy.url}/api"}):
        yield proxy


def make_contents(key: str, data: Callable[[], str]) -> Callable[[], Sequence[ArtifactContent]]:
    return lambda: [ArtifactContent(key, "markdown", data(), "a page")]


@pytest.mark.long
@pytest.mark.usefixtures("no_refresh_delay")
def test_an_api_that_goes_away_is_told_the_newest_when_it_is_back(proxy: TcpProxy, prefect_server: str) -> None:
    texts = ["first"]
    publisher = ArtifactPublisher(make_contents("report-outage", lambda: texts[-1]), INTERVAL, LOG)
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        publisher.notify_change()
        wait_until(lambda: read_artifacts("report-outage"), seconds=60, what=lambda: "nothing is shown")
        proxy.refuse()
        for text in ("second", "third"):
            texts.append(text)
            publisher.notify_change()
            time.sleep(0.2)
        assert read_page("report-outage") == "first"
        proxy.restore()
        wait_until(lambda: read_page("report-outage") == "third", seconds=60, what=lambda: read_page("report-outage"))
        publisher.close(TIMEOUT)
        assert len(read_artifacts("report-outage")) == 1


def test_an_end_without_an_api_is_not_waited_for(proxy: TcpProxy) -> None:
    proxy.swallow()
    publisher = ArtifactPublisher(make_contents("report-nobody", lambda: "a page"), INTERVAL, LOG)
    start = time.monotonic()
    publisher.close(timedelta(seconds=0.5))
    assert time.monotonic() - start < 5


def test_what_is_short_is_shown_once_in_the_end() -> None:
    numbers = count(1)
    publisher = ArtifactPublisher(make_contents("report-short", lambda: f"drawn {next(numbers)}"), INTERVAL, LOG)
    publisher.notify_change()
    publisher.close(TIMEOUT)
    assert [artifact.data for artifact in read_artifacts("report-short")] == ["drawn 1"]
    assert next(numbers) == 2


def test_what_is_somebody_elses_now_is_left_alone() -> None:
    publisher = ArtifactPublisher(make_contents("report-left", lambda: "old"), INTERVAL, LOG)
    publisher.notify_change()
    publisher.stop_publishing()
    publisher.close(TIMEOUT)
    assert read_artifacts("report-left") == []


@pytest.mark.usefixtures("no_refresh_delay")
def test_an_artifact_that_somebody_deleted_is_made_again() -> None:
    texts = ["first"]
    publisher = ArtifactPublisher(make_contents("report-deleted", lambda: texts[-1]), INTERVAL, LOG)
    publisher.notify_change()
    wait_until(lambda: read_artifacts("report-deleted"), seconds=60, what=lambda: "nothing is shown")
    with get_client(sync_client=True) as client:
        client.delete_artifact(read_artifacts("report-deleted")[0].id)
    texts.append("second")
    publisher.notify_change()
    publisher.close(TIMEOUT)
    assert read_page("report-deleted") == "second"


@pytest.mark.usefixtures("no_refresh_delay")
def test_a_page_that_cannot_be_drawn_is_told_in_the_log_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    errors = [ZeroDivisionError]

    def render() -> str:
        if errors:
            raise errors.pop()
        return "drawn"

    publisher = ArtifactPublisher(make_contents("report-broken", render), INTERVAL, LOG)
    publisher.notify_change()
    wait_until(lambda: "the report could not be rendered" in caplog.text, seconds=60, what=lambda: caplog.text)
    publisher.notify_change()
    publisher.close(TIMEOUT)
    assert read_page("report-broken") == "drawn"


@pytest.mark.usefixtures("no_refresh_delay")
def test_an_artifact_that_cannot_be_created_is_logged_and_the_next_one_is_published(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs: list[str | None] = ["no id of a run"]
    publisher = ArtifactPublisher(
        lambda: [ArtifactContent("report-refused", "markdown", "drawn", "a page", runs[-1])], INTERVAL, LOG
    )
    publisher.notify_change()
    wait_until(lambda: "the report could not be published" in caplog.text, seconds=60, what=lambda: caplog.text)
    runs.append(None)
    publisher.notify_change()
    publisher.close(TIMEOUT)
    assert read_page("report-refused") == "drawn"


def test_a_run_that_starts_again_continues_its_artifacts_and_leaves_those_of_other_runs() -> None:
    earlier = EarlierArtifacts(frozenset({"report-again"}), frozenset(), "progress-again-")

    @flow
    def publish(last_text: str) -> None:
        for text in ("first", last_text):  # as after a Retry, in another process
            contents = make_contents("report-again", lambda text=text: text)
            publisher = ArtifactPublisher(contents, INTERVAL, LOG, earlier)
            publisher.notify_change()
            publisher.close(TIMEOUT)

    publish("second")
    publish("third")
    assert [artifact.data for artifact in read_artifacts("report-again")] == ["second", "third"]


@pytest.mark.usefixtures("no_refresh_delay")
def test_what_is_no_longer_rendered_is_deleted_and_another_task_run_gets_one_of_its_own() -> None:
    runs = [["1b7e3c1e-0000-4000-8000-000000000001"], ["1b7e3c1e-0000-4000-8000-000000000002"], []]
    now = [runs[0]]
    publisher = ArtifactPublisher(
        lambda: [ArtifactContent("progress-gone", "progress", 10.0, "", run) for run in now[0]], INTERVAL, LOG
    )

    def shows_current_run() -> bool:
        return [str(artifact.task_run_id) for artifact in read_artifacts("progress-gone")] == now[0]

    for now[0] in runs:
        publisher.notify_change()
        wait_until(shows_current_run, seconds=60, what=lambda: str(now))
    publisher.close(TIMEOUT)


def test_a_key_tells_apart_names_that_look_alike() -> None:
    assert make_artifact_key("report", "rates-2") == "report-rates-2"
    assert len({make_artifact_key("report", name) for name in ("a.b", "a_b", "A.b", "a-b")}) == 4


def test_a_run_is_linked_to_as_narrowly_as_it_is_known() -> None:
    task, flow = "1b7e3c1e-0000-4000-8000-000000000001", "1b7e3c1e-0000-4000-8000-000000000002"
    owner = Owner(name="n", host="h", pid=1, flow_run=flow)
    assert str(live_report.make_run_url(owner)).endswith(f"/runs/flow-run/{flow}")
    assert str(live_report.make_run_url(owner.model_copy(update={"task_run": task}))).endswith(f"/runs/task-run/{task}")
    assert live_report.make_run_url(Owner(name="a script", host="h", pid=1)) is None
