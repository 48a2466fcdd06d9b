"""Bad input: one clear error each that says what and where, before any step is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.blocks import FsspecTarget, LocalTarget, S3Target
from prefect_tune.core.checkpoints.cadence import Cadence
from prefect_tune.core.errors import InvalidInput, ResumeFailed, StoreRefused, StoreUnavailable, TrialFailed
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.stoppers import MaxSteps, Plateau
from prefect_tune.flows.durable_trainable import durable_trainable
from tests.fakes.servers.processes import free_port
from tests.long_cases import long_after
from tests.trainables import faulty

Arguments = dict[str, Any]
_HERE = faulty.__name__


def _holds_a_generator() -> Callable[[dict[str, object]], None]:
    numbers = (number for number in range(3))

    def train(config: dict[str, object]) -> None:
        next(numbers)
        faulty.fine(config)

    return train


# The mistake; its arguments; the error; what the message names.
BEFORE_ANYTHING: list[tuple[str, Callable[[], Arguments], type[Exception], tuple[str, ...]]] = [
    ("unknown scheme", lambda: {"target": "floppy://a/b"}, InvalidInput, ("floppy",)),
    ("unknown block type", lambda: {"target": "s4-target/prod"}, InvalidInput, ("s4-target",)),
    ("block that is not saved", lambda: {"target": "s3-target/never-saved"}, InvalidInput, ("never-saved",)),
    ("experiment that escapes", lambda: {"experiment": "../other"}, InvalidInput, ("../other", "letters")),
    ("experiment without a name", lambda: {"experiment": ""}, InvalidInput, ("name ''",)),
    ("function in the config", lambda: {"config": {"f": print}}, InvalidInput, ("config.f", "builtin")),
    ("set in the config", lambda: {"config": {"s": {1, 2}}}, InvalidInput, ("config.s", "set")),
    ("NaN in the config", lambda: {"config": {"lr": float("nan")}}, InvalidInput, ("config.lr", "nan")),
    (
        "number for a name in the config",
        lambda: {"config": {"a": {1: 2}}},
        InvalidInput,
        ("config.a", "text for a key"),
    ),
    ("no trainable", lambda: {"trainable": None}, InvalidInput, ("trainable None", "pt.Trainable")),
    ("class without step", lambda: {"trainable": faulty.NoStep}, InvalidInput, ("NoStep", "`step`")),
    ("class that is no trainable", lambda: {"trainable": faulty.Plain}, InvalidInput, ("Plain(pt.Trainable)",)),
    ("trainable without step", lambda: {"trainable": faulty.Stepless}, InvalidInput, ("Stepless", "no `step`")),
    ("text that names nothing", lambda: {"trainable": "train"}, InvalidInput, ("'train'", "package.module:Name")),
    ("module that is not there", lambda: {"trainable": "no_such_module:Model"}, InvalidInput, ("no_such_module",)),
    ("package that is not there", lambda: {"trainable": "no_such.module:Model"}, InvalidInput, ("no_such",)),
    ("trainable with a generator", lambda: {"trainable": _holds_a_generator()}, InvalidInput, ("numbers", "generator")),
    ("function without a config", lambda: {"trainable": lambda: None}, InvalidInput, ("one argument", "<lambda>()")),
    ("function of two", lambda: {"trainable": faulty.of_two}, InvalidInput, ("of_two(_config: ", "_data: ")),
    ("setup without a config", lambda: {"trainable": faulty.NoConfig}, InvalidInput, ("setup(self, config)",)),
    ("it by its name", lambda: {"trainable": f"{_HERE}:NoConfig"}, InvalidInput, ("setup(self, config)",)),
    ("function of two by its name", lambda: {"trainable": f"{_HERE}:of_two"}, InvalidInput, ("of_two(_config: ",)),
    ("limit of no step", lambda: {"stop": {"step": -1}}, InvalidInput, ("'step'", "more than 0", "-1")),
    ("stop without metrics", lambda: {"stop": lambda: True}, InvalidInput, ("stop", "one argument", "<lambda>()")),
    ("web address", lambda: {"target": "https://host.example/runs"}, InvalidInput, ("https", "s3://bucket/prefix")),
    (
        "block of a web address",
        lambda: {"target": FsspecTarget(location="https://host.example/runs")},
        InvalidInput,
        ("https", "s3://bucket/prefix"),
    ),
    ("limit that is text", lambda: {"stop": {"step": "ten"}}, InvalidInput, ("'step'", "'ten'")),
    ("limit that is NaN", lambda: {"stop": {"loss": float("nan")}}, InvalidInput, ("'loss'", "nan")),
    ("stop that is a number", lambda: {"stop": 10}, InvalidInput, ("stop=10", "{'step': 100}")),
    ("no steps at all", lambda: {"stop": MaxSteps(0)}, InvalidInput, ("MaxSteps(0)",)),
    ("plateau of one report", lambda: {"stop": Plateau("loss", reports=1)}, InvalidInput, ("reports >= 2",)),
    ("save every 0 steps", lambda: {"checkpoint": Cadence(every_steps=0)}, ValueError, ("every_steps",)),
    ("save every -1 seconds", lambda: {"checkpoint": {"every_seconds": -1}}, InvalidInput, ("every_seconds",)),
    ("misspelt cadence", lambda: {"checkpoint": {"evry_steps": 5}}, InvalidInput, ("evry_steps",)),
    ("best by nothing", lambda: {"retention": Retention(best=2)}, ValueError, ("metric",)),
    ("keep the last 0", lambda: {"retention": {"last": 0}}, InvalidInput, ("last",)),
    ("unknown mode", lambda: {"retention": {"best": 1, "metric": "a", "mode": "avg"}}, InvalidInput, ("mode",)),
    ("negative budget", lambda: {"failures": FailurePolicy(max_failures=-1)}, ValueError, ("max_failures",)),
    ("misspelt sync", lambda: {"sync": {"sync_preiod_seconds": 1}}, InvalidInput, ("sync_preiod_seconds",)),
    ("commit some day", lambda: {"sync": {"commit": "later"}}, InvalidInput, ("commit",)),
    ("unknown isolation", lambda: {"isolation": "docker"}, InvalidInput, ("isolation",)),
    ("negative grace", lambda: {"grace_period_seconds": -1}, InvalidInput, ("grace_period_seconds", "-1")),
    ("no patience at all", lambda: {"silence_timeout_seconds": 0}, InvalidInput, ("silence_timeout_seconds",)),
]


def _rows(table: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*row[1:], id=row[0]) for row in table]


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(("arguments", "error", "names"), long_after(12, _rows(BEFORE_ANYTHING)))
def test_bad_input_gives_one_clear_error_before_anything_is_touched(
    arguments: Callable[[], Arguments], error: type[Exception], names: tuple[str, ...], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    with pytest.raises(error) as raised:
        _train(target, tmp_path / "trained", **arguments())
    for name in names:
        assert name in str(raised.value)
    assert not (tmp_path / "trained").exists()
    assert not target.exists()


@pytest.mark.usefixtures("no_prefect_server")
def test_a_file_in_the_place_of_the_target_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    with pytest.raises(StoreRefused, match="target"):
        _train(tmp_path / "target", tmp_path / "trained")
    assert (tmp_path / "target").read_text() == "mine"
    assert not (tmp_path / "trained").exists()


@pytest.mark.long
@pytest.mark.usefixtures("no_prefect_server")
def test_a_target_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect_tune.tasks import experiments

    monkeypatch.setattr(experiments.check_target, "retries", 0)
    target = S3Target(bucket="bucket", endpoint_url=f"http://127.0.0.1:{free_port()}", allow_http=True, anonymous=True)
    with pytest.raises(StoreUnavailable, match="s3://bucket"):
        _train(target, tmp_path / "trained")
    assert not (tmp_path / "trained").exists()


# What the trainable does wrong, and what the one error names.
WHILE_TRAINING: list[tuple[str, Callable[[dict[str, object]], object], tuple[str, ...]]] = [
    ("NaN metric", faulty.nan_metric, ("step 1", "'loss'", "nan", "diverged")),
    ("array for a metric", faulty.array_metric, ("step 1", "'loss'", "ndarray", "tolist")),
    ("text for all metrics", faulty.text_for_metrics, ("dict of metrics", "str")),
    ("checkpoint on a target", faulty.remote_checkpoint, ("local directory", "from_directory")),
    ("dangling link", faulty.dangling_link, ("weights", "link")),
]


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize(("trainable", "names"), long_after(2, _rows(WHILE_TRAINING)))
def test_what_a_trainable_does_wrong_is_told_once_and_not_tried_again(
    trainable: Callable[[dict[str, object]], object], names: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises((TrialFailed, InvalidInput)) as raised:
        _train(tmp_path / "target", tmp_path / "trained", trainable=trainable)
    for name in names:
        assert name in str(raised.value)


@pytest.mark.usefixtures("no_prefect_server")
def test_a_name_that_the_module_does_not_have_is_told_before_a_step(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="has no 'NoSuchName'; did you mean 'NoStep'"):
        _train(tmp_path / "target", tmp_path / "trained", trainable="tests.trainables.faulty:NoSuchName")


@pytest.mark.usefixtures("no_prefect_server")
def test_a_metric_that_stop_waits_for_in_vain_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrialFailed, match="accuracy"):
        _train(tmp_path / "target", tmp_path / "trained", stop={"accuracy": 0.9})


@pytest.mark.usefixtures("no_prefect_server")
def test_another_config_under_the_same_name_is_refused_and_says_both(tmp_path: Path) -> None:
    _train(tmp_path / "target", tmp_path / "first", config={"lr": 0.1})
    with pytest.raises(InvalidInput, match=r"0\.1.*0\.2"):
        _train(tmp_path / "target", tmp_path / "second", config={"lr": 0.2})


@pytest.mark.usefixtures("no_prefect_server")
def test_a_journal_that_cannot_be_read_is_never_started_over(tmp_path: Path) -> None:
    _train(tmp_path / "target", tmp_path / "first")
    entry = next((tmp_path / "target" / "bad" / "1" / "journal").iterdir())
    entry.write_bytes(entry.read_bytes()[:-9])
    with pytest.raises(ResumeFailed, match="Nothing was started"):
        _train(tmp_path / "target", tmp_path / "second")


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
def test_a_deployment_that_is_not_there_is_named_before_anything_is_written(tmp_path: Path) -> None:
    target, missing = str(tmp_path / "target"), "train-trial/nobodys"
    with pytest.raises(InvalidInput, match=f"there is no deployment '{missing}'"):
        pt.tune(f"{_HERE}:fine", {}, target=target, trials="deployment", trial_deployment=missing)
    assert not (tmp_path / "target").exists()


def test_reporting_where_no_trial_runs_says_where_to_call_it() -> None:
    with pytest.raises(InvalidInput, match=r"pt\.durable_trainable"):
        pt.report({"loss": 1.0})


def _train(place: Path | S3Target, touch: Path, **arguments: Any) -> None:
    given: Arguments = {
        "trainable": faulty.fine,
        "target": LocalTarget(path=str(place)) if isinstance(place, Path) else place,
        "experiment": "bad",
        **arguments,
    }
    given["config"] = {"touch": "x", **given.get("config", {})} | {"touch": str(touch)}
    durable_trainable(**given)
