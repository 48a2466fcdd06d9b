"""Use the name of a deleted experiment again: each deletion ends a generation of the name.

The idea: all objects of an experiment are in the folder of a generation, 1 for a new name. A deletion of generation N
cannot be cancelled from the moment at which the marker of generation N + 1 exists; only after that it deletes bytes.

    first/1/journal/…                                     generation 1 is current: there is no marker
    first/1/journal/…  first/generations/0000000002.json  generation 1 is dead, and is being deleted
                       first/generations/0000000002.json  what a deletion leaves
    first/2/journal/…  first/generations/0000000002.json  the name is used again

- **Current** is the highest marker, or 1. A process finds it once, by `current_journal`, and then uses keys of it.
- **A late writer** of a dead generation writes into a folder that no living experiment has. It learns of the deletion
  since it looks for the journal's first entry, which is deleted before anything else, *after* each entry that it
  creates: if that is there, nothing had been deleted when the entry was created, so that creating it only if absent has
  fenced off earlier owners. See `journal`.
- **A late run** that finds its experiment by its name, anew for each write, is named by the marker, and refused.
- **Garbage** is what is below a dead generation. The deletion, the next one, and maintenance collect it.

Never: an object deleted before the marker exists; one of the current generation deleted; a generation taken for dead
that no marker says is dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Literal

from prefect_tune.core.errors import (
    AlreadyExists,
    InvalidInput,
    JournalCorrupt,
    Superseded,
    TuneError,
    UnknownVersion,
)
from prefect_tune.core.shown_text import did_you_mean
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import Generation, JournalKey, number_in, numbered
from prefect_tune.core.storage.object_store import Listed, ObjectStore, create_or_recognize
from prefect_tune.core.values import valid_name


class GenerationMarker(Document):
    """Says that a generation of an experiment's name begins: the one before it is deleted."""

    format: Literal["prefect-tune/generation"] = "prefect-tune/generation"
    version: Literal[1] = 1
    generation: Generation
    at: str
    deleted_by: str
    """The process that deleted the generation before it."""
    writers: tuple[str, ...] = ()
    """The identities of the owners of all generations before it, but for runs that deleted one themselves."""


class UnnamedCall(Document):
    """Says which call of a flow run has this experiment, of those that were made without a name."""

    format: Literal["prefect-tune/unnamed-call"] = "prefect-tune/unnamed-call"
    version: Literal[1] = 1
    call: str


def claim_name(store: ObjectStore, experiment: str, call: str) -> bool:
    """Return whether `call` is the one that has this experiment: the first that asks, and each repetition of it.

    Raises:
        CommitUnknown: the target did not say whether it wrote; call again.
    """
    journal = current_journal(store, experiment)
    try:
        create_or_recognize(store, journal.unnamed_call, seal(UnnamedCall(call=call)))
    except AlreadyExists:
        return False
    return True


def call_that_has(store: ObjectStore, experiment: str) -> str | None:
    """Return the call that has this experiment; empty if that was deleted, None if no call has had the name."""
    journal = current_journal(store, experiment)
    if (claim := read_sealed(store, UnnamedCall, journal.unnamed_call, JournalCorrupt)) is not None:
        return claim.call
    return "" if journal.generation > 1 else None


def current_generation(store: ObjectStore, experiment: str) -> Generation:
    """Return the generation that a name has now. One listing."""
    folder = _markers(experiment)
    return max((1, *(number_in(folder, each.path) or 1 for each in store.list(folder))))


def current_journal(store: ObjectStore, experiment: str) -> JournalKey:
    """Return the key of the journal that an experiment's name means now; the journal may be empty.

    Raises:
        UnknownVersion: the name is that of an experiment of a development version.
    """
    key = JournalKey(experiment=experiment, generation=current_generation(store, experiment))
    if key.generation == 1 and store.size(_first_entry_of_before(experiment)) is not None:
        raise UnknownVersion(
            f"experiment {experiment!r} was written by a development version of prefect-tune, before its first "
            f"release, and is not read: finish it with that version, or delete its folder {experiment}/, or choose "
            "another name"
        )
    return key


def is_deleted(store: ObjectStore, journal: JournalKey) -> bool:
    """Return whether the generation of the journal is over. One listing."""
    return current_generation(store, journal.experiment) > journal.generation


def require_not_deleted(store: ObjectStore, journal: JournalKey) -> None:
    """Raise Superseded if the generation of the journal is over. One listing, and in that case a read."""
    if is_deleted(store, journal):
        by = ""
        with suppress(TuneError):  # it is only told to people, and a later deletion may have deleted it
            if marker := read_sealed(store, GenerationMarker, _marker_path(journal, 1), JournalCorrupt):
                by = f" at {marker.at} by {marker.deleted_by}"
        raise Superseded(f"{journal}: the experiment was deleted{by}. Stop here: its name may be another one's now")


def require_not_of_before(store: ObjectStore, journal: JournalKey, writer: str) -> None:
    """Raise Superseded if `writer` wrote an earlier generation of the name, which was deleted. A read, if there is one.

    Raises:
        JournalCorrupt: the marker of the generation is damaged.
    """
    if writer in _writers_before(store, journal):
        raise Superseded(
            f"{journal}: the experiment that this run wrote was deleted, and the name is free or another one's now. "
            "Stop here, or start the run again"
        )


def _writers_before(store: ObjectStore, journal: JournalKey) -> Sequence[str]:
    if journal.generation == 1:
        return ()
    marker = read_sealed(store, GenerationMarker, _marker_path(journal), JournalCorrupt)
    return marker.writers if marker else ()  # without it the generation is over, too: its journal cannot be opened


def end_generation(store: ObjectStore, journal: JournalKey, *, at: str, by: str, writers: Iterable[str] = ()) -> None:
    """Create the marker after the generation of the journal, unless the generation is over already.

    `by` is the process that deletes it, and `writers` are the identities of the owners that it had.

    Raises:
        CommitUnknown: the target did not say whether it wrote; call again.
        JournalCorrupt: the marker of the generation is damaged.
    """
    if is_deleted(store, journal):
        return
    known = dict.fromkeys((*_writers_before(store, journal), *writers))
    marker = GenerationMarker(generation=journal.generation + 1, at=at, deleted_by=by, writers=tuple(known))
    with suppress(AlreadyExists):  # another deletion of the same generation
        store.create(_marker_path(journal, 1), seal(marker))


def objects_before(store: ObjectStore, experiment: str, generation: Generation) -> Sequence[Listed]:
    """Return the objects of earlier generations of a name, and their markers. Nothing is asked before generation 2."""
    if generation == 1:
        return ()
    return [
        each for each in store.list(valid_name(experiment)) if (_generation_of(each.path) or generation) < generation
    ]


def delete_objects_before(store: ObjectStore, experiment: str, generation: Generation) -> Sequence[Listed]:
    """Delete the `objects_before` a generation that is current or was, and return them; first entries go first."""
    found = objects_before(store, experiment, generation)
    firsts = {JournalKey(experiment=experiment, generation=each).entry_path(1) for each in range(1, generation)}
    for is_first in (True, False):
        if paths := [each.path for each in found if (each.path in firsts) is is_first]:
            store.delete(paths)
    return found


def _generation_of(path: str) -> Generation | None:
    """Return the generation of an experiment's object, or of a marker; None for a foreign file."""
    experiment, _, inner = path.partition("/")
    first, _, rest = inner.partition("/")
    if first == _MARKERS and "/" not in rest:
        return number_in(f"{experiment}/{_MARKERS}", path)
    return int(first) if rest and first.isascii() and first.isdecimal() and not first.startswith("0") else None


_MARKERS = "generations"


def _markers(experiment: str) -> str:
    return f"{valid_name(experiment)}/{_MARKERS}"


def _marker_path(journal: JournalKey, later: int = 0) -> str:
    return numbered(_markers(journal.experiment), journal.generation + later)


def _first_entry_of_before(experiment: str) -> str:
    return numbered(f"{valid_name(experiment)}/journal", 1)


# List the experiments on a target.


def experiment_names(store: ObjectStore) -> Sequence[str]:
    """Return the names of the experiments on `store`, sorted."""
    return names_among(each.path for each in store.list(""))


def names_among(paths: Iterable[str]) -> Sequence[str]:
    """Return the names of the experiments of a target with these objects: the folders with a journal's first entry.

    Those of a development version are among them: to open one is refused.
    """
    listed = set(paths)
    names = []
    for name, generation in sorted(_generations_among(listed).items()):
        with suppress(InvalidInput):  # a foreign folder: its name is no valid experiment name
            current = JournalKey(experiment=name, generation=generation).entry_path(1)
            if current in listed or _first_entry_of_before(name) in listed:
                names.append(name)
    return names


def _generations_among(paths: Iterable[str]) -> dict[str, Generation]:
    """Return the current generation of each folder."""
    found: dict[str, Generation] = {}
    for path in paths:
        name, _, inner = path.partition("/")
        if not inner:
            continue
        found.setdefault(name, 1)
        if inner.startswith(f"{_MARKERS}/"):
            found[name] = max(found[name], _generation_of(path) or 1)
    return found


def names_with_dead_objects(paths: Iterable[str]) -> Sequence[str]:
    """Return the folders of a target with these objects that hold objects before their current generation."""
    listed = set(paths)
    current = _generations_among(listed)
    named = ((path.partition("/")[0], path) for path in listed if "/" in path)
    return sorted({name for name, path in named if (_generation_of(path) or current[name]) < current[name]})


def no_experiment(store: ObjectStore, name: str, uri: str) -> str:
    """Return the message that `store`, at `uri`, has no experiment `name`, with a similar name if there is one."""
    hint = ""
    with suppress(TuneError):  # the listing only helps
        hint = did_you_mean(name, experiment_names(store))
    return f"there is no experiment {name!r} at {uri}{hint}"
