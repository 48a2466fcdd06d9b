"""Generations: how the name of a deleted experiment can be used again. Each deletion ends one generation of the name.

All objects of an experiment are in the folder of its generation, which is 1 for a new name. The deletion of generation
N is final once the marker of generation N + 1 exists; objects are deleted only after that.

    first/1/journal/…                                     generation 1 is current: there is no marker
    first/1/journal/…  first/generations/0000000002.json  generation 1 has ended, and is being deleted
                       first/generations/0000000002.json  the state after a deletion
    first/2/journal/…  first/generations/0000000002.json  the name is used again

- **Current generation**: the number of the highest marker; 1 without markers. A process looks the generation up once
  (`find_current_journal`), and then uses the returned key for all paths.
- **A late writer** of an ended generation writes into a folder that no current experiment uses. To detect the deletion,
  it creates its entry, *then* checks that the journal's first entry still exists, because a deletion deletes that entry
  first. If it still exists, no deletion has freed the number of the new entry, so no earlier entry had this number.
- **A late run** that looks up its experiment by name for each write is refused, because the marker lists the run.
- **Garbage**: all objects of ended generations. A later deletion, or maintenance, removes what a deletion left behind.

Never delete an object of the current generation, or any object before the marker exists. Never treat a generation as
ended without a marker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Literal

from prefect_tune.core.display_text import did_you_mean
from prefect_tune.core.errors import AlreadyExists, InvalidInput, JournalCorrupt, Superseded, TuneError, UnknownVersion
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import Generation, JournalKey, document_number, document_path
from prefect_tune.core.storage.object_store import ListedObject, ObjectStore, create_idempotently
from prefect_tune.core.values import validate_name


class GenerationMarker(Document):
    """Marks the beginning of a generation of an experiment's name, and so the end of the previous generation."""

    format: Literal["prefect-tune/generation"] = "prefect-tune/generation"
    version: Literal[1] = 1
    generation: Generation
    at: str
    deleted_by: str
    """The process that deleted the previous generation."""
    writers: tuple[str, ...] = ()
    """The identities of the owners of all earlier generations, except the runs that deleted a generation."""


class UnnamedCall(Document):
    """Identifies the call in a flow run to which this experiment belongs, if the call gave no experiment name."""

    format: Literal["prefect-tune/unnamed-call"] = "prefect-tune/unnamed-call"
    version: Literal[1] = 1
    call: str


def claim_experiment(store: ObjectStore, experiment: str, call: str) -> bool:
    """Claim the experiment for `call`; return whether it now belongs to `call`. The first claim wins. Idempotent.

    Raises:
        CommitUnknown: the target did not say whether it wrote the claim; call again.
    """
    journal = find_current_journal(store, experiment)
    try:
        create_idempotently(store, journal.unnamed_call_path, seal(UnnamedCall(call=call)))
    except AlreadyExists:
        return False
    return True


def read_claiming_call(store: ObjectStore, experiment: str) -> str | None:
    """Return the call that claimed the experiment; if no call did, "" after a deletion of the name, otherwise None."""
    journal = find_current_journal(store, experiment)
    if (claim := read_sealed(store, UnnamedCall, journal.unnamed_call_path, JournalCorrupt)) is not None:
        return claim.call
    return "" if journal.generation > 1 else None


def find_current_generation(store: ObjectStore, experiment: str) -> Generation:
    """Return the current generation of a name. Makes one listing."""
    folder = _marker_folder(experiment)
    return max((1, *(document_number(folder, item.path) or 1 for item in store.list(folder))))


def find_current_journal(store: ObjectStore, experiment: str) -> JournalKey:
    """Return the key of the current journal of an experiment's name; the journal may be empty.

    Raises:
        UnknownVersion: a development version of prefect-tune wrote the experiment.
    """
    key = JournalKey(experiment=experiment, generation=find_current_generation(store, experiment))
    if key.generation == 1 and store.size(_legacy_first_entry_path(experiment)) is not None:
        raise UnknownVersion(
            f"experiment {experiment!r} was written by a development version of prefect-tune, before its first "
            f"release, and cannot be read: finish it with that version, delete its folder {experiment}/, or choose "
            "another name"
        )
    return key


def is_generation_deleted(store: ObjectStore, journal: JournalKey) -> bool:
    """Return whether the experiment of the journal was deleted. Makes one listing."""
    return find_current_generation(store, journal.experiment) > journal.generation


def require_not_deleted(store: ObjectStore, journal: JournalKey) -> None:
    """Raise Superseded if the experiment of the journal was deleted. Makes one listing, and one read if it raises."""
    if is_generation_deleted(store, journal):
        by = ""
        with suppress(TuneError):  # the message can do without the marker, which a later deletion may have deleted
            if marker := read_sealed(store, GenerationMarker, _marker_path(journal, 1), JournalCorrupt):
                by = f" at {marker.at} by {marker.deleted_by}"
        raise Superseded(f"{journal}: the experiment was deleted{by}. Stop this run: the name may be in use again")


def reject_earlier_writer(store: ObjectStore, journal: JournalKey, writer: str) -> None:
    """Raise Superseded if `writer` owned an ended generation, JournalCorrupt if the marker is bad. At most one read."""
    if writer in _read_earlier_writers(store, journal):
        raise Superseded(
            f"{journal}: the experiment that this run wrote was deleted; its name is free, or another experiment's. "
            "Stop here, or start the run again"
        )


def _read_earlier_writers(store: ObjectStore, journal: JournalKey) -> Sequence[str]:
    if journal.generation == 1:
        return ()
    marker = read_sealed(store, GenerationMarker, _marker_path(journal), JournalCorrupt)
    return marker.writers if marker else ()  # no marker: this generation, too, has been deleted, so writes fail


def end_generation(store: ObjectStore, journal: JournalKey, *, at: str, by: str, writers: Iterable[str] = ()) -> None:
    """Create the marker that ends the generation of the journal, unless that generation has already ended.

    `by` is the process that deletes the generation; `writers` are the identities of the generation's owners.

    Raises:
        CommitUnknown: the target did not say whether it wrote the marker; call again.
        JournalCorrupt: the marker that began the generation of the journal is damaged.
    """
    if is_generation_deleted(store, journal):
        return
    all_writers = dict.fromkeys((*_read_earlier_writers(store, journal), *writers))
    marker = GenerationMarker(generation=journal.generation + 1, at=at, deleted_by=by, writers=tuple(all_writers))
    with suppress(AlreadyExists):  # another deletion has created the marker
        store.create(_marker_path(journal, 1), seal(marker))


def list_earlier_objects(store: ObjectStore, experiment: str, generation: Generation) -> Sequence[ListedObject]:
    """Return the objects and markers of a name's generations before `generation`. Sends no request for generation 1."""
    if generation == 1:
        return ()
    items = store.list(validate_name(experiment))
    return [item for item in items if (_parse_generation(item.path) or generation) < generation]


def delete_earlier_objects(store: ObjectStore, experiment: str, generation: Generation) -> Sequence[ListedObject]:
    """Delete and return the objects of generations before `generation`, beginning with each journal's first entry."""
    earlier_objects = list_earlier_objects(store, experiment, generation)
    first_entries = {JournalKey(experiment=experiment, generation=n).entry_path(1) for n in range(1, generation)}
    for is_first in (True, False):
        if paths := [item.path for item in earlier_objects if (item.path in first_entries) is is_first]:
            store.delete(paths)
    return earlier_objects


def _parse_generation(path: str) -> Generation | None:
    """Return the generation to which the object or marker at `path` belongs; None for a foreign file."""
    experiment, _, inner = path.partition("/")
    first, _, rest = inner.partition("/")
    if first == _MARKER_FOLDER and "/" not in rest:
        return document_number(f"{experiment}/{_MARKER_FOLDER}", path)
    return int(first) if rest and first.isascii() and first.isdecimal() and not first.startswith("0") else None


_MARKER_FOLDER = "generations"


def _marker_folder(experiment: str) -> str:
    return f"{validate_name(experiment)}/{_MARKER_FOLDER}"


def _marker_path(journal: JournalKey, offset: int = 0) -> str:
    return document_path(_marker_folder(journal.experiment), journal.generation + offset)


def _legacy_first_entry_path(experiment: str) -> str:
    return document_path(f"{validate_name(experiment)}/journal", 1)


# List the experiments on a target.


def list_experiment_names(store: ObjectStore) -> Sequence[str]:
    """Return the names of the experiments on `store`, sorted."""
    return find_experiment_names(item.path for item in store.list(""))


def find_experiment_names(paths: Iterable[str]) -> Sequence[str]:
    """Return the names of the experiments at `paths`: the names of folders that contain a journal's first entry.

    Includes the experiments that a development version wrote; they cannot be loaded.
    """
    existing = set(paths)
    names = []
    for name, generation in sorted(_find_current_generations(existing).items()):
        with suppress(InvalidInput):  # skip a foreign folder, whose name is not a valid experiment name
            current = JournalKey(experiment=name, generation=generation).entry_path(1)
            if current in existing or _legacy_first_entry_path(name) in existing:
                names.append(name)
    return names


def _find_current_generations(paths: Iterable[str]) -> dict[str, Generation]:
    """Return the current generation of each name that has objects at `paths`."""
    generations: dict[str, Generation] = {}
    for path in paths:
        name, _, inner = path.partition("/")
        if not inner:
            continue
        generations.setdefault(name, 1)
        if inner.startswith(f"{_MARKER_FOLDER}/"):
            generations[name] = max(generations[name], _parse_generation(path) or 1)
    return generations


def find_names_with_garbage(paths: Iterable[str]) -> Sequence[str]:
    """Return the names of the experiments that have objects of ended generations at `paths`."""
    existing = set(paths)
    current = _find_current_generations(existing)
    paths_by_name = ((path.partition("/")[0], path) for path in existing if "/" in path)
    return sorted({name for name, path in paths_by_name if (_parse_generation(path) or current[name]) < current[name]})


def no_experiment_message(store: ObjectStore, name: str, uri: str) -> str:
    """Return the message that `store` at `uri` has no experiment `name`; it suggests a similar name if there is one."""
    hint = ""
    with suppress(TuneError):  # without a listing, the message has no hint
        hint = did_you_mean(name, list_experiment_names(store))
    return f"there is no experiment {name!r} at {uri}{hint}"
