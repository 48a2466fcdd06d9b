"""Refuse a resume by name if its journal names code, places or job variables that are not trusted.

A user who can write to a target can write a journal there. So what a journal names is trusted only by one of these: the
target's `signing_key`, a local folder that only this user can write to, or trusted packages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from prefect_tune.blocks import LocalTarget, StorageTarget, target_reference
from prefect_tune.core.errors import InvalidInput, TuneError, UnsafePayload
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.settings_signature import has_signature, is_signed, signed, unsigned
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.parameters.checks.source_definitions import is_module_name, why_not_defined
from prefect_tune.stores.local.folder_ownership import why_not_own
from prefect_tune.tasks.existing_experiment import read_known
from prefect_tune.trust.code_choices import CodeChoice, code_choices

TRUSTED_PACKAGES = "PREFECT_INTEGRATIONS_TUNE_TRUSTED_PACKAGES"
"""The environment variable of the trusted packages, separated by commas, for a machine or a work pool."""
_PASSABLE = ("trainable", "space", "stop", "callbacks", "sync", "warm_start", "trial_job_variables")
"""Parameters of `pt.resume` that replace what the journal names."""
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
    # With a key, `Learned` events excuse no choice: they are not signed, so others could remove them.
    learned = known.learned if key is None else ()
    chosen = [each for each in code_choices(known.settings, learned) if each.parameter not in passed]
    if not chosen:
        return
    if key is None:
        if not (why := _why_not_own(target, known)):
            return
        refused = {each: said for each in chosen if (said := _why_not_of(each, packages))}
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


def _why_not_own(target: StorageTarget, known: Experiment) -> str:
    """Return why others may have written the journal, or that of an origin of the fork; empty if not."""
    if not isinstance(target, LocalTarget):
        return "the target is not a folder of this machine"
    if target.may_hang:
        return "the target is a network mount"
    try:
        journals = [JournalKey(experiment=name) for name in _with_origins(target, known)]
    except TuneError as error:
        return str(error)
    return why_not_own(Path(target.path), [folder for each in journals for folder in (each.entries, each.segments)])


def _with_origins(target: StorageTarget, known: Experiment) -> Sequence[str]:
    names, origin = [known.name], known.origin
    while origin is not None and origin.experiment not in names:
        names.append(origin.experiment)
        origin = read_known(target, origin.experiment).experiment.origin
    return names


def _why_not_of(choice: CodeChoice, packages: Sequence[str]) -> str:
    """Return why trusted packages do not cover `choice`; empty if they do."""
    if choice.name is None:
        return "no package"
    return why_not_defined(choice.name, packages) if packages else "no package is trusted"


def _message(target: StorageTarget, known: Experiment, refused: Mapping[CodeChoice, str], why: str) -> str:
    where = f"experiment {known.name!r} at {target.uri}"
    lines = [
        f"{where}: its journal decides what is run, and others may have written it: {why}. None of this was started:"
    ]
    lines += [f"  {each.parameter}: {each.shown}{f' ({said})' if said else ''}" for each, said in refused.items()]
    lines.append(f"If it is yours, {_next_move(target, known, [each.parameter for each in refused])}")
    if target.signing_secret is None:
        lines += _other_moves(refused)
    return "\n".join(lines)


def _other_moves(refused: Collection[CodeChoice]) -> Iterator[str]:
    named = {each.name.partition(":")[0].partition(".")[0] for each in refused if each.name}
    if names := sorted(each for each in named if is_module_name(each) and each not in sys.stdlib_module_names):
        variable = f"{TRUSTED_PACKAGES}={','.join(names)}"
        yield f"A deployment can trust packages: trusted_packages={names}, or {variable} where its runs are."
    yield "A target block with a signing_key trusts what was signed with that key."


def _next_move(target: StorageTarget, known: Experiment, parameters: Sequence[str]) -> str:
    if any(each not in _PASSABLE for each in parameters):
        return "call pt.tune(...) as before, with the same experiment name: it resumes."
    given = ", ".join(f"{name}={_shown(name, known.settings[name])}" for name in dict.fromkeys(parameters))
    return f"pass it: pt.resume({known.name!r}, target={_reference(target)}, {given})"


def _shown(name: str, value: object) -> str:
    text = "{...}" if name == _UNSHOWN else repr(value)
    return text if len(text) <= _LONGEST else "..."


def _reference(target: StorageTarget) -> str:
    try:
        return repr(target_reference(target))
    except InvalidInput:
        return "..."
