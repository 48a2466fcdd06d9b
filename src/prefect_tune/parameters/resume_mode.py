"""The `resume=` option: whether the experiment must, may or must not exist, and whether errored trials run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from prefect_tune.core.errors import InvalidInput

Presence: TypeAlias = Literal["auto", "must", "never"]
RerunErrored: TypeAlias = bool | Literal["only"]

_PRESENCE: dict[str, Presence] = {"auto": "auto", "must": "must", "remote": "must", "local": "must", "never": "never"}
_ERRORED: dict[str, RerunErrored] = {"errored": True, "errored_only": "only"}
_REFUSED = {
    "prompt": "a flow cannot ask: use 'auto', or 'must' or 'never' for an experiment that has to exist or must not",
    "restart_errored": "a trial never starts from nothing again while it has a checkpoint; 'errored' resumes from it, "
    "and pt.resume(..., fork='name', at=entry) starts from an earlier entry",
}
_REFUSED["restart_errored_only"] = _REFUSED["restart_errored"]


@dataclass(frozen=True, slots=True)
class Resuming:
    """The parsed `resume=` option."""

    presence: Presence = "auto"
    rerun_errored: RerunErrored = False
    local: bool = False
    """Whether the target has to be a folder of this machine."""


def resuming(given: object) -> Resuming:
    """Parse `resume=`: None, True, False, or Ray's words joined by a plus, in upper or lower case.

    Raises:
        InvalidInput: an unknown word, one that is not supported here, or words that contradict each other.
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
