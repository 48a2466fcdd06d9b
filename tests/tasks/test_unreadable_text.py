"""Text that JSON cannot hold and numbers that a float cannot hold: each is one trial failure with its cause."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.journal_events import Cause
from prefect_tune.core.messages.process_messages import StepDone, TrialEnded
from prefect_tune.core.values import StepReport
from tests.fakes.outcomes import require_failure
from tests.runtime.test_training import _trained

Config = Mapping[str, Any]
HALF = "\udcff"


class _Worded(Exception):
    def __str__(self) -> str:
        return f"\0{HALF}" + "x" * 10**6


def _raises_half_a_character(_: Config) -> None:
    raise ValueError(HALF)


def _raises_from_another(_: Config) -> None:
    try:
        raise KeyError(HALF)
    except KeyError as error:
        raise MemoryError("not enough") from error


def _raises_an_enormous_text(_: Config) -> None:
    raise _Worded


def _reads_a_file_with_such_a_name(_: Config) -> None:
    Path(f"/nowhere/{HALF}").read_bytes()


@pytest.mark.parametrize(
    ("function", "cause", "said"),
    [
        (_raises_half_a_character, Cause.USER, "ValueError: \\udcff"),
        (_raises_from_another, Cause.OUT_OF_MEMORY, "MemoryError: not enough"),
        (_raises_an_enormous_text, Cause.USER, "_Worded: \\x00\\udcffxxx"),
        (_reads_a_file_with_such_a_name, Cause.USER, "FileNotFoundError: "),
        (lambda _: {"loss": 10**400}, Cause.BAD_METRIC, "'loss': found 1000"),
        (lambda _: {"loss": 10**5000}, Cause.BAD_METRIC, "'loss': found a whole number of 16610 bits"),
    ],
)
def test_what_a_trainable_raises_arrives_with_its_message_and_its_cause(
    tmp_path: Path,
    function: Callable[[Config], object],
    cause: Cause,
    said: str,
) -> None:
    _, end = _trained(tmp_path, function)
    failure = require_failure(end)
    assert failure.cause is cause
    assert said in str(failure.reason)
    assert len(str(failure.reason)) <= 200_100


class _WordyStopper(Stopper):
    def why_stop(self, reports: Sequence[StepReport]) -> str:
        del reports
        return f"\0{HALF}" + "x" * 10**6


def test_the_reason_of_a_stopper_arrives_readable(tmp_path: Path) -> None:
    def trains(_: Config) -> None:
        pt.report({"loss": 1})

    *_, ended = _trained(tmp_path, trains, stopper=_WordyStopper())
    assert isinstance(ended, TrialEnded)
    assert isinstance(ended.outcome.reason, str)
    assert ended.outcome.reason.startswith("\\x00\\udcffxxx")
    assert len(ended.outcome.reason) <= 100_000


def test_a_trial_whose_folders_are_not_utf8_trains_and_saves(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()

    def trains(_: Config) -> None:
        directory = pt.get_trial().new_checkpoint_dir()
        (directory / "weights").write_text("w")
        pt.report({"loss": 1.0}, checkpoint=pt.Checkpoint.from_directory(directory))

    done = next(each for each in _trained(folder, trains) if isinstance(each, StepDone))
    assert done.checkpoint is not None
    assert Path(done.checkpoint).is_relative_to(folder)
