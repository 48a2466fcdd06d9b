"""What `resume=` means: whether the experiment must be there, must not be, or may; and what of it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from prefect_tune.blocks import LocalTarget, StorageTarget
from prefect_tune.core.errors import InvalidInput, JournalCorrupt, ResumeFailed, StoreRefused, UnknownVersion
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.journal import Loaded
from prefect_tune.tasks.experiment_state import read_journal

__all__ = ["Presence", "RerunErrored", "Resuming", "read_known", "read_or_fail", "require_presence", "resuming"]

Presence: TypeAlias = Literal["auto", "must", "never"]
RerunErrored: TypeAlias = bool | Literal["only"]

_PRESENCE: dict[str, Presence] = {"auto": "auto", "must": "must", "remote": "must", "local": "must", "never": "never"}
_ERRORED: dict[str, RerunErrored] = {"errored": True, "errored_only": "only"}
_REFUSED = {
    "prompt": "a flow has nobody to ask: 'auto' goes on where there is something, 'must' and 'never' insist",
    "restart_errored": "a trial never starts from nothing again while it has a checkpoint; 'errored' goes on from it, "
    "and pt.resume(..., fork='name', at=entry) begins earlier",
}
_REFUSED["restart_errored_only"] = _REFUSED["restart_errored"]


@dataclass(frozen=True, slots=True)
class Resuming:
    """What was asked for."""

    presence: Presence = "auto"
    rerun_errored: RerunErrored = False
    local: bool = False
    """Whether the state is expected on a disk of this machine."""


def resuming(given: object) -> Resuming:
    """Return what `given` means: True, False, or words joined by a plus, as Ray has them, in any case.

    Raises:
        InvalidInput: it means nothing, or nothing that there is here.
    """
    if given is None or isinstance(given, bool):
        return Resuming("auto" if given is None else "must" if given else "never")
    if not isinstance(given, str):
        raise InvalidInput(f"resume: expected 'auto', 'must' or 'never', found {given!r}")
    words = [word.strip() for word in given.lower().split("+")]
    for word in words:
        if word in _REFUSED:
            raise InvalidInput(f"resume={given!r}: {_REFUSED[word]}")
        if word not in _PRESENCE and word not in _ERRORED:
            known = ", ".join(repr(each) for each in (*_PRESENCE, *_ERRORED))
            raise InvalidInput(f"resume={given!r}: expected True, False, or one of {known}; such as 'auto+errored'")
    presence = {_PRESENCE[word] for word in words if word in _PRESENCE} or {"must"}
    if len(presence) > 1:
        raise InvalidInput(f"resume={given!r}: says both {' and '.join(map(repr, sorted(presence)))}")
    errored = [_ERRORED[word] for word in words if word in _ERRORED]
    return Resuming(presence.pop(), errored[0] if errored else False, local="local" in words)


def require_presence(
    target: StorageTarget, experiment: str, asked: Resuming, known: Loaded | None = None
) -> Loaded | None:
    """Find out before anything is written whether the experiment is there as it was said to be.

    Returns what is `known` of it, or had to be read.

    Raises:
        ResumeFailed: it is not there, or cannot be read. Nothing was started.
        InvalidInput: it is there; or its state is to be on a local disk, and the target is none.
    """
    if asked.local and not isinstance(target, LocalTarget):
        raise InvalidInput(
            f"resume='local': an experiment's state lies on its target, {target.uri}, and nowhere else: there is no "
            "copy on this machine that could be newer or older. Take 'must', or a target on this machine"
        )
    if asked.presence == "auto":
        return known
    known = known or read_known(target, experiment)
    found = known.experiment
    if asked.presence == "must" and not found.number:
        raise ResumeFailed(f"there is no experiment {experiment!r} at {target.uri}. Nothing was started")
    if asked.presence == "never" and found.number:
        raise InvalidInput(
            f"experiment {experiment!r} at {target.uri} is there already, with {len(found.trials)} trials, and is not "
            "to be resumed: take another name; nothing is ever started over it"
        )
    return known


def read_or_fail(target: StorageTarget, experiment: str) -> Experiment:
    """Return the state of `experiment` without opening it. Raises what `read_known` raises."""
    return read_known(target, experiment).experiment


def read_known(target: StorageTarget, experiment: str) -> Loaded:
    """Read `experiment`, which is to be opened next.

    Raises:
        ResumeFailed: it cannot be read, whatever the number of tries.
    """
    try:
        return read_journal(target, experiment)
    except (JournalCorrupt, UnknownVersion, StoreRefused) as error:
        raise ResumeFailed(f"experiment {experiment!r} at {target.uri}: {error}. Nothing was started afresh") from error
