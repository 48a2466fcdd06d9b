"""A trainable whose checkpoints hold an entry that cannot be saved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import prefect_tune as pt
from tests.trainables.counting import Counting


def make_deep(root: Path, names: Sequence[str]) -> None:
    """Make nested folders, whose path may be longer than the system allows in one call."""
    folder = os.open(root, os.O_RDONLY)
    for name in names:
        os.mkdir(name, dir_fd=folder)
        inner = os.open(name, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)


class Unreadable(Counting):
    """Saves an entry `bad` of the kind of its configuration."""

    def step(self) -> Mapping[str, Any]:
        self.count += 1
        return {"loss": 1.0}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        super().save_checkpoint(checkpoint_dir)
        bad = Path(checkpoint_dir, "bad")
        match self.config["kind"]:
            case "a link to itself":
                bad.symlink_to("bad")
            case "a long path":
                make_deep(bad.parent, ["bad", *["n" * 250] * 17])
            case "many levels":
                make_deep(bad.parent, ["bad", *["n"] * 1200])
            case "a name that is not UTF-8":
                Path(os.fsdecode(os.fsencode(bad) + b"\xff")).touch()
            case "a pipe":
                os.mkfifo(bad)
            case _:
                bad.symlink_to("/dev/full")


def report_unreadable(config: dict[str, Any]) -> None:
    """Report such a directory in a function."""
    directory = Path(pt.get_trial().directory, "mine")
    directory.mkdir()
    model = Unreadable()
    model.setup(config)
    model.save_checkpoint(str(directory))
    pt.report({"loss": 1.0}, checkpoint=pt.Checkpoint.from_directory(directory))
