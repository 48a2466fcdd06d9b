"""Which trainables are accepted by their source, and which must be imported for the check."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import pytest

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.parameters import import_check
from prefect_tune.parameters.import_check import require_importable

_STEP = "\n    def step(self):\n        return {}\n"
_WHOLE = f"{_STEP}\n    def save_checkpoint(self, checkpoint_dir):\n        pass\n"


class _Imported(Exception):
    """A process was started to import the name."""


@pytest.mark.parametrize(
    ("imports", "definition", "is_imported"),
    [
        ("", "def Net(config):\n    pass", False),
        ("import prefect_tune as pt", f"class Net(pt.Trainable):{_WHOLE}", False),
        ("import prefect_tune", f"class Net(prefect_tune.Trainable):{_WHOLE}", False),
        ("from prefect_tune import Trainable as Base", f"class Net(Base):{_WHOLE}", False),
        ("from prefect_tune import Trainable as Base", f"class Net(Base):{_STEP}", True),
        ("from prefect_tune.integrations.sklearn import PartialFitTrainable as P", "class Net(P):\n    pass", False),
        ("import prefect_tune as pt", "class Net(pt.Trainable):\n    pass", True),
        ("import ray.tune as pt", f"class Net(pt.Trainable):{_STEP}", True),
        ("from ray.tune import Trainable", f"class Net(Trainable):{_STEP}", True),
        ("from dataclasses import dataclass", "@dataclass\nclass Net:\n    lr: float = 0.1", True),
        ("", f"class Net:{_STEP}", True),
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
            f"class Net(pt.Trainable):{_WHOLE}\n    async def setup(self, config): pass",
            True,
        ),
        ("import prefect_tune as pt", f"class Net(pt.Trainable):{_WHOLE}\n    def setup(self): pass", True),
        ("import prefect_tune as pt", f"class Net(pt.Trainable):{_WHOLE}\n    def setup(self, config): pass", False),
    ],
)
def test_only_a_name_whose_source_does_not_say_that_it_is_a_trainable_is_imported(
    imports: str, definition: str, is_imported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_to_check.py").write_text(f"{imports}\n\n{definition}\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def imports_it(config: object) -> None:
        raise _Imported(str(config))

    monkeypatch.setattr(import_check, "require_loadable", imports_it)
    try:
        require_importable("models_to_check:Net", "thread", logging.getLogger(__name__))
    except _Imported:
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
    source = f"import prefect_tune as pt\n\nclass Net(pt.Trainable):{_STEP}"
    (tmp_path / f"unsaved_{isolation}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    name, log = f"unsaved_{isolation}:Net", logging.getLogger(__name__)
    with pytest.raises(InvalidInput, match=r"^trainable Net: expected the method `save_checkpoint`.* write "):
        require_importable(name, isolation, log, Cadence())
    require_importable(name, isolation, log, Cadence(every_seconds=None, at_end=False))
    require_importable(name, isolation, log)
