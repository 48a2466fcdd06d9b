"""Each kind of stored document has its own version, and reads documents of older releases."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_tune import core
from prefect_tune.core.errors import CheckpointCorrupt, JournalCorrupt, UnknownVersion
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal import journal
from prefect_tune.core.journal_events import Entry, Owner, Started, TrialAdded
from prefect_tune.core.storage.documents import Document, Upgrade, read_newest, seal, unseal, upgraded
from prefect_tune.core.storage.object_store import Listed
from prefect_tune.core.values import Stamp, canonical_json, digest_of
from tests.core.driver import JOURNAL, NAME
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.memory_store import MemoryStore

KINDS = {
    "prefect-tune/answer": 2,
    "prefect-tune/callback": 1,
    "prefect-tune/checkpoint": 2,
    "prefect-tune/generation": 1,
    "prefect-tune/unnamed-call": 1,
    "prefect-tune/journal": 4,
    "prefect-tune/live-status": 1,
    "prefect-tune/metadata": 1,
    "prefect-tune/node-address": 1,
    "prefect-tune/part": 1,
    "prefect-tune/post": 1,
    "prefect-tune/snapshot": 1,
    "prefect-tune/stop-request": 2,
}
"""All kinds of documents on a target, and their versions. A version that is raised is raised here too."""
ROOMS = ("src", "blocks", "tasks", "flows")


def kinds() -> Iterator[type[Document]]:
    """Yield the document classes of the package, without subclasses that tests define."""
    for module in walk_packages(core.__path__, f"{core.__name__}."):
        import_module(module.name)
    import_module("prefect_tune.monitoring.callback_runner")
    return (each for each in subclasses(Document) if each.__module__.startswith("prefect_tune."))


def subclasses(kind: type[Document]) -> Iterator[type[Document]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_kind_of_document_is_there_once_and_has_its_own_version() -> None:
    found = [(each.model_fields["format"].default, each.current_version) for each in kinds()]
    assert sorted(found) == sorted(KINDS.items())


def test_every_format_that_the_source_names_is_a_kind_of_document() -> None:
    root = Path(__file__).parents[3]
    sources = [path.read_text() for room in ROOMS for path in (root / room).rglob("*.py")]
    named = [name for source in sources for name in re.findall(r'format: \w+\["([^"]+)"\]', source)]
    named.remove("prefect-tune-torch-distributed")  # a file in a checkpoint, and no document on the target
    assert sorted(named) == sorted(KINDS)


# ------------------------------------------------------------------------------------- a kind of three versions


class First(Document):
    format: Literal["test/lap"] = "test/lap"
    version: Literal[1] = 1
    seconds: int
    runner: str | None = None


def in_milliseconds(body: dict[str, Any]) -> dict[str, Any]:
    body["milliseconds"] = 1000 * body.pop("seconds")
    return body


def with_runners(body: dict[str, Any]) -> dict[str, Any]:
    runner = body.pop("runner")
    return {**body, "runners": [runner] if runner else []}


class Second(Document):
    format: Literal["test/lap"] = "test/lap"
    version: Literal[2] = 2
    upgrades: ClassVar[Mapping[int, Upgrade]] = {1: in_milliseconds}
    milliseconds: int
    runner: str | None = None


class Third(Document):
    format: Literal["test/lap"] = "test/lap"
    version: Literal[3] = 3
    upgrades: ClassVar[Mapping[int, Upgrade]] = {1: in_milliseconds, 2: with_runners}
    milliseconds: int
    runners: tuple[str, ...] = ()


class OnlyNewer(Third):
    """Reads no documents of version 1."""

    upgrades: ClassVar[Mapping[int, Upgrade]] = {2: with_runners}


LAP = First(seconds=2, runner="ada")


def resealed(document: Document, **changes: object) -> bytes:
    """Return the document with `changes` (`...` removes a field) and a valid digest."""
    body = {**document.model_dump(mode="json"), **changes}
    body = {name: value for name, value in body.items() if value is not ...}
    return canonical_json({**body, "digest_of_document": digest_of(canonical_json(body))})


def read(data: bytes, kind: type[Document] = Third) -> Document:
    return unseal(kind, data, "here", CheckpointCorrupt)


@given(seconds=st.integers(), runner=st.none() | st.text(min_size=1))
def test_a_document_reads_the_same_however_many_releases_upgrade_it(seconds: int, runner: str | None) -> None:
    first = First(seconds=seconds, runner=runner)
    second, third = read(seal(first), Second), read(seal(first))
    assert second == Second(milliseconds=1000 * seconds, runner=runner)
    assert third == Third(milliseconds=1000 * seconds, runners=(runner,) if runner else ())
    assert read(seal(second)) == read(seal(third)) == third


@given(seconds=st.integers(), runner=st.none() | st.text(min_size=1))
def test_upgrading_twice_is_upgrading_once(seconds: int, runner: str | None) -> None:
    old = First(seconds=seconds, runner=runner).model_dump(mode="json")
    new = upgraded(Third, old, "here", CheckpointCorrupt)
    assert new["version"] == 3
    assert upgraded(Third, dict(new), "here", CheckpointCorrupt) == new


@pytest.mark.parametrize("old", [LAP, Second(milliseconds=5)])
def test_an_old_document_with_a_field_that_its_release_did_not_write_is_refused(old: Document) -> None:
    with pytest.raises(CheckpointCorrupt, match="here: extra: Extra inputs are not permitted"):
        read(resealed(old, extra=1))


@pytest.mark.parametrize("changes", [{"seconds": ...}, {"seconds": None}, {"seconds": "two"}, {"runner": ...}])
def test_an_old_document_that_no_release_wrote_is_damaged(changes: dict[str, object]) -> None:
    with pytest.raises(CheckpointCorrupt, match="here: "):
        read(resealed(LAP, **changes))


def test_an_altered_old_document_is_damaged_and_no_step_sees_it() -> None:
    with pytest.raises(CheckpointCorrupt, match="torn or altered"):
        read(seal(LAP).replace(b'"seconds":2', b'"seconds":"two"'))


@pytest.mark.parametrize("version", [..., None, 0, -1, "1", True, 1.0, [1]])
def test_a_document_that_does_not_say_its_version_is_damaged(version: object) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"here: version: expected a number from 1 to 3, found "):
        read(resealed(LAP, version=version))


@pytest.mark.parametrize(
    "data", [resealed(LAP, version=4), resealed(LAP, version=4, seconds={}), b'{"version":4,"sealed":"otherwise"}']
)
def test_a_newer_document_is_refused_with_what_to_do_however_it_is_sealed(data: bytes) -> None:
    expected = "here: test/lap of version 4; this prefect-tune reads versions 1 to 3. Written by a newer prefect-tune"
    with pytest.raises(UnknownVersion, match=f"^{re.escape(expected)}: upgrade prefect-tune$"):
        read(data)


def test_a_document_that_is_too_old_is_refused_with_what_to_do() -> None:
    expected = (
        "here: test/lap of version 1; this prefect-tune reads versions 2 to 3. Read it with the older prefect-tune"
    )
    with pytest.raises(UnknownVersion, match=f"^{re.escape(expected)} that wrote it$"):
        read(seal(LAP), OnlyNewer)
    assert read(seal(Second(milliseconds=5)), OnlyNewer) == OnlyNewer(milliseconds=5)


@pytest.mark.parametrize("versions", [(1,), (3,), (2, 3), (1, 2, 3)])
def test_a_kind_that_lacks_a_step_or_has_one_too_many_cannot_be_defined(versions: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match=r"Wrong: expected upgrades of versions \["):
        type("Wrong", (Third,), {"upgrades": dict.fromkeys(versions, with_runners), "__module__": __name__})


# ------------------------------------------------------------------------------------- in a journal


class NewEntry(Entry):
    """An entry as a later release may write it: `at` is called `written_at`."""

    version: int = Entry.current_version + 1  # type: ignore[assignment]  # what a release raises
    upgrades: ClassVar[Mapping[int, Upgrade]] = {
        **Entry.upgrades,
        Entry.current_version: lambda body: {**body, "written_at": body["at"]},
    }
    written_at: str = "now"


def appended(store: MemoryStore, number: int) -> Experiment:
    """Open the journal, and add a trial."""
    owner, stamp = Owner(name="o", host="h", pid=1), Stamp(write_id=f"w{number}", at="then")
    state = journal.take_over(store, first_generation(NAME), owner, stamp, side_by_side=map)
    added = [TrialAdded(trial=f"t{number}", config={}), Started(trial=f"t{number}", attempt=1, from_step=0)]
    return journal.append(store, state, added, stamp)


def test_a_journal_of_two_versions_is_one_history_and_nothing_in_it_is_rewritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    old = appended(store, 1)
    written = dict(store.objects)

    monkeypatch.setattr(journal, "Entry", NewEntry)
    monkeypatch.setattr(journal, "Entry", NewEntry)
    assert journal.load(store, first_generation(NAME), side_by_side=map) == old
    new = appended(store, 2)

    assert written.items() <= store.objects.items()
    versions = [json.loads(store.objects[JOURNAL.entry_path(number)])["version"] for number in (1, 2, 3, 4)]
    assert versions == [Entry.current_version] * 2 + [NewEntry.current_version] * 2
    assert journal.load(store, first_generation(NAME), side_by_side=map) == new
    assert list(new.trials) == ["t1", "t2"]
    times = [
        each.written_at
        for each in journal.history(store, first_generation(NAME), side_by_side=map)
        if isinstance(each, NewEntry)
    ]
    assert times == ["then", "then", "now", "now"]


def test_a_listing_that_keeps_naming_a_document_that_is_gone_ends_with_an_error() -> None:
    class StaleListing(MemoryStore):
        def list(self, prefix: str, *, after: str = "") -> list[Listed]:
            del after
            return [Listed(f"{prefix}/{3:010d}.json", 1)]

    with pytest.raises(JournalCorrupt, match="a document that is gone"):
        read_newest(StaleListing(), Entry, "folder", JournalCorrupt)
