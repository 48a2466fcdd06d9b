"""A folder that other users can write to, with journals that name code; the code writes a marker when it is used."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from prefect_tune.blocks import LocalTarget, StorageTarget
from prefect_tune.core.journal.journal import acquire_ownership, append_events
from prefect_tune.core.journal_events import ExperimentConfigured, Owner
from prefect_tune.core.values import WriteStamp
from prefect_tune.stores.posix_store import make_root
from tests.fakes.checkpoints import first_generation

TRAIN = "tests.trainables.moody:train"
_STAMPS = (WriteStamp(write_id=f"forged-{number}", at="2026-11-23T08:00:00+00:00") for number in count())
_PAYLOAD = """
from pathlib import Path

import prefect_tune as pt

MARKER = Path({marker!r})
MARKER.write_text("imported")


def touch(*_):
    MARKER.write_text("called")
    return 0


class Watch(pt.Callback):
    def __init__(self):
        touch()


class Net(pt.Trainable):
    def setup(self, config):
        touch()


class Moves(pt.Syncer):
    sync_up = sync_down = delete = touch
"""


def _sample(module: str, _path: str) -> Mapping[str, Any]:
    return {"x": {"sample_from": f"{module}:touch"}}


VECTORS: Mapping[str, Any] = {
    "trainable": lambda module, _: {"trainable": f"{module}:Net"},
    "trainable of a package": lambda module, _: {"trainable": f"{module}.deeper:Net"},
    "trainable of the standard library": lambda _, path: {
        "trainable": "subprocess:call",
        "space": {"touch": 0, path: 0},
    },
    "sample_from": lambda module, path: {"space": _sample(module, path)},
    "sample_from, deep down": lambda module, path: {"space": {"a": {"choice": [1, {"space": _sample(module, path)}]}}},
    "stop": lambda module, _: {"stop": f"{module}:touch"},
    "callbacks": lambda module, _: {"callbacks": [f"{module}:Watch"]},
    "callbacks as an object": lambda module, _: {"callbacks": {f"{module}:Watch": 1}},
    "scheduler": lambda module, path: {
        "scheduler": {"PBT": {"perturbation_interval": 1, "hyperparam_mutations": _sample(module, path)}}
    },
    "search": lambda module, _: {"search": {"OptunaSearch": {"sampler": {f"{module}:Net": {}}, "num_samples": 1}}},
    "syncer": lambda module, path: {"sync": {"syncer": f"{module}:Moves", "upload_dir": f"file://{path}-copies"}},
    "place of artifacts": lambda _, path: {"sync": {"upload_dir": f"file://{path}"}},
    "warm start": lambda _, path: {"warm_start": [f"file://{path}/first"]},
    "warm start as an object": lambda _, path: {"warm_start": {f"file://{path}/first": 1}},
    "command of a worker": lambda _, path: {
        "trials": "deployment",
        "trial_job_variables": {"command": f"touch {path}"},
    },
    "deployment": lambda _, __: {"trials": "deployment", "trial_deployment": "other-flow/any"},
}
"""The settings by which a journal can name code: each takes a payload module, and a path that must not be created."""


@dataclass(frozen=True)
class Untrusted:
    """A target that other users can write to, and a check that none of its code ran."""

    target: LocalTarget
    module: str
    marker: Path
    """Exists once the payload module is imported or called, the command is run, or the path is opened."""

    def forge(self, vector: str, name: str = "e", **settings: Any) -> None:
        """Write an experiment whose journal names code by one `vector`, with all other settings of a search."""
        attack = VECTORS[vector](self.module, str(self.marker))
        common = {"trainable": TRAIN, "space": {"x": 1.0}, "metric": "loss", "isolation": "thread"}
        count = {} if "search" in attack else {"num_samples": 1}
        write_settings(self.target, name, {**common, **count, **settings, **attack})


def make_untrusted_target(folder: Path, patch: pytest.MonkeyPatch) -> Untrusted:
    """Make such a target below `folder`, and put the payload module on the import path."""
    module, marker = f"payload_{uuid4().hex[:8]}", folder / "marker"
    code = folder / "code"
    code.mkdir()
    (code / f"{module}.py").write_text(_PAYLOAD.format(marker=str(marker)))
    patch.syspath_prepend(str(code))
    shared = folder / "shared"
    make_root(shared)
    shared.chmod(0o777)
    return Untrusted(LocalTarget(path=str(shared)), module, marker)


def write_settings(target: StorageTarget, name: str, settings: Mapping[str, Any]) -> None:
    """Append these settings to the journal of `name`."""
    with target.open(timeout=timedelta(seconds=60)) as store:
        owner = Owner(name="another user", host="there", pid=1)
        state = acquire_ownership(store, first_generation(name), owner, next(_STAMPS))
        append_events(store, state, [ExperimentConfigured(settings=settings)], next(_STAMPS))


def two(_config: Mapping[str, Any]) -> float:
    return 2.0


HOSTILE = "a\x1b]0;title\x07\x9b31m\u202egpj.exe\u2066\u200f\r\x85\u2028z"
_BIDIRECTIONAL = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def require_visible(output: str) -> None:
    """Check that `output` has no control character but tab and newline, and no bidirectional one."""
    invisible = {
        ascii(character)
        for character in set(output) - {"\n", "\t"}
        if unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs")
        or unicodedata.bidirectional(character) in _BIDIRECTIONAL
        or character in "\u061c\u200e\u200f"
    }
    assert not invisible, f"{invisible} in {output!r}"
