"""The claims of the demo, checked against its measurements."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from prefect_tune.core.models import shown_size
from prefect_tune.demo.render import Assertion
from prefect_tune.demo.worker import WEIGHTS_FILE

__all__ = ["Findings", "Killed", "claims"]


@dataclass(frozen=True)
class Killed:
    """The measurements after the process was killed."""

    exit_code: int
    step: int
    """The step whose checkpoint was being uploaded."""
    trained_until: int
    newest_step: int
    """The step of the newest committed checkpoint."""
    arrived: Mapping[str, int]
    """Path and size of each blob of that upload on the target."""
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


def claims(found: Findings) -> list[Assertion]:
    """Return every claim, the most important one first."""
    return [_identical(found), _in_the_middle(found), _came_back(found), _not_sent_again(found)]


def _held(text: str, *shown_by: str) -> Assertion:
    return Assertion(held=True, text=text, shown_by=shown_by)


def _broken(text: str, *shown_by: str) -> Assertion:
    return Assertion(held=False, text=text, shown_by=shown_by)


def _identical(found: Findings) -> Assertion:
    if not found.undisturbed or found.undisturbed != found.resumed:
        return _broken("The last checkpoints of runs 1 and 3 are NOT the same", *_hashes(found))
    others = f"and so are the {len(found.resumed) - 1} other files of the last checkpoint; SHA-256 of the weights:"
    return _held("The final weights are the same, bit for bit", others, *_hashes(found))


def _hashes(found: Findings) -> tuple[str, ...]:
    runs = ((1, found.undisturbed), (3, found.resumed))
    return tuple(f"run {run}  {files.get(WEIGHTS_FILE, 'none')}" for run, files in runs)


def _in_the_middle(found: Findings) -> Assertion:
    killed = found.killed
    if killed.exit_code != -signal.SIGKILL or not killed.arrived or killed.newest_step >= killed.step:
        return _broken("SIGKILL did NOT hit an upload in its middle", str(killed))
    torn = f", {killed.torn_files} torn files" if killed.torn_files else ""
    arrived = f"{shown_size(sum(killed.arrived.values()))} of {shown_size(found.whole_bytes)}"
    is_partial = killed.arrived.keys() < found.whole_blobs.keys()
    when = "in its middle" if is_partial else "between its last blob and its manifest"
    return _held(
        f"SIGKILL hit the upload of step {killed.step} {when}",
        f"on the target: {len(killed.arrived)} of {len(found.whole_blobs)} blobs ({arrived}){torn}, no manifest",
    )


def _came_back(found: Findings) -> Assertion:
    killed, back = found.killed, found.came_back_at
    if not back == killed.newest_step > 0:
        return _broken(f"Run 3 came back at step {back}, and step {killed.newest_step} had been committed")
    again = f"nothing committed was lost; steps {back + 1} to {killed.trained_until} were trained again"
    return _held(f"Run 3 came back at step {back}, the newest one committed", again)


def _not_sent_again(found: Findings) -> Assertion:
    arrived = found.killed.arrived
    kept = {path: arrived[path] for path in arrived if found.whole_blobs.get(path) == arrived[path]}
    if kept != arrived:
        return _broken(f"{len(arrived) - len(kept)} of {len(arrived)} blobs that had arrived were sent again")
    kept_bytes = sum(kept.values())
    missing = found.whole_bytes - kept_bytes
    sent = f"the {shown_size(missing)} that were missing were sent" if missing else "only the manifest was missing"
    return _held(
        f"{shown_size(kept_bytes)} of that upload were not sent again", f"they were found on the target; {sent}"
    )
