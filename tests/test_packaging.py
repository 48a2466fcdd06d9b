"""The installed package equals the repository's, and importing the public module is cheap."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest

import prefect_tune

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
ROOMS = ("src/prefect_tune", "blocks", "tasks", "flows")
HEAVY = {
    "prefect",
    "pyarrow",
    "obstore",
    "pydantic",
    "fsspec",
    "numpy",
    "rich",
    "typer",
    "importlib.metadata",
}


def module_files() -> set[PurePosixPath]:
    """Every file that belongs into an installation, by its path there."""
    found = set()
    for room in ROOMS:
        package = PurePosixPath("prefect_tune") / PurePosixPath(room).relative_to(
            "src/prefect_tune" if room.startswith("src") else "."
        )
        paths = [*(ROOT / room).rglob("*.py"), *(ROOT / room).rglob("py.typed")]
        found |= {package / path.relative_to(ROOT / room).as_posix() for path in paths}
    return found


def python(code: str, *, cwd: Path, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


def test_every_folder_with_modules_is_a_listed_package() -> None:
    packages = {str(path.parent).replace("/", ".") for path in module_files()}
    assert packages == set(SETUPTOOLS["packages"])


@pytest.mark.long
def test_the_rooms_are_found_from_any_directory_and_a_users_own_do_not_shadow_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "__init__.py").write_text("raise ImportError('the bare name was imported')")
    code = "import prefect_tune.blocks, prefect_tune.flows; print(prefect_tune.flows.__file__)"
    assert Path(python(code, cwd=tmp_path).strip()).parent.name == "flows"


def test_the_entry_points_lead_somewhere() -> None:
    (collection,) = entry_points(group="prefect.collections", name="prefect_tune")
    assert collection.load() is import_module("prefect_tune.blocks.collection")
    (script,) = entry_points(group="console_scripts", name="prefect-tune")
    assert callable(script.load())


def test_opening_the_front_door_imports_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys; before = {*sys.modules}; import prefect_tune; print(*{*sys.modules} - before)"
    imported = set(python(code, cwd=tmp_path).split())
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
    imported = python(f"{code}; print(*{{*sys.modules}} - before)", cwd=tmp_path).split()
    packages = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert packages == {"prefect_tune", "prefect", "pydantic", "blake3"}
    assert len(imported) < 350  # 285 in November 2026; with prefect-aws, -gcp and -azure it had been 1,927


def test_listing_the_front_door_imports_nothing_either(tmp_path: Path) -> None:
    code = "import sys, prefect_tune; assert 'Trainable' in dir(prefect_tune); print(*sys.modules)"
    assert set(python(code, cwd=tmp_path).split()) & HEAVY == set()


@pytest.mark.parametrize("name", prefect_tune.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(prefect_tune, name) is not None


def test_every_error_is_a_public_name() -> None:
    errors = import_module("prefect_tune.core.errors")
    raised = {name for name, each in vars(errors).items() if isinstance(each, type)}
    assert raised <= set(prefect_tune.__all__)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="Chekpoint"):
        prefect_tune.Chekpoint  # noqa: B018  reading it is the test


def test_the_flow_is_public_and_its_module_keeps_its_dotted_path() -> None:
    flow = prefect_tune.durable_trainable
    module = import_module("prefect_tune.flows.durable_trainable")
    assert import_module("prefect_tune.flows").durable_trainable is module
    assert module.durable_trainable is flow


@pytest.mark.parametrize("lock", ["demo.txt", "dev.txt"])
def test_a_lock_names_exact_versions_and_hashes_and_no_address(lock: str) -> None:
    requirement = re.compile(r"[a-z0-9.-]+==\S+( ; [^\\]+)? \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+")
    assert requirement.sub("", (ROOT / "requirements" / lock).read_text()) == ""


def test_the_lock_of_the_demo_is_part_of_the_lock_of_the_tests() -> None:
    demo, dev = (
        set(re.findall(r"^\S+==\S+", (ROOT / "requirements" / name).read_text(), re.MULTILINE))
        for name in ("demo.txt", "dev.txt")
    )
    assert demo <= dev


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built from a source archive, and that archive."""
    folder = tmp_path_factory.mktemp("dist")
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    ).stdout
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
    assert {path for path in held if path.parts[0] == "prefect_tune"} == module_files()
    metadata = f"prefect_tune-{PYPROJECT['project']['version']}.dist-info"
    assert {path.parts[0] for path in held} == {"prefect_tune", metadata}


@pytest.mark.long
def test_the_source_archive_holds_every_module_and_the_licence(distributions: Path) -> None:
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in opened.getnames()}
    wanted = {path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert wanted | {"LICENSE", "README.md", "pyproject.toml", "src/prefect_tune/py.typed"} <= held


@pytest.mark.long
def test_a_plain_installation_is_whole_and_does_not_need_the_repository(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        "site",
        str(wheel),
    ]
    subprocess.run(install, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    code = "import prefect_tune.flows as f, prefect_tune.core.errors as e; print(f.__file__, e.__file__)"
    for path in python(code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site")).split():
        assert Path(path).is_relative_to(tmp_path / "site")


def test_no_module_has_the_name_of_something_public() -> None:
    """Importing it would put the module in the place of the name."""
    import prefect_tune as pt

    folder = Path(pt.__file__).parent
    modules = {each.stem for each in folder.iterdir() if each.suffix == ".py" or each.is_dir()}
    assert not modules & set(pt.__all__)


# What an extra's package brings itself, and the names of packages that are not those of their modules.
_BROUGHT = {"keras": {"numpy"}, "lightning": {"torch"}, "scikit-learn": {"numpy"}}
_MODULES = {"scikit-learn": "sklearn", "mlflow-skinny": "mlflow"}
_MISSING = re.compile(r"""missing\(error, "(\w+)"((?:, "\w+")*)\)""")
_REQUIRED = re.compile(r"""require_package\("(\w+)", "(\w+)\"""")


def _brings(extra: str) -> set[str]:
    """The modules that an extra installs, as far as `pyproject.toml` and `_BROUGHT` say."""
    found: set[str] = set()
    for requirement in PYPROJECT["project"]["optional-dependencies"][extra]:
        name = re.split(r"[\[<>=]", requirement)[0]
        if name == "prefect-tune":
            found.update(*(_brings(each) for each in requirement.partition("[")[2].rstrip("]").split(",")))
        else:
            found |= {_MODULES.get(name, name), *_BROUGHT.get(name, ())}
    return found


def test_an_error_of_a_missing_package_names_an_extra_that_brings_it() -> None:
    source = "\n".join(path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    asked = [(extra, re.findall(r"\w+", modules) or [extra]) for extra, modules in _MISSING.findall(source)]
    asked += [(extra, [module]) for module, extra in _REQUIRED.findall(source)]
    asked += [(name.removeprefix("prefect-"), [name]) for name in re.findall(r'NamedBlocks\("([\w-]+)"', source)]
    assert len(asked) == 8 + 3 + 3
    assert {extra: set(modules) - _brings(extra) for extra, modules in asked if set(modules) - _brings(extra)} == {}
    written = {each for names in re.findall(r"prefect-tune\[([a-z,]+)\]", source) for each in names.split(",")}
    assert written - PYPROJECT["project"]["optional-dependencies"].keys() == set()
    # What no extra brings may be named alone.
    assert set(re.findall(r"pip install ([a-z][\w-]*)", source)) == {"scipy"}
