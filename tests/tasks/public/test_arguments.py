"""Invalid arguments of the public tasks: refused before any journal is opened or any object is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefect_tune as pt
from prefect_tune.task_values import SaveArguments
from tests.fakes.checkpoints import read_files
from tests.tasks.public.conftest import Caller

NAN = float("nan")
SAVES: dict[str, tuple[dict[str, Any], str]] = {
    "a retention that is a number": ({"retention": 3}, r"retention: Input should be .*, found 3"),
    "a misspelt rule": ({"retention": {"lst": 3}}, r"retention\.lst: Extra inputs"),
    "a timeout of nothing": ({"timeout_seconds": 0}, "timeout_seconds: Input should be greater than 0, found 0"),
    "an endless timeout": ({"timeout_seconds": NAN}, "timeout_seconds: .*finite.*, found nan"),
    "a metric that is not finite": ({"metrics": {"loss": NAN}}, "metrics: 'loss': found nan"),
    "metrics that are a number": ({"metrics": 0}, "metrics: expected a dict"),
    "metadata that are not finite": ({"metadata": {"a": NAN}}, "metadata: not valid JSON"),
    "a directory that is a number": ({"directory": 3}, "directory: Input is not a valid path .*, found 3"),
    "a name that is a number": ({"trial": 3}, "trial: Input should be a valid string, found 3"),
    "a name with a slash": ({"experiment": "a/b"}, "name 'a/b'"),
    "a target that is a number": ({"target": 3}, "target: expected a block"),
    "a step that is not finite": ({"step": NAN}, "step: expected an integer of at least 1.*, found nan"),
}
SYNCS: dict[str, tuple[dict[str, Any], str]] = {
    "half a step": ({"reports": {1.5: {}}}, r"reports: step: expected an integer of at least 1.*, found 1\.5"),
    "a step that is a word": ({"reports": {"last": {}}}, "reports: step: .*, found 'last'"),
    "reports in a list": ({"reports": [{"loss": 1}]}, r"reports: expected metrics by step, such as \{1: "),
    "a report that is a number": (
        {"reports": {1: 0.5}},
        "reports, step 1: expected a dict of metrics, like {'loss': value}, found float",
    ),
    "a metric that is not finite": ({"reports": {1: {"loss": NAN}}}, "reports, step 1: 'loss': found nan"),
    "a configuration with an object": ({"config": {"model": object()}}, "config.model"),
    "another end": ({"status": "finished"}, "status: Input should be 'completed', 'paused' or 'errored'"),
}
RESTORES: dict[str, tuple[dict[str, Any], str]] = {
    "half a step": ({"step": 1.5}, "step: expected an integer of at least 1")
}


@pytest.mark.parametrize(("bad", "message"), SAVES.values(), ids=SAVES)
def test_what_cannot_be_saved_is_refused_and_nothing_is_owned(
    caller: Caller, bad: Mapping[str, Any], message: str
) -> None:
    options = {"target": caller.target, "experiment": "e", "step": 1}
    with pytest.raises(pt.InvalidInput, match=message):
        pt.save_checkpoint.fn(**{"directory": caller.write_directory(1), **options, **bad})
    assert not caller.bucket.objects


def test_a_directory_without_a_file_is_refused_and_nothing_is_owned(caller: Caller, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    (empty / "folder").mkdir(parents=True)
    with pytest.raises(pt.InvalidInput, match=rf"checkpoint directory {empty}: expected at least one file, found none"):
        pt.save_checkpoint.fn(empty, target=caller.target, experiment="e", step=1)
    assert not caller.bucket.objects


@pytest.mark.parametrize(("bad", "message"), SYNCS.values(), ids=SYNCS)
def test_what_cannot_be_journaled_is_refused_and_nothing_is_owned(
    caller: Caller, bad: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(pt.InvalidInput, match=message):
        caller.sync(**bad)
    assert not caller.bucket.objects


@pytest.mark.parametrize(("bad", "message"), RESTORES.values(), ids=RESTORES)
def test_what_cannot_be_restored_is_refused(caller: Caller, bad: Mapping[str, Any], message: str) -> None:
    with pytest.raises(pt.InvalidInput, match=message):
        pt.restore_checkpoint.fn(**{"target": caller.target, "experiment": "e", **bad})


def test_a_deletion_in_an_experiment_that_does_not_exist_is_refused_and_creates_none(caller: Caller) -> None:
    caller.save_checkpoint(1, trial="slow")
    before = dict(caller.bucket.objects)
    caller.start_run("later")
    with pytest.raises(pt.InvalidInput, match=r"there is no experiment 'ee' at .*; did you mean 'e'\?"):
        caller.delete_checkpoints(1, experiment="ee", trial="slow")
    with pytest.raises(pt.InvalidInput, match=r"experiment 'e' at .* has no trial 'slwo'; did you mean 'slow'\?"):
        caller.delete_checkpoints(1, trial="slwo")
    assert caller.bucket.objects == before


def test_an_attempt_with_a_name_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pt.InvalidInput, match="trial: Input should be a valid string, found 3"):
        pt.run_trial.fn(dict, target=tmp_path, experiment="e", trial=3)  # type: ignore[arg-type]  # the test's point
    assert read_files(tmp_path) == {}


def test_arguments_have_the_forms_that_parameters_of_a_deployment_and_numpy_have(caller: Caller) -> None:
    saved = pt.save_checkpoint.fn(
        caller.write_directory(3), target=caller.target, experiment="e", step=np.int64(3), retention={"last": 1}
    )
    state = caller.sync(reports={"4": {"loss": 0.5}, np.int64(5): {"loss": 0.25}})
    restored = caller.restore_checkpoint()
    assert restored is not None
    again = pt.restore_checkpoint.fn(restored, target=caller.target, experiment="e")  # a path-like object
    assert (saved.step, state.trials["trial"].step, again) == (3, 5, restored)


def test_the_arguments_of_a_save_are_those_of_its_task() -> None:
    assert SaveArguments.model_fields.keys() == set(pt.save_checkpoint.fn.__annotations__) - {"return"}
