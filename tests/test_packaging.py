"""The installed package equals the repository's, and importing the public module is cheap."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest

import prefect_tune
from tests.fakes.pages import ROOT
from tools.repository_checks import PYPROJECT, SOURCE_FOLDERS, list_module_files

HEAVY = {"prefect", "pyarrow", "obstore", "pydantic", "fsspec", "numpy", "rich", "typer", "importlib.metadata"}
ONLY_A_CALL_NEEDS = {
    *("attempt", "core.journal", "core.journal_events", "core.messages", "parameters.search_plan", "results", "tuner")
}


def run_python(code: str, *, cwd: Path, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


def test_the_entry_points_lead_somewhere() -> None:
    (collection,) = entry_points(group="prefect.collections", name="prefect_tune")
    assert collection.load() is import_module("prefect_tune.blocks.collection")
    (script,) = entry_points(group="console_scripts", name="prefect-tune")
    assert callable(script.load())


def test_opening_the_front_door_imports_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys; before = {*sys.modules}; import prefect_tune; print(*{*sys.modules} - before)"
    imported = set(run_python(code, cwd=tmp_path).split())
    assert imported & HEAVY == set()
    ours = {name for name in imported if name.startswith("prefect_tune")}
    assert ours == {"prefect_tune", "prefect_tune.registry"}
    assert len(imported) < 10


@pytest.mark.parametrize(
    "extras",
    [(), pytest.param(("prefect_aws", "prefect_gcp", "prefect_azure", "torch"), marks=pytest.mark.integrations)],
)
def test_the_flows_import_few_modules_whatever_is_installed(tmp_path: Path, extras: Sequence[str]) -> None:
    assert [name for name in extras if find_spec(name) is None] == []
    code = "import sys; from prefect import flow, task; before = {*sys.modules}; import prefect_tune; prefect_tune.tune"
    imported = run_python(f"{code}; print(*{{*sys.modules}} - before)", cwd=tmp_path).split()
    packages = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert packages == {"prefect_tune", "prefect", "pydantic", "blake3"}
    assert len(imported) < 350  # 285 in November 2026; with prefect-aws, -gcp and -azure it had been 1,927
    ours = {name.removeprefix("prefect_tune.") for name in imported if name.startswith("prefect_tune.")}
    assert ours & {"flows.tune", "prefect_api.flow_with_server"}
    assert not ours & ONLY_A_CALL_NEEDS
    assert "prefect.main" not in imported
    assert len(ours) < 85  # 126 with what only a call needs


def test_listing_the_front_door_imports_nothing_either(tmp_path: Path) -> None:
    code = "import sys, prefect_tune; assert 'Trainable' in dir(prefect_tune); print(*sys.modules)"
    assert set(run_python(code, cwd=tmp_path).split()) & HEAVY == set()


def test_every_public_name_is_there() -> None:
    assert [name for name in prefect_tune.__all__ if getattr(prefect_tune, name) is None] == []


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="Chekpoint"):
        prefect_tune.Chekpoint  # noqa: B018  reading it is the test


def test_the_flow_is_public_and_its_module_keeps_its_dotted_path() -> None:
    flow = prefect_tune.durable_trainable
    module = import_module("prefect_tune.flows.durable_trainable")
    assert import_module("prefect_tune.flows").durable_trainable is module
    assert module.durable_trainable is flow


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a source archive, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60).stdout
    source = folder / "source"
    for name in names.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run(build, cwd=source, check=True, capture_output=True, timeout=110)
    return folder


@pytest.mark.long
def test_the_wheel_holds_every_module_and_nothing_else(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    held = {PurePosixPath(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {path for path in held if path.parts[0] == "prefect_tune"} == list_module_files()
    metadata = f"prefect_tune-{PYPROJECT['project']['version']}.dist-info"
    assert {path.parts[0] for path in held} == {"prefect_tune", metadata}


@pytest.mark.long
def test_the_source_archive_holds_every_module_and_the_licence(distributions: Path) -> None:
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        held = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in file.getnames()}
    wanted = {path.relative_to(ROOT).as_posix() for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert wanted | {"LICENSE", "README.md", "pyproject.toml", "src/prefect_tune/py.typed"} <= held


@pytest.mark.long
def test_a_plain_installation_is_whole_and_does_not_need_the_repository(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    options = ["--quiet", "--no-deps", "--no-index", "--target", "site"]
    install = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
    subprocess.run(install, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    code = "import prefect_tune.flows as f, prefect_tune.core.errors as e; print(f.__file__, e.__file__)"
    for path in run_python(code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site")).split():
        assert Path(path).is_relative_to(tmp_path / "site")
