"""The maintenance flow of a target: its findings, its repairs, and that it disturbs no running search."""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import Artifact
from prefect.client.schemas.sorting import ArtifactSort

import prefect_tune as pt
from prefect_tune import maintenance
from prefect_tune.core.journal_events import ExperimentConfigured
from prefect_tune.core.storage.layout import JournalKey, TrialKey
from prefect_tune.flows.maintain import maintain
from prefect_tune.maintenance import DamageFinding, ExperimentMaintenance, MaintenanceReport, SkippedWork, format_report
from prefect_tune.stores.posix_store import PosixStore
from prefect_tune.tasks.maintenance import quarantine_checkpoints
from tests.core.small_search import SmallSearch, load_trial
from tests.fakes.checkpoints import read_files
from tests.fakes.searches.experiments import write_experiment
from tests.fakes.trial_processes import wait_until
from tests.flows.training import flip_bit, own_blobs, trial_at
from tests.long_cases import long_after
from tests.trainables.counting import Counting

_STEPS = [1, 2, 3, 4, 5, 6]
_SIZE = 50_000


@pytest.fixture
def target(no_prefect_server: None, tmp_path: Path) -> Path:
    del no_prefect_server
    write_experiment(tmp_path / "target", "digits", _STEPS, size=_SIZE)
    return tmp_path / "target"


@pytest.fixture
def server_target(prefect_server: str, tmp_path: Path) -> Path:
    """The same target, with a Prefect server for the reports."""
    assert prefect_server
    write_experiment(tmp_path / "target", "digits", _STEPS, size=_SIZE)
    return tmp_path / "target"


def live_steps(target: Path, experiment: str = "digits") -> list[int]:
    return [checkpoint.step for checkpoint in trial_at(pt.LocalTarget(path=str(target)), experiment).checkpoints]


# ------------------------------------------------------------------------------------------------ findings


def test_damage_is_found_put_aside_and_reported(target: Path) -> None:
    flip_bit(own_blobs(pt.LocalTarget(path=target), "digits", 4)[0])
    with pytest.raises(
        pt.DamageFound, match=r"digits/1/trials/trial/checkpoints/0000000004.* damaged.*quarantined"
    ) as damage:
        pt.maintain(str(target), verify="all")
    report = damage.value.report
    assert isinstance(report, MaintenanceReport)
    assert [(checkpoint.step, checkpoint.is_quarantined) for checkpoint in report.damaged_checkpoints] == [(4, True)]
    assert (report.experiments[0].live_count, report.verified_count) == (6, 6)
    assert live_steps(target) == [1, 2, 3, 5, 6]

    again = pt.maintain(str(target), verify="all")
    assert (again.damaged_checkpoints, again.verified_count) == ([], 5)


class Killed(BaseException):
    """The process is dead."""


def test_damage_is_in_a_published_report_before_it_is_quarantined(
    server_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_bit(own_blobs(pt.LocalTarget(path=server_target), "digits", 4)[0])

    def quarantine_and_die(*args: Any) -> None:
        quarantine_checkpoints(*args)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(maintenance, "quarantine_checkpoints", quarantine_and_die)
        with pytest.raises(Killed):
            maintain(str(server_target), verify="all")
    assert live_steps(server_target) == [1, 2, 3, 5, 6]
    assert "| digits | trial trial, step 4 | damaged: " in report_texts(server_target)[-1]
    assert maintain(str(server_target), verify="all").damaged_checkpoints == []


def test_one_object_that_cannot_be_read_keeps_no_run_from_anything_else(target: Path) -> None:
    search = SmallSearch(PosixStore(target), "small", retention=pt.Retention())
    for name in "abc":
        search.add(name)
        search.start_attempt(name)
        for _ in range(3):
            search.train_step(name)
        search.finish_trial(name)
    manifest = break_manifest(target, "b")
    report = maintain(str(target), verify="all", retention=pt.Retention(last=1))
    small = next(experiment for experiment in report.experiments if experiment.experiment == "small")
    assert (small.damaged, small.verified_count, small.pruned_count) == ([], 8, 6)
    assert [skipped.work for skipped in small.skipped] == [manifest]
    assert (
        next(experiment for experiment in report.experiments if experiment.experiment == "digits").verified_count == 6
    )


@pytest.mark.long
def test_a_checkpoint_of_a_newer_release_is_refused_and_never_quarantined(target: Path) -> None:
    (newest,) = target.glob("digits/1/trials/trial/checkpoints/0000000006-*/manifest.json")
    manifest = newest.read_bytes()
    newest.chmod(0o644)
    newest.write_bytes(re.sub(rb'"version":\d+', b'"version":99', manifest))
    report = maintain(str(target), verify="all")
    assert report.damaged_checkpoints == []
    assert {"upgrade prefect-tune" in skipped.reason for skipped in report.skipped} == {True}
    newest.write_bytes(manifest)
    assert maintain(str(target), verify="all").verified_count == 6
    assert live_steps(target) == _STEPS


def break_manifest(target: Path, trial: str) -> str:
    """Make the oldest manifest of the trial unreadable; return its folder."""
    path = min(
        (target / TrialKey(experiment="small", generation=1, trial=trial).checkpoints_folder).glob("*/manifest.json")
    )
    path.unlink()
    path.symlink_to(path.name)
    return path.parent.relative_to(target).as_posix()


def test_a_damaged_journal_is_reported_each_time_and_the_others_are_looked_after(target: Path) -> None:
    write_experiment(target, "other", [2], size=_SIZE)
    flip_bit(target / JournalKey(experiment="digits", generation=1).entry_path(3))
    for folder in target.glob("digits/1/segments"):
        for path in folder.iterdir():
            path.unlink()
    for _ in range(2):
        with pytest.raises(pt.DamageFound, match="digits/1/journal") as damage:
            pt.maintain(str(target), verify="all")
    report = damage.value.report
    assert isinstance(report, MaintenanceReport)
    assert [checkpoint.folder for checkpoint in report.damaged_checkpoints] == ["digits/1/journal"]
    assert {skipped.experiment for skipped in report.skipped} == {"digits"}
    assert report.verified_count == 1


class Clock(datetime):
    """A clock that stands."""

    moment = datetime(2026, 11, 23, tzinfo=UTC)

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        return cls.moment.astimezone(tz)


@pytest.mark.long
def test_a_run_on_each_day_reads_everything_in_as_many_days_as_the_share_says(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("prefect_tune.flows.maintain"), "datetime", Clock)
    first, counts = Clock.moment - timedelta(days=Clock.moment.toordinal() % 3), list[int]()
    for day in range(3):
        monkeypatch.setattr(Clock, "moment", first + timedelta(days=day))
        counts.append(maintain(str(target), share="1/3", collect=False).verified_count)
    assert sum(counts) == 6


def test_what_the_limits_leave_is_in_the_report(target: Path) -> None:
    report = maintain(str(target), verify="all", max_verify_bytes=1)
    assert report.verified_count == 1
    assert [skipped.work for skipped in report.skipped] == ["5 checkpoints of this sample"]
    empty = maintain(str(target), time_budget_seconds=1e-9)
    assert [(skipped.work, skipped.reason) for skipped in empty.skipped] == [
        ("everything", "the time budget was spent")
    ]


# ------------------------------------------------------------------------------------------------- repairs


def test_a_finished_experiment_is_pruned_and_what_nobody_needs_is_deleted(target: Path) -> None:
    before = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    report = maintain(str(target), verify="none", retention=pt.Retention(last=2))
    assert (report.experiments[0].pruned_count, report.verified_count) == (4, 0)
    assert live_steps(target) == [5, 6]
    after = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    assert report.collected_bytes > 3 * _SIZE
    assert before - after > 3 * _SIZE
    assert maintain(str(target), verify="all").verified_count == 2


def test_the_best_checkpoint_of_all_stays_also_if_its_trial_is_not_the_best_at_the_end(target: Path) -> None:
    search = SmallSearch(PosixStore(target), "small", retention=pt.Retention())
    search.append(
        ExperimentConfigured(settings={"metric": "step", "mode": "min"})
    )  # each trial's first checkpoint is its best
    for name, count in {"short": 2, "long": 4}.items():
        search.add(name)
        search.start_attempt(name)
        for _ in range(count):
            search.train_step(name)
        search.finish_trial(name)
    dry = maintain(str(target), experiments=["small"], verify="none", retention=pt.Retention(last=1), dry_run=True)
    report = maintain(str(target), experiments=["small"], verify="none", retention=pt.Retention(last=1))
    assert (dry.experiments[0].pruned_count, report.experiments[0].pruned_count) == (2, 2)
    assert [checkpoint.step for checkpoint in load_trial(search.store, "small", "long").checkpoints] == [1, 4]
    assert len(load_trial(search.store, "small", "short").checkpoints) == 2, "the best trial by the last report"


def test_a_dry_run_changes_nothing_and_says_what_would_be(target: Path) -> None:
    flip_bit(own_blobs(pt.LocalTarget(path=target), "digits", 4)[0])
    before = read_files(target)
    with pytest.raises(pt.DamageFound) as damage:
        maintain(str(target), verify="all", retention=pt.Retention(last=2), dry_run=True)
    report = damage.value.report
    assert isinstance(report, MaintenanceReport)
    assert (report.experiments[0].pruned_count, len(report.damaged_checkpoints), report.dry_run) == (4, 1, True)
    assert report.summary.startswith("1 experiment: ")
    assert "4 would be pruned; their bytes and 0 B more would be deleted" in report.summary
    assert read_files(target) == before


def test_only_the_experiments_that_are_named_are_looked_after(target: Path) -> None:
    write_experiment(target, "nightly-1", [2], size=_SIZE)
    write_experiment(target, "nightly-2", [2], size=_SIZE)
    report = maintain(str(target), experiments=["nightly-*"], verify="none", collect=False)
    assert sorted(experiment.experiment for experiment in report.experiments) == ["nightly-1", "nightly-2"]


@pytest.mark.parametrize(
    ("options", "message"),
    long_after(
        2,
        [
            ({"experiments": ["digit"]}, "none of the 1 at .* matches 'digit'"),
            ({"share": "7"}, "share: expected one part of several, such as '1/7', found '7'"),
            ({"max_verify_bytes": 0}, "max_verify_bytes: Input should be greater than 0, found 0"),
            ({"time_budget_seconds": float("inf")}, "time_budget_seconds: Input should be a finite number, found inf"),
        ],
    ),
)
def test_what_cannot_be_is_refused_before_anything_is_begun(
    target: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(pt.InvalidInput, match=message):
        maintain(str(target), **options)


# ------------------------------------------------------------------------------------- beside running searches


class SlowCounting(Counting):
    """Trains slowly; its checkpoints have bytes that change and bytes that do not."""

    def step(self) -> Mapping[str, Any]:
        self.count += 1
        time.sleep(0.05)
        while self.count == 20 and not Path(self.config["gate"]).exists():
            time.sleep(0.05)
        return {"loss": self.config["x"] / self.count}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        super().save_checkpoint(checkpoint_dir)
        Path(checkpoint_dir, "backbone").write_bytes(b"b" * 100_000)


@pytest.mark.deep
@pytest.mark.usefixtures("prefect_server")
def test_beside_a_running_search_nothing_is_lost_and_nothing_that_lives_is_deleted(tmp_path: Path) -> None:
    target, reports, stop = tmp_path / "target", list[MaintenanceReport](), threading.Event()
    gate = tmp_path / "looked-after-twice"

    def maintain_repeatedly() -> None:
        while not stop.is_set():
            if (target / "running" / "1" / "journal").is_dir():
                reports.append(maintain(str(target), verify="all", retention=pt.Retention(last=1)))
            if len(reports) > 1:
                gate.touch()
            stop.wait(0.2)

    thread = threading.Thread(target=_collect_errors(maintain_repeatedly, errors := []))
    thread.start()
    try:
        results = pt.tune(
            SlowCounting,
            {"x": pt.grid_search([1.0, 2.0]), "gate": str(gate)},
            target=str(target),
            experiment="running",
            metric="loss",
            num_samples=1,
            stop={"step": 24},
            checkpoint=pt.Cadence(every_steps=4),
            retention=pt.Retention(last=2),
            max_concurrent_trials=2,
        )
    finally:
        stop.set()
        thread.join(120)
    assert errors == []
    assert len(reports) > 1
    assert not any(report.damaged_checkpoints for report in reports)
    assert [trial.step for trial in results.trials.values()] == [24] * 2
    for name in results.trials:
        folder = results.checkpoint(name).to_directory(str(tmp_path / name))
        assert read_files(folder)["count"] == b"24"
    last = maintain(str(target), verify="all", retention=pt.Retention(last=1))
    assert (last.damaged_checkpoints, last.experiments[0].undecided_count) == ([], 0)
    resumed = pt.resume("running", target=str(target), trainable=SlowCounting, stop={"step": 28})
    assert [trial.step for trial in resumed.trials.values()] == [28] * 2


def _collect_errors(act: Callable[[], None], errors: list[BaseException]) -> Callable[[], None]:
    def call() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: the test asserts on it
            errors.append(error)

    return call


# --------------------------------------------------------------------------------------- the page in the UI


def test_the_report_is_an_artifact_of_the_run_and_every_act_one_task_run(server_target: Path) -> None:
    maintain(str(server_target), verify="all", retention=pt.Retention(last=3))
    [page] = read_reports(server_target)
    assert "| digits |" in str(page.data)
    assert page.flow_run_id is not None
    acts = {"verify digits", "prune digits", "collect digits"}
    names = lambda: _read_task_run_names(page.flow_run_id)  # noqa: E731 - called twice
    wait_until(lambda: acts <= names(), seconds=60, what=lambda: str(names()))


def read_reports(target: Path) -> list[Artifact]:
    """The published reports of the target, oldest first."""
    key_filter = ArtifactFilter(key=ArtifactFilterKey(like_="maintenance-"))
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(artifact_filter=key_filter, sort=ArtifactSort.ID_DESC)
    return sorted(
        (artifact for artifact in artifacts if str(target) in str(artifact.data)),
        key=lambda artifact: str(artifact.created),
    )


def report_texts(target: Path) -> list[str]:
    return [str(artifact.data) for artifact in read_reports(target)]


def _read_task_run_names(flow_run: UUID) -> set[str]:
    """Return the names of the run's task runs on the server, which learns of them from events, after the run."""
    run_filter = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
    with get_client(sync_client=True) as client:
        return {run.name for run in client.read_task_runs(flow_run_filter=run_filter, limit=200)}


def test_the_page_says_first_what_is_wrong_and_lets_no_text_end_a_cell() -> None:
    bad = DamageFinding("e", "t", 3, "e/1/trials/t", "a \\| b\nc <i>", is_quarantined=True)
    journal = DamageFinding("e", None, None, "e/1/journal", "torn", is_quarantined=False)
    left = (SkippedWork("e", "garbage", "time"),) * 220
    report = MaintenanceReport("s3://b", (ExperimentMaintenance("e", damaged=[bad, journal]),), left, dry_run=True)
    page = format_report(report).replace("\N{NO-BREAK SPACE}", " ")
    assert page.index("| damaged") < page.index("| 0 of 0 checkpoints read") < page.index("| not checked: time |")
    assert r"| e | trial t, step 3 | damaged, quarantined: a \\\| b c \<i\> |" in page
    assert "| e | journal | damaged: torn |" in page
    assert "and 23 more" in page
    assert page.startswith("# Dry run")
