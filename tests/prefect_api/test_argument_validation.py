"""The arguments of a call are checked before a server or a flow run is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prefect
import pytest
from packaging.version import Version
from prefect import flow, task

import prefect_tune as pt
from prefect_tune.core.errors import InvalidInput
from prefect_tune.prefect_api import flow_with_server
from prefect_tune.prefect_api.flow_with_server import require_storable_arguments, validate_arguments

GOOD: Mapping[str, Any] = {"trainable": print, "target": "./runs", "metric": "loss"}


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # the folder of `./runs`, should a call succeed
    monkeypatch.setattr(flow_with_server, "_ensure_server", lambda *_: pytest.fail("a server was started"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": ["min", "mx"]}, "mode.1: Input should be 'min' or 'max'"),
        ({"checkpoint": {"evry_steps": 1}}, "checkpoint.evry_steps: Extra inputs are not permitted, found 1"),
        ({"checkpoint": 5}, "checkpoint: Input should be a valid dictionary or instance of Cadence, found 5"),
        ({"warm_start": "x"}, "warm_start: Input should be a valid list"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0, found -1"),
        ({"target": None}, "target: expected a block, a 'block-type/name' slug, a URI or a path, found a NoneType"),
        ({"local_dir": "x"}, "local_dir: pt.tune has no such parameter; did you mean 'target'?"),
        ({"n_trials": 3}, "n_trials: pt.tune has no such parameter; did you mean 'num_samples'?"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_one_error_before_a_server_is_started(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        pt.tune(**{**GOOD, **arguments})
    assert str(raised.value).startswith(message)


def test_missing_and_repeated_arguments_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"pt\.tune: missing a required argument: 'target'"):
        pt.tune(print)
    with pytest.raises(InvalidInput, match=r"pt\.tune: too many positional arguments"):
        pt.tune(print, {}, "./runs")
    with pytest.raises(InvalidInput, match=r"pt\.tune: multiple values for argument 'space'"):
        pt.tune(print, {}, space={}, target="./runs")


def test_a_secret_in_the_wrong_argument_is_not_repeated() -> None:
    with pytest.raises(InvalidInput) as raised:
        pt.tune(print, target="./runs", sync="s3://key:secret@bucket")
    assert "secret" not in str(raised.value)


def test_parameters_that_are_larger_than_prefect_stores_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^space: 3,000,0\d\d bytes as JSON, but Prefect accepts 524,288 for all"):
        require_storable_arguments(
            pt.tune, {"space": {"lr": pt.uniform(0, 1), "blob": "x" * 3_000_000}, "target": "./runs"}
        )


@dataclass
class IsDataclass(pt.Trainable):
    depth: int = 1


@pytest.mark.skipif(Version(prefect.__version__) >= Version("3.9"), reason="Prefect stores it")
def test_a_class_that_prefect_cannot_store_is_named() -> None:
    with pytest.raises(InvalidInput, match="trainable: Prefect cannot store a dataclass type"):
        require_storable_arguments(pt.tune, {"trainable": IsDataclass})


def test_text_that_is_not_unicode_is_refused_with_its_argument() -> None:
    with pytest.raises(InvalidInput, match="space: expected Unicode text, found ") as refused:
        require_storable_arguments(pt.tune, {"space": {"files": ["a", "caf\udce9.txt"]}})
    assert r"caf\udce9.txt" in str(refused.value)


def test_arguments_of_prefect_and_references_to_blocks_are_accepted() -> None:
    validate_arguments(pt.tune, (print,), {"target": "./runs", "return_state": True, "wait_for": []})
    validate_arguments(pt.tune, (print,), {"target": "./runs", "checkpoint": {"every_steps": 3}, "seed": "7"})
    validate_arguments(pt.tune, (pt.Trainable,), {"target": {"$ref": {"block_document_slug": "s3-target/prod"}}})


@pytest.mark.usefixtures("prefect_server")
def test_futures_are_left_to_prefect() -> None:
    @task
    def seed() -> int:
        return 7

    @flow
    def check_arguments() -> None:
        validate_arguments(pt.tune, (print,), {"target": "./runs", "seed": seed.submit()})
        validate_arguments(pt.tune, (print,), {"target": "./runs", "warm_start": [seed.submit()]})
        validate_arguments(pt.tune, (print,), {"target": "./runs", "seed": seed(return_state=True)})

    check_arguments()
