"""The claims of the demo, checked against its measurements."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from prefect_tune.core.models import shown_size
from prefect_tune.demo.screen import DemoClaim
from prefect_tune.demo.training_process import WEIGHTS_FILE


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
    resumed_at: int
    whole_bytes: int
    """The size of the checkpoint of the killed upload, once the resumed run had committed it."""
    whole_blobs: Mapping[str, int]
    """Path and size of each of its blobs."""
    undisturbed: Mapping[str, str]
    """SHA-256 of each file of the last checkpoint, read back from the target."""
    resumed: Mapping[str, str]


def claims(found: Findings) -> list[DemoClaim]:
    """Return every claim, the most important one first."""
    return [_identical(found), _in_the_middle(found), _came_back(found), _not_sent_again(found)]


def _identical(found: Findings) -> DemoClaim:
    runs = ((1, found.undisturbed), (3, found.resumed))
    hashes = [f"run {run}  {files.get(WEIGHTS_FILE, 'none')}" for run, files in runs]
    if not found.undisturbed or found.undisturbed != found.resumed:
        return DemoClaim(held=False, text="The last checkpoints of runs 1 and 3 are NOT the same", shown_by=(*hashes,))
    others = f"and so are the {len(found.resumed) - 1} other files of the last checkpoint; SHA-256 of the weights:"
    return DemoClaim(held=True, text="The final weights are the same, bit for bit", shown_by=(others, *hashes))


def _in_the_middle(found: Findings) -> DemoClaim:
    killed = found.killed
    if killed.exit_code != -signal.SIGKILL or not killed.arrived or killed.newest_step >= killed.step:
        return DemoClaim(held=False, text="SIGKILL did NOT hit an upload in its middle", shown_by=(str(killed),))
    torn = f", {killed.torn_files} torn files" if killed.torn_files else ""
    arrived = f"{shown_size(sum(killed.arrived.values()))} of {shown_size(found.whole_bytes)}"
    is_partial = killed.arrived.keys() < found.whole_blobs.keys()
    when = "in its middle" if is_partial else "between its last blob and its manifest"
    there = f"on the target: {len(killed.arrived)} of {len(found.whole_blobs)} blobs ({arrived}){torn}, no manifest"
    return DemoClaim(held=True, text=f"SIGKILL hit the upload of step {killed.step} {when}", shown_by=(there,))


def _came_back(found: Findings) -> DemoClaim:
    killed, back = found.killed, found.resumed_at
    if not back == killed.newest_step > 0:
        return DemoClaim(
            held=False, text=f"Run 3 resumed from step {back}, and step {killed.newest_step} had been committed"
        )
    again = f"nothing committed was lost; steps {back + 1} to {killed.trained_until} were trained again"
    return DemoClaim(held=True, text=f"Run 3 resumed from step {back}, the newest one committed", shown_by=(again,))


def _not_sent_again(found: Findings) -> DemoClaim:
    arrived = found.killed.arrived
    kept = {path: arrived[path] for path in arrived if found.whole_blobs.get(path) == arrived[path]}
    if kept != arrived:
        return DemoClaim(
            held=False, text=f"{len(arrived) - len(kept)} of {len(arrived)} blobs that had arrived were sent again"
        )
    kept_bytes = sum(kept.values())
    missing = found.whole_bytes - kept_bytes
    sent = f"the {shown_size(missing)} that were missing were sent" if missing else "only the manifest was missing"
    evidence = f"they were found on the target; {sent}"
    return DemoClaim(
        held=True, text=f"{shown_size(kept_bytes)} of that upload were not sent again", shown_by=(evidence,)
    )
