"""The import path of an object leads back to it, in a process that has imported nothing yet."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import partial, wraps
from pathlib import Path
from types import ModuleType

import pytest

import prefect_tune as pt
from prefect_tune.core.errors import InvalidInput
from prefect_tune.runtime.load_named import import_path_of, load_named
from tests.trainables import moody
from tests.trainables.moody import Moody, train

MODULE = """
import functools
import math

class Net:
    class Inner:
        pass
    def step(self): pass
    @classmethod
    def made(cls): return cls()

def _kept(function):
    return functools.wraps(function)(lambda config: function(config))

@_kept
def decorated(config): pass

def train(config): return "first"
first = train
def train(config): return "second"
nameless = lambda config: None
def made():
    def train(config): pass
    return train
local = made()
"""


def the_module(folder: Path, name: str) -> ModuleType:
    """Import `MODULE` from a file of the name, on the import path or not."""
    (folder / f"{name}.py").write_text(MODULE)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("thing", [Moody, train, pt.Trainable, pytest.fixture])
def test_an_import_path_leads_back_to_the_object(thing: object) -> None:
    path = import_path_of(thing)
    assert path is not None
    assert load_named(path) is thing


def test_what_a_path_does_not_lead_to_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    net = the_module(tmp_path, "nets_of_a_test")
    try:
        assert import_path_of(net.Net) == "nets_of_a_test:Net"
        assert import_path_of(net.Net.Inner) == "nets_of_a_test:Net.Inner"
        assert import_path_of(net.decorated) == "nets_of_a_test:decorated"
        assert import_path_of(net.train) == "nets_of_a_test:train"
        none = [
            net.first,
            net.nameless,
            net.local,
            net.Net().step,
            net.Net.made,
            net.Net(),
            partial(net.train),
            pt.tune.fn,
            3,
        ]
        assert [import_path_of(each) for each in none] == [None] * len(none)
        assert import_path_of(wraps(net.train)(partial(net.train))) is None  # it takes on the name
        monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path)])
        assert import_path_of(net.Net) is None  # as with a file that a deployment loads by its path
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "nets_of_a_test.py").write_text(MODULE)
        monkeypatch.syspath_prepend(tmp_path / "other")
        assert import_path_of(net.Net) is None
    finally:
        del sys.modules["nets_of_a_test"]


def test_what_a_script_defines_has_none_and_what_it_imports_has_one(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(
        "from nets import Net\nfrom prefect_tune.runtime.load_named import import_path_of\n"
        "class Own: pass\nprint(import_path_of(Net), import_path_of(Own))\n"
    )
    script = [sys.executable, str(tmp_path / "script.py")]
    assert subprocess.check_output(script, text=True, cwd=tmp_path.parent) == "nets:Net None\n"


def test_a_module_that_was_removed_from_the_imported_ones_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, moody.__name__)
    assert import_path_of(Moody) is None


@pytest.mark.parametrize("text", ["deadbeef", "train", ""])
def test_what_is_neither_a_name_nor_a_pickle_is_one_clear_error(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^stop: its pickle cannot be loaded by Python 3\.\d+\.\d+: "):
        load_named(text, "stop")


def test_a_module_that_calls_a_flow_when_it_is_imported_is_refused_before_the_flow_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trials import it by its name: each of them would start the flow again, without end."""
    call = 'pt.durable_trainable("unguarded:train", target="./runs", experiment="e")'
    (tmp_path / "unguarded.py").write_text(f"import prefect_tune as pt\n\n{call}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=r"durable-trainable: the import of module 'unguarded' calls it.*__main__"):
        load_named("unguarded:train")
    assert not (tmp_path / "runs").exists()
