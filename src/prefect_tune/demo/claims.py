"""What the demo claims, as a function of what it measured."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from prefect_tune.demo.act import WEIGHTS_FILE
from prefect_tune.demo.picture import Claim, size

__all__ = ["Findings", "Killed", "claims"]


@dataclass(frozen=True)
class Killed:
    """What was found when the process had been killed."""

    exit_code: int
    step: int
    """The step whose checkpoint was being uploaded."""
    trained_until: int
    newest_step: int
    """The step of the newest committed checkpoint."""
    arrived: Mapping[str, int]
    """Path and size of each blob of that upload that was on the target."""
    torn_files: int


@dataclass(frozen=True)
class Findings:
    """Everything that was measured."""

    killed: Killed
    came_back_at: int
    whole_bytes: int
    """The size of the checkpoint of the killed upload, once the resumed run had committed it."""
    whole_blobs: Mapping[str, int]
    """Path and size of each of its blobs."""
    undisturbed: Mapping[str, str]
    """SHA-256 of each file of the last checkpoint, read back from the target."""
    resumed: Mapping[str, str]


def claims(found: Findings) -> list[Claim]:
    """Return every claim, the most important one first."""
    return [_identical(found), _in_the_middle(found), _came_back(found), _not_sent_again(found)]


def _identical(found: Findings) -> Claim:
    held = bool(found.undisturbed) and found.undisturbed == found.resumed
    runs = ((1, found.undisturbed), (3, found.resumed))
    shown = [f"run {run}  {files.get(WEIGHTS_FILE, 'none')}" for run, files in runs]
    others = len(found.resumed) - 1
    text = (
        f"The final weights are the same, bit for bit, and so are the {others} other files of the last checkpoint. "
        f"SHA-256 of {WEIGHTS_FILE}:"
        if held
        else "The last checkpoints of runs 1 and 3 are NOT the same"
    )
    return Claim(held, text, shown)


def _in_the_middle(found: Findings) -> Claim:
    killed = found.killed
    held = killed.exit_code == -signal.SIGKILL and bool(killed.arrived) and killed.newest_step < killed.step
    torn = f", {killed.torn_files} unfinished" if killed.torn_files else ""
    text = (
        f"SIGKILL hit the upload of step {killed.step}: on the target lay {len(killed.arrived)} of its "
        f"{len(found.whole_blobs)} blobs ({size(sum(killed.arrived.values()))} of {size(found.whole_bytes)}{torn}) "
        "and no manifest: that is no checkpoint"
        if held
        else f"SIGKILL did not hit an upload in its middle: {killed}"
    )
    return Claim(held, text)


def _came_back(found: Findings) -> Claim:
    killed, back = found.killed, found.came_back_at
    held = back == killed.newest_step > 0
    text = (
        f"Run 3 came back at step {back}, the newest one committed: nothing committed was lost. "
        f"Steps {back + 1} to {killed.trained_until} were trained again"
        if held
        else f"Run 3 came back at step {back}, and step {killed.newest_step} had been committed"
    )
    return Claim(held, text)


def _not_sent_again(found: Findings) -> Claim:
    arrived = found.killed.arrived
    kept = {path: arrived[path] for path in arrived if found.whole_blobs.get(path) == arrived[path]}
    kept_bytes = sum(kept.values())
    text = (
        f"Of that upload, {size(kept_bytes)} were not sent again; the {size(found.whole_bytes - kept_bytes)} "
        "that were missing were"
        if kept == arrived
        else f"Of the {len(arrived)} blobs that had arrived, {len(arrived) - len(kept)} were sent again"
    )
    return Claim(kept == arrived, text)
