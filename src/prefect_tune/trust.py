"""Check the code, locations and job variables that a journal names, before a resume by name uses any of them."""

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
from prefect_tune.core.storage.documents import add_signature, has_signature, has_valid_signature, strip_signature
from prefect_tune.journal_access import read_experiment
from prefect_tune.linux import may_have_acl, read_mount_type
from prefect_tune.parameters.import_check import is_module_name, undefined_name_reason
from prefect_tune.parameters.search_plan import OPTIONS, StoredForm

_MOUNTS_WITHOUT_OWNERS = ("fuse", "cifs", "smb3", "smbfs")
"""Prefixes of mount types (s3fs, rclone, SMB) that report, as the owner of every file, the user who mounted them."""


def shared_access_reason(root: Path, folders: Sequence[str]) -> str | None:
    """Return why other users may have written the files in `folders` below `root`; None if they cannot have.

    The administrator (user 0) counts as this user, and so does a group whose only member is this user. FUSE and SMB
    mounts do not show who can write to them, so files there always count as shared. The check covers every folder from
    `/` to `root` (also folders that links lead through), every folder from `root` to `folders`, and every file in
    `folders`. It accepts a folder that does not exist.
    """
    try:
        real = Path(os.path.realpath(root, strict=True))
        for path in _iter_traversed_paths(root):
            if reason := _shared_path_reason(path, is_above=path != real):
                return reason
        for folder in folders:
            if reason := _shared_folder_reason(real, folder):
                return reason
    except OSError as error:
        return f"{root}: {error.strerror}"
    return None


def _iter_traversed_paths(path: Path) -> Iterator[Path]:
    """Yield every folder and link from `/` to `path`, since a user who can write to one of them can redirect `path`."""
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


def _shared_folder_reason(root: Path, folder: str) -> str | None:
    path = root
    for name in folder.split("/"):
        path /= name
        try:
            reason = _shared_path_reason(path)
        except FileNotFoundError:
            return None
        if reason:
            return reason
    return next(filter(None, map(_shared_path_reason, path.iterdir())), None)


def _shared_path_reason(path: Path, *, is_above: bool = False) -> str | None:
    """Return why other users can write to `path`; None if they cannot.

    Above the root of a target, accept links and sticky folders: in a sticky folder, such as `/tmp`, other users can add
    names, but cannot replace existing ones.
    """
    status = path.lstat()
    if status.st_uid not in {0, os.geteuid()}:
        return f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if stat.S_ISLNK(status.st_mode):
        return None if is_above else f"{path} is a link"
    if stat.S_ISDIR(status.st_mode) and (kind := read_mount_type(status.st_dev)).startswith(_MOUNTS_WITHOUT_OWNERS):
        return f"{path} is on a mount of type {kind}, which hides which other users can write there"
    is_shared_by_group = status.st_mode & stat.S_IWGRP and (
        not _is_private_group(os.geteuid(), status.st_gid) or may_have_acl(path)
    )
    if (is_shared_by_group or status.st_mode & stat.S_IWOTH) and not (is_above and status.st_mode & stat.S_ISVTX):
        mode = stat.filemode(status.st_mode)
        return f"{path} can be written by others ({mode}; chmod go-w removes that permission)"
    return None


@lru_cache(maxsize=8)
def _is_private_group(user: int, group: int) -> bool:
    """Return whether `user` is the only member of `group`. Many systems give each user such a group, and umask 002."""
    try:
        account, members = pwd.getpwuid(user), grp.getgrgid(group).gr_mem
    except KeyError:
        return False
    if user == 0 or account.pw_gid != group or not set(members) <= {account.pw_name}:
        return False
    return all(entry.pw_uid == user for entry in pwd.getpwall() if entry.pw_gid == group)


# Find the settings in an experiment's journal that choose code to run or import, or locations to open.

_CodeFinder: TypeAlias = "Callable[[Any], Iterator[CodeChoice]]"
_BLOCK_REFERENCE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*/[^/\s]+")
_TRIAL_FLOW_PREFIX = "train-trial/"
"""Deployments of this flow are accepted, since the Prefect server, and not the target, defines what they run."""


@dataclass(frozen=True, slots=True)
class CodeChoice:
    """One object, location, command or deployment that the settings choose."""

    parameter: str
    """The parameter of `pt.tune` that contains the choice."""
    text: str
    """The text for messages."""
    name: str | None = None
    """`package.module:Name` of an importable object; None for a location, a command or a deployment."""


def find_code_choices(settings: Mapping[str, object], earlier_sources: Collection[str] = ()) -> Sequence[CodeChoice]:
    """Return all code and locations that `settings` choose; import nothing.

    Args:
        settings: the settings in the journal.
        earlier_sources: the sources of earlier warm starts; these are skipped, since the search does not reopen them.

    Raises:
        InvalidInput: the search space in the settings is invalid.
    """
    in_warm_start = partial(_find_in_warm_start, known_sources=earlier_sources)
    finders: dict[str, _CodeFinder] = {**_CODE_FINDERS, "warm_start": in_warm_start}
    names = [name for name, option in OPTIONS.items() if option.stored is StoredForm.CHOICE and name in settings]
    return [choice for name in names for choice in finders[name](settings[name])]


def _find_in_trainable(value: Any) -> Iterator[CodeChoice]:
    yield CodeChoice("trainable", repr(value), str(value))


def _find_in_space(value: Any) -> Iterator[CodeChoice]:
    names: list[str] = []

    def record_name(name: str) -> Callable[[Mapping[str, Any]], object]:
        names.append(name)
        return lambda _: None

    space_from_json(value, record_name)
    return (CodeChoice("space", f"sample_from {name!r}", name) for name in names)


def _find_in_stop(value: Any) -> Iterator[CodeChoice]:
    return (CodeChoice("stop", repr(text), text) for text in _iter_texts(value))


def _find_in_callbacks(value: Any) -> Iterator[CodeChoice]:
    if not isinstance(value, list | tuple):
        yield CodeChoice("callbacks", repr(value))
    yield from (CodeChoice("callbacks", repr(text), text) for text in _iter_texts(value))


def _find_in_sync(value: Any) -> Iterator[CodeChoice]:
    if not isinstance(value, Mapping):
        return
    syncer, location = value.get("syncer", "auto"), value.get("upload_dir")
    if syncer not in ("auto", None):
        yield CodeChoice("sync", f"syncer {syncer!r}", str(syncer))
    # A saved block is accepted, since the user's Prefect server, and not the target, stores the block's location.
    if not (location is None or (isinstance(location, str) and _BLOCK_REFERENCE.fullmatch(location))):
        yield CodeChoice("sync", f"upload_dir {location!r}")


def _find_in_job_variables(value: Any) -> Iterator[CodeChoice]:
    """Yield the job variables' names as one choice, since some (`image`) choose code; the values may be secret."""
    if value:
        names = ", ".join(map(repr, value)) if isinstance(value, Mapping) else "no mapping"
        yield CodeChoice("trial_job_variables", names)


def _find_in_deployment(value: Any) -> Iterator[CodeChoice]:
    if not (isinstance(value, str) and value.startswith(_TRIAL_FLOW_PREFIX)):
        yield CodeChoice("trial_deployment", repr(value))


def _find_in_warm_start(value: Any, known_sources: Collection[str] = ()) -> Iterator[CodeChoice]:
    """Yield the sources on other targets; a name without a target is on the experiment's own target."""
    if not isinstance(value, list | tuple):
        yield CodeChoice("warm_start", repr(value))
    yield from (
        CodeChoice("warm_start", repr(name)) for name in _iter_texts(value) if "/" in name and name not in known_sources
    )


def _iter_texts(value: Any) -> Iterator[str]:
    """Yield the texts of a nested list; skip JSON objects, whose keys are names of metrics or stoppers."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iter_texts(item)


_CODE_FINDERS: Mapping[str, _CodeFinder] = {
    "trainable": _find_in_trainable,
    "space": _find_in_space,
    "stop": _find_in_stop,
    "callbacks": _find_in_callbacks,
    "sync": _find_in_sync,
    "trial_deployment": _find_in_deployment,
    "trial_job_variables": _find_in_job_variables,
    "warm_start": _find_in_warm_start,
}
"""For each option that is stored as `StoredForm.CHOICE`: the function that finds code and locations in its value."""


# Refuse a resume by name if the experiment's journal names untrusted code, locations or job variables. A user who can
# write to a target can write a journal there. So if the target has a `signing_key`, a journal is trusted only if it is
# signed with this key. Without a `signing_key`, a journal is trusted only if it is in a local folder that only this
# user can write to, or if it names only trusted packages.

TRUSTED_PACKAGES_VARIABLE = "PREFECT_INTEGRATIONS_TUNE_TRUSTED_PACKAGES"
"""The environment variable with the trusted packages of a machine or a work pool, separated by commas."""
_HIDDEN_PARAMETER = "trial_job_variables"  # messages omit its values, which may be secrets
_MAX_VALUE_CHARACTERS = 400


def resolve_trusted_packages(packages: Sequence[str] | None) -> Sequence[str]:
    """Return `packages`; if None, the packages in the environment variable `TRUSTED_PACKAGES_VARIABLE`.

    Raises:
        InvalidInput: an entry is not the name of a package.
    """
    if packages is None:
        packages = [name.strip() for name in os.environ.get(TRUSTED_PACKAGES_VARIABLE, "").split(",") if name.strip()]
    for name in packages:
        if not is_module_name(name):
            raise InvalidInput(f"trusted_packages: expected names of packages, such as 'my_project', found {name!r}")
    return packages


def require_trusted_code(
    target: StorageTarget, state: Experiment, passed: Collection[str], packages: Sequence[str]
) -> None:
    """Require that the code, locations and job variables in the journal are trusted, before any of them is used.

    Args:
        target: where the experiment is stored.
        state: the experiment, as read from the journal.
        passed: the names of the parameters that this run passes; their values replace the journal's.
        packages: the trusted packages.

    Raises:
        UnsafePayload: code, a location or job variables are not trusted. The message says what to pass.
    """
    key = target.signing_secret
    # With a key, check earlier warm starts, too: their record is not signed, so other users could change this record.
    sources = state.warm_starts if key is None else ()
    choices = [choice for choice in find_code_choices(state.settings, sources) if choice.parameter not in passed]
    if not choices:
        return
    if key is None:
        if not (distrust_reason := _shared_journal_reason(target, state)):
            return
        reasons = {}
        for choice in choices:
            if choice.name is None:
                reasons[choice] = "no package"
            elif reason := undefined_name_reason(choice.name, packages) if packages else "no package is trusted":
                reasons[choice] = reason
    elif has_valid_signature(state.settings, state.name, key):
        return
    else:
        reasons = dict.fromkeys(choices, "")
        problem = "does not match the target's signing_key" if has_signature(state.settings) else "is missing"
        distrust_reason = f"the signature of its settings {problem}"
    if reasons:
        raise UnsafePayload(_format_refusal(target, state, reasons, distrust_reason))


def sign_settings(target: StorageTarget, state: Experiment, settings: Mapping[str, object]) -> Mapping[str, object]:
    """Return `settings` for the journal of `state`, signed if the target has a key.

    Without a key, keep an existing signature if the settings are unchanged.
    """
    if (key := target.signing_secret) is not None:
        return add_signature(settings, state.name, key)
    return state.settings if strip_signature(state.settings) == settings else settings


def _shared_journal_reason(target: StorageTarget, state: Experiment) -> str | None:
    """Return why other users may have written this journal or, for a fork, an origin's journal; None if they cannot."""
    if not isinstance(target, LocalTarget):
        return "the target is not a local folder"
    if target.may_hang:
        return "the target is a network mount"
    journals, origin = [state.key], state.origin
    try:
        while origin is not None and origin.key not in journals:
            journals.append(origin.key)
            origin = read_experiment(target, origin.key).origin
    except TuneError as error:
        return str(error)
    folders = [folder for journal in journals for folder in (journal.entries_folder, journal.snapshots_folder)]
    return shared_access_reason(Path(target.path), folders)


def _format_refusal(target: StorageTarget, state: Experiment, notes: Mapping[CodeChoice, str], reason: str) -> str:
    where = f"experiment {state.name!r} at {target.uri}"
    lines = [f"{where}: its journal chooses code, and others may have written this journal: {reason}. Not trusted:"]
    lines += [f"  {choice.parameter}: {choice.text}{f' ({note})' if note else ''}" for choice, note in notes.items()]
    parameters = list(dict.fromkeys(choice.parameter for choice in notes))
    if all(OPTIONS[name].at_resume for name in parameters):
        arguments = ", ".join(f"{name}={_format_argument(name, state.settings[name])}" for name in parameters)
        target_text = "..."
        with suppress(InvalidInput):
            target_text = repr(target_reference(target))
        lines.append(f"If the journal is yours, pass: pt.resume({state.name!r}, target={target_text}, {arguments})")
    else:
        lines.append("If the journal is yours, resume it by calling pt.tune(...) again with the same experiment name.")
    if target.signing_secret is None:
        packages = {choice.name.partition(":")[0].partition(".")[0] for choice in notes if choice.name}
        names = sorted(name for name in packages if is_module_name(name) and name not in sys.stdlib_module_names)
        if names:
            variable = f"{TRUSTED_PACKAGES_VARIABLE}={','.join(names)}"
            lines.append(f"A deployment can trust packages: trusted_packages={names}, or {variable} where it runs.")
        lines.append("A target block with a signing_key trusts journals that are signed with this key.")
    return "\n".join(lines)


def _format_argument(name: str, value: object) -> str:
    text = "{...}" if name == _HIDDEN_PARAMETER else repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else "..."
