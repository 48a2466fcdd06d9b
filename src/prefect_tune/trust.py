"""Checks on code, places and job variables that a journal names, before a resume by name runs or imports anything."""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

from prefect_tune.blocks import LocalTarget, StorageTarget, target_reference
from prefect_tune.core.errors import InvalidInput, TuneError, UnsafePayload
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.search.space_json import space_from_json
from prefect_tune.core.storage.documents import has_signature, is_signed, signed, unsigned
from prefect_tune.journal_access import read_experiment
from prefect_tune.linux import may_have_access_list, mount_type
from prefect_tune.parameters.import_check import is_module_name, why_not_defined
from prefect_tune.parameters.search_plan import OPTIONS, Stored

_OWNERS_MADE_UP = ("fuse", "cifs", "smb3", "smbfs")
"""Beginnings of the types of mounts that report the user who mounted them as owner of every file: s3fs, rclone, SMB."""


def shared_access_reason(root: Path, folders: Sequence[str]) -> str | None:
    """Return why other users can have written the files in `folders` below `root`; None if only this user can.

    The administrator (user 0) counts as this user, and so does a group with this user as its only member. A mount
    that makes up owners (FUSE, SMB) does not show who can write to it, so it never counts as this user's own. Checked
    are every folder from `/` to `root`, those that links lead through included, every folder from there to `folders`,
    and every file in these. A folder that does not exist passes.
    """
    try:
        real = Path(os.path.realpath(root, strict=True))
        for path in _passed_paths(root):
            if reason := _writer_reason(path, is_above=path != real):
                return reason
        for folder in folders:
            if reason := _folder_reason(real, folder):
                return reason
    except OSError as error:
        return f"{root}: {error.strerror}"
    return None


def _passed_paths(path: Path) -> Iterator[Path]:
    """Yield every folder and every link on the way from `/` to `path`: who can write to one of them can redirect it."""
    current, names = Path("/"), deque(path.absolute().parts[1:])
    yield current
    while names:
        name = names.popleft()
        current = current.parent if name == ".." else current / name
        if current.is_symlink():
            yield current
            target = current.readlink()
            names.extendleft(reversed(target.parts[target.is_absolute() :]))
            current = Path("/") if target.is_absolute() else current.parent
        yield current


def _folder_reason(root: Path, folder: str) -> str | None:
    path = root
    for name in folder.split("/"):
        path /= name
        try:
            reason = _writer_reason(path)
        except FileNotFoundError:
            return None
        if reason:
            return reason
    return next(filter(None, map(_writer_reason, path.iterdir())), None)


def _writer_reason(path: Path, *, is_above: bool = False) -> str | None:
    """Return why other users can write to `path`; None if they cannot.

    Above a target a link passes, and so does a sticky folder (`/tmp`): others can add names to it, but not replace
    existing ones.
    """
    status = path.lstat()
    if status.st_uid not in {0, os.geteuid()}:
        return f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if stat.S_ISLNK(status.st_mode):
        return None if is_above else f"{path} is a link"
    if stat.S_ISDIR(status.st_mode) and (kind := mount_type(status.st_dev)).startswith(_OWNERS_MADE_UP):
        return f"{path} is on a mount of type {kind}, which does not show which other users can write there"
    is_shared_by_group = status.st_mode & stat.S_IWGRP and (
        not _is_private_group(os.geteuid(), status.st_gid) or may_have_access_list(path)
    )
    if (is_shared_by_group or status.st_mode & stat.S_IWOTH) and not (is_above and status.st_mode & stat.S_ISVTX):
        mode = stat.filemode(status.st_mode)
        return f"{path} can be written by others ({mode}; chmod go-w removes that permission)"
    return None


@lru_cache(maxsize=8)
def _is_private_group(user: int, group: int) -> bool:
    """Whether `user` is the only member of `group`: many systems make such a group per user, with umask 002."""
    try:
        me, members = pwd.getpwuid(user), grp.getgrgid(group).gr_mem
    except KeyError:
        return False
    if user == 0 or me.pw_gid != group or not set(members) <= {me.pw_name}:
        return False
    return all(each.pw_uid == user for each in pwd.getpwall() if each.pw_gid == group)


# Find the settings in an experiment's journal that choose code to run or import, or a location to open.

_Finder: TypeAlias = "Callable[[Any], Iterator[CodeChoice]]"
_SAVED_BLOCK = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*/[^/\s]+")
_OUR_TRIAL_FLOW = "train-trial/"
"""A deployment of this flow runs `train_trial`: the Prefect server, not the target, defines what a deployment runs."""


@dataclass(frozen=True, slots=True)
class CodeChoice:
    """One object, location, command or deployment that the settings choose."""

    parameter: str
    """The parameter of `pt.tune` that chose it."""
    shown: str
    """Its text in a message."""
    name: str | None = None
    """`package.module:Name` if it is an importable object; None for a location, a command or a deployment."""


def code_choices(settings: Mapping[str, object], known_sources: Collection[str] = ()) -> Sequence[CodeChoice]:
    """Return all code and locations that `settings` choose; nothing is imported.

    Args:
        settings: those of the journal.
        known_sources: the experiments that the search has warm-started from: their targets are not opened again.

    Raises:
        InvalidInput: the search space in the settings is invalid.
    """
    finders: dict[str, _Finder] = {**_FINDERS, "warm_start": partial(_warm_start_places, known_sources=known_sources)}
    named = [name for name, option in OPTIONS.items() if option.stored is Stored.CHOICE and name in settings]
    return [choice for name in named for choice in finders[name](settings[name])]


def _trainable(given: Any) -> Iterator[CodeChoice]:
    yield CodeChoice("trainable", repr(given), str(given))


def _space(given: Any) -> Iterator[CodeChoice]:
    names: list[str] = []

    def load(name: str) -> Callable[[Mapping[str, Any]], object]:
        names.append(name)
        return lambda _: None

    space_from_json(given, load)
    return (CodeChoice("space", f"sample_from {name!r}", name) for name in names)


def _stop(given: Any) -> Iterator[CodeChoice]:
    return (CodeChoice("stop", repr(each), each) for each in _texts_in(given))


def _callbacks(given: Any) -> Iterator[CodeChoice]:
    if not isinstance(given, list | tuple):
        yield CodeChoice("callbacks", repr(given))
    yield from (CodeChoice("callbacks", repr(each), each) for each in _texts_in(given))


def _sync(given: Any) -> Iterator[CodeChoice]:
    if not isinstance(given, Mapping):
        return
    syncer, place = given.get("syncer", "auto"), given.get("upload_dir")
    if syncer not in ("auto", None):
        yield CodeChoice("sync", f"syncer {syncer!r}", str(syncer))
    # The user's own Prefect server, not the target, holds the location of a saved block.
    if not (place is None or (isinstance(place, str) and _SAVED_BLOCK.fullmatch(place))):
        yield CodeChoice("sync", f"upload_dir {place!r}")


def _job_variables(given: Any) -> Iterator[CodeChoice]:
    """Job variables choose code: `command` in a process pool, `image` in others. Values may be secret: show names."""
    if given:
        names = ", ".join(map(repr, given)) if isinstance(given, Mapping) else "no mapping"
        yield CodeChoice("trial_job_variables", names)


def _deployment(given: Any) -> Iterator[CodeChoice]:
    if not (isinstance(given, str) and given.startswith(_OUR_TRIAL_FLOW)):
        yield CodeChoice("trial_deployment", repr(given))


def _warm_start_places(given: Any, known_sources: Collection[str] = ()) -> Iterator[CodeChoice]:
    """Yield the sources on other targets; a name without a target is on the experiment's own."""
    if not isinstance(given, list | tuple):
        yield CodeChoice("warm_start", repr(given))
    yield from (
        CodeChoice("warm_start", repr(each)) for each in _texts_in(given) if "/" in each and each not in known_sources
    )


def _texts_in(given: Any) -> Iterator[str]:
    """Yield the texts of a nested list; objects are skipped, since their keys are names of metrics or stoppers."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _texts_in(each)


_FINDERS: Mapping[str, _Finder] = {
    "trainable": _trainable,
    "space": _space,
    "stop": _stop,
    "callbacks": _callbacks,
    "sync": _sync,
    "trial_deployment": _deployment,
    "trial_job_variables": _job_variables,
    "warm_start": _warm_start_places,
}
"""What finds them in the value of each option that `SearchPlan` declares as `Stored.CHOICE`."""


# Refuse a resume by name if its journal names code, places or job variables that are not trusted.
#
# A user who can write to a target can write a journal there. So what a journal names is trusted only by one of these:
# the target's `signing_key`, a local folder that only this user can write to, or trusted packages.

TRUSTED_PACKAGES = "PREFECT_INTEGRATIONS_TUNE_TRUSTED_PACKAGES"
"""The environment variable of the trusted packages, separated by commas, for a machine or a work pool."""
_UNSHOWN = "trial_job_variables"  # their values may be keys
_LONGEST = 400


def trusted_here(given: Sequence[str] | None) -> Sequence[str]:
    """Return the trusted packages: those given, or else those of the environment variable.

    Raises:
        InvalidInput: one of them is not the name of a package.
    """
    found = given
    if found is None:
        found = [name.strip() for name in os.environ.get(TRUSTED_PACKAGES, "").split(",") if name.strip()]
    for name in found:
        if not is_module_name(name):
            raise InvalidInput(f"trusted_packages: expected names of packages, such as 'my_project', found {name!r}")
    return found


def require_trusted(target: StorageTarget, known: Experiment, passed: Collection[str], packages: Sequence[str]) -> None:
    """Return if the code, places and job variables in the journal of `known` are trusted; import none before.

    Args:
        target: where the experiment is stored.
        known: the experiment, as read.
        passed: the parameters that this run is given: the journal's values of these are not used.
        packages: the trusted packages.

    Raises:
        UnsafePayload: one of them is not trusted. The message says what to pass.
    """
    key = target.signing_secret
    # With a key, warm starts excuse no choice: they are not signed, so others could remove them.
    sources = known.warm_starts if key is None else ()
    chosen = [each for each in code_choices(known.settings, sources) if each.parameter not in passed]
    if not chosen:
        return
    if key is None:
        if not (why := _shared_journal_reason(target, known)):
            return
        refused = {}
        for each in chosen:
            if each.name is None:
                refused[each] = "no package"
            elif said := why_not_defined(each.name, packages) if packages else "no package is trusted":
                refused[each] = said
    elif is_signed(known.settings, known.name, key):
        return
    else:
        refused = dict.fromkeys(chosen, "")
        what = "does not match the target's signing_key" if has_signature(known.settings) else "is missing"
        why = f"the signature of its settings {what}"
    if refused:
        raise UnsafePayload(_message(target, known, refused, why))


def signed_settings(target: StorageTarget, known: Experiment, settings: Mapping[str, object]) -> Mapping[str, object]:
    """Return `settings` for the journal of `known`: signed, if the target has a key.

    Without a key an existing signature is kept while the settings do not change.
    """
    if (key := target.signing_secret) is not None:
        return signed(settings, known.name, key)
    return known.settings if unsigned(known.settings) == settings else settings


def _shared_journal_reason(target: StorageTarget, known: Experiment) -> str | None:
    """Return why others may have written the journal, or that of an origin of the fork; None if not."""
    if not isinstance(target, LocalTarget):
        return "the target is not a folder of this machine"
    if target.may_hang:
        return "the target is a network mount"
    journals, origin = [known.key], known.origin
    try:
        while origin is not None and origin.key not in journals:
            journals.append(origin.key)
            origin = read_experiment(target, origin.key).origin
    except TuneError as error:
        return str(error)
    return shared_access_reason(
        Path(target.path), [folder for each in journals for folder in (each.entries, each.snapshots)]
    )


def _message(target: StorageTarget, known: Experiment, refused: Mapping[CodeChoice, str], why: str) -> str:
    where = f"experiment {known.name!r} at {target.uri}"
    lines = [
        f"{where}: its journal decides what is run, and others may have written it: {why}. None of this was started:"
    ]
    lines += [f"  {each.parameter}: {each.shown}{f' ({said})' if said else ''}" for each, said in refused.items()]
    parameters = list(dict.fromkeys(each.parameter for each in refused))
    if all(OPTIONS[each].at_resume for each in parameters):
        given = ", ".join(f"{name}={_shown(name, known.settings[name])}" for name in parameters)
        place = "..."
        with suppress(InvalidInput):
            place = repr(target_reference(target))
        lines.append(f"If it is yours, pass it: pt.resume({known.name!r}, target={place}, {given})")
    else:
        lines.append("If it is yours, call pt.tune(...) as before, with the same experiment name: it resumes.")
    if target.signing_secret is None:
        packages = {each.name.partition(":")[0].partition(".")[0] for each in refused if each.name}
        names = sorted(each for each in packages if is_module_name(each) and each not in sys.stdlib_module_names)
        if names:
            variable = f"{TRUSTED_PACKAGES}={','.join(names)}"
            lines.append(
                f"A deployment can trust packages: trusted_packages={names}, or {variable} where its runs are."
            )
        lines.append("A target block with a signing_key trusts what was signed with that key.")
    return "\n".join(lines)


def _shown(name: str, value: object) -> str:
    text = "{...}" if name == _UNSHOWN else repr(value)
    return text if len(text) <= _LONGEST else "..."
