"""The names that a trusted package defines, and the trainables whose source is sufficient."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Literal
from uuid import uuid4

import pytest

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.parameters import import_check
from prefect_tune.parameters.import_check import is_module_name, require_importable, undefined_name_reason

_FILES = {
    "__init__.py": "",
    # This source would fail if it ran: the check only parses it.
    "sub/__init__.py": """
import subprocess
import os.path as where
from subprocess import call, Popen as Start
from ..models import Net, Net as Model, alias
from ..models import *
from other import Foreign
from .. import models
from ... import beyond

again = subprocess.call
shadowed = subprocess.call


def shadowed(config):
    pass


if True:
    def conditional(config):
        pass

try:
    from fast import quick
except ImportError:
    def quick(config):
        pass

try:
    import missing
except ImportError:
    def rescued(config):
        pass
""",
    "models.py": """
import functools
import subprocess


class Net:
    class Inner:
        run = subprocess.call
        made = functools.partial(print)

    def method(self):
        pass


class _Hidden:
    pass


async def trains(config):
    pass


stop = functools.partial(print)
noted: object = Net()
one, two = functools.partial(print)
computed = lambda spec: 1
union = Net() | Net()
alias = subprocess.call
either = Net() or subprocess.call
""",
    "stars.py": """
from subprocess import *
from .models import *


def before(config):
    pass


from .models import *
""",
    "replaced.py": """
import contextlib
import subprocess


def starred(config):
    pass


def looped(config):
    pass


def opened(config):
    pass


def tested(config):
    pass


def matched(config):
    pass


def cased(config):
    pass


def far(config):
    pass


def inside(config):
    opened = [looped for looped in ()]
    return opened


for looped in [subprocess.call]:
    pass
with contextlib.nullcontext(subprocess.call) as opened:
    pass
if tested := subprocess.call:
    pass
match subprocess.call:
    case matched:
        from subprocess import call as cased


def reaching():
    global far
    far = subprocess.call


from subprocess import *
""",
    "circle.py": "from .circle_back import turns\n",
    "circle_back.py": "from .circle import turns\n",
    "broken.py": "def (\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a package, and return its name."""
    name = f"trusted_{uuid4().hex[:8]}"
    for file, source in _FILES.items():
        path = tmp_path / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def find_imported_modules(package: str) -> set[str]:
    return {name.removeprefix(package) for name in sys.modules if name.startswith(package)}


@pytest.mark.parametrize(
    "name",
    [
        ".models:Net",
        ".models:Net.method",
        ".models:Net.Inner",
        ".models:Net.Inner.made",
        ".models:_Hidden",
        ".models:trains",
        ".models:stop",
        ".models:noted",
        ".models:one",
        ".models:computed",
        ".models:union",
        ".sub:Net",
        ".sub:Model.Inner",
        ".sub:trains",
        ".sub:conditional",
        ".sub:rescued",
        ".stars:before",
        ".stars:Net",
    ],
)
def test_what_a_package_defines_is_its_own_also_by_way_of_an_import_within_it(name: str, package: str) -> None:
    assert undefined_name_reason(f"{package}{name}", [package]) == ""
    assert find_imported_modules(package) == {""}  # the package above the module, and not the module


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".sub:subprocess.call", "does not define 'subprocess': it imports a module under this name"),
        (".sub:where.join", "does not define 'where': it imports a module under this name"),
        (".sub:call", "subprocess is not in a trusted package"),
        (".sub:Start", "subprocess is not in a trusted package"),
        (".sub:Foreign", "other is not in a trusted package"),
        (".sub:again", "does not define 'again', but aliases another object"),
        (".sub:shadowed", "but aliases another object"),
        (".sub:alias", "but aliases another object"),
        (".sub:quick", "fast is not in a trusted package"),
        (".sub:models", "does not define 'models'"),
        (".sub:beyond", "beyond top-level package"),
        (".sub:gone", "does not define 'gone'"),
        (".sub:conditional.__globals__", "is a function"),
        (".sub:Net.__init__", "does not define '__init__'"),
        (".models:Net.Inner.run", "but aliases another object"),
        (".models:either", "but aliases another object"),
        (".replaced:starred", "may replace 'starred' by `import *`: subprocess is not in a trusted package"),
        *(
            (f".replaced:{name}", "but aliases another object")
            for name in ("looped", "opened", "tested", "matched", "far")
        ),
        (".replaced:cased", "subprocess is not in a trusted package"),
        (".models:stop.func", "but aliases another object"),
        (".circle:turns", "in a cycle"),
        (".broken:x", "cannot be read"),
        (".gone:x", "there is no module"),
        ("", "expected 'package.module:Name'"),
        (":", "expected 'package.module:Name'"),
        (":a b", "expected 'package.module:Name'"),
        ("er:Net", "er is not in a trusted package"),
    ],
)
def test_what_a_package_only_imports_or_renames_is_not_its_own(name: str, message: str, package: str) -> None:
    assert message in undefined_name_reason(f"{package}{name}", [package])
    assert find_imported_modules(package) <= {""}


def test_nothing_is_trusted_beyond_what_is_named(package: str) -> None:
    assert undefined_name_reason(f"{package}.models:Net", [f"{package}.models"]) == ""
    assert "not in a trusted package" in undefined_name_reason(f"{package}.sub:Net", [f"{package}.sub"])
    assert "not in a trusted package" in undefined_name_reason(f"{package}.models:Net", [f"{package}.model", "another"])
    assert "not in a trusted package" in undefined_name_reason(f"{package}.models:Net", [])


def test_a_module_without_python_source_is_refused() -> None:
    assert undefined_name_reason("sys:exit", ["sys"]) == "sys has no source"


@pytest.mark.parametrize("name", ["", "a-b", "a..b", "a:b", 3, None, "*", ".a"])
def test_what_no_package_can_be_called_is_told(name: object) -> None:
    assert not is_module_name(name)
    assert is_module_name("a.b_c.D1")


# Which trainables are accepted by their source, and which must be imported for the check.


_STEP_METHOD = "\n    def step(self):\n        return {}\n"
_METHODS = f"{_STEP_METHOD}\n    def save_checkpoint(self, checkpoint_dir):\n        pass\n"


class _ImportStarted(Exception):
    """A process was started to import the name."""


@pytest.mark.parametrize(
    ("imports", "definition", "is_imported"),
    [
        ("", "def Net(config):\n    pass", False),
        ("import prefect_tune as pt", f"class Net(pt.Trainable):{_METHODS}", False),
        ("import prefect_tune", f"class Net(prefect_tune.Trainable):{_METHODS}", False),
        ("from prefect_tune import Trainable as Base", f"class Net(Base):{_METHODS}", False),
        ("from prefect_tune import Trainable as Base", f"class Net(Base):{_STEP_METHOD}", True),
        ("from prefect_tune.integrations.sklearn import PartialFitTrainable as P", "class Net(P):\n    pass", False),
        ("import prefect_tune as pt", "class Net(pt.Trainable):\n    pass", True),
        ("import ray.tune as pt", f"class Net(pt.Trainable):{_STEP_METHOD}", True),
        ("from ray.tune import Trainable", f"class Net(Trainable):{_STEP_METHOD}", True),
        ("from dataclasses import dataclass", "@dataclass\nclass Net:\n    lr: float = 0.1", True),
        ("", f"class Net:{_STEP_METHOD}", True),
        ("from functools import cache", "@cache\ndef Net(config):\n    pass", True),
        ("", "async def Net(config):\n    pass", True),
        ("", "Net = lambda config: None", True),
        ("", "def Net():\n    pass", True),
        ("", "def Net(config, data):\n    pass", True),
        ("", "def Net(*, config):\n    pass", True),
        ("", "def Net(config, data=None, *others, seed=0, **more):\n    pass", False),
        ("", "def Net(*all):\n    pass", False),
        ("", "def Net(config):\n    yield 1", True),
        (
            "import prefect_tune as pt",
            f"class Net(pt.Trainable):{_METHODS}\n    async def setup(self, config): pass",
            True,
        ),
        ("import prefect_tune as pt", f"class Net(pt.Trainable):{_METHODS}\n    def setup(self): pass", True),
        ("import prefect_tune as pt", f"class Net(pt.Trainable):{_METHODS}\n    def setup(self, config): pass", False),
    ],
)
def test_only_a_name_whose_source_does_not_say_that_it_is_a_trainable_is_imported(
    imports: str, definition: str, is_imported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_to_check.py").write_text(f"{imports}\n\n{definition}\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def start_import(config: object) -> None:
        raise _ImportStarted(str(config))

    monkeypatch.setattr(import_check, "require_loadable", start_import)
    try:
        require_importable("models_to_check:Net", "thread", logging.getLogger(__name__))
    except _ImportStarted:
        assert is_imported
    else:
        assert not is_imported


def test_a_data_class_is_refused_with_what_is_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings_to_check.py").write_text("class Settings:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidInput, match=r"^trainable Settings: expected a subclass of pt.Trainable with a `step`"):
        require_importable("settings_to_check:Settings", "process", logging.getLogger(__name__))


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_class_that_cannot_save_is_refused_unless_its_cadence_never_saves(
    isolation: Literal["process", "thread"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"import prefect_tune as pt\n\nclass Net(pt.Trainable):{_STEP_METHOD}"
    (tmp_path / f"unsaved_{isolation}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    name, log = f"unsaved_{isolation}:Net", logging.getLogger(__name__)
    with pytest.raises(InvalidInput, match=r"^trainable Net: expected the method `save_checkpoint`.* write "):
        require_importable(name, isolation, log, Cadence())
    require_importable(name, isolation, log, Cadence(every_seconds=None, at_end=False))
    require_importable(name, isolation, log)
