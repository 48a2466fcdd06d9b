"""Error messages for flow arguments that Prefect would refuse, before a server or a run exists."""

from __future__ import annotations

import subprocess
import sys
import time
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
from prefect_tune.prefect_api.argument_validation import require_valid

GOOD: Mapping[str, Any] = {"trainable": print, "target": "./runs", "metric": "loss"}


# The mistake: its arguments; the line of the error.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("mode", {"mode": "minimise"}, "mode: expected 'min' or 'max' or a list, found 'minimise'; did you mean 'min'?"),
    ("one mode", {"mode": ["min", "mx"]}, "mode[1]: expected 'min' or 'max', found 'mx'; did you mean 'max'?"),
    (
        "one callback",
        {"callbacks": pt.FileLogger("x")},
        "callbacks: expected a list, found a FileLogger; write callbacks=[pt.FileLogger()]",
    ),
    (
        "its class",
        {"callbacks": pt.FileLogger},
        "callbacks: expected a list, found the class FileLogger; write callbacks=[pt.FileLogger()]",
    ),
    (
        "failures",
        {"failures": 2},
        "failures: expected a FailurePolicy, found 2; write failures=pt.FailurePolicy(max_failures=2)",
    ),
    (
        "checkpoint",
        {"checkpoint": 5},
        "checkpoint: expected a Cadence, found 5; write checkpoint=pt.Cadence(every_steps=5)",
    ),
    (
        "a field of it",
        {"checkpoint": {"every_steps": "often"}},
        "checkpoint.every_steps: expected a whole number, found 'often'",
    ),
    ("no field of it", {"checkpoint": {"evry_steps": 1}}, "checkpoint.evry_steps: there is no such field"),
    (
        "warm start",
        {"warm_start": "x"},
        "warm_start: expected a list, found 'x'; write warm_start=['earlier-experiment']",
    ),
    ("a number that is no truth", {"num_samples": True}, "num_samples: expected a whole number, found True"),
    (
        "a time that is no truth",
        {"time_budget_seconds": False},
        "time_budget_seconds: expected a number, found False",
    ),
    ("a negative seed", {"seed": -1}, "seed: expected greater than or equal to 0, found -1"),
    ("seed", {"seed": "abc"}, "seed: expected a whole number, found 'abc'"),
    ("space", {"space": [1, 2]}, "space: expected a dict, found a list"),
    (
        "no target",
        {"target": None},
        (
            "target: expected a StorageTarget or text, found None; write target='s3://bucket/runs', or a folder, or "
            "the type/name of a saved block"
        ),
    ),
    ("Ray's name", {"local_dir": "x"}, "local_dir: pt.tune has no such parameter; did you mean 'target'?"),
    ("Optuna's name", {"n_trials": 3}, "n_trials: pt.tune has no such parameter; did you mean 'num_samples'?"),
    ("Optuna's direction", {"direction": 3}, "direction: pt.tune has no such parameter; did you mean 'mode'?"),
    (
        "a scheme",
        {"target": "s4://bucket/runs"},
        (
            "target: 's4://bucket/runs': unknown scheme 's4'; known are abfs, abfss, az, azure, file, gcs, gs, s3, "
            "s3a, s3n, wasb, wasbs, and fsspec's and pyarrow's"
        ),
    ),
    (
        "a web address",
        {"target": "https://bucket.s3.amazonaws.com/runs?X-Amz-Signature=secret"},
        (
            "target: https://bucket.s3.amazonaws.com/…: expected a place to write to, found https, by which files can "
            "only be read. Write s3://bucket/prefix, gs://bucket/prefix or az://container@account/prefix for a bucket, "
            "with ?endpoint_url=https://bucket.s3.amazonaws.com for an S3 server of your own; webdav://… for a WebDAV "
            "server"
        ),
    ),
    (
        "a password",
        {"target": "s3://me:secret@bucket/runs"},
        "target: s3://…@bucket/runs: expected no credentials in a URI: use a block or the environment",
    ),
    (
        "a name",
        {"experiment": "my exp"},
        (
            "experiment: name 'my exp': expected 1 to 128 letters, digits, '.', '_', '=' or '-', starting with a "
            "letter or digit and without '..': it becomes a folder on the target"
        ),
    ),
    ("a misspelt one", {"metrics": "x"}, "metrics: pt.tune has no such parameter; did you mean 'metric'?"),
    (
        "a class",
        {"scheduler": pt.ASHA},
        "scheduler: expected an object, found the class ASHA; write pt.ASHA(max_t=...)",
    ),
    (
        "a class that needs something",
        {"stop": pt.MaxSteps},
        "stop: expected an object, found the class MaxSteps; write pt.MaxSteps(steps=...)",
    ),
    ("two", {"seed": "a", "space": 1}, "space: expected a dict, found 1\nseed: expected a whole number, found 'a'"),
]


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # where `./runs` is, should one of these calls go through

    def started(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(flow_with_server, "_have_server", started)


@pytest.mark.parametrize(("arguments", "said"), [pytest.param(*row[1:], id=row[0]) for row in WRONG])
def test_an_argument_that_does_not_fit_is_told_in_one_line_before_a_server_is_started(
    arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        pt.tune(**{**GOOD, **arguments})
    assert str(raised.value) == said


def test_what_is_missing_and_what_is_too_much_is_told() -> None:
    with pytest.raises(InvalidInput, match=r"target: missing; pt\.tune needs it; write target="):
        pt.tune(print)
    with pytest.raises(InvalidInput, match=r"at most 2 positional arguments \(trainable, space\), found 3"):
        pt.tune(print, {}, "./runs")
    with pytest.raises(InvalidInput, match=r"space: pt\.tune got it twice"):
        pt.tune(print, {}, space={}, target="./runs")


def test_a_secret_that_stands_in_the_wrong_place_is_not_repeated() -> None:
    with pytest.raises(InvalidInput) as raised:
        pt.tune(print, target="./runs", sync="s3://key:secret@bucket")
    assert "secret" not in str(raised.value)


def test_parameters_that_are_more_than_prefect_stores_are_measured_first() -> None:
    with pytest.raises(InvalidInput) as raised:
        pt.tune(print, {"lr": pt.uniform(0, 1), "blob": "x" * 3_000_000}, target="./runs")
    assert str(raised.value).startswith("space: 3,000,0")
    assert "bytes as JSON, and Prefect takes 524,288 for all parameters; 'blob' is the largest: pass a path" in str(
        raised.value
    )


@dataclass
class IsDataclass(pt.Trainable):
    depth: int = 1


class HasDataclass(pt.Trainable):
    @dataclass
    class Config:
        depth: int = 1


@pytest.mark.parametrize("trainable", [IsDataclass, HasDataclass])
def test_a_class_that_prefect_cannot_store_is_named_and_one_that_it_can_goes_through(trainable: type) -> None:
    is_old = Version(prefect.__version__) < Version("3.9")
    refused = pytest.raises(InvalidInput, match="trainable: Prefect cannot store a dataclass type")
    with refused if is_old else pytest.raises(AssertionError, match="a server was started"):
        pt.tune(trainable, target="./runs")


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("space", {"file": "caf\udce9.txt", "a": "é \U0001f600"}),
        ("space", {"nested": {"caf\udce9.txt": 1}}),
        ("space", {"files": ["a", "caf\udce9.txt"]}),
        ("target", "caf\udce9.txt"),
    ],
)
def test_text_that_is_not_unicode_is_refused_with_its_argument(argument: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=argument) as refused:
        require_valid(pt.tune, (), {**GOOD, "space": {"a": 1}, argument: value})
    assert r"caf\udce9.txt" in str(refused.value)


def test_what_only_prefect_knows_the_length_of_is_measured_by_it() -> None:
    class Model(pt.Trainable):
        TABLE = tuple(range(200_000))

    with pytest.raises(InvalidInput, match=r"trainable: 1,\d+,\d+ bytes as JSON"):
        pt.tune(Model, target="./runs")


@pytest.mark.long
def test_what_is_small_is_not_measured_twice() -> None:
    """Prefect's own check imports FastAPI, which delays the start of a server."""
    code = """
import sys
import prefect_tune as pt
from prefect_tune.prefect_api.argument_validation import require_valid
space = {"lr": pt.loguniform(1e-4, 0.1), "of": pt.choice([1, "two"]), "n": pt.sample_from(lambda config: config["of"])}
asked = {"target": "./runs", "scheduler": pt.ASHA(max_t=81), "stop": pt.MaxSteps(3) | len, "sync": pt.SyncConfig()}
require_valid(pt.tune, (lambda config: None, space), asked)
assert "fastapi" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_prefect_takes_for_itself_and_what_fits_is_let_through() -> None:
    require_valid(pt.tune, (print,), {"target": "./runs", "return_state": True, "wait_for": []})
    require_valid(pt.tune, (print,), {"target": "./runs", "checkpoint": {"every_steps": 3}, "seed": "7"})
    require_valid(pt.tune, (pt.Trainable,), {"target": {"$ref": {"block_document_slug": "s3-target/prod"}}})


@pytest.mark.usefixtures("prefect_server")
def test_futures_are_left_to_prefect() -> None:
    @task
    def seed() -> int:
        return 7

    @flow
    def around() -> None:
        require_valid(pt.tune, (print,), {"target": "./runs", "seed": seed.submit()})
        require_valid(pt.tune, (print,), {"target": "./runs", "warm_start": [seed.submit()]})
        require_valid(pt.tune, (print,), {"target": "./runs", "seed": seed(return_state=True)})

    around()


def test_it_takes_no_time() -> None:
    require_valid(pt.tune, (print, {"lr": pt.uniform(0, 1)}), {"target": "./runs"})
    began = time.perf_counter()
    for _ in range(20):
        require_valid(pt.tune, (print, {"lr": pt.uniform(0, 1)}), {"target": "./runs", "seed": 3, "num_samples": 4})
    assert (time.perf_counter() - began) / 20 < 0.05
