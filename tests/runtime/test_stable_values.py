"""A digest of what a call trains is the same in each process, and tells plain values apart."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.runtime.load_named import stable_digest


def function_of(data: object) -> Callable[[Mapping[str, Any]], None]:
    def train(config: Mapping[str, Any]) -> None:
        del config
        pt.report({"data": str(data)})

    return train


def class_of(data: object) -> type:
    class Net:
        def setup(self) -> object:
            super().__init__()
            return data

    return Net


def attribute_of(value: object) -> type:
    class Net:
        data = value

    return Net


def default_of(data: object) -> Callable[..., object]:
    def train(_config: object, data: object = data) -> object:
        return data

    return train


def argument_of(data: object) -> object:
    return partial(function_of, data)


def space_of(data: Any) -> object:
    return {"data": pt.choice([data]), "function": pt.sample_from(function_of(data))}


OF_CODE = [function_of, class_of, attribute_of, default_of, argument_of]


@pytest.mark.parametrize("holder", [*OF_CODE, space_of])
@pytest.mark.parametrize(("one", "two"), [("a", "b"), (1, 2), ([1, [2]], [1, [3]]), ({"a": 1}, {"a": 2}), (None, 0.0)])
def test_plain_values_that_a_trainable_or_a_space_holds_tell_it_apart(
    holder: Callable[[object], object], one: object, two: object
) -> None:
    assert stable_digest(holder(one)) == stable_digest(holder(one))
    assert stable_digest(holder(one)) != stable_digest(holder(two))


@pytest.mark.parametrize("holder", OF_CODE)
def test_other_objects_and_the_folder_of_temporary_files_do_not(holder: Callable[[object], object]) -> None:
    assert stable_digest(holder(threading.Lock())) == stable_digest(holder(threading.Lock()))
    one, two, other = (Path(tempfile.gettempdir(), *names) for names in (("x", "a"), ("y", "a"), ("y", "b")))
    assert stable_digest(holder(one)) == stable_digest(holder(str(two))) != stable_digest(holder(other))


def test_another_process_computes_the_same_digest() -> None:
    code = (  # the hash of a text differs in each process
        "from tests.runtime.test_stable_values import *\n"
        "print(*(stable_digest(each({'data', 'of', 'a', 'set', Path('x')})) for each in OF_CODE))"
    )
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    digests = {subprocess.run(command, cwd=root, capture_output=True, check=True).stdout for _ in range(2)}
    assert len(digests) == 1
