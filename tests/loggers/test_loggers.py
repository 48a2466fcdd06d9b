"""Loggers: their files and servers are read in the formats of the tools, also after kills and retries."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest

import prefect_tune as pt
from prefect_tune.callbacks import Callback, SearchInfo
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import AttemptEnded, AttemptStarted, Cause, TrialErrored, TrialFinished
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import StepReport
from tests.fakes.trial_processes import wait_until

SEARCH = SearchInfo("e", "file:///target", Objective(metrics=("loss",), modes=("min",)))
CONFIG = {"lr": 0.1, "model": {"depth": 2}}


def make_trial(name: str = "00000", **facts: object) -> Trial:
    return Trial.model_validate({"id": name, "config": CONFIG, **facts})


def start_trial(callback: Callback, *, name: str = "00000", from_step: int = 0) -> None:
    callback.on_trial_start(make_trial(name), AttemptStarted(trial=name, attempt=1, from_step=from_step))


def report(callback: Callback, step: int, /, *, name: str = "00000", **metrics: object) -> None:
    """Report a step of a trial; its loss falls as 1 / step."""
    step_report = StepReport(step=step, metrics={"loss": 1 / step, **metrics}, trained_seconds=step * 0.5)
    callback.on_trial_result(make_trial(name, step=step), step_report)


def end_attempt(callback: Callback, *, name: str = "00000") -> None:
    """End the attempt, as if the machine killed it."""
    callback.on_trial_recover(make_trial(name), AttemptEnded(trial=name, cause=Cause.MACHINE, reason="killed"))


def finish_trial(callback: Callback, *, name: str = "00000", **facts: object) -> None:
    callback.on_trial_complete(make_trial(name, **facts), TrialFinished(trial=name, reason="had enough"))


def fail_trial(callback: Callback, *, name: str = "00000") -> None:
    error = TrialErrored(trial=name, cause=Cause.TRAINABLE, reason="ValueError: in a mood")
    callback.on_trial_error(make_trial(name), error)


# Loggers that write files with rows: one row per step, also after kills and retries.


FileFormat: TypeAlias = Literal["csv", "json"]


@pytest.fixture(params=["json", "csv"])
def file_format(request: pytest.FixtureRequest) -> FileFormat:
    return request.param


@pytest.fixture
def logger(tmp_path: Path, file_format: FileFormat) -> pt.FileLogger:
    return make_file_logger(tmp_path, file_format)


def make_file_logger(folder: Path, file_format: FileFormat) -> pt.FileLogger:
    logger = pt.FileLogger(folder, file_format)
    logger.setup(SEARCH)
    return logger


def read_rows(folder: Path, trial: str = "00000") -> Sequence[Mapping[str, object]]:
    path = folder / "e" / trial / "result.json"
    if path.exists():
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.with_name("progress.csv").open(newline="") as file:
        return [{name: _parse_value(value) for name, value in row.items()} for row in csv.DictReader(file)]


def _parse_value(value: str) -> object:
    return json.loads(value) if value[:1].isdigit() and value != "00000" else value


def read_steps(folder: Path) -> Sequence[object]:
    return [row["step"] for row in read_rows(folder)]


def test_each_step_is_a_row_and_the_configuration_a_file(logger: pt.FileLogger, tmp_path: Path) -> None:
    start_trial(logger)
    report(logger, 1)
    report(logger, 2)
    finish_trial(logger)
    assert read_rows(tmp_path) == [
        {"trial": "00000", "step": 1, "trained_seconds": 0.5, "loss": 1.0},
        {"trial": "00000", "step": 2, "trained_seconds": 1.0, "loss": 0.5},
    ]
    assert json.loads((tmp_path / "e/00000/params.json").read_text()) == CONFIG


def test_steps_that_are_trained_again_take_the_place_of_what_they_were(logger: pt.FileLogger, tmp_path: Path) -> None:
    start_trial(logger)
    for step in (1, 2, 3):
        report(logger, step, try_=1)
    start_trial(logger, from_step=1)
    assert read_steps(tmp_path) == [1]
    report(logger, 2, try_=2)
    assert [(row["step"], row["try_"]) for row in read_rows(tmp_path)] == [(1, 1), (2, 2)]


def test_a_step_that_is_told_twice_is_one_row(logger: pt.FileLogger, tmp_path: Path) -> None:
    start_trial(logger)
    for step in (1, 2, 2):
        report(logger, step)
    assert read_steps(tmp_path) == [1, 2]


def test_a_row_that_a_crash_has_torn_counts_as_never_written(
    logger: pt.FileLogger, tmp_path: Path, file_format: FileFormat
) -> None:
    start_trial(logger)
    report(logger, 1)
    (path,) = [path for path in (tmp_path / "e/00000").iterdir() if path.name in ("result.json", "progress.csv")]
    with path.open("a") as file:
        file.write('{"trial": "00000", "st' if path.suffix == ".json" else "00000,2,1")
    again = make_file_logger(tmp_path, file_format)
    report(again, 1)
    report(again, 2)
    assert read_steps(tmp_path) == [1, 2]


def test_trials_that_errored_keep_their_rows(logger: pt.FileLogger, tmp_path: Path) -> None:
    start_trial(logger)
    report(logger, 1)
    fail_trial(logger)
    logger.get_state()
    assert read_steps(tmp_path) == [1]
    start_trial(logger)  # tried again, from nothing
    report(logger, 1)
    report(logger, 2)
    assert read_steps(tmp_path) == [1, 2]


def test_the_state_is_stored_after_the_rows_are_on_the_disk(
    logger: pt.FileLogger, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("prefect_tune.loggers.file_logger.sync_to_disk", synced.append)
    for name in ("running", "ended"):
        start_trial(logger, name=name)
        report(logger, 1, name=name)
    finish_trial(logger, name="ended")
    logger.get_state()
    assert {path.parent.name for path in synced if path.suffix} == {"running", "ended"}


def test_only_where_its_files_are_it_goes_on_with_them(
    logger: pt.FileLogger, tmp_path: Path, file_format: FileFormat
) -> None:
    state = logger.get_state()
    assert state is not None
    assert make_file_logger(tmp_path, file_format).set_state(state)
    assert make_file_logger(tmp_path / "another machine", file_format).set_state(state) is False
    other_format = pt.FileLogger(tmp_path, "csv" if file_format == "json" else "json")
    assert other_format.name != logger.name, "the stored states are separate"


def test_a_metric_that_comes_late_gets_a_column_then(tmp_path: Path) -> None:
    logger = make_file_logger(tmp_path, "csv")
    start_trial(logger)
    report(logger, 1)
    report(logger, 2, eval={"loss": 7}, note="two\nlines, and a comma")
    first, second = read_rows(tmp_path)
    assert (first["eval/loss"], first["note"]) == ("", "")
    assert (second["eval/loss"], second["note"]) == (7, '"two\\nlines, and a comma"')


def test_a_metric_cannot_pretend_to_be_another_trials_step(logger: pt.FileLogger, tmp_path: Path) -> None:
    start_trial(logger)
    report(logger, 1, step=99, trial="another")
    assert [(row["step"], row["trial"]) for row in read_rows(tmp_path)] == [(1, "00000")]


def test_two_loggers_in_one_directory_write_at_once(tmp_path: Path) -> None:
    loggers = [pt.FileLogger(tmp_path, "json"), pt.FileLogger(tmp_path)]
    names = [f"{number:05d}" for number in range(100)]
    both = threading.Barrier(2)

    def start_trials(logger: pt.FileLogger) -> None:
        logger.setup(SEARCH)
        for name in names:
            both.wait(60)
            start_trial(logger, name=name)
            report(logger, 1, name=name)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(start_trials, loggers))
    for name in names:
        folder = tmp_path / "e" / name
        assert json.loads((folder / "params.json").read_text()) == CONFIG
        assert sorted(file.name for file in folder.iterdir()) == ["params.json", "progress.csv", "result.json"]


def test_an_unknown_format_and_the_names_of_earlier_classes_are_refused() -> None:
    with pytest.raises(pt.InvalidInput, match="expected the format 'csv' or 'json', found 'tsv'"):
        pt.FileLogger("logs", "tsv")
    with pytest.raises(AttributeError, match=r"use pt\.FileLogger"):
        _ = pt.JSONLogger


# ---------------------------------------------------------------------------------------------- TensorBoard


@pytest.fixture
def tensorboard(tmp_path: Path) -> pt.TensorBoardLogger:
    logger = pt.TensorBoardLogger(tmp_path)
    logger.setup(SEARCH)
    return logger


def read_scalars(folder: Path) -> Mapping[str, Mapping[int, float]]:
    """Return what TensorBoard shows: a session that starts at a step purges that step and all later ones."""
    scalars: dict[str, dict[int, float]] = {}
    for event in _read_events(folder):
        if event.HasField("session_log"):
            scalars = {
                tag: {step: value for step, value in points.items() if step < event.step}
                for tag, points in scalars.items()
            }
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                scalars.setdefault(value.tag, {})[event.step] = value.simple_value
    return scalars


def _read_events(folder: Path) -> Iterator[Any]:
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.glob("*.tfevents.*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")  # then a checksum of the length, the event, and its checksum
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_tensorboard_shows_numbers_by_step(tensorboard: pt.TensorBoardLogger, tmp_path: Path) -> None:
    start_trial(tensorboard)
    report(tensorboard, 1, eval={"loss": 3}, note="no number")
    report(tensorboard, 2)
    finish_trial(tensorboard, metrics={"loss": 0.5})
    assert read_scalars(tmp_path / "e/00000") == {"loss": {1: 1.0, 2: 0.5}, "eval/loss": {1: 3.0}}


def test_tensorboard_shows_the_configuration_at_the_end(tensorboard: pt.TensorBoardLogger, tmp_path: Path) -> None:
    start_trial(tensorboard)
    finish_trial(tensorboard)
    tags = {value.tag for event in _read_events(tmp_path / "e/00000") for value in event.summary.value}
    (path,) = (tmp_path / "e/00000").glob("*.tfevents.*")
    assert "_hparams_/session_start_info" in tags
    assert b"model/depth" in path.read_bytes()


def test_tensorboard_shows_steps_that_are_trained_again_once(tensorboard: pt.TensorBoardLogger, tmp_path: Path) -> None:
    start_trial(tensorboard)
    for step in (1, 2, 3):
        report(tensorboard, step)
    start_trial(tensorboard, from_step=1)
    report(tensorboard, 2, again=1)
    tensorboard.on_experiment_end({})
    assert read_scalars(tmp_path / "e/00000") == {"loss": {1: 1.0, 2: 0.5}, "again": {2: 1.0}}


def test_what_tensorboard_was_told_survives_the_process_once_its_state_is_kept(
    tensorboard: pt.TensorBoardLogger, tmp_path: Path
) -> None:
    start_trial(tensorboard)
    report(tensorboard, 1)
    tensorboard.get_state()
    assert read_scalars(tmp_path / "e/00000") == {"loss": {1: 1.0}}


# --------------------------------------------------------------------------------------------------- MLflow


@pytest.fixture
def mlflow_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the only store without a server
    return (tmp_path / "mlruns").as_uri()


def make_mlflow_logger(uri: str, search: pt.SearchInfo = SEARCH, **options: Any) -> pt.MLflowLogger:
    logger = pt.MLflowLogger(uri, **options)
    logger.setup(search)
    return logger


def list_runs(uri: str, experiment: str = "e") -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    info = client.get_experiment_by_name(experiment)
    assert info is not None
    return list(client.search_runs([info.experiment_id]))


def read_history(uri: str, run: str, metric: str = "loss") -> dict[int, float]:
    from mlflow import MlflowClient

    return {point.step: point.value for point in MlflowClient(tracking_uri=uri).get_metric_history(run, metric)}


def read_points(uri: str, run: str, metric: str = "loss") -> list[tuple[int, float]]:
    """Return all points of a metric in the order in which MLflow draws them."""
    from mlflow import MlflowClient

    metrics = MlflowClient(tracking_uri=uri).get_metric_history(run, metric)
    return [(point.step, point.value) for point in sorted(metrics, key=lambda point: (point.step, point.timestamp))]


def test_mlflow_has_a_run_for_each_trial(mlflow_uri: str) -> None:
    logger = make_mlflow_logger(mlflow_uri, tags={"team": "vision"})
    for name in ("00000", "00001"):
        start_trial(logger, name=name)
        report(logger, 1, name=name)
    report(logger, 2, name="00001", eval={"loss": 3})
    finish_trial(logger, name="00000")
    fail_trial(logger, name="00001")
    second, first = sorted(list_runs(mlflow_uri), key=lambda run: str(run.info.run_name), reverse=True)
    assert first.data.params == {"lr": "0.1", "model/depth": "2"}
    assert (first.info.status, second.info.status) == ("FINISHED", "FAILED")
    assert second.data.tags["prefect_tune.reason"] == "ValueError: in a mood"
    assert {run.data.tags["team"] for run in (first, second)} == {"vision"}
    assert read_history(mlflow_uri, second.info.run_id) == {1: 1.0, 2: 0.5}
    assert read_history(mlflow_uri, second.info.run_id, "eval/loss") == {2: 3.0}


def test_a_trial_keeps_its_mlflow_run_when_lost_steps_are_trained_again(mlflow_uri: str) -> None:
    logger = make_mlflow_logger(mlflow_uri)
    start_trial(logger)
    for step in (1, 2, 3):
        report(logger, step)
    (before,) = list_runs(mlflow_uri)
    end_attempt(logger)
    again = make_mlflow_logger(mlflow_uri)  # in another process
    start_trial(again, from_step=1)
    report(again, 2, redone=1)
    report(again, 3, loss=0.25)
    report(again, 4)
    finish_trial(again, step=4, metrics={"loss": 0.25})
    (run,) = list_runs(mlflow_uri)
    assert run.info.run_id == before.info.run_id
    assert (run.info.status, run.data.metrics["loss"]) == ("FINISHED", 0.25)
    assert read_points(mlflow_uri, run.info.run_id) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (3, 0.25), (4, 0.25)]
    assert read_history(mlflow_uri, run.info.run_id, "redone") == {2: 1.0}
    assert run.data.params == {"lr": "0.1", "model/depth": "2"}


def test_all_that_is_delivered_again_changes_no_mlflow_run(mlflow_uri: str) -> None:
    for _ in range(3):
        logger = make_mlflow_logger(mlflow_uri)
        for name in ("00000", "00001"):
            start_trial(logger, name=name)
            report(logger, 1, name=name)
            report(logger, 2, name=name)
    mlflow_runs = list_runs(mlflow_uri)
    assert len(mlflow_runs) == 2
    for run in mlflow_runs:
        for metric in ("loss", "trained_seconds"):
            assert [step for step, _ in read_points(mlflow_uri, run.info.run_id, metric)] == [1, 2]


def test_names_that_mlflow_refuses_cost_no_other_value(mlflow_uri: str) -> None:
    logger, trial = make_mlflow_logger(mlflow_uri), make_trial(config={"lr@start": 0.1, "width": 3})
    logger.on_trial_start(trial, AttemptStarted(trial="00000", attempt=1, from_step=0))
    report(logger, 1, **{"acc@1": 0.5})
    (run,) = list_runs(mlflow_uri)
    assert run.data.params == {"lr_start": "0.1", "width": "3"}
    assert (run.data.metrics["acc_1"], run.data.metrics["loss"]) == (0.5, 1.0)


def test_a_run_that_a_person_deletes_is_replaced(mlflow_uri: str) -> None:
    from mlflow import MlflowClient, MlflowException

    logger = make_mlflow_logger(mlflow_uri)
    start_trial(logger)
    (run,) = list_runs(mlflow_uri)
    MlflowClient(mlflow_uri).delete_run(run.info.run_id)
    with pytest.raises(MlflowException, match="active"):
        report(logger, 1)
    report(logger, 2)
    (other,) = list_runs(mlflow_uri)
    assert other.info.run_id != run.info.run_id
    assert read_points(mlflow_uri, other.info.run_id) == [(2, 0.5)]


def test_mlflow_goes_on_only_in_the_experiment_it_began(mlflow_uri: str, tmp_path: Path) -> None:
    state = make_mlflow_logger(mlflow_uri).get_state()
    assert state is not None
    assert make_mlflow_logger(mlflow_uri).set_state(state)
    assert not make_mlflow_logger((tmp_path / "other").as_uri()).set_state(state)
    assert not make_mlflow_logger(mlflow_uri, experiment_name="other").set_state(state)


# ------------------------------------------------------------------------------------------ Weights & Biases


@pytest.fixture
def wandb_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], pt.WandbLogger]:
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")

    def make() -> pt.WandbLogger:
        logger = pt.WandbLogger(directory=tmp_path)
        logger.setup(SEARCH)
        return logger

    return make


def require_offline_run(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Wait for the rows: W&B writes the file in another process, sometimes after `finish` has returned."""
    wait_until(
        lambda: read_offline_runs(folder) == {"e-00000": rows},
        what=lambda: f"{rows}, found {read_offline_runs(folder)}",
    )


def read_offline_runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each offline run, by its name."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # the import makes it

    rows_by_run: dict[str, list[dict[str, Any]]] = {}
    for path in (folder / "e/wandb").glob("offline-run-*/*.wandb"):
        records = [Record.FromString(data) for data in _read_records(path.read_bytes())]
        rows = [record.history for record in records if record.WhichOneof("record_type") == "history"]
        name = path.stem.removeprefix("run-")
        assert name not in rows_by_run
        rows_by_run[name] = [_parse_row(record.item) for record in rows]
    return rows_by_run


def _parse_row(items: Any) -> dict[str, Any]:
    row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
    return {name: value for name, value in row.items() if not name.startswith("_")}


def _read_records(data: bytes) -> Iterator[bytes]:
    """Read a LevelDB log: blocks of 32 KiB with records, each after a checksum, its length and its kind."""
    offset, record = 7, b""  # after the seven bytes of the header
    while offset + 7 <= len(data):
        if -offset % 32768 < 7:
            offset += -offset % 32768
        length, kind = int.from_bytes(data[offset + 4 : offset + 6], "little"), data[offset + 6]
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of a record
            yield record
            record = b""


@pytest.mark.long
def test_wandb_has_one_run_for_each_trial_with_the_steps_that_count(
    wandb_logger: Callable[[], pt.WandbLogger], tmp_path: Path
) -> None:
    logger = wandb_logger()
    start_trial(logger)
    for step in (1, 2, 3):
        report(logger, step)
    logger.on_experiment_end({})
    again = wandb_logger()
    start_trial(again, from_step=2)
    report(again, 2, redone=1)
    finish_trial(again)
    rows = [{"trained_seconds": 0.5, "loss": 1.0}, {"trained_seconds": 1.0, "loss": 0.5, "redone": 1}]
    require_offline_run(tmp_path, rows)
    extended = wandb_logger()
    start_trial(extended, from_step=1)
    finish_trial(extended)
    require_offline_run(tmp_path, rows[:1])


# --------------------------------------------------------------------------------------- without any of them


@pytest.mark.parametrize(
    ("logger", "package", "extra"),
    [
        (pt.TensorBoardLogger, "tensorboardX", "tensorboard"),
        (pt.MLflowLogger, "mlflow", "mlflow"),
        (pt.WandbLogger, "wandb", "wandb"),
    ],
)
def test_a_package_that_is_missing_is_named_when_the_logger_is_made(
    logger: Callable[[], pt.Callback], package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "prefect_tune.loggers.file_logger.find_spec", lambda name: None if name == package else object()
    )
    with pytest.raises(pt.InvalidInput, match=rf"needs {package}, .*prefect-tune\[{extra}\]"):
        logger()
