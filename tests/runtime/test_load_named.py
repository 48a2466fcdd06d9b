"""Objects in another process: loaded by their names, and recognized by a digest."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.core.errors import InvalidInput
from prefect_tune.runtime.load_named import compute_stable_digest, find_import_name, load_object
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
    def create(cls): return cls()

def _wrap(function):
    return functools.wraps(function)(lambda config: function(config))

@_wrap
def decorated(config): pass

def train(config): return "first"
first = train
def train(config): return "second"
nameless = lambda config: None
def make_train():
    def train(config): pass
    return train
local = make_train()
"""


def import_module_file(folder: Path, name: str) -> ModuleType:
    """Import `MODULE` from a file with this name, on the import path or not."""
    path = folder / f"{name}.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("value", [Moody, train, pt.Trainable, pytest.fixture])
def test_an_import_path_leads_back_to_the_object(value: object) -> None:
    path = find_import_name(value)
    assert path is not None
    assert load_object(path) is value


def test_what_a_path_does_not_lead_to_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    net = import_module_file(tmp_path, "nets_of_a_test")
    try:
        assert find_import_name(net.Net) == "nets_of_a_test:Net"
        assert find_import_name(net.Net.Inner) == "nets_of_a_test:Net.Inner"
        assert find_import_name(net.decorated) == "nets_of_a_test:decorated"
        assert find_import_name(net.train) == "nets_of_a_test:train"
        unnamed = [
            net.first,
            net.nameless,
            net.local,
            net.Net().step,
            net.Net.create,
            net.Net(),
            partial(net.train),
            pt.tune.fn,
            3,
        ]
        assert [find_import_name(value) for value in unnamed] == [None] * len(unnamed)
        assert find_import_name(wraps(net.train)(partial(net.train))) is None  # it has the name of `train`
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
        assert find_import_name(net.Net) is None  # like a file that a deployment loads by its path
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "nets_of_a_test.py").write_text(MODULE)
        monkeypatch.syspath_prepend(tmp_path / "other")
        assert find_import_name(net.Net) is None
    finally:
        del sys.modules["nets_of_a_test"]


def test_what_a_script_defines_has_none_and_what_it_imports_has_one(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(
        "from nets import Net\nfrom prefect_tune.runtime.load_named import find_import_name\n"
        "class Own: pass\nprint(find_import_name(Net), find_import_name(Own))\n"
    )
    script = [sys.executable, str(tmp_path / "script.py")]
    assert subprocess.check_output(script, text=True, cwd=tmp_path.parent) == "nets:Net None\n"


def test_a_module_that_was_removed_from_the_imported_ones_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, moody.__name__)
    assert find_import_name(Moody) is None


@pytest.mark.parametrize("text", ["deadbeef", "train", ""])
def test_what_is_neither_a_name_nor_a_pickle_is_one_clear_error(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^stop: its pickle cannot be loaded by Python 3\.\d+\.\d+: "):
        load_object(text, "stop")


def test_a_module_that_calls_a_flow_when_it_is_imported_is_refused_before_the_flow_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trials import the module by name: each trial would start the flow again."""
    call = 'pt.durable_trainable("unguarded:train", target="./runs", experiment="e")'
    (tmp_path / "unguarded.py").write_text(f"import prefect_tune as pt\n\n{call}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=r"durable-trainable: the import of module 'unguarded' calls it.*__main__"):
        load_object("unguarded:train")
    assert not (tmp_path / "runs").exists()


def make_function(data: object) -> Callable[[Mapping[str, Any]], None]:
    def train(config: Mapping[str, Any]) -> None:
        del config
        pt.report({"data": str(data)})

    return train


def make_class(data: object) -> type:
    class Net:
        def setup(self) -> object:
            super().__init__()
            return data

    return Net


def make_class_with_attribute(value: object) -> type:
    class Net:
        data = value

    return Net


def make_function_with_default(data: object) -> Callable[..., object]:
    def train(_config: object, data: object = data) -> object:
        return data

    return train


def make_partial(data: object) -> object:
    return partial(make_function, data)


def make_space(data: Any) -> object:
    return {"data": pt.choice([data]), "function": pt.sample_from(make_function(data))}


CODE_HOLDERS = [make_function, make_class, make_class_with_attribute, make_function_with_default, make_partial]


@pytest.mark.parametrize("make_holder", [*CODE_HOLDERS, make_space])
@pytest.mark.parametrize(("one", "two"), [("a", "b"), (1, 2), ([1, [2]], [1, [3]]), ({"a": 1}, {"a": 2}), (None, 0.0)])
def test_plain_values_that_a_trainable_or_a_space_holds_tell_it_apart(
    make_holder: Callable[[object], object], one: object, two: object
) -> None:
    assert compute_stable_digest(make_holder(one)) == compute_stable_digest(make_holder(one))
    assert compute_stable_digest(make_holder(one)) != compute_stable_digest(make_holder(two))


@pytest.mark.parametrize("make_holder", CODE_HOLDERS)
def test_other_objects_and_the_folder_of_temporary_files_do_not(make_holder: Callable[[object], object]) -> None:
    assert compute_stable_digest(make_holder(threading.Lock())) == compute_stable_digest(make_holder(threading.Lock()))
    one, two, other = (Path(tempfile.gettempdir(), *names) for names in (("x", "a"), ("y", "a"), ("y", "b")))
    assert (
        compute_stable_digest(make_holder(one))
        == compute_stable_digest(make_holder(str(two)))
        != compute_stable_digest(make_holder(other))
    )


def test_another_process_computes_the_same_digest() -> None:
    code = (  # the hash of a text differs in each process
        "from tests.runtime.test_load_named import *\n"
        "print(*(compute_stable_digest(make({'data', 'of', 'a', 'set', Path('x')})) for make in CODE_HOLDERS))"
    )
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    digests = {subprocess.check_output(command, cwd=root) for _ in range(2)}
    assert len(digests) == 1
