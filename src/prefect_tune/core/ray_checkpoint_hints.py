"""Hints for attributes of Ray's older checkpoint APIs: what replaces each, with an example to copy."""

from __future__ import annotations

from collections.abc import Mapping

_SAVE_A_VALUE = """\
import json, tempfile
import prefect_tune as pt

with tempfile.TemporaryDirectory() as directory:
    with open(f"{directory}/state.json", "w") as file:
        json.dump({"epoch": 3}, file)
    pt.report({"loss": 0.1}, checkpoint=pt.Checkpoint.from_directory(directory))
"""
_READ_A_VALUE = """\
import json
import prefect_tune as pt

if checkpoint := pt.get_checkpoint():
    with checkpoint.as_directory() as directory, open(f"{directory}/state.json") as file:
        state = json.load(file)
"""
_SAVE_BYTES = """\
import pathlib, tempfile
import prefect_tune as pt

with tempfile.TemporaryDirectory() as directory:
    pathlib.Path(directory, "model.bin").write_bytes(data)
    pt.report({"loss": 0.1}, checkpoint=pt.Checkpoint.from_directory(directory))
"""
_READ_BYTES = """\
import pathlib

with checkpoint.as_directory() as directory:
    data = pathlib.Path(directory, "model.bin").read_bytes()
"""
_OPEN_A_URI = """\
import prefect_tune as pt

checkpoint = pt.Checkpoint("s3://bucket/folder")
with checkpoint.as_directory() as directory:
    ...
"""
_SEND_TO_A_TARGET = """\
import prefect_tune as pt

pt.report({"loss": 0.1}, checkpoint=pt.Checkpoint.from_directory(directory))  # committed on the trial's target
"""
_SHOW_WHERE = """\
print(checkpoint)  # Checkpoint(filesystem=s3, path=bucket/folder)
checkpoint.path, checkpoint.filesystem
"""
_SAY_A_PREPROCESSOR = """\
checkpoint.set_metadata({"preprocessor": {"mean": 0.13, "deviation": 0.31}})
"""
_READ_A_PREPROCESSOR = """\
preprocessor = checkpoint.get_metadata()["preprocessor"]
"""

_INSTEAD: Mapping[str, tuple[str, str]] = {
    "from_dict": ("a checkpoint is a directory: save the values as a file in it", _SAVE_A_VALUE),
    "to_dict": ("a checkpoint is a directory: read the values from a file in it", _READ_A_VALUE),
    "from_bytes": ("a checkpoint is a directory: save the bytes as a file in it", _SAVE_BYTES),
    "to_bytes": ("a checkpoint is a directory: read the bytes from a file in it", _READ_BYTES),
    "get_internal_representation": ("a checkpoint is a directory, and nothing else: open it", _READ_BYTES),
    "from_uri": ("the constructor takes URIs", _OPEN_A_URI),
    "to_uri": ("a reported checkpoint is uploaded to the target", _SEND_TO_A_TARGET),
    "uri": ("its path and its file system name the location", _SHOW_WHERE),
    "get_preprocessor": ("values that belong to a checkpoint beside its files are metadata", _READ_A_PREPROCESSOR),
    "set_preprocessor": ("values that belong to a checkpoint beside its files are metadata", _SAY_A_PREPROCESSOR),
}


def former_attribute(name: str) -> str | None:
    """Return what to write instead of `checkpoint.<name>`; None if no API had it."""
    if name not in _INSTEAD:
        return None
    why, example = _INSTEAD[name]
    return f"pt.Checkpoint has no {name!r}: {why}. Write instead:\n\n{example}"
