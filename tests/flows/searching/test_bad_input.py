"""Bad input: one clear error each that says what and where, before any step is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget, S3Target
from prefect_tune.core.errors import InvalidInput, ResumeFailed, StoreRefused, TrialFailed
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.flows.durable_trainable import durable_trainable
from tests.long_cases import long_after
from tests.trainables import faulty

Arguments = dict[str, Any]


def _capture_generator() -> Callable[[dict[str, object]], None]:
    numbers = (number for number in range(3))

    def train(config: dict[str, object]) -> None:
        next(numbers)
        faulty.train_once(config)

    return train


# The mistake; its arguments; the error; what the message names.
BEFORE_ANYTHING: list[tuple[str, Callable[[], Arguments], type[Exception], tuple[str, ...]]] = [
    ("unknown scheme", lambda: {"target": "floppy://a/b"}, InvalidInput, ("floppy",)),
    ("experiment that escapes", lambda: {"experiment": "../other"}, InvalidInput, ("../other", "letters")),
    ("function in the config", lambda: {"config": {"f": print}}, InvalidInput, ("config.f", "builtin")),
    ("class without step", lambda: {"trainable": faulty.NoStep}, InvalidInput, ("NoStep", "`step`")),
    ("trainable without step", lambda: {"trainable": faulty.Stepless}, InvalidInput, ("Stepless", "no `step`")),
    ("module that is not there", lambda: {"trainable": "no_such_module:Model"}, InvalidInput, ("no_such_module",)),
    ("trainable with a generator", lambda: {"trainable": _capture_generator()}, InvalidInput, ("numbers", "generator")),
    ("function of two", lambda: {"trainable": faulty.take_two}, InvalidInput, ("take_two(_config: ", "_data: ")),
    ("setup without a config", lambda: {"trainable": faulty.NoConfig}, InvalidInput, ("setup(self, config)",)),
    ("stop without metrics", lambda: {"stop": lambda: True}, InvalidInput, ("stop", "one argument", "<lambda>()")),
    ("limit that is text", lambda: {"stop": {"step": "ten"}}, InvalidInput, ("'step'", "'ten'")),
    ("save every 0 steps", lambda: {"checkpoint": Cadence(every_steps=0)}, ValueError, ("every_steps",)),
    ("misspelt cadence", lambda: {"checkpoint": {"evry_steps": 5}}, InvalidInput, ("evry_steps",)),
    ("misspelt sync", lambda: {"sync": {"sync_preiod_seconds": 1}}, InvalidInput, ("sync_preiod_seconds",)),
    ("negative grace", lambda: {"grace_period_seconds": -1}, InvalidInput, ("grace_period_seconds", "-1")),
]


def _make_params(table: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*row[1:], id=row[0]) for row in table]


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize(("arguments", "error", "names"), long_after(8, _make_params(BEFORE_ANYTHING)))
def test_bad_input_gives_one_clear_error_before_anything_is_touched(
    arguments: Callable[[], Arguments], error: type[Exception], names: tuple[str, ...], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    with pytest.raises(error) as raised:
        _run_training(target, tmp_path / "trained", **arguments())
    for name in names:
        assert name in str(raised.value)
    assert not (tmp_path / "trained").exists()
    assert not target.exists()


@pytest.mark.usefixtures("no_prefect_server")
def test_a_file_in_the_place_of_the_target_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    with pytest.raises(StoreRefused, match="target"):
        _run_training(tmp_path / "target", tmp_path / "trained")
    assert (tmp_path / "target").read_text() == "mine"
    assert not (tmp_path / "trained").exists()


# What the trainable does wrong, and what the one error names.
WHILE_TRAINING: list[tuple[str, Callable[[dict[str, object]], object], tuple[str, ...]]] = [
    ("NaN metric", faulty.report_nan, ("step 1", "'loss'", "nan", "diverged")),
    ("array for a metric", faulty.report_array, ("step 1", "'loss'", "ndarray", "tolist")),
    ("text for all metrics", faulty.report_text, ("dict of metrics", "str")),
    ("checkpoint on a target", faulty.report_remote_checkpoint, ("local directory", "from_directory")),
    ("dangling link", faulty.report_dangling_link, ("weights", "link")),
]


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize(("trainable", "names"), long_after(2, _make_params(WHILE_TRAINING)))
def test_what_a_trainable_does_wrong_is_told_once_and_not_tried_again(
    trainable: Callable[[dict[str, object]], object], names: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises((TrialFailed, InvalidInput)) as raised:
        _run_training(tmp_path / "target", tmp_path / "trained", trainable=trainable)
    for name in names:
        assert name in str(raised.value)


@pytest.mark.usefixtures("no_prefect_server")
def test_a_metric_that_stop_waits_for_in_vain_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrialFailed, match="accuracy"):
        _run_training(tmp_path / "target", tmp_path / "trained", stop={"accuracy": 0.9}, isolation="thread")


@pytest.mark.usefixtures("no_prefect_server")
def test_another_config_under_the_same_name_is_refused_and_says_both(tmp_path: Path) -> None:
    _run_training(tmp_path / "target", tmp_path / "first", config={"lr": 0.1}, isolation="thread")
    with pytest.raises(InvalidInput, match=r"0\.1.*0\.2"):
        _run_training(tmp_path / "target", tmp_path / "second", config={"lr": 0.2})


@pytest.mark.usefixtures("no_prefect_server")
def test_a_journal_that_cannot_be_read_is_never_started_over(tmp_path: Path) -> None:
    _run_training(tmp_path / "target", tmp_path / "first", isolation="thread")
    entry = next((tmp_path / "target" / "bad" / "1" / "journal").iterdir())
    entry.write_bytes(entry.read_bytes()[:-9])
    with pytest.raises(ResumeFailed, match="Nothing was started"):
        _run_training(tmp_path / "target", tmp_path / "second")


def test_reporting_where_no_trial_runs_says_where_to_call_it() -> None:
    with pytest.raises(InvalidInput, match=r"pt\.durable_trainable"):
        pt.report({"loss": 1.0})


def _run_training(target: Path | S3Target, touch_path: Path, /, **arguments: Any) -> None:
    options: Arguments = {
        "trainable": faulty.train_once,
        "target": LocalTarget(path=str(target)) if isinstance(target, Path) else target,
        "experiment": "bad",
        **arguments,
    }
    options["config"] = {"touch": "x", **options.get("config", {})} | {"touch": str(touch_path)}
    durable_trainable(**options)
