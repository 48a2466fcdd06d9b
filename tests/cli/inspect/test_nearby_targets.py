"""Error messages for a target that does not exist, or that has no experiments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import boto3
import pytest

import prefect_tune as pt
from prefect_tune.core.storage.object_store import Listed
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.checkpoints import write
from tests.fakes.command_line import Run
from tests.fakes.searches.experiments import write_experiment
from tests.fakes.servers.moto_server import moto_server

KEYS = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with moto_server() as url:
        boto3.Session().client("s3", endpoint_url=url, **KEYS).create_bucket(Bucket="nearby-targets")
        for name, value in {**KEYS, "aws_endpoint_url": url, "aws_allow_http": "true"}.items():
            monkeypatch.setenv(name.upper().replace("REGION_NAME", "AWS_REGION"), value)
        yield "s3://nearby-targets"


@pytest.mark.parametrize(
    "command",
    [("ls",), ("show", "digits"), ("report", "digits"), ("maintain",), ("stop", "e"), ("delete", "--yes", "e")],
)
def test_a_folder_that_does_not_exist_is_named_with_a_similar_one_and_not_created(
    run: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "runs").mkdir()
    verb, *experiment = command
    misspelt, other = tmp_path / "rnus", tmp_path / "zz"
    done = run(verb, misspelt, *experiment)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"prefect-tune: {misspelt}: there is no such folder; did you mean 'runs'?\n"
    assert run(verb, other, *experiment).err == f"prefect-tune: {other}: there is no such folder; {tmp_path} has runs\n"
    assert run(verb, other / "b", *experiment).err.endswith(f"; {other} cannot be read either\n")
    assert [each.name for each in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize("command", [("ls",), ("show", "digits")])
def test_a_folder_that_cannot_be_looked_up_is_one_line(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    verb, *experiment = command
    done = run(verb, tmp_path / ("long" * 100), *experiment)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("prefect-tune: ")
    assert done.err.endswith("(File name too long)\n")


def test_a_place_above_the_experiments_says_where_they_are(run: Run, tmp_path: Path) -> None:
    write_experiment(tmp_path / "lab" / "team", "alone", [2])
    there = (tmp_path / "lab" / "team").as_uri()
    assert run("ls", tmp_path).out == f"{tmp_path}: no experiments; there are some at {there}\n"
    assert run("ls", tmp_path, "--json").out == "[]\n"


def test_a_target_without_experiments_is_listed_once(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, list_it = list[str](), PosixStore.list

    def counted(store: PosixStore, prefix: str, *, after: str = "") -> Sequence[Listed]:
        listed.append(prefix)
        return list_it(store, prefix, after=after)

    monkeypatch.setattr(PosixStore, "list", counted)
    assert "no experiments" in run("ls", tmp_path).out
    assert listed == [""]


def test_a_misspelt_prefix_of_a_bucket_has_a_hint(run: Run, bucket: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "a", {"w": b"1"})
    pt.save_checkpoint.fn(directory, target=f"{bucket}/team", experiment="own", step=1)
    assert "own" in run("ls", f"{bucket}/team").out
    assert run("ls", f"{bucket}/taem").out == f"{bucket}/taem: no experiments; did you mean 'team'?\n"
    assert run("ls", f"{bucket}/zz").out == f"{bucket}/zz: no experiments\n"
    done = run("ls", f"{bucket}-x/team")
    assert "there is no such bucket or container: correct its name or the endpoint, or create it" in done.err
